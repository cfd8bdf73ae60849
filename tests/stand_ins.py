"""The stand-in networks of the recorded sampling chains, as denoisers."""

import torch
from torch import Tensor

from dit_vca.interpolants import DiscreteVP, Linear
from samplers import Prediction

DDPM, LINEAR = DiscreteVP(), Linear()


def ddpm_stand_in(x: Tensor, t: Tensor) -> Prediction:
    """eps = tanh(x) cos(i / 400) and v = sin(2 x), where i is the original index of the chain."""
    eps = torch.tanh(x) * torch.cos(DDPM.model_time(t) / 400).view(-1, 1, 1, 1)
    return Prediction(eps, "eps", x, DDPM.coefficients(t), (torch.sin(2 * x) + 1) / 2)


def flow_stand_in(x: Tensor, t: Tensor, path=LINEAR, target: str = "v") -> Prediction:
    """-x (1 - t) + 0.5 sin(3 t + x), recorded with t = 0 noise and t = 1 data: here time and velocity are reversed.

    It is read as the velocity, as the noise or as the score.
    """
    t_recorded = (1 - t).view(-1, 1, 1, 1)
    output = -x * (1 - t_recorded) + 0.5 * torch.sin(3 * t_recorded + x)
    return Prediction(-output if target == "v" else output, target, x, path.coefficients(t))
