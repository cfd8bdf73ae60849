import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from made import TINY_OPTIONS, dit_vca, equal_state, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from dit_vca.objectives import Objective
from dit_vca.runs import RunFolder, build_network, find_weights, objective_of, read_weights
from dit_vca.training import NonFinite, current_config, train
from dit_vca.training.ema import EMA, constant_decay, power_decay, power_exponent
from dit_vca.training.loop import BatchPlan, Monitor
from dit_vca.training.optim import build_optimizer, learning_rate
from dit_vca.training.tasks import GenerationTask


def lines(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_a_run_leaves_config_log_checkpoints_and_a_preview(run):
    names = {p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file()}
    assert {"config.json", "log.jsonl", "samples/0000004-preview.png"} <= names
    for step in ("0000002", "0000004"):
        assert {
            f"checkpoints/{step}/{n}" for n in ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json")
        } <= names
    assert [line["step"] for line in lines(run)] == [2, 4]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines(run))


def test_a_tracker_writes_to_the_run_folder_and_nowhere_else(tmp_path, shards, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train(tiny_config(shards, tracker="tensorboard"), tmp_path / "run").path
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    (events,) = (run / "tracker").glob("events.out.tfevents.*")
    assert events.stat().st_size > 200


def test_the_ema_follows_the_weights_and_is_not_them(run):
    step = RunFolder(run).checkpoint(4)
    ema, model = read_weights(step / "ema.safetensors"), read_weights(step / "model.safetensors")
    name = "blocks.0.attn.qkv.weight"
    assert not torch.equal(ema.tensors[name], model.tensors[name])
    assert torch.equal(ema.tensors["pos_embed"], model.tensors["pos_embed"])
    assert (ema.kind, model.kind, ema.step) == ("ema", "model", 4)


def test_ema_is_a_weighted_mean_of_the_weights_and_skips_a_bad_step():
    network = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(network.weight, 0.0)
    ema = EMA(network, constant_decay(0.75))
    torch.nn.init.constant_(network.weight, 1.0)
    ema.update(1, skip=torch.tensor(False))
    assert float(ema.network.weight) == 0.25
    ema.update(1, skip=torch.tensor(True))
    assert float(ema.network.weight) == 0.25


def test_power_function_averages_weigh_the_steps_by_their_profile():
    n, width = 2000, 0.1
    exponent = power_exponent(width)
    decay, weights = power_decay(width), np.zeros(n)
    for step in range(1, n + 1):
        weights *= decay(step)
        weights[step - 1] += 1 - decay(step)
    times = np.arange(1, n + 1) / n
    assert weights.sum() == pytest.approx(1)
    assert np.allclose(weights[100:] * n, (exponent + 1) * times[100:] ** exponent, rtol=0.02)
    mean = (weights * times).sum()
    assert np.sqrt((weights * (times - mean) ** 2).sum()) == pytest.approx(width, rel=0.01)
    assert power_exponent(0.05) == pytest.approx(16.97, abs=0.005) and exponent == pytest.approx(6.94, abs=0.005)  # the paper's


def test_several_averages_are_kept_resumed_and_sampled_from(tmp_path, shards):
    more = {"ema_more": (0.5,), "ema_power": (0.1, 0.2)}
    whole = train(tiny_config(shards, **more), tmp_path / "whole")
    kinds = ["ema", "ema-0.5", "ema-power-0.1", "ema-power-0.2", "model"]
    assert sorted(p.stem for p in whole.checkpoint(4).glob("*.safetensors")) == sorted([*kinds, "optimizer"])
    files = [read_weights(find_weights(whole.path, kind)) for kind in kinds]
    assert [file.kind for file in files] == kinds
    for one, other in itertools.combinations(files, 2):
        assert not torch.equal(one.tensors["blocks.0.attn.qkv.weight"], other.tensors["blocks.0.attn.qkv.weight"])
    half = train(tiny_config(shards, steps=2, **more), tmp_path / "half")
    train(tiny_config(shards, **more), half.path)
    assert all(
        equal_state(read_weights(find_weights(half.path, kind)).tensors, file.tensors)
        for kind, file in zip(kinds, files, strict=True)
    )
    with pytest.raises(ValueError, match=r"has no weights 'ema-0.7'; it has ema, ema-0.5, ema-power-0.1, ema-power-0.2, model"):
        find_weights(whole.path, "ema-0.7")


def test_a_run_of_no_steps_saves_the_initial_weights(tmp_path, shards):
    config = tiny_config(shards, steps=0)
    run = train(config, tmp_path / "run")
    weights = read_weights(run.checkpoint(0) / "model.safetensors")
    assert equal_state(weights.tensors, build_network(weights.config).state_dict())


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [("constant", 0, 0.25), ("constant", 3, 1.0), ("constant", 9, 1.0), ("cosine", 3, 0.5 * (1 + math.cos(0.3 * math.pi)))],
)
def test_the_learning_rate_is_a_function_of_the_step(schedule, step, expected):
    config = replace(tiny_config("x").train, lr=1.0, warmup_steps=4, schedule=schedule, steps=10)
    assert learning_rate(config, step) == pytest.approx(expected)


