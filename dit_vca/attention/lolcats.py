"""LoLCATS' mixed attention (Zhang et al. 2024): softmax in a window around each token, linear attention beyond it."""

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from .base import QKVAttention, refuse_bias, refuse_other_tokens
from .linear import EPS, HedgehogMap

FACTOR_LOGIT = -2.1972246  # sigmoid: 0.1


class LolcatsAttention(QKVAttention):
    """One quotient of two sums: of factor exp(q k' / sqrt(d) - c) over the window, of Hedgehog features elsewhere.

    The window is a square of `window` x `window` patches around each patch, cut off at the border (the paper's is a
    text's, behind each token); c is the largest logit of the window. The factor, one a head, is learned. Prefix tokens
    are outside every window, and have none. With a window over the whole grid it is softmax attention, with 0 Hedgehog.
    """

    def __init__(self, dim: int, num_heads: int, *, layer: int = 0, qkv_bias: bool = True, depthwise: int = 0, window: int = 3):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        if window < 0 or (window and window % 2 == 0):
            raise ValueError(f"attention option window must be 0 or odd, got {window}")
        self.window = window
        self.map_q = HedgehogMap(num_heads, self.head_dim)
        self.map_k = HedgehogMap(num_heads, self.head_dim)
        self.factor_logit = nn.Parameter(torch.full((num_heads,), FACTOR_LOGIT), requires_grad=window > 0)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, bias: Tensor | None = None) -> Tensor:
        refuse_bias(bias, "LoLCATS", "it is linear beyond its window")
        refuse_other_tokens(q, k, "LoLCATS")
        with torch.autocast(q.device.type, enabled=False):
            wide = torch.promote_types(q.dtype, torch.float32)
            return self._mix(q.to(wide), k.to(wide), v.to(wide), grid).to(v.dtype)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        phi_q, phi_k = self.map_q(q), self.map_k(k)
        numerator = phi_q @ (phi_k.transpose(-2, -1) @ v)  # (B, heads, N, d)
        denominator = phi_q @ phi_k.sum(-2).unsqueeze(-1)
        if self.window:
            prefix = q.shape[2] - grid[0] * grid[1]
            near_k, near_v, near_phi = (neighbours(x[:, :, prefix:], grid, self.window) for x in (k, v, phi_k))
            outside = neighbours(torch.ones_like(k[:1, :1, prefix:, :1]), grid, self.window)[..., 0] == 0  # (1, 1, N, w^2)
            logits = torch.einsum("bhnd,bhnwd->bhnw", q[:, :, prefix:], near_k) * q.shape[-1] ** -0.5
            logits = logits.masked_fill(outside, -torch.inf)
            factor = self.factor_logit.to(q.dtype).sigmoid()[:, None, None]
            weights = factor * torch.exp(logits - logits.amax(-1, keepdim=True))
            weights = weights - torch.einsum("bhnf,bhnwf->bhnw", phi_q[:, :, prefix:], near_phi)  # which is in the sums above
            local = torch.einsum("bhnw,bhnwd->bhnd", weights, near_v)
            numerator = torch.cat([numerator[:, :, :prefix], numerator[:, :, prefix:] + local], dim=2)
            total = weights.sum(-1, keepdim=True)
            denominator = torch.cat([denominator[:, :, :prefix], denominator[:, :, prefix:] + total], dim=2)
        return numerator / (denominator + EPS)

    def mix_macs(self, num_tokens: int) -> int:
        linear = 2 * num_tokens * 2 * self.head_dim * self.dim + 2 * num_tokens * self.dim * self.head_dim
        return linear + num_tokens * self.window**2 * self.dim * 4  # logits, features (twice as wide), values

    def extra_repr(self) -> str:
        return f"window={self.window}"


def neighbours(x: Tensor, grid: tuple[int, int], window: int) -> Tensor:
    """(B, heads, H * W, d) -> (B, heads, H * W, window^2, d): the patches around each, zero beyond the border."""
    image = x.transpose(2, 3).flatten(0, 1).unflatten(2, grid)  # (B * heads, d, H, W)
    patches = unfold(image, window, padding=window // 2)  # (B * heads, d * window^2, H * W)
    return patches.unflatten(1, (x.shape[-1], -1)).permute(0, 3, 2, 1).unflatten(0, x.shape[:2])
