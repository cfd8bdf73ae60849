"""Several reports of one protocol, say of several seeds, in one table: mean, spread, smallest, and every value."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import SCHEMA


@dataclass(frozen=True)
class Row:
    """One metric over all reports. `std` is the sample standard deviation, NaN for one report."""

    metric: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    @property
    def smallest(self) -> float:
        return min(self.values)


def compare(paths: Sequence[Path]) -> list[Row]:
    """A row for each metric of the reports at `paths`.

    ValueError if they differ in anything that makes their numbers incomparable: metrics and numbers of images,
    extractor weights, reference; or if two are of the same images.
    """
    reports = [_read(path) for path in paths]
    first = reports[0]
    for path, report in zip(paths[1:], reports[1:], strict=True):
        for what, of in (("metrics and numbers of images", _keys), ("extractors", _extractors), ("reference", _reference)):
            if of(report) != of(first):
                raise ValueError(f"{paths[0]} and {path} differ in {what}: {_shown(of(first))} and {_shown(of(report))}")
    seen: dict[str, Path] = {}
    for path, report in zip(paths, reports, strict=True):
        digest = report["samples"]["pixels"]["digest_sorted"]
        if digest in seen:
            raise ValueError(f"{seen[digest]} and {path} are of the same images: they say nothing of the spread")
        seen[digest] = path
    return [Row(key, tuple(report["metrics"][key] for report in reports)) for key in first["metrics"]]


def markdown(rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    lines = ["| metric | mean | std | min | values |", "|---|---|---|---|---|"]
    lines += [f"| {row.metric} | {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join(lines)


def latex(rows: Sequence[Row]) -> str:
    """A tabular in LaTeX."""
    lines = [r"\begin{tabular}{lrrrl}", r"metric & mean & std & min & values \\ \hline"]
    lines += [" & ".join((row.metric.replace("_", r"\_"), *_cells(row))) + r" \\" for row in rows]
    return "\n".join([*lines, r"\end{tabular}"])


FORMATS = {"markdown": markdown, "latex": latex}


def _cells(row: Row) -> tuple[str, str, str, str]:
    std = "" if math.isnan(row.std) else f"{row.std:.3g}"
    return f"{row.mean:.6g}", std, f"{row.smallest:.6g}", ", ".join(f"{v:.6g}" for v in row.values)


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(Path(path).read_text())
        if report["schema"] != SCHEMA:
            raise ValueError(f"schema {report['schema']}, expected {SCHEMA}")
        _keys(report), _extractors(report), _reference(report), report["samples"]["pixels"]["digest_sorted"]
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: give reports of eval_fid.py (metrics.json)") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{path} is no report of this version of eval_fid.py ({type(error).__name__}: {error})") from None
    return report


def _keys(report) -> list[str]:
    return sorted(report["metrics"])


def _extractors(report) -> dict[str, str]:
    return {name: extractor["weights_sha256"] for name, extractor in sorted(report["extractors"].items())}


def _reference(report) -> str:
    reference = report["reference"]
    return "none" if reference is None else reference.get("sha256") or reference.get("digest_ordered") or reference["name"]


def _shown(value) -> str:
    text = value if isinstance(value, str) else ", ".join(value) if isinstance(value, list) else json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
