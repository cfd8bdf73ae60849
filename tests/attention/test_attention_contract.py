"""What every entry of the attention table must do, and the options they share."""

import pytest
import torch

from dit_vca.attention import ATTENTION, build_attention, option_defaults, resolve_options
from dit_vca.attention.base import check_grid

DIM, HEADS = 12, 3
EVERY = pytest.mark.parametrize("name", ATTENTION)
PREFIX = pytest.mark.parametrize("prefix", [0, 2], ids=["no prefix", "two prefix tokens"])
GRID = pytest.mark.parametrize("grid", [(5, 7), (3, 1), (1, 1), (8, 16)], ids=lambda grid: "x".join(map(str, grid)))


def build(name: str, num_tokens: int = 15, *, dtype=torch.float32, layer: int = 1, **options):
    torch.manual_seed(0)
    return build_attention(name, DIM, HEADS, layer=layer, depth=3, num_tokens=num_tokens, options=options).to(dtype)


def tokens(batch: int, grid, prefix: int = 0, *, dtype=torch.float32):
    return torch.randn(batch, prefix + grid[0] * grid[1], DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


@EVERY
@PREFIX
@GRID
def test_shape_and_dtype_are_preserved_and_the_result_is_finite(name, grid, prefix):
    x = tokens(2, grid, prefix)
    out = build(name, x.shape[1])(x, grid)
    assert out.shape == x.shape and out.dtype == x.dtype and bool(out.isfinite().all())


@EVERY
@PREFIX
def test_gradients_reach_every_parameter_and_every_token(name, prefix):
    attention = build(name, 15 + prefix, depthwise=3, dtype=torch.float64)
    x = tokens(2, (3, 5), prefix, dtype=torch.float64).requires_grad_()
    weights = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    (attention(x, (3, 5)) * weights).sum().backward()
    reached = {key: p.grad is not None and bool((p.grad != 0).any()) for key, p in attention.named_parameters()}
    assert all(reached.values()), reached
    assert bool((x.grad != 0).any(dim=-1).all())


@EVERY
@PREFIX
def test_float64_is_not_computed_in_less(name, prefix):
    attention = build(name, 6 + prefix, depthwise=3, dtype=torch.float64)
    x = tokens(1, (2, 3), prefix, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attention(x, (2, 3)), x, eps=1e-6, atol=1e-7, rtol=1e-6)


@EVERY
@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch's RMSNorm says that it does not fuse
def test_autocast_to_bfloat16_comes_near_float32(name):
    attention, x = build(name, 16, depthwise=3), tokens(2, (3, 5), 1)
    expected = attention(x, (3, 5)).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(x, (3, 5))
    assert out.dtype == torch.bfloat16
    tolerance = 0.1 if name == "cog" else 0.03  # a logit that rounds across zero turns the sign of its weight
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))
    out.float().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in attention.parameters())


@EVERY
def test_rows_of_a_batch_are_independent(name):
    attention, x = build(name, 16, depthwise=3), tokens(3, (3, 5), 1)
    before = attention(x, (3, 5))
    changed = x.clone()
    changed[1] += 1
    after = attention(changed, (3, 5))
    assert torch.equal(after[[0, 2]], before[[0, 2]]) and not torch.isclose(after[1], before[1]).all()
    torch.testing.assert_close(attention(x[2:], (3, 5)), before[2:])


@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "cosformer"])  # whose queries may be all zero
def test_every_patch_token_is_influenced_by_every_other(name):
    attention, x = build(name, 16, dtype=torch.float64), tokens(1, (3, 5), 1, dtype=torch.float64)
    before = attention(x, (3, 5))
    for position in (0, 1, 15):  # the prefix token, the first patch, the last
        changed = x.clone()
        changed[0, position, 0] += 1
        assert bool((attention(changed, (3, 5)) != before).any(dim=-1).all())


@EVERY
def test_the_module_is_the_same_function_in_train_and_eval_mode(name):
    attention, x = build(name), tokens(2, (3, 5))
    assert torch.equal(attention.train()(x, (3, 5)), attention.eval()(x, (3, 5)))


@EVERY
def test_it_is_captured_as_one_graph_without_breaks(name):
    torch._dynamo.reset()
    attention, x = build(name), tokens(2, (3, 5)).requires_grad_()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, (3, 5)), attention(x, (3, 5)))
    compiled(x, (3, 5)).sum().backward()


@EVERY
def test_projections_have_the_names_and_shapes_of_a_softmax_checkpoint(name):
    weights = build("softmax").state_dict()
    assert {key: tuple(value.shape) for key, value in weights.items()} == {
        "qkv.weight": (3 * DIM, DIM), "qkv.bias": (3 * DIM,), "proj.weight": (DIM, DIM), "proj.bias": (DIM,),
    }  # fmt: skip
    attention = build(name)
    assert attention.load_state_dict(weights, strict=False).unexpected_keys == []
    assert torch.equal(attention.qkv.weight, weights["qkv.weight"])


@EVERY
def test_the_bias_of_qkv_can_be_left_out(name):
    attention, x = build(name, qkv_bias=False), tokens(1, (3, 5))
    assert "qkv.bias" not in attention.state_dict() and attention(x, (3, 5)).shape == x.shape