def test_a_global_batch_is_split_without_gaps_or_repeats():
    plan = BatchPlan.of(replace(tiny_config("x").train, batch_size=24, micro_batch=4), num_processes=2)
    positions = [plan.positions(5, micro, rank) for micro in range(plan.accumulation) for rank in range(2)]
    assert np.array_equal(np.concatenate(positions), np.arange(120, 144))


@pytest.mark.parametrize(
    ("batch", "micro", "says"), [(9, None, "not divisible by the 2 processes"), (8, 3, "does not divide the 4")]
)
def test_a_batch_that_cannot_be_split_evenly_is_refused(batch, micro, says):
    with pytest.raises(ValueError, match=says):
        BatchPlan.of(replace(tiny_config("x").train, batch_size=batch, micro_batch=micro), num_processes=2)


def test_the_loss_of_a_step_does_not_depend_on_how_its_batch_is_split(tmp_path, shards):
    runs = {m: train(tiny_config(shards, micro_batch=m, log_every=1), tmp_path / str(m)).path for m in (8, 4, 1)}
    logs = {m: [line["loss"] for line in lines(run)] for m, run in runs.items()}
    norms = {m: [line["grad_norm"] for line in lines(run)] for m, run in runs.items()}
    for m in (4, 1):
        assert logs[m] == pytest.approx(logs[8], rel=1e-5)
        assert norms[m] == pytest.approx(norms[8], rel=1e-4)


def test_draws_are_a_function_of_seed_purpose_and_position(shards):
    from dit_vca.data.latents import read_manifest
    from dit_vca.runs import resolve

    config = resolve(tiny_config(shards), read_manifest(shards))
    task = GenerationTask(build_network(config), objective_of(config), config.data.latent, label_dropout=0.5, seed=1)
    whole, part = task.draw(range(100, 164)), task.draw(range(120, 130))
    assert all(torch.equal(whole[name][20:30], part[name]) for name in whole)
    assert 0.45 < task.draw(range(2000))["drop"].float().mean() < 0.55
    other = GenerationTask(task.network, task.objective, task.latent, label_dropout=0.5, seed=2).draw(range(100, 164))
    assert not any(torch.equal(whole[name], other[name]) for name in ("t", "eps", "latent_noise"))
    assert not torch.equal(whole["eps"], whole["latent_noise"])


def test_dropped_labels_become_the_null_class(shards):
    from dit_vca.data.latents import read_manifest
    from dit_vca.runs import resolve

    config = resolve(tiny_config(shards), read_manifest(shards))
    seen = []

    class Network(torch.nn.Module):
        null_class = 2

        def forward(self, x, t, y):
            seen.append(y)
            return x

    task = GenerationTask(Network(), objective_of(config), config.data.latent, label_dropout=0.5, seed=1)
    draws = task.draw(range(32))
    task(torch.zeros(32, 3, 8, 8, dtype=torch.uint8), torch.zeros(32, dtype=torch.long), draws)
    assert torch.equal(seen[0] == 2, draws["drop"]) and 0 < draws["drop"].sum() < 32


