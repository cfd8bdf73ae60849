"""Exponential moving average of the weights."""

import copy

import torch
from torch import Tensor, nn


class EMA:
    """A float32 copy of a network that follows it: ema += (1 - decay) (weights - ema) at each optimizer step.

    Frozen parameters and buffers are copied once and never averaged, so that they keep their exact values.
    """

    def __init__(self, network: nn.Module, decay: float):
        self.network = copy.deepcopy(network).float().eval().requires_grad_(False)
        self.decay = decay
        averaged = dict(self.network.named_parameters())
        self._pairs = [(averaged[name], p) for name, p in network.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """One step; `skip` is a 0-dimensional boolean on the device: where it is true nothing changes, and nothing syncs."""
        weight = torch.where(skip, 0.0, 1 - self.decay)
        for average, parameter in self._pairs:
            average.lerp_(parameter, weight.to(average.dtype))
