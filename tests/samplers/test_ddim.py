import pytest
import torch
from gaussian_data import MEAN, STD, ExactDenoiser, impulses, mean_and_variance
from golden_values import assert_near, metadata, section
from stand_ins import ddpm_stand_in

from dit_vca.interpolants import DiscreteVP, Linear
from samplers import ImageNoise, ancestral, ddim, euler

PATH = DiscreteVP()


def no_noise(x):
    raise AssertionError("noise was drawn")


@pytest.mark.parametrize(
    ("chain", "eta", "clip_x_0"), [("ddim0.0", 0.0, None), ("ddim0.5", 0.5, None), ("ddim0.5_clip", 0.5, 1.0)]
)
def test_ddim_reproduces_the_recorded_chain(chain, eta, clip_x_0):
    recorded = section("ddpm", "sample.")
    noise = iter(recorded[f"{chain}.noise"])
    out = ddim(
        ddpm_stand_in, recorded["x_T"], PATH.schedule(metadata("ddpm")["sample_respacing"]),
        eta=eta, clip_x_0=clip_x_0, randn_like=lambda x: next(noise).to(x.dtype),
    )  # fmt: skip
    assert_near(out, recorded[f"{chain}.out"], 1e-5)


def test_without_eta_ddim_draws_nothing_and_calls_the_network_once_a_step():
    denoise = ExactDenoiser(PATH, "eps")
    ddim(denoise, torch.ones(1, 1, 2, 2), PATH.schedule(9), randn_like=no_noise)
    assert denoise.calls == 9


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_approaches_the_data_as_steps_are_added(eta):
    errors = []
    for num_steps in (50, 200, 1000):
        x_T, noise = impulses(num_steps - 1)
        denoise = ExactDenoiser(PATH, "eps")
        mean, variance = mean_and_variance(ddim(denoise, x_T, PATH.schedule(num_steps), eta=eta, randn_like=noise))
        errors.append(abs(mean - MEAN) + abs(variance - STD**2))
    assert errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2 and errors[2] < 0.01


@pytest.mark.parametrize(("path", "target"), [(PATH, "eps"), (Linear(), "v")], ids=["ddpm", "linear"])
def test_with_eta_one_ddim_is_ancestral_sampling_with_the_posterior_variance(path, target):
    outs = []
    for sampler, options in ((ddim, {"eta": 1.0}), (ancestral, {})):
        noise = ImageNoise(0, range(2), (1, 3, 3))
        denoise = ExactDenoiser(path, target)
        outs.append(sampler(denoise, noise.initial(), path.schedule(12), randn_like=noise.randn_like, **options))
    torch.testing.assert_close(*outs, rtol=1e-10, atol=1e-10)


def test_on_the_linear_path_ddim_is_euler():
    path = Linear()
    x_T = torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    outs = [sampler(ExactDenoiser(path, "v"), x_T, path.schedule(5)) for sampler in (ddim, euler)]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)


def test_an_image_does_not_depend_on_its_batch():
    def sample(indices):
        noise = ImageNoise(3, indices, (2, 3, 3))
        return ddim(ddpm_stand_in, noise.initial(), PATH.schedule(6), eta=0.5, randn_like=noise.randn_like)

    together = sample([0, 1, 2, 3, 4])
    torch.testing.assert_close(sample([3]), together[3:4], rtol=0, atol=1e-12)
    torch.testing.assert_close(sample([4, 1]), together[[4, 1]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("eta", [-0.1, 1.5])
def test_ddim_refuses_an_eta_outside_its_range(eta):
    with pytest.raises(ValueError, match=r"eta must be in \[0, 1\]"):
        ddim(ddpm_stand_in, torch.ones(1, 1, 2, 2), PATH.schedule(2), eta=eta)
