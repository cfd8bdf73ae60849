"""Squared maximum mean discrepancies: the Kernel Inception Distance (Binkowski et al. 2018), and CMMD (Jayasumana et al. 2024)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SUBSETS, SUBSET_SIZE, SEED = 100, 1000, 2020  # torch-fidelity's, so that its numbers and ours are the same
BANDWIDTH, SCALE = 10.0, 1000.0  # CMMD's
_BLOCK = 2048


class KernelDistance(NamedTuple):
    """Mean and standard deviation over random subsets, and the unbiased estimate from all pairs."""

    mean: float
    std: float
    all_pairs: float


def kernel_distance(
    samples: Tensor, reference: Tensor, *, subsets: int = SUBSETS, subset_size: int = SUBSET_SIZE, seed: int = SEED
) -> KernelDistance:
    """From features (S, D) and (R, D), with the kernel (u.v / D + 1)^3; in plain units, not multiplied by 1000.

    ValueError if a set is smaller than `subset_size`.
    """
    for name, features in (("samples", samples), ("reference", reference)):
        if len(features) < subset_size:
            raise ValueError(f"KID needs at least {subset_size} images in the {name}, got {len(features)}")
    draw = np.random.RandomState(seed)  # the legacy generator, because the subsets are part of the published protocol
    found = []
    for _ in range(subsets):
        x = samples[draw.choice(len(samples), subset_size, replace=False)]
        y = reference[draw.choice(len(reference), subset_size, replace=False)]
        found.append(
            _unbiased(_kernel_sum(x, x, diagonal=False), _kernel_sum(x, y), _kernel_sum(y, y, diagonal=False), len(x), len(y))
        )
    everything = _unbiased(
        _kernel_sum(samples, samples, diagonal=False), _kernel_sum(samples, reference),
        _kernel_sum(reference, reference, diagonal=False), len(samples), len(reference),
    )  # fmt: skip
    return KernelDistance(float(np.mean(found)), float(np.std(found)), everything)


def clip_discrepancy(samples: Tensor, reference: Tensor, *, bandwidth: float = BANDWIDTH) -> float:
    """CMMD from embeddings (S, D) and (R, D): the biased estimate with exp(-|u - v|^2 / (2 bandwidth^2)), times 1000.

    Biased means that the pairs (i, i) count (Gretton et al. 2012, Eq. 5), as in the paper's code; 0 for equal sets.
    """

    def kernel(u: Tensor, v: Tensor) -> Tensor:
        u, v = u.double(), v.double()
        squared = (u * u).sum(1)[:, None] + (v * v).sum(1) - 2 * u @ v.T
        return torch.expm1(squared / (-2 * bandwidth**2))  # the kernel less 1, which cancels in the difference

    pairs = ((samples, samples), (reference, reference), (samples, reference))
    xx, yy, xy = (_sum_of_blocks(x, y, kernel) / (len(x) * len(y)) for x, y in pairs)
    return SCALE * (xx + yy - 2 * xy)


def _unbiased(xx: float, xy: float, yy: float, m: int, n: int) -> float:
    """Gretton et al. 2012, Eq. 3, from sums of the kernel, the diagonals left out."""
    return xx / (m * (m - 1)) + yy / (n * (n - 1)) - 2 * xy / (m * n)


def _kernel_sum(x: Tensor, y: Tensor, *, diagonal: bool = True) -> float:
    """The sum of KID's kernel over all pairs, in float64, block by block; without the pairs (i, i) if not `diagonal`."""
    total = _sum_of_blocks(x, y, lambda u, v: _kernel(u @ v.T, x.shape[1]))
    if not diagonal:
        total -= float(sum(_kernel((u * u).sum(1), x.shape[1]).sum() for u in x.split(_BLOCK)))
    return total


def _kernel(products: Tensor, dim: int) -> Tensor:
    return (products.double() / dim + 1) ** 3


def _sum_of_blocks(x: Tensor, y: Tensor, values: Callable[[Tensor, Tensor], Tensor]) -> float:
    """The sum in float64 of values(u, v) over all pairs of blocks u of x and v of y."""
    total = torch.zeros((), dtype=torch.float64)
    for u in x.split(_BLOCK):
        for v in y.split(_BLOCK):
            total += values(u, v).sum(dtype=torch.float64)
    return float(total)
