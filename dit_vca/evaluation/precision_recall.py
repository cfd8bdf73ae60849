"""Improved precision and recall (Kynkäänniemi et al. 2019): are samples on the manifold of the reference, and the reverse?"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NEIGHBOURS = 3
_ROWS, _COLUMNS = 1024, 8192  # of one block of distances: 32 MiB in float32

# squared distances (rows, columns) of features u (rows, D) and v (columns, D), float32
Distance = Callable[[Tensor, Tensor], Tensor]


class PrecisionRecall(NamedTuple):
    """`precision`: fraction of samples within the reference's manifold; `recall`: fraction of the reference within the samples'."""

    precision: float
    recall: float


def precision_recall(
    reference: Tensor, samples: Tensor, *, distance: Distance, neighbours: int = NEIGHBOURS, device: torch.device | str = "cpu"
) -> PrecisionRecall:
    """From features (R, D) and (S, D), which may be memory maps: at no time is more than a block of distances in memory.

    A point lies in a set's manifold if for any member its squared distance to that member is at most the squared
    distance from the member to its `neighbours`-th nearest other member. ValueError if a set has no such neighbour.
    """
    for name, features in (("reference", reference), ("samples", samples)):
        if len(features) <= neighbours:
            raise ValueError(f"precision and recall need more than {neighbours} images in the {name}, got {len(features)}")
    radii_reference = _radii(reference, distance, neighbours, device)
    radii_samples = _radii(samples, distance, neighbours, device)
    in_reference = torch.zeros(len(samples), dtype=torch.bool)
    in_samples = torch.zeros(len(reference), dtype=torch.bool)
    for rows, columns, block in _blocks(reference, samples, distance, device):
        in_reference[columns] |= (block <= radii_reference[rows].to(device)[:, None]).any(0).cpu()
        in_samples[rows] |= (block <= radii_samples[columns].to(device)).any(1).cpu()
    return PrecisionRecall(float(in_reference.double().mean()), float(in_samples.double().mean()))


def exact_distance(u: Tensor, v: Tensor) -> Tensor:
    """|u - v|^2 in float32 with norms in float64, so that the distance of equal points is rounding of the product alone."""
    norms = (u.double() ** 2).sum(1)[:, None] + (v.double() ** 2).sum(1) if u.device.type != "mps" else _norms(u, v)
    return (norms - 2 * (u @ v.T)).clamp(min=0).float()


def adm_distance(u: Tensor, v: Tensor) -> Tensor:
    """|u|^2 - 2 u.v + |v|^2 with every result rounded to float16, as ADM's evaluator computes it.

    Where float16 overflows, the whole block is computed in float32, as there. The published precision and recall of
    ImageNet models carry the ties this makes (about 0.002 upwards); sums inside a product are float32 here, and on
    another device's float16 the last digit may differ.
    """
    u_half, v_half = u.half().float(), v.half().float()
    block = _half(_half(_half_norm(u_half)[:, None] - _half(2 * _half(u_half @ v_half.T))) + _half_norm(v_half))
    if not bool(torch.isfinite(block).all()):
        block = (u**2).sum(1)[:, None] - 2 * (u @ v.T) + (v**2).sum(1)
    return block.clamp(min=0)


DISTANCES: dict[str, Distance] = {"adm": adm_distance, "exact": exact_distance}


def _norms(u: Tensor, v: Tensor) -> Tensor:
    return (u**2).sum(1)[:, None] + (v**2).sum(1)


def _half(x: Tensor) -> Tensor:
    return x.half().float()


def _half_norm(x: Tensor) -> Tensor:
    return _half(_half(x**2).sum(1))


def _blocks(rows: Tensor, columns: Tensor, distance: Distance, device):
    """(slice of rows, slice of columns, squared distances) over all pairs."""
    for start in range(0, len(rows), _ROWS):
        u = rows[start : start + _ROWS].to(device)
        for begin in range(0, len(columns), _COLUMNS):
            v = columns[begin : begin + _COLUMNS].to(device)
            yield slice(start, start + len(u)), slice(begin, begin + len(v)), distance(u, v)


def _radii(features: Tensor, distance: Distance, neighbours: int, device) -> Tensor:
    """Squared distance of each point to its `neighbours`-th nearest other one: the next smallest after its own, (N,)."""
    nearest = torch.full((len(features), neighbours + 1), torch.inf)
    for rows, _, block in _blocks(features, features, distance, device):
        near = block.topk(min(neighbours + 1, block.shape[1]), dim=1, largest=False).values.cpu()
        nearest[rows] = torch.cat([nearest[rows], near], 1).topk(neighbours + 1, dim=1, largest=False).values
    return nearest.max(1).values
