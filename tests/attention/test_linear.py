import math

import pytest
import torch
from golden_values import metadata, section
from naive_attention import OnGrid, assert_same_function, by_heads, join, products, randn, random_parameters, softmax

from dit_vca.attention import build_attention
from dit_vca.attention.linear import FEATURE_MAPS, linear_attention

CASES = {name: case for name, case in metadata("attention").items() if len(name) == 1}


def build(name: str, **options):
    torch.manual_seed(0)
    return build_attention(name, 12, 3, layer=1, depth=3, num_tokens=15, options=options)


def quadratic(attention, features, eps=1e-6):
    """The same attention with its weights written out: features(q, k) of every pair, over their sum."""

    def function(x):
        q, k, v = by_heads(attention.qkv, x, 3, 3)
        phi_q, phi_k = features(q, k)
        weights = torch.einsum("bhnf,bhmf->bhnm", phi_q, phi_k)
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
        return join(torch.einsum("bhnm,bhmd->bhnd", weights, v), attention)

    return function


PHI = {
    "elu+1": lambda x: torch.where(x > 0, x + 1, torch.exp(x)),
    "relu": lambda x: torch.clamp(x, min=0),
    "softplus": lambda x: torch.log(1 + torch.exp(x)),
    "softmax": lambda x: softmax(x),
}


@pytest.mark.parametrize("phi", PHI)
def test_linear_attention_and_its_gradients_are_those_of_the_quadratic_form(phi):
    attention = random_parameters(build("linear", phi=phi))
    assert_same_function(OnGrid(attention), quadratic(attention, lambda q, k: (PHI[phi](q), PHI[phi](k))), randn(2, 15, 12))


def test_every_feature_map_is_in_this_test():
    assert set(PHI) == set(FEATURE_MAPS)


@pytest.mark.parametrize("name", CASES)
def test_the_heads_are_the_recorded_ones(name):
    r = section("attention", f"{name}.")
    phi = FEATURE_MAPS["elu+1"]
    heads = linear_attention(phi(r["q"]), phi(r["k"]), r["v"], eps=0)
    torch.testing.assert_close(heads, r["linear_elu"], rtol=0, atol=1e-12)


