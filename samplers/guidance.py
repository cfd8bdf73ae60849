"""Classifier-free guidance (Ho and Salimans 2022) as a function from denoiser to denoiser."""

from collections.abc import Callable

import torch
from torch import Tensor

from .types import Coefficients, Denoiser, Prediction, columns


def guided(
    denoise_y: Callable[[Tensor, Tensor, Tensor], Prediction],
    y: Tensor,
    *,
    null: int,
    scale: float,
    interval: tuple[float, float] = (0.0, 1.0),
    channels: int | None = None,
    rescale: float = 0.0,
) -> Denoiser:
    """unconditional + scale (conditional - unconditional), on the network's own output, in one call of twice the batch.

    scale 1 is the conditional model, 0 the unconditional one. `interval` bounds t (1 = noise) inclusively; outside it
    the conditional model alone is called (Kynkäänniemi et al. 2024). `channels` guides the first channels only; DiT's
    and SiT's published numbers use 3 of 4, the others being the conditional output. None guides all.
    A learned variance is the conditional one. `rescale` in [0, 1] moves each image's deviation towards that of the
    conditional output (Lin et al. 2023, Section 3.4).
    """
    check_interval(interval)
    if not 0 <= rescale <= 1:
        raise ValueError(f"the rescaling of guidance must be from 0 to 1, got {rescale}")
    both_labels = torch.cat([y, torch.full_like(y, null)])

    def denoise(x: Tensor, t: Tensor) -> Prediction:
        scales = scale_at(t, scale, interval, x)
        if scales is None:
            return denoise_y(x, t, y)
        both = denoise_y(torch.cat([x, x]), torch.cat([t, t]), both_labels)
        conditional, unconditional = both.value.chunk(2)
        value = unconditional + scales * (conditional - unconditional)
        if rescale:
            value = value * (1 - rescale + rescale * _deviation(conditional) / _deviation(value).clamp(min=1e-12))
        if channels is not None:
            value = torch.cat([value[:, :channels], conditional[:, channels:]], dim=1)
        fraction = both.variance_fraction
        return Prediction(
            value,
            both.target,
            x,
            Coefficients(*(c[: len(x)] for c in both.coefficients)),
            None if fraction is None else fraction[: len(x)],
        )

    return denoise


def autoguided(
    denoise: Denoiser, denoise_worse: Denoiser, *, scale: float, interval: tuple[float, float] = (0.0, 1.0)
) -> Denoiser:
    """worse + scale (denoise - worse) on the networks' outputs: guidance by a worse version (Karras et al. 2024).

    Both predict the same target, of the same classes. scale 1 is `denoise` alone, which outside the interval it is too.
    """
    check_interval(interval)

    def guided_by_worse(x: Tensor, t: Tensor) -> Prediction:
        prediction = denoise(x, t)
        scales = scale_at(t, scale, interval, x)
        if scales is None:
            return prediction
        worse = denoise_worse(x, t)
        if worse.target != prediction.target:
            raise ValueError(f"the guide predicts {worse.target}, the model {prediction.target}: they must predict the same")
        return prediction.replace_value(worse.value + scales * (prediction.value - worse.value))

    return guided_by_worse


def check_interval(interval: tuple[float, float]) -> None:
    """ValueError for an interval that is none."""
    low, high = interval
    if not 0 <= low <= high <= 1:
        raise ValueError(f"the guidance interval must satisfy 0 <= low <= high <= 1, got {interval}")


def scale_at(t: Tensor, scale: float, interval: tuple[float, float], like: Tensor) -> Tensor | float | None:
    """The scale of each row, 1 outside the interval; None where no row is guided. `t` (B,) is on the host."""
    low, high = interval
    inside = (t >= low) & (t <= high)
    if scale == 1 or not bool(inside.any()):
        return None
    if bool(inside.all()):
        return scale
    rows = torch.where(inside, scale, 1.0).to(like.device, like.dtype)  # an adaptive solver has a time for each row
    return columns(rows, like)


def _deviation(x: Tensor) -> Tensor:
    return x.std(dim=tuple(range(1, x.ndim)), keepdim=True)
