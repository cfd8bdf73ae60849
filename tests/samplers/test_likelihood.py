import math

import pytest
import torch
from gaussian_data import MEAN, STD, ExactDenoiser, Mixture

from dit_vca.interpolants import GVP, VP, DiscreteVP, Linear
from samplers.likelihood import log_likelihood, random_signs

X_0 = torch.linspace(-0.5, 2, 8, dtype=torch.float64).view(2, 1, 2, 2)


@pytest.mark.parametrize("path", [Linear(), GVP()], ids=["linear", "gvp"])
def test_the_likelihood_of_a_gaussian_is_exact_with_one_probe(path):
    found = log_likelihood(ExactDenoiser(path, "v"), X_0, path.schedule(100))
    expected = torch.distributions.Normal(MEAN, STD).log_prob(X_0).flatten(1).sum(1)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)


def test_the_likelihood_of_a_gaussian_on_path_vp_is_that_of_its_cut():
    path = VP()
    found = log_likelihood(ExactDenoiser(path, "v"), X_0, path.schedule(400, stop=1e-3))
    c = path.coefficients(torch.tensor(1e-3, dtype=torch.float64))
    at_cut = torch.distributions.Normal(c.alpha * MEAN, (c.alpha**2 * STD**2 + c.sigma**2).sqrt())
    torch.testing.assert_close(found, at_cut.log_prob(X_0).flatten(1).sum(1), rtol=0, atol=0.05)


def test_the_likelihood_of_a_mixture_is_that_of_its_density():
    path, denoise = Linear(), Mixture(Linear(), "v")
    found = log_likelihood(denoise, X_0, path.schedule(400))
    parts = zip(Mixture.WEIGHTS, Mixture.MEANS, Mixture.STDS, strict=True)
    density = sum(w * torch.exp(torch.distributions.Normal(m, s).log_prob(X_0)) for w, m, s in parts)
    torch.testing.assert_close(found, density.log().flatten(1).sum(1), rtol=0, atol=0.02)


class Sheared:
    """v = x A: a divergence of trace A at every x, which one probe meets only on average."""

    A = torch.tensor([[0.3, 0.8], [-0.5, -0.1]], dtype=torch.float64)

    def __call__(self, x, t):
        from samplers import Prediction

        return Prediction((x.flatten(1) @ self.A).view_as(x), "v", x, Linear().coefficients(t))


def test_the_estimate_is_right_on_average_over_probes():
    x = torch.zeros(4000, 1, 1, 2, dtype=torch.float64)
    torch.manual_seed(0)
    found = log_likelihood(Sheared(), x, Linear().schedule(50)) + math.log(2 * math.pi)
    assert float(found.std()) > 0.1
    assert float(found.mean()) == pytest.approx(float(Sheared.A.trace()), abs=4 * float(found.std()) / math.sqrt(4000))


def test_probes_are_signs_and_a_chain_has_no_likelihood():
    assert set(random_signs(torch.zeros(100)).tolist()) == {-1.0, 1.0}
    path = DiscreteVP()
    with pytest.raises(ValueError, match="has no dx/dt"):
        log_likelihood(ExactDenoiser(path, "eps"), X_0, path.schedule(3))
