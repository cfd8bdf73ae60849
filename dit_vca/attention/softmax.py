"""Softmax attention (Vaswani et al. 2017)."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .base import QKVAttention


class SoftmaxAttention(QKVAttention):
    """softmax(q k' / sqrt(head_dim)) v through torch's fused kernels; quadratic in the number of tokens."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, bias: Tensor | None = None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias)
