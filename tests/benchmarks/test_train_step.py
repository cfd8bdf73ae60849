import json

import pytest

from benchmarks.train_step import NETWORKS, main, measure, peak_memory


def test_every_network_takes_the_same_step_and_ratios_are_of_medians():
    result = measure(16, batch=2, rounds=3, warmup=1, size={"dim": 16, "depth": 1, "num_heads": 2})
    assert set(result["networks"]) == set(NETWORKS)
    assert all(len(entry["seconds"]) == 3 for entry in result["networks"].values())
    speed = {name: entry["images_per_s"] for name, entry in result["networks"].items()}
    assert result["ratios"]["softmax / faster peer"] == speed["softmax"] / max(speed["diffusers"], speed["timm"])


@pytest.mark.slow
def test_peak_memory_is_that_of_the_measured_process_not_of_its_parent():
    held = bytearray(3 << 30)  # touched, so that it is resident
    held[:: 1 << 12] = b"x" * (3 << 18)
    assert peak_memory("softmax", tokens=16, threads=1) < 2.5 * 2**30


def test_the_record_says_machine_versions_and_date(tmp_path, monkeypatch):
    monkeypatch.setitem(
        __import__("benchmarks.train_step", fromlist=["SIZES"]).SIZES, "s", {"dim": 16, "depth": 1, "num_heads": 2}
    )
    main(["--tokens", "16", "--rounds", "1", "--threads", "1", "--no-memory", "--out", str(tmp_path / "r.json")])
    record = json.loads((tmp_path / "r.json").read_text())
    assert {"date", "machine", "versions", "results"} <= set(record)
