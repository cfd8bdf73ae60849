"""Fixed-step solvers of the probability-flow ODE dx/dt = v(x, t), from t = 1 (noise) to t = 0 (data)."""

from torch import Tensor

from .types import Denoiser, Schedule, call, state_dtype


def euler(denoise: Denoiser, x_T: Tensor, schedule: Schedule) -> Tensor:
    """Explicit Euler; order 1; len(schedule) network calls."""
    _refuse_discrete(schedule)
    x = x_T.to(state_dtype(x_T))
    for i in range(len(schedule)):
        step = float(schedule.t[i + 1] - schedule.t[i])
        x = x + step * call(denoise, x, schedule, i).v
    return x


def heun(denoise: Denoiser, x_T: Tensor, schedule: Schedule) -> Tensor:
    """Heun's method (the explicit trapezoidal rule, torchdiffeq's heun2); order 2; 2 len(schedule) network calls."""
    _refuse_discrete(schedule)
    x = x_T.to(state_dtype(x_T))
    for i in range(len(schedule)):
        step = float(schedule.t[i + 1] - schedule.t[i])
        slope = call(denoise, x, schedule, i).v
        slope_ahead = call(denoise, x + step * slope, schedule, i + 1).v
        x = x + step / 2 * (slope + slope_ahead)
    return x


def _refuse_discrete(schedule: Schedule) -> None:
    if not schedule.continuous:
        raise ValueError("this path is defined at discrete times only and has no dx/dt; use ancestral or ddim")