def test_a_query_without_features_reads_nothing_instead_of_nan():
    attention = build("linear", phi="relu")
    q = -torch.ones(1, 3, 15, 4)
    k, v = torch.ones(1, 3, 15, 4), torch.ones(1, 3, 15, 4)
    assert bool((attention.mix(q, k, v, (3, 5)) == 0).all())
    assert bool(build("linear", phi="relu", eps=0.0).mix(q, k, v, (3, 5)).isnan().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_over_many_tokens_do_not_overflow_in_half_precision(dtype):
    attention = build("linear")
    q, k, v = (10 * randn(1, 3, 4096, 4, seed=s) for s in (1, 2, 3))
    expected = attention.mix(q, k, v, (64, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention.mix(*(x.to(dtype) for x in (q, k, v)), (64, 64))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def test_hedgehog_is_linear_attention_with_learned_softmax_features():
    attention = random_parameters(build("hedgehog"))

    def features(q, k):
        mapped = (torch.einsum("hij,bhnj->bhni", m.weight, x) for m, x in ((attention.map_q, q), (attention.map_k, k)))
        return tuple(torch.cat([softmax(x), softmax(-x)], -1) for x in mapped)

    assert_same_function(OnGrid(attention), quadratic(attention, features), randn(2, 15, 12))


def test_hedgehog_with_its_maps_at_zero_reads_the_mean_of_all_values():
    attention = build("hedgehog").double()
    for m in (attention.map_q, attention.map_k):
        assert torch.equal(m.weight[1], torch.eye(4, dtype=torch.float64))  # at the start
        m.weight.data.zero_()
    q, k, v = (randn(2, 3, 15, 4, seed=s) for s in (1, 2, 3))
    torch.testing.assert_close(attention.mix(q, k, v, (3, 5)), v.mean(2, keepdim=True).expand_as(v), rtol=1e-5, atol=1e-6)


def test_performer_is_linear_attention_with_its_random_features():
    attention = random_parameters(build("performer"))

    def features(q, k):
        def phi(x):
            x = x / 4**0.25
            return torch.exp(torch.einsum("hfd,bhnd->bhnf", attention.directions, x) - (x**2).sum(-1, keepdim=True) / 2)

        return phi(q), phi(k)

    assert_same_function(OnGrid(attention), quadratic(attention, features, eps=0), randn(2, 15, 12), rtol=1e-4, atol=1e-4)


def test_performer_comes_near_softmax_with_many_features():
    q, k, v = (0.5 * randn(1, 3, 15, 4, seed=s) for s in (1, 2, 3))
    exact = torch.einsum("bhnm,bhmd->bhnd", softmax(products(q, k)), v)
    errors = []
    for features in (4, 64, 4096):
        attention = build("performer", features=features).double()
        errors.append(float((attention.mix(q, k, v, (3, 5)) - exact).norm() / exact.norm()))
    assert errors[0] > 3 * errors[1] > 9 * errors[2] and errors[2] < 0.02


def test_performers_directions_are_orthogonal_in_blocks_and_as_long_as_gaussian_vectors():
    torch.manual_seed(0)
    attention = build_attention("performer", 256, 4, layer=0, options={"features": 3})
    directions = attention.directions.unflatten(1, (3, 64))
    assert float((directions.norm(dim=-1) ** 2).mean()) == pytest.approx(64, rel=0.05)
    unit = torch.nn.functional.normalize(directions, dim=-1)
    torch.testing.assert_close(unit @ unit.transpose(-2, -1), torch.eye(64).expand(4, 3, 64, 64), rtol=0, atol=1e-5)
    assert "directions" in attention.state_dict()


def test_performer_survives_logits_whose_exponentials_do_not_fit():
    attention = build("performer")
    q, k, v = (100 * randn(1, 3, 15, 4, seed=s).float() for s in (1, 2, 3))
    assert bool(attention.mix(q, k, v, (3, 5)).isfinite().all())


@pytest.mark.parametrize("scale", [1, 5, 20])
def test_performers_weights_sum_to_one_however_large_the_logits(scale):
    torch.manual_seed(0)
    attention = build_attention("performer", 128, 2, layer=0, options={})
    q, k = (scale * randn(1, 2, 100, 64, seed=s).float() for s in (1, 2))
    sums = attention.mix(q, k, torch.ones(1, 2, 100, 64), (10, 10))
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-4)


def test_cosformer_weighs_by_the_cosine_of_the_distance_in_row_order():
    attention = random_parameters(build("cosformer"))

    def naive(x):
        q, k, v = by_heads(attention.qkv, x, 3, 3)
        weights = torch.einsum("bhnd,bhmd->bhnm", torch.relu(q), torch.relu(k))
        near = torch.tensor([[math.cos(math.pi * (i - j) / 30) for j in range(15)] for i in range(15)], dtype=torch.float64)
        weights = weights * near
        return join(torch.einsum("bhnm,bhmd->bhnd", weights / (weights.sum(-1, keepdim=True) + 1e-6), v), attention)

    assert_same_function(OnGrid(attention), naive, randn(2, 15, 12))


def test_cosformer_of_one_token_is_its_value():
    attention = build("cosformer").double()
    q, k, v = (randn(1, 3, 1, 4, seed=s).abs() for s in (1, 2, 3))
    torch.testing.assert_close(attention.mix(q, k, v, (1, 1)), v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "hedgehog", "performer"])
def test_other_keys_are_taken(name):
    attention, x = random_parameters(build(name)), randn(2, 15, 12)
    torch.testing.assert_close(attention(x, (3, 5), kv=x), attention(x, (3, 5)))
    assert attention(x, (3, 5), kv=x[:, :4]).shape == x.shape


@pytest.mark.parametrize("name", ["linear", "hedgehog", "performer", "cosformer"])
def test_a_bias_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match="takes no bias or mask: its weights are products of features"):
        build(name)(torch.zeros(1, 15, 12), (3, 5), bias=torch.zeros(1, 3, 15, 15))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [("linear", {"phi": "gelu"}, "phi must be one of elu"), ("linear", {"eps": -1.0}, "eps must be at least 0"),
     ("performer", {"features": 0}, "features must be at least 1")],
)  # fmt: skip
def test_a_value_that_is_not_allowed_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)
