"""Exponential moving averages of the weights, of constant decay and of the power function's growing length."""

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ..config import TrainConfig


class EMA:
    """A float32 copy of a network that follows it: ema += (1 - decay) (weights - ema) at each optimizer step.

    Frozen parameters and buffers are copied once and never averaged, so that they keep their exact values. `decay` is a
    function of the number of the step, counted from 1.
    """

    def __init__(self, network: nn.Module, decay: Callable[[int], float]):
        self.network = copy.deepcopy(network).float().eval().requires_grad_(False)
        self.decay = decay
        averaged = dict(self.network.named_parameters())
        self._pairs = [(averaged[name], p) for name, p in network.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Step number `step`; `skip` is a 0-dimensional boolean on the device: where true nothing changes, and nothing syncs."""
        weight = torch.where(skip, 0.0, 1 - self.decay(step))
        for average, parameter in self._pairs:
            average.lerp_(parameter, weight.to(average.dtype))


def averages(network: nn.Module, train: TrainConfig) -> dict[str, EMA]:
    """The averages of a run by the name of their weights: "ema", and those of ema_more and ema_power."""
    found = {"ema": EMA(network, constant_decay(train.ema_decay))}
    found |= {f"ema-{decay}": EMA(network, constant_decay(decay)) for decay in train.ema_more}
    return found | {f"ema-power-{width}": EMA(network, power_decay(width)) for width in train.ema_power}


def constant_decay(decay: float) -> Callable[[int], float]:
    """The same decay at every step."""
    return lambda step: decay


def power_decay(width: float) -> Callable[[int], float]:
    """(1 - 1/step)^(exponent + 1), the power-function average of Karras et al. 2024, Eq. 8 and 9.

    After n steps the weights of step s count in proportion to (s / n)^exponent; `width` is the standard deviation of
    that profile over n (the paper's sigma_rel, 0.05 and 0.10 there).
    """
    exponent = power_exponent(width)
    return lambda step: (1 - 1 / step) ** (exponent + 1)


def power_exponent(width: float) -> float:
    """The exponent g whose profile has that width: width^2 = (g + 1) / ((g + 2)^2 (g + 3)), the largest real root."""
    inverse = width**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())
