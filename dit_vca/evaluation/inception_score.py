"""Inception Score (Salimans et al. 2016) in ADM's form: blocks of 5000 images."""

import torch
from torch import Tensor

BLOCK = 5000


class StreamingInceptionScore:
    """IS = mean over blocks of exp(mean_i KL(p_i || mean_j p_j)); the last, shorter block counts as a full one.

    Takes logits without bias over the 1008 classes, as ADM's evaluator does. Image i belongs to block
    `places[i] // block`: in file order (ADM's) without `places`, else in the order of a permutation. Memory is two rows a
    block, and the sums of several processes add up.
    """

    def __init__(self, num: int, *, classes: int = 1008, block: int = BLOCK, places: Tensor | None = None):
        self._block, self._places = block, places
        blocks = -(-num // block)
        self.counts = torch.zeros(blocks, dtype=torch.float64)
        self.negative_entropy = torch.zeros(blocks, dtype=torch.float64)  # sum of p log p
        self.total = torch.zeros(blocks, classes, dtype=torch.float64)  # sum of p

    def add(self, indices: Tensor, logits: Tensor) -> None:
        """Logits (B, classes) of the images `indices` (B,) int64."""
        log_p = torch.log_softmax(logits.double(), dim=1)
        p = log_p.exp()
        block = (indices if self._places is None else self._places[indices]) // self._block
        self.counts.index_add_(0, block, torch.ones(len(p), dtype=torch.float64))
        self.negative_entropy.index_add_(0, block, (p * log_p).sum(1))
        self.total.index_add_(0, block, p)

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """What is added up over processes, in place."""
        return self.counts, self.negative_entropy, self.total

    def result(self) -> float:
        """ValueError if nothing was added."""
        if not bool((self.counts > 0).all()):
            raise ValueError("the Inception Score needs at least one image in each block")
        marginal = self.total / self.counts[:, None]
        divergence = self.negative_entropy / self.counts - torch.special.xlogy(marginal, marginal).sum(1)
        return float(divergence.exp().mean())
