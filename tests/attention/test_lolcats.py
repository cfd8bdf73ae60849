import pytest
import torch
from naive_attention import OnGrid, assert_same_function, by_heads, join, randn, random_parameters, softmax

from dit_vca.attention import build_attention


def build(name: str = "lolcats", **options):
    torch.manual_seed(0)
    return build_attention(name, 12, 3, layer=1, options=options)


@pytest.mark.parametrize("prefix", [0, 2], ids=["no prefix", "two prefix tokens"])
@pytest.mark.parametrize("window", [1, 3, 5])
def test_lolcats_and_its_gradients_are_those_of_its_equation(window, prefix):
    attention = random_parameters(build(window=window))
    places = [None] * prefix + [(y, x) for y in range(3) for x in range(5)]

    def near(i, j):
        reach = window // 2
        return places[i] and places[j] and all(abs(a - b) <= reach for a, b in zip(places[i], places[j], strict=True))

    def naive(x):
        q, k, v = by_heads(attention.qkv, x, 3, 3)
        phi_q, phi_k = (
            torch.cat([softmax(z), softmax(-z)], -1)
            for z in (torch.einsum("hij,bhnj->bhni", m.weight, y) for m, y in ((attention.map_q, q), (attention.map_k, k)))
        )
        factor = torch.sigmoid(attention.factor_logit)
        rows = []
        for i in range(len(places)):
            logits = [(q[:, :, i] * k[:, :, j]).sum(-1) / 2 for j in range(len(places)) if near(i, j)]
            largest = torch.stack(logits).max(0).values if logits else None
            weights = [
                factor * torch.exp((q[:, :, i] * k[:, :, j]).sum(-1) / 2 - largest)
                if near(i, j)
                else (phi_q[:, :, i] * phi_k[:, :, j]).sum(-1)
                for j in range(len(places))
            ]
            weights = torch.stack(weights, -1)
            rows.append(torch.einsum("bhm,bhmd->bhd", weights / (weights.sum(-1, keepdim=True) + 1e-6), v))
        return join(torch.stack(rows, 2), attention)

    assert_same_function(OnGrid(attention), naive, randn(2, 15 + prefix, 12), rtol=1e-8, atol=1e-9)


def test_a_window_over_the_whole_grid_makes_it_softmax_attention():
    lolcats, exact = random_parameters(build(window=9)), random_parameters(build("softmax"))
    exact.load_state_dict({k: v for k, v in lolcats.state_dict().items() if k in exact.state_dict()})
    x = randn(2, 15, 12)
    torch.testing.assert_close(lolcats(x, (3, 5)), exact(x, (3, 5)), rtol=1e-4, atol=1e-5)  # eps in the denominator


def test_without_a_window_it_is_hedgehog():
    lolcats, hedgehog = random_parameters(build(window=0)), random_parameters(build("hedgehog"))
    hedgehog.load_state_dict({k: v for k, v in lolcats.state_dict().items() if k != "factor_logit"})
    x = randn(2, 15, 12)
    torch.testing.assert_close(lolcats(x, (3, 5)), hedgehog(x, (3, 5)))
    assert not lolcats.factor_logit.requires_grad


def test_the_factor_starts_at_one_tenth():
    torch.testing.assert_close(build().factor_logit.detach().sigmoid(), torch.full((3,), 0.1))


@pytest.mark.parametrize("window", [2, -1])
def test_a_window_must_be_odd(window):
    with pytest.raises(ValueError, match="window must be 0 or odd"):
        build(window=window)


def test_a_bias_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="linear beyond its window"):
        build()(torch.zeros(1, 15, 12), (3, 5), bias=torch.zeros(1, 3, 15, 15))
