"""What an attention computes on the way to its output: the branches of a two-stream kind, or the one map of another."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .base import QKVAttention
from .linear import FeatureAttention
from .lolcats import LolcatsAttention
from .softmax import SoftmaxAttention

ATTENTION_STAGE, STAGE_1, STAGE_2 = "attention", "stage1", "stage2"  # the whole of a kind; VCA's gathering and scattering
ONE_MAP = (SoftmaxAttention, FeatureAttention, LolcatsAttention)  # kinds whose rows are probabilities


@dataclass(frozen=True)
class Stream:
    """One branch: `output` (B, heads, N, d) = `map` (B, heads, N, M) `values` (B, heads, M, d); rows of `map` sum to 1."""

    output: Tensor
    map: Tensor
    values: Tensor


@dataclass(frozen=True)
class Streams:
    """One stage of one attention in one forward pass: O+ - weight O-, before any norm.

    `weight` (heads,) is what the negative branch is subtracted with: a differential kind's lambda, DnA's -sign alpha. A
    kind with one map alone has neither `negative` nor `weight`.
    """

    stage: str
    positive: Stream
    negative: Stream | None = None
    weight: Tensor | None = None

    @property
    def branches(self) -> dict[str, Stream]:
        return {"positive": self.positive} | ({"negative": self.negative} if self.negative else {})

    @property
    def signed_map(self) -> Tensor:
        """P - weight M, (B, heads, N, M)."""
        if self.negative is None:
            return self.positive.map
        return self.positive.map - self.weight[:, None, None] * self.negative.map


def softmax_stream(q: Tensor, k: Tensor, values: Tensor) -> Stream:
    """softmax(q k' / sqrt(d)) with its map written out; q (B, heads, N, d), k (B, heads, M, d), values (B, heads, M, any)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = ((q.to(wide) / math.sqrt(q.shape[-1])) @ k.to(wide).transpose(-2, -1)).softmax(-1)
    return Stream(weights @ values.to(wide), weights, values)


def streams_of(attention: QKVAttention, x: Tensor, grid: tuple[int, int], *, kv: Tensor | None = None) -> tuple[Streams, ...]:
    """The stages of an attention on its inputs; a kind without two streams gives its map, as what it reads of unit values."""
    check_streams(attention)
    if hasattr(attention, "two_streams"):
        return attention.two_streams(x, grid, kv=kv)
    q, k, v = (attention._split_heads(tokens) for tokens in attention._project(x, kv))
    units = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:3], -1)
    weights = attention.mix(q, k, units, grid)
    return (Streams(ATTENTION_STAGE, Stream(weights @ v, weights, v)),)


def check_streams(attention: QKVAttention) -> None:
    """ValueError if this kind has neither two streams nor a map whose rows are probabilities."""
    if not hasattr(attention, "two_streams") and not isinstance(attention, ONE_MAP):
        raise ValueError(
            f"{type(attention).__name__} has neither two streams nor a map of probabilities; diagnosed can be vca, differential, "
            "dna and its variants; and, by their one map, softmax, linear, hedgehog, performer, cosformer and lolcats"
        )


@contextmanager
def record(network: nn.Module, keep: Callable[[tuple[Streams, ...]], Any] = lambda stages: stages) -> Iterator[dict[str, Any]]:
    """Within the block, every attention of `network` also computes its streams; {name of the module: keep(its stages)}.

    `keep` is called in the forward pass, so that the maps of one layer at a time need memory. Each pass replaces what
    the one before left. `forward` is replaced on the instances and put back at the end: outside there is nothing to pay.
    """
    found: dict[str, Any] = {}
    attentions = {name: module for name, module in network.named_modules() if isinstance(module, QKVAttention)}
    if not attentions:
        raise ValueError(f"{type(network).__name__} holds no attention of dit_vca: there is nothing to record")
    for attention in attentions.values():
        check_streams(attention)
    before = {name: vars(attention).get("forward") for name, attention in attentions.items()}
    try:
        for name, attention in attentions.items():
            attention.forward = _recorded(attention, lambda stages, name=name: found.__setitem__(name, keep(stages)))
        yield found
    finally:
        for name, attention in attentions.items():
            if before[name] is None:
                vars(attention).pop("forward", None)
            else:
                attention.forward = before[name]


def _recorded(attention: QKVAttention, receive: Callable[[tuple[Streams, ...]], None]) -> Callable[..., Tensor]:
    forward = attention.forward

    def recorded(x: Tensor, grid: tuple[int, int], *, kv: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            raise ValueError("streams are not recorded where the logits have a bias or a mask")
        receive(streams_of(attention, x, grid, kv=kv))
        return forward(x, grid, kv=kv)

    return recorded
