import math

import pytest
import torch
from gaussian_data import MEAN, ExactDenoiser, Mixture, variance_at

from dit_vca.interpolants import GVP, VP, DiscreteVP, Linear
from samplers import ddim, dpmpp_2m, unipc

EVERY = pytest.mark.parametrize("solver", [dpmpp_2m, unipc])
PATHS = pytest.mark.parametrize("path", [Linear(), GVP(), VP()], ids=["linear", "gvp", "vp"])


def error_and_calls(solver, path, num_steps: int) -> tuple[float, int]:
    """At t = 0.2 from t = 0.8, against the exact flow of the Gaussian data."""
    z = torch.linspace(-2, 2, 9, dtype=torch.float64).view(1, 1, 3, 3)
    denoise, schedule = ExactDenoiser(path, "v"), path.schedule(num_steps, start=0.8, stop=0.2)
    start, end = schedule.at(0), schedule.at(num_steps)
    out = solver(denoise, start.alpha * MEAN + variance_at(start).sqrt() * z, schedule)
    return float((out - (end.alpha * MEAN + variance_at(end).sqrt() * z)).abs().max()), denoise.calls


@PATHS
@pytest.mark.parametrize(("solver", "order"), [(dpmpp_2m, 2), (unipc, 3)])
def test_a_solver_has_its_order_and_calls_the_network_once_a_step(solver, order, path):
    errors = [error_and_calls(solver, path, n)[0] for n in (80, 160)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.2)
    assert error_and_calls(solver, path, 7)[1] == 7


@PATHS
@EVERY
def test_with_twenty_calls_it_is_nearer_to_the_exact_answer_than_ddim(solver, path):
    z = torch.linspace(-2, 2, 9, dtype=torch.float64).view(1, 1, 3, 3)
    exact, few = ddim(Mixture(path, "v"), z, path.schedule(2000)), path.schedule(20)
    errors = [float((s(Mixture(path, "v"), z, few) - exact).abs().max()) for s in (solver, ddim)]
    assert errors[0] < 0.65 * errors[1]


@EVERY
def test_one_step_is_the_data_as_the_network_sees_it(solver):
    path = Linear()
    x = torch.randn(2, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    denoise = ExactDenoiser(path, "v")
    expected = denoise(x, torch.ones(2, dtype=torch.float64)).x_0
    torch.testing.assert_close(solver(denoise, x, path.schedule(1)), expected)


@EVERY
def test_the_chain_of_ddpm_is_walked_too(solver):
    path = DiscreteVP()
    z = torch.linspace(-2, 2, 9, dtype=torch.float64).view(1, 1, 3, 3)
    exact, out = (s(ExactDenoiser(path, "eps"), z, path.schedule(n)) for s, n in ((ddim, 1000), (solver, 100)))
    torch.testing.assert_close(out, exact, rtol=0, atol=0.03)


def test_unipc_is_diffusers_scheduler_on_its_own_grid():
    from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

    path, num_steps = DiscreteVP(), 12
    schedule = path.schedule(num_steps)
    indices = path.model_time(schedule.t[:-1]).long()
    z = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    common = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "prediction_type": "epsilon", "solver_order": 2}
    theirs = {
        unipc: UniPCMultistepScheduler(**common, solver_type="bh2", final_sigmas_type="zero", lower_order_final=True),
        dpmpp_2m: DPMSolverMultistepScheduler(
            **common, algorithm_type="dpmsolver++", solver_type="midpoint", final_sigmas_type="zero", lower_order_final=True
        ),
    }
    denoise = Mixture(path, "eps")
    for solver, scheduler in theirs.items():
        scheduler.set_timesteps(num_steps)
        alpha, sigma = (c.double() for c in schedule.coefficients[:2])
        scheduler.timesteps = indices
        scheduler.sigmas = (sigma / alpha).float()
        x = z.clone()
        for i in range(num_steps):
            eps = denoise(x, schedule.t[i].expand(1)).eps
            x = scheduler.step(eps, indices[i], x).prev_sample
        torch.testing.assert_close(solver(denoise, z, schedule), x, rtol=0, atol=2e-4)
