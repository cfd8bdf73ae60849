"""An objective turns a network into a loss and into a prediction: a path, what the network predicts, and their losses."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from samplers.posterior import Posterior, interpolated_log_variance, posterior
from samplers.types import Coefficients, Prediction, Schedule, columns, expand, half_diffusion

from .interpolants import PATHS, VP, ContinuousPath, DiscreteVP, Interpolant

TARGETS = ("v", "eps", "x_0", "score")
WEIGHTINGS = ("none", "velocity", "likelihood", "min-snr")
TRAIN_CUT, TRAIN_CUT_VP, SAMPLE_CUT = 1e-3, 1e-5, 1e-3  # how near a singular end training and sampling go; SiT's


@dataclass(frozen=True)
class Objective:
    """A path and what the network predicts on it: the velocity, the noise, the data, or the score.

    The velocity v is the derivative of x_t along the path: eps - x_0 on path linear, alpha eps - sigma x_0 on path ddpm.
    `learn_variance` adds DDPM's variational bound for the second half of the channels. `weighting` of the square error:
    "velocity" and "likelihood" are SiT's (Ma et al. 2024, Section 2.3), of noise and score on a continuous path; "min-snr"
    is of path ddpm (Hang et al. 2023) with the cap `min_snr_gamma`. `direction` weighs a further term, 1 less the cosine
    of output and target over the channels (Yao et al. 2025, LightningDiT).
    """

    path: Interpolant
    target: str
    learn_variance: bool = False
    weighting: str = "none"
    min_snr_gamma: float = 5.0
    direction: float = 0.0

    def __post_init__(self):
        if self.target not in TARGETS:
            raise ValueError(f"objective.target must be one of {', '.join(TARGETS)}, got {self.target!r}")
        if self.weighting not in WEIGHTINGS:
            raise ValueError(f"objective.weighting must be one of {', '.join(WEIGHTINGS)}, got {self.weighting!r}")
        discrete = isinstance(self.path, DiscreteVP)
        if self.learn_variance and not discrete:
            raise ValueError("objective.learn_variance is defined for path ddpm only")
        if self.weighting == "min-snr" and not discrete:
            raise ValueError("objective.weighting min-snr is of path ddpm; a continuous path has velocity and likelihood")
        if self.weighting in ("velocity", "likelihood") and (discrete or self.target not in ("eps", "score")):
            raise ValueError(
                f"objective.weighting {self.weighting} is of targets eps and score on a continuous path: it makes them weigh "
                f"times as another loss would; target {self.target} has none"
            )
        if not (0 < self.min_snr_gamma < math.inf and 0 <= self.direction < math.inf):
            raise ValueError("objective.min_snr_gamma must be above 0 and objective.direction not below it")
        if self.min_snr_gamma != Objective.min_snr_gamma and self.weighting != "min-snr":
            raise ValueError(f"objective.min_snr_gamma is of weighting min-snr, not of {self.weighting}")
        if self.direction and self.target == "score":
            raise ValueError("objective.direction is of targets v, eps and x_0; the score has the direction of the noise")

    def sample_t(self, u: Tensor) -> Tensor:
        """Training times from uniform draws u in [0, 1), kept off the ends at which target or weight are infinite."""
        t = self.path.sample_t(u)
        low, high = self._train_interval
        return t if (low, high) == (0.0, 1.0) else low + (high - low) * t

    @property
    def _train_interval(self) -> tuple[float, float]:
        if isinstance(self.path, VP):
            return TRAIN_CUT_VP, 1.0
        if isinstance(self.path, DiscreteVP) or self.target in ("v", "x_0"):
            return 0.0, 1.0
        return TRAIN_CUT, 1 - TRAIN_CUT

    def schedule(
        self, num_steps: int | str, *, follows_velocity: bool = False, from_cut: bool = False, to_cut: bool = False, last_step: float = 0.0,
        shift: float | None = None,
    ) -> Schedule:  # fmt: skip
        """The sampling grid, from noise to data or to the cut before an end that cannot be had.

        Noise and score give no x_0 where alpha is 0, so their grids start at 1 - 1e-3, and so do all with `from_cut`. A
        sampler that `follows_velocity` stops at 1e-3 where the velocity is infinite at the data: on path vp, and for
        target x_0; and so do all with `to_cut`.
        """
        if isinstance(self.path, DiscreteVP):
            return self.path.schedule(num_steps, last_step=last_step, shift=shift)
        reaches_zero = not isinstance(self.path, VP)
        start = 1 - SAMPLE_CUT if reaches_zero and (from_cut or self.target in ("eps", "score")) else 1.0
        stops = to_cut or (follows_velocity and (not reaches_zero or self.target == "x_0"))
        stop = SAMPLE_CUT if stops else 0.0
        return self.path.schedule(num_steps, start=start, stop=stop, last_step=last_step, shift=shift)

    def loss(self, model, x_0: Tensor, y: Tensor, *, t: Tensor, eps: Tensor) -> dict[str, Tensor]:
        """Per-sample terms (B,) float32: "mse" (weighted), "vb" where the variance is learned, "direction" where it counts.

        The training loss is their sum.

        x_0, eps (B, C, H, W) float32; y (B,) int64; t (B,) float64 in [0, 1], on the host or on the device.
        """
        now = self.path.coefficients(t)
        alpha, sigma = (_columns(c, x_0) for c in now[:2])
        x_t = alpha * x_0 + sigma * eps
        output, fraction = self._run(model, x_t, t, y)
        if self.target == "score":  # sigma times the error of the score is that of the noise
            error = sigma * output + eps
        else:
            goal = self._goal(x_0, eps, now)
            error = output - goal
        terms = {"mse": _mean_per_sample(error**2)}
        if self.weighting != "none":
            terms["mse"] = self.weight(now).to(x_0.device, torch.float32, non_blocking=True) * terms["mse"]
        if self.direction:
            terms["direction"] = self.direction * _mean_per_sample(1 - cosine_similarity(output, goal, dim=1))
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

    def weight(self, now: Coefficients) -> Tensor:
        """The weight of the square error of the target, (B,) float64."""
        if self.weighting == "min-snr":
            snr = now.alpha**2 / now.sigma**2
            capped = snr.clamp(max=self.min_snr_gamma)
            return {"x_0": capped, "v": capped / (snr + 1)}.get(self.target, capped / snr)
        half = half_diffusion(now)
        return (half / now.sigma) ** 2 if self.weighting == "velocity" else half / now.sigma**2

    def _goal(self, x_0: Tensor, eps: Tensor, now: Coefficients) -> Tensor:
        if self.target == "v":
            return _columns(now.d_alpha, x_0) * x_0 + _columns(now.d_sigma, x_0) * eps
        return eps if self.target == "eps" else x_0

    def _run(self, model, x_t: Tensor, t: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """The network's mouth: its time, its channels, its sign. Returns the target's prediction and raw variance channels.

        A network of 2C outputs under an objective without learned variance answers with its first C (SiT's checkpoints).
        """
        output = model(x_t, self.path.model_time(t).to(x_t.device, torch.float32, non_blocking=True), y).float()
        channels = x_t.shape[1]
        rest = output[:, channels:] if self.learn_variance else None
        output = output[:, :channels]
        if self.target == "v" and isinstance(self.path, ContinuousPath) and self.path.data_at_1:
            output = -output  # the network's velocity is dx/d(1 - t)
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
        first = (self.path.model_time(t) == 0).to(x_t.device, non_blocking=True)
        return _mean_per_sample(torch.where(columns(first, x_t), nll, kl)) / math.log(2)


def build_objective(
    path: str, *, target: str, learn_variance: bool = False, time_scale: float = 1000.0, data_at_1: bool = False,
    time_law: str = "uniform", time_shift: float = 1.0, weighting: str = "none", min_snr_gamma: float = 5.0,
    direction: float = 0.0,
) -> Objective:  # fmt: skip
    """An objective from the names in a config; those that begin with time, and data_at_1, are of continuous paths."""
    if path not in PATHS:
        raise ValueError(f"objective.path must be one of {', '.join(PATHS)}, got {path!r}")
    if path == "ddpm":
        if time_law != "uniform" or time_shift != 1:
            raise ValueError("objective.time_law and time_shift are of continuous paths; path ddpm draws its steps uniformly")
        if time_scale != 1000 or data_at_1:
            raise ValueError("objective.time_scale and data_at_1 are of continuous paths; path ddpm feeds its index")
        interpolant = DiscreteVP()
    else:
        interpolant = PATHS[path](time_scale, data_at_1, time_law, time_shift)
    return Objective(interpolant, target, learn_variance, weighting, min_snr_gamma, direction)


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
