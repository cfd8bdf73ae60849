"""Looking inside a trained model: what the two streams of its attentions are to each other, layer by layer and over t.

Sources are sections of the DnA paper ("Denoising Attention") unless another is named; docs/diagnose.md says what each
figure means and what it does not show. In shapes, N are queries, M keys, d the values a head.
"""

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize, one_hot

from samplers.noise import normal

from .attention.streams import ATTENTION_STAGE, STAGE_2, Stream, Streams, check_streams, record
from .config import Config, to_dict
from .data.latents import LatentShards, PositionOrder
from .data.prepare import prepare_shards
from .files import sha256_of_file, write_text
from .objectives import Objective
from .processes import start_processes
from .progress import progress
from .runs import Weights, open_model
from .vae import Codec, codec_of, latent_from_stored

TOP_K, EPS = 10, 0.5  # of intruder dimensions: cos(pi / 3), Section 4.4
TOP_SHARE = 0.1  # of the rows, for the highest entropies; the paper does not say its share
TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)
NULL_DRAWS = 16
BLOCK = "block"  # the stage under which figures of the tokens after a block stand

# The plots: their figures, one panel each, and what the axis says.
PLOTS = {
    "intruders": (("intruders",), "intruder dimensions"),
    "branch_cosine": (("branch_cosine",), "cosine of O+ and O-"),
    "value_similarity": (("value_similarity",), "C(V+, V-)"),
    "principal_angle": (("principal_angle", "smallest_principal_angle"), "angle of V+ and V- (degrees)"),
    "head_redundancy": (("head_redundancy_positive", "head_redundancy_negative"), "mean 1 - cos of two heads' maps"),
    "entropy": (("entropy_positive", "entropy_negative"), "entropy of a row (nats)"),
    "entropy_top": (("entropy_top_positive", "entropy_top_negative"), "highest entropies of rows (nats)"),
    "token_separation": (("token_separation",), "mean 1 - cos of two tokens"),
    "drift": (("drift",), "1 - cos to the smallest t"),
}
OF_VALUES = ("value_similarity", "principal_angle")  # nothing to plot where both streams read the same values


@dataclass(frozen=True)
class Intruders:
    """How intruder dimensions are counted: `against` the other branch's "top" k singular vectors, or "all" of them."""

    k: int = TOP_K
    eps: float = EPS
    against: str = "top"

    def __post_init__(self):
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")
        if not 0 < self.eps <= 1:
            raise ValueError(f"eps must be above 0 and at most 1, got {self.eps}")
        if self.against not in ("top", "all"):
            raise ValueError(f"against must be top or all, got {self.against!r}")


def intruder_dimensions(o_pos: Tensor, o_neg: Tensor, rule: Intruders = Intruders()) -> Tensor:
    """Intruder dimensions (Section 4.4): O+ and O- (..., N, d) -> counts (...) int64 in 0..min(k, N, d).

    Of the top k left singular vectors u-_j of O-, those with max_i |<u+_i, u-_j>| < eps.
    """
    u_pos, u_neg = (torch.linalg.svd(o.double(), full_matrices=False).U for o in (o_pos, o_neg))
    if rule.against == "top":
        u_pos = u_pos[..., : rule.k]
    nearest = (u_pos.mT @ u_neg[..., : rule.k]).abs().amax(-2)  # (..., k)
    return (nearest < rule.eps).sum(-1)


def branch_cosine(o_pos: Tensor, o_neg: Tensor) -> Tensor:
    """cos(vec O+, vec O-) (Section 4.4): (..., N, d) twice -> (...)."""
    return cosine_similarity(o_pos.flatten(-2).double(), o_neg.flatten(-2).double(), dim=-1)


def value_similarity(v_pos: Tensor, v_neg: Tensor) -> Tensor:
    """C(V+, V-) = <V+, V->_F / (|V+|_F |V-|_F) in [-1, 1] (Theorem 3.3): (..., M, d) twice -> (...)."""
    return branch_cosine(v_pos, v_neg)


