"""2N steps equal N, a kill, and N more, bit for bit: model, EMA, optimizer, position."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace

import pytest
import torch
from made import TINY_OPTIONS, dit_vca, environment, python, tiny_config

from dit_vca.processes import check_process_count
from dit_vca.runs import RunFolder, read_weights
from dit_vca.training import current_config, state, train


def outcome(run, step):
    """SHA-256 of each tensor file of a checkpoint, and where the run stands."""
    values = json.loads((RunFolder(run).checkpoint(step) / "state.json").read_text())
    return {name: entry["sha256"] for name, entry in values["files"].items()} | {"position": values["position"]}


def command(run, shards, *options, processes=1):
    return [*python(processes), "-m", "dit_vca", "train", "--run", str(run), "--data.name", str(shards), *TINY_OPTIONS, *options]


def go(run, shards, *options, processes=1, tmp_path):
    result = subprocess.run(
        command(run, shards, *options, processes=processes),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    return result


def kill_after(run, shards, step, *options, processes=1, tmp_path):
    """Start, and SIGKILL the whole process group as soon as checkpoint `step` exists."""
    process = subprocess.Popen(
        command(run, shards, *options, processes=processes), cwd=tmp_path, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.time() + 120
    while not RunFolder(run).checkpoint(step).is_dir():
        assert process.poll() is None and time.time() < deadline, "the run ended before it could be killed"
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(("processes", "micro"), [(1, 4), (2, 2)], ids=["one-process", "two-processes"])
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, shards, processes, micro):
    """With accumulation. The number of processes is asserted from what the run itself recorded."""
    options = [
        "--train.micro_batch",
        str(micro),
        "--train.steps",
        "400",
        "--train.save_every",
        "100",
        "--train.sample_every",
        "0",
    ]
    kill_after(tmp_path / "killed", shards, 100, *options, processes=processes, tmp_path=tmp_path)
    assert not RunFolder(tmp_path / "killed").checkpoint(400).is_dir()
    resumed = go(tmp_path / "killed", shards, *options, processes=processes, tmp_path=tmp_path)
    assert "resuming from" in resumed.stdout
    go(tmp_path / "whole", shards, *options, processes=processes, tmp_path=tmp_path)
    assert outcome(tmp_path / "killed", 400) == outcome(tmp_path / "whole", 400)
    written = json.loads((RunFolder(tmp_path / "whole").checkpoint(400) / "state.json").read_text())
    assert (written["num_processes"], written["micro_batch"]) == (processes, micro)
    steps = [json.loads(line)["step"] for line in (tmp_path / "killed" / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 400


def test_two_processes_reach_the_weights_of_one(tmp_path, shards):
    """Up to rounding, with accumulation: their gradients are summed, once a step."""
    options = ["--train.micro_batch", "2", "--train.steps", "6", "--train.save_every", "6", "--train.sample_every", "0"]
    weights = []
    for processes in (1, 2):
        run = tmp_path / str(processes)
        go(run, shards, *options, processes=processes, tmp_path=tmp_path)
        folder = RunFolder(run).checkpoint(6)
        assert json.loads((folder / "state.json").read_text())["num_processes"] == processes
        weights.append(read_weights(folder / "model.safetensors").tensors)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dies_at", [0, 2, 3, 4], ids=["first-file", "third-file", "last-file", "folder"])
def test_a_kill_during_a_save_loses_that_checkpoint_only(tmp_path, shards, monkeypatch, dies_at):
    class Killed(BaseException):
        pass

    calls = []

    def dying(real):
        def call(path):
            if ".writing-0000004" in str(path):
                calls.append(path)
                if len(calls) == dies_at + 1:
                    raise Killed
            real(path)

        return call

    whole = train(tiny_config(shards, steps=6), tmp_path / "whole").path
    with monkeypatch.context() as patch:
        patch.setattr(state, "fsync_file", dying(state.fsync_file))
        patch.setattr(state, "fsync_folder", dying(state.fsync_folder))
        with pytest.raises(Killed):
            train(tiny_config(shards, steps=6), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert folder.latest_checkpoint() == folder.checkpoint(2)
    assert list(folder.checkpoints.glob(".writing-*"))
    train(current_config(folder), folder.path)
    assert outcome(folder.path, 6) == outcome(whole, 6)
    assert not list(folder.checkpoints.glob(".writing-*"))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, shards, capsys, file):
    run = train(tiny_config(shards), tmp_path / "run")
    damaged = run.checkpoint(4) / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 255
    damaged.write_bytes(bytes(content) if file != "state.json" else content[:10])
    assert run.latest_checkpoint() == run.checkpoint(2)
    assert "passing over the damaged checkpoint" in capsys.readouterr().out
    train(current_config(run), run.path)
    assert run.latest_checkpoint() == run.checkpoint(4)


def test_another_split_of_the_batch_keeps_samples_times_and_noises(tmp_path, shards):
    """Equal except by rounding: the change is said, and the stream of positions is the same."""
    a = train(tiny_config(shards, steps=2), tmp_path / "a")
    b = train(tiny_config(shards, steps=2), tmp_path / "b")
    for run, micro in ((a, 8), (b, 2)):
        base = current_config(run)
        train(replace(base, train=replace(base.train, steps=4, micro_batch=micro, log_every=1)), run.path)
    ours, theirs = (read_weights(r.checkpoint(4) / "model.safetensors").tensors for r in (a, b))
    for name in ours:
        assert (ours[name] - theirs[name]).abs().max() < 1e-5, name


def test_two_processes_agree_to_stop_long_before_the_next_log_line(tmp_path, shards):
    run = tmp_path / "run"
    options = ["--train.steps", "1000000", "--train.save_every", "50", "--train.log_every", "1000000"]
    process = subprocess.Popen(
        command(run, shards, *options, processes=2), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.time() + 120
    while not RunFolder(run).checkpoint(50).is_dir():
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)  # the launcher passes it on
    stderr = process.communicate(timeout=60)[1]
    last = int(RunFolder(run).latest_checkpoint().name)
    assert last % 50, stderr  # not one of the ordinary saves
    assert json.loads((RunFolder(run).checkpoint(last) / "state.json").read_text())["num_processes"] == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_saves_and_leaves_and_the_next_start_goes_on(tmp_path, shards, number, code):
    options = ["--train.steps", "100000", "--train.save_every", "100000", "--train.log_every", "10"]
    process = subprocess.Popen(
        command(tmp_path / "run", shards, *options), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    log = tmp_path / "run" / "log.jsonl"
    while not (log.is_file() and log.stat().st_size):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == code, stderr
    checkpoint = RunFolder(tmp_path / "run").latest_checkpoint()
    assert checkpoint is not None and "start it again to go on" in stderr
    last = int(checkpoint.name)
    again = dit_vca("train", "--run", tmp_path / "run", "--train.steps", last + 2, cwd=tmp_path)
    assert again.returncode == 0 and f"at step {last}" in again.stdout


def test_a_process_count_that_accelerate_does_not_see_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_process_count(2)
    with pytest.raises(ValueError, match="started 2 processes, but accelerate sees 1"):
        check_process_count(1)
