"""Visual-Contrast Attention (VCA): two streams of pooled contrast tokens, linear in the number of tokens.

Equation numbers are those of the VCA paper. Where it leaves a detail open, the choice here is the one that reproduces
the parameter and operation counts of its Tables 1 to 4; docs/attention.md lists them.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, rms_norm, scaled_dot_product_attention

from .base import QKVAttention, check_grid

RMS_EPS = 1e-5  # Differential Transformer (Ye et al. 2024), which VCA builds on


class VisualContrastAttention(QKVAttention):
    """VCA with n = pool x pool contrast tokens a head, at every size of the token grid.

    Options: `pool`, the side of the contrast grid (8 in the paper's DiT and SiT, 7 in DeiT); `depthwise`, the kernel
    size of the convolution on the values (3; 0 leaves it out); `embedding_std`, of the two learned stream embeddings.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        layer: int = 0,
        qkv_bias: bool = True,
        pool: int = 8,
        depthwise: int = 3,
        embedding_std: float = 0.02,
    ):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        if pool < 1:
            raise ValueError(f"attention option pool must be at least 1, got {pool}")
        if embedding_std < 0:
            raise ValueError(f"attention option embedding_std must not be negative, got {embedding_std}")
        self.pool = pool
        self.lambda_init = lambda_init(layer)
        self.embedding_pos = nn.Parameter(torch.empty(num_heads, pool * pool, self.head_dim))
        self.embedding_neg = nn.Parameter(torch.empty(num_heads, pool * pool, self.head_dim))
        self.lambda1 = nn.Parameter(torch.empty(4, self.head_dim))  # rows: q1, k1, q2, k2
        self.lambda2 = nn.Parameter(torch.empty(4, self.head_dim))
        self.rms1 = nn.Parameter(torch.ones(self.head_dim))
        self.rms2 = nn.Parameter(torch.ones(self.head_dim))
        for embedding in (self.embedding_pos, self.embedding_neg):
            nn.init.trunc_normal_(embedding, std=embedding_std)
        for vectors in (self.lambda1, self.lambda2):
            nn.init.normal_(vectors, std=0.1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            raise ValueError("VCA has no q-k logits that a bias or mask could be added to; use softmax attention")
        if k.shape[2] != q.shape[2]:
            raise ValueError("VCA takes queries, keys and values from the same tokens; kv is not supported")
        return visual_contrast_attention(
            q, k, v, grid,
            contrast_grid=(self.pool, self.pool),
            embeddings=(self.embedding_pos, self.embedding_neg),
            lambdas=(contrast_lambda(self.lambda1, self.lambda_init), contrast_lambda(self.lambda2, self.lambda_init)),
            gains=(self.rms1, self.rms2),
            scale=1 - self.lambda_init,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"pool={self.pool}, layer={self.layer}"


def visual_contrast_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: tuple[int, int],
    *,
    contrast_grid: tuple[int, int],
    embeddings: tuple[Tensor, Tensor],
    lambdas: tuple[Tensor, Tensor],
    gains: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Both stages of VCA: q, k, v (B, heads, N, d) -> (B, heads, N, d).

    embeddings: e+ and e-, each (heads, n, d); lambdas: of stage I and II, each a scalar; gains: RMSNorm's, each (d,);
    scale: 1 - lambda_init.
    """
    pooled = pool_queries(q, grid, contrast_grid)  # (B, heads, n, d)
    streams = torch.cat([pooled + embeddings[0], pooled + embeddings[1]], dim=2)  # t+ then t-: (B, heads, 2n, d)
    v_pos, v_neg = scaled_dot_product_attention(streams, k, v).chunk(2, dim=2)  # Eq. 9, both streams in one pass over k, v
    contrast = scale * rms_norm(v_pos - lambdas[0] * v_neg, gains[0].shape, gains[0], RMS_EPS)  # Eq. 10
    logits = (q / math.sqrt(q.shape[-1])) @ streams.transpose(-2, -1)  # (B, heads, N, 2n)
    map_pos, map_neg = logits.unflatten(-1, (2, -1)).softmax(-1).unbind(-2)  # two softmaxes over n: Eq. 11
    out = (map_pos - lambdas[1] * map_neg) @ contrast  # Eq. 12: the maps are differenced before the values are read
    return scale * rms_norm(out, gains[1].shape, gains[1], RMS_EPS)  # Eq. 13


def pool_queries(q: Tensor, grid: tuple[int, int], contrast_grid: tuple[int, int]) -> Tensor:
    """Adaptive average pooling of the patch tokens' queries: (B, heads, N, d) -> (B, heads, h * w, d).

    Prefix tokens are not pooled. A contrast grid finer than the token grid repeats tokens; one that does not divide it
    has overlapping bins.
    """
    check_grid(q.shape[2], grid)
    (height, width), (rows, columns) = grid, contrast_grid
    image = q[:, :, q.shape[2] - height * width :].unflatten(2, grid)  # (B, heads, H, W, d)
    if height % rows == 0 and width % columns == 0:
        bins = image.unflatten(3, (columns, width // columns)).unflatten(2, (rows, height // rows))
        return bins.mean((3, 5)).flatten(2, 3)
    channels_first = image.permute(0, 1, 4, 2, 3).flatten(0, 1)  # (B * heads, d, H, W)
    pooled = adaptive_avg_pool2d(channels_first, contrast_grid)
    return pooled.unflatten(0, q.shape[:2]).flatten(3).transpose(2, 3)


def lambda_init(layer: int) -> float:
    """0.8 - 0.6 exp(-0.3 layer), layer counted from 0: the Differential Transformer's schedule (Ye et al. 2024)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def contrast_lambda(vectors: Tensor, init: float) -> Tensor:
    """exp(q1 . k1) - exp(q2 . k2) + init, a scalar in float32 or wider; `vectors` (4, d) has rows q1, k1, q2, k2."""
    with torch.autocast(vectors.device.type, enabled=False):
        q1, k1, q2, k2 = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + init
