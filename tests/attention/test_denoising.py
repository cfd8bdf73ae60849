import pytest
import torch
from golden_values import metadata, section
from naive_attention import OnGrid, assert_same_function, by_heads, join, products, randn, random_parameters, softmax

from dit_vca.attention import build_attention
from dit_vca.attention.denoising import VARIANTS, DenoisingAttention
from dit_vca.presets import preset
from dit_vca.runs import build_network

EVERY = pytest.mark.parametrize("variant", VARIANTS)
CASES = {name: case for name, case in metadata("attention").items() if len(name) == 1}


def build(variant: str, **options) -> DenoisingAttention:
    torch.manual_seed(0)
    return build_attention(variant, 12, 3, layer=0, options=options)


def naive(attention, own_q, own_v, has_alpha, sign):
    def function(x):
        q, k, v = by_heads(attention.qkv, x, 3, 3)
        q_neg, v_neg = q, v
        if own_q or own_v:
            own = by_heads(attention.qv_neg, x, 3, own_q + own_v)
            q_neg, v_neg = own[0] if own_q else q, own[-1] if own_v else v
        positive = torch.einsum("bhnm,bhmd->bhnd", softmax(products(q, k)), v)
        softmin = softmax(-products(q_neg, k))
        negative = torch.einsum("bhnm,bhmd->bhnd", softmin, v_neg)
        alpha = attention.alpha[:, None, None] if has_alpha else 1
        return join(positive + sign * alpha * negative, attention)

    return function


@EVERY
@pytest.mark.parametrize("fused", [False, True], ids=["two calls", "one call"])
def test_every_variant_and_its_gradients_are_those_of_its_equation(variant, fused):
    attention = random_parameters(build(variant, fused=fused))
    assert_same_function(
        OnGrid(attention), naive(attention, *VARIANTS[variant], sign=1 if variant == "dna_pm" else -1), randn(2, 15, 12)
    )


@EVERY
@pytest.mark.parametrize("name", CASES)
def test_the_heads_are_the_recorded_ones(name, variant):
    case, r = CASES[name], section("attention", f"{name}.")
    width = case["heads"] * case["head_dim"]
    options = {} if variant == "dna_pm" else {"neg_sign": 1}
    attention = build_attention(variant, width, case["heads"], layer=0, options=options).double()
    attention.qkv = attention.proj = torch.nn.Identity()
    if attention.alpha is not None:
        attention.alpha.data = r["alpha"]
    own_q, own_v, _ = VARIANTS[variant]
    own = [r[key].transpose(1, 2).flatten(2) for key, has in (("q_neg", own_q), ("v_neg", own_v)) if has]
    if own:
        attention.qv_neg = torch.nn.Module()
        attention.qv_neg.forward = lambda x: torch.cat(own, dim=-1)
    tokens = torch.cat([r[key].transpose(1, 2).flatten(2) for key in ("q", "k", "v")], dim=-1)
    expected = r[variant].transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(tokens, tuple(case["grid"])), expected, rtol=0, atol=1e-12)


def test_turning_the_sign_and_the_values_of_the_negative_branch_changes_nothing():
    minus, plus = (random_parameters(build("dna", neg_sign=sign)) for sign in (-1, 1))
    plus.load_state_dict(minus.state_dict())
    plus.qv_neg.weight.data[12:] *= -1
    plus.qv_neg.bias.data[12:] *= -1
    x = randn(2, 15, 12)
    assert torch.equal(minus(x, (3, 5)), plus(x, (3, 5)))


def test_with_alpha_zero_dna_hat_is_softmax_attention():
    hat, softmax_attention = random_parameters(build("dna_hat")), random_parameters(build("softmax"))
    softmax_attention.load_state_dict({k: v for k, v in hat.state_dict().items() if k != "alpha"})
    hat.alpha.data.zero_()
    x = randn(2, 15, 12)
    torch.testing.assert_close(hat(x, (3, 5)), softmax_attention(x, (3, 5)))


