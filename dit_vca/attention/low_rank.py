"""Softmax attention through a small set of keys: Nystromformer's landmarks and Linformer's projections."""

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool1d, scaled_dot_product_attention

from .base import QKVAttention, at_least, refuse_bias, refuse_other_tokens


class NystromAttention(QKVAttention):
    """softmax(q k~') pinv(softmax(q~ k~')) softmax(q~ k') v with m landmarks q~, k~ (Xiong et al. 2021, Nystromformer).

    Landmarks are means of m consecutive segments of the tokens in row order (overlapping where m does not divide their
    number). With at least as many landmarks as tokens it is softmax attention. Options: `landmarks`, m; `iterations`, of
    the pseudo-inverse. The original's one-dimensional convolution on the values is `depthwise` here.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        layer: int = 0,
        qkv_bias: bool = True,
        depthwise: int = 0,
        landmarks: int = 64,
        iterations: int = 6,
    ):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        self.landmarks = int(at_least("landmarks", landmarks, 1))
        self.iterations = int(at_least("iterations", iterations, 1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, bias: Tensor | None = None) -> Tensor:
        refuse_bias(bias, "Nystromformer", "its landmarks stand for many tokens")
        if self.landmarks >= max(q.shape[2], k.shape[2]):
            return scaled_dot_product_attention(q, k, v)
        landmark_q, landmark_k = (segment_means(x, self.landmarks) for x in (q, k))
        with torch.autocast(q.device.type, enabled=False):
            wide = torch.promote_types(q.dtype, torch.float32)
            scale = q.shape[-1] ** -0.5
            kernel = (landmark_q.to(wide) * scale @ landmark_k.to(wide).transpose(-2, -1)).softmax(-1)
            inverse = pseudo_inverse(kernel, self.iterations)  # (B, heads, m, m)
            values = inverse @ scaled_dot_product_attention(landmark_q, k, v).to(wide)
        return scaled_dot_product_attention(q, landmark_k, values.to(v.dtype))

    def mix_macs(self, num_tokens: int) -> int:
        if self.landmarks >= num_tokens:
            return 2 * num_tokens**2 * self.dim
        m = self.landmarks
        inverse = self.num_heads * 4 * self.iterations * m**3
        return 4 * num_tokens * m * self.dim + 2 * m**2 * self.dim + inverse

    def extra_repr(self) -> str:
        return f"landmarks={self.landmarks}, iterations={self.iterations}"


def segment_means(x: Tensor, num_segments: int) -> Tensor:
    """(B, heads, N, d) -> (B, heads, num_segments, d)."""
    if x.shape[2] % num_segments == 0:
        return x.unflatten(2, (num_segments, -1)).mean(3)
    pooled = adaptive_avg_pool1d(x.transpose(2, 3).flatten(0, 1), num_segments)  # (B * heads, d, m)
    return pooled.unflatten(0, x.shape[:2]).transpose(2, 3)


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse of (..., m, m) by the iteration of Razavi et al. 2014, as Nystromformer's Eq. 11.

    The start is scaled for each matrix, so that the rows of a batch do not depend on each other.
    """
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    largest_row, largest_column = (a.abs().sum(d).amax(-1)[..., None, None] for d in (-1, -2))
    z = a.transpose(-2, -1) / (largest_row * largest_column)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az))) / 4
    return z


class LinformerAttention(QKVAttention):
    """softmax(q (E k)' / sqrt(d)) F v with learned E, F (rank x N), shared by the heads (Wang et al. 2020).

    E and F have a column for each token, so the network is tied to its number of tokens. Option `rank`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_tokens: int | None,
        layer: int = 0,
        qkv_bias: bool = True,
        depthwise: int = 0,
        rank: int = 32,
    ):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        if num_tokens is None:
            raise ValueError("linformer needs the number of tokens of the network")
        self.rank = int(at_least("rank", rank, 1))
        self.project_k = nn.Parameter(torch.empty(rank, num_tokens))
        self.project_v = nn.Parameter(torch.empty(rank, num_tokens))
        for projection in (self.project_k, self.project_v):
            nn.init.xavier_uniform_(projection)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, bias: Tensor | None = None) -> Tensor:
        refuse_bias(bias, "Linformer", "its keys stand for many tokens")
        refuse_other_tokens(q, k, "Linformer")
        if k.shape[2] != self.project_k.shape[1]:
            raise ValueError(f"linformer was made for {self.project_k.shape[1]} tokens, got {k.shape[2]}")
        return scaled_dot_product_attention(q, self.project_k @ k, self.project_v @ v)

    def mix_macs(self, num_tokens: int) -> int:
        return 4 * num_tokens * self.rank * self.dim

    def extra_repr(self) -> str:
        return f"rank={self.rank}"