class CountSyncs(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


def test_nothing_is_read_from_the_device_between_log_intervals(tmp_path, shards, monkeypatch):
    """The mode sees item(), float() and bool() of tensors; only logging, saving and the preview may call them."""
    counts, modes = [], []
    step = Monitor.step

    def begin(config, number):  # the first thing a step asks for
        if not modes:
            modes.append(CountSyncs().__enter__())
        return learning_rate(config, number)

    def end(self, done, lr):
        mode = modes.pop()
        counts.append(mode.count)
        mode.__exit__(None, None, None)
        return step(self, done, lr)

    monkeypatch.setattr("dit_vca.training.loop.learning_rate", begin)
    monkeypatch.setattr(Monitor, "step", end)
    train(tiny_config(shards, steps=6, log_every=3, save_every=6, clip_grad=1.0), tmp_path / "run")
    assert counts == [0] * 6
    with CountSyncs() as mode:
        float(torch.ones(()))
    assert mode.count == 1  # the count can fail


def poison(monkeypatch, at_step):
    """Make the loss of one step NaN."""
    real, calls = Objective.loss, []

    def loss(self, *args, **kwargs):
        terms = real(self, *args, **kwargs)
        calls.append(1)
        return {k: v * float("nan") for k, v in terms.items()} if len(calls) == at_step + 1 else terms

    monkeypatch.setattr(Objective, "loss", loss)


def test_a_step_that_is_not_finite_changes_nothing_and_stops_the_run(tmp_path, shards, monkeypatch):
    good = train(tiny_config(shards, steps=3, save_every=1, log_every=1), tmp_path / "good")
    poison(monkeypatch, at_step=3)
    kept = {}
    raise_if_bad = Monitor.raise_if_bad

    def look(self, step):
        import gc

        kept["ema"] = next(o for o in gc.get_objects() if isinstance(o, EMA)).network.state_dict()
        raise_if_bad(self, step)

    monkeypatch.setattr(Monitor, "raise_if_bad", look)
    config = tiny_config(shards, steps=8, save_every=8, log_every=6)
    with pytest.raises(NonFinite, match=r"step 3 \(mse nan .*positions 24 to 31"):
        train(config, tmp_path / "bad")
    assert equal_state(kept["ema"], read_weights(good.checkpoint(3) / "ema.safetensors").tensors)
    assert not list((tmp_path / "bad" / "checkpoints").glob("*"))


def test_fused_adamw_leaves_weights_and_state_alone_where_the_flag_is_set(shards):
    network = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(network, tiny_config(shards).train)
    for bad in (0.0, 1.0):
        network(torch.ones(1, 2)).sum().backward()
        if bad:
            network.weight.grad.fill_(float("nan"))
        before = [p.detach().clone() for p in network.parameters()] + [
            s.clone() for s in optimizer.state.get(network.weight, {}).values()
        ]
        optimizer.found_inf = torch.tensor(bad)
        optimizer.step()
        after = [*network.parameters(), *optimizer.state[network.weight].values()]
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=False)]
        assert all(same) if bad else not any(same[:2])


def test_a_finished_run_says_so_and_changes_nothing(run, shards, capsys):
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    train(current_config(RunFolder(run)), run)
    assert "is finished: 4 of 4 steps" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_what_may_change_on_resume_is_recorded_and_the_rest_refused(tmp_path, shards):
    run = train(tiny_config(shards, steps=2), tmp_path / "run")
    train(replace(current_config(run), train=replace(current_config(run).train, steps=4)), run.path)
    history = [json.loads(line) for line in run.history_file.read_text().splitlines()]
    assert history[0]["step"] == 2 and history[0]["changes"] == {"train.steps": [2, 4]}
    assert current_config(run).train.steps == 4 and run.read_config().train.steps == 2
    base = current_config(run)
    with pytest.raises(ValueError, match=r"model\.depth: 2 -> 3"):
        train(replace(base, model=replace(base.model, depth=3)), run.path)
    with pytest.raises(ValueError, match=r"seed: 0 -> 1"):
        train(replace(base, seed=1), run.path)
    faster = replace(base, train=replace(base.train, lr=0.5, steps=5))
    with pytest.raises(ValueError, match=r"train\.lr: 0\.001 -> 0\.5.*--allow-change"):
        train(faster, run.path)
    train(faster, run.path, allow_change=True)
    assert RunFolder(run.path).checkpoint(5).is_dir()


