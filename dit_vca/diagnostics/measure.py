"""A network on noised latents, with the figures of every layer summed over images."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samplers.noise import normal

from ..attention.streams import ATTENTION_STAGE, STAGE_2, Stream, Streams, record
from ..data.latents import LatentShards, PositionOrder
from ..data.prepare import draw_latents
from ..objectives import Objective
from ..progress import progress
from .figures import Intruders, null_of_streams, null_of_tokens, stream_figures, token_figures

BLOCK = "block"  # the stage under which figures of the tokens after a block stand


@dataclass(frozen=True)
class Reduced:
    """What is kept of one stage of one layer for a batch: figures, weight, maps for pictures, and its shapes."""

    figures: dict[str, Tensor]
    weight: Tensor | None
    maps: Tensor  # (pictured images, queries, H * W), the mean over heads
    shapes: Streams  # of one image, on the meta device
    shared_values: bool  # both branches read the same

    @classmethod
    def of(cls, stages: tuple[Streams, ...], rule: Intruders, grid: tuple[int, int], pictured: int) -> "dict[str, Reduced]":
        """Reduce the stages of one attention; maps of the first `pictured` images."""
        return {
            s.stage: cls(
                {name: value.sum(0).cpu() for name, value in stream_figures(s, rule).items()},
                None if s.weight is None else s.weight.double().cpu(),
                grid_maps(s, grid)[:pictured].float().cpu(),
                Streams(s.stage, *map(_shapes_of, s.branches.values())),
                s.negative is not None and torch.equal(s.positive.values, s.negative.values),
            )
            for s in stages
        }


def _shapes_of(stream: Stream) -> Stream:
    return Stream(*(z[:1].to("meta") for z in (stream.output, stream.map, stream.values)))


def grid_maps(streams: Streams, grid: tuple[int, int]) -> Tensor:
    """P - weight M over the patches for a few queries, mean over heads: (B, at most 6, H * W).

    Queries are patches, or VCA's contrast tokens: in its stage II, what each patch reads of them.
    """
    signed = streams.signed_map.mean(1)  # (B, N, M)
    if streams.stage == STAGE_2:
        signed = signed.mT
    patches = grid[0] * grid[1]
    of_patches = streams.stage == ATTENTION_STAGE
    queries = signed[:, -patches:] if of_patches else signed
    return queries[:, lattice(grid if of_patches else contrast_grid(streams)), :][..., -patches:]


def contrast_grid(streams: Streams) -> tuple[int, int]:
    """The square of VCA's contrast tokens: queries of stage I, keys of stage II."""
    side = math.isqrt(streams.positive.map.shape[-1 if streams.stage == STAGE_2 else -2])
    return side, side


def lattice(grid: tuple[int, int]) -> list[int]:
    """Six places in two rows of three, fewer on a small grid: their numbers in row order."""
    rows, columns = grid
    return sorted({int(rows * r / 4) * columns + int(columns * c / 6) for r in (1, 3) for c in (1, 3, 5)})


