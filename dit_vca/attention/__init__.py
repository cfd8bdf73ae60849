"""Attention by name. A new kind is one file and one line in ATTENTION."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from .base import QKVAttention
from .denoising import VARIANTS, DenoisingAttention
from .differential import DifferentialAttention
from .linear import CosformerAttention, HedgehogAttention, LinearAttention, PerformerAttention
from .lolcats import LolcatsAttention
from .low_rank import LinformerAttention, NystromAttention
from .softmax import CogAttention, SoftmaxAttention
from .vca import VisualContrastAttention

# A class, or a partial one: what is bound is no option.
ATTENTION: dict[str, Callable[..., QKVAttention]] = {
    "softmax": SoftmaxAttention,
    "vca": VisualContrastAttention,
    "differential": DifferentialAttention,
    **{name: partial(DenoisingAttention, variant=name) for name in VARIANTS if name != "dna_pm"},
    "dna_pm": partial(DenoisingAttention, variant="dna_pm", neg_sign=1),
    "cog": CogAttention,
    "linear": LinearAttention,
    "hedgehog": HedgehogAttention,
    "performer": PerformerAttention,
    "nystromformer": NystromAttention,
    "linformer": LinformerAttention,
    "cosformer": CosformerAttention,
    "lolcats": LolcatsAttention,
}

# Rows of the VCA paper's Tables 3 and 4, in both of which DiT-S/2 is meant: a kind and options.
VCA_ROWS: dict[str, dict[str, str]] = {
    "vca-ours-vani": {"stage2": "vanilla"},
    "vca-vani-ours": {"stage1": "vanilla"},
    "vca-diff-diff": {"stage1": "differential", "stage2": "differential"},
    "vca-emb-emb": {"positive": "emb", "negative": "emb"},
    "vca-pool-poolemb": {"positive": "pool"},
    "vca-poolemb-pool": {"negative": "pool"},
}

_OF_THE_NETWORK = ("dim", "num_heads", "layer", "depth", "num_tokens", "widths")


def option_defaults(name: str) -> dict[str, Any]:
    """The options of a kind and their defaults, read from its constructor; ValueError for an unknown kind."""
    if name not in ATTENTION:
        raise ValueError(f"unknown attention {name!r}; there is {', '.join(ATTENTION)}")
    kind = ATTENTION[name]
    fixed = (*_OF_THE_NETWORK, *getattr(kind, "keywords", ()))
    return {p.name: p.default for p in inspect.signature(kind).parameters.values() if p.name not in fixed}


def resolve_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """`options` with every default written out; ValueError names an unknown option, or one of the wrong type."""
    defaults = option_defaults(name)
    for key, value in options.items():
        if key not in defaults:
            raise ValueError(f"attention {name} has no option {key!r}; it has {', '.join(defaults)}")
        wanted = type(defaults[key])
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ValueError(f"attention option {key} of {name} must be of type {wanted.__name__}, got {value!r}")
    return {key: type(default)(options.get(key, default)) for key, default in defaults.items()}


def build_attention(
    name: str, dim: int, num_heads: int, *, layer: int, options: dict[str, Any], depth: int | None = None, num_tokens: int | None = None
) -> QKVAttention:  # fmt: skip
    """The attention module of one block, of `depth` blocks on `num_tokens` tokens (which few kinds ask for)."""
    resolved = resolve_options(name, options)  # refuses an unknown name too
    asked = inspect.signature(ATTENTION[name]).parameters
    network = {key: value for key, value in {"depth": depth, "num_tokens": num_tokens}.items() if key in asked}
    return ATTENTION[name](dim, num_heads, layer=layer, **network, **resolved)


__all__ = ["ATTENTION", "VCA_ROWS", "QKVAttention", "build_attention", "option_defaults", "resolve_options"]
