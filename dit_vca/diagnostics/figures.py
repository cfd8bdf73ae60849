"""What two streams are to each other: pure functions of tensors, and their null values.

Sources are sections of the DnA paper ("Denoising Attention") unless another is named; docs/diagnose.md says what each
figure means and what it does not show. In shapes, N are queries, M keys, d the values a head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, one_hot

from ..attention.streams import Stream, Streams

TOP_K, EPS = 10, 0.5  # of intruder dimensions: cos(pi / 3), Section 4.4
TOP_SHARE = 0.1  # of the rows, for the highest entropies; the paper does not say its share
NULL_DRAWS = 16


@dataclass(frozen=True)
class Intruders:
    """How intruder dimensions are counted: `against` the other branch's "top" k singular vectors, or "all" of them."""

    k: int = TOP_K
    eps: float = EPS
    against: str = "top"

    def __post_init__(self):
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")
        if not 0 < self.eps <= 1:
            raise ValueError(f"eps must be above 0 and at most 1, got {self.eps}")
        if self.against not in ("top", "all"):
            raise ValueError(f"against must be top or all, got {self.against!r}")


def intruder_dimensions(o_pos: Tensor, o_neg: Tensor, rule: Intruders = Intruders()) -> Tensor:
    """Intruder dimensions (Section 4.4): O+ and O- (..., N, d) -> counts (...) int64 in 0..min(k, N, d).

    Of the top k left singular vectors u-_j of O-, those with max_i |<u+_i, u-_j>| < eps.
    """
    u_pos, u_neg = (torch.linalg.svd(o.double(), full_matrices=False).U for o in (o_pos, o_neg))
    if rule.against == "top":
        u_pos = u_pos[..., : rule.k]
    nearest = (u_pos.mT @ u_neg[..., : rule.k]).abs().amax(-2)  # (..., k)
    return (nearest < rule.eps).sum(-1)


def branch_cosine(o_pos: Tensor, o_neg: Tensor) -> Tensor:
    """cos(vec O+, vec O-) (Section 4.4): (..., N, d) twice -> (...)."""
    return cosine_similarity(o_pos.flatten(-2).double(), o_neg.flatten(-2).double(), dim=-1)


def value_similarity(v_pos: Tensor, v_neg: Tensor) -> Tensor:
    """C(V+, V-) = <V+, V->_F / (|V+|_F |V-|_F) in [-1, 1] (Theorem 3.3): (..., M, d) twice -> (...)."""
    return branch_cosine(v_pos, v_neg)


def principal_angles(v_pos: Tensor, v_neg: Tensor) -> Tensor:
    """Angles between the column spaces of V+ and V- (Björck and Golub 1973; Theorem 3.2), in degrees, rising.

    (..., M, d) twice -> (..., min(M, d)): QR, then the singular values of Q+' Q- are the cosines.
    """
    q_pos, q_neg = (torch.linalg.qr(v.double()).Q for v in (v_pos, v_neg))
    cosines = torch.linalg.svdvals(q_pos.mT @ q_neg).clamp(max=1)
    return torch.rad2deg(torch.arccos(cosines))


def head_redundancy(weights: Tensor) -> Tensor:
    """Mean over pairs of heads of 1 - cos(vec P_i, vec P_j) (Section C.5): maps (B, heads, N, M) -> (B,).

    As the paper has it: 0 means that all heads draw one map. Needs two heads or more.
    """
    directions = normalize(weights.flatten(-2).double(), dim=-1)
    return 1 - _mean_of_pairs(directions @ directions.mT)


def row_entropy(weights: Tensor) -> Tensor:
    """Entropy of each row in nats (Section C.5), at most log M: maps (..., N, M) -> (..., N)."""
    return torch.special.entr(weights.double().clamp(min=0)).sum(-1)  # a sum of features may round below zero


def highest_mean(entropies: Tensor, share: float = TOP_SHARE) -> Tensor:
    """The mean of the highest `share` of the entropies, one at least (Section C.5): (..., N) -> (...)."""
    return entropies.topk(math.ceil(share * entropies.shape[-1]), dim=-1).values.mean(-1)


def token_separation(tokens: Tensor) -> Tensor:
    """Mean over pairs of tokens of 1 - cos (Section 4.5, "representational robustness"): (B, N, dim) -> (B,).

    Each token is centred over its features.
    """
    directions = _centred_directions(tokens)
    return 1 - _mean_of_pairs(directions @ directions.mT)


