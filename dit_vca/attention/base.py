"""What every attention shares: the projections, the head split, and an optional depthwise convolution on the values."""

import torch
from torch import Tensor, nn


class QKVAttention(nn.Module):
    """B sequences of P prefix tokens followed by an H x W grid in row order, N = P + H * W.

    `layer` is the 0-based index of the block in the whole network. `depthwise` is the kernel size of a depthwise
    convolution of the patch tokens' values that is added to the heads before `proj`; 0 means none. A subclass states
    its own options as keyword arguments with defaults and usually overrides `mix` alone.
    """

    def __init__(self, dim: int, num_heads: int, *, layer: int = 0, qkv_bias: bool = True, depthwise: int = 0):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"model.dim {dim} is not divisible by model.num_heads {num_heads}")
        if depthwise < 0 or (depthwise and depthwise % 2 == 0):
            raise ValueError(f"attention option depthwise must be 0 or an odd kernel size, got {depthwise}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.layer = layer
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.dwc = nn.Conv2d(dim, dim, depthwise, padding=depthwise // 2, groups=dim) if depthwise else None

    def forward(self, x: Tensor, grid: tuple[int, int], *, kv: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """(B, N, dim) -> (B, N, dim). `kv` (B, M, dim): keys and values come from these tokens instead of x."""
        q, k, v = self._project(x, kv)
        heads = self.mix(*(self._split_heads(tokens) for tokens in (q, k, v)), grid, bias=bias)
        out = heads.transpose(1, 2).flatten(2)  # (B, N, dim), head-major
        if self.dwc is not None:
            out = self._add_depthwise(out, v, grid)
        return self.proj(out)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, bias: Tensor | None = None) -> Tensor:
        """q (B, heads, N, head_dim), k and v (B, heads, M, head_dim) -> (B, heads, N, head_dim).

        `bias` (1 or B, heads, N, M) is added to the logits, -inf masks. A kind that cannot honour it raises.
        """
        raise NotImplementedError

    def _project(self, x: Tensor, kv: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if kv is None:
            return self.qkv(x).chunk(3, dim=-1)
        q_weight, kv_weight = self.qkv.weight.split([x.shape[-1], 2 * x.shape[-1]])
        q_bias, kv_bias = (None, None) if self.qkv.bias is None else self.qkv.bias.split([x.shape[-1], 2 * x.shape[-1]])
        return (
            nn.functional.linear(x, q_weight, q_bias),
            *nn.functional.linear(kv, kv_weight, kv_bias).chunk(2, dim=-1),
        )

    def _split_heads(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # a view (B, heads, N, head_dim)

    def _add_depthwise(self, out: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        if v.shape[1] != out.shape[1]:
            raise ValueError("a depthwise convolution on the values needs values on the grid of the queries; got kv")
        patches = grid[0] * grid[1]
        image = v[:, -patches:].unflatten(1, grid).permute(0, 3, 1, 2)  # (B, dim, H, W) in channels-last memory
        local = self.dwc(image).permute(0, 2, 3, 1).flatten(1, 2)  # (B, H*W, dim)
        if patches == out.shape[1]:
            return out + local
        return torch.cat([out[:, :-patches], out[:, -patches:] + local], dim=1)  # prefix tokens get no convolution


def check_grid(num_tokens: int, grid: tuple[int, int]) -> int:
    """The number of prefix tokens of a sequence; raises if the sequence is shorter than the grid."""
    prefix = num_tokens - grid[0] * grid[1]
    if prefix < 0:
        raise ValueError(f"{num_tokens} tokens cannot hold a grid of {grid[0]} x {grid[1]}")
    return prefix