@pytest.mark.parametrize("variant", ["dna", "dna_q", "dna_v", "dna_hat"])
@pytest.mark.parametrize("bias", [True, False])
def test_started_from_softmax_the_output_changes_by_less_than_one_in_ten_thousand(variant, bias):
    teacher, student = (random_parameters(build(kind, qkv_bias=bias)) for kind in ("softmax", variant))
    assert student.load_state_dict(teacher.state_dict(), strict=False).unexpected_keys == []
    student.start_from_softmax()
    x = randn(2, 15, 12)
    expected = teacher(x, (3, 5))
    change = float(((student(x, (3, 5)) - expected).norm() / expected.norm()).detach())
    assert 0 < change < 1e-4


def test_rows_of_the_negative_projection_are_queries_then_values():
    attention = build("dna")
    with torch.no_grad():
        attention.start_from_softmax()
    assert torch.equal(attention.qv_neg.weight[:12], 1e-4 * attention.qkv.weight[:12])
    assert torch.equal(attention.qv_neg.weight[12:], 1e-4 * attention.qkv.weight[24:])
    plus = build("dna", neg_sign=1)
    plus.start_from_softmax()
    assert torch.equal(plus.qv_neg.weight[12:], -1e-4 * plus.qkv.weight[24:])


@EVERY
@pytest.mark.parametrize("fused", [False, True], ids=["two calls", "one call"])
def test_a_mask_masks_both_branches_and_other_keys_serve_both(variant, fused):
    attention = random_parameters(build(variant, fused=fused))
    x = randn(2, 15, 12)
    bias = torch.zeros(1, 3, 15, 15, dtype=torch.float64)
    bias[..., 10:] = -torch.inf
    expected = attention(x, (3, 5), kv=x[:, :10])
    torch.testing.assert_close(attention(x, (3, 5), bias=bias), expected)
    torch.testing.assert_close(attention(x[:, :, :], (3, 5), kv=x), attention(x, (3, 5)))


def test_a_bias_is_negated_in_the_softmin_unless_it_is_to_be_the_same():
    bias = randn(1, 3, 15, 15, seed=3)
    x = randn(2, 15, 12)
    for neg_bias, sign in (("negated", -1), ("same", 1)):
        attention = random_parameters(build("dna_hat", neg_bias=neg_bias))
        q, k, v = by_heads(attention.qkv, x, 3, 3)
        positive = torch.einsum("bhnm,bhmd->bhnd", softmax(products(q, k) + bias), v)
        negative = torch.einsum("bhnm,bhmd->bhnd", softmax(-products(q, k) + sign * bias), v)
        expected = join(positive - attention.alpha[:, None, None] * negative, attention)
        torch.testing.assert_close(attention(x, (3, 5), bias=bias), expected)


def test_the_negative_branch_starts_with_the_spread_of_the_positive_one_and_alpha_at_a_half():
    config = preset("sit-s2-dna")
    model = config.model.__class__(**{**vars(config.model), "input_size": 8, "in_channels": 4, "num_classes": 10, "depth": 2})
    attention = build_network(config.__class__(**{**vars(config), "model": model})).blocks[1].attn
    bound = (6 / (4 * 384)) ** 0.5
    for weight in (attention.qkv.weight.detach(), attention.qv_neg.weight.detach()):
        assert float(weight.abs().max()) == pytest.approx(bound, rel=1e-3) and float(weight.std()) == pytest.approx(
            bound / 3**0.5, rel=0.01
        )
    assert bool((attention.qv_neg.bias == 0).all()) and bool((attention.alpha == 0.5).all())


@pytest.mark.parametrize(
    ("variant", "added"),
    [("dna", 12 * (2 * 768**2 + 2 * 768 + 12)), ("dna_hat", 144), ("dna_q", 12 * (768**2 + 768 + 12)), ("dna_pm", 0)],
)
def test_a_network_of_base_size_has_so_many_parameters_more(variant, added):
    def count(kind):
        with torch.device("meta"):
            modules = [build_attention(kind, 768, 12, layer=i, options={}) for i in range(12)]
        return sum(p.numel() for module in modules for p in module.parameters())

    assert count(variant) - count("softmax") == added


@pytest.mark.parametrize(
    ("options", "message"),
    [({"neg_sign": 0}, "neg_sign must be -1 or 1"), ({"neg_bias": "other"}, "neg_bias must be one of negated, same")],
)
def test_a_value_that_is_not_allowed_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build("dna", **options)


def test_the_sign_of_dna_pm_is_the_model_and_no_option():
    with pytest.raises(ValueError, match="no option 'neg_sign'"):
        build("dna_pm", neg_sign=-1)
