import pytest
import torch
from naive_attention import OnGrid, assert_same_function, by_heads, join, products, randn, random_parameters, softmax

from dit_vca.attention import build_attention


def build(name: str = "softmax", *, layer: int = 1, **options):
    torch.manual_seed(0)
    return build_attention(name, 12, 2, layer=layer, depth=3, options=options)


def test_wider_values_and_more_heads_are_softmax_attention_of_those_widths():
    for options, heads, value_width in (({"value_ratio": 2.0}, 2, 24), ({"inner_ratio": 1.5}, 3, 18)):
        attention = random_parameters(build(**options))
        inner = 6 * heads

        def naive(x, attention=attention, heads=heads, inner=inner, value_width=value_width):
            rows = x @ attention.qkv.weight.T + attention.qkv.bias
            q, k, v = (z.reshape(2, 15, heads, -1).transpose(1, 2) for z in rows.split([inner, inner, value_width], -1))
            return join(torch.einsum("bhnm,bhmd->bhnd", softmax(products(q, k)), v), attention)

        assert_same_function(OnGrid(attention), naive, randn(2, 15, 12))


@pytest.mark.parametrize("options", [{"value_ratio": 2.0}, {"inner_ratio": 1.5}])
def test_the_wider_forms_add_the_matrices_of_denoising_attention(options):
    with torch.device("meta"):
        plain, wide = (build_attention("softmax", 768, 12, layer=0, options=o) for o in ({}, options))
    matrices = [sum(p.numel() for p in m.parameters() if p.ndim == 2) for m in (plain, wide)]
    assert matrices[1] - matrices[0] == 2 * 768**2


@pytest.mark.parametrize("options", [{"value_ratio": 2.0}, {"inner_ratio": 1.5}])
def test_the_wider_forms_take_a_convolution_and_other_keys(options):
    attention, x = random_parameters(build(depthwise=3, **options)), randn(2, 15, 12)
    assert attention(x, (3, 5)).shape == x.shape
    attention = random_parameters(build(**options))
    torch.testing.assert_close(attention(x, (3, 5), kv=x), attention(x, (3, 5)))


@pytest.mark.parametrize("options", [{"value_ratio": 0.3}, {"value_ratio": 0.0}, {"inner_ratio": 1.2}, {"inner_ratio": -1.0}])
def test_widths_that_are_no_whole_number_are_refused(options):
    with pytest.raises(ValueError, match=f"attention option {next(iter(options))} must make a whole number"):
        build(**options)


def test_cog_attention_weighs_by_magnitude_and_keeps_the_sign():
    attention = random_parameters(build("cog"))

    def naive(x):
        q, k, v = by_heads(attention.qkv, x, 2, 3)
        logits = products(q, k)
        weights = torch.sign(logits) * softmax(torch.abs(logits))
        torch.testing.assert_close(weights.abs().sum(-1), torch.ones_like(weights[..., 0]))
        return join(torch.einsum("bhnm,bhmd->bhnd", weights, v), attention)

    assert_same_function(OnGrid(attention), naive, randn(2, 15, 12))


def test_cog_attention_can_leave_its_ends_to_softmax():
    x = randn(2, 15, 12)
    for layer, ends in ((0, True), (1, False), (2, True)):
        attention = random_parameters(build("cog", layer=layer, softmax_ends=True))
        other = random_parameters(build("softmax" if ends else "cog"))
        torch.testing.assert_close(attention(x, (3, 5)), other(x, (3, 5)))


def test_cog_attention_takes_other_keys_but_no_bias():
    attention, x = random_parameters(build("cog")), randn(2, 15, 12)
    torch.testing.assert_close(attention(x, (3, 5), kv=x), attention(x, (3, 5)))
    with pytest.raises(ValueError, match="cog attention takes no bias or mask: it would change the sign"):
        attention(x, (3, 5), bias=torch.zeros(1, 2, 15, 15))
