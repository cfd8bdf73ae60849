"""DDPM ancestral sampling (Ho et al. 2020, Algorithm 2), with the learned variance of Nichol and Dhariwal 2021."""

from collections.abc import Callable

import torch
from torch import Tensor

from .posterior import interpolated_log_variance, posterior
from .types import Denoiser, Schedule, call, expand, state_dtype


def ancestral(
    denoise: Denoiser,
    x_T: Tensor,
    schedule: Schedule,
    *,
    clip_x_0: float | None = None,
    randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
) -> Tensor:
    """Draw x_s ~ p(x_s | x_t) down the grid; len(schedule) network calls, no noise at the last step.

    The variance is the learned one where the prediction carries `variance_fraction`, else the posterior's.
    `clip_x_0` clamps the predicted x_0 to [-clip_x_0, clip_x_0]; DiT does not clip latents.
    """
    x = x_T.to(state_dtype(x_T))
    for i in range(len(schedule)):
        prediction = call(denoise, x, schedule, i)
        x_0 = prediction.x_0 if clip_x_0 is None else prediction.x_0.clamp(-clip_x_0, clip_x_0)
        q = posterior(schedule.at(i), schedule.at(i + 1), min_log_variance=schedule.min_log_variance)
        x = expand(q.x_0_weight, x) * x_0 + expand(q.x_t_weight, x) * x
        if i + 1 == len(schedule):
            return x
        log_variance = expand(q.log_variance, x)
        if prediction.variance_fraction is not None:
            log_beta = expand(q.beta.log(), x)
            log_variance = interpolated_log_variance(prediction.variance_fraction, log_variance, log_beta)
        x = x + torch.exp(log_variance / 2) * randn_like(x)
    return x
