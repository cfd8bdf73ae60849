"""Linear attention (Katharopoulos et al. 2020) and the feature maps that others put in place of its own."""

import math

import torch
from torch import Tensor, nn

from .base import QKVAttention, at_least, one_of, refuse_bias, refuse_other_tokens

EPS = 1e-6  # in the denominator: a query whose features are all zero reads nothing instead of NaN
NO_BIAS = "its weights are products of features, not of exponentials"
FEATURE_MAPS = {
    "elu+1": lambda x: torch.exp(x.clamp(max=0)) + torch.relu(x),  # elu(x) + 1 without its cancellation
    "relu": torch.relu,
    "softplus": nn.functional.softplus,
    "softmax": lambda x: x.softmax(-1),
}


def linear_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor, eps: float = EPS) -> Tensor:
    """phi_q (sum_j phi_k_j' v_j) / (phi_q . sum_j phi_k_j + eps): features (..., N, F) and (..., M, F), v (..., M, d) -> (..., N, d)."""
    state = phi_k.transpose(-2, -1) @ v  # (..., F, d)
    normaliser = phi_q @ phi_k.sum(-2).unsqueeze(-1)  # (..., N, 1)
    return phi_q @ state / (normaliser + eps)


class FeatureAttention(QKVAttention):
    """Base of the kinds that are linear attention with some features of q and k; computed in float32 under any autocast.

    A subclass gives `features`. Sums over tokens in half precision overflow or lose digits (float16: NaN from about a
    thousand tokens), so q, k and v are widened first.
    """

    feature_dim: int  # of a head
    eps: float = EPS

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(B, heads, N, head_dim) and (B, heads, M, head_dim), float32 or wider -> (..., feature_dim) each."""
        raise NotImplementedError

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, bias: Tensor | None = None) -> Tensor:
        refuse_bias(bias, f"{type(self).__name__}", NO_BIAS)
        with torch.autocast(q.device.type, enabled=False):
            wide = torch.promote_types(q.dtype, torch.float32)
            phi_q, phi_k = self.features(q.to(wide), k.to(wide))
            return linear_attention(phi_q, phi_k, v.to(wide), self.eps).to(v.dtype)

    def mix_macs(self, num_tokens: int) -> int:
        return 2 * num_tokens * self.num_heads * self.feature_dim * self.head_dim


class LinearAttention(FeatureAttention):
    """phi(q) (sum_j phi(k_j)' v_j) / (phi(q) . sum_j phi(k_j) + eps), without a 1 / sqrt(d).

    Options: `phi`, of elu+1, relu, softplus, softmax (over a head's features); `eps`; `depthwise`, of which 3 or 5 gives
    back the locality that near-uniform maps lack.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        layer: int = 0,
        qkv_bias: bool = True,
        depthwise: int = 0,
        phi: str = "elu+1",
        eps: float = EPS,
    ):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        self.phi = one_of("phi", phi, tuple(FEATURE_MAPS))
        self.eps = at_least("eps", eps, 0.0)
        self.feature_dim = self.head_dim

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        phi = FEATURE_MAPS[self.phi]
        return phi(q), phi(k)

    def extra_repr(self) -> str:
        return f"phi={self.phi}, eps={self.eps}"


class HedgehogMap(nn.Module):
    """[softmax(W x), softmax(-W x)] with one d x d matrix a head, the identity at first (Zhang et al. 2024, Hedgehog)."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, heads, N, d) -> (B, heads, N, 2 d)."""
        x = x @ self.weight.to(x.dtype).transpose(-2, -1)
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1)


class HedgehogAttention(FeatureAttention):
    """Linear attention with learned softmax features, of queries and keys apart (Zhang et al. 2024)."""

    def __init__(self, dim: int, num_heads: int, *, layer: int = 0, qkv_bias: bool = True, depthwise: int = 0):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        self.map_q = HedgehogMap(num_heads, self.head_dim)
        self.map_k = HedgehogMap(num_heads, self.head_dim)
        self.feature_dim = 2 * self.head_dim

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.map_q(q), self.map_k(k)

    def mix_macs(self, num_tokens: int) -> int:
        return super().mix_macs(num_tokens) + 2 * num_tokens * self.dim * self.head_dim  # the maps


class PerformerAttention(FeatureAttention):
    """FAVOR+ (Choromanski et al. 2021): positive random features whose products estimate exp(q . k / sqrt(d)).

    exp(w . x - |x|^2 / 2) with x = q / d^(1/4), for rows w that are orthogonal in blocks of d and as long as Gaussian
    ones. They are drawn with the initial weights and saved with them; they are not drawn again. Option `features`: how
    many of them a dimension of a head; the error falls with the root of their number.
    """

    def __init__(self, dim: int, num_heads: int, *, layer: int = 0, qkv_bias: bool = True, depthwise: int = 0, features: int = 2):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        self.feature_dim = self.head_dim * int(at_least("features", features, 1))
        blocks = torch.randn(num_heads, features, self.head_dim, self.head_dim)
        lengths = torch.randn(num_heads, self.feature_dim, self.head_dim).norm(dim=-1, keepdim=True)
        basis, upper = torch.linalg.qr(blocks)
        basis = basis * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # LAPACK's signs are not uniform
        self.register_buffer("directions", basis.transpose(-2, -1).flatten(1, 2) * lengths)  # (heads, feature_dim, head_dim)

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # The largest exponent of each feature moves from the keys to the queries, and then the largest of each query is
        # taken off, which cancels in the quotient: the sums stay away from zero, and so from eps.
        exponents_q, exponents_k = self._exponents(q), self._exponents(k)
        largest = exponents_k.amax(-2, keepdim=True)
        exponents_q = exponents_q + largest
        return torch.exp(exponents_q - exponents_q.amax(-1, keepdim=True)), torch.exp(exponents_k - largest)

    def _exponents(self, x: Tensor) -> Tensor:
        x = x / math.sqrt(math.sqrt(x.shape[-1]))
        return x @ self.directions.to(x.dtype).transpose(-2, -1) - (x * x).sum(-1, keepdim=True) / 2

    def mix_macs(self, num_tokens: int) -> int:
        return super().mix_macs(num_tokens) + 2 * num_tokens * self.feature_dim * self.dim  # the features


class CosformerAttention(FeatureAttention):
    """relu(q_i) . relu(k_j) cos(pi (i - j) / 2 N), as products of features (Qin et al. 2022); i counts tokens in row order.

    On an image the index runs along rows, so that vertical neighbours count as far apart; the paper's is a text's.
    """

    def __init__(self, dim: int, num_heads: int, *, layer: int = 0, qkv_bias: bool = True, depthwise: int = 0):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        self.feature_dim = 2 * self.head_dim

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        refuse_other_tokens(q, k, "cosformer")
        num_tokens = q.shape[-2]
        angles = torch.arange(num_tokens, dtype=q.dtype, device=q.device)[:, None] * (math.pi / (2 * num_tokens))
        turn = torch.cos(angles), torch.sin(angles)  # cos(a - b) = cos a cos b + sin a sin b
        return tuple(torch.cat([torch.relu(x) * part for part in turn], dim=-1) for x in (q, k))
