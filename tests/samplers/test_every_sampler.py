"""Every sampler on every path and target, with every form of diffusion and last step, against closed forms."""

import itertools

import pytest
import torch
from gaussian_data import MEAN, STD, ExactDenoiser, Mixture, impulses, mean_and_variance

from dit_vca.config import SampleConfig
from dit_vca.objectives import build_objective
from dit_vca.sampling import sampling_schedule
from samplers import FOLLOW_VELOCITY, SAMPLERS, SDE
from samplers.sde import DIFFUSIONS, LAST_STEPS

CONTINUOUS = list(itertools.product(("linear", "gvp", "vp"), ("v", "eps", "x_0", "score")))
NUM_STEPS = 48


def run(sampler: str, path: str, target: str, denoiser, x_T, randn_like, num_steps: int = NUM_STEPS, **options):
    objective = build_objective(path, target=target)
    settings = {"num_steps": num_steps, "last_step_size": 0.02} if sampler in SDE else {"num_steps": num_steps}
    config = SampleConfig(sampler=sampler, **settings, **options)
    if "randn_like" in SAMPLERS[sampler].__code__.co_varnames:
        options["randn_like"] = randn_like
    denoise = denoiser(objective.path, target)
    return SAMPLERS[sampler](denoise, x_T, sampling_schedule(config, objective), **options)


def check_gaussian(sampler, path, target, num_steps: int = NUM_STEPS, **options):
    x_T, noise = impulses(num_steps)
    mean, variance = mean_and_variance(run(sampler, path, target, ExactDenoiser, x_T, noise, num_steps, **options))
    assert mean == pytest.approx(MEAN, abs=0.06), (mean, options)
    assert variance == pytest.approx(STD**2, abs=0.06), (variance, options)


@pytest.mark.parametrize(("path", "target"), CONTINUOUS)
@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in SDE])
def test_a_gaussian_comes_out_with_its_mean_and_variance(sampler, path, target):
    check_gaussian(sampler, path, target)


QUICK = [case if case[1] == "v" else pytest.param(*case, marks=pytest.mark.slow) for case in CONTINUOUS]


@pytest.mark.parametrize(("path", "target"), QUICK)
@pytest.mark.parametrize("sampler", SDE)
def test_a_gaussian_comes_out_of_every_form_of_diffusion_and_last_step(sampler, path, target):
    for diffusion, last_step in itertools.product(DIFFUSIONS, LAST_STEPS):
        steep = diffusion == "SBDM" and path != "vp"  # 1 / (1 - t) at the noise: it takes many steps
        norm = 0.3 if steep else 0.05 if diffusion == "constant" else 1.0
        num_steps = 250 if steep else NUM_STEPS
        check_gaussian(sampler, path, target, num_steps, diffusion=diffusion, last_step=last_step, diffusion_norm=norm)


@pytest.mark.parametrize("target", ["v", "eps", "x_0", "score"])
@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in FOLLOW_VELOCITY])
def test_a_gaussian_comes_out_of_the_chain_of_ddpm(sampler, target):
    check_gaussian(sampler, "ddpm", target)


@pytest.mark.parametrize("path", ["linear", "gvp", "vp"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_mixture_comes_out_with_its_moments_and_both_modes(sampler, path):
    generator = torch.Generator().manual_seed(0)
    x_T = torch.randn(4000, 1, 1, 1, dtype=torch.float64, generator=generator)

    def randn_like(x):
        return torch.randn(x.shape, dtype=x.dtype, generator=generator)

    out = run(sampler, path, "v", Mixture, x_T, randn_like).flatten()
    mean, variance = Mixture(None, "v").moments()
    assert float(out.mean()) == pytest.approx(mean, abs=0.08) and float(out.var()) == pytest.approx(variance, rel=0.1)
    assert float((out < -0.5).double().mean()) == pytest.approx(0.3, abs=0.04)
