import math
from functools import partial

import pytest
import torch
from gaussian_data import MEAN, STD, ExactDenoiser, Mixture
from golden_values import assert_near, load
from stand_ins import flow_stand_in

from dit_vca.interpolants import GVP, PATHS, VP, DiscreteVP, Linear
from samplers import Prediction, dopri5, euler, heun, midpoint, rk4
from samplers.ode import MAX_STEPS

PATH = Linear()
SOLVERS = {"euler": euler, "heun2": heun, "midpoint": midpoint, "rk4": rk4}
EVERY = pytest.mark.parametrize("solver", [euler, heun, midpoint, rk4])
RECORDED = sorted(key.split(".")[2:] for key in load("flow") if key.startswith("sample.ode.") and "dopri5" not in key)


@pytest.mark.parametrize(("path", "name", "points"), RECORDED)
def test_a_solver_reproduces_the_recorded_chain(path, name, points):
    recorded, made = load("flow"), PATHS[path.lower()]()
    schedule = made.schedule(int(points) - 1, stop=1e-3 if path == "VP" else 0.0)
    out = SOLVERS[name](partial(flow_stand_in, path=made), recorded["sample.z"], schedule)
    assert_near(out, recorded[f"sample.ode.{path}.{name}.{points}"], 1e-5 if path == "VP" else 1e-6)


@pytest.mark.parametrize("path", [Linear(), GVP()], ids=["Linear", "GVP"])
@pytest.mark.parametrize(("read_as", "target"), [("noise", "eps"), ("score", "score")])
def test_noise_and_score_become_the_recorded_drift(path, read_as, target):
    recorded, schedule = load("flow"), path.schedule(10, start=0.999, stop=0.001)
    out = euler(partial(flow_stand_in, path=path, target=target), recorded["sample.z"], schedule)
    assert_near(out, recorded[f"sample.ode_{read_as}.{type(path).__name__}.euler.11"], 1e-5)


def test_dopri5_comes_near_the_recorded_chain_which_shares_one_control_over_the_batch():
    recorded = load("flow")
    out = dopri5(flow_stand_in, recorded["sample.z"], PATH.schedule(1))
    assert_near(out, recorded["sample.ode.Linear.dopri5.2"], 2e-3)


def errors(solver, nums) -> list[float]:
    """At t = 0.2 against a much finer chain, on a mixture: on a Gaussian the leading error of the midpoint rule vanishes."""
    x_T, denoise = torch.linspace(-2, 2, 9, dtype=torch.float64).view(1, 1, 3, 3), Mixture(PATH, "v")
    exact = rk4(denoise, x_T, PATH.schedule(1000, stop=0.2))
    return [float((solver(denoise, x_T, PATH.schedule(n, stop=0.2)) - exact).abs().max()) for n in nums]


@pytest.mark.parametrize(
    ("solver", "order", "calls", "bound"), [(euler, 1, 1, 2e-2), (heun, 2, 2, 1e-3), (midpoint, 2, 2, 1e-3), (rk4, 4, 4, 1e-7)]
)
def test_a_solver_has_its_order_and_calls_the_network_as_often_as_it_says(solver, order, calls, bound):
    coarse, fine = errors(solver, (80, 160))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15) and fine < bound
    denoise = ExactDenoiser(PATH, "v")
    solver(denoise, torch.ones(1, 1, 2, 2), PATH.schedule(7))
    assert denoise.calls == 7 * calls


def test_the_flow_of_a_gaussian_ends_at_its_mean_and_deviation():
    x_T = torch.linspace(-2, 2, 9, dtype=torch.float64).view(1, 1, 3, 3)
    for solver, bound in ((euler, 1e-2), (heun, 1e-4), (midpoint, 1e-4), (rk4, 1e-7), (dopri5, 1e-2)):
        out = solver(ExactDenoiser(PATH, "v"), x_T, PATH.schedule(160))
        assert float((out - (MEAN + STD * x_T)).abs().max()) < bound


