"""Parameters and operations of networks, beside those the VCA paper prints; memory and time of each attention against N."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from .attention import ATTENTION, QKVAttention, build_attention
from .config import Config
from .presets import preset
from .runs import build_network

# What a network takes from its data: latents of the embedded VAE, and of Stable Diffusion's (an eighth of the image).
EMBEDDED_DATA = {"input_size": 16, "in_channels": 4, "num_classes": 10}
IMAGENET = {"in_channels": 4, "num_classes": 1000}
LATENT_FACTOR = 8

# The generation rows of the VCA paper: millions of parameters, and FLOPs in G, which are multiply-accumulates.
TABLE_2 = {  # size: baseline, +Ours
    "S/8": ((33.0, 0.4), (33.8, 0.4)), "S/4": ((32.9, 1.4), (33.6, 1.5)), "S/2": ((33.0, 6.1), (33.6, 6.0)),
    "B/8": ((130.7, 1.4), (132.1, 1.5)), "B/4": ((130.4, 5.6), (131.8, 5.8)), "B/2": ((130.5, 23.0), (131.8, 22.9)),
}  # fmt: skip
TABLES_3_AND_4 = {  # of DiT-S/2; row: attention, printed
    "Table 3, Ours / Vani.": ("vca-ours-vani", 33.6, 5.9), "Table 3, Vani. / Ours": ("vca-vani-ours", 33.6, 5.9),
    "Table 3, Diff. / Diff.": ("vca-diff-diff", 33.0, 5.8), "Table 3, Ours / Ours": ("vca", 33.6, 6.0),
    "Table 4, Emb. / Emb.": ("vca-emb-emb", 33.6, 6.0), "Table 4, Pool / Pool+Emb.": ("vca-pool-poolemb", 33.3, 6.0),
    "Table 4, Pool+Emb. / Pool": ("vca-poolemb-pool", 33.3, 6.0), "Table 4, Pool+Emb. / Pool+Emb.": ("vca", 33.6, 6.0),
}  # fmt: skip
MISPRINT = "Table 2, SiT-S/8 +Ours", 33.0  # it repeats its baseline; the same network is 33.8 as DiT-S/8 +Ours


@dataclass(frozen=True)
class Row:
    """`macs`: multiply-accumulates of one image. `paper_params` (a count) and `paper_gmacs`: None where nothing is printed."""

    row: str
    params: int
    macs: int
    paper_params: int | None = None
    paper_gmacs: float | None = None


def complexity_of(config: Config, row: str, **paper: float | None) -> Row:
    """The row of a preset's network."""
    facts = (
        EMBEDDED_DATA if config.data.image_size is None else IMAGENET | {"input_size": config.data.image_size // LATENT_FACTOR}
    )
    with torch.device("meta"):  # no memory for weights
        network = build_network(replace(config, model=replace(config.model, **facts)))
    return Row(row, sum(p.numel() for p in network.parameters()), network.macs(), **paper)


def paper_rows() -> list[Row]:
    """Every generation row of Tables 2, 3 and 4. The baselines of Table 2 have C outputs, all others 2C (counts tell)."""
    rows = []
    for family in ("DiT", "SiT"):
        for size, (baseline, ours) in TABLE_2.items():
            name = f"{family}-{size}"
            config = preset(f"{name.lower().replace('/', '')}-softmax")
            plain = replace(config, model=replace(config.model, learn_sigma=False))
            rows.append(_row(plain, f"Table 2, {name}", baseline))
            row = f"Table 2, {name} +Ours"
            printed = (MISPRINT[1], ours[1]) if row == MISPRINT[0] else ours
            rows.append(_row(preset(f"{name.lower().replace('/', '')}-vca"), row, printed))
    for row, (attention, *printed) in TABLES_3_AND_4.items():
        rows.append(_row(preset(f"dit-s2-{attention}"), row, printed))
    return rows


def _row(config: Config, row: str, printed: Sequence[float]) -> Row:
    return complexity_of(config, row, paper_params=round(printed[0] * 1e6), paper_gmacs=printed[1])


def table(rows: Sequence[Row]) -> str:
    """Markdown: what is counted, what the paper prints, and the difference."""
    lines = ["| row | parameters (M) | paper | difference | GMACs | paper | difference |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        cells = [r.row]
        for value, printed in ((r.params / 1e6, _millions(r.paper_params)), (r.macs / 1e9, r.paper_gmacs)):
            cells += [f"{value:.3f}", *(("", "") if printed is None else (f"{printed:.1f}", f"{value - printed:+.3f}"))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _millions(count: int | None) -> float | None:
    return None if count is None else count / 1e6


@dataclass(frozen=True)
class Scale:
    """One attention module at one number of tokens, with a batch of one: `seconds` of forward and backward, the median."""

    attention: str
    tokens: int
    macs: int
    activation_bytes: int
    seconds: float


def scale(
    names: Sequence[str], tokens: Sequence[int], *, dim: int = 384, num_heads: int = 6, rounds: int = 5, device: str = "cpu"
) -> list[Scale]:
    """Every attention at every number of tokens (squares), DiT-S's width by default; rounds interleave the kinds.

    Activations are what autograd keeps for the backward pass, the module's own parameters not counted.
    """
    found = []
    for count in tokens:
        modules = {name: _module(name, count, dim, num_heads, device) for name in names}
        x = torch.randn(1, count, dim, device=device, requires_grad=True)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds + 1):
            for name, module in modules.items():
                taken = _timed(module, x)
                if number:  # the first warms up
                    seconds[name].append(taken)
        found += [
            Scale(name, count, module.macs(count), _activation_bytes(module, x), statistics.median(seconds[name]))
            for name, module in modules.items()
        ]
    return found


def check_scale(names: Sequence[str], tokens: Sequence[int]) -> None:
    """ValueError for a name that is no attention, or a number of tokens that is no square."""
    for name in names:
        if name not in ATTENTION:
            raise ValueError(f"unknown attention {name!r}; there is {', '.join(ATTENTION)}")
    for count in tokens:
        if not 1 <= count <= 2**16 or isqrt(count) ** 2 != count:
            raise ValueError(f"numbers of tokens must be squares up to 65536, such as 256,1024,4096; got {count}")


def scale_table(found: Sequence[Scale]) -> str:
    """Markdown, and for each kind the smallest of these numbers of tokens from which on it was faster than softmax."""
    lines = ["| attention | tokens | MMACs | activations (MiB) | forward and backward (ms) |", "|---|---|---|---|---|"]
    for s in found:
        cells = f"{s.macs / 1e6:.1f} | {s.activation_bytes / 2**20:.1f} | {1e3 * s.seconds:.2f}"
        lines.append(f"| {s.attention} | {s.tokens} | {cells} |")
    seconds = {(s.attention, s.tokens): s.seconds for s in found}
    tokens = sorted({s.tokens for s in found})
    for name in dict.fromkeys(s.attention for s in found):
        if name == "softmax" or ("softmax", tokens[0]) not in seconds:
            continue
        faster = [n for n in tokens if all(seconds[name, m] < seconds["softmax", m] for m in tokens if m >= n)]
        lines.append(f"\n{name}: " + (f"faster than softmax from {faster[0]} tokens on" if faster else "not faster than softmax"))
    return "\n".join(lines) + "\n"


def as_json(items: Sequence[Row] | Sequence[Scale]) -> list[dict[str, Any]]:
    """Rows as plain data."""
    return [asdict(item) for item in items]


def _module(name: str, num_tokens: int, dim: int, num_heads: int, device: str) -> QKVAttention:
    torch.manual_seed(0)
    module = build_attention(name, dim, num_heads, layer=0, depth=1, num_tokens=num_tokens, options={})
    return module.to(device)


def _grid(x: Tensor) -> tuple[int, int]:
    return isqrt(x.shape[1]), isqrt(x.shape[1])


def _timed(module: nn.Module, x: Tensor) -> float:
    _wait(x)
    started = time.perf_counter()
    module(x, _grid(x)).sum().backward()
    _wait(x)
    return time.perf_counter() - started


def _activation_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps, without parameters, buffers and the input."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers(), x)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x, _grid(x))  # alive, so that no storage is used twice
    del out
    return sum(kept.values())


def _wait(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
