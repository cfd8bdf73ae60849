from functools import partial

import pytest
import torch
from gaussian_data import ExactDenoiser
from golden_values import assert_near, load
from stand_ins import flow_stand_in

from dit_vca.interpolants import PATHS, DiscreteVP, Linear
from samplers import euler_maruyama, stochastic_heun
from samplers.sde import DIFFUSIONS, LAST_STEPS

SOLVERS = {"Euler": euler_maruyama, "Heun": stochastic_heun}
RECORDED = sorted(key.split(".")[2:6] for key in load("flow") if key.startswith("sample.sde.") and key.endswith(".out"))


@pytest.mark.parametrize(("path", "method", "form", "last"), RECORDED)
def test_a_solver_reproduces_the_recorded_chain(path, method, form, last):
    r, key, made = load("flow"), f"sample.sde.{path}.{method}.{form}.{last}", PATHS[path.lower()]()
    noises = iter(r[f"{key}.noise"])
    whole = {"num_steps": 8, "stop": 1e-3 if path == "VP" else 0.0}
    schedule = made.schedule(**(whole if last == "None" else {"num_steps": 9, "last_step": 0.04}))
    out = SOLVERS[method](
        partial(flow_stand_in, path=made), r["sample.z"], schedule, diffusion=form, last_step=last.lower(),
        randn_like=lambda x: next(noises).to(x.dtype),
    )  # fmt: skip
    assert next(noises, None) is None
    assert_near(out, r[f"{key}.out"], 1e-5)


def test_every_form_and_last_step_is_recorded_for_some_path_but_constant():
    assert {form for _, _, form, _ in RECORDED} == set(DIFFUSIONS) - {"constant"}
    assert {last.lower() for *_, last in RECORDED} == set(LAST_STEPS)


@pytest.mark.parametrize("last_step", LAST_STEPS)
def test_one_network_call_a_step_of_euler_maruyama_and_two_of_heun_but_the_last(last_step):
    path = Linear()
    for solver, calls in ((euler_maruyama, 7), (stochastic_heun, 14 if last_step == "none" else 13)):
        denoise = ExactDenoiser(path, "v")
        solver(denoise, torch.ones(2, 1, 2, 2), path.schedule(7, last_step=0.04), last_step=last_step)
        assert denoise.calls == calls


def test_without_diffusion_the_sde_is_the_ode():
    from samplers import euler

    path, z = Linear(), torch.randn(2, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = euler_maruyama(flow_stand_in, z, path.schedule(5), diffusion="constant", diffusion_norm=0.0, last_step="none")
    torch.testing.assert_close(out, euler(flow_stand_in, z, path.schedule(5)))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"diffusion": "sqrt"}, "diffusion must be one of sigma, SBDM"), ({"last_step": "ddim"}, "last_step must be one of mean, tweedie"),
     ({"diffusion_norm": -1.0}, "must not be negative"), ({"diffusion": "SBDM"}, "infinite where alpha is 0")],
)  # fmt: skip
@pytest.mark.parametrize("solver", [euler_maruyama, stochastic_heun])
def test_what_cannot_be_is_refused(solver, options, message):
    with pytest.raises(ValueError, match=message):
        solver(flow_stand_in, torch.ones(1, 1, 2, 2), Linear().schedule(3), **options)


@pytest.mark.parametrize("solver", [euler_maruyama, stochastic_heun])
def test_a_path_without_velocity_is_refused(solver):
    path = DiscreteVP()
    with pytest.raises(ValueError, match="use ancestral, ddim, dpmpp_2m or unipc"):
        solver(ExactDenoiser(path, "eps"), torch.ones(1, 1, 2, 2), path.schedule(3))
