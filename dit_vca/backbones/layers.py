"""The parts of a diffusion transformer. Attribute names are DiT's, so that published weights load strictly."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

NORM_EPS = 1e-6


class PatchEmbed(nn.Module):
    """Non-overlapping patches to tokens in row order; a strided convolution's weights, applied as one matrix product."""

    def __init__(self, patch_size: int, in_channels: int, dim: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, H * W / patch_size^2, dim)."""
        p = self.patch_size
        patches = x.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 2, 4, 1, 3, 5)  # (B, h, w, C, p, p)
        return linear(patches.flatten(3).flatten(1, 2), self.proj.weight.flatten(1), self.proj.bias)


def unpatchify(tokens: Tensor, grid: tuple[int, int], patch_size: int) -> Tensor:
    """(B, h * w, patch_size^2 * C), channel fastest -> (B, C, h * patch_size, w * patch_size)."""
    (h, w), p = grid, patch_size
    x = tokens.unflatten(2, (p, p, -1)).unflatten(1, (h, w)).permute(0, 5, 1, 3, 2, 4)  # (B, C, h, p, w, p)
    return x.flatten(4, 5).flatten(2, 3)


class TimestepEmbedder(nn.Module):
    """A sinusoid of what the network is fed for a time, then an MLP. The sinusoid is computed in float32.

    Frequency k of 128 is 10000^(-k/128) with `time_freqs` dit (DiT, SiT), and 10000^(-k/127) with diffusers, whose DiT
    reaches 1/10000 with the last one.
    """

    NUM_FREQUENCIES = 128
    MAX_PERIOD = 10000
    DIVISORS: ClassVar = {"dit": NUM_FREQUENCIES, "diffusers": NUM_FREQUENCIES - 1}

    def __init__(self, dim: int, time_freqs: str = "dit"):
        super().__init__()
        if time_freqs not in self.DIVISORS:
            raise ValueError(f"model.time_freqs must be one of {', '.join(self.DIVISORS)}, got {time_freqs!r}")
        self.divisor = self.DIVISORS[time_freqs]
        self.mlp = nn.Sequential(nn.Linear(2 * self.NUM_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, model_time: Tensor) -> Tensor:
        """(B,) -> (B, dim)."""
        # not a buffer: a network cast to bfloat16 would round it
        k = torch.arange(self.NUM_FREQUENCIES, dtype=torch.float32, device=model_time.device)
        angles = model_time.float()[:, None] * torch.exp(-math.log(self.MAX_PERIOD) * k / self.divisor)
        sinusoid = torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
        return self.mlp(sinusoid.to(self.mlp[0].weight.dtype))


class LabelEmbedder(nn.Module):
    """A table of num_classes + 1 rows; the last one is the null class of classifier-free guidance."""

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, dim)

    def forward(self, y: Tensor) -> Tensor:
        """(B,) int64 -> (B, dim)."""
        return self.embedding_table(y)


class Mlp(nn.Module):
    """Linear, GELU (tanh form, as DiT's), Linear."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Modulation(nn.Sequential):
    """SiLU and a zero-initialised Linear from the conditioning to `count` vectors of the width (adaLN-Zero, DiT Section 3.2)."""

    def __init__(self, dim: int, count: int):
        super().__init__(nn.SiLU(), nn.Linear(dim, count * dim))
        self.count = count

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        """(B, dim) -> `count` tensors (B, 1, dim)."""
        return super().forward(c)[:, None].chunk(self.count, dim=-1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without affine parameters, then (1 + scale) x + shift."""
    return torch.addcmul(shift, layer_norm(x, x.shape[-1:], eps=NORM_EPS), 1 + scale)


def sincos_position_embedding(dim: int, grid: tuple[int, int]) -> Tensor:
    """The fixed 2-D sine-cosine embedding of MAE and DiT, (1, h * w, dim) float32.

    The first half of the channels encodes the column, the second the row; in each half sines come before cosines.
    """
    if dim % 4:
        raise ValueError(f"model.dim must be divisible by 4 for the position embedding, got {dim}")
    frequencies = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    rows, columns = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    halves = []
    for coordinate in (columns, rows):
        angles = coordinate.reshape(-1, 1) * frequencies
        halves += [torch.sin(angles), torch.cos(angles)]
    return torch.cat(halves, dim=1).float()[None]