def principal_angles(v_pos: Tensor, v_neg: Tensor) -> Tensor:
    """Angles between the column spaces of V+ and V- (Björck and Golub 1973; Theorem 3.2), in degrees, rising.

    (..., M, d) twice -> (..., min(M, d)): QR, then the singular values of Q+' Q- are the cosines.
    """
    q_pos, q_neg = (torch.linalg.qr(v.double()).Q for v in (v_pos, v_neg))
    cosines = torch.linalg.svdvals(q_pos.mT @ q_neg).clamp(max=1)
    return torch.rad2deg(torch.arccos(cosines))


def head_redundancy(weights: Tensor) -> Tensor:
    """Mean over pairs of heads of 1 - cos(vec P_i, vec P_j) (Section C.5): maps (B, heads, N, M) -> (B,).

    As the paper has it: 0 means that all heads draw one map. Needs two heads or more.
    """
    directions = normalize(weights.flatten(-2).double(), dim=-1)
    return 1 - _mean_of_pairs(directions @ directions.mT)


def row_entropy(weights: Tensor) -> Tensor:
    """Entropy of each row in nats (Section C.5), at most log M: maps (..., N, M) -> (..., N)."""
    return torch.special.entr(weights.double().clamp(min=0)).sum(-1)  # a sum of features may round below zero


def highest_mean(entropies: Tensor, share: float = TOP_SHARE) -> Tensor:
    """The mean of the highest `share` of the entropies, one at least (Section C.5): (..., N) -> (...)."""
    return entropies.topk(math.ceil(share * entropies.shape[-1]), dim=-1).values.mean(-1)


def token_separation(tokens: Tensor) -> Tensor:
    """Mean over pairs of tokens of 1 - cos (Section 4.5, "representational robustness"): (B, N, dim) -> (B,).

    Each token is centred over its features.
    """
    directions = _centred_directions(tokens)
    return 1 - _mean_of_pairs(directions @ directions.mT)


def drift(tokens: Tensor, clean: Tensor) -> Tensor:
    """Mean over tokens of 1 - cos to the same token of the cleaner input, centred as above: (B, N, dim) twice -> (B,)."""
    return 1 - (_centred_directions(tokens) * _centred_directions(clean)).sum(-1).mean(-1)


def _centred_directions(tokens: Tensor) -> Tensor:
    tokens = tokens.double()
    return normalize(tokens - tokens.mean(-1, keepdim=True), dim=-1)


def _mean_of_pairs(products: Tensor) -> Tensor:
    """(B, n, n) -> (B,): the mean off the diagonal."""
    n = products.shape[-1]
    return (products.sum((-2, -1)) - products.diagonal(dim1=-2, dim2=-1).sum(-1)) / (n * (n - 1))


def stream_figures(streams: Streams, rule: Intruders = Intruders()) -> dict[str, Tensor]:
    """All figures of one stage, each (B, heads), or (B, 1) where heads are compared; intruder_histogram (B, k + 1)."""
    found = {}
    for name, stream in streams.branches.items():
        entropies = row_entropy(stream.map)
        found |= {f"entropy_{name}": entropies.mean(-1), f"entropy_top_{name}": highest_mean(entropies)}
        if stream.map.shape[1] > 1:
            found[f"head_redundancy_{name}"] = head_redundancy(stream.map)[:, None]
    if streams.negative is not None:
        p, m = streams.positive, streams.negative
        counts = intruder_dimensions(p.output, m.output, rule)
        angles = principal_angles(p.values, m.values)
        found |= {
            "intruders": counts.double(), "intruder_histogram": one_hot(counts, rule.k + 1).sum(1).double(),
            "branch_cosine": branch_cosine(p.output, m.output), "value_similarity": value_similarity(p.values, m.values),
            "principal_angle": angles.mean(-1), "smallest_principal_angle": angles[..., 0],
        }  # fmt: skip
    return found


