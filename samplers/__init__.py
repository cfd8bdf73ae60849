"""How to walk from noise to data: pure functions of a denoiser, a starting noise and a schedule.

This package knows no network and imports nothing of dit_vca; it can be used alone.
"""

from .ancestral import ancestral
from .ddim import ddim
from .guidance import guided
from .noise import ImageNoise
from .ode import euler, heun
from .types import Coefficients, Denoiser, Prediction, Schedule

SAMPLERS = {"ancestral": ancestral, "ddim": ddim, "euler": euler, "heun": heun}

__all__ = [
    "SAMPLERS", "Coefficients", "Denoiser", "ImageNoise", "Prediction", "Schedule",
    "ancestral", "ddim", "euler", "guided", "heun",
]  # fmt: skip
