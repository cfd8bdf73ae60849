"""Randomness as a function of position: a counter-based generator for each (seed, purpose, position).

Nothing here keeps state between calls, so a value depends neither on batch size nor on the number of processes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# The purposes are part of the definition of a run and of a sample: a number, once given, is never reused.
PURPOSES = {
    "order": 1, "flip": 2, "latent": 3, "t": 4, "eps": 5, "label_drop": 6,
    "image_noise": 7, "image_label": 8, "preview": 9, "init": 10, "reference": 11, "score_order": 12,
    "probe": 13, "dequantization": 14,
}  # fmt: skip


def keyed_generator(seed: int, purpose: str, position: int = 0) -> np.random.Generator:
    """A generator for one (seed, purpose, position): Philox 4x64 (Salmon et al. 2011) with the three in key and counter.

    Distinct triples give non-overlapping streams of 2^128 draws: nothing is hashed, so nothing collides.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"a seed must be in [0, 2^64), got {seed}")
    counter = np.array([0, 0, position, PURPOSES[purpose]], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=counter))


def normal(seed: int, purpose: str, positions: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise (len(positions), *shape), float32; row i is a function of (seed, purpose, positions[i])."""
    out = np.empty((len(positions), *shape), dtype=np.float32)
    for row, position in zip(out, positions, strict=True):
        keyed_generator(seed, purpose, int(position)).standard_normal(dtype=np.float32, out=row)
    return torch.from_numpy(out)


def uniform(seed: int, purpose: str, positions: Sequence[int]) -> Tensor:
    """Uniform draws in [0, 1), (len(positions),) float64; entry i is a function of (seed, purpose, positions[i])."""
    return torch.tensor([keyed_generator(seed, purpose, int(p)).random() for p in positions], dtype=torch.float64)


class ImageNoise:
    """The noise of a batch of images: image i draws from its own stream, a function of (seed, i).

    `initial()` is the starting noise; `randn_like` serves as the argument of that name of stochastic samplers and
    draws the next block of every image's stream.
    """

    def __init__(self, seed: int, indices: Sequence[int], shape: tuple[int, ...]):
        self.shape = shape
        self._generators = [keyed_generator(seed, "image_noise", int(i)) for i in indices]

    def initial(self) -> Tensor:
        """Standard normal noise (B, *shape), float32 on the host."""
        return self._draw()

    def randn_like(self, x: Tensor) -> Tensor:
        """Standard normal noise of the shape, dtype and device of x."""
        return self._draw().to(x.device, x.dtype)

    def _draw(self) -> Tensor:
        out = np.empty((len(self._generators), *self.shape), dtype=np.float32)
        for row, generator in zip(out, self._generators, strict=True):
            generator.standard_normal(dtype=np.float32, out=row)
        return torch.from_numpy(out)
