"""Solvers of the reverse-time SDE that shares the ODE's marginals, with any diffusion (SiT, Ma et al. 2024, Section 2.4).

In steps h > 0 towards the data: dx = (-v + w score) h + sqrt(2 w h) noise, w(t) >= 0 being free to choose; sqrt(2 w) is the
diffusion g of g^2 / 2 = w, as REPA writes it.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .types import Coefficients, Denoiser, Prediction, Schedule, call, half_diffusion, require_velocity, state_dtype

DIFFUSIONS = ("sigma", "SBDM", "constant", "linear", "decreasing", "increasing-decreasing")
LAST_STEPS = ("mean", "tweedie", "euler", "none")


def euler_maruyama(
    denoise: Denoiser,
    x_T: Tensor,
    schedule: Schedule,
    *,
    diffusion: str = "sigma",
    diffusion_norm: float = 1.0,
    last_step: str = "mean",
    randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
) -> Tensor:
    """Euler-Maruyama; weak order 1; len(schedule) network calls: drift and score come from one.

    `last_step` is the last step of the schedule, without noise: its drift ("mean"), the velocity alone ("euler"), x_0 as
    the network sees it ("tweedie"); or "none", a step like the others.
    """
    _check(schedule, diffusion, diffusion_norm, last_step)
    x = x_T.to(state_dtype(x_T))
    for i in range(len(schedule)):
        step = float(schedule.t[i] - schedule.t[i + 1])
        prediction = call(denoise, x, schedule, i)
        if i + 1 == len(schedule) and last_step != "none":
            return _last(x, prediction, schedule, i, step, last_step, diffusion, diffusion_norm)
        drift, w = _drift(prediction, schedule.t[i], schedule.at(i), diffusion, diffusion_norm)
        x = x + step * drift + math.sqrt(2 * w * step) * randn_like(x)
    return x


def stochastic_heun(
    denoise: Denoiser,
    x_T: Tensor,
    schedule: Schedule,
    *,
    diffusion: str = "sigma",
    diffusion_norm: float = 1.0,
    last_step: str = "mean",
    randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
) -> Tensor:
    """Heun's rule for the drift after the noise of the step was added, SiT's order; two network calls a step.

    The last step, one call, is as in `euler_maruyama`.
    """
    _check(schedule, diffusion, diffusion_norm, last_step)
    x = x_T.to(state_dtype(x_T))
    for i in range(len(schedule)):
        step = float(schedule.t[i] - schedule.t[i + 1])
        if i + 1 == len(schedule) and last_step != "none":
            prediction = call(denoise, x, schedule, i)
            return _last(x, prediction, schedule, i, step, last_step, diffusion, diffusion_norm)
        ratio = _ratio(diffusion, diffusion_norm, schedule.t[i], schedule.at(i))
        x = x + math.sqrt(2 * ratio * float(schedule.at(i).sigma) * step) * randn_like(x)
        drift, _ = _drift(call(denoise, x, schedule, i), schedule.t[i], schedule.at(i), diffusion, diffusion_norm)
        ahead = call(denoise, x + step * drift, schedule, i + 1)
        drift_ahead, _ = _drift(ahead, schedule.t[i + 1], schedule.at(i + 1), diffusion, diffusion_norm)
        x = x + step / 2 * (drift + drift_ahead)
    return x


def _drift(prediction: Prediction, t: Tensor, c: Coefficients, diffusion: str, norm: float) -> tuple[Tensor, float]:
    """-v + w score, and w; written with w / sigma, which has a limit where sigma is 0 and the score has none."""
    ratio = _ratio(diffusion, norm, t, c)
    return -prediction.v - ratio * prediction.eps, ratio * float(c.sigma)


def _ratio(diffusion: str, norm: float, t: Tensor, c: Coefficients) -> float:
    """w(t) / sigma(t) for the named w: SiT's forms with its t turned round, times `norm` (which `decreasing` does not take)."""
    t, sigma = float(t), float(c.sigma)
    if diffusion == "sigma":
        return norm
    if diffusion == "SBDM":  # Song et al. 2021
        return norm * (float(half_diffusion(c)) / sigma if sigma else float(c.d_sigma))
    if diffusion == "constant":
        return norm / sigma if norm else 0.0
    if diffusion == "linear":
        return norm * t / sigma if sigma else norm / float(c.d_sigma)
    w = 0.25 * (1 - math.cos(math.pi * t)) ** 2 if diffusion == "decreasing" else norm * math.sin(math.pi * t) ** 2
    return w / sigma if sigma else 0.0  # both fall faster than sigma


def _last(x, prediction: Prediction, schedule: Schedule, i: int, step: float, kind: str, diffusion: str, norm: float) -> Tensor:
    if kind == "tweedie":
        return prediction.x_0
    if kind == "euler":
        return x - step * prediction.v
    return x + step * _drift(prediction, schedule.t[i], schedule.at(i), diffusion, norm)[0]


def _check(schedule: Schedule, diffusion: str, norm: float, last_step: str) -> None:
    require_velocity(schedule)
    if diffusion not in DIFFUSIONS:
        raise ValueError(f"diffusion must be one of {', '.join(DIFFUSIONS)}, got {diffusion!r}")
    if last_step not in LAST_STEPS:
        raise ValueError(f"last_step must be one of {', '.join(LAST_STEPS)}, got {last_step!r}")
    if not 0 <= norm < math.inf:
        raise ValueError(f"diffusion_norm must not be negative, got {norm}")
    if diffusion == "decreasing" and norm != 1:
        raise ValueError(f"diffusion decreasing has no other diffusion_norm than 1, got {norm}: it would not vanish at the data")
    if diffusion == "SBDM" and float(schedule.at(0).alpha) == 0:
        raise ValueError("diffusion SBDM is infinite where alpha is 0: start the schedule after it")
    if diffusion == "constant" and last_step == "none" and norm and float(schedule.at(len(schedule)).sigma) == 0:
        raise ValueError("a constant diffusion has no end where sigma is 0: stop the schedule before it, or take a last step")