def token_figures(tokens: Tensor, clean: Tensor) -> dict[str, Tensor]:
    """Figures of the tokens after a block, and after it at the smallest t, each (B, 1)."""
    separation = {"token_separation": token_separation(tokens)[:, None]} if tokens.shape[1] > 1 else {}
    return separation | {"drift": drift(tokens, clean)[:, None]}


def independent_streams(like: Streams, generator: torch.Generator) -> Streams:
    """Streams of one image with the shapes of `like` that have nothing to do with each other.

    Outputs and values are standard Gaussians, maps the softmax of standard Gaussian logits.
    """

    def gaussian(tensor: Tensor) -> Tensor:
        return torch.randn(1, *tensor.shape[1:], generator=generator)

    branches = [
        Stream(gaussian(stream.output), gaussian(stream.map).softmax(-1), gaussian(stream.values))
        for stream in like.branches.values()
    ]
    return Streams(like.stage, *branches)


def null_of_streams(like: Streams, rule: Intruders = Intruders(), *, seed: int = 0) -> dict[str, dict[str, Any]]:
    """The figures of independent streams of these shapes: mean and standard deviation over 16 draws and all heads."""
    generator = torch.Generator().manual_seed(seed)
    return _null([stream_figures(independent_streams(like, generator), rule) for _ in range(NULL_DRAWS)])


def null_of_tokens(like: Tensor, *, seed: int = 0) -> dict[str, dict[str, Any]]:
    """The figures of independent Gaussian tokens of this shape (B, N, dim), over 16 draws."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [[torch.randn(1, *like.shape[1:], generator=generator) for _ in range(2)] for _ in range(NULL_DRAWS)]
    return _null([token_figures(tokens, clean) for tokens, clean in pairs])


def _null(draws: Sequence[dict[str, Tensor]]) -> dict[str, dict[str, Any]]:
    together = {name: torch.cat([draw[name] for draw in draws]) for name in draws[0]}
    return {
        name: {"shares": _shares(values.sum(0))}
        if name == "intruder_histogram"
        else {"mean": float(values.mean()), "std": float(values.std(correction=0))}
        for name, values in together.items()
    }


def _shares(counts: Tensor) -> list[float]:
    return (counts / counts.sum()).tolist()


@dataclass(frozen=True)
class Reduced:
    """What is kept of one stage of one layer for a batch: figures, weight, maps for pictures, and its shapes."""

    figures: dict[str, Tensor]
    weight: Tensor | None
    maps: Tensor  # (pictured images, queries, H * W), the mean over heads
    shapes: Streams  # of one image, on the meta device
    shared_values: bool  # both branches read the same

    @classmethod
    def of(cls, stages: tuple[Streams, ...], rule: Intruders, grid: tuple[int, int], pictured: int) -> "dict[str, Reduced]":
        """Reduce the stages of one attention; maps of the first `pictured` images."""
        return {
            s.stage: cls(
                {name: value.sum(0).cpu() for name, value in stream_figures(s, rule).items()},
                None if s.weight is None else s.weight.double().cpu(),
                grid_maps(s, grid)[:pictured].float().cpu(),
                Streams(s.stage, *map(_shapes_of, s.branches.values())),
                s.negative is not None and torch.equal(s.positive.values, s.negative.values),
            )
            for s in stages
        }


def _shapes_of(stream: Stream) -> Stream:
    return Stream(*(z[:1].to("meta") for z in (stream.output, stream.map, stream.values)))


def grid_maps(streams: Streams, grid: tuple[int, int]) -> Tensor:
    """P - weight M over the patches for a few queries, mean over heads: (B, at most 6, H * W).

    Queries are patches, or VCA's contrast tokens: in its stage II, what each patch reads of them.
    """
    signed = streams.signed_map.mean(1)  # (B, N, M)
    if streams.stage == STAGE_2:
        signed = signed.mT
    patches = grid[0] * grid[1]
    of_patches = streams.stage == ATTENTION_STAGE
    queries = signed[:, -patches:] if of_patches else signed
    return queries[:, lattice(grid if of_patches else contrast_grid(streams)), :][..., -patches:]


def contrast_grid(streams: Streams) -> tuple[int, int]:
    """The square of VCA's contrast tokens: queries of stage I, keys of stage II."""
    side = math.isqrt(streams.positive.map.shape[-1 if streams.stage == STAGE_2 else -2])
    return side, side


