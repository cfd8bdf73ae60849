import pytest
import torch
from golden_values import assert_near, load, section
from torch import nn

from dit_vca.interpolants import GVP, DiscreteVP, Linear
from dit_vca.objectives import Objective, build_objective
from samplers import Coefficients

DDPM = Objective(DiscreteVP(), "eps", learn_variance=True)
LEGAL = {
    **{
        f"{path} {target}": build_objective(path, target=target)
        for path in ("linear", "gvp", "vp")
        for target in ("v", "eps", "x_0", "score")
    },
    "ddpm x_0": build_objective("ddpm", target="x_0"),
    "ddpm score": build_objective("ddpm", target="score"),
    "vp eps, likelihood": build_objective("vp", target="eps", weighting="likelihood"),
    "gvp score, velocity": build_objective("gvp", target="score", weighting="velocity"),
    "ddpm eps, min-snr": build_objective("ddpm", target="eps", weighting="min-snr"),
    "linear v, direction": build_objective("linear", target="v", direction=0.5),
    "ddpm eps": Objective(DiscreteVP(), "eps"),
    "ddpm eps and variance": DDPM,
    "ddpm v": Objective(DiscreteVP(), "v"),
    "ddpm v and variance": Objective(DiscreteVP(), "v", learn_variance=True),
}


class Network(nn.Module):
    """Answers with a given tensor, or with a function of its input, and remembers what it was fed."""

    def __init__(self, answer, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=dtype))
        self.answer = answer

    def forward(self, x, model_time, y):
        self.x, self.model_time, self.y = x, model_time, y
        return self.answer(x) if callable(self.answer) else self.answer


def recorded_ddpm():
    r = section("ddpm", "loss.")
    return r, {"t": (r["t"].double() + 1) / 1000, "eps": r["noise"]}


def test_ddpm_losses_are_the_recorded_ones():
    r, draws = recorded_ddpm()
    network = Network(r["model_out"])
    terms = DDPM.loss(network, r["x0"], torch.zeros(6, dtype=torch.int64), **draws)
    assert_near(terms["mse"], r["mse"], 1e-5)
    assert_near(terms["vb"], r["vb"], 1e-5)
    assert_near(terms["mse"] + terms["vb"], r["total"], 1e-5)
    torch.testing.assert_close(terms["vb"], r["vb"], rtol=1e-3, atol=1e-6)  # the small terms count as well
    assert_near(network.x, r["x_t"], 1e-6)
    assert network.model_time.tolist() == r["t"].tolist()


def test_the_bound_trains_the_variance_alone_and_the_square_error_the_noise_alone():
    r, draws = recorded_ddpm()
    output = r["model_out"].clone().requires_grad_()
    terms = DDPM.loss(Network(output), r["x0"], torch.zeros(6, dtype=torch.int64), **draws)
    of_bound, of_error = (torch.autograd.grad(terms[name].sum(), output, retain_graph=True)[0] for name in ("vb", "mse"))
    assert bool((of_bound[:, :4] == 0).all()) and bool((of_bound[:, 4:] != 0).any(dim=(1, 2, 3)).all())
    assert bool((of_error[:, 4:] == 0).all()) and bool((of_error[:, :4] != 0).any(dim=(1, 2, 3)).all())


@pytest.mark.parametrize("index", [0, 1, 300, 999])
def test_the_bound_is_the_same_for_a_velocity_and_for_the_noise_it_implies(index):
    generator = torch.Generator().manual_seed(0)
    x_0, eps, noise, raw = torch.randn(4, 2, 4, 4, 4, dtype=torch.float64, generator=generator)
    t = torch.full((2,), (index + 1) / 1000, dtype=torch.float64)
    c = DDPM.path.coefficients(t)
    alpha, sigma = (column.view(-1, 1, 1, 1) for column in c[:2])
    x_t = alpha * x_0 + sigma * eps
    velocity = (noise - sigma * x_t) / alpha  # v = alpha eps - sigma x_0 and x_t = alpha x_0 + sigma eps
    y = torch.zeros(2, dtype=torch.int64)
    by_noise, by_velocity = (
        Objective(DiscreteVP(), target, learn_variance=True).loss(Network(torch.cat([answer, raw], 1)), x_0, y, t=t, eps=eps)
        for target, answer in (("eps", noise), ("v", velocity))
    )
    torch.testing.assert_close(by_velocity["vb"], by_noise["vb"], rtol=2e-4, atol=1e-5)


