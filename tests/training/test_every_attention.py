"""Each kind of attention, and each row of the VCA paper's ablations, trains, is resumed exactly, and learns."""

from dataclasses import replace

import pytest
import torch
from made import equal_state, tiny_config

from dit_vca.attention import ATTENTION, VCA_ROWS
from dit_vca.backbones import DiT
from dit_vca.presets import preset
from dit_vca.runs import find_weights, objective_of, read_weights
from dit_vca.training import train

NAMES = (*ATTENTION, *VCA_ROWS)


def config_of(name: str, shards, **settings):
    """A tiny config with the attention of the preset demo-NAME."""
    attention = preset(f"demo-{name}").model.attention
    config = tiny_config(shards, **settings)
    return replace(config, model=replace(config.model, attention=attention))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_resumed_bit_for_bit(tmp_path, shards, name):
    whole = train(config_of(name, shards, steps=2, save_every=1), tmp_path / "whole")
    train(config_of(name, shards, steps=1), tmp_path / "parts")
    parts = train(config_of(name, shards, steps=2), tmp_path / "parts")
    for kind in ("model", "ema"):
        one, other = (read_weights(find_weights(run.path, kind)) for run in (whole, parts))
        assert one.step == other.step == 2 and equal_state(one.tensors, other.tensors)
        assert all(bool(t.isfinite().all()) for t in one.tensors.values())


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_eight_latents_by_heart(name):
    torch.manual_seed(0)
    attention = preset(f"demo-{name}").model.attention
    network = DiT(
        input_size=8, patch_size=2, in_channels=4, dim=32, depth=2, num_heads=4, num_classes=8, attention=attention.name,
        attention_options=attention.options,
    )  # fmt: skip
    objective = objective_of(preset("demo"))
    x_0, eps, y, t = torch.randn(8, 4, 8, 8), torch.randn(8, 4, 8, 8), torch.arange(8), torch.linspace(0.1, 0.9, 8)
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(60):
        loss = objective.loss(network, x_0, y, t=t.double(), eps=eps)["mse"].mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.3 * losses[0], (losses[0], losses[-1])


@pytest.mark.parametrize("name", [n for n in ATTENTION if n != "softmax"])
def test_it_starts_from_a_softmax_model(tmp_path, shards, name, capsys):
    teacher = train(config_of("softmax", shards, steps=2), tmp_path / "teacher")
    student = train(config_of(name, shards, steps=0, init_from=str(teacher.path)), tmp_path / "student")
    before, after = (read_weights(find_weights(run.path, kind)).tensors for run, kind in ((teacher, "ema"), (student, "model")))
    assert f"softmax attention becomes {name}, with {len(after) - len(before)} new tensors" in capsys.readouterr().out
    assert equal_state(before, {key: after[key] for key in before})


def test_a_model_started_from_softmax_as_dna_answers_almost_the_same(tmp_path, shards):
    from dit_vca.runs import open_model

    teacher = train(config_of("softmax", shards, steps=4, lr=1e-2), tmp_path / "teacher")
    student = train(config_of("dna", shards, steps=0, init_from=str(teacher.path)), tmp_path / "student")
    x, t, y = torch.randn(4, 3, 8, 8), torch.linspace(0.1, 0.9, 4) * 1000, torch.tensor([0, 1, 0, 1])
    one, other = (open_model(run.path, kind)[0](x, t, y) for run, kind in ((teacher, "ema"), (student, "model")))
    assert 0 < float((one - other).norm() / one.norm()) < 1e-4


def test_a_model_of_another_kind_does_not_start_from_one_that_is_not_softmax(tmp_path, shards):
    teacher = train(config_of("dna", shards, steps=0), tmp_path / "teacher")
    with pytest.raises(ValueError, match="does not fit this model"):
        train(config_of("vca", shards, steps=0, init_from=str(teacher.path)), tmp_path / "student")


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [({"attention": "linear"}, {"attention": "cosformer"}, "only a softmax model becomes one of another attention"),
     ({"num_heads": 4}, {}, "model.num_heads is 4 there and 2 here")],
)  # fmt: skip
def test_weights_of_another_function_with_the_same_tensors_are_refused(tmp_path, shards, theirs, ours, message):
    def config(attention="softmax", num_heads=2, **train):
        made = config_of(attention, shards, steps=0, **train)
        return replace(made, model=replace(made.model, num_heads=num_heads))

    teacher = train(config(**theirs), tmp_path / "teacher")
    with pytest.raises(ValueError, match=message):
        train(config(**ours, init_from=str(teacher.path)), tmp_path / "student")


def test_another_objective_of_the_weights_is_said(tmp_path, shards, capsys):
    teacher = train(config_of("softmax", shards, steps=0), tmp_path / "teacher")
    other = config_of("softmax", shards, steps=0, init_from=str(teacher.path))
    train(replace(other, objective=replace(other.objective, target="eps")), tmp_path / "student")
    assert "it was trained for another objective (target v -> eps)" in capsys.readouterr().out


def test_weight_decay_acts_on_matrices_alone():
    from dit_vca.training.optim import build_optimizer

    network = DiT(input_size=8, patch_size=2, in_channels=4, dim=32, depth=1, num_heads=4, num_classes=8, attention="dna")
    optimizer = build_optimizer(network, replace(tiny_config("x").train, lr=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for p in network.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    matrices = {f"{name}.weight" for name, m in network.named_modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))}
    for name, p in network.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if name in matrices else 1))
    assert "blocks.0.attn.alpha" in before and "blocks.0.attn.alpha" not in matrices
