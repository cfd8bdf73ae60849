import pytest
import torch
from gaussian_data import MEAN, STD, ExactDenoiser, impulses, mean_and_variance, variance_at
from golden_values import assert_near, metadata, section
from stand_ins import ddpm_stand_in

from dit_vca.interpolants import DiscreteVP
from samplers import ImageNoise, Schedule, ancestral
from samplers.posterior import posterior

PATH = DiscreteVP()


@pytest.mark.parametrize(("chain", "clip_x_0"), [("ddpm", None), ("ddpm_clip", 1.0)])
def test_ancestral_reproduces_the_recorded_chain(chain, clip_x_0):
    recorded = section("ddpm", "sample.")
    noise = iter(recorded[f"{chain}.noise"])
    out = ancestral(
        ddpm_stand_in, recorded["x_T"], PATH.schedule(metadata("ddpm")["sample_respacing"]),
        clip_x_0=clip_x_0, randn_like=lambda x: next(noise).to(x.dtype),
    )  # fmt: skip
    assert_near(out, recorded[f"{chain}.out"], 1e-5)
    assert len(list(noise)) == 1  # the last step draws nothing


class ExactVarianceDenoiser(ExactDenoiser):
    """Also knows the variance of x_s given x_t, which lies between the posterior's and beta."""

    def __init__(self, path, schedule: Schedule):
        super().__init__(path, "eps")
        self.schedule = schedule

    def variance_fraction(self, x, t):
        i = int((self.schedule.t == t[0]).nonzero())
        now, then = self.schedule.at(i), self.schedule.at(i + 1)
        q = posterior(now, then)
        if float(q.variance) == 0:
            return torch.zeros_like(x)
        exact = q.variance + q.x_0_weight**2 * variance_of_data_given(now)
        return (exact.log() - q.variance.log()) / (q.beta.log() - q.variance.log()) * torch.ones_like(x)


def variance_of_data_given(c):
    """Var(x_0 | x_t) of the Gaussian data."""
    return STD**2 * c.sigma**2 / variance_at(c)


@pytest.mark.parametrize("num_steps", [5, 20])
def test_with_the_exact_variance_ancestral_carries_the_marginal_exactly_at_any_number_of_steps(num_steps):
    schedule = PATH.schedule(num_steps)
    denoise = ExactVarianceDenoiser(PATH, schedule)
    first, last = schedule.at(0), schedule.at(num_steps - 1)
    x_T, noise = impulses(num_steps - 1)
    x_T = first.alpha * MEAN + variance_at(first).sqrt() * x_T
    mean, variance = mean_and_variance(ancestral(denoise, x_T, schedule, randn_like=noise))
    assert mean == pytest.approx(MEAN, abs=1e-9)
    # The last step answers with the mean of the data given x_t, which has this much less variance than the data.
    assert variance == pytest.approx(STD**2 - float(variance_of_data_given(last)), rel=1e-9)
    assert denoise.calls == num_steps and noise.draws == num_steps - 1


def test_with_the_posterior_variance_ancestral_approaches_the_data_as_steps_are_added():
    errors = []
    for num_steps in (50, 200, 1000):
        x_T, noise = impulses(num_steps - 1)
        mean, variance = mean_and_variance(ancestral(ExactDenoiser(PATH, "eps"), x_T, PATH.schedule(num_steps), randn_like=noise))
        errors.append(abs(mean - MEAN) + abs(variance - STD**2))
    assert errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2 and errors[2] < 0.01


def test_an_image_does_not_depend_on_its_batch():
    def sample(indices):
        noise = ImageNoise(3, indices, (2, 3, 3))
        return ancestral(ddpm_stand_in, noise.initial(), PATH.schedule(6), randn_like=noise.randn_like)

    together = sample([0, 1, 2, 3, 4])
    torch.testing.assert_close(sample([3]), together[3:4], rtol=0, atol=1e-12)
    torch.testing.assert_close(sample([4, 1]), together[[4, 1]], rtol=0, atol=1e-12)


def test_the_state_is_float64_whatever_the_starting_noise_is():
    out = ancestral(ddpm_stand_in, torch.zeros(1, 1, 2, 2), PATH.schedule(3))
    assert out.dtype == torch.float64