def test_the_outermost_bins_of_the_pixel_likelihood_are_open():
    x_0 = torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1)
    eps = torch.zeros_like(x_0)
    draws = {"t": torch.full((2,), 0.001, dtype=torch.float64), "eps": eps}
    # This noise prediction puts the mean ten deviations outside the range of pixels: an open bin is then almost certain.
    outside = -torch.sign(x_0) * 10
    terms = DDPM.loss(Network(torch.cat([outside, torch.ones_like(eps)], dim=1)), x_0, torch.zeros(2, dtype=torch.int64), **draws)
    assert terms["vb"].tolist() == pytest.approx([0, 0], abs=1e-5)


@pytest.mark.parametrize("data_at_1", [False, True], ids=["noise minus data", "data minus noise"])
def test_the_flow_loss_is_the_recorded_one_in_either_direction(data_at_1):
    r = load("flow")
    objective = Objective(Linear(time_scale=1.0, data_at_1=data_at_1), "v")
    network = Network(r["model_out"] if data_at_1 else -r["model_out"])
    draws = {"t": 1 - r["t"].double(), "eps": r["x0_noise"]}
    terms = objective.loss(network, r["x1_data"], torch.zeros(6, dtype=torch.int64), **draws)
    assert list(terms) == ["mse"]
    torch.testing.assert_close(terms["mse"], r["loss.Linear.velocity.None"], rtol=1e-6, atol=0)
    torch.testing.assert_close(network.x, r["x_t.Linear"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(network.model_time, r["t"] if data_at_1 else 1 - r["t"], rtol=1e-6, atol=1e-7)


TARGET_OF = {"velocity": "v", "noise": "eps", "score": "score"}
RECORDED = sorted(key.split(".")[1:] for key in load("flow") if key.startswith("loss."))


@pytest.mark.parametrize(("path", "prediction", "weighting"), RECORDED)
def test_every_loss_of_sit_is_the_recorded_one(path, prediction, weighting):
    r, key, target = load("flow"), f"loss.{path}.{prediction}.{weighting}", TARGET_OF[prediction]
    objective = build_objective(path.lower(), target=target, weighting=weighting.lower(), time_scale=1.0, data_at_1=True)
    draws = {"t": 1 - r["t"].double(), "eps": r["x0_noise"]}
    network = Network(r["model_out"])
    terms = objective.loss(network, r["x1_data"], torch.zeros(6, dtype=torch.int64), **draws)
    torch.testing.assert_close(terms["mse"], r[key], rtol=1e-5 if path == "VP" else 1e-6, atol=0)
    torch.testing.assert_close(network.x, r[f"x_t.{path}"], rtol=1e-5, atol=1e-6)


def test_min_snr_caps_the_weight_that_a_target_gives_the_data():
    t = torch.tensor([0.01, 0.1, 0.5, 1.0], dtype=torch.float64)
    for target in ("eps", "x_0", "v"):
        objective = build_objective("ddpm", target=target, weighting="min-snr", min_snr_gamma=3.0)
        now = objective.path.coefficients(t)
        snr = now.alpha**2 / now.sigma**2
        # The weight of the error of x_0 that each target's own error implies: eps = .. alpha / sigma x_0, v = .. x_0 / sigma.
        implied = {"eps": snr, "x_0": torch.ones_like(snr), "v": 1 / now.sigma**2}[target]
        torch.testing.assert_close(objective.weight(now) * implied, snr.clamp(max=3.0))


def test_the_loss_of_direction_is_one_less_the_cosine_over_the_channels():
    x_0, eps = torch.randn(2, 3, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    t, y = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    objective = build_objective("linear", target="v", direction=0.5)
    goal = eps - x_0
    for answer, expected in ((3 * goal, 0.0), (-goal, 1.0)):
        terms = objective.loss(Network(answer), x_0, y, t=t, eps=eps)
        torch.testing.assert_close(terms["direction"], torch.full((3,), expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("path", "target", "low", "high"),
    [("linear", "v", 0, 1), ("gvp", "x_0", 0, 1), ("linear", "eps", 1e-3, 1 - 1e-3), ("gvp", "score", 1e-3, 1 - 1e-3), ("vp", "v", 1e-5, 1),
     ("vp", "eps", 1e-5, 1)],
)  # fmt: skip
def test_training_keeps_off_the_ends_that_cannot_be_had(path, target, low, high):
    objective = build_objective(path, target=target)
    ends = objective.sample_t(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert ends.tolist() == pytest.approx([low, high], abs=1e-12)
    t = objective.sample_t(torch.tensor([0.0, 1 - 1e-9], dtype=torch.float64))
    x_0, eps = torch.randn(2, 2, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    terms = objective.loss(Network(torch.zeros(2, 8, 2, 2)), x_0, torch.zeros(2, dtype=torch.int64), t=t, eps=eps)
    assert bool(terms["mse"].isfinite().all())


def test_the_velocity_that_is_learned_is_the_recorded_one_reversed():
    r = load("flow")
    draws = {"t": 1 - r["t"].double(), "eps": r["x0_noise"]}
    terms = Objective(Linear(), "v").loss(Network(-r["u_t.Linear"]), r["x1_data"], torch.zeros(6, dtype=torch.int64), **draws)
    assert float(terms["mse"].max()) < 1e-12


@pytest.mark.parametrize("name", LEGAL)
def test_a_network_that_answers_zero_has_the_mean_square_of_the_target_as_its_loss(name):
    objective = LEGAL[name]
    x_0, eps = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    t = objective.sample_t(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    terms = objective.loss(Network(torch.zeros(3, 8, 8, 8)), x_0, torch.zeros(3, dtype=torch.int64), t=t, eps=eps)
    now = objective.path.coefficients(t)
    columns = [c.float().view(-1, 1, 1, 1) for c in now]
    target = {"eps": eps, "score": eps, "x_0": x_0, "v": columns[2] * x_0 + columns[3] * eps}[objective.target]
    weight = torch.ones(3) if objective.weighting == "none" else objective.weight(now).float()
    torch.testing.assert_close(terms["mse"], weight * (target**2).mean(dim=(1, 2, 3)))
    assert all(term.shape == (3,) and term.dtype == torch.float32 for term in terms.values())


@pytest.mark.parametrize("name", LEGAL)
def test_the_loss_of_a_sample_does_not_depend_on_its_batch(name):
    objective = LEGAL[name]
    x_0, eps = torch.randn(2, 5, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    t = objective.sample_t(torch.tensor([0.0, 0.2, 0.4, 0.6, 0.999], dtype=torch.float64))
    network = Network(lambda x: torch.cat([torch.tanh(x), torch.sin(x)], dim=1))
    y = torch.zeros(5, dtype=torch.int64)
    together = objective.loss(network, x_0, y, t=t, eps=eps)
    for rows in ([1], [4, 0]):
        alone = objective.loss(network, x_0[rows], y[rows], t=t[rows], eps=eps[rows])
        for term in together:
            torch.testing.assert_close(alone[term], together[term][rows])


@pytest.mark.parametrize("name", LEGAL)
def test_data_and_noise_of_a_prediction_compose_to_x_t(name):
    objective = LEGAL[name]
    t = torch.tensor(
        [0.001, 0.5, 1.0 if objective.target in ("v", "x_0") or not isinstance(objective.path, (Linear, GVP)) else 0.999]
    )
    t = t.double() if not isinstance(objective.path, DiscreteVP) else (1000 * t.double()).round() / 1000
    x_t = torch.randn(3, 4, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    prediction = objective.predict(Network(torch.randn(3, 8, 2, 2)), x_t, t, torch.zeros(3, dtype=torch.int64))
    alpha, sigma = (c.view(-1, 1, 1, 1) for c in objective.path.coefficients(t)[:2])
    torch.testing.assert_close(alpha * prediction.x_0 + sigma * prediction.eps, x_t, rtol=1e-10, atol=1e-10)


def test_a_prediction_reads_the_variance_channels_as_a_fraction_that_is_not_clamped():
    output = torch.cat([torch.full((1, 4, 1, 1), 0.5), torch.tensor([-1.0, 0.0, 1.0, 3.0]).view(1, 4, 1, 1)], dim=1)
    x_t, y = torch.zeros(1, 4, 1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    prediction = DDPM.predict(Network(output), x_t, torch.tensor([0.5], dtype=torch.float64), y)
    assert prediction.variance_fraction.flatten().tolist() == [0.0, 0.5, 1.0, 2.0]
    assert prediction.eps.flatten().tolist() == [0.5] * 4


@pytest.mark.parametrize("name", ["linear v", "ddpm eps"])
def test_without_a_learned_variance_the_second_half_of_the_channels_is_not_read(name):
    output = torch.arange(8.0).view(1, 8, 1, 1)
    x_t, y = torch.zeros(1, 4, 1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    prediction = LEGAL[name].predict(Network(output), x_t, torch.tensor([0.5], dtype=torch.float64), y)
    assert prediction.value.flatten().tolist() == [0, 1, 2, 3] and prediction.variance_fraction is None


def test_the_network_runs_in_the_dtype_of_its_weights_and_the_sampler_gets_its_own():
    x_t, t = torch.ones(2, 4, 1, 1, dtype=torch.float64) / 3, torch.full((2,), 0.25, dtype=torch.float64)
    network = Network(lambda x: x, dtype=torch.bfloat16)
    prediction = Objective(Linear(), "v").predict(network, x_t, t, torch.tensor([3, 1]))
    assert network.x.dtype == torch.bfloat16 and prediction.v.dtype == torch.float64
    assert network.model_time.dtype == torch.float32 and network.model_time.tolist() == [250.0, 250.0]
    assert network.y.tolist() == [3, 1] and prediction.x_t is x_t


def test_reversed_time_reverses_the_velocity_the_sampler_sees():
    x_t, t = torch.zeros(1, 1, 1, 1, dtype=torch.float64), torch.tensor([0.25], dtype=torch.float64)
    network = Network(torch.ones(1, 1, 1, 1))
    y = torch.zeros(1, dtype=torch.int64)
    prediction = Objective(Linear(time_scale=1.0, data_at_1=True), "v").predict(network, x_t, t, y)
    assert prediction.v.item() == -1 and network.model_time.item() == 0.75
    assert isinstance(prediction.coefficients, Coefficients) and prediction.coefficients.sigma.item() == 0.25


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [("linear", {"target": "noise"}, "must be one of v, eps, x_0, score, got 'noise'"),
     ("linear", {"target": "v", "weighting": "velocity"}, "is of targets eps and score on a continuous path"),
     ("ddpm", {"target": "eps", "weighting": "likelihood"}, "is of targets eps and score on a continuous path"),
     ("vp", {"target": "eps", "weighting": "min-snr"}, "min-snr is of path ddpm"),
     ("linear", {"target": "score", "direction": 1.0}, "direction is of targets v, eps and x_0"),
     ("linear", {"target": "v", "direction": -1.0}, "direction not below it"),
     ("ddpm", {"target": "v", "weighting": "min-snr", "min_snr_gamma": 0.0}, "min_snr_gamma must be above 0"),
     ("gvp", {"target": "v", "time_shift": 0.0}, "objective.time_shift must be a positive number"),
     ("ddpm", {"target": "eps", "time_shift": 2.0}, "of continuous paths"),
     ("nonsense", {"target": "v"}, "objective.path must be one of linear, gvp, vp, ddpm"),
     ("linear", {"target": "v", "learn_variance": True}, "defined for path ddpm only"),
     ("linear", {"target": "v", "time_law": "normal"}, "must be uniform or logit-normal, got 'normal'"),
     ("ddpm", {"target": "eps", "time_law": "logit-normal"}, "of continuous paths")],
)  # fmt: skip
def test_an_objective_that_cannot_be_is_refused(path, options, message):
    with pytest.raises(ValueError, match=message):
        build_objective(path, **options)


def test_an_objective_is_built_from_the_names_of_a_config():
    assert build_objective("ddpm", target="eps", learn_variance=True) == DDPM
    options = {"time_scale": 1.0, "data_at_1": True, "time_law": "logit-normal"}
    assert build_objective("linear", target="v", **options) == Objective(Linear(1.0, True, "logit-normal"), "v")