@dataclass(frozen=True)
class Request:
    """What is measured: images of the data, at which times, and how."""

    num: int
    times: tuple[float, ...]  # rising
    null_labels: bool
    seed: int
    rule: Intruders
    pictures: int  # of the first images
    batch: int

    def __post_init__(self):
        for name, least in (("num", 1), ("batch", 1), ("seed", 0), ("pictures", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.times or len(set(self.times)) < len(self.times) or not all(0 <= t <= 1 for t in self.times):
            raise ValueError(f"times must be at least one, all different, from 0 (data) to 1 (noise); got {list(self.times)}")


class Measurement:
    """Sums over images of every figure, by (t, layer, stage); and what of a layer does not depend on the image."""

    def __init__(self):
        self.num = 0  # images, at every time
        self.sums: dict[tuple[float, int, str], dict[str, Tensor]] = defaultdict(dict)
        self.weights: dict[tuple[int, str], Tensor] = {}  # (heads,)
        self.shapes: dict[str, Streams] = {}
        self.shared_values: dict[str, bool] = {}
        self.token_shape: Tensor | None = None
        self.maps: dict[tuple[float, int, str], list[Tensor]] = defaultdict(list)
        self.inputs: dict[float, list[Tensor]] = defaultdict(list)  # x_0 and x_t (pictured, 2, C, h, w), on the host

    def add(
        self, t: float, layers: Sequence[dict[str, Reduced]], tokens: Sequence[Tensor], clean: Sequence[Tensor], inputs: Tensor
    ) -> None:
        """A batch at time t: its stages and tokens by layer, its tokens at the smallest t, and inputs for the pictures."""
        for layer, (stages, after, before) in enumerate(zip(layers, tokens, clean, strict=True)):
            self._add_up(t, layer, BLOCK, {name: value.sum(0).cpu() for name, value in token_figures(after, before).items()})
            for stage, reduced in stages.items():
                self._add_up(t, layer, stage, reduced.figures)
                self.maps[t, layer, stage].append(reduced.maps)
                self.shapes[stage] = reduced.shapes
                self.shared_values[stage] = self.shared_values.get(stage, True) and reduced.shared_values
                if reduced.weight is not None:
                    self.weights[layer, stage] = reduced.weight
        self.inputs[t].append(inputs)
        self.token_shape = tokens[0][:1].to("meta")

    def _add_up(self, t: float, layer: int, stage: str, figures: dict[str, Tensor]) -> None:
        sums = self.sums[t, layer, stage]
        for name, value in figures.items():
            sums[name] = sums.get(name, 0) + value


@torch.inference_mode()
def measure(network: nn.Module, objective: Objective, shards: LatentShards, request: Request) -> Measurement:
    """Run the network on noised latents of the data, a batch at a time, and sum the figures of every layer.

    Images are the first `num` of the order that the seed gives, their noise a function of (seed, image): the same image
    and noise at every t. One layer's maps of a batch are in memory at a time.
    """
    measurement = Measurement()
    indices = PositionOrder(len(shards), request.seed).indices(range(request.num))
    with progress(request.num, "image", "diagnose") as bar:
        for start in range(0, request.num, request.batch):
            chosen = indices[start : start + request.batch]
            x_0, y = draw_latents(shards, chosen, request.seed)
            eps = normal(request.seed, "eps", chosen, tuple(x_0.shape[1:]))
            y = torch.full_like(y, network.null_class) if request.null_labels else y
            pictured, clean = max(0, request.pictures - start), None
            for t in request.times:
                now = objective.path.coefficients(torch.tensor(t, dtype=torch.float64))
                x_t = float(now.alpha) * x_0 + float(now.sigma) * eps
                stages, tokens = _look(network, objective, x_t, t, y, request.rule, pictured)
                clean = clean or tokens
                measurement.add(t, stages, tokens, clean, torch.stack([x_0, x_t], dim=1)[:pictured])
            measurement.num += len(chosen)
            bar.update(len(chosen))
    return measurement


def _look(network, objective, x_t, t, y, rule, pictured) -> tuple[list[dict[str, Reduced]], list[Tensor]]:
    """One forward pass: the reduced stages of every layer, and the tokens after it."""
    device = next(network.parameters()).device
    keep = partial(Reduced.of, rule=rule, grid=network.grid, pictured=pictured)
    with record(network, keep) as stages, block_outputs(network) as tokens:
        objective.predict(network, x_t.to(device), torch.full((len(y),), t, dtype=torch.float64), y.to(device))
    return list(stages.values()), tokens


@contextmanager
def block_outputs(network: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block, the tokens (B, N, dim) after each of `network.blocks`, in the order of the layers."""
    outputs: list[Tensor] = []
    with ExitStack() as stack:
        for block in network.blocks:
            handle = block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
            stack.callback(handle.remove)
        yield outputs


def report_of(measurement: Measurement, request: Request) -> dict[str, Any]:
    """Means over images, with the null values and limits of each stage: what diagnose.json holds besides its origin."""
    layers = []
    for (t, layer, stage), sums in measurement.sums.items():
        row: dict[str, Any] = {"t": t, "layer": layer, "stage": stage}
        for name, total in sums.items():
            heads = (total / measurement.num).tolist()
            row[name] = (
                total.long().tolist() if name == "intruder_histogram" else {"mean": sum(heads) / len(heads), "heads": heads}
            )
        layers.append(row)
    weights = [
        {"layer": layer, "stage": stage, "mean": float(w.mean()), "std": float(w.std(correction=0)), "min": float(w.min()),
         "max": float(w.max()), "heads": w.tolist()}
        for (layer, stage), w in measurement.weights.items()
    ]  # fmt: skip
    null = {stage: null_of_streams(like, request.rule, seed=request.seed) for stage, like in measurement.shapes.items()}
    null[BLOCK] = null_of_tokens(measurement.token_shape, seed=request.seed)
    limits = {stage: _limits(like, request.rule) for stage, like in measurement.shapes.items()}
    for stage, shared in measurement.shared_values.items():
        limits[stage]["shared_values"] = shared
    return {"layers": layers, "weights": weights, "null": null, "limits": limits}


def _limits(like: Streams, rule: Intruders) -> dict[str, Any]:
    _, heads, queries, keys = like.positive.map.shape
    found = {"heads": heads, "queries": queries, "keys": keys, "largest_entropy": math.log(keys)}
    if like.negative is not None:
        found["largest_intruders"] = min(rule.k, *like.positive.output.shape[-2:])
    return found
