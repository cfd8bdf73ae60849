"""Paths from data to noise: x_t = alpha(t) x_0 + sigma(t) eps, with t = 0 data and t = 1 noise.

A path says its coefficients, the law of the training times, what the network is fed for a time, and the sampling grid.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from samplers.posterior import posterior
from samplers.types import Coefficients, Schedule

MAX_STEPS = 100_000  # of a sampling grid
TIME_LAWS = ("uniform", "logit-normal")


class Interpolant(Protocol):
    """What objectives and samplers ask of a path. Times are float64 in [0, 1]."""

    def coefficients(self, t: Tensor) -> Coefficients:
        """alpha, sigma and their derivatives along the path at t, of its shape and device."""

    def sample_t(self, u: Tensor) -> Tensor:
        """Training times from uniform draws u in [0, 1): the inverse distribution function of the time law."""

    def model_time(self, t: Tensor) -> Tensor:
        """What the network is fed."""

    def schedule(
        self, num_steps: int | str, *, start: float = 1.0, stop: float = 0.0, last_step: float = 0.0, shift: float | None = None
    ) -> Schedule:
        """The sampling grid of num_steps steps from t = start to t = stop."""


@dataclass(frozen=True)
class ContinuousPath:
    """Base of the paths that are defined for all t; a subclass gives `coefficients`.

    `time_scale` multiplies what the network is fed; SiT feeds t itself (time_scale 1), which leaves most of the
    sinusoids of the time embedding nearly constant. `data_at_1` feeds 1 - t: the direction of SiT's published code.
    `time_law` of the training times: uniform, or logit-normal, t = sigmoid(z) with z ~ N(0, 1) (Esser et al. 2024,
    Section 3.1), which spends more of the training where the velocity is hardest to tell. `time_shift` s moves them to
    s t / (1 + (s - 1) t), more noise for s > 1 (their Section 5.3.2: larger images need more), and the sampling grid too.
    """

    time_scale: float = 1000.0
    data_at_1: bool = False
    time_law: str = "uniform"
    time_shift: float = 1.0

    def __post_init__(self):
        if self.time_law not in TIME_LAWS:
            raise ValueError(f"objective.time_law must be uniform or logit-normal, got {self.time_law!r}")
        check_positive(self.time_shift, "objective.time_shift")
        check_positive(self.time_scale, "objective.time_scale")

    def coefficients(self, t: Tensor) -> Coefficients:
        raise NotImplementedError

    def sample_t(self, u: Tensor) -> Tensor:
        return shifted(u if self.time_law == "uniform" else torch.sigmoid(torch.special.ndtri(u)), self.time_shift)

    def model_time(self, t: Tensor) -> Tensor:
        return self.time_scale * (1 - t if self.data_at_1 else t)

    def schedule(
        self, num_steps: int | str, *, start: float = 1.0, stop: float = 0.0, last_step: float = 0.0, shift: float | None = None
    ) -> Schedule:
        """`last_step` is the length of the last of the steps, 0 for one as long as the others; `shift` replaces time_shift."""
        num = _positive_count(num_steps)
        before_last = stop + last_step
        inner = num - 1 if last_step and num > 1 else num
        t = torch.arange(inner, -1, -1, dtype=torch.float64) / inner  # linspace misses round times by a last bit
        t = shifted(t, self.time_shift if shift is None else shift)
        if (start, before_last) != (1.0, 0.0):
            t = before_last + (start - before_last) * t
        if inner < num:
            t = torch.cat([t, torch.tensor([stop], dtype=torch.float64)])
        elif last_step:  # a single step goes all the way
            t[-1] = stop
        return Schedule(t, self.coefficients(t))


@dataclass(frozen=True)
class Linear(ContinuousPath):
    """Rectified flow (Liu et al. 2023; SiT's Linear): alpha = 1 - t, sigma = t, so v = eps - x_0."""

    def coefficients(self, t: Tensor) -> Coefficients:
        one = torch.ones_like(t)
        return Coefficients(1 - t, t, -one, one)


@dataclass(frozen=True)
class GVP(ContinuousPath):
    """Generalised variance-preserving path (SiT, Ma et al. 2024): alpha = cos(pi t / 2), sigma = sin(pi t / 2)."""

    def coefficients(self, t: Tensor) -> Coefficients:
        angle = t * (math.pi / 2)
        alpha, sigma = torch.cos(angle), torch.sin(angle)
        alpha = torch.where(t == 1, 0.0, alpha)  # cos(pi / 2) is 6e-17 in float64
        return Coefficients(alpha, sigma, -math.pi / 2 * sigma, math.pi / 2 * alpha)


@dataclass(frozen=True)
class VP(ContinuousPath):
    """The variance-preserving diffusion of Song et al. 2021 with SiT's constants, beta from 0.1 to 20.

    log alpha = -t^2 (20 - 0.1) / 4 - 0.1 t / 2, sigma^2 = 1 - alpha^2. At t = 1 alpha is 0.0066; at t = 0 the derivative
    of sigma is infinite.
    """

    BETA_MIN, BETA_MAX = 0.1, 20.0

    def coefficients(self, t: Tensor) -> Coefficients:
        slope = self.BETA_MAX - self.BETA_MIN
        log_alpha = -(t**2) * slope / 4 - t * self.BETA_MIN / 2
        d_log_alpha = -t * slope / 2 - self.BETA_MIN / 2
        alpha, sigma = torch.exp(log_alpha), torch.sqrt(-torch.expm1(2 * log_alpha))
        return Coefficients(alpha, sigma, alpha * d_log_alpha, -(alpha**2) * d_log_alpha / sigma)


def shifted(t: Tensor, shift: float) -> Tensor:
    """shift t / (1 + (shift - 1) t): times moved towards the noise for shift > 1; 0 and 1 stay."""
    return t if shift == 1 else shift * t / (1 + (shift - 1) * t)


def check_positive(value: float, name: str) -> None:
    """ValueError for what is not a positive number."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value}")


@dataclass(frozen=True)
class DiscreteVP:
    """DDPM's chain (Ho et al. 2020): beta linear from 1e-4 to 0.02 over 1000 steps, alpha^2 = prod(1 - beta).

    Index i of the chain is t = (i + 1) / 1000; t = 0 is data. The network is fed i. Coefficients exist at these
    times only; their derivatives are with respect to the angle, alpha = cos(phi) and sigma = sin(phi).
    """

    num_timesteps: int = 1000

    @cached_property
    def _alphas_cumprod(self) -> Tensor:
        """(num_timesteps + 1,) float64; entry 0 is data (1.0), entry i + 1 is index i of the chain."""
        scale = 1000 / self.num_timesteps
        betas = torch.linspace(scale * 1e-4, scale * 0.02, self.num_timesteps, dtype=torch.float64)
        return torch.cat([torch.ones(1, dtype=torch.float64), torch.cumprod(1 - betas, dim=0)])

    def coefficients(self, t: Tensor) -> Coefficients:
        a = self._alphas_cumprod.to(t.device)[self._grid_index(t)]
        alpha, sigma = torch.sqrt(a), torch.sqrt(1 - a)
        return Coefficients(alpha, sigma, -sigma, alpha)

    def sample_t(self, u: Tensor) -> Tensor:
        return (torch.floor(u * self.num_timesteps) + 1) / self.num_timesteps

    def model_time(self, t: Tensor) -> Tensor:
        return (self._grid_index(t) - 1).to(t.dtype)

    def previous(self, t: Tensor) -> Tensor:
        """The neighbouring time of the full chain, one index nearer to the data."""
        return (self._grid_index(t) - 1).to(t.dtype) / self.num_timesteps

    @cached_property
    def min_log_variance(self) -> float:
        """The full chain's log posterior variance at index 1, which also stands in for index 0, where it is -inf."""
        return self._log_variance_at_index_1(torch.arange(self.num_timesteps))

    def schedule(
        self, num_steps: int | str, *, start: float = 1.0, stop: float = 0.0, last_step: float = 0.0, shift: float | None = None
    ) -> Schedule:
        if (start, stop, last_step) != (1.0, 0.0, 0.0) or shift not in (None, 1.0):
            raise ValueError("path ddpm is a chain of given times: it has no other start, stop, last step or shift")
        kept = respaced_timesteps(num_steps, self.num_timesteps)
        t = torch.cat([(kept.flip(0) + 1).double() / self.num_timesteps, torch.zeros(1, dtype=torch.float64)])
        floor = self._log_variance_at_index_1(kept) if len(kept) > 1 else None
        return Schedule(t, self.coefficients(t), min_log_variance=floor, continuous=False)

    def _log_variance_at_index_1(self, kept: Tensor) -> float:
        both = self.coefficients((kept[:2] + 1).double() / self.num_timesteps)
        then, now = (Coefficients(*(c[i] for c in both)) for i in (0, 1))
        return float(posterior(now, then).log_variance)

    def _grid_index(self, t: Tensor) -> Tensor:
        return torch.round(t * self.num_timesteps).long()


def respaced_timesteps(spacing: int | str, num_timesteps: int) -> Tensor:
    """The indices of the full chain that a shorter one keeps, rising, int64 (Nichol and Dhariwal 2021, Section 4).

    "N" or N: N indices evenly spread from first to last. "a,b,c": consecutive sections of the chain (the first ones
    longer by one where it does not divide) with a, b, c indices. "ddimN": multiples of the smallest stride that gives N.
    """
    text = str(spacing)
    if text.startswith("ddim") and text[4:].isdigit():
        wanted = int(text[4:])
        for stride in range(1, num_timesteps + 1):
            if len(range(0, num_timesteps, stride)) == wanted:
                return torch.arange(0, num_timesteps, stride)
        raise ValueError(f"no integer stride keeps exactly {wanted} of {num_timesteps} steps: use {wanted} instead of {text}")
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"num_steps must be a count, a list like 10,15,20 or ddimN, got {text!r}")
    counts = [int(part) for part in parts]
    length, longer = divmod(num_timesteps, len(counts))
    kept, start = [], 0
    for section, count in enumerate(counts):
        size = length + (section < longer)
        if count > size:
            raise ValueError(f"cannot keep {count} steps of a section of {size}: num_steps may be at most {num_timesteps} in all")
        stride = 1.0 if count == 1 else (size - 1) / (count - 1)
        position = 0.0
        for _ in range(count):  # accumulated, not multiplied: the recorded chains round this way
            kept.append(start + round(position))
            position += stride
        start += size
    return torch.tensor(kept)


def _positive_count(num_steps: int | str) -> int:
    if not str(num_steps).isdigit() or not 1 <= int(num_steps) <= MAX_STEPS:
        raise ValueError(f"num_steps must be a positive count for this path, at most {MAX_STEPS}, got {num_steps!r}")
    return int(num_steps)


PATHS = {"linear": Linear, "gvp": GVP, "vp": VP, "ddpm": DiscreteVP}