def drift(tokens: Tensor, clean: Tensor) -> Tensor:
    """Mean over tokens of 1 - cos to the same token of the cleaner input, centred as above: (B, N, dim) twice -> (B,)."""
    return 1 - (_centred_directions(tokens) * _centred_directions(clean)).sum(-1).mean(-1)


def _centred_directions(tokens: Tensor) -> Tensor:
    tokens = tokens.double()
    return normalize(tokens - tokens.mean(-1, keepdim=True), dim=-1)


def _mean_of_pairs(products: Tensor) -> Tensor:
    """(B, n, n) -> (B,): the mean off the diagonal."""
    n = products.shape[-1]
    return (products.sum((-2, -1)) - products.diagonal(dim1=-2, dim2=-1).sum(-1)) / (n * (n - 1))


def stream_figures(streams: Streams, rule: Intruders = Intruders()) -> dict[str, Tensor]:
    """All figures of one stage, each (B, heads), or (B, 1) where heads are compared; intruder_histogram (B, k + 1)."""
    found = {}
    for name, stream in streams.branches.items():
        entropies = row_entropy(stream.map)
        found |= {f"entropy_{name}": entropies.mean(-1), f"entropy_top_{name}": highest_mean(entropies)}
        if stream.map.shape[1] > 1:
            found[f"head_redundancy_{name}"] = head_redundancy(stream.map)[:, None]
    if streams.negative is not None:
        p, m = streams.positive, streams.negative
        counts = intruder_dimensions(p.output, m.output, rule)
        angles = principal_angles(p.values, m.values)
        found |= {
            "intruders": counts.double(), "intruder_histogram": one_hot(counts, rule.k + 1).sum(1).double(),
            "branch_cosine": branch_cosine(p.output, m.output), "value_similarity": value_similarity(p.values, m.values),
            "principal_angle": angles.mean(-1), "smallest_principal_angle": angles[..., 0],
        }  # fmt: skip
    return found


def token_figures(tokens: Tensor, clean: Tensor) -> dict[str, Tensor]:
    """Figures of the tokens after a block, and after it at the smallest t, each (B, 1)."""
    separation = {"token_separation": token_separation(tokens)[:, None]} if tokens.shape[1] > 1 else {}
    return separation | {"drift": drift(tokens, clean)[:, None]}


def independent_streams(like: Streams, generator: torch.Generator) -> Streams:
    """Streams of one image with the shapes of `like` that have nothing to do with each other.

    Outputs and values are standard Gaussians, maps the softmax of standard Gaussian logits.
    """

    def gaussian(tensor: Tensor) -> Tensor:
        return torch.randn(1, *tensor.shape[1:], generator=generator)

    branches = [
        Stream(gaussian(stream.output), gaussian(stream.map).softmax(-1), gaussian(stream.values))
        for stream in like.branches.values()
    ]
    return Streams(like.stage, *branches)


def null_of_streams(like: Streams, rule: Intruders = Intruders(), *, seed: int = 0) -> dict[str, dict[str, Any]]:
    """The figures of independent streams of these shapes: mean and standard deviation over 16 draws and all heads."""
    generator = torch.Generator().manual_seed(seed)
    return _null([stream_figures(independent_streams(like, generator), rule) for _ in range(NULL_DRAWS)])


def null_of_tokens(like: Tensor, *, seed: int = 0) -> dict[str, dict[str, Any]]:
    """The figures of independent Gaussian tokens of this shape (B, N, dim), over 16 draws."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [[torch.randn(1, *like.shape[1:], generator=generator) for _ in range(2)] for _ in range(NULL_DRAWS)]
    return _null([token_figures(tokens, clean) for tokens, clean in pairs])


def _null(draws: Sequence[dict[str, Tensor]]) -> dict[str, dict[str, Any]]:
    together = {name: torch.cat([draw[name] for draw in draws]) for name in draws[0]}
    return {
        name: {"shares": shares(values.sum(0))}
        if name == "intruder_histogram"
        else {"mean": float(values.mean()), "std": float(values.std(correction=0))}
        for name, values in together.items()
    }


def shares(counts: Tensor) -> list[float]:
    return (counts / counts.sum()).tolist()
