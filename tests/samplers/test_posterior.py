import pytest
import torch
from golden_values import assert_near, section

from dit_vca.interpolants import PATHS, DiscreteVP
from samplers import Coefficients
from samplers.posterior import interpolated_log_variance, posterior

RECORDED = section("ddpm", "schedule.")


def chain_posterior():
    """The posteriors of all 1000 steps, index 0 first."""
    path = DiscreteVP()
    t = torch.arange(1, 1001, dtype=torch.float64) / 1000
    return posterior(
        path.coefficients(t), path.coefficients(path.previous(t)), min_log_variance=path.min_log_variance
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "name"),
    [("beta", "betas"), ("variance", "posterior_variance"), ("log_variance", "posterior_log_variance_clipped"),
     ("x_0_weight", "posterior_mean_coef1"), ("x_t_weight", "posterior_mean_coef2")],
)  # fmt: skip
def test_the_posterior_of_the_ddpm_chain_is_the_recorded_one(field, name):
    torch.testing.assert_close(getattr(chain_posterior(), field), RECORDED[name], rtol=1e-11, atol=0)


def test_mean_and_variance_of_a_network_output_are_the_recorded_ones():
    loss, expected = section("ddpm", "loss."), section("ddpm", "p_mean_variance.")
    path = DiscreteVP()
    t = (loss["t"].double() + 1) / 1000
    now = path.coefficients(t)
    q = posterior(now, path.coefficients(path.previous(t)), min_log_variance=path.min_log_variance)
    q, now = (type(group)(*(None if c is None else c.view(-1, 1, 1, 1) for c in group)) for group in (q, now))
    x_t = loss["x_t"].double()
    eps, raw_variance = loss["model_out"].double().chunk(2, dim=1)
    x_0 = (x_t - now.sigma * eps) / now.alpha
    log_variance = interpolated_log_variance((raw_variance + 1) / 2, q.log_variance, q.beta.log())
    assert_near(x_0, expected["pred_xstart"], 1e-5)
    assert_near(q.x_0_weight * x_0 + q.x_t_weight * x_t, expected["mean"], 1e-5)
    assert_near(log_variance, expected["log_variance"], 1e-5)
    assert_near(log_variance.exp(), expected["variance"], 1e-5)


def joint_law(now: Coefficients, then: Coefficients) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (of x_0 and x_t) and variance of x_s given x_t and x_0, by conditioning the joint normal of (x_s, x_t)."""
    ratio = now.alpha / then.alpha  # x_t = ratio x_s + independent noise
    covariance = ratio * then.sigma**2
    gain = covariance / now.sigma**2
    return torch.stack([then.alpha - gain * now.alpha, gain]), then.sigma**2 - gain * covariance


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(("t", "s"), [(0.9, 0.8), (0.5, 0.1), (0.002, 0.001)])
def test_the_posterior_conditions_the_joint_law_of_two_times(name, t, s):
    now, then = (PATHS[name]().coefficients(torch.tensor(time, dtype=torch.float64)) for time in (t, s))
    q = posterior(now, then)
    weights, variance = joint_law(now, then)
    torch.testing.assert_close(torch.stack([q.x_0_weight, q.x_t_weight]), weights, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(q.variance, variance, rtol=1e-8, atol=1e-14)
    torch.testing.assert_close(q.log_variance.exp(), q.variance)


def test_the_last_step_goes_to_the_predicted_data_without_variance():
    path = DiscreteVP()
    now, then = (path.coefficients(torch.tensor(time, dtype=torch.float64)) for time in (0.001, 0.0))
    q = posterior(now, then, min_log_variance=-5.0)
    assert (float(q.x_0_weight), float(q.x_t_weight), float(q.variance), float(q.log_variance)) == (1.0, 0.0, 0.0, -5.0)


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, -4.0), (1.0, -2.0), (0.25, -3.5), (1.5, -1.0)])
def test_the_learned_variance_interpolates_logarithms_and_is_not_clamped(fraction, expected):
    value = interpolated_log_variance(torch.tensor(fraction), torch.tensor(-4.0), torch.tensor(-2.0))
    assert float(value) == expected
