import math

import pytest
import torch
from golden_values import load, metadata, section

from dit_vca.interpolants import GVP, PATHS, VP, DiscreteVP, Linear, respaced_timesteps, shifted
from samplers.posterior import posterior

RESPACINGS = metadata("ddpm")["respacings"]


def test_the_noise_levels_of_the_ddpm_chain_are_the_recorded_ones():
    alpha, sigma, _, _ = DiscreteVP().coefficients(torch.arange(1, 1001, dtype=torch.float64) / 1000)
    expected = load("ddpm")["schedule.alphas_cumprod"]
    torch.testing.assert_close(alpha**2, expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(sigma**2, 1 - expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("spacing", RESPACINGS)
def test_a_respaced_chain_keeps_the_recorded_steps_and_feeds_the_network_their_original_indices(spacing):
    expected = section("ddpm", f"respace.{spacing}.")["timesteps"]
    path = DiscreteVP()
    assert torch.equal(respaced_timesteps(spacing, 1000), expected)
    schedule = path.schedule(spacing)
    assert torch.equal(path.model_time(schedule.t[:-1]), expected.flip(0).double())


@pytest.mark.parametrize("spacing", RESPACINGS)
def test_a_respaced_chain_has_the_recorded_betas(spacing):
    schedule = DiscreteVP().schedule(spacing)
    betas = [posterior(schedule.at(i), schedule.at(i + 1)).beta for i in range(len(schedule))]
    expected = section("ddpm", f"respace.{spacing}.")["betas"].flip(0)
    torch.testing.assert_close(torch.stack(betas), expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("spacing", [2, 25, "10,15,20"])
def test_the_last_step_of_a_respaced_chain_borrows_the_log_variance_of_the_step_before(spacing):
    schedule = DiscreteVP().schedule(spacing)
    n = len(schedule)
    before_last = posterior(schedule.at(n - 2), schedule.at(n - 1)).log_variance
    assert schedule.min_log_variance == pytest.approx(float(before_last), rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 7, 250, 999, 1000])
def test_a_respaced_chain_has_the_count_asked_for_rising_from_the_first_step(count):
    kept = respaced_timesteps(count, 1000)
    assert len(kept) == count and kept[0] == 0 and bool((kept[1:] > kept[:-1]).all())
    assert count == 1 or kept[-1] == 999


def test_sections_begin_where_the_one_before_ends_and_the_first_ones_are_longer():
    assert respaced_timesteps("2,1,2", 11).tolist() == [0, 3, 4, 8, 10]


@pytest.mark.parametrize(
    ("spacing", "message"),
    [("ddim37", "no integer stride keeps exactly 37 of 1000"), ("ddim1001", "no integer stride"), (1001, "cannot keep 1001"),
     ("400,400,400", "cannot keep 400 steps of a section of 334"), ("0", "must be a count"), ("-5", "must be a count"),
     ("ten", "must be a count"), ("", "must be a count"), ("10,,20", "must be a count"), ("ddim", "must be a count")],
)  # fmt: skip
def test_a_spacing_that_cannot_be_had_is_refused(spacing, message):
    with pytest.raises(ValueError, match=message):
        DiscreteVP().schedule(spacing)


@pytest.mark.parametrize("spacing", [0, -1, "ddim5", "10,15", "ten"])
def test_the_linear_path_takes_a_positive_count_only(spacing):
    with pytest.raises(ValueError, match="positive count"):
        Linear().schedule(spacing)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("num_steps", [1, 4, "10"])
def test_a_schedule_has_the_steps_asked_for_and_ends_at_the_data(name, num_steps):
    schedule = PATHS[name]().schedule(num_steps)
    assert len(schedule) == int(num_steps) == len(schedule.t) - 1
    assert schedule.t.dtype == torch.float64 and schedule.t[-1] == 0
    assert (float(schedule.at(len(schedule)).alpha), float(schedule.at(len(schedule)).sigma)) == (1.0, 0.0)
    assert schedule.t[0] == 1 or (name == "ddpm" and num_steps == 1)  # one step of the chain keeps its first index


@pytest.mark.parametrize("num_steps", [10, 50, 250])
def test_the_grid_of_the_linear_path_meets_round_times_exactly_so_that_interval_bounds_on_it_are_inclusive(num_steps):
    assert Linear().schedule(num_steps).t.tolist() == [k / num_steps for k in range(num_steps, -1, -1)]


@pytest.mark.parametrize("name", PATHS)
def test_noise_grows_and_data_fades_with_time(name):
    alpha, sigma, _, _ = PATHS[name]().coefficients(torch.arange(0, 1001, dtype=torch.float64) / 1000)
    assert bool((alpha[1:] < alpha[:-1]).all()) and bool((sigma[1:] > sigma[:-1]).all())


def test_the_derivatives_of_the_linear_path_are_those_of_its_coefficients():
    t = torch.linspace(0.01, 0.99, 20, dtype=torch.float64)
    before, at, after = (Linear().coefficients(t + step) for step in (-1e-4, 0, 1e-4))
    torch.testing.assert_close(at.d_alpha, (after.alpha - before.alpha) / 2e-4, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(at.d_sigma, (after.sigma - before.sigma) / 2e-4, rtol=1e-8, atol=1e-8)


def test_the_ddpm_path_preserves_variance_and_its_derivatives_are_those_of_its_angle():
    c = DiscreteVP().coefficients(torch.arange(0, 1001, dtype=torch.float64) / 1000)
    torch.testing.assert_close(c.alpha**2 + c.sigma**2, torch.ones(1001, dtype=torch.float64), rtol=1e-14, atol=0)
    phi = torch.atan2(c.sigma, c.alpha)
    torch.testing.assert_close(c.d_alpha, -torch.sin(phi), rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(c.d_sigma, torch.cos(phi), rtol=1e-9, atol=1e-14)
    assert not DiscreteVP().schedule(3).continuous and Linear().schedule(3).continuous


@pytest.mark.parametrize("num_timesteps", [100, 4000])
def test_a_chain_of_another_length_reaches_about_the_same_noise(num_timesteps):
    end = torch.ones(1, dtype=torch.float64)
    log_signal = [float(DiscreteVP(n).coefficients(end).alpha.log()) for n in (num_timesteps, 1000)]
    assert log_signal[0] == pytest.approx(log_signal[1], rel=0.1)


def test_training_times_of_the_ddpm_path_are_its_indices_each_as_likely():
    u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    path = DiscreteVP()
    indices = path.model_time(path.sample_t(u)).long()
    assert torch.equal(torch.bincount(indices), torch.full((1000,), 10))
    ends = path.model_time(path.sample_t(torch.tensor([0.0, math.nextafter(1, 0)], dtype=torch.float64)))
    assert ends.tolist() == [0, 999]


def test_training_times_of_the_linear_path_are_uniform():
    u = torch.rand(10, dtype=torch.float64)
    assert torch.equal(Linear().sample_t(u), u)


def test_logit_normal_times_have_standard_normal_logits_and_stay_in_the_unit_interval():
    u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    t = Linear(time_law="logit-normal").sample_t(u)
    z = torch.logit(t)
    assert t.dtype == torch.float64 and bool((t[1:] > t[:-1]).all())
    assert abs(float(z.mean())) < 1e-9 and float(z.var()) == pytest.approx(1, abs=2e-3)
    assert float((z < -1).double().mean()) == pytest.approx(0.158655, abs=2e-4)
    ends = Linear(time_law="logit-normal").sample_t(torch.tensor([0.0, math.nextafter(1, 0)], dtype=torch.float64))
    assert float(ends[0]) == 0 and 0.999 < float(ends[1]) <= 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.0, 250.0, 1000.0]),
        ({"time_scale": 1.0}, [0.0, 0.25, 1.0]),
        ({"time_scale": 1.0, "data_at_1": True}, [1.0, 0.75, 0.0]),
    ],
    ids=["default", "time_scale 1", "the direction of SiT"],
)
def test_the_linear_path_feeds_the_network_scaled_or_reversed_times(options, expected):
    assert Linear(**options).model_time(torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)).tolist() == expected


