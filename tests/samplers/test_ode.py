import math

import pytest
import torch
from gaussian_data import MEAN, STD, ExactDenoiser
from golden_values import assert_near, load
from stand_ins import flow_stand_in

from dit_vca.interpolants import DiscreteVP, Linear
from samplers import Prediction, euler, heun

PATH = Linear()


@pytest.mark.parametrize(("solver", "name"), [(euler, "euler"), (heun, "heun2")], ids=["euler", "heun"])
def test_a_solver_reproduces_the_recorded_chain(solver, name):
    recorded = load("flow")
    out = solver(flow_stand_in, recorded["sample.z"], PATH.schedule(10))
    assert_near(out, recorded[f"sample.ode.Linear.{name}.11"], 1e-6)


def error_and_calls(solver, num_steps: int) -> tuple[float, int]:
    """Against the exact flow of the Gaussian data, which maps x_1 to MEAN + STD x_1."""
    x_T = torch.linspace(-2, 2, 9, dtype=torch.float64).view(1, 1, 3, 3)
    denoise = ExactDenoiser(PATH, "v")
    out = solver(denoise, x_T, PATH.schedule(num_steps))
    return float((out - (MEAN + STD * x_T)).abs().max()), denoise.calls


def order(solver) -> float:
    return math.log2(error_and_calls(solver, 80)[0] / error_and_calls(solver, 160)[0])


def test_euler_has_order_one_and_calls_the_network_once_a_step():
    assert order(euler) == pytest.approx(1, abs=0.05)
    assert error_and_calls(euler, 160)[0] < 0.01
    assert error_and_calls(euler, 7)[1] == 7


def test_heun_has_order_two_and_calls_the_network_twice_a_step():
    assert order(heun) == pytest.approx(2, abs=0.05)
    assert error_and_calls(heun, 160)[0] < 1e-4
    assert error_and_calls(heun, 7)[1] == 14


@pytest.mark.parametrize("solver", [euler, heun])
def test_a_constant_velocity_is_followed_exactly_in_one_step(solver):
    x_0, eps = torch.full((1, 1, 2, 2), 3.0), torch.full((1, 1, 2, 2), -1.0)
    out = solver(lambda x, t: Prediction((eps - x_0).double(), "v", x, PATH.coefficients(t)), eps, PATH.schedule(1))
    assert torch.equal(out, x_0.double())


@pytest.mark.parametrize("solver", [euler, heun])
def test_a_solver_of_the_ode_refuses_a_path_without_velocity(solver):
    path = DiscreteVP()
    with pytest.raises(ValueError, match="use ancestral or ddim"):
        solver(ExactDenoiser(path, "eps"), torch.ones(1, 1, 2, 2), path.schedule(3))


@pytest.mark.parametrize("solver", [euler, heun])
def test_the_state_is_float64_and_the_network_gets_the_time_of_the_grid_for_every_row(solver):
    seen = []

    def denoise(x, t):
        assert x.dtype == torch.float64 and t.dtype == torch.float64 and t.shape == (3,)
        seen.extend(t.tolist())
        return flow_stand_in(x, t)

    solver(denoise, torch.zeros(3, 1, 2, 2), PATH.schedule(2))
    expected = [1.0, 0.5] if solver is euler else [1.0, 0.5, 0.5, 0.0]
    assert seen == [t for t in expected for _ in range(3)]
