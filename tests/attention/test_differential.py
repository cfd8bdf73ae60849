import math

import pytest
import torch
from golden_values import metadata, section
from naive_attention import OnGrid, assert_same_function, by_heads, join, products, randn, random_parameters, softmax
from timm.layers import DiffAttention

from dit_vca.attention.differential import DifferentialAttention, lambda_init, learned_lambda

CASES = {name: case for name, case in metadata("attention").items() if len(name) == 1}


def test_differential_attention_and_its_gradients_are_those_of_the_equations():
    attention = random_parameters(DifferentialAttention(12, 3, layer=2))
    initial = 0.8 - 0.6 * math.exp(-0.6)

    def naive(x):
        q, k, v = by_heads(attention.qkv, x, 3, 3)
        rows = attention.lambda1
        lam = torch.exp(rows[0] @ rows[1]) - torch.exp(rows[2] @ rows[3]) + initial
        maps = softmax(products(q[..., :2], k[..., :2])) - lam * softmax(products(q[..., 2:], k[..., 2:]))
        heads = torch.einsum("bhnm,bhmd->bhnd", maps, v)
        heads = heads / torch.sqrt((heads**2).mean(-1, keepdim=True) + 1e-5) * attention.rms1
        return join((1 - initial) * heads, attention)

    assert_same_function(OnGrid(attention), naive, randn(2, 15, 12))


@pytest.mark.parametrize("layer", [0, 5])
def test_it_is_timms_with_the_same_weights(layer):
    theirs = DiffAttention(12, 3, qkv_bias=True, depth=layer).double()
    ours = random_parameters(DifferentialAttention(12, 3, layer=layer))
    theirs.load_state_dict({
        "qkv.weight": ours.qkv.weight, "qkv.bias": ours.qkv.bias, "proj.weight": ours.proj.weight, "proj.bias": ours.proj.bias,
        "lambda_q1": ours.lambda1[0], "lambda_k1": ours.lambda1[1], "lambda_q2": ours.lambda1[2], "lambda_k2": ours.lambda1[3],
        "sub_norm.weight": ours.rms1,
    })  # fmt: skip
    x = randn(2, 15, 12)
    torch.testing.assert_close(ours(x, (3, 5)), theirs(x), rtol=1e-6, atol=1e-6)  # timm's lambda is float32


@pytest.mark.parametrize("name", CASES)
def test_the_heads_are_the_recorded_ones(name):
    case, r = CASES[name], section("attention", f"{name}.")
    attention = DifferentialAttention(case["heads"] * case["head_dim"], case["heads"], layer=case["layer"]).double()
    attention.load_state_dict({"lambda1": r["lambda_diff"], "rms1": r["rms1"]}, strict=False)
    heads = attention.mix(r["q"], r["k"], r["v"], tuple(case["grid"]))
    torch.testing.assert_close(heads, r["differential"], rtol=0, atol=1e-12)


def test_a_mask_hides_keys_from_both_maps():
    attention = random_parameters(DifferentialAttention(12, 3, layer=2))
    x = randn(2, 15, 12)
    bias = torch.zeros(1, 3, 15, 15, dtype=torch.float64)
    bias[..., 10:] = -torch.inf
    torch.testing.assert_close(attention(x, (3, 5), bias=bias), attention(x, (3, 5), kv=x[:, :10]))


def test_a_head_of_odd_width_is_refused():
    with pytest.raises(ValueError, match="halves each head; its width model.dim / model.num_heads is odd: 3"):
        DifferentialAttention(9, 3)


def test_lambda_init_grows_with_the_layer_from_one_fifth_to_four_fifths():
    assert lambda_init(0) == pytest.approx(0.2)
    assert lambda_init(11) == pytest.approx(0.8 - 0.6 * math.exp(-3.3))
    assert lambda_init(1000) == pytest.approx(0.8)


def test_lambda_is_computed_in_float32_under_autocast_and_in_float64_for_float64():
    vectors = torch.full((4, 8), 0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = learned_lambda(vectors, 0.2)
    assert value.dtype == torch.float32 and torch.equal(value, learned_lambda(vectors, 0.2))
    assert learned_lambda(vectors.bfloat16(), 0.2).dtype == torch.float32
    assert learned_lambda(vectors.double(), 0.2).dtype == torch.float64
