"""Pictures of a diagnosis: curves over layers, histograms, and maps over the image."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attention.streams import ATTENTION_STAGE
from ..vae import Codec
from .figures import shares
from .measure import BLOCK, Measurement, contrast_grid, lattice

PLOTS = {
    "intruders": (("intruders",), "intruder dimensions"),
    "branch_cosine": (("branch_cosine",), "cosine of O+ and O-"),
    "value_similarity": (("value_similarity",), "C(V+, V-)"),
    "principal_angle": (("principal_angle", "smallest_principal_angle"), "angle of V+ and V- (degrees)"),
    "head_redundancy": (("head_redundancy_positive", "head_redundancy_negative"), "mean 1 - cos of two heads' maps"),
    "entropy": (("entropy_positive", "entropy_negative"), "entropy of a row (nats)"),
    "entropy_top": (("entropy_top_positive", "entropy_top_negative"), "highest entropies of rows (nats)"),
    "token_separation": (("token_separation",), "mean 1 - cos of two tokens"),
    "drift": (("drift",), "1 - cos to the smallest t"),
}
OF_VALUES = ("value_similarity", "principal_angle")  # nothing to plot where both streams read the same values


def _figure(rows: int, columns: int, *, width: float = 4.2, height: float = 3.4):
    from matplotlib.figure import Figure  # heavy, and needed here alone

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _color(number: int, count: int):
    from matplotlib import colormaps

    return colormaps["viridis"](0.9 * number / max(count - 1, 1))


def plot_over_layers(report: dict[str, Any], figures: Sequence[str], label: str, path: Path) -> None:
    """One panel for each stage and figure, one line for each time, the null value in grey; no file without a figure."""
    found = dict.fromkeys((row["stage"], name) for row in report["layers"] for name in figures if name in row)
    panels = [
        (stage, name) for stage, name in found
        if not (figures[0] in OF_VALUES and report["limits"][stage]["shared_values"])
    ]  # fmt: skip
    if not panels:
        return
    times = report["made_from"]["times"]
    figure, axes = _figure(1, len(panels))
    for panel, (stage, name) in zip(axes[0], panels, strict=True):
        for i, t in enumerate(times):
            line = [(r["layer"], r[name]["mean"]) for r in report["layers"] if (r["t"], r["stage"]) == (t, stage) and name in r]
            panel.plot(*zip(*line, strict=True), marker="o", markersize=4, color=_color(i, len(times)), label=f"t = {t:g}")
        null = report["null"][stage][name]
        panel.axhline(null["mean"], color="grey", linestyle="--", label="independent")
        panel.axhspan(null["mean"] - null["std"], null["mean"] + null["std"], color="grey", alpha=0.15, linewidth=0)
        if name.startswith("entropy"):
            panel.axhline(report["limits"][stage]["largest_entropy"], color="black", linestyle=":", label="uniform")
        _label_layers(panel, [layer for layer, _ in line])
        panel.set_title(_panel_title(stage, name, figures[0]), fontsize="medium")
    axes[0][0].set_ylabel(label)
    axes[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(path, dpi=120)


def _panel_title(stage: str, name: str, first: str) -> str:
    branch = name.rpartition("_")[2] if name.endswith(("_positive", "_negative")) else ""
    kind = "smallest" if name.startswith("smallest") else "mean" if first == "principal_angle" else ""
    return ", ".join(part for part in ("after the block" if stage == BLOCK else stage, branch, kind) if part)


def _label_layers(panel, layers: Sequence[int]) -> None:
    panel.set_xlabel("layer")
    panel.set_xlim(min(layers) - 0.5, max(layers) + 0.5)
    _whole_numbers(panel)
    panel.grid(alpha=0.3)


def _whole_numbers(panel) -> None:
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def plot_weights(weights: Sequence[dict[str, Any]], path: Path) -> None:
    """lambda or -sign alpha by layer: every head a dot, their mean a line."""
    stages = list(dict.fromkeys(w["stage"] for w in weights))
    figure, axes = _figure(1, len(stages))
    for panel, stage in zip(axes[0], stages, strict=True):
        rows = [w for w in weights if w["stage"] == stage]
        panel.plot([w["layer"] for w in rows], [w["mean"] for w in rows], color="tab:blue", label="mean of the heads")
        dots = [(w["layer"], value) for w in rows for value in w["heads"]]
        panel.scatter(*zip(*dots, strict=True), s=12, color="tab:orange", zorder=3, label="a head")
        panel.axhline(0, color="black", linewidth=0.8)
        _label_layers(panel, [w["layer"] for w in rows])
        panel.set_title(stage, fontsize="medium")
    axes[0][0].set_ylabel("weight of the negative branch")
    axes[0][-1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def plot_histograms(report: dict[str, Any], path: Path) -> None:
    """Shares of 0..k intruders over all layers, heads and images: a row for each stage, a column for each time."""
    rows = [row for row in report["layers"] if "intruder_histogram" in row]
    stages, times = list(dict.fromkeys(row["stage"] for row in rows)), report["made_from"]["times"]
    figure, axes = _figure(len(stages), len(times), width=2.8, height=2.6)
    for line, stage in zip(axes, stages, strict=True):
        null = report["null"][stage]["intruder_histogram"]["shares"]
        for panel, t in zip(line, times, strict=True):
            counts = torch.tensor([r["intruder_histogram"] for r in rows if (r["t"], r["stage"]) == (t, stage)]).sum(0)
            panel.bar(range(len(null)), shares(counts), color="tab:blue", label="measured")
            panel.step(range(len(null)), null, where="mid", color="grey", linestyle="--", label="independent")
            panel.set(title=f"{stage}, t = {t:g}", ylim=(0, 1.05), xlim=(-0.6, len(null) - 0.4))
    for panel in axes[-1]:
        panel.set_xlabel("intruder dimensions")
    for panel in axes.flat:
        _whole_numbers(panel)
    for line in axes:
        line[0].set_ylabel("share")
    axes[0][-1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def draw_maps(measurement: Measurement, grid: tuple[int, int], codec: Codec | None, folder: Path) -> None:
    """maps-imageI-tT-STAGE.png: signed maps of a few queries in up to four layers, and the image they are of."""
    if codec is None:
        return
    layers = sorted({layer for _, layer, _ in measurement.maps})
    shown = [layers[i] for i in sorted({round(x) for x in torch.linspace(0, len(layers) - 1, min(4, len(layers))).tolist()})]
    for t, batches in measurement.inputs.items():
        for image, latents in enumerate(torch.cat(batches)):
            inputs = codec.decode(latents)
            for stage, like in measurement.shapes.items():
                maps = [torch.cat(measurement.maps[t, layer, stage])[image].unflatten(-1, grid) for layer in shown]
                of_queries = grid if stage == ATTENTION_STAGE else contrast_grid(like)
                path = folder / f"maps-image{image}-t{t}-{stage}.png"
                _draw(maps, shown, inputs, of_queries, f"image {image}, t = {t:g}, {stage}", path)


def _draw(
    maps: Sequence[Tensor], layers: Sequence[int], images: Tensor, of_queries: tuple[int, int], title: str, path: Path
) -> None:
    """Maps (queries, H, W) of each layer, a row each with one scale, beside x_0 and x_t decoded, uint8 (2, S, S, 3)."""
    from matplotlib.patches import Rectangle

    figure, axes = _figure(len(layers), 1, width=1.3 * (3 + len(maps[0])), height=1.5)
    for panel, layer, of_layer in zip(axes[:, 0], layers, maps, strict=True):
        largest = float(of_layer.abs().max())
        for i, (weights, query) in enumerate(zip(of_layer, lattice(of_queries), strict=True)):
            left, (row, column) = 2.3 + 1.1 * i, divmod(query, of_queries[1])
            shades = panel.imshow(weights, cmap="RdBu_r", vmin=-largest, vmax=largest, extent=(left, left + 1, 1, 0))
            panel.add_patch(Rectangle((left, 0), 1, 1, fill=False, linewidth=0.8))
            panel.plot(left + (column + 0.5) / of_queries[1], (row + 0.5) / of_queries[0], "kx", markersize=5)
        panel.text(2.25, 0.5, f"layer {layer}", rotation=90, ha="right", va="center", fontsize="small")
        panel.set(xlim=(0, 2.3 + 1.1 * len(of_layer)), ylim=(1.02, -0.02))
        panel.axis("off")
        figure.colorbar(shades, ax=panel, fraction=0.02, pad=0.01)
    for left, image, name in ((0, images[0], "x_0"), (1.05, images[1], "x_t")):
        axes[0, 0].imshow(image, extent=(left, left + 1, 1, 0))
        axes[0, 0].text(left + 0.5, -0.03, name, ha="center", va="bottom", fontsize="small")
    figure.suptitle(f"{title}: P - weight M, mean of heads; x marks the query", fontsize="small")
    figure.savefig(path, dpi=120)
