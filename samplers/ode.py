"""Solvers of the probability-flow ODE dx/dt = v(x, t), from t = 1 (noise) to t = 0 (data)."""

import torch
from torch import Tensor

from .types import Denoiser, Schedule, call, columns, require_velocity, state_dtype


def euler(denoise: Denoiser, x_T: Tensor, schedule: Schedule) -> Tensor:
    """Explicit Euler; order 1; len(schedule) network calls."""
    require_velocity(schedule)
    x = x_T.to(state_dtype(x_T))
    for i in range(len(schedule)):
        step = float(schedule.t[i + 1] - schedule.t[i])
        x = x + step * call(denoise, x, schedule, i).v
    return x


def heun(denoise: Denoiser, x_T: Tensor, schedule: Schedule) -> Tensor:
    """Heun's method (the explicit trapezoidal rule, torchdiffeq's heun2); order 2; 2 len(schedule) network calls."""
    require_velocity(schedule)
    x = x_T.to(state_dtype(x_T))
    for i in range(len(schedule)):
        step = float(schedule.t[i + 1] - schedule.t[i])
        slope = call(denoise, x, schedule, i).v
        slope_ahead = call(denoise, x + step * slope, schedule, i + 1).v
        x = x + step / 2 * (slope + slope_ahead)
    return x


def midpoint(denoise: Denoiser, x_T: Tensor, schedule: Schedule) -> Tensor:
    """The explicit midpoint rule; order 2; 2 len(schedule) network calls, half of them between the grid's times."""
    require_velocity(schedule)
    x = x_T.to(state_dtype(x_T))
    for i in range(len(schedule)):
        t, step = schedule.t[i], float(schedule.t[i + 1] - schedule.t[i])
        slope = call(denoise, x, schedule, i).v
        x = x + step * _slope(denoise, x + step / 2 * slope, t + step / 2)
    return x


def rk4(denoise: Denoiser, x_T: Tensor, schedule: Schedule) -> Tensor:
    """Kutta's 3/8 rule (torchdiffeq's rk4); order 4; 4 len(schedule) network calls."""
    require_velocity(schedule)
    x = x_T.to(state_dtype(x_T))
    for i in range(len(schedule)):
        t, step = schedule.t[i], float(schedule.t[i + 1] - schedule.t[i])
        k1 = call(denoise, x, schedule, i).v
        k2 = _slope(denoise, x + step / 3 * k1, t + step / 3)
        k3 = _slope(denoise, x + step * (k2 - k1 / 3), t + 2 * step / 3)
        k4 = call(denoise, x + step * (k1 - k2 + k3), schedule, i + 1).v
        x = x + step / 8 * (k1 + 3 * (k2 + k3) + k4)
    return x


# Dormand and Prince 1980: nodes, the rows of the tableau (the last of which is the fifth-order solution), and what the
# error estimate weighs the seven slopes with.
_NODES = (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_ROWS = (
    (),
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
SAFETY, SHRINK, GROW = 0.9, 0.2, 10.0  # of the step control; torchdiffeq's
MAX_STEPS = 1000


def dopri5(denoise: Denoiser, x_T: Tensor, schedule: Schedule, *, rtol: float = 1e-3, atol: float = 1e-6) -> Tensor:
    """Dormand-Prince 5(4) with a step size for each image, so that no image depends on its batch; order 5.

    Only the ends of the schedule count. A step is accepted where the root mean square of error / (atol + rtol max(|x|,
    |x_next|)) over the image is at most 1. The batch goes on until its slowest image is done, those that are done stay
    as they are; six network calls a step, and two to begin. FloatingPointError after 1000 steps, or if v is not finite.
    """
    require_velocity(schedule)
    if not (rtol > 0 and atol > 0):
        raise ValueError(f"rtol and atol must be above 0, got {rtol} and {atol}")
    x = x_T.to(state_dtype(x_T))
    end = float(schedule.t[-1])
    t = schedule.t[0].expand(len(x)).clone()  # (B,) on the host, as are the steps
    slope = denoise(x, t).v
    step = _first_step(denoise, x, t, slope, end, rtol, atol)
    for _ in range(MAX_STEPS):
        running = t > end
        if not bool(running.any()):
            return x
        step = torch.where(running, torch.minimum(step, t - end), 0.0)
        slopes = [slope]
        for node, row in zip(_NODES[1:], _ROWS[1:], strict=True):
            change = sum(weight * k for weight, k in zip(row, slopes, strict=True) if weight)
            ahead = x - _columns(step, x) * change
            slopes.append(denoise(ahead, (t - node * step).clamp(min=end)).v)
        error = _columns(step, x) * sum(weight * k for weight, k in zip(_ERROR, slopes, strict=True) if weight)
        ratio = _norm(error / (atol + rtol * torch.maximum(x.abs(), ahead.abs()))).cpu().double()
        if not bool(ratio[running].isfinite().all()):
            raise FloatingPointError("the network's velocity is NaN or infinite: the samples diverged")
        accepted = running & (ratio <= 1)
        keep = _columns(accepted, x).bool()
        x, slope = torch.where(keep, ahead, x), torch.where(keep, slopes[-1], slope)
        t = torch.where(accepted, torch.where(step == t - end, end, t - step), t)
        step = step * (SAFETY * ratio.clamp(min=1e-10) ** -0.2).clamp(SHRINK, GROW)  # smaller where it was not accepted
    raise FloatingPointError(
        f"dopri5 did not come from noise to data in {MAX_STEPS} steps: raise rtol, or use a fixed-step sampler"
    )


def _first_step(denoise, x: Tensor, t: Tensor, slope: Tensor, end: float, rtol: float, atol: float) -> Tensor:
    """A first step for each image, (B,) on the host (Hairer et al. 1993, Section II.4); one network call."""
    scale = atol + rtol * x.abs()
    size, speed = (_norm(z / scale).cpu().double() for z in (x, slope))
    guess = torch.where((size < 1e-5) | (speed < 1e-5), 1e-6, 0.01 * size / speed.clamp(min=1e-12))
    guess = torch.minimum(guess, t - end)
    ahead = denoise(x - _columns(guess, x) * slope, t - guess).v
    bend = _norm((ahead - slope) / scale).cpu().double() / guess
    largest = torch.maximum(speed, bend)
    small = torch.maximum(torch.full_like(guess, 1e-6), guess * 1e-3)
    return torch.minimum(100 * guess, torch.where(largest <= 1e-15, small, (0.01 / largest.clamp(min=1e-15)) ** 0.2))


def _slope(denoise: Denoiser, x: Tensor, t: Tensor) -> Tensor:
    """The velocity at a time between those of the grid, the same for all rows."""
    return denoise(x, t.expand(len(x))).v


def _columns(per_image: Tensor, like: Tensor) -> Tensor:
    return columns(per_image.to(like.device, like.dtype), like)


def _norm(x: Tensor) -> Tensor:
    """The root mean square over each image, (B,)."""
    return x.flatten(1).square().mean(1).sqrt()
