"""How to walk from noise to data: pure functions of a denoiser, a starting noise and a schedule.

This package knows no network and imports nothing of dit_vca; it can be used alone.
"""

from .ancestral import ancestral
from .ddim import ddim
from .guidance import autoguided, guided
from .multistep import dpmpp_2m, unipc
from .noise import ImageNoise
from .ode import dopri5, euler, heun, midpoint, rk4
from .sde import euler_maruyama, stochastic_heun
from .types import Coefficients, Denoiser, Prediction, Schedule

SAMPLERS = {
    "ancestral": ancestral, "ddim": ddim, "dpmpp_2m": dpmpp_2m, "unipc": unipc, "euler": euler, "heun": heun,
    "midpoint": midpoint, "rk4": rk4, "dopri5": dopri5, "euler_maruyama": euler_maruyama, "stochastic_heun": stochastic_heun,
}  # fmt: skip
SDE = ("euler_maruyama", "stochastic_heun")
FOLLOW_VELOCITY = ("euler", "heun", "midpoint", "rk4", "dopri5", *SDE)  # solvers of dx/dt, for continuous paths

__all__ = [
    "FOLLOW_VELOCITY", "SAMPLERS", "SDE", "Coefficients", "Denoiser", "ImageNoise", "Prediction", "Schedule",
    "ancestral", "autoguided", "ddim", "dopri5", "dpmpp_2m", "euler", "euler_maruyama", "guided", "heun", "midpoint", "rk4",
    "stochastic_heun", "unipc",
]  # fmt: skip
