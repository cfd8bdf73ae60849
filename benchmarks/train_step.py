"""Speed and memory of a whole DiT-S/2 training step, against the same network built from diffusers and from timm.

    python -m benchmarks.train_step --tokens 256,1024 --rounds 5

Every network takes the same float32 step: forward, mean squared error, backward, total gradient norm, clipping, fused
AdamW, gradients set to None. In a round each network takes one step, and the order rotates from round to round, so that
a drift of the machine's speed touches all alike. Figures are medians over the rounds.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from math import isqrt
from pathlib import Path

import torch
from diffusers import DiTTransformer2DModel
from timm.layers import Mlp, PatchEmbed
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.machine import OneLineParser, machine, own_peak_memory
from dit_vca.backbones import DiT
from dit_vca.backbones.layers import LabelEmbedder, TimestepEmbedder, sincos_position_embedding
from dit_vca.files import write_text
from dit_vca.presets import SIZES

BATCH_SIZE = {256: 8, 1024: 2}  # images a step, by tokens; 1 elsewhere
PATCH_SIZE, CHANNELS, NUM_CLASSES, NUM_TIMES = 2, 4, 1000, 1000


class TimmBlock(nn.Module):
    """The adaLN-Zero block of DiT (Peebles and Xie 2023) from timm's attention and MLP."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attn = Attention(dim, num_heads=num_heads, qkv_bias=True)
        self.mlp = Mlp(dim, 4 * dim, act_layer=lambda: nn.GELU(approximate="tanh"))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).unsqueeze(1).chunk(6, dim=-1)  # (B, 1, dim) each
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class TimmDiT(nn.Module):
    """DiT from timm's parts; the conditioning's embedders and the position table are this project's."""

    def __init__(self, side: int, *, dim: int, depth: int, num_heads: int):
        super().__init__()
        self.patches = PatchEmbed(side, PATCH_SIZE, CHANNELS, dim)
        self.t_embedder = TimestepEmbedder(dim)
        self.y_embedder = LabelEmbedder(NUM_CLASSES, dim)
        self.register_buffer("pos_embed", sincos_position_embedding(dim, self.patches.grid_size))
        self.blocks = nn.ModuleList(TimmBlock(dim, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.head = nn.Linear(dim, PATCH_SIZE**2 * 2 * CHANNELS)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        c = self.t_embedder(t) + self.y_embedder(y)
        tokens = self.patches(x) + self.pos_embed
        for block in self.blocks:
            tokens = block(tokens, c)
        shift, scale = self.modulation(c).unsqueeze(1).chunk(2, dim=-1)
        out = self.head(self.norm(tokens) * (1 + scale) + shift)
        (h, w), p = self.patches.grid_size, PATCH_SIZE
        return out.reshape(-1, h, w, p, p, 2 * CHANNELS).permute(0, 5, 1, 3, 2, 4).reshape(-1, 2 * CHANNELS, h * p, w * p)


class DiffusersDiT(nn.Module):
    """diffusers' DiTTransformer2DModel under this project's signature."""

    def __init__(self, side: int, *, dim: int, depth: int, num_heads: int):
        super().__init__()
        self.network = DiTTransformer2DModel(
            num_layers=depth, num_attention_heads=num_heads, attention_head_dim=dim // num_heads, patch_size=PATCH_SIZE,
            sample_size=side, in_channels=CHANNELS, out_channels=2 * CHANNELS, norm_type="ada_norm_zero",
            num_embeds_ada_norm=NUM_CLASSES,
        )  # fmt: skip

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return self.network(x, timestep=t.long(), class_labels=y, return_dict=False)[0]


OURS, PEERS = ("softmax", "vca"), {"diffusers": DiffusersDiT, "timm": TimmDiT}
NETWORKS = (*OURS, *PEERS)


def build(name: str, side: int, size: dict[str, int]) -> nn.Module:
    """One of NETWORKS for latents of `side` x `side`; this project's attention has its default options."""
    if name in PEERS:
        return PEERS[name](side, **size)
    common = {"patch_size": PATCH_SIZE, "in_channels": CHANNELS, "num_classes": NUM_CLASSES, "learn_sigma": True}
    return DiT(input_size=side, attention=name, **common, **size)


class TrainStep:
    """A network, its optimizer and one batch; a call takes a training step and returns its seconds.

    Matrices are drawn from N(0, 0.02) in every network, so that none is timed with the zero gradients of adaLN-Zero.
    """

    def __init__(self, name: str, tokens: int, batch_size: int, size: dict[str, int], device: torch.device | str):
        side = PATCH_SIZE * isqrt(tokens)
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.network = build(name, side, size).to(self.device)
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        for parameter in self.parameters:
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, weight_decay=0.0, fused=True)
        self.x = torch.randn(batch_size, CHANNELS, side, side, device=self.device)
        self.goal = torch.randn(batch_size, 2 * CHANNELS, side, side, device=self.device)
        self.t = torch.randint(NUM_TIMES, (batch_size,), device=self.device).float()
        self.y = torch.randint(NUM_CLASSES, (batch_size,), device=self.device)

    def __call__(self) -> float:
        self._wait()
        started = time.perf_counter()
        nn.functional.mse_loss(self.network(self.x, self.t, self.y), self.goal).backward()
        norm = get_total_norm([p.grad for p in self.parameters])
        clip_grads_with_norm_(self.parameters, 1.0, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(
    tokens: int,
    *,
    batch: int,
    networks: Sequence[str] = NETWORKS,
    rounds: int = 7,
    warmup: int = 2,
    size: dict[str, int] | None = None,
    device: str = "cpu",
) -> dict:
    """Interleaved steps of `networks` on `tokens` tokens (a square), with `size` by default DiT-S's.

    Returns tokens, batch, networks {name: seconds (one a round, in order), seconds_median, images_per_s} and the ratios
    of images per second that can be formed; a ratio above 1 means that the first is faster.
    """
    steps = {name: TrainStep(name, tokens, batch, size or SIZES["s"], device) for name in networks}
    seconds = {name: [] for name in networks}
    for number in range(warmup + rounds):
        turn = number % len(networks)
        for name in (*networks[turn:], *networks[:turn]):
            taken = steps[name]()
            if number >= warmup:
                seconds[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    figures = {n: {"seconds": seconds[n], "seconds_median": m, "images_per_s": batch / m} for n, m in medians.items()}
    speed = {name: entry["images_per_s"] for name, entry in figures.items()}
    peers = [speed[name] for name in PEERS if name in speed]
    ratios = {f"{name} / faster peer": speed[name] / max(peers) for name in OURS if name in speed and peers}
    if {"softmax", "vca"} <= speed.keys():
        ratios["vca / softmax"] = speed["vca"] / speed["softmax"]
    return {"tokens": tokens, "batch": batch, "networks": figures, "ratios": ratios}


def peak_memory(name: str, tokens: int, *, threads: int, device: str = "cpu") -> int:
    """Bytes at the peak of a fresh process that takes two steps; on a CPU with the interpreter and all imports in them."""
    options = {"peak-of": name, "tokens": tokens, "threads": threads, "device": device}
    command = [sys.executable, "-m", "benchmarks.train_step", *(f"--{key}={value}" for key, value in options.items())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # the package may not be installed
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)


def table(result: dict) -> str:
    """The lines of one size."""
    lines = [f"{result['tokens']} tokens, batch {result['batch']}"]
    for name, entry in result["networks"].items():
        memory = f"  {entry['peak_bytes'] / 2**20:7.0f} MiB" if "peak_bytes" in entry else ""
        lines.append(f"  {name:10}{entry['seconds_median']:9.3f} s/step {entry['images_per_s']:9.3f} images/s{memory}")
    return "\n".join([*lines, *(f"  {name}: {value:.3f}" for name, value in result["ratios"].items())])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Checked arguments; a mistake ends the process with one line and exit code 2."""
    parser = OneLineParser("benchmarks.train_step", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", default="256,1024,4096", help="numbers of tokens, each a square")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="the networks to time, of %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each network")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/train_step.json"))
    parser.add_argument("--peak-of", choices=NETWORKS, help=argparse.SUPPRESS)  # two steps, then the peak: peak_memory's child
    given = parser.parse_args(argv)
    if unusable := set(given.tokens.split(",")) - {str(n * n) for n in range(1, 257)}:
        parser.error(f"--tokens takes squares up to 65536 separated by commas, got {min(unusable)!r}")
    if unknown := set(given.networks.split(",")) - set(NETWORKS):
        parser.error(f"--networks takes {', '.join(NETWORKS)}, got {min(unknown)!r}")
    for option, least in (("rounds", 1), ("warmup", 0), ("threads", 1)):
        if getattr(given, option) < least:
            parser.error(f"--{option} must be at least {least}, got {getattr(given, option)}")
    if given.device != "cpu" and not (given.device.startswith("cuda") and torch.cuda.is_available()):
        parser.error(f"--device must be cpu, or cuda where torch finds one; got {given.device!r}")
    given.tokens, given.networks = [int(count) for count in given.tokens.split(",")], given.networks.split(",")
    return given


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    torch.set_num_threads(given.threads)
    if given.peak_of:
        step = TrainStep(given.peak_of, given.tokens[0], BATCH_SIZE.get(given.tokens[0], 1), SIZES["s"], given.device)
        step(), step()
        print(own_peak_memory(given.device))
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(given.device),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "diffusers", "timm")},
        "settings": {"network": "DiT-S/2", "dtype": "float32", "size": SIZES["s"]}
        | {name: getattr(given, name) for name in ("device", "threads", "warmup", "rounds")},
        "results": [],
    }
    for tokens in given.tokens:
        settings = {name: getattr(given, name) for name in ("networks", "rounds", "warmup", "device")}
        result = measure(tokens, batch=BATCH_SIZE.get(tokens, 1), **settings)
        if not given.no_memory:
            for name, entry in result["networks"].items():
                entry["peak_bytes"] = peak_memory(name, tokens, threads=given.threads, device=given.device)
        record["results"].append(result)
        write_text(given.out, json.dumps(record, indent=1) + "\n")  # after each size, so that a long run can be cut short
        print(table(result), flush=True)
    print(given.out)


if __name__ == "__main__":
    main()
