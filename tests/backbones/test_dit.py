import math

import pytest
import torch
from golden_values import metadata, section

from dit_vca.attention import ATTENTION
from dit_vca.backbones import BACKBONES
from dit_vca.backbones.dit import DiT
from dit_vca.backbones.layers import PatchEmbed, TimestepEmbedder, sincos_position_embedding, unpatchify

SIZES = {"input_size": 8, "patch_size": 2, "in_channels": 4, "dim": 24, "depth": 2, "num_heads": 3, "num_classes": 10}
EVERY_ATTENTION = pytest.mark.parametrize("attention", ATTENTION)


def small(**changes) -> DiT:
    torch.manual_seed(0)
    return DiT(**{**SIZES, **changes})


def awake(network: DiT) -> DiT:
    """The network with every zero-initialised layer, which would hide the rest, made random."""
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        if bool((parameter == 0).all()):
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return network


def inputs(batch: int = 3):
    x = torch.randn(batch, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    return x, torch.linspace(0, 900, batch), torch.arange(batch)


def test_every_backbone_is_in_the_table():
    assert BACKBONES["dit"] is DiT


@pytest.mark.parametrize("name", ["dit", "sit"])
def test_published_weights_load_strictly_and_give_the_recorded_output(name):
    recorded, config = section(f"{name}_backbone", ""), dict(metadata(f"{name}_backbone")["config"])
    network = DiT(dim=config.pop("hidden_size"), learn_sigma=True, **config)
    network.load_state_dict(section(f"{name}_backbone", "state."))
    with torch.no_grad():
        out = network(recorded["x"], recorded["t"], recorded["y"])
    assert out.shape == (4, 8, 8, 8)
    if name == "sit":  # whose code drops the variance half
        out = out[:, :4]
    torch.testing.assert_close(out, recorded["out"], rtol=0, atol=3e-6)


def test_the_last_recorded_label_is_the_null_class():
    assert section("dit_backbone", "")["y"][-1] == small().null_class


@EVERY_ATTENTION
@pytest.mark.parametrize("learn_sigma", [False, True])
def test_a_new_network_answers_exactly_zero(attention, learn_sigma):
    out = small(attention=attention, learn_sigma=learn_sigma)(*inputs())
    assert out.shape == (3, 8 if learn_sigma else 4, 8, 8) and bool((out == 0).all())


@EVERY_ATTENTION
def test_the_blocks_of_a_new_network_are_the_identity_until_their_gates_open(attention):
    network = small(attention=attention)
    x, c = torch.randn(3, 16, 24), torch.randn(3, 24)
    assert all(torch.equal(block(x, c, network.grid), x) for block in network.blocks)
    assert not any(torch.isclose(block(x, c, network.grid), x).all() for block in awake(network).blocks)


@EVERY_ATTENTION
def test_a_row_depends_on_its_own_input_time_and_label(attention):
    network = awake(small(attention=attention)).requires_grad_(False)
    x, t, y = inputs()
    before = network(x, t, y)
    torch.testing.assert_close(network(x[1:2], t[1:2], y[1:2]), before[1:2])
    for changed in ((x + 1, t, y), (x, t + 300, y), (x, t, y + 1)):
        assert not torch.isclose(network(*changed), before).all(dim=(1, 2, 3)).any()


@EVERY_ATTENTION
def test_gradients_reach_every_parameter_but_the_fixed_position_embedding(attention):
    network = awake(small(attention=attention))
    network(*inputs()).square().sum().backward()
    without = [name for name, p in network.named_parameters() if p.grad is None or not bool((p.grad != 0).any())]
    assert without == ["pos_embed"]


@EVERY_ATTENTION
def test_the_network_is_the_same_function_in_train_and_eval_mode(attention):
    network = awake(small(attention=attention)).requires_grad_(False)
    assert torch.equal(network.train()(*inputs()), network.eval()(*inputs()))


def test_each_block_is_told_its_place():
    assert [block.attn.layer for block in small(attention="vca", depth=3).blocks] == [0, 1, 2]


def test_options_of_the_attention_reach_every_block():
    network = small(attention="vca", attention_options={"pool": 3, "depthwise": 0})
    assert all(block.attn.pool == 3 and block.attn.dwc is None for block in network.blocks)


def test_an_unconditional_network_has_no_label_table_and_ignores_labels():
    network = awake(small(num_classes=0))
    x, t, y = inputs()
    assert network.null_class is None and not any("y_embedder" in name for name in network.state_dict())
    assert torch.equal(network(x, t, y), network(x, t, y + 5))


def test_a_conditional_network_has_one_row_more_than_classes():
    network = small()
    assert network.null_class == 10 and network.y_embedder.embedding_table.weight.shape == (11, 24)


def test_a_new_network_has_the_spreads_of_dit():
    network = small(dim=96, num_heads=3, depth=1)
    block = network.blocks[0]
    for weight, bound in ((block.attn.qkv.weight, math.sqrt(6 / (4 * 96))), (block.mlp.fc1.weight, math.sqrt(6 / (5 * 96))),
                          (network.x_embedder.proj.weight, math.sqrt(6 / (96 + 16)))):  # fmt: skip
        largest = float(weight.detach().abs().max())
        assert 0.98 * bound < largest <= bound
    for weight in (network.t_embedder.mlp[0].weight, network.t_embedder.mlp[2].weight, network.y_embedder.embedding_table.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert all(bool((p == 0).all()) for name, p in network.named_parameters() if name.endswith("bias"))


def test_position_embeddings_have_the_recorded_rows_column_first():
    expected = [
        [0, 0, 1, 1, 0, 0, 1, 1],
        [0.841471, 0.01, 0.540302, 0.99995, 0, 0, 1, 1],
        [0, 0, 1, 1, 0.841471, 0.01, 0.540302, 0.99995],
        [0.841471, 0.01, 0.540302, 0.99995] * 2,
    ]
    torch.testing.assert_close(sincos_position_embedding(8, (2, 2))[0], torch.tensor(expected), rtol=0, atol=1e-6)


def test_position_embeddings_of_a_grid_that_is_not_square_go_row_by_row():
    tall, square = sincos_position_embedding(8, (5, 3)), sincos_position_embedding(8, (5, 5))
    torch.testing.assert_close(tall.view(5, 3, 8), square.view(5, 5, 8)[:, :3])


def test_position_embeddings_are_fixed_and_saved_with_the_weights():
    network = small()
    assert not network.pos_embed.requires_grad and "pos_embed" in network.state_dict()
    torch.testing.assert_close(network.state_dict()["pos_embed"], sincos_position_embedding(24, (4, 4)))


def test_times_are_embedded_as_cosines_then_sines_of_128_frequencies():
    embedder = TimestepEmbedder(256)
    embedder.mlp = torch.nn.Sequential(torch.nn.Linear(256, 256))
    embedder.mlp[0].weight.data, embedder.mlp[0].bias.data = torch.eye(256), torch.zeros(256)
    t = torch.tensor([0.0, 0.3, 37.0, 999.0])
    angles = t.double()[:, None] * 10000 ** (-torch.arange(128, dtype=torch.float64) / 128)
    expected = torch.cat([angles.cos(), angles.sin()], dim=1)
    torch.testing.assert_close(embedder(t).double(), expected, rtol=0, atol=1e-4)


def test_times_are_embedded_in_float32_by_a_network_of_bfloat16_weights():
    embedder, t = TimestepEmbedder(32), torch.tensor([37.0, 500.0, 999.0])
    expected = embedder(t)
    torch.testing.assert_close(embedder.to(torch.bfloat16)(t).float(), expected, rtol=0, atol=0.01)


def test_patches_are_the_strided_convolution_in_row_order():
    embed = PatchEmbed(2, 3, 8)
    x = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(embed(x), embed.proj(x).flatten(2).transpose(1, 2))


def test_unpatchify_puts_row_column_and_channel_of_a_patch_back_channel_fastest():
    grid, p, channels = (2, 3), 2, 4
    tokens = torch.randn(1, 6, p * p * channels, generator=torch.Generator().manual_seed(0))
    image = unpatchify(tokens, grid, p)
    assert image.shape == (1, channels, 4, 6)
    for y in range(4):
        for x in range(6):
            patch = tokens[0, 3 * (y // p) + x // p].view(p, p, channels)
            assert torch.equal(image[0, :, y, x], patch[y % p, x % p])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"patch_size": 3}, r"model\.patch_size 3 does not divide the latent size 8"),
     ({"num_heads": 5}, r"model\.dim 24 is not divisible by model\.num_heads 5"),
     ({"dim": 30}, r"model\.dim must be divisible by 4"), ({"attention": "nonsense"}, "unknown attention 'nonsense'"),
     ({"attention_options": {"pool": 4}}, "attention softmax has no option 'pool'")],
    ids=["patch size", "heads", "width", "attention", "option"],
)  # fmt: skip
def test_a_network_that_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)
