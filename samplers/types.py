"""The contract between a network and a sampler.

Notation: t in [0, 1], t = 0 is data and t = 1 is noise; x_t = alpha(t) x_0 + sigma(t) eps; v is the derivative of x_t
along the path (see Coefficients).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Coefficients(NamedTuple):
    """alpha, sigma and their derivatives along the path, float64, all of one shape.

    The derivatives are with respect to t. A path that is defined at discrete times has alpha = cos(phi) and
    sigma = sin(phi), and its derivatives are with respect to the angle phi, so that v = alpha eps - sigma x_0 (Salimans
    and Ho 2022, Section 4 and Appendix D).
    """

    alpha: Tensor
    sigma: Tensor
    d_alpha: Tensor
    d_sigma: Tensor


@dataclass(frozen=True)
class Schedule:
    """N steps from noise to data: times and path coefficients at N + 1 grid points, float64 on the host.

    t[0] is the noisiest time and t[N] is 0, or a cut before it. `len()` is N, the number of network calls of a first-order sampler.
    `min_log_variance` bounds the log of the posterior variance from below where that variance is zero (the last step
    of a discrete chain); None means no bound is defined. `continuous` says that v = dx_t/dt, which ODE solvers need.
    """

    t: Tensor  # (N+1,)
    coefficients: Coefficients  # each (N+1,)
    min_log_variance: float | None = None
    continuous: bool = True

    def __post_init__(self):
        if len(self.t) < 2 or not bool((self.t[1:] < self.t[:-1]).all()):
            raise ValueError("a schedule needs at least one step, and its times must fall from noise to data")

    def __len__(self) -> int:
        return len(self.t) - 1

    def at(self, index: int) -> Coefficients:
        """The coefficients at one grid point, each a 0-dimensional float64 tensor on the host."""
        return Coefficients(*(c[index] for c in self.coefficients))


def require_velocity(schedule: Schedule) -> None:
    """ValueError for a chain of given times, on which v is no dx/dt."""
    if not schedule.continuous:
        raise ValueError("this path is defined at discrete times only and has no dx/dt; use ancestral, ddim, dpmpp_2m or unipc")


def half_diffusion(c: Coefficients) -> Tensor:
    """sigma (sigma' - sigma alpha' / alpha): half the squared diffusion of the forward process (SiT's drift_var)."""
    return c.sigma * (c.d_sigma - c.sigma * c.d_alpha / c.alpha)


def expand(coefficient: Tensor, like: Tensor) -> Tensor:
    """A (B,) or 0-dimensional coefficient, moved to the device of `like` and shaped to broadcast over (B, ...)."""
    if coefficient.ndim == 0:
        return coefficient.to(like.device, state_dtype(like))
    return columns(coefficient.to(like.device, state_dtype(like), non_blocking=True), like)


def columns(per_row: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, ...), a view that broadcasts over `like` (B, ...)."""
    return per_row.view(-1, *(1 for _ in range(like.ndim - 1)))


def state_dtype(like: Tensor) -> torch.dtype:
    """float64, or float32 on devices without it (MPS)."""
    return torch.float32 if like.device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Prediction:
    """What a network says of x_t: its own parameterisation, the others on demand.

    `value` is (B, C, H, W) and means what `target` says: "eps", "v", "x_0" or "score". `variance_fraction` is DDPM's learned
    interpolation between the log of the posterior variance (0) and of beta (1), Nichol and Dhariwal 2021, Eq. 15;
    it is not clamped, and None where no variance is learned.
    """

    value: Tensor
    target: str
    x_t: Tensor
    coefficients: Coefficients  # each (B,) or 0-dimensional
    variance_fraction: Tensor | None = None

    @property
    def x_0(self) -> Tensor:
        if self.target == "x_0":
            return self.value
        alpha, sigma, d_alpha, d_sigma = self._coefficients()
        if self.target == "v":  # two equations, x_t = a x_0 + s eps and v = a' x_0 + s' eps; singular if a s' = a' s
            return (d_sigma * self.x_t - sigma * self.value) / (alpha * d_sigma - d_alpha * sigma)
        self._refuse_singular("alpha", f"x_0 from {self.target}")
        return (self.x_t - sigma * self.eps) / alpha

    @property
    def eps(self) -> Tensor:
        if self.target == "eps":
            return self.value
        alpha, sigma, d_alpha, d_sigma = self._coefficients()
        if self.target == "v":
            return (alpha * self.value - d_alpha * self.x_t) / (alpha * d_sigma - d_alpha * sigma)
        if self.target == "score":
            return -sigma * self.value
        self._refuse_singular("sigma", "eps from x_0")
        return (self.x_t - alpha * self.value) / sigma

    @property
    def v(self) -> Tensor:
        if self.target == "v":
            return self.value
        _, _, d_alpha, d_sigma = self._coefficients()
        return d_alpha * self.x_0 + d_sigma * self.eps

    @property
    def score(self) -> Tensor:
        """The gradient of log p_t at x_t: -eps / sigma."""
        if self.target == "score":
            return self.value
        self._refuse_singular("sigma", "the score")
        return -self.eps / expand(self.coefficients.sigma, self.x_t)

    def replace_value(self, value: Tensor) -> "Prediction":
        """The same prediction with another value (guidance, clipping)."""
        return Prediction(value, self.target, self.x_t, self.coefficients, self.variance_fraction)

    def _coefficients(self):
        return tuple(expand(c, self.x_t) for c in self.coefficients)

    def _refuse_singular(self, name: str, what: str) -> None:
        coefficient = getattr(self.coefficients, name)  # on the host: no device sync
        if bool((coefficient == 0).any()):
            raise ValueError(f"{what} is singular at {name} = 0; end or start the schedule before that time")


# (x_t (B, C, H, W), t (B,) float64 on the host) -> Prediction
Denoiser = Callable[[Tensor, Tensor], Prediction]


def call(denoise: Denoiser, x: Tensor, schedule: Schedule, index: int) -> Prediction:
    """One network call for the whole batch at grid point `index`."""
    return denoise(x, schedule.t[index].expand(len(x)))
