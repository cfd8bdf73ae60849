import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made import dit_vca, environment


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["demo", "demo-softmax", "demo-ddpm"])
def test_the_demo_ends_with_its_report(tmp_path, preset):
    done = dit_vca("demo", "--preset", preset, "--train.steps", "2", "--num", "50", cwd=tmp_path, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "runs" / f"0001-{preset}" / "report.json").read_text())
    assert report["fd-lite0"]["floor"] < report["fd-lite0"]["gaussian"] < report["fd-lite0"]["untrained"]
    assert report["class_agreement"]["held_out"] > 0.8
    assert "$ accelerate launch" in done.stdout and "$ dit-vca sample" in done.stdout


def test_a_wrong_preset_is_told_before_anything_is_made(tmp_path):
    done = dit_vca("demo", "--preset", "demo-fast", cwd=tmp_path)
    assert done.returncode == 2 and "'demo-fast'" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_demo_stops_the_command_it_had_started(tmp_path):
    demo = subprocess.Popen(
        [sys.executable, "-m", "dit_vca", "demo"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert demo.stdout.readline().startswith("$ dit-vca encode")
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
    deadline = time.time() + 60
    while not (started := children.read_text().split()) and time.time() < deadline:
        time.sleep(0.05)
    time.sleep(1)  # it waits for the child by now
    demo.send_signal(signal.SIGTERM)
    assert demo.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(started[0]), 0)