@EVERY
@PREFIX
def test_the_depthwise_convolution_adds_neighbouring_values_to_patch_tokens_alone(name, prefix):
    plain, local = (build(name, 15 + prefix, depthwise=size, dtype=torch.float64) for size in (0, 3))
    local.load_state_dict(plain.state_dict(), strict=False)
    for attention in (plain, local):
        attention.proj.weight.data = torch.eye(DIM, dtype=torch.float64)
    x = tokens(2, (3, 5), prefix, dtype=torch.float64)
    added = local(x, (3, 5)) - plain(x, (3, 5))
    values = plain.qkv(x)[..., 2 * DIM :][:, prefix:]
    expected = local.dwc.bias.expand(2, 15, DIM).clone()
    for y in range(3):
        for column in range(5):
            for dy in (-1, 0, 1):
                for dx in (-1, 0, 1):
                    if 0 <= y + dy < 3 and 0 <= column + dx < 5:
                        neighbour = values[:, 5 * (y + dy) + column + dx]
                        expected[:, 5 * y + column] += local.dwc.weight[:, 0, dy + 1, dx + 1] * neighbour
    torch.testing.assert_close(added[:, prefix:], expected)
    assert bool((added[:, :prefix] == 0).all())


@EVERY
@pytest.mark.parametrize("size", [2, -1])
def test_a_depthwise_kernel_must_be_odd(name, size):
    with pytest.raises(ValueError, match="depthwise must be 0 or an odd kernel size"):
        build(name, depthwise=size)


@EVERY
def test_a_width_that_the_heads_do_not_divide_is_refused(name):
    with pytest.raises(ValueError, match=r"model\.dim 10 is not divisible by model\.num_heads 3"):
        build_attention(name, 10, 3, layer=0, num_tokens=15, options={})


@EVERY
def test_resolving_writes_all_defaults_out_and_keeps_what_is_given(name):
    defaults = option_defaults(name)
    assert {"qkv_bias", "depthwise"} <= set(defaults)
    assert resolve_options(name, {}) == defaults
    assert resolve_options(name, {"depthwise": 5}) == {**defaults, "depthwise": 5}
    assert resolve_options(name, resolve_options(name, {"qkv_bias": False})) == {**defaults, "qkv_bias": False}


@EVERY
@pytest.mark.parametrize("key", ["dim", "layer", "num_heads", "depthwize"])
def test_an_unknown_option_is_refused_with_the_names_there_are(name, key):
    with pytest.raises(ValueError, match=f"attention {name} has no option '{key}'; it has qkv_bias, "):
        resolve_options(name, {key: 1})


@EVERY
@pytest.mark.parametrize(("key", "value"), [("depthwise", "3"), ("depthwise", 3.0), ("qkv_bias", 1), ("depthwise", True)])
def test_an_option_of_the_wrong_type_is_refused(name, key, value):
    with pytest.raises(ValueError, match=f"attention option {key} of {name} must be of type"):
        resolve_options(name, {key: value})


def test_a_whole_number_is_accepted_for_a_real_one_and_recorded_as_real():
    value = resolve_options("vca", {"embedding_std": 1})["embedding_std"]
    assert value == 1.0 and isinstance(value, float)


def test_the_defaults_of_vca_are_the_ones_its_specification_gives():
    assert option_defaults("vca") == {
        "qkv_bias": True, "pool": 8, "depthwise": 3, "embedding_std": 0.02, "stage1": "vca", "stage2": "vca",
        "positive": "pool+emb", "negative": "pool+emb",
    }  # fmt: skip


def test_an_unknown_kind_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=f"unknown attention 'nonsense'; there is {', '.join(ATTENTION)}"):
        resolve_options("nonsense", {})


def test_softmax_attention_is_its_equation():
    attention, x = build("softmax", dtype=torch.float64), tokens(2, (3, 5), 1, dtype=torch.float64)
    q, k, v = torch.einsum("bnc,kmdc->kbmnd", x, attention.qkv.weight.view(3, HEADS, -1, DIM)) + attention.qkv.bias.view(
        3, 1, HEADS, 1, -1
    )
    weights = torch.exp(torch.einsum("bmnd,bmkd->bmnk", q, k) / (DIM // HEADS) ** 0.5)
    heads = torch.einsum("bmnk,bmkd->bnmd", weights / weights.sum(-1, keepdim=True), v).flatten(2)
    torch.testing.assert_close(attention(x, (3, 5)), heads @ attention.proj.weight.T + attention.proj.bias)


def test_softmax_attention_takes_a_mask_and_keys_and_values_of_other_tokens():
    attention, x = build("softmax"), tokens(2, (3, 5))
    bias = torch.zeros(1, HEADS, 15, 15)
    bias[..., 10:] = -torch.inf
    torch.testing.assert_close(attention(x, (3, 5), bias=bias), attention(x, (3, 5), kv=x[:, :10]))
    torch.testing.assert_close(attention(x, (3, 5), kv=x), attention(x, (3, 5)))


def test_a_depthwise_convolution_refuses_values_of_other_tokens():
    attention, x = build("softmax", depthwise=3), tokens(2, (3, 5))
    with pytest.raises(ValueError, match="needs values on the grid of the queries"):
        attention(x, (3, 5), kv=x[:, :10])


def test_a_sequence_shorter_than_its_grid_is_refused():
    assert check_grid(17, (3, 5)) == 2
    with pytest.raises(ValueError, match="14 tokens cannot hold a grid of 3 x 5"):
        build("vca")(tokens(1, (2, 7)), (3, 5))
