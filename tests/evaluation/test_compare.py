import copy
import json

import pytest
from made import dit_vca

from dit_vca.evaluation import SCHEMA
from dit_vca.evaluation.compare import compare, latex, markdown

REPORT = {
    "schema": SCHEMA,
    "metrics": {"fid@50000": 2.0, "is@50000": 200.0},
    "samples": {"pixels": {"digest_sorted": "a"}},
    "reference": {"name": "ref.npz", "sha256": "f" * 64},
    "extractors": {"inception-v3-compat": {"weights_sha256": "0" * 64}},
}


def write(folder, *changes):
    """Reports that differ as the changes say: {"dotted.path": value}."""
    paths = []
    for i, change in enumerate(changes):
        report = copy.deepcopy(REPORT)
        for path, value in {"samples.pixels.digest_sorted": str(i), **change}.items():
            *parents, last = path.split(".")
            place = report
            for name in parents:
                place = place[name]
            place[last] = value
        paths.append(folder / f"{i}.json")
        paths[-1].write_text(json.dumps(report))
    return paths


def test_mean_spread_and_smallest_of_three_seeds(tmp_path):
    paths = write(tmp_path, *({"metrics.fid@50000": v} for v in (2.0, 2.5, 3.0)))
    fid, inception = compare(paths)
    assert (fid.metric, fid.mean, fid.std, fid.smallest, fid.values) == ("fid@50000", 2.5, 0.5, 2.0, (2.0, 2.5, 3.0))
    assert inception.std == 0
    assert "| fid@50000 | 2.5 | 0.5 | 2 | 2, 2.5, 3 |" in markdown([fid])
    assert r"fid@50000 & 2.5 & 0.5 & 2 & 2, 2.5, 3 \\" in latex([fid])


def test_one_report_has_no_spread(tmp_path):
    (row, _) = compare(write(tmp_path, {}))
    assert "| 2 |  | 2 |" in markdown([row])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"metrics": {"fid@10000": 2.0}}, "metrics and numbers of images"), ({"reference.sha256": "e" * 64}, "reference"),
     ({"extractors": {"inception-v3-compat": {"weights_sha256": "1" * 64}}}, "extractors"),
     ({"samples.pixels.digest_sorted": "0"}, "of the same images")],
)  # fmt: skip
def test_reports_that_cannot_be_compared_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        compare(write(tmp_path, {}, change))


def test_the_command_prints_the_table_and_refuses_what_is_no_report(tmp_path):
    paths = write(tmp_path, {}, {"metrics.fid@50000": 3.0})
    done = dit_vca("score", "compare", *paths, "--format", "latex", cwd=tmp_path)
    assert done.returncode == 0 and "fid@50000 & 2.5" in done.stdout, done.stderr
    (tmp_path / "other.json").write_text("[]")
    done = dit_vca("score", "compare", "other.json", cwd=tmp_path)
    assert done.returncode == 2 and "other.json is no report" in done.stderr and done.stderr.count("\n") == 1
