import pytest
import torch
from golden_values import metadata, section

from dit_vca.backbones.dit import DiT
from dit_vca.interpolants import DiscreteVP, Linear
from dit_vca.objectives import Objective
from samplers import Prediction, autoguided, guided

NULL = 10
Y = torch.tensor([1, 2, 7])


class Recorder:
    """A denoiser whose answer is made of its label, with the batches it was called with."""

    def __init__(self, fraction: bool = False):
        self.fraction, self.batches = fraction, []

    def __call__(self, x, t, y):
        self.batches.append((len(x), y.tolist()))
        value = x * (1 + y.view(-1, 1, 1, 1)) + t.view(-1, 1, 1, 1)
        fraction = value / 100 if self.fraction else None
        return Prediction(value, "v", x, Linear().coefficients(t), fraction)


def inputs(t: float = 0.5):
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, torch.full((3,), t, dtype=torch.float64)


def plain(y, t: float = 0.5):
    return Recorder()(*inputs(t), y).value


@pytest.mark.parametrize("name", ["dit", "sit"])
def test_guidance_on_three_channels_reproduces_the_recorded_one(name):
    recorded, header = section(f"{name}_backbone", "cfg."), metadata(f"{name}_backbone")
    sizes = dict(header["config"])
    network = DiT(dim=sizes.pop("hidden_size"), learn_sigma=True, **sizes)
    network.load_state_dict(section(f"{name}_backbone", "state."))
    if name == "dit":
        objective, t = Objective(DiscreteVP(), "eps", learn_variance=True), (recorded["t"].double() + 1) / 1000
    else:
        objective, t = Objective(Linear(time_scale=1.0, data_at_1=True), "v"), 1 - recorded["t"].double()
    x, y = recorded["x"][:2], recorded["y"]
    assert y[2:].tolist() == [network.null_class] * 2

    denoise = guided(
        lambda x, t, y: objective.predict(network, x, t, y), y[:2],
        null=network.null_class, scale=float(header["cfg_scale"]), channels=3,
    )  # fmt: skip
    with torch.no_grad():
        prediction = denoise(x, t[:2])
    conditional = recorded["out"][:2]
    if name == "dit":
        torch.testing.assert_close(prediction.eps, conditional[:, :4], rtol=0, atol=1e-5)  # 3.5 times two outputs to 3e-6
        torch.testing.assert_close(prediction.variance_fraction, (conditional[:, 4:] + 1) / 2, rtol=0, atol=3e-6)
    else:
        torch.testing.assert_close(prediction.v, -conditional, rtol=0, atol=1e-5)


def test_all_channels_are_guided_by_default():
    denoise_y = Recorder()
    prediction = guided(denoise_y, Y, null=NULL, scale=2.5)(*inputs())
    null = plain(torch.full_like(Y, NULL))
    torch.testing.assert_close(prediction.v, null + 2.5 * (plain(Y) - null))
    assert denoise_y.batches == [(6, [1, 2, 7, NULL, NULL, NULL])]


def test_channels_that_are_not_guided_are_the_conditional_output():
    prediction = guided(Recorder(), Y, null=NULL, scale=2.5, channels=3)(*inputs())
    torch.testing.assert_close(prediction.v[:, :3], guided(Recorder(), Y, null=NULL, scale=2.5)(*inputs()).v[:, :3])
    assert torch.equal(prediction.v[:, 3:], plain(Y)[:, 3:])


def test_the_learned_variance_is_the_conditional_one():
    prediction = guided(Recorder(fraction=True), Y, null=NULL, scale=4.0)(*inputs())
    torch.testing.assert_close(prediction.variance_fraction, plain(Y) / 100)


def test_a_guided_prediction_converts_with_the_coefficients_and_state_of_its_own_rows():
    x, t = inputs(0.25)
    prediction = guided(Recorder(), Y, null=NULL, scale=2.0)(x, t)
    assert prediction.x_t is x
    torch.testing.assert_close(0.75 * prediction.x_0 + 0.25 * prediction.eps, x)
    assert all(len(c) == 3 for c in prediction.coefficients)


