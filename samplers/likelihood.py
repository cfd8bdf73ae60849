"""The likelihood of data under the probability-flow ODE (Chen et al. 2018; Song et al. 2021, Section 4.3)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .types import Denoiser, Schedule, call, require_velocity, state_dtype


def log_likelihood(
    denoise: Denoiser, x_0: Tensor, schedule: Schedule, *, probe_like: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """log p(x_0) in nats, (B,) float64 on the host: log N(x_1; 0, 1) plus the integral of div v from data to noise.

    Heun's method up the schedule's grid; 2 len(schedule) network calls with a gradient each. The divergence is Hutchinson's
    estimate e' (dv/dx) e with one probe e for each image and the whole path, by default of random signs; its mean over
    probes is the log-likelihood. x_0 counts as the state at the schedule's last time.
    """
    require_velocity(schedule)
    x = x_0.to(state_dtype(x_0))
    probe = (probe_like or random_signs)(x)
    change = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    for i in range(len(schedule), 0, -1):
        step = float(schedule.t[i - 1] - schedule.t[i])
        slope, divergence = _field(denoise, x, schedule, i, probe)
        slope_ahead, divergence_ahead = _field(denoise, x + step * slope, schedule, i - 1, probe)
        x = x + step / 2 * (slope + slope_ahead)
        change = change + step / 2 * (divergence + divergence_ahead)
    log_normal = -0.5 * (x.square() + math.log(2 * math.pi)).flatten(1).sum(1)
    return (log_normal + change).cpu().double()


def random_signs(x: Tensor) -> Tensor:
    """-1 and 1, each as likely, of the shape of x: the probe of least variance among independent ones."""
    return torch.randint_like(x, 2) * 2 - 1


def _field(denoise: Denoiser, x: Tensor, schedule: Schedule, i: int, probe: Tensor) -> tuple[Tensor, Tensor]:
    """v at a grid point, and probe' (dv/dx) probe of each image."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        v = call(denoise, x, schedule, i).v
        (product,) = torch.autograd.grad((v * probe).sum(), x)
    return v.detach(), (product * probe).flatten(1).sum(1)
