import json
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from made import environment, python

from dit_vca.data.images import open_images
from dit_vca.processes import shares


def scored(folder, processes, cache):
    out = folder / f"{processes}-{cache}.json"
    command = [
        *python(processes), "-m", "dit_vca", "score", "images.npz", "--ref", "real.npz", "--metrics", "fd-lite0,pr-lite0",
        "--batch", "4", "--device", "cpu", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=environment(XDG_CACHE_HOME=str(folder / cache)), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("fd-lite0@25") == 1  # one process speaks
    report = json.loads(out.read_text())
    assert report["numerics"]["processes"] == processes
    return report


def test_one_two_and_three_processes_agree_and_count_every_image_once(tmp_path):
    images = open_images("fashion-mnist", None, split="test").arrays
    np.savez(tmp_path / "images.npz", arr_0=images[:25])
    np.savez(tmp_path / "real.npz", arr_0=images[25:43])
    one, two, three = (scored(tmp_path, n, f"cache{n}") for n in (1, 2, 3))
    for report in (two, three):
        assert report["metrics"] == pytest.approx(one["metrics"], rel=1e-10)
        assert report["samples"]["pixels"] == one["samples"]["pixels"]
    kept = sorted(p.stat().st_size for p in (tmp_path / "cache3" / "dit-vca" / "features").iterdir())
    assert kept == [18 * 1280 * 4, 25 * 1280 * 4]


@pytest.mark.parametrize(("num", "batch", "processes"), [(45, 7, 3), (3, 8, 2), (16, 8, 2), (1, 1, 1)])
def test_shares_hold_every_index_once(num, batch, processes):
    states = [SimpleNamespace(num_processes=processes, process_index=rank) for rank in range(processes)]
    seen = [i for state in states for start, stop in shares(num, batch, state) for i in range(start, stop)]
    assert sorted(seen) == list(range(num))