def test_a_second_run_in_a_live_folder_is_refused(tmp_path, shards):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with folder.locked():
        result = dit_vca("train", "--run", folder.path, "--data.name", shards, *TINY_OPTIONS, cwd=tmp_path)
    assert result.returncode == 2 and "another process is training in" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_resumed_run_does_not_need_the_file_it_began_from(tmp_path, shards, run):
    import shutil

    began_from = shutil.copytree(run, tmp_path / "first")
    folder = train(tiny_config(shards, steps=2, init_from=str(began_from)), tmp_path / "run")
    shutil.rmtree(began_from)
    base = current_config(folder)
    train(replace(base, train=replace(base.train, steps=4)), folder.path)
    assert folder.checkpoint(4).is_dir()


def test_training_starts_from_a_weight_file_with_other_classes(tmp_path, run, images, capsys):
    from made import make_images

    from dit_vca.data.prepare import prepare_shards

    folder = make_images(tmp_path / "images", classes=("a", "b", "c"), per_class=4)
    data = replace(tiny_config("x").data, name=str(folder), image_size=8, vae="none", cache=str(tmp_path / "cache"))
    config = replace(tiny_config(prepare_shards(data).folder), train=replace(tiny_config("x").train, steps=0, init_from=str(run)))
    new = train(config, tmp_path / "new")
    assert "a new label table for 3 classes, that file has 2" in capsys.readouterr().out
    before = read_weights(RunFolder(run).checkpoint(4) / "ema.safetensors").tensors
    after = read_weights(new.checkpoint(0) / "model.safetensors").tensors
    table = "y_embedder.embedding_table.weight"
    assert after[table].shape == (4, 16) and before[table].shape == (3, 16)
    assert equal_state({k: v for k, v in before.items() if k != table}, {k: v for k, v in after.items() if k != table})


def test_another_batch_size_goes_on_where_the_stream_of_positions_was(tmp_path, shards):
    run = train(tiny_config(shards, steps=2, batch_size=8), tmp_path / "run")
    base = current_config(run)
    train(replace(base, train=replace(base.train, steps=4, batch_size=4, micro_batch=None)), run.path, allow_change=True)
    train(replace(current_config(run), train=replace(current_config(run).train, steps=5)), run.path)
    assert [json.loads(line)["images"] for line in run.log_file.read_text().splitlines()][-1] == 2 * 8 + 3 * 4
    state = json.loads((run.checkpoint(5) / "state.json").read_text())
    assert state["position"] == 28
    plan = BatchPlan(4, 4, 1).resumed(2, 16)
    assert [plan.positions(step, 0, 0).tolist() for step in (2, 3)] == [[16, 17, 18, 19], [20, 21, 22, 23]]


def test_without_its_vae_a_run_trains_on_and_says_that_there_are_no_previews(tmp_path, shards, monkeypatch, capsys):
    def gone(*_, **__):
        raise ValueError("the VAE has moved")

    monkeypatch.setattr("dit_vca.training.loop.codec_of", gone)
    run = train(tiny_config(shards, steps=2), tmp_path / "run")
    assert run.checkpoint(2).is_dir() and not run.samples.exists()
    assert "no previews: the VAE has moved" in capsys.readouterr().out


def test_the_precision_a_run_began_with_is_recorded_and_kept(tmp_path, shards, monkeypatch):
    run = train(tiny_config(shards, steps=1), tmp_path / "run")
    assert run.read_config().train.mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # what accelerate launch --mixed_precision bf16 sets
    base = current_config(run)
    train(replace(base, train=replace(base.train, steps=2)), run.path)
    assert json.loads((run.checkpoint(2) / "state.json").read_text())["precision"] == "no"
    asked = dit_vca("train", "--run", run.path, "--train.steps", 3, "--train.mixed_precision", "bf16", cwd=tmp_path)
    assert asked.returncode == 2 and "train.mixed_precision: 'no' -> 'bf16'" in asked.stderr
