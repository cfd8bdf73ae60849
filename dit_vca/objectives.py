"""An objective turns a network into a loss and into a prediction: a path, what the network predicts, and their losses."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from samplers.posterior import Posterior, interpolated_log_variance, posterior
from samplers.types import Coefficients, Prediction, expand

from .interpolants import PATHS, DiscreteVP, Interpolant, Linear


@dataclass(frozen=True)
class Objective:
    """`target` is "v" or "eps". `learn_variance` adds DDPM's variational bound for the second half of the channels.

    The velocity v is the derivative of x_t along the path: eps - x_0 on path linear, alpha eps - sigma x_0 on path ddpm.
    """

    path: Interpolant
    target: str
    learn_variance: bool = False

    def __post_init__(self):
        if self.target not in ("v", "eps"):
            raise ValueError(f"objective.target must be v or eps, got {self.target!r}")
        discrete = isinstance(self.path, DiscreteVP)
        if self.target == "eps" and not discrete:
            raise ValueError("objective.target eps on path linear is singular at the data end: use target v")
        if self.learn_variance and not discrete:
            raise ValueError("objective.learn_variance is defined for path ddpm only")

    def loss(self, model, x_0: Tensor, y: Tensor, *, t: Tensor, eps: Tensor) -> dict[str, Tensor]:
        """Per-sample terms (B,) float32: "mse", and "vb" where the variance is learned; the training loss is their sum.

        x_0, eps (B, C, H, W) float32; y (B,) int64; t (B,) float64 in [0, 1], on the host or on the device.
        """
        now = self.path.coefficients(t)
        alpha, sigma = (_columns(c, x_0) for c in now[:2])
        x_t = alpha * x_0 + sigma * eps
        output, fraction = self._run(model, x_t, t, y)
        goal = eps if self.target == "eps" else _columns(now.d_alpha, x_0) * x_0 + _columns(now.d_sigma, x_0) * eps
        terms = {"mse": _mean_per_sample((output - goal) ** 2)}
        if self.learn_variance:
            # The bound trains the variance alone: the mean is held fixed (Nichol and Dhariwal 2021, Section 3.1).
            x_0_hat = Prediction(output.detach(), self.target, x_t, now).x_0.to(x_t.dtype)
            terms["vb"] = self._variational_bound(x_0_hat, fraction, x_t, x_0, t, now)
        return terms

    def predict(self, model, x_t: Tensor, t: Tensor, y: Tensor) -> Prediction:
        """The sampler's side: x_t (B, C, H, W) in the sampler's dtype, t (B,) float64 on the host, y (B,) int64.

        The network runs in the dtype of its weights; its output is returned in the dtype of x_t.
        """
        weights_dtype = next(model.parameters()).dtype
        output, fraction = self._run(model, x_t.to(weights_dtype), t, y)
        return Prediction(
            output.to(x_t.dtype),
            self.target,
            x_t,
            self.path.coefficients(t),
            None if fraction is None else (fraction.to(x_t.dtype) + 1) / 2,
        )

    def _run(self, model, x_t: Tensor, t: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """The network's mouth: its time, its channels, its sign. Returns the target's prediction and raw variance channels.

        A network of 2C outputs under an objective without learned variance answers with its first C (SiT's checkpoints).
        """
        output = model(x_t, self.path.model_time(t).to(x_t.device, torch.float32, non_blocking=True), y).float()
        channels = x_t.shape[1]
        rest = output[:, channels:] if self.learn_variance else None
        output = output[:, :channels]
        if isinstance(self.path, Linear) and self.path.data_at_1:  # the network's velocity is dx/d(1 - t)
            output = -output
        return output, rest

    def _variational_bound(self, x_0_hat, raw_variance, x_t, x_0, t, now: Coefficients) -> Tensor:
        """The bound's term at t in bits per dimension (Ho et al. 2020, Eq. 5), (B,).

        At the first index it is the likelihood of a discretised Gaussian with bins of 2/255, a pixel likelihood that
        DiT applies to latents; kept for parity.
        """
        q = posterior(now, self.path.coefficients(self.path.previous(t)), min_log_variance=self.path.min_log_variance)
        mean = _posterior_mean(q, x_0, x_t)
        mean_hat = _posterior_mean(q, x_0_hat, x_t)
        log_variance = _columns(q.log_variance, x_t)
        log_variance_hat = interpolated_log_variance((raw_variance + 1) / 2, log_variance, _columns(q.beta.log(), x_t))
        kl = _normal_kl(mean, log_variance, mean_hat, log_variance_hat)
        nll = -_discretized_log_likelihood(x_0, mean_hat, log_variance_hat / 2)
        first = (self.path.model_time(t) == 0).to(x_t.device, non_blocking=True).view(-1, *(1 for _ in range(x_t.ndim - 1)))
        return _mean_per_sample(torch.where(first, nll, kl)) / math.log(2)


def build_objective(
    path: str, *, target: str, learn_variance: bool = False, time_scale: float = 1000.0, data_at_1: bool = False,
    time_law: str = "uniform",
) -> Objective:  # fmt: skip
    """An objective from the names in a config; the last three are options of path linear."""
    if path not in PATHS:
        raise ValueError(f"objective.path must be one of {', '.join(PATHS)}, got {path!r}")
    interpolant = Linear(time_scale, data_at_1, time_law) if path == "linear" else PATHS[path]()
    objective = Objective(interpolant, target, learn_variance)
    if path == "ddpm" and time_law != "uniform":
        raise ValueError(f"objective.time_law {time_law} is an option of path linear; path ddpm draws its steps uniformly")
    return objective


def _columns(coefficient: Tensor, like: Tensor) -> Tensor:
    """(B,) float64 -> (B, 1, 1, 1) in the dtype of `like`: coefficients are exact, training tensors float32."""
    return expand(coefficient, like).to(like.dtype)


def _posterior_mean(q: Posterior, x_0: Tensor, x_t: Tensor) -> Tensor:
    return _columns(q.x_0_weight, x_t) * x_0 + _columns(q.x_t_weight, x_t) * x_t


def _mean_per_sample(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


def _normal_kl(mean_1: Tensor, log_variance_1: Tensor, mean_2: Tensor, log_variance_2: Tensor) -> Tensor:
    """KL(N(mean_1, var_1) || N(mean_2, var_2)) in nats, elementwise."""
    difference = log_variance_1 - log_variance_2
    return 0.5 * (torch.exp(difference) - 1 - difference + (mean_1 - mean_2) ** 2 * torch.exp(-log_variance_2))


def _discretized_log_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """log P of the bin [x - 1/255, x + 1/255] under a Gaussian, elementwise; the outermost bins are open.

    The normal distribution function is the tanh approximation 0.5 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))), and
    probabilities are clamped at 1e-12 before the logarithm, both as in the reference values.
    """
    inverse_scale = torch.exp(-log_scale)
    upper = _approximate_normal_cdf((x + 1 / 255 - mean) * inverse_scale)
    lower = _approximate_normal_cdf((x - 1 / 255 - mean) * inverse_scale)
    probability = torch.where(x < -0.999, upper, torch.where(x > 0.999, 1 - lower, upper - lower))
    return torch.log(probability.clamp(min=1e-12))


def _approximate_normal_cdf(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
