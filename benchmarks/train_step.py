"""Images per second of a whole DiT-S/2 training step: this project's softmax and VCA, diffusers, and a timm-attention DiT.

Every network takes the same step in float32: forward, mean squared error, backward, clipping, fused AdamW. The steps of
all networks are interleaved, and medians are reported, so that a drift of the machine's speed touches all alike.
"""

import argparse
import json
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dit_vca.backbones import DiT
from dit_vca.backbones.layers import sincos_position_embedding
from dit_vca.presets import SIZES

BATCH = {256: 8, 1024: 2, 4096: 1}
PEERS = ("diffusers", "timm")
NETWORKS = ("softmax", "vca", *PEERS)


class TimmBlock(nn.Module):
    """The adaLN-Zero block of DiT from timm's attention and MLP, the modulation written as its formula."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        from timm.layers import Mlp
        from timm.models.vision_transformer import Attention

        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attn = Attention(dim, num_heads=num_heads, qkv_bias=True)
        self.mlp = Mlp(dim, 4 * dim, act_layer=lambda: nn.GELU(approximate="tanh"))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class TimmDiT(nn.Module):
    """A DiT of the same size around TimmBlock; it shares the embedders, not the blocks, with this project's."""

    def __init__(self, side: int, dim: int, depth: int, num_heads: int):
        super().__init__()
        self.frame = DiT(
            input_size=side,
            patch_size=2,
            in_channels=4,
            dim=dim,
            depth=0,
            num_heads=num_heads,
            num_classes=1000,
            learn_sigma=True,
        )
        self.frame.pos_embed.data = sincos_position_embedding(dim, self.frame.grid)
        self.patches = nn.Conv2d(4, dim, 2, stride=2)
        self.blocks = nn.ModuleList(TimmBlock(dim, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.linear = nn.Linear(dim, 32)
        del self.frame.x_embedder, self.frame.final_layer

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        c = self.frame.t_embedder(t) + self.frame.y_embedder(y)
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.frame.pos_embed
        for block in self.blocks:
            tokens = block(tokens, c)
        shift, scale = self.modulation(c).unsqueeze(1).chunk(2, dim=-1)
        out = self.linear(self.norm(tokens) * (1 + scale) + shift)
        h, w = self.frame.grid
        return out.reshape(len(x), h, w, 2, 2, 8).permute(0, 5, 1, 3, 2, 4).reshape(len(x), 8, 2 * h, 2 * w)


class DiffusersDiT(nn.Module):
    """diffusers' DiTTransformer2DModel behind the same signature."""

    def __init__(self, side: int, dim: int, depth: int, num_heads: int):
        super().__init__()
        from diffusers import DiTTransformer2DModel

        self.network = DiTTransformer2DModel(
            num_attention_heads=num_heads, attention_head_dim=dim // num_heads, in_channels=4, out_channels=8,
            num_layers=depth, sample_size=side, patch_size=2, num_embeds_ada_norm=1000,
        )  # fmt: skip

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return self.network(x, timestep=t.long(), class_labels=y, return_dict=False)[0]


def build(name: str, side: int, size: dict[str, int]) -> nn.Module:
    """One of NETWORKS for latents of `side` x `side`."""
    if name in PEERS:
        return {"diffusers": DiffusersDiT, "timm": TimmDiT}[name](side, **size)
    return DiT(input_size=side, patch_size=2, in_channels=4, num_classes=1000, learn_sigma=True, attention=name, **size)


class Step:
    """One network, its optimizer, and a batch; calling it takes a training step and returns its seconds."""

    def __init__(self, name: str, tokens: int, batch: int, size: dict[str, int], device: torch.device):
        side = 2 * int(tokens**0.5)
        torch.manual_seed(0)
        self.device = device
        self.network = build(name, side, size).to(device)
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
        self.x = torch.randn(batch, 4, side, side, device=device)
        self.t = torch.randint(0, 1000, (batch,), device=device).float()
        self.y = torch.randint(0, 1000, (batch,), device=device)

    def __call__(self) -> float:
        self._wait()
        started = time.perf_counter()
        (self.network(self.x, self.t, self.y) ** 2).mean().backward()
        norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        clip_grads_with_norm_(self.parameters, 1.0, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(tokens: int, *, batch: int, names=NETWORKS, rounds: int = 7, warmup: int = 2, size=None, device="cpu") -> dict:
    """{network: {"seconds": [...], "images_per_s": median}} of interleaved steps, and the ratios that matter."""
    steps = {name: Step(name, tokens, batch, size or SIZES["s"], torch.device(device)) for name in names}
    seconds = {name: [] for name in names}
    for round_number in range(warmup + rounds):
        turn = round_number % len(names)
        for name in (*names[turn:], *names[:turn]):
            taken = steps[name]()
            if round_number >= warmup:
                seconds[name].append(taken)
    found = {n: {"seconds": s, "images_per_s": batch / statistics.median(s)} for n, s in seconds.items()}
    speed = {name: entry["images_per_s"] for name, entry in found.items()}
    peers = [speed[name] for name in PEERS if name in speed]
    ratios = {}
    if peers and "softmax" in speed:
        ratios["softmax / faster peer"] = speed["softmax"] / max(peers)
    if "vca" in speed and "softmax" in speed:
        ratios["vca / softmax"] = speed["vca"] / speed["softmax"]
    return {"tokens": tokens, "batch": batch, "networks": found, "ratios": ratios}


def peak_memory(name: str, tokens: int, batch: int, threads: int) -> int:
    """Bytes of the largest resident set of a fresh process that takes two steps."""
    command = [sys.executable, "-m", "benchmarks.train_step", "--memory-of", name, str(tokens), str(batch), str(threads)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _peak_resident_bytes() -> int:
    """This process's largest resident set. On Linux from VmHWM: ru_maxrss of a child begins at its parent's peak."""
    status = Path("/proc/self/status")
    if status.is_file():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="256,1024,4096", help="token counts, squares of even numbers")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--out", default="benchmarks/results/train_step.json")
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.memory_of:
        name, tokens, batch, threads = arguments.memory_of
        torch.set_num_threads(int(threads))
        step = Step(name, int(tokens), int(batch), SIZES["s"], torch.device("cpu"))
        step(), step()
        print(_peak_resident_bytes())
        return
    names = tuple(arguments.networks.split(","))
    if unknown := set(names) - set(NETWORKS):
        parser.error(f"unknown network {', '.join(unknown)}; there is {', '.join(NETWORKS)}")
    torch.set_num_threads(arguments.threads)
    results = []
    for tokens in map(int, arguments.tokens.split(",")):
        result = measure(tokens, batch=BATCH.get(tokens, 1), names=names, rounds=arguments.rounds, device=arguments.device)
        if not arguments.no_memory and arguments.device == "cpu":
            for name in names:
                result["networks"][name]["peak_bytes"] = peak_memory(name, tokens, result["batch"], arguments.threads)
        results.append(result)
        for name, entry in result["networks"].items():
            memory = f", {entry['peak_bytes'] / 2**20:6.0f} MiB" if "peak_bytes" in entry else ""
            print(f"{tokens:5} tokens, batch {result['batch']}: {name:9} {entry['images_per_s']:7.3f} images/s{memory}")
        print("      " + ", ".join(f"{name} {value:.3f}" for name, value in result["ratios"].items()))
    machine = {"processor": platform.processor() or platform.machine(), "threads": arguments.threads, "device": arguments.device}
    versions = {name: version(name) for name in ("torch", "diffusers", "timm")}
    record = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "versions": versions, "size": "DiT-S/2", "results": results}
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1))
    print(out)


if __name__ == "__main__":
    main()