def test_the_previous_time_of_the_ddpm_path_is_one_index_nearer_to_the_data():
    assert DiscreteVP().previous(torch.tensor([1.0, 0.5, 0.001], dtype=torch.float64)).tolist() == [0.999, 0.499, 0.0]


CONTINUOUS = pytest.mark.parametrize("path", [Linear, GVP, VP])


@CONTINUOUS
def test_derivatives_are_those_of_the_coefficients(path):
    t = torch.linspace(0.01, 0.99, 20, dtype=torch.float64)
    before, at, after = (path().coefficients(t + step) for step in (-1e-5, 0, 1e-5))
    torch.testing.assert_close(at.d_alpha, (after.alpha - before.alpha) / 2e-5, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(at.d_sigma, (after.sigma - before.sigma) / 2e-5, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["GVP", "VP"])
def test_the_variance_of_a_preserving_path_is_one_and_its_ends_are_those_of_sit(name):
    c = PATHS[name.lower()]().coefficients(torch.linspace(0, 1, 11, dtype=torch.float64))
    torch.testing.assert_close(c.alpha**2 + c.sigma**2, torch.ones(11, dtype=torch.float64), rtol=1e-12, atol=0)
    assert float(c.alpha[-1]) == (0 if name == "GVP" else pytest.approx(math.exp(-5.025)))


def test_a_shift_moves_times_towards_the_noise_and_leaves_the_ends():
    t = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    assert shifted(t, 3.0).tolist() == pytest.approx([0, 0.5, 0.75, 1])
    assert shifted(shifted(t, 3.0), 1 / 3).tolist() == pytest.approx(t.tolist())
    path = Linear(time_shift=3.0)
    assert path.sample_t(t).tolist() == pytest.approx([0, 0.5, 0.75, 1])
    assert path.schedule(4).t.tolist() == pytest.approx([1, 0.9, 0.75, 0.5, 0])
    assert path.schedule(2, shift=1.0).t.tolist() == [1, 0.5, 0]


def test_a_grid_has_its_start_its_stop_and_a_last_step_of_its_own_length():
    assert Linear().schedule(4, start=0.9, stop=0.1).t.tolist() == pytest.approx([0.9, 0.7, 0.5, 0.3, 0.1])
    assert Linear().schedule(3, last_step=0.04).t.tolist() == pytest.approx([1, 0.52, 0.04, 0])
    assert Linear().schedule(3, stop=0.01, last_step=0.04).t.tolist() == pytest.approx([1, 0.525, 0.05, 0.01])
    assert Linear().schedule(1, last_step=0.04).t.tolist() == [1, 0]
    with pytest.raises(ValueError, match="a chain of given times"):
        DiscreteVP().schedule(4, stop=0.1)
