"""Multistep solvers in half the log signal-to-noise ratio, for 10 to 25 network calls; for any path x_t = alpha x_0 + sigma eps.

With lambda = log(alpha / sigma), h = lambda_s - lambda_t > 0 and x_0 linear in lambda, a step is exact up to the order.
"""

import math

from torch import Tensor

from .types import Denoiser, Schedule, call, state_dtype


def dpmpp_2m(denoise: Denoiser, x_T: Tensor, schedule: Schedule) -> Tensor:
    """DPM-Solver++(2M) (Lu et al. 2022, Algorithm 2); order 2; len(schedule) network calls.

    First order where there is no step before, where one of two is infinitely long in lambda, and at the last step.
    """
    x = x_T.to(state_dtype(x_T))
    x_0_before, h_before = None, math.inf
    for i in range(len(schedule)):
        h = _log_snr(schedule, i + 1) - _log_snr(schedule, i)
        x_0 = call(denoise, x, schedule, i).x_0
        estimate = x_0
        if i + 1 < len(schedule) and math.isfinite(h) and math.isfinite(h_before):
            estimate = x_0 + h / (2 * h_before) * (x_0 - x_0_before)
        x = _step(x, estimate, schedule, i, h)
        x_0_before, h_before = x_0, h
    return x


def unipc(denoise: Denoiser, x_T: Tensor, schedule: Schedule) -> Tensor:
    """UniPC-2 with B(h) = e^h - 1 predicting x_0 (Zhao et al. 2023); order 3 with its corrector; len(schedule) network calls.

    Each call serves the corrector of the step before and the predictor of the next. First order as in `dpmpp_2m`, without
    corrector there.
    """
    x = x_T.to(state_dtype(x_T))
    known: list[tuple[float, Tensor]] = []  # (lambda, x_0) of the last two grid points
    start = x  # the state the last step began from
    for i in range(len(schedule)):
        here = _log_snr(schedule, i)
        x_0 = call(denoise, x, schedule, i).x_0
        if i and math.isfinite(here - known[-1][0]):
            x = _corrected(start, x_0, known, schedule, i - 1)
        known = [*known[-1:], (here, x_0)]
        start, h = x, _log_snr(schedule, i + 1) - here
        x = _step(x, x_0, schedule, i, h)
        if math.isfinite(h) and len(known) == 2 and math.isfinite(here - known[0][0]):
            x = x - float(schedule.at(i + 1).alpha) * math.expm1(-h) * 0.5 * _slope(known, h)
    return x


def _slope(known: list[tuple[float, Tensor]], h: float) -> Tensor:
    """The change of x_0 over a step of length h, from the last two points."""
    (before, x_0_before), (here, x_0) = known
    return (x_0_before - x_0) / ((before - here) / h)


def _corrected(start: Tensor, x_0: Tensor, known: list[tuple[float, Tensor]], schedule: Schedule, i: int) -> Tensor:
    """The step from grid point i again, now that x_0 at its end is known: UniC of order 2, or of order 1 after one point."""
    here, x_0_here = known[-1]
    h = _log_snr(schedule, i + 1) - here
    x = _step(start, x_0_here, schedule, i, h)
    scale = float(schedule.at(i + 1).alpha) * -math.expm1(-h)
    if len(known) < 2 or not math.isfinite(here - known[0][0]):
        return x + scale * 0.5 * (x_0 - x_0_here)
    r = (known[0][0] - here) / h  # negative
    phi = (math.expm1(-h) / -h - 1) / math.expm1(-h), 2 * ((math.expm1(-h) / -h - 1) / -h - 0.5) / math.expm1(-h)
    old = (phi[0] - phi[1]) / (1 - r)  # the weights solve old + new = phi_1, r old + new = phi_2
    return x + scale * (old * _slope(known, h) + (phi[0] - old) * (x_0 - x_0_here))


def _step(x: Tensor, x_0: Tensor, schedule: Schedule, i: int, h: float) -> Tensor:
    """First order: sigma_s / sigma_t x + alpha_s (1 - e^-h) x_0, also where alpha_t or sigma_s is 0."""
    now, then = schedule.at(i), schedule.at(i + 1)
    return float(then.sigma / now.sigma) * x - float(then.alpha) * math.expm1(-h) * x_0


def _log_snr(schedule: Schedule, i: int) -> float:
    """lambda at grid point i; infinite at the ends of a path that reaches them."""
    c = schedule.at(i)
    alpha, sigma = float(c.alpha), float(c.sigma)
    if alpha == 0 or sigma == 0:
        return -math.inf if alpha == 0 else math.inf
    return math.log(alpha / sigma)
