"""Softmax attention (Vaswani et al. 2017), with the wider forms that DnA is compared with, and cog attention."""

import math

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .base import QKVAttention, refuse_bias


class SoftmaxAttention(QKVAttention):
    """softmax(q k' / sqrt(head_dim)) v through torch's fused kernels; quadratic in the number of tokens.

    Options: `value_ratio`, the width of the values over `dim`; `inner_ratio`, the number of heads of unchanged width
    over `num_heads`. A value_ratio of 2, or an inner_ratio of 1.5, adds the 2 dim^2 parameters that DnA adds.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        layer: int = 0,
        qkv_bias: bool = True,
        depthwise: int = 0,
        value_ratio: float = 1.0,
        inner_ratio: float = 1.0,
    ):
        heads = num_heads * inner_ratio
        if not 0 < heads < math.inf or heads != int(heads):
            raise ValueError(f"attention option inner_ratio must make a whole number of heads of {num_heads}, got {inner_ratio}")
        inner = dim // num_heads * int(heads)
        value_width = inner * value_ratio
        if not 0 < value_width < math.inf or value_width % heads:
            raise ValueError(f"attention option value_ratio must make a whole number of values a head, got {value_ratio}")
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise, widths=(inner, int(value_width)))
        self.num_heads = int(heads)
        self.head_dim = inner // self.num_heads

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, bias: Tensor | None = None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def mix_macs(self, num_tokens: int) -> int:
        return num_tokens**2 * (self.widths[0] + self.widths[2])


class CogAttention(QKVAttention):
    """sign(P) softmax(|P|) v with P = q k' / sqrt(head_dim): weights of either sign whose magnitudes sum to one.

    An assumption: this is cog attention (Lv et al. 2024) to our knowledge of it; no code or recorded value was compared.
    Option `softmax_ends`: the first and the last layer are softmax attention.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        layer: int = 0,
        depth: int | None = None,
        qkv_bias: bool = True,
        depthwise: int = 0,
        softmax_ends: bool = False,
    ):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        if softmax_ends and depth is None:
            raise ValueError("attention option softmax_ends needs the depth of the network")
        self.is_softmax = softmax_ends and layer in (0, depth - 1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, bias: Tensor | None = None) -> Tensor:
        if self.is_softmax:
            return scaled_dot_product_attention(q, k, v, attn_mask=bias)
        refuse_bias(bias, "cog attention", "it would change the sign of a weight")
        logits = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        return (logits.sign() * logits.abs().softmax(-1)).to(v.dtype) @ v

    def mix_macs(self, num_tokens: int) -> int:
        return 2 * num_tokens**2 * self.dim
