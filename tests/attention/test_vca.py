import math

import pytest
import torch
from golden_values import metadata, section
from naive_attention import OnGrid, assert_same_function, by_heads, join, products, randn, random_parameters, softmax

from dit_vca.attention import VCA_ROWS
from dit_vca.attention.vca import (
    VisualContrastAttention,
    lambda_init,
    learned_lambda,
    pool_queries,
    visual_contrast_attention,
)

CASES = {name: case for name, case in metadata("attention").items() if len(name) == 1}
GRIDS = {
    "odd, overlapping bins": ((5, 7), 3),
    "finer than the contrast grid in one direction": ((3, 5), 4),
    "one row": ((1, 6), 2),
    "divisible": ((6, 4), 2),
    "divisible in one direction": ((4, 5), 2),
    "coarser than the contrast grid": ((2, 2), 4),
    "a single contrast token": ((3, 4), 1),
}


def naive_vca(x, p, grid, pool, num_heads, layer):
    """The equations of the paper, term by term, as a function of the tokens x (B, N, C) and the parameters p."""
    batch, tokens, width = x.shape
    d, (height, columns) = width // num_heads, grid
    prefix = tokens - height * columns
    initial = 0.8 - 0.6 * math.exp(-0.3 * layer)
    q, k, v = torch.einsum("bnc,kmdc->kbmnd", x, p["qkv.weight"].view(3, num_heads, d, width)) + p["qkv.bias"].view(
        3, 1, num_heads, 1, d
    )

    image = q[:, :, prefix:].reshape(batch, num_heads, height, columns, d)
    pooled = []
    for i in range(pool):
        top, bottom = math.floor(i * height / pool), math.ceil((i + 1) * height / pool)
        for j in range(pool):
            left, right = math.floor(j * columns / pool), math.ceil((j + 1) * columns / pool)
            pooled.append(torch.einsum("bmyxd->bmd", image[:, :, top:bottom, left:right]) / ((bottom - top) * (right - left)))
    t = torch.stack(pooled, dim=2)
    t_pos, t_neg = t + p["embedding_pos"], t + p["embedding_neg"]

    def softmax(logits):
        e = torch.exp(logits / math.sqrt(d))
        return e / e.sum(dim=-1, keepdim=True)

    def rms_norm(y, gain):
        return y / torch.sqrt((y**2).mean(dim=-1, keepdim=True) + 1e-5) * gain

    def lam(rows):
        return torch.exp(rows[0] @ rows[1]) - torch.exp(rows[2] @ rows[3]) + initial

    v_pos, v_neg = (torch.einsum("bmnk,bmkd->bmnd", softmax(torch.einsum("bmnd,bmkd->bmnk", s, k)), v) for s in (t_pos, t_neg))
    v_hat = (1 - initial) * rms_norm(v_pos - lam(p["lambda1"]) * v_neg, p["rms1"])
    map_pos, map_neg = (softmax(torch.einsum("bmnd,bmkd->bmnk", q, s)) for s in (t_pos, t_neg))
    mixed = torch.einsum("bmnk,bmkd->bmnd", map_pos, v_hat) - lam(p["lambda2"]) * torch.einsum("bmnk,bmkd->bmnd", map_neg, v_hat)
    heads = torch.einsum("bmnd->bnmd", (1 - initial) * rms_norm(mixed, p["rms2"])).reshape(batch, tokens, width)

    values = torch.einsum("bmnd->bnmd", v[:, :, prefix:]).reshape(batch, height, columns, width)
    padded = torch.zeros(batch, height + 2, columns + 2, width, dtype=x.dtype)
    padded[:, 1:-1, 1:-1] = values
    local = p["dwc.bias"] + sum(
        padded[:, dy : dy + height, dx : dx + columns] * p["dwc.weight"][:, 0, dy, dx] for dy in range(3) for dx in range(3)
    )
    heads = heads + torch.cat([torch.zeros(batch, prefix, width, dtype=x.dtype), local.flatten(1, 2)], dim=1)
    return torch.einsum("bnc,oc->bno", heads, p["proj.weight"]) + p["proj.bias"]


def random_attention(pool: int, layer: int = 2) -> VisualContrastAttention:
    """Every parameter is random and of a size that shows in the output."""
    attention = VisualContrastAttention(12, 3, layer=layer, pool=pool).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in attention.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return attention


@pytest.mark.parametrize("prefix", [0, 2], ids=["no prefix", "two prefix tokens"])
@pytest.mark.parametrize(("grid", "pool"), GRIDS.values(), ids=GRIDS)
def test_vca_and_every_gradient_are_those_of_the_equations(grid, pool, prefix):
    attention = random_attention(pool)
    generator = torch.Generator().manual_seed(1)
    shape = (2, prefix + grid[0] * grid[1], 12)
    x = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.randn(shape, dtype=torch.float64, generator=generator)
    parameters = dict(attention.named_parameters())
    outs = attention(x, grid), naive_vca(x, parameters, grid, pool, num_heads=3, layer=2)
    torch.testing.assert_close(*outs, rtol=1e-11, atol=1e-12)
    ours, naive = (torch.autograd.grad((out * weights).sum(), [x, *parameters.values()]) for out in outs)
    for name, a, b in zip(["x", *parameters], ours, naive, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"gradient of {name}: {text}")


