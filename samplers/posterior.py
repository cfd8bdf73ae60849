"""The Gaussian posterior q(x_s | x_t, x_0) of a path x_t = alpha_t x_0 + sigma_t eps, for s < t."""

from typing import NamedTuple

import torch
from torch import Tensor

from .types import Coefficients


class Posterior(NamedTuple):
    """Coefficients of the posterior mean, and the two variances the reverse step may use.

    mean = x_0_weight x_0 + x_t_weight x_t; `variance` is the posterior's own, `beta` the variance of x_t given x_s
    (the "small" and "large" choices of Ho et al. 2020, Section 3.2). Logs are natural; log_variance is clipped from
    below where the variance is zero.
    """

    x_0_weight: Tensor
    x_t_weight: Tensor
    variance: Tensor
    log_variance: Tensor
    beta: Tensor


def posterior(now: Coefficients, then: Coefficients, *, min_log_variance: float | None = None) -> Posterior:
    """q(x_s | x_t, x_0) from the coefficients at t (`now`) and s (`then`): Ho et al. 2020, Eq. 7, for any path.

    With r = alpha_t / alpha_s and beta = sigma_t^2 - r^2 sigma_s^2 (= 1 - r^2 on a variance-preserving path):
    mean = (alpha_s beta x_0 + r sigma_s^2 x_t) / sigma_t^2, variance = beta sigma_s^2 / sigma_t^2.
    """
    ratio = now.alpha / then.alpha
    beta = now.sigma**2 - ratio**2 * then.sigma**2
    variance = beta * then.sigma**2 / now.sigma**2
    log_variance = torch.log(variance)
    if min_log_variance is not None:
        log_variance = log_variance.clamp(min=min_log_variance)
    return Posterior(
        x_0_weight=then.alpha * beta / now.sigma**2,
        x_t_weight=ratio * then.sigma**2 / now.sigma**2,
        variance=variance,
        log_variance=log_variance,
        beta=beta,
    )


def interpolated_log_variance(fraction: Tensor, log_variance: Tensor, log_beta: Tensor) -> Tensor:
    """The learned-range variance, Nichol and Dhariwal 2021, Eq. 15: fraction log beta + (1 - fraction) log variance."""
    return fraction * log_beta + (1 - fraction) * log_variance
