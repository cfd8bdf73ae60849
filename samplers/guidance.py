"""Classifier-free guidance (Ho and Salimans 2022) as a function from denoiser to denoiser."""

from collections.abc import Callable

import torch
from torch import Tensor

from .types import Coefficients, Denoiser, Prediction


def guided(
    denoise_y: Callable[[Tensor, Tensor, Tensor], Prediction],
    y: Tensor,
    *,
    null: int,
    scale: float,
    interval: tuple[float, float] = (0.0, 1.0),
    channels: int | None = None,
) -> Denoiser:
    """unconditional + scale (conditional - unconditional), on the network's own output, in one call of twice the batch.

    scale 1 is the conditional model, 0 the unconditional one. `interval` bounds t (1 = noise) inclusively; outside it
    the conditional model alone is called (Kynkäänniemi et al. 2024). `channels` guides the first channels only; DiT's
    and SiT's published numbers use 3 of 4, the others being the conditional output. None guides all.
    A learned variance is the conditional one.
    """
    low, high = interval
    if not 0 <= low <= high <= 1:
        raise ValueError(f"the guidance interval must satisfy 0 <= low <= high <= 1, got {interval}")
    both_labels = torch.cat([y, torch.full_like(y, null)])

    def denoise(x: Tensor, t: Tensor) -> Prediction:
        if scale == 1 or not low <= float(t[0]) <= high:  # t is on the host
            return denoise_y(x, t, y)
        both = denoise_y(torch.cat([x, x]), torch.cat([t, t]), both_labels)
        conditional, unconditional = both.value.chunk(2)
        value = unconditional + scale * (conditional - unconditional)
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