@pytest.mark.parametrize("name", CASES)
def test_the_heads_are_the_recorded_ones(name):
    case, r = CASES[name], section("attention", f"{name}.")
    init = lambda_init(case["layer"])
    assert init == pytest.approx(case["lambda_init"], rel=1e-14)
    heads = visual_contrast_attention(
        r["q"], r["k"], r["v"], tuple(case["grid"]), contrast_grid=tuple(case["contrast_grid"]),
        embeddings=(r["emb_pos"], r["emb_neg"]), gains=(r["rms1"], r["rms2"]), scale=1 - init,
        lambdas=(learned_lambda(r["lambda1"], init), learned_lambda(r["lambda2"], init)),
    )  # fmt: skip
    torch.testing.assert_close(heads.transpose(1, 2).flatten(2), r["vca.heads"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("depthwise", [0, 3], ids=["heads", "heads plus depthwise convolution"])
@pytest.mark.parametrize("name", CASES)
def test_the_module_gives_the_recorded_heads_to_its_output_projection(name, depthwise):
    case, r = CASES[name], section("attention", f"{name}.")
    width = case["heads"] * case["head_dim"]
    attention = VisualContrastAttention(
        width, case["heads"], layer=case["layer"], pool=case["contrast_grid"][0], depthwise=depthwise
    ).double()
    # With these projections a token is q, k and v of itself side by side, and the output is what W_o would be given.
    attention.proj.weight.data = torch.eye(width, dtype=torch.float64)
    attention.proj.bias.data.zero_()
    attention.qkv = torch.nn.Identity()
    state = {"embedding_pos": r["emb_pos"], "embedding_neg": r["emb_neg"]}
    state |= {key: r[key] for key in ("lambda1", "lambda2", "rms1", "rms2")}
    if depthwise:
        state |= {"dwc.weight": r["dwc_weight"][:, None], "dwc.bias": r["dwc_bias"]}
    result = attention.load_state_dict(state, strict=False)
    assert sorted(result.missing_keys) == ["proj.bias", "proj.weight"] and not result.unexpected_keys
    tokens = torch.cat([r[key].transpose(1, 2).flatten(2) for key in ("q", "k", "v")], dim=-1)
    expected = r["vca.heads_plus_dwc" if depthwise else "vca.heads"]
    torch.testing.assert_close(attention(tokens, tuple(case["grid"])), expected, rtol=0, atol=1e-12)


ABLATIONS = {  # recorded name: row, and whether the convolution was recorded too
    "ours_vani": "vca-ours-vani", "vani_ours": "vca-vani-ours", "diff_diff": "vca-diff-diff", "emb_emb": "vca-emb-emb",
    "pool_poolemb": "vca-pool-poolemb", "poolemb_pool": "vca-poolemb-pool",
}  # fmt: skip


@pytest.mark.parametrize("recorded", ABLATIONS)
@pytest.mark.parametrize("name", CASES)
def test_the_rows_of_tables_3_and_4_give_the_recorded_heads(name, recorded):
    case, r = CASES[name], section("attention", f"{name}.")
    width = case["heads"] * case["head_dim"]
    depthwise = 3 if f"{recorded}.heads_plus_dwc" in r else 0
    attention = VisualContrastAttention(
        width,
        case["heads"],
        layer=case["layer"],
        pool=case["contrast_grid"][0],
        depthwise=depthwise,
        **VCA_ROWS[ABLATIONS[recorded]],
    ).double()
    attention.qkv = attention.proj = torch.nn.Identity()
    state = {key: r[key] for key in ("lambda1", "lambda2", "rms1", "rms2")}
    state |= {
        "embedding_pos": r["emb_pos"],
        "embedding_neg": r["emb_neg"],
        "dwc.weight": r["dwc_weight"][:, None],
        "dwc.bias": r["dwc_bias"],
    }
    attention.load_state_dict({key: state[key] for key in attention.state_dict()})
    tokens = torch.cat([r[key].transpose(1, 2).flatten(2) for key in ("q", "k", "v")], dim=-1)
    expected = r[f"{recorded}.heads_plus_dwc" if depthwise else f"{recorded}.heads"]
    torch.testing.assert_close(attention(tokens, tuple(case["grid"])), expected, rtol=0, atol=1e-12)


COMBINATIONS = [("vca", "vca"), ("vca", "vanilla"), ("vanilla", "vca"), ("vanilla", "vanilla"), ("vanilla", "differential"),
                ("differential", "vanilla"), ("differential", "differential")]  # fmt: skip


@pytest.mark.parametrize("stages", COMBINATIONS, ids="/".join)
def test_every_pair_of_stages_has_the_gradients_of_its_equations_and_none_for_what_it_does_not_use(stages):
    attention = VisualContrastAttention(12, 3, layer=2, pool=2, depthwise=0, stage1=stages[0], stage2=stages[1])
    frozen = {n for n, p in attention.named_parameters() if not p.requires_grad}
    random_parameters(attention)
    initial = lambda_init(2)

    def naive(x):
        q, k, v = by_heads(attention.qkv, x, 3, 3)
        t = q.reshape(2, 3, 2, 2, 2, 3, 4).mean((3, 5)).reshape(2, 3, 4, 4)  # a grid of 4 x 6, contrast grid 2 x 2

        def norm(y, gain):
            return (1 - initial) * y / torch.sqrt((y**2).mean(-1, keepdim=True) + 1e-5) * gain

        def read(stage, queries, keys, values, rows, gain, contrast_is_query):
            lam = torch.exp(rows[0] @ rows[1]) - torch.exp(rows[2] @ rows[3]) + initial
            if stage == "vanilla":
                return softmax(products(queries, keys)) @ values
            if stage == "differential":
                maps = [softmax(products(queries[..., s], keys[..., s])) for s in (slice(2), slice(2, 4))]
            else:
                embeddings = (attention.embedding_pos, attention.embedding_neg)
                pairs = [(queries + e, keys) if contrast_is_query else (queries, keys + e) for e in embeddings]
                maps = [softmax(products(*pair)) for pair in pairs]
            return norm((maps[0] - lam * maps[1]) @ values, gain)

        contrast = read(stages[0], t, k, v, attention.lambda1, attention.rms1, True)
        return join(read(stages[1], q, t, contrast, attention.lambda2, attention.rms2, False), attention)

    assert_same_function(OnGrid(attention, (4, 6)), naive, randn(2, 24, 12))
    expected = {f"{kind}{n + 1}" for n, stage in enumerate(stages) if stage == "vanilla" for kind in ("lambda", "rms")}
    assert frozen == expected
    assert (attention.embedding_pos is not None) == ("vca" in stages)


@pytest.mark.parametrize("stages", [("vca", "differential"), ("differential", "vca")], ids="/".join)
def test_vca_and_differential_do_not_go_together(stages):
    with pytest.raises(ValueError, match="vca and differential do not go together"):
        VisualContrastAttention(12, 3, stage1=stages[0], stage2=stages[1])


@pytest.mark.parametrize(("option", "allowed"), [("stage1", "vca, vanilla, differential"), ("positive", "pool, emb, pool.emb")])
def test_an_unknown_stage_or_stream_is_refused(option, allowed):
    with pytest.raises(ValueError, match=f"{option} must be one of {allowed}, got 'other'"):
        VisualContrastAttention(12, 3, **{option: "other"})


def test_a_contrast_grid_twice_as_fine_as_the_tokens_repeats_each_of_them_four_times():
    q = torch.randn(1, 1, 16, 3, generator=torch.Generator().manual_seed(0))
    pooled = pool_queries(q, (4, 4), (8, 8)).unflatten(2, (8, 8))
    image = q.unflatten(2, (4, 4))
    for y in range(8):
        for x in range(8):
            torch.testing.assert_close(pooled[0, 0, y, x], image[0, 0, y // 2, x // 2])


def test_prefix_tokens_are_not_pooled():
    q = torch.randn(2, 3, 1 + 15, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pool_queries(q, (3, 5), (2, 2)), pool_queries(q[:, :, 1:], (3, 5), (2, 2)))


def test_the_output_rms_of_each_head_is_one_minus_lambda_init():
    attention = VisualContrastAttention(64, 2, layer=3, pool=2, embedding_std=1.0)
    q, k, v = torch.randn(3, 1, 2, 12, 32, generator=torch.Generator().manual_seed(0))
    rms = attention.mix(q, k, v, (3, 4)).pow(2).mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.full_like(rms, 1 - lambda_init(3)), rtol=1e-2, atol=0)


def test_parameters_start_with_the_documented_spreads():
    attention = VisualContrastAttention(64 * 4, 4, pool=8, embedding_std=0.2).requires_grad_(False)
    for embedding in (attention.embedding_pos, attention.embedding_neg):
        assert embedding.shape == (4, 64, 64)
        assert float(embedding.std()) == pytest.approx(0.2, rel=0.05)
    for vectors in (attention.lambda1, attention.lambda2):
        assert vectors.shape == (4, 64)
        assert float(vectors.std()) == pytest.approx(0.1, rel=0.2)
    assert bool((attention.rms1 == 1).all()) and bool((attention.rms2 == 1).all())
    assert not torch.equal(attention.embedding_pos, attention.embedding_neg)


@pytest.mark.parametrize(("option", "value"), [("pool", 0), ("embedding_std", -0.1)])
def test_a_value_out_of_range_is_refused(option, value):
    with pytest.raises(ValueError, match=f"attention option {option} must"):
        VisualContrastAttention(8, 2, **{option: value})


def test_a_bias_and_other_keys_are_refused_with_the_reason():
    attention = VisualContrastAttention(8, 2, pool=2, depthwise=0)
    x = torch.zeros(1, 6, 8)
    with pytest.raises(ValueError, match="no q-k logits"):
        attention(x, (2, 3), bias=torch.zeros(1, 2, 6, 6))
    with pytest.raises(ValueError, match="kv is not supported"):
        attention(x, (2, 3), kv=torch.zeros(1, 4, 8))
