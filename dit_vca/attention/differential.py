"""Differential attention (Ye et al. 2024, "Differential Transformer")."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from .base import QKVAttention
from .streams import ATTENTION_STAGE, Streams, softmax_stream

RMS_EPS = 1e-5  # the paper's


class DifferentialAttention(QKVAttention):
    """Each head holds two halves of queries and keys; the second map, times a learned lambda, is taken from the first.

    (1 - lambda_init) RMSNorm((softmax(q1 k1' / sqrt(d/2)) - lambda softmax(q2 k2' / sqrt(d/2))) v), the norm over a
    head's d values. Equal to timm's DiffAttention with the same weights.
    """

    def __init__(self, dim: int, num_heads: int, *, layer: int = 0, qkv_bias: bool = True, depthwise: int = 0):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        check_halves(self.head_dim)
        self.lambda_init = lambda_init(layer)
        self.lambda1 = nn.Parameter(torch.empty(4, self.head_dim // 2))  # rows: q1, k1, q2, k2
        self.rms1 = nn.Parameter(torch.ones(self.head_dim))
        nn.init.normal_(self.lambda1, std=0.1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, bias: Tensor | None = None) -> Tensor:
        positive, negative = self.branches(q, k, v, bias=bias)
        out = positive - learned_lambda(self.lambda1, self.lambda_init) * negative
        return (1 - self.lambda_init) * rms_norm(out, self.rms1.shape, self.rms1, RMS_EPS)

    def branches(self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the two maps read of v, each (B, heads, N, head_dim): two calls of torch's fused kernels.

        Halves are filled up with zeros to the width of v, because the fused kernels ask for equal widths; without them
        torch keeps whole maps.
        """
        half = self.head_dim // 2
        halves = zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True)
        padded = ((pad(a, (0, half)), pad(b, (0, half))) for a, b in halves)
        return tuple(scaled_dot_product_attention(a, b, v, attn_mask=bias, scale=half**-0.5) for a, b in padded)

    def two_streams(self, x: Tensor, grid: tuple[int, int], *, kv: Tensor | None = None) -> tuple[Streams, ...]:
        """What the two maps are and read, before lambda and norm, with the maps written out."""
        q, k, v = (self._split_heads(tokens) for tokens in self._project(x, kv))
        halves = zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True)
        lam = learned_lambda(self.lambda1, self.lambda_init).expand(self.num_heads)
        return (Streams(ATTENTION_STAGE, *(softmax_stream(a, b, v) for a, b in halves), lam),)

    def mix_macs(self, num_tokens: int) -> int:
        return 3 * num_tokens**2 * self.dim  # each of two maps reads v

    def extra_repr(self) -> str:
        return f"layer={self.layer}"


def check_halves(head_dim: int) -> None:
    """ValueError if a head cannot be split in two."""
    if head_dim % 2:
        raise ValueError(f"differential attention halves each head; its width model.dim / model.num_heads is odd: {head_dim}")


def lambda_init(layer: int) -> float:
    """0.8 - 0.6 exp(-0.3 layer), layer counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def learned_lambda(vectors: Tensor, init: float) -> Tensor:
    """exp(q1 . k1) - exp(q2 . k2) + init, a scalar in float32 or wider; `vectors` (4, d) has rows q1, k1, q2, k2."""
    with torch.autocast(vectors.device.type, enabled=False):
        q1, k1, q2, k2 = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + init


def difference_of_maps(logits: Tensor, lam: Tensor) -> Tensor:
    """(..., 2, M) -> (..., M): the first softmax over M less lambda times the second."""
    first, second = logits.softmax(-1).unbind(-2)
    return first - lam * second
