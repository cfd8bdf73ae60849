"""DDIM (Song et al. 2021, Eq. 12), written for any path x_t = alpha x_0 + sigma eps."""

from collections.abc import Callable

import torch
from torch import Tensor

from .posterior import posterior
from .types import Denoiser, Schedule, call, expand, state_dtype


def ddim(
    denoise: Denoiser,
    x_T: Tensor,
    schedule: Schedule,
    *,
    eta: float = 0.0,
    clip_x_0: float | None = None,
    randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
) -> Tensor:
    """x_s = alpha_s x_0 + sqrt(sigma_s^2 - w^2) eps + w noise with w = eta * posterior deviation; len(schedule) network calls.

    eta = 0 is deterministic and draws nothing; eta = 1 has the variance of ancestral sampling. A learned variance is
    not used. With `clip_x_0`, eps is derived again from the clipped x_0.
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta must be in [0, 1], got {eta}")
    x = x_T.to(state_dtype(x_T))
    for i in range(len(schedule)):
        prediction = call(denoise, x, schedule, i)
        if clip_x_0 is not None:
            clipped = prediction.x_0.clamp(-clip_x_0, clip_x_0)
            prediction = type(prediction)(clipped, "x_0", x, prediction.coefficients)
        now, then = schedule.at(i), schedule.at(i + 1)
        deviation = eta * torch.sqrt(posterior(now, then).variance)
        direction = torch.sqrt((then.sigma**2 - deviation**2).clamp(min=0))
        x = expand(then.alpha, x) * prediction.x_0 + expand(direction, x) * prediction.eps
        if eta > 0 and i + 1 < len(schedule):
            x = x + expand(deviation, x) * randn_like(x)
    return x