def lattice(grid: tuple[int, int]) -> list[int]:
    """Six places in two rows of three, fewer on a small grid: their numbers in row order."""
    rows, columns = grid
    return sorted({int(rows * r / 4) * columns + int(columns * c / 6) for r in (1, 3) for c in (1, 3, 5)})


@dataclass(frozen=True)
class Request:
    """What is measured: images of the data, at which times, and how."""

    num: int
    times: tuple[float, ...]  # rising
    null_labels: bool
    seed: int
    rule: Intruders
    pictures: int  # of the first images
    batch: int

    def __post_init__(self):
        for name, least in (("num", 1), ("batch", 1), ("seed", 0), ("pictures", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.times or len(set(self.times)) < len(self.times) or not all(0 <= t <= 1 for t in self.times):
            raise ValueError(f"times must be at least one, all different, from 0 (data) to 1 (noise); got {list(self.times)}")


class Measurement:
    """Sums over images of every figure, by (t, layer, stage); and what of a layer does not depend on the image."""

    def __init__(self):
        self.num = 0  # images, at every time
        self.sums: dict[tuple[float, int, str], dict[str, Tensor]] = defaultdict(dict)
        self.weights: dict[tuple[int, str], Tensor] = {}  # (heads,)
        self.shapes: dict[str, Streams] = {}
        self.shared_values: dict[str, bool] = {}
        self.token_shape: Tensor | None = None
        self.maps: dict[tuple[float, int, str], list[Tensor]] = defaultdict(list)
        self.inputs: dict[float, list[Tensor]] = defaultdict(list)  # x_0 and x_t (pictured, 2, C, h, w), on the host

    def add(
        self, t: float, layers: Sequence[dict[str, Reduced]], tokens: Sequence[Tensor], clean: Sequence[Tensor], inputs: Tensor
    ) -> None:
        """A batch at time t: its stages and tokens by layer, its tokens at the smallest t, and inputs for the pictures."""
        for layer, (stages, after, before) in enumerate(zip(layers, tokens, clean, strict=True)):
            self._add_up(t, layer, BLOCK, {name: value.sum(0).cpu() for name, value in token_figures(after, before).items()})
            for stage, reduced in stages.items():
                self._add_up(t, layer, stage, reduced.figures)
                self.maps[t, layer, stage].append(reduced.maps)
                self.shapes[stage] = reduced.shapes
                self.shared_values[stage] = self.shared_values.get(stage, True) and reduced.shared_values
                if reduced.weight is not None:
                    self.weights[layer, stage] = reduced.weight
        self.inputs[t].append(inputs)
        self.token_shape = tokens[0][:1].to("meta")

    def _add_up(self, t: float, layer: int, stage: str, figures: dict[str, Tensor]) -> None:
        sums = self.sums[t, layer, stage]
        for name, value in figures.items():
            sums[name] = sums.get(name, 0) + value


@torch.inference_mode()
def measure(network: nn.Module, objective: Objective, shards: LatentShards, request: Request) -> Measurement:
    """Run the network on noised latents of the data, a batch at a time, and sum the figures of every layer.

    Images are the first `num` of the order that the seed gives, their noise a function of (seed, image): the same image
    and noise at every t. One layer's maps of a batch are in memory at a time.
    """
    measurement = Measurement()
    indices = PositionOrder(len(shards), request.seed).indices(range(request.num))
    with progress(request.num, "image", "diagnose") as bar:
        for start in range(0, request.num, request.batch):
            chosen = indices[start : start + request.batch]
            x_0, eps, y = _draw_batch(shards, chosen, request.seed)
            y = torch.full_like(y, network.null_class) if request.null_labels else y
            pictured, clean = max(0, request.pictures - start), None
            for t in request.times:
                now = objective.path.coefficients(torch.tensor(t, dtype=torch.float64))
                x_t = float(now.alpha) * x_0 + float(now.sigma) * eps
                stages, tokens = _look(network, objective, x_t, t, y, request.rule, pictured)
                clean = clean or tokens
                measurement.add(t, stages, tokens, clean, torch.stack([x_0, x_t], dim=1)[:pictured])
            measurement.num += len(chosen)
            bar.update(len(chosen))
    return measurement


def _draw_batch(shards: LatentShards, chosen: Sequence[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    latent = shards.manifest.latent
    shape = (latent.channels, latent.size, latent.size)
    stored, y = shards.rows(chosen, [False] * len(chosen))
    x_0 = latent_from_stored(stored, normal(seed, "latent", chosen, shape), latent)
    return x_0, normal(seed, "eps", chosen, shape), y


def _look(network, objective, x_t, t, y, rule, pictured) -> tuple[list[dict[str, Reduced]], list[Tensor]]:
    """One forward pass: the reduced stages of every layer, and the tokens after it."""
    device = next(network.parameters()).device
    keep = partial(Reduced.of, rule=rule, grid=network.grid, pictured=pictured)
    with record(network, keep) as stages, block_outputs(network) as tokens:
        objective.predict(network, x_t.to(device), torch.full((len(y),), t, dtype=torch.float64), y.to(device))
    return list(stages.values()), tokens


@contextmanager
def block_outputs(network: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block, the tokens (B, N, dim) after each of `network.blocks`, in the order of the layers."""
    outputs: list[Tensor] = []
    with ExitStack() as stack:
        for block in network.blocks:
            handle = block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
            stack.callback(handle.remove)
        yield outputs


def report_of(measurement: Measurement, request: Request) -> dict[str, Any]:
    """Means over images, with the null values and limits of each stage: what diagnose.json holds besides its origin."""
    layers = []
    for (t, layer, stage), sums in measurement.sums.items():
        row: dict[str, Any] = {"t": t, "layer": layer, "stage": stage}
        for name, total in sums.items():
            heads = (total / measurement.num).tolist()
            row[name] = (
                total.long().tolist() if name == "intruder_histogram" else {"mean": sum(heads) / len(heads), "heads": heads}
            )
        layers.append(row)
    weights = [
        {"layer": layer, "stage": stage, "mean": float(w.mean()), "std": float(w.std(correction=0)), "min": float(w.min()),
         "max": float(w.max()), "heads": w.tolist()}
        for (layer, stage), w in measurement.weights.items()
    ]  # fmt: skip
    null = {stage: null_of_streams(like, request.rule, seed=request.seed) for stage, like in measurement.shapes.items()}
    null[BLOCK] = null_of_tokens(measurement.token_shape, seed=request.seed)
    limits = {stage: _limits(like, request.rule) for stage, like in measurement.shapes.items()}
    for stage, shared in measurement.shared_values.items():
        limits[stage]["shared_values"] = shared
    return {"layers": layers, "weights": weights, "null": null, "limits": limits}


def _limits(like: Streams, rule: Intruders) -> dict[str, Any]:
    _, heads, queries, keys = like.positive.map.shape
    found = {"heads": heads, "queries": queries, "keys": keys, "largest_entropy": math.log(keys)}
    if like.negative is not None:
        found["largest_intruders"] = min(rule.k, *like.positive.output.shape[-2:])
    return found


def diagnose(
    ckpt: str | Path, out: str | Path, *, num: int = 32, times: Sequence[float] = TIMES, data: str | None = None,
    labels: str = "own", weights: str = "ema", seed: int = 0, k: int = TOP_K, eps: float = EPS, against: str = "top",
    pictures: int = 2, batch: int = 4, vae: str | None = None, device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Measure the attentions of a trained model on noised latents of its data; returns what OUT/diagnose.json holds.

    `data` is other data than the run's, encoded alike. `labels` are the images' own, or "null" (guidance's unconditional
    branch). The first `pictures` images get pictures of their maps, beside the images as the model's VAE decodes them;
    `vae` says where that is now, if it has moved. OUT is written whole or not at all, and must not exist.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already: choose another folder with --out, or remove it")
    if labels not in ("own", "null"):
        raise ValueError(f"labels must be own or null, got {labels!r}")
    request = Request(num, tuple(sorted(times)), labels == "null", seed, Intruders(k, eps, against), pictures, batch)
    state = start_processes(device)
    if state.num_processes > 1:
        raise ValueError(f"diagnose runs in one process, got {state.num_processes}: start it without a launcher")
    network, objective, found = open_model(ckpt, weights)
    model_times = _check(request, network, objective)
    shards = _open_data(found.config, data, state.device)
    if num > len(shards):
        raise ValueError(f"num must be at most {len(shards)}, the number of images in the data; got {num}")
    codec = codec_of(shards.manifest.latent, state.device, vae=vae or found.config.data.latent.vae) if pictures else None
    measurement = measure(network.to(state.device), objective, shards, request)
    made_from = _made_from(found, shards, request) | {"model_times": model_times.tolist(), "device": state.device.type}
    report = {"made_from": made_from} | report_of(measurement, request)
    _write(out, report, measurement, network.grid, codec)
    return report


def _check(request: Request, network: nn.Module, objective: Objective) -> Tensor:
    """What the network is fed at each time; ValueError if it cannot be diagnosed, or not at these times."""
    for block in network.blocks:
        check_streams(block.attn)
    if request.null_labels and network.null_class is None:
        raise ValueError("labels null need a conditional model; this one was trained without classes: leave --labels out")
    model_times = objective.path.model_time(torch.tensor(request.times, dtype=torch.float64))
    if bool((model_times < 0).any()):
        least = 1 / objective.path.num_timesteps
        raise ValueError(
            f"times must be at least {least:g} on path ddpm, whose network never sees the data itself; got {list(request.times)}"
        )
    return model_times


def _open_data(config: Config, name: str | None, device: torch.device) -> LatentShards:
    """The run's own shards, or others; ValueError if they are not encoded as the model's were, or have other classes."""
    own = config.data if name is None else replace(config.data, name=name, flip=False)
    shards = prepare_shards(own, device)
    latent, expected = (replace(x, vae="") for x in (shards.manifest.latent, config.data.latent))  # its folder may have moved
    if latent != expected:
        raise ValueError(f"{own.name} holds other latents than the model was trained on: {latent}, expected {expected}")
    if shards.manifest.class_names != config.data.class_names:
        raise ValueError(
            f"{own.name} has the classes {', '.join(shards.manifest.class_names)}, the model was trained on "
            f"{', '.join(config.data.class_names)}: give data of the same classes with --data"
        )
    return shards


def _made_from(found: Weights, shards: LatentShards, request: Request) -> dict[str, Any]:
    """Everything the figures depend on."""
    from . import __version__

    rule = request.rule
    return {
        "num": request.num, "times": list(request.times), "labels": "null" if request.null_labels else "own",
        "seed": request.seed, "batch": request.batch, "k": rule.k, "eps": rule.eps, "against": rule.against,
        "data": {"folder": str(shards.folder), "manifest_hash": shards.manifest.hash},
        "weights": {"sha256": sha256_of_file(found.path), "step": found.step, "kind": found.kind},
        "config": to_dict(found.config), "versions": {"dit-vca": __version__, "torch": torch.__version__},
    }  # fmt: skip


def _write(out: Path, report: dict[str, Any], measurement: Measurement, grid: tuple[int, int], codec: Codec | None) -> None:
    """The folder, through one beside it that is renamed."""
    partial_folder = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial_folder.mkdir(parents=True)
    try:
        for name, (figures, label) in PLOTS.items():
            plot_over_layers(report, figures, label, partial_folder / f"{name}.png")
        if report["weights"]:
            plot_weights(report["weights"], partial_folder / "weight.png")
        if any("intruder_histogram" in row for row in report["layers"]):
            plot_histograms(report, partial_folder / "intruder_histogram.png")
        draw_maps(measurement, grid, codec, partial_folder)
        write_text(partial_folder / "diagnose.json", json.dumps(report, indent=1))
        partial_folder.rename(out)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def _figure(rows: int, columns: int, *, width: float = 4.2, height: float = 3.4):
    from matplotlib.figure import Figure  # heavy, and needed here alone

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _color(number: int, count: int):
    from matplotlib import colormaps

    return colormaps["viridis"](0.9 * number / max(count - 1, 1))


def plot_over_layers(report: dict[str, Any], figures: Sequence[str], label: str, path: Path) -> None:
    """One panel for each stage and figure, one line for each time, the null value in grey; no file without a figure."""
    found = dict.fromkeys((row["stage"], name) for row in report["layers"] for name in figures if name in row)
    panels = [
        (stage, name) for stage, name in found
        if not (figures[0] in OF_VALUES and report["limits"][stage]["shared_values"])
    ]  # fmt: skip
    if not panels:
        return
    times = report["made_from"]["times"]
    figure, axes = _figure(1, len(panels))
    for panel, (stage, name) in zip(axes[0], panels, strict=True):
        for i, t in enumerate(times):
            line = [(r["layer"], r[name]["mean"]) for r in report["layers"] if (r["t"], r["stage"]) == (t, stage) and name in r]
            panel.plot(*zip(*line, strict=True), marker="o", markersize=4, color=_color(i, len(times)), label=f"t = {t:g}")
        null = report["null"][stage][name]
        panel.axhline(null["mean"], color="grey", linestyle="--", label="independent")
        panel.axhspan(null["mean"] - null["std"], null["mean"] + null["std"], color="grey", alpha=0.15, linewidth=0)
        if name.startswith("entropy"):
            panel.axhline(report["limits"][stage]["largest_entropy"], color="black", linestyle=":", label="uniform")
        _label_layers(panel, [layer for layer, _ in line])
        panel.set_title(_panel_title(stage, name, figures[0]), fontsize="medium")
    axes[0][0].set_ylabel(label)
    axes[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(path, dpi=120)


def _panel_title(stage: str, name: str, first: str) -> str:
    branch = name.rpartition("_")[2] if name.endswith(("_positive", "_negative")) else ""
    kind = "smallest" if name.startswith("smallest") else "mean" if first == "principal_angle" else ""
    return ", ".join(part for part in ("after the block" if stage == BLOCK else stage, branch, kind) if part)


def _label_layers(panel, layers: Sequence[int]) -> None:
    panel.set_xlabel("layer")
    panel.set_xlim(min(layers) - 0.5, max(layers) + 0.5)
    _whole_numbers(panel)
    panel.grid(alpha=0.3)


def _whole_numbers(panel) -> None:
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def plot_weights(weights: Sequence[dict[str, Any]], path: Path) -> None:
    """lambda or -sign alpha by layer: every head a dot, their mean a line."""
    stages = list(dict.fromkeys(w["stage"] for w in weights))
    figure, axes = _figure(1, len(stages))
    for panel, stage in zip(axes[0], stages, strict=True):
        rows = [w for w in weights if w["stage"] == stage]
        panel.plot([w["layer"] for w in rows], [w["mean"] for w in rows], color="tab:blue", label="mean of the heads")
        dots = [(w["layer"], value) for w in rows for value in w["heads"]]
        panel.scatter(*zip(*dots, strict=True), s=12, color="tab:orange", zorder=3, label="a head")
        panel.axhline(0, color="black", linewidth=0.8)
        _label_layers(panel, [w["layer"] for w in rows])
        panel.set_title(stage, fontsize="medium")
    axes[0][0].set_ylabel("weight of the negative branch")
    axes[0][-1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def plot_histograms(report: dict[str, Any], path: Path) -> None:
    """Shares of 0..k intruders over all layers, heads and images: a row for each stage, a column for each time."""
    rows = [row for row in report["layers"] if "intruder_histogram" in row]
    stages, times = list(dict.fromkeys(row["stage"] for row in rows)), report["made_from"]["times"]
    figure, axes = _figure(len(stages), len(times), width=2.8, height=2.6)
    for line, stage in zip(axes, stages, strict=True):
        null = report["null"][stage]["intruder_histogram"]["shares"]
        for panel, t in zip(line, times, strict=True):
            counts = torch.tensor([r["intruder_histogram"] for r in rows if (r["t"], r["stage"]) == (t, stage)]).sum(0)
            panel.bar(range(len(null)), _shares(counts), color="tab:blue", label="measured")
            panel.step(range(len(null)), null, where="mid", color="grey", linestyle="--", label="independent")
            panel.set(title=f"{stage}, t = {t:g}", ylim=(0, 1.05), xlim=(-0.6, len(null) - 0.4))
    for panel in axes[-1]:
        panel.set_xlabel("intruder dimensions")
    for panel in axes.flat:
        _whole_numbers(panel)
    for line in axes:
        line[0].set_ylabel("share")
    axes[0][-1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def draw_maps(measurement: Measurement, grid: tuple[int, int], codec: Codec | None, folder: Path) -> None:
    """maps-imageI-tT-STAGE.png: signed maps of a few queries in up to four layers, and the image they are of."""
    if codec is None:
        return
    layers = sorted({layer for _, layer, _ in measurement.maps})
    shown = [layers[i] for i in sorted({round(x) for x in torch.linspace(0, len(layers) - 1, min(4, len(layers))).tolist()})]
    for t, batches in measurement.inputs.items():
        for image, latents in enumerate(torch.cat(batches)):
            inputs = codec.decode(latents)
            for stage, like in measurement.shapes.items():
                maps = [torch.cat(measurement.maps[t, layer, stage])[image].unflatten(-1, grid) for layer in shown]
                of_queries = grid if stage == ATTENTION_STAGE else contrast_grid(like)
                path = folder / f"maps-image{image}-t{t}-{stage}.png"
                _draw(maps, shown, inputs, of_queries, f"image {image}, t = {t:g}, {stage}", path)


def _draw(
    maps: Sequence[Tensor], layers: Sequence[int], images: Tensor, of_queries: tuple[int, int], title: str, path: Path
) -> None:
    """Maps (queries, H, W) of each layer, a row each with one scale, beside x_0 and x_t decoded, uint8 (2, S, S, 3)."""
    from matplotlib.patches import Rectangle

    figure, axes = _figure(len(layers), 1, width=1.3 * (3 + len(maps[0])), height=1.5)
    for panel, layer, of_layer in zip(axes[:, 0], layers, maps, strict=True):
        largest = float(of_layer.abs().max())
        for i, (weights, query) in enumerate(zip(of_layer, lattice(of_queries), strict=True)):
            left, (row, column) = 2.3 + 1.1 * i, divmod(query, of_queries[1])
            shades = panel.imshow(weights, cmap="RdBu_r", vmin=-largest, vmax=largest, extent=(left, left + 1, 1, 0))
            panel.add_patch(Rectangle((left, 0), 1, 1, fill=False, linewidth=0.8))
            panel.plot(left + (column + 0.5) / of_queries[1], (row + 0.5) / of_queries[0], "kx", markersize=5)
        panel.text(2.25, 0.5, f"layer {layer}", rotation=90, ha="right", va="center", fontsize="small")
        panel.set(xlim=(0, 2.3 + 1.1 * len(of_layer)), ylim=(1.02, -0.02))
        panel.axis("off")
        figure.colorbar(shades, ax=panel, fraction=0.02, pad=0.01)
    for left, image, name in ((0, images[0], "x_0"), (1.05, images[1], "x_t")):
        axes[0, 0].imshow(image, extent=(left, left + 1, 1, 0))
        axes[0, 0].text(left + 0.5, -0.03, name, ha="center", va="bottom", fontsize="small")
    figure.suptitle(f"{title}: P - weight M, mean of heads; x marks the query", fontsize="small")
    figure.savefig(path, dpi=120)
