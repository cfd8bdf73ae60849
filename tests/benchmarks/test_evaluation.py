import json

import pytest

from benchmarks.evaluation import main


@pytest.mark.slow
def test_the_record_has_speeds_equal_values_and_peaks(tmp_path, capsys):
    out = tmp_path / "results" / "r.json"
    main(["--images", "12", "--rounds", "2", "--vectors", "100", "--memory", "8", "--threads", "1", "--out", str(out)])
    record = json.loads(out.read_text())
    assert len(record["torch-fidelity"]["seconds"]["dit-vca"]) == 2
    assert record["torch-fidelity"]["values"]["dit-vca"] == pytest.approx(
        record["torch-fidelity"]["values"]["torch-fidelity"], rel=1e-3
    )
    assert record["distance"]["seconds_of_distance"] > 0 and 10**8 < record["peak_bytes"]["8"] < 3 * 2**30
    assert "images/s" in capsys.readouterr().out
