"""Denoising attention (DnA): a softmax branch, and a softmin branch that is weighed by a learned factor for each head."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from .base import QKVAttention, one_of
from .streams import ATTENTION_STAGE, Streams, softmax_stream

# variant: (queries of its own for the negative branch, values of its own, a factor alpha for each head)
VARIANTS = {
    "dna": (True, True, True),
    "dna_q": (True, False, True),
    "dna_v": (False, True, True),
    "dna_hat": (False, False, True),
    "dna_pm": (False, False, False),
}
ALPHA = 0.5  # at the start; the paper is silent
COPY_SCALE = 1e-4  # of the copies that the negative branch starts from in a softmax model; the paper's


class DenoisingAttention(QKVAttention):
    """softmax(Q+ k' / sqrt(d)) V+ + sign alpha softmin(Q- k' / sqrt(d)) V-, keys shared.

    A softmin is the softmax of negated logits, so each branch is a call of torch's fused kernels. `dna` has queries and
    values of its own in the negative branch, `dna_q` and `dna_v` one of them, `dna_hat` neither, and `dna_pm` has no
    alpha either. With values of its own the sign is a reparametrisation: (sign, V-) and (-sign, -V-) are the same.

    Options: `neg_sign`, -1 (the default: a positive alpha subtracts) or 1 (as the paper prints it; always for `dna_pm`);
    `neg_bias`, what the negative branch does with a bias b of the logits: "negated" (softmin of the same logits) or
    "same"; a mask masks both. `fused` makes one call of twice the heads, for accelerators and few tokens.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        variant: str = "dna",
        layer: int = 0,
        qkv_bias: bool = True,
        depthwise: int = 0,
        neg_sign: int = -1,
        neg_bias: str = "negated",
        fused: bool = False,
    ):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        if neg_sign not in (-1, 1):
            raise ValueError(f"attention option neg_sign must be -1 or 1, got {neg_sign}")
        self.own_q, self.own_v, has_alpha = VARIANTS[variant]
        self.variant = variant
        self.sign = neg_sign
        self.neg_bias = one_of("neg_bias", neg_bias, ("negated", "same"))
        self.fused = fused
        self.alpha = nn.Parameter(torch.full((num_heads,), ALPHA)) if has_alpha else None
        self.qv_neg = nn.Linear(dim, (self.own_q + self.own_v) * dim, bias=qkv_bias) if self.own_q or self.own_v else None
        if self.qv_neg is not None:
            bound = math.sqrt(6 / (4 * dim))  # Xavier's of `qkv`, so that both branches start alike
            nn.init.uniform_(self.qv_neg.weight, -bound, bound)
            if qkv_bias:
                nn.init.zeros_(self.qv_neg.bias)

    def forward(self, x: Tensor, grid: tuple[int, int], *, kv: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        q, k, v = self._project(x, kv)
        q_neg, v_neg = self._project_negative(x, kv, q, v)
        positive, negative = self.branches(*(self._split_heads(z) for z in (q, k, v, q_neg, v_neg)), bias=bias)
        factor = self.sign if self.alpha is None else self.sign * self.alpha[:, None, None]
        return self._join_heads(positive + factor * negative, v, grid)

    def branches(
        self, q: Tensor, k: Tensor, v: Tensor, q_neg: Tensor, v_neg: Tensor, *, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both branches before alpha, each (B, heads, N, head_dim); queries, keys and values are split by heads."""
        bias_neg = bias
        if bias is not None and self.neg_bias == "negated":
            bias_neg = torch.where(bias == -torch.inf, bias, -bias)  # what is masked stays so
        if not self.fused:
            return (
                scaled_dot_product_attention(q, k, v, attn_mask=bias),
                scaled_dot_product_attention(-q_neg, k, v_neg, attn_mask=bias_neg),
            )
        mask = None if bias is None else torch.cat([bias, bias_neg], dim=1)
        both = scaled_dot_product_attention(
            torch.cat([q, -q_neg], dim=1), torch.cat([k, k], dim=1), torch.cat([v, v_neg], dim=1), attn_mask=mask
        )
        return tuple(both.chunk(2, dim=1))

    def two_streams(self, x: Tensor, grid: tuple[int, int], *, kv: Tensor | None = None) -> tuple[Streams, ...]:
        """Both branches before alpha, with the maps written out; the weight is -sign alpha, so that positive subtracts."""
        q, k, v = self._project(x, kv)
        q, k, v, q_neg, v_neg = (self._split_heads(z) for z in (q, k, v, *self._project_negative(x, kv, q, v)))
        alpha = q.new_ones(self.num_heads) if self.alpha is None else self.alpha
        return (Streams(ATTENTION_STAGE, softmax_stream(q, k, v), softmax_stream(-q_neg, k, v_neg), -self.sign * alpha),)

    def mix_macs(self, num_tokens: int) -> int:
        own = 0 if self.qv_neg is None else num_tokens * self.dim * self.qv_neg.out_features
        return own + 4 * num_tokens**2 * self.dim

    @torch.no_grad()
    def start_from_softmax(self) -> None:
        """Make the negative branch 1e-4 times the positive one, so that the output is almost the softmax model's.

        Where values are shared alpha is 1e-4 instead. `dna_pm` has neither, and is another function at once.
        """
        rows = [part for part, own in zip("qv", (self.own_q, self.own_v), strict=True) if own]
        if self.alpha is not None and not self.own_v:
            self.alpha.fill_(COPY_SCALE)
        for kind in ("weight", "bias"):
            source = getattr(self.qkv, kind)
            if rows and source is not None:
                q, _, v = source.split(self.widths)
                parts = {"q": q, "v": -self.sign * v}  # the values' sign turns with the formula's, so that alpha reads the same
                getattr(self.qv_neg, kind).copy_(COPY_SCALE * torch.cat([parts[row] for row in rows]))

    def _project_negative(self, x: Tensor, kv: Tensor | None, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.qv_neg is None:
            return q, v
        source = x if kv is None else kv  # of the values
        if not (self.own_q and self.own_v):
            own = self.qv_neg(x if self.own_q else source)
            return (own, v) if self.own_q else (q, own)
        if kv is None:
            return self.qv_neg(x).chunk(2, dim=-1)
        weights = self.qv_neg.weight.chunk(2)
        biases = (None, None) if self.qv_neg.bias is None else self.qv_neg.bias.chunk(2)
        return tuple(linear(tokens, w, b) for tokens, w, b in zip((x, kv), weights, biases, strict=True))

    def extra_repr(self) -> str:
        return f"variant={self.variant}, sign={self.sign:+d}"
