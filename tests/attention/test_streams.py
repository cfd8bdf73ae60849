"""Streams that are recorded against the formulas, written naively, and against what the module returns."""

import math

import pytest
import torch

from dit_vca.attention import ATTENTION, VCA_ROWS, build_attention
from dit_vca.attention.streams import record, streams_of
from dit_vca.backbones.dit import DiT

DIM, HEADS, GRID = 16, 2, (4, 3)
TWO_STREAMS = ("differential", "dna", "dna_q", "dna_v", "dna_hat", "dna_pm")
CONTRAST = {"vca": {}, **VCA_ROWS}


def build(name: str, **options):
    torch.manual_seed(0)
    attention = build_attention(name, DIM, HEADS, layer=1, depth=3, num_tokens=12, options=options).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention.requires_grad_(False)


def tokens(prefix: int = 0):
    return torch.randn(2, 12 + prefix, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def naive_softmax(q, k):
    """(N, d), (M, d) -> (N, M), one entry at a time."""
    rows = [[math.exp(float(a @ b) / math.sqrt(len(a))) for b in k] for a in q]
    return torch.tensor([[w / sum(row) for w in row] for row in rows], dtype=torch.float64)


def by_heads(x):
    """(N, DIM) -> one (N, d) a head."""
    return [x[:, DIM // HEADS * h : DIM // HEADS * (h + 1)] for h in range(HEADS)]


def check_stream(stream, image, head, weights, values):
    torch.testing.assert_close(stream.map[image, head], weights)
    torch.testing.assert_close(stream.values[image, head], values)
    torch.testing.assert_close(stream.output[image, head], weights @ values)


@pytest.mark.parametrize("name", TWO_STREAMS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_streams_of_both_quadratic_kinds_are_the_formulas(name, sign):
    attention = build(name, **({"neg_sign": sign} if name not in ("differential", "dna_pm") else {}))
    x = tokens()
    (streams,) = streams_of(attention, x, GRID)
    assert streams.stage == "attention"
    for image in range(2):
        q, k, v = (by_heads(z) for z in attention.qkv(x[image]).split(DIM, dim=-1))
        q_neg, v_neg = q, v
        if name in ("dna", "dna_q"):
            q_neg = by_heads(attention.qv_neg(x[image])[:, :DIM])
        if name in ("dna", "dna_v"):
            v_neg = by_heads(attention.qv_neg(x[image])[:, -DIM:])
        for h in range(HEADS):
            if name == "differential":
                half = DIM // HEADS // 2
                first, second = (naive_softmax(q[h][:, part], k[h][:, part]) for part in (slice(half), slice(half, None)))
            else:
                first, second = naive_softmax(q[h], k[h]), naive_softmax(-q_neg[h], k[h])
            check_stream(streams.positive, image, h, first, v[h])
            check_stream(streams.negative, image, h, second, v_neg[h])
    if name == "differential":
        q1, k1, q2, k2 = attention.lambda1
        expected = (torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + 0.8 - 0.6 * math.exp(-0.3)).expand(HEADS)
    else:
        expected = -torch.ones(HEADS).double() if name == "dna_pm" else -sign * attention.alpha
    torch.testing.assert_close(streams.weight, expected)


def test_the_streams_of_vca_are_equations_9_and_12():
    attention, x = build("vca", pool=2), tokens()
    first, second = streams_of(attention, x, GRID)
    assert (first.stage, second.stage) == ("stage1", "stage2")
    for image in range(2):
        q, k, v = (by_heads(z) for z in attention.qkv(x[image]).split(DIM, dim=-1))
        for h in range(HEADS):
            pooled = torch.nn.functional.adaptive_avg_pool2d(q[h].T.unflatten(1, GRID)[None], (2, 2))[0].flatten(1).T
            t_pos, t_neg = pooled + attention.embedding_pos[h], pooled + attention.embedding_neg[h]
            check_stream(first.positive, image, h, naive_softmax(t_pos, k[h]), v[h])
            check_stream(first.negative, image, h, naive_softmax(t_neg, k[h]), v[h])
            contrast = first.positive.output[image, h] - first.weight[h] * first.negative.output[image, h]
            scale = 1 - (0.8 - 0.6 * math.exp(-0.3))
            contrast = scale * attention.rms1 * contrast / (contrast.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            check_stream(second.positive, image, h, naive_softmax(q[h], t_pos), contrast)
            check_stream(second.negative, image, h, naive_softmax(q[h], t_neg), contrast)
    for streams, (q1, k1, q2, k2) in ((first, attention.lambda1), (second, attention.lambda2)):
        expected = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + 0.8 - 0.6 * math.exp(-0.3)
        torch.testing.assert_close(streams.weight, expected.expand(HEADS))


def output_from(attention, streams, v):
    """What the module returns, from O+ - weight O- of its last stage."""
    out = streams.positive.output - streams.weight[:, None, None] * streams.negative.output
    if hasattr(attention, "lambda_init"):
        gain = attention.rms2 if streams.stage == "stage2" else attention.rms1
        out = (1 - attention.lambda_init) * torch.nn.functional.rms_norm(out, gain.shape, gain, 1e-5)
    return attention._join_heads(out, v, GRID)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("name", [*TWO_STREAMS, *(name for name in CONTRAST if name != "vca-ours-vani")])  # whose end is vanilla
def test_the_difference_of_the_streams_is_what_the_module_computes(name, prefix):
    attention = build("vca", pool=2, **CONTRAST[name]) if name in CONTRAST else build(name)
    x = tokens(prefix)
    last = streams_of(attention, x, GRID)[-1]
    v = attention.qkv(x)[..., 2 * DIM :]
    torch.testing.assert_close(output_from(attention, last, v), attention(x, GRID))


def test_keys_and_values_may_come_from_other_tokens():
    for name in ("differential", "dna", "dna_v"):
        attention, x, kv = build(name), tokens(), tokens(3)
        (streams,) = streams_of(attention, x, GRID, kv=kv)
        assert streams.positive.map.shape == (2, HEADS, 12, 15)
        v = attention.qkv(kv)[..., 2 * DIM :]
        torch.testing.assert_close(output_from(attention, streams, v), attention(x, GRID, kv=kv))


def test_a_vanilla_stage_of_vca_has_no_streams():
    def stages(name):
        return [s.stage for s in streams_of(build("vca", pool=2, **VCA_ROWS[name]), tokens(), GRID)]

    assert stages("vca-ours-vani") == ["stage1"] and stages("vca-vani-ours") == ["stage2"]
    assert stages("vca-diff-diff") == ["stage1", "stage2"]
    with pytest.raises(ValueError, match="both stages vanilla has no two streams"):
        streams_of(build("vca", pool=2, stage1="vanilla", stage2="vanilla"), tokens(), GRID)


@pytest.mark.parametrize("name", ["softmax", "linear", "hedgehog", "performer", "cosformer", "lolcats"])
def test_a_kind_of_one_map_gives_it_with_rows_that_sum_to_one(name):
    attention, x = build(name), tokens()
    (streams,) = streams_of(attention, x, GRID)
    assert streams.negative is None and streams.weight is None
    weights = streams.positive.map
    assert bool((weights > -1e-12).all())
    if name != "cosformer":  # whose queries may be all zero
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-4)
    v = attention.qkv(x)[..., 2 * DIM :]
    torch.testing.assert_close(attention._join_heads(streams.positive.output, v, GRID), attention(x, GRID))
    if name == "softmax":
        q, k, _ = attention.qkv(x[0]).split(DIM, dim=-1)
        torch.testing.assert_close(weights[0, 1], naive_softmax(by_heads(q)[1], by_heads(k)[1]))


@pytest.mark.parametrize("name", ATTENTION)
def test_every_kind_is_recorded_or_refused_with_the_list_of_those_that_are(name):
    attention = build(name)
    if name in ("cog", "nystromformer", "linformer"):
        with pytest.raises(ValueError, match="neither two streams nor a map of probabilities; diagnosed can be vca"):
            streams_of(attention, tokens(), GRID)
    else:
        assert all(s.positive.output.isfinite().all() for s in streams_of(attention, tokens(), GRID))


def network(attention: str = "dna"):
    torch.manual_seed(0)
    sizes = {"input_size": 8, "patch_size": 2, "in_channels": 3, "dim": 16, "depth": 2, "num_heads": 2, "num_classes": 2}
    return DiT(**sizes, attention=attention).eval()


def batch(scale: float = 1.0):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return scale * x, torch.tensor([300.0, 700.0]), torch.tensor([0, 1])


def test_recording_changes_no_output_and_keeps_every_layer_of_the_last_pass():
    net = network()
    torch.nn.init.normal_(net.x_embedder.proj.bias)
    expected = net(*batch())
    with record(net) as found:
        net(*batch(5.0))
        before = dict(found)
        assert torch.equal(net(*batch()), expected)
    assert list(found) == ["blocks.0.attn", "blocks.1.attn"]
    assert not torch.equal(found["blocks.0.attn"][0].positive.map, before["blocks.0.attn"][0].positive.map)


def test_only_what_is_kept_stays():
    net = network("vca")
    with record(net, lambda stages: {s.stage: s.weight for s in stages}) as found:
        net(*batch())
    assert list(found["blocks.1.attn"]) == ["stage1", "stage2"] and found["blocks.1.attn"]["stage1"].shape == (2,)


def test_after_the_block_the_modules_are_as_before_even_when_it_raised():
    net = network()
    with pytest.raises(RuntimeError, match="midway"), record(net) as found:
        net(*batch())
        raise RuntimeError("midway")
    assert found and all("forward" not in vars(block.attn) for block in net.blocks)
    found.clear()
    net(*batch())
    assert not found


def test_a_forward_that_was_replaced_before_is_put_back():
    net = network()
    attention = net.blocks[0].attn
    attention.forward = replaced = lambda x, grid, *, kv=None: x
    with record(net) as outer, record(net) as inner:
        net(*batch())
    assert attention.forward is replaced and outer.keys() == inner.keys() == {"blocks.0.attn", "blocks.1.attn"}


def test_a_refused_kind_is_refused_before_any_module_is_changed():
    net = network("cog")
    with pytest.raises(ValueError, match="CogAttention"), record(net):
        pass
    with pytest.raises(ValueError, match="holds no attention"), record(torch.nn.Linear(2, 2)):
        pass
    with record(network()) as _, pytest.raises(ValueError, match="bias or a mask"):
        net = network()
        with record(net):
            net.blocks[0].attn(torch.zeros(1, 4, 16), (2, 2), bias=torch.zeros(1, 2, 4, 4))