def test_scale_one_is_the_conditional_model_in_one_call_of_the_batch():
    denoise_y = Recorder()
    prediction = guided(denoise_y, Y, null=NULL, scale=1.0)(*inputs())
    assert torch.equal(prediction.v, plain(Y))
    assert denoise_y.batches == [(3, Y.tolist())]


def test_scale_zero_is_the_unconditional_model():
    prediction = guided(Recorder(), Y, null=NULL, scale=0.0)(*inputs())
    torch.testing.assert_close(prediction.v, plain(torch.full_like(Y, NULL)))


@pytest.mark.parametrize("t", [0.25, 0.5, 0.75], ids=["lower bound", "inside", "upper bound"])
def test_inside_the_interval_the_network_is_called_once_with_twice_the_batch(t):
    denoise_y = Recorder()
    prediction = guided(denoise_y, Y, null=NULL, scale=3.0, interval=(0.25, 0.75))(*inputs(t))
    assert [rows for rows, _ in denoise_y.batches] == [6]
    assert not torch.allclose(prediction.v, plain(Y, t))


@pytest.mark.parametrize("t", [0.0, 0.249, 0.751, 1.0])
def test_outside_the_interval_the_conditional_model_is_called_alone(t):
    denoise_y = Recorder()
    prediction = guided(denoise_y, Y, null=NULL, scale=3.0, interval=(0.25, 0.75))(*inputs(t))
    assert denoise_y.batches == [(3, Y.tolist())]
    assert torch.equal(prediction.v, plain(Y, t))


@pytest.mark.parametrize("interval", [(0.6, 0.4), (-0.1, 0.5), (0.5, 1.1)])
def test_an_interval_that_is_none_is_refused(interval):
    with pytest.raises(ValueError, match="0 <= low <= high <= 1"):
        guided(Recorder(), Y, null=NULL, scale=2.0, interval=interval)


def test_each_row_has_its_own_time_and_is_guided_inside_the_interval_alone():
    x, _ = inputs()
    t = torch.tensor([0.1, 0.3, 0.9], dtype=torch.float64)
    denoise = guided(Recorder(), Y, null=NULL, scale=3.0, interval=(0.2, 0.5))
    conditional, unconditional = (Recorder()(x, t, y).value for y in (Y, torch.full_like(Y, NULL)))
    expected = conditional.clone()
    expected[1] = unconditional[1] + 3 * (conditional[1] - unconditional[1])
    torch.testing.assert_close(denoise(x, t).value, expected)


@pytest.mark.parametrize("rescale", [0.5, 1.0])
def test_rescaled_guidance_keeps_the_deviation_of_the_conditional_output(rescale):
    x, t = inputs()
    conditional = plain(Y)
    without = guided(Recorder(), Y, null=NULL, scale=3.0)(x, t).value
    found = guided(Recorder(), Y, null=NULL, scale=3.0, rescale=rescale)(x, t).value
    for i in range(3):
        factor = float(conditional[i].std() / without[i].std())
        torch.testing.assert_close(found[i], without[i] * (rescale * factor + 1 - rescale))
        if rescale == 1:
            assert float(found[i].std()) == pytest.approx(float(conditional[i].std()))
    with pytest.raises(ValueError, match="rescaling of guidance must be from 0 to 1"):
        guided(Recorder(), Y, null=NULL, scale=3.0, rescale=1.5)


def test_autoguidance_moves_away_from_a_worse_network_inside_the_interval():
    good, worse = (lambda x, t, y=y: Recorder()(x, t, y) for y in (Y, Y + 1))
    x, t = inputs(0.5)
    strong, weak = plain(Y), plain(Y + 1)
    torch.testing.assert_close(autoguided(good, worse, scale=2.5)(x, t).value, weak + 2.5 * (strong - weak))
    torch.testing.assert_close(autoguided(good, worse, scale=2.5, interval=(0.6, 1.0))(x, t).value, strong)
    assert torch.equal(autoguided(good, worse, scale=1.0)(x, t).value, strong)

    def of_another_target(x, t):
        return Prediction(x, "eps", x, Linear().coefficients(t))

    with pytest.raises(ValueError, match="the guide predicts eps, the model v"):
        autoguided(good, of_another_target, scale=2.0)(x, t)
