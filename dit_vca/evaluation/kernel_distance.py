"""Kernel Inception Distance (Binkowski et al. 2018): a squared maximum mean discrepancy, unbiased at any number of images."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SUBSETS, SUBSET_SIZE, SEED = 100, 1000, 2020  # torch-fidelity's, so that its numbers and ours are the same
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


def _unbiased(xx: float, xy: float, yy: float, m: int, n: int) -> float:
    """Gretton et al. 2012, Eq. 3, from sums of the kernel, the diagonals left out."""
    return xx / (m * (m - 1)) + yy / (n * (n - 1)) - 2 * xy / (m * n)


def _kernel_sum(x: Tensor, y: Tensor, *, diagonal: bool = True) -> float:
    """The sum of the kernel over all pairs, in float64, block by block; without the pairs (i, i) if not `diagonal`."""
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(x), _BLOCK):
        u = x[start : start + _BLOCK]
        for begin in range(0, len(y), _BLOCK):
            total += _kernel(u @ y[begin : begin + _BLOCK].T, x.shape[1]).sum()
        if not diagonal:
            total -= _kernel((u * u).sum(1), x.shape[1]).sum()
    return float(total)


def _kernel(products: Tensor, dim: int) -> Tensor:
    return (products.double() / dim + 1) ** 3
