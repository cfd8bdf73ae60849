"""Inception Score (Salimans et al. 2016) in ADM's form: blocks of 5000 images in file order."""

import math

import torch
from torch import Tensor

BLOCK = 5000


class StreamingInceptionScore:
    """IS = mean over blocks of exp(mean_i KL(p_i || mean_j p_j)); the last, shorter block counts as a full one.

    Takes logits without bias over the 1008 classes, as ADM's evaluator does. Memory is two rows a block.
    """

    def __init__(self):
        self._blocks: list[tuple[int, float, Tensor]] = []  # images, sum of p log p, sum of p

    def add(self, logits: Tensor) -> None:
        """Logits (B, classes), in file order."""
        log_p = torch.log_softmax(logits.double(), dim=1)
        while len(log_p):
            if not self._blocks or self._blocks[-1][0] == BLOCK:
                self._blocks.append((0, 0.0, torch.zeros(logits.shape[1], dtype=torch.float64)))
            num, negative_entropy, total = self._blocks[-1]
            part, log_p = log_p[: BLOCK - num], log_p[BLOCK - num :]
            p = part.exp()
            self._blocks[-1] = (num + len(part), negative_entropy + float((p * part).sum()), total + p.sum(0))

    def result(self) -> float:
        """ValueError if nothing was added."""
        if not self._blocks:
            raise ValueError("the Inception Score needs at least one image")
        scores = []
        for num, negative_entropy, total in self._blocks:
            marginal = total / num
            marginal_term = float(torch.special.xlogy(marginal, marginal).sum())
            scores.append(math.exp(negative_entropy / num - marginal_term))
        return sum(scores) / len(scores)