@EVERY
def test_a_constant_velocity_is_followed_exactly_in_one_step(solver):
    x_0, eps = torch.full((1, 1, 2, 2), 3.0), torch.full((1, 1, 2, 2), -1.0)
    out = solver(lambda x, t: Prediction((eps - x_0).double(), "v", x, PATH.coefficients(t)), eps, PATH.schedule(1))
    torch.testing.assert_close(out, x_0.double(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("solver", [euler, heun, midpoint, rk4, dopri5])
def test_a_solver_of_the_ode_refuses_a_path_without_velocity(solver):
    path = DiscreteVP()
    with pytest.raises(ValueError, match="use ancestral, ddim, dpmpp_2m or unipc"):
        solver(ExactDenoiser(path, "eps"), torch.ones(1, 1, 2, 2), path.schedule(3))


@EVERY
def test_the_state_is_float64_and_the_network_gets_one_time_for_every_row(solver):
    seen = []

    def denoise(x, t):
        assert x.dtype == torch.float64 and t.dtype == torch.float64 and t.shape == (3,) and len(set(t.tolist())) == 1
        seen.append(float(t[0]))
        return flow_stand_in(x, t)

    solver(denoise, torch.zeros(3, 1, 2, 2), PATH.schedule(2))
    expected = {
        euler: [1.0, 0.5], heun: [1.0, 0.5, 0.5, 0.0], midpoint: [1.0, 0.75, 0.5, 0.25],
        rk4: [1.0, 5 / 6, 2 / 3, 0.5, 0.5, 1 / 3, 1 / 6, 0.0],
    }[solver]  # fmt: skip
    assert seen == pytest.approx(expected, abs=1e-15)


class PerImage:
    """dx/dt = rate (1 + 50 bump(t)) x with a rate for each image and a bump at t = 0.55 that steps must shrink for."""

    AREA = 1 + 50 * 0.06 * math.sqrt(math.pi)  # of rate over time: the exact answer is exp(-rate AREA) of the start

    def __init__(self, rates):
        self.rates, self.times = torch.tensor(rates, dtype=torch.float64), []

    def __call__(self, x, t):
        self.times.append(t.clone())
        rates = self.rates * (1 + 50 * torch.exp(-(((t - 0.55) / 0.06) ** 2)))
        return Prediction(rates.view(-1, 1, 1, 1) * x, "v", x, PATH.coefficients(t))


def test_an_image_of_dopri5_does_not_depend_on_its_batch_and_has_its_own_steps():
    x_T = torch.randn(3, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rates = [0.1, 1.0, -0.5]
    together = PerImage(rates)
    out = dopri5(together, x_T, PATH.schedule(1))
    for i, rate in enumerate(rates):
        alone = PerImage([rate])
        assert torch.equal(dopri5(alone, x_T[i : i + 1], PATH.schedule(1))[0], out[i])
    times = torch.stack(together.times[2::6])  # the second evaluation of each step
    assert bool((times[1:] > times[:-1]).any(0).all())  # every image had steps refused
    assert all(float(t.min()) >= 0 and float(t.max()) <= 1 for t in together.times)
    expected = x_T * torch.exp(-together.rates * PerImage.AREA).view(-1, 1, 1, 1)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=1e-5)


def test_dopri5_agrees_with_torchdiffeq_and_meets_its_tolerance():
    from scipy.integrate import solve_ivp

    def exact(z):
        solved = solve_ivp(
            lambda t, x: flow_stand_in(torch.from_numpy(x).view(1, 1, 2, 2), torch.tensor([t])).v.flatten().numpy(),
            (1.0, 0.0), z.flatten().numpy(), method="DOP853", rtol=1e-12, atol=1e-12,
        )  # fmt: skip
        return torch.from_numpy(solved.y[:, -1]).view(1, 1, 2, 2)

    z = torch.randn(1, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    errors = [
        float((dopri5(flow_stand_in, z, PATH.schedule(1), rtol=r, atol=r * 1e-3) - exact(z)).abs().max())
        for r in (1e-3, 1e-6, 1e-9)
    ]
    assert errors[0] < 5e-3 and errors[1] < 5e-6 and errors[2] < 5e-9


def test_dopri5_that_cannot_go_on_says_so():
    calls = []

    def noise(x, t):
        calls.append(0)
        return Prediction(
            torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(len(calls))), "v", x, PATH.coefficients(t)
        )

    with pytest.raises(FloatingPointError, match=f"in {MAX_STEPS} steps: raise rtol"):
        dopri5(noise, torch.ones(1, 1, 2, 2), PATH.schedule(1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{"rtol": 0.0}, {"atol": -1.0}])
def test_a_tolerance_of_dopri5_must_be_positive(options):
    with pytest.raises(ValueError, match="must be above 0"):
        dopri5(flow_stand_in, torch.ones(1, 1, 2, 2), PATH.schedule(1), **options)


def test_vp_stops_before_its_singular_end():
    schedule = VP().schedule(4, stop=1e-3)
    assert schedule.t.tolist() == pytest.approx([1.0, 0.75025, 0.5005, 0.25075, 0.001])


def test_dopri5_tells_a_velocity_that_is_not_finite_at_once():
    calls = []

    def broken(x, t):
        calls.append(0)
        return Prediction(x * float("nan"), "v", x, PATH.coefficients(t))

    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        dopri5(broken, torch.ones(1, 1, 2, 2), PATH.schedule(1))
    assert len(calls) <= 8
