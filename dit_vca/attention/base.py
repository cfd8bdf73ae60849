"""What every attention shares: the projections, the head split, and an optional depthwise convolution on the values."""

import torch
from torch import Tensor, nn


class QKVAttention(nn.Module):
    """B sequences of P prefix tokens followed by an H x W grid in row order, N = P + H * W.

    `layer` is the 0-based index of the block in the whole network. `depthwise` is the kernel size of a depthwise
    convolution of the patch tokens' values that is added to the heads before `proj`; 0 means none. A subclass states
    its own options as keyword arguments with defaults and usually overrides `mix` and `mix_macs` alone; one whose
    widths are not `dim` gives the width of all queries (or keys) and that of all values.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        layer: int = 0,
        qkv_bias: bool = True,
        depthwise: int = 0,
        widths: tuple[int, int] | None = None,
    ):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"model.dim {dim} is not divisible by model.num_heads {num_heads}")
        if depthwise < 0 or (depthwise and depthwise % 2 == 0):
            raise ValueError(f"attention option depthwise must be 0 or an odd kernel size, got {depthwise}")
        query_width, value_width = widths or (dim, dim)
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = query_width // num_heads
        self.widths = (query_width, query_width, value_width)  # of q, k, v
        self.layer = layer
        self.qkv = nn.Linear(dim, sum(self.widths), bias=qkv_bias)
        self.proj = nn.Linear(value_width, dim)
        self.dwc = (
            nn.Conv2d(value_width, value_width, depthwise, padding=depthwise // 2, groups=value_width) if depthwise else None
        )

    def forward(self, x: Tensor, grid: tuple[int, int], *, kv: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """(B, N, dim) -> (B, N, dim). `kv` (B, M, dim): keys and values come from these tokens instead of x."""
        q, k, v = self._project(x, kv)
        heads = self.mix(*(self._split_heads(tokens) for tokens in (q, k, v)), grid, bias=bias)
        return self._join_heads(heads, v, grid)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, bias: Tensor | None = None) -> Tensor:
        """q (B, heads, N, head_dim), k and v (B, heads, M, head_dim) -> (B, heads, N, head_dim).

        `bias` (1 or B, heads, N, M) is added to the logits, -inf masks. A kind that cannot honour it raises.
        """
        raise NotImplementedError

    def mix_macs(self, num_tokens: int) -> int:
        """Multiply-accumulates of `mix` on one sequence, products of matrices alone."""
        raise NotImplementedError

    def macs(self, num_tokens: int, num_prefix: int = 0) -> int:
        """Multiply-accumulates of the module on one sequence: projections, `mix`, and the depthwise convolution."""
        value_width = self.widths[2]
        local = (num_tokens - num_prefix) * value_width * self.dwc.kernel_size[0] ** 2 if self.dwc else 0
        return num_tokens * self.dim * (sum(self.widths) + value_width) + self.mix_macs(num_tokens) + local

    def start_from_softmax(self) -> None:
        """Set what this kind adds to `qkv` and `proj`, after these were copied from a softmax model; by default nothing."""

    def _project(self, x: Tensor, kv: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if kv is None:
            return self.qkv(x).split(self.widths, dim=-1)
        sizes = [self.widths[0], self.widths[1] + self.widths[2]]
        q_weight, kv_weight = self.qkv.weight.split(sizes)
        q_bias, kv_bias = (None, None) if self.qkv.bias is None else self.qkv.bias.split(sizes)
        return (
            nn.functional.linear(x, q_weight, q_bias),
            *nn.functional.linear(kv, kv_weight, kv_bias).split(self.widths[1:], dim=-1),
        )

    def _split_heads(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # a view (B, heads, N, head_dim)

    def _join_heads(self, heads: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        """Heads (B, heads, N, value_dim) and all values (B, M, width) -> (B, N, dim)."""
        out = heads.transpose(1, 2).flatten(2)  # head-major
        if self.dwc is not None:
            out = self._add_depthwise(out, v, grid)
        return self.proj(out)

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


def refuse_bias(bias: Tensor | None, kind: str, reason: str) -> None:
    """ValueError if there is a bias that this kind cannot honour."""
    if bias is not None:
        raise ValueError(f"{kind} takes no bias or mask: {reason}; use softmax attention")


def refuse_other_tokens(q: Tensor, k: Tensor, kind: str) -> None:
    """ValueError if keys are of other tokens than the queries."""
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"{kind} takes queries, keys and values from the same tokens; kv is not supported")


def one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    """The value; ValueError names what is allowed."""
    if value not in allowed:
        raise ValueError(f"attention option {option} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def at_least(option: str, value: float, least: float) -> float:
    """The value; ValueError if it is smaller."""
    if value < least:
        raise ValueError(f"attention option {option} must be at least {least}, got {value}")
    return value
