"""A sweep: one model sampled with every combination of settings, each point scored; a table, and plots of the scores."""

import csv
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .evaluation.features import find_weights
from .evaluation.metrics import METRICS, check_metrics, check_numbers
from .evaluation.protocols import LITE0
from .evaluation.reference import check_reference
from .evaluation.score import score
from .files import sha256_of_file, write_text
from .processes import start_processes
from .runs import open_model
from .sampling import check_sampling, sample_to_folder, with_settings

GRID = ("weights", "sampler", "num_steps", "guidance")  # what may be varied, in the order of the table's columns


@dataclass(frozen=True)
class Point:
    """One combination of settings and what came of it: `network_calls` an image took, scores by metric."""

    settings: dict[str, Any]
    network_calls: int
    scores: dict[str, float]


def sweep(
    ckpt: str | Path, out: Path, *, grid: dict[str, Sequence[Any]], num: int, ref: str | Path | None, metrics: Sequence[str],
    labels: str = "balanced", seed: int = 0, tile: int = 64, batch: int = 64, vae: str | None = None, device: str = "auto",
    keep_images: bool = False, extractor_weights: Mapping[str, str | Path] | None = None,
) -> list[Point]:  # fmt: skip
    """Sample `num` images at every point of `grid`, {a name of GRID: values}, and score each against `ref`.

    Every point has a folder of its own under `out`, with images.json, grid.png and metrics.json; its images.npz is
    removed once it is scored, unless `keep_images`. A killed sweep goes on with the point it was at. Writes table.csv,
    table.md and, for every metric, a plot. ValueError for a name that cannot be varied, or a point of other settings.
    """
    if unknown := set(grid) - set(GRID):
        raise ValueError(f"a sweep cannot vary {', '.join(sorted(unknown))}; it can vary {', '.join(GRID)}")
    if empty := [name for name, values in grid.items() if not values or len(set(values)) < len(values)]:
        raise ValueError(f"the values of {empty[0]} must be at least one, and all different")
    names = [name for name in GRID if name in grid]
    combinations = [dict(zip(names, values, strict=True)) for values in itertools.product(*(grid[name] for name in names))]
    metrics = check_metrics(metrics)
    check_numbers(metrics, samples=num)
    if ref is not None:
        check_reference(ref)
    elif any(METRICS[m].needs_reference for m in metrics):
        raise ValueError(f"{', '.join(metrics)} need a reference: give it with --ref")
    for protocol in {METRICS[m].protocol for m in metrics} - {LITE0}:
        find_weights(protocol, extractor_weights)
    files = _check(ckpt, combinations)
    state = start_processes(device)
    points = []
    for settings in combinations:
        folder, kind = out / point_name(settings), settings.get("weights", "ema")
        request = {
            "weights": sha256_of_file(files[kind]), "num": num, "labels": labels, "seed": seed, "tile": tile, "metrics": metrics,
            "ref": sha256_of_file(Path(ref)) if ref is not None and Path(ref).is_file() else str(ref),
        }  # fmt: skip
        if not _finished(folder, request):
            try:
                images = sample_to_folder(
                    files[kind], num=num, labels=labels, seed=seed, weights=kind, tile=tile, batch=batch, out=str(folder), vae=vae,
                    device=device, settings=_of_sampler(settings),
                )  # fmt: skip
            except FloatingPointError as error:
                raise FloatingPointError(f"{folder.name}: {error}; leave this point out of the grid") from None
            report = score(
                images / "images.npz", ref, metrics=metrics, device=device, weights=extractor_weights,
                allow_duplicates=True,  # a poor point is a result
            )  # fmt: skip
            if state.is_main_process:
                write_text(folder / "metrics.json", json.dumps(report | {"request": request}, indent=1))
            state.wait_for_everyone()
        if not keep_images and state.is_main_process:
            (folder / "images.npz").unlink(missing_ok=True)
        calls = json.loads((folder / "images.json").read_text())["network_calls"]
        scores = json.loads((folder / "metrics.json").read_text())["metrics"]
        points.append(Point(settings, calls, scores))
    if state.is_main_process:
        write_text(out / "table.csv", table_csv(points))
        write_text(out / "table.md", table_markdown(points))
        for metric in points[0].scores:
            plot(points, metric, out)
    return points


def point_name(settings: dict[str, Any]) -> str:
    """The folder of a point: sampler-euler_num_steps-10_guidance-1.5."""
    return "_".join(f"{name}-{str(value).replace(',', '+')}" for name, value in settings.items()) or "point"


def _of_sampler(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "weights"}


def _check(ckpt, combinations: Sequence[dict[str, Any]]) -> dict[str, Path]:
    """Every point can be sampled, said before the first is. The file of each kind of weights, the same for all points."""
    files = {}
    for kind in dict.fromkeys(settings.get("weights", "ema") for settings in combinations):
        _, objective, found = open_model(ckpt, kind)
        files[kind] = found.path
    for settings in combinations:
        check_sampling(with_settings(found.config.sample, _of_sampler(settings)), objective, found.config.model)
    return files


def _finished(folder: Path, request: dict[str, Any]) -> bool:
    """Whether the point was scored already; ValueError if it was with another request."""
    report = folder / "metrics.json"
    if not report.is_file():
        return False
    if json.loads(report.read_text()).get("request") != request:
        raise ValueError(
            f"{folder} holds a point of another sweep (weights, number, labels, seed, metrics or reference): give another --out"
        )
    return True


def _cells(points: Sequence[Point]) -> list[list[str]]:
    header = [*points[0].settings, "network_calls", *points[0].scores]
    rows = [
        [*map(str, p.settings.values()), str(p.network_calls), *(f"{value:.6g}" for value in p.scores.values())] for p in points
    ]
    return [header, *rows]


def table_csv(points: Sequence[Point]) -> str:
    """The table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_cells(points))
    return text.getvalue()


def table_markdown(points: Sequence[Point]) -> str:
    """The table in Markdown."""
    header, *rows = (f"| {' | '.join(cells)} |" for cells in _cells(points))
    return "\n".join([header, "|" + "---|" * (len(_cells(points)[0])), *rows]) + "\n"


def plot(points: Sequence[Point], metric: str, out: Path) -> None:
    """METRIC.png: the score against guidance, and against network calls, one line for each choice of the other settings."""
    from matplotlib.figure import Figure  # heavy, and needed here alone

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, horizontal in zip(figure.subplots(1, 2, sharey=True), ("guidance", "network_calls"), strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for point in points:
            x = point.network_calls if horizontal == "network_calls" else point.settings.get("guidance")
            if x is None:
                continue
            other = {k: v for k, v in point.settings.items() if k != ("guidance" if horizontal == "guidance" else "num_steps")}
            lines.setdefault(", ".join(f"{k} {v}" for k, v in other.items()), []).append((float(x), point.scores[metric]))
        for label, line in lines.items():
            axes.plot(*zip(*sorted(line), strict=True), marker="o", label=label or None)
        axes.set_xlabel("guidance scale" if horizontal == "guidance" else "network calls an image")
        axes.grid(alpha=0.3)
        if any(lines):
            axes.legend(fontsize="small")
    figure.get_axes()[0].set_ylabel(metric)
    figure.savefig(out / f"{metric.replace('/', '_')}.png", dpi=120)
