import json
import math

import pytest
import torch

from dit_vca.attention import ATTENTION, build_attention
from dit_vca.commands.complexity import main
from dit_vca.complexity import complexity_of, paper_rows, scale, scale_table, table
from dit_vca.presets import preset

# facts of the VCA paper's specification: parameters in millions and GMACs, to these digits
SPECIFIED = {
    "S/8 +Ours": (33.792, 0.389), "S/4 +Ours": (33.589, 1.510), "S/2 +Ours": (33.607, 5.991),
    "B/8 +Ours": (132.161, 1.480), "B/4 +Ours": (131.755, 5.759), "B/2 +Ours": (131.792, 22.875),
    "Table 3, Ours / Vani.": (33.607, 5.915), "Table 3, Vani. / Ours": (33.607, 5.840), "Table 3, Diff. / Diff.": (33.017, 5.764),
    "Table 3, Ours / Ours": (33.607, 5.991), "Table 4, Emb. / Emb.": (33.607, 5.991), "Table 4, Pool / Pool+Emb.": (33.312, 5.991),
    "Table 4, Pool+Emb. / Pool": (33.312, 5.991), "Table 4, Pool+Emb. / Pool+Emb.": (33.607, 5.991),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return {row.row: row for row in paper_rows()}


def test_every_row_comes_to_the_specified_figures(rows):
    found = {
        key: (round(row.params / 1e6, 3), round(row.macs / 1e9, 3))
        for name, row in rows.items()
        for key in [name.removeprefix("Table 2, ").removeprefix("DiT-").removeprefix("SiT-")]
        if "+Ours" in name or not name.startswith("Table 2")
    }
    assert found == SPECIFIED


def test_every_row_rounds_to_what_the_paper_prints_but_for_its_known_misprints(rows):
    assert len(rows) == 32
    misfits = {
        name
        for name, row in rows.items()
        if abs(row.params / 1e6 - row.paper_params / 1e6) > 0.0501 or abs(row.macs / 1e9 - row.paper_gmacs) > 0.0501
    }
    assert misfits == {
        "Table 2, SiT-S/8 +Ours", "Table 2, DiT-B/8 +Ours", "Table 2, SiT-B/8 +Ours", "Table 3, Vani. / Ours",
    }  # fmt: skip


def counted_macs(network, *inputs) -> int:
    """Multiply-accumulates of the linear layers and convolutions that a forward pass goes through."""
    total = 0

    def count(module, inputs, output):
        nonlocal total
        total += output.numel() * (module.weight.numel() // module.weight.shape[0])

    hooks = [m.register_forward_hook(count) for m in network.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
    network(*inputs)
    for hook in hooks:
        hook.remove()
    return total


def test_the_layers_counted_are_those_a_forward_pass_goes_through():
    from dit_vca.backbones import DiT

    network = DiT(
        input_size=8, patch_size=2, in_channels=4, dim=32, depth=2, num_heads=2, num_classes=3, attention="softmax",
        attention_options={"depthwise": 3},
    )  # fmt: skip
    counted = counted_macs(network, torch.randn(1, 4, 8, 8), torch.ones(1), torch.zeros(1, dtype=torch.long))
    patches = 16 * 4 * 4 * 32  # the patch embedding uses its convolution's weight in a product
    assert network.macs() == counted + patches + sum(block.attn.mix_macs(16) for block in network.blocks)


PRODUCTS = {  # of one sequence of N tokens in heads of width d, in all width D
    "softmax": lambda n, d, width: 2 * n * n * width,
    "vca": lambda n, d, width: 7 * n * 64 * width,
    "differential": lambda n, d, width: 3 * n * n * width,
    "dna_hat": lambda n, d, width: 4 * n * n * width,
    "dna": lambda n, d, width: 4 * n * n * width + 2 * n * width * width,
    "linear": lambda n, d, width: 2 * n * d * width,
    "linformer": lambda n, d, width: 4 * n * 32 * width,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_products_of_an_attention_are_counted_by_its_formula(name):
    module = build_attention(name, 64, 4, layer=0, num_tokens=100, options={})
    assert module.mix_macs(100) == PRODUCTS[name](100, 16, 64)


@pytest.mark.parametrize("name", ATTENTION)
def test_operations_grow_linearly_or_quadratically_as_the_kind_says(name):
    few, many = (build_attention(name, 64, 4, layer=0, num_tokens=n, options={}).mix_macs(n) for n in (16384, 65536))
    power = math.log(many / few, 4)
    quadratic = name in ("softmax", "differential", "cog") or name.startswith("dna")
    assert (1.7 < power <= 2.0) if quadratic else (0.9 < power <= 1.0)


def test_the_table_and_its_json_hold_the_same_rows(capsys):
    main([])
    text = capsys.readouterr().out
    main(["--json", "true"])
    data = json.loads(capsys.readouterr().out)
    assert len(data) == 32 and set(data[0]) == {"row", "params", "macs", "paper_params", "paper_gmacs"}
    for row in data:
        assert f"| {row['row']} | {row['params'] / 1e6:.3f} | {row['paper_params'] / 1e6:.1f} |" in text
    assert data[-1] == {
        "row": "Table 4, Pool+Emb. / Pool+Emb.", "params": 33606944, "macs": data[-1]["macs"], "paper_params": 33600000, "paper_gmacs": 6.0,
    }  # fmt: skip


def test_any_preset_has_a_row_without_the_papers_figures():
    row = complexity_of(preset("demo-softmax"), "demo-softmax")
    assert row.paper_params is None and "|  |  |" in table([row])
    assert complexity_of(preset("sit-b4-512-vca"), "x").macs > 3 * complexity_of(preset("sit-b4-vca"), "y").macs


def test_the_scale_table_has_a_row_for_each_kind_and_size_and_counts_what_is_kept():
    found = scale(["softmax", "cog"], [16, 64], dim=32, num_heads=2, rounds=1)
    assert [(s.attention, s.tokens) for s in found] == [("softmax", 16), ("cog", 16), ("softmax", 64), ("cog", 64)]
    softmax, cog = found[2], found[3]
    assert all(s.seconds > 0 for s in found)
    maps = 2 * 64 * 64 * 4
    assert cog.activation_bytes - softmax.activation_bytes > 2 * maps  # cog keeps its maps, the fused kernel does not
    text = scale_table(found)
    assert text.count("| cog |") == 2 and "cog: " in text


def test_parameters_and_the_input_are_no_activations():
    (found,) = scale(["softmax"], [1], dim=256, num_heads=2, rounds=1)
    assert found.activation_bytes < 256 * 256 * 4  # one matrix of the module alone has more
