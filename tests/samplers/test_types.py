import pytest
import torch

from dit_vca.interpolants import PATHS, DiscreteVP, Linear
from samplers import Coefficients, Prediction, Schedule

TIMES = torch.tensor([0.001, 0.25, 0.5, 0.999], dtype=torch.float64)  # on the grid of the discrete path as well
DIRECTIONS = [(name, target) for name in PATHS for target in ("eps", "v", "x_0")]


def normal(seed: int) -> torch.Tensor:
    return torch.randn(len(TIMES), 3, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def columns(coefficient: torch.Tensor) -> torch.Tensor:
    return coefficient.view(-1, 1, 1, 1)


def at_scalar(alpha: float, sigma: float) -> Coefficients:
    return Coefficients(*(torch.tensor(value, dtype=torch.float64) for value in (alpha, sigma, -1.0, 1.0)))


@pytest.mark.parametrize(("name", "target"), DIRECTIONS)
def test_a_prediction_of_the_truth_gives_the_truth_in_every_parameterisation(name, target):
    x_0, eps = normal(0), normal(1)
    c = PATHS[name]().coefficients(TIMES)
    x_t = columns(c.alpha) * x_0 + columns(c.sigma) * eps
    truth = {"x_0": x_0, "eps": eps, "v": columns(c.d_alpha) * x_0 + columns(c.d_sigma) * eps}
    prediction = Prediction(truth[target], target, x_t, c)
    for wanted, value in truth.items():
        torch.testing.assert_close(getattr(prediction, wanted), value, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(prediction.score, -(x_t - columns(c.alpha) * x_0) / columns(c.sigma) ** 2, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("name", "target"), DIRECTIONS)
def test_whatever_is_predicted_the_implied_data_and_noise_compose_to_x_t(name, target):
    c = PATHS[name]().coefficients(TIMES)
    prediction = Prediction(normal(2), target, normal(3), c)
    composed = columns(c.alpha) * prediction.x_0 + columns(c.sigma) * prediction.eps
    torch.testing.assert_close(composed, normal(3), rtol=1e-10, atol=1e-10)


def test_conversions_hold_on_a_path_whose_coefficients_share_no_simple_relation():
    alpha, sigma, d_alpha, d_sigma = 0.6, 1.7, -0.4, 2.5
    x_0, eps = normal(4), normal(5)
    c = Coefficients(*(torch.tensor(value, dtype=torch.float64) for value in (alpha, sigma, d_alpha, d_sigma)))
    prediction = Prediction(d_alpha * x_0 + d_sigma * eps, "v", alpha * x_0 + sigma * eps, c)
    torch.testing.assert_close(prediction.x_0, x_0)
    torch.testing.assert_close(prediction.eps, eps)
    torch.testing.assert_close(prediction.score, -eps / sigma)


def test_velocity_gives_data_and_noise_at_both_ends_of_the_linear_path():
    x_0, eps = normal(6), normal(7)
    for alpha, sigma in ((0.0, 1.0), (1.0, 0.0)):
        prediction = Prediction(eps - x_0, "v", alpha * x_0 + sigma * eps, at_scalar(alpha, sigma))
        torch.testing.assert_close(prediction.x_0, x_0)
        torch.testing.assert_close(prediction.eps, eps)


@pytest.mark.parametrize(
    ("target", "wanted", "alpha", "sigma"),
    [("eps", "x_0", 0.0, 1.0), ("eps", "v", 0.0, 1.0), ("x_0", "eps", 1.0, 0.0), ("x_0", "v", 1.0, 0.0),
     ("eps", "score", 1.0, 0.0), ("x_0", "score", 1.0, 0.0), ("v", "score", 1.0, 0.0)],
)  # fmt: skip
def test_a_singular_conversion_raises(target, wanted, alpha, sigma):
    prediction = Prediction(normal(0), target, normal(1), at_scalar(alpha, sigma))
    with pytest.raises(ValueError, match=r"singular at (alpha|sigma) = 0"):
        getattr(prediction, wanted)


def test_one_singular_row_of_a_batch_is_enough_to_raise():
    c = Linear().coefficients(torch.tensor([0.2, 0.5, 0.9, 1.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="alpha = 0"):
        _ = Prediction(normal(0), "eps", normal(1), c).x_0


def test_the_velocity_of_a_path_of_discrete_times_is_that_of_its_angle():
    c = DiscreteVP().coefficients(TIMES)
    x_0, eps = normal(0), normal(1)
    alpha, sigma = columns(c.alpha), columns(c.sigma)
    prediction = Prediction(eps, "eps", alpha * x_0 + sigma * eps, c)
    torch.testing.assert_close(prediction.v, alpha * eps - sigma * x_0)


def test_replacing_the_value_keeps_what_it_means():
    fraction = normal(2)
    prediction = Prediction(normal(0), "eps", normal(1), DiscreteVP().coefficients(TIMES), fraction)
    replaced = prediction.replace_value(normal(3))
    assert replaced.target == "eps" and replaced.variance_fraction is fraction and replaced.x_t is prediction.x_t
    assert torch.equal(replaced.eps, normal(3))


@pytest.mark.parametrize("times", [[0.0, 1.0], [1.0, 1.0], [1.0, 0.4, 0.5], [1.0]], ids=["rising", "equal", "turning", "no step"])
def test_a_schedule_refuses_times_that_do_not_fall(times):
    t = torch.tensor(times, dtype=torch.float64)
    with pytest.raises(ValueError, match="must fall from noise to data"):
        Schedule(t, Linear().coefficients(t))


@pytest.mark.parametrize("name", PATHS)
def test_a_schedule_gives_the_coefficients_of_each_of_its_points(name):
    path = PATHS[name]()
    schedule = path.schedule(7)
    for i in range(len(schedule) + 1):
        expected = path.coefficients(schedule.t[i : i + 1])
        for actual, value in zip(schedule.at(i), expected, strict=True):
            assert torch.equal(actual, value[0])
