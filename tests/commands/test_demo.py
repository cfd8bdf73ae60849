import json

import pytest
from made import dit_vca


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
