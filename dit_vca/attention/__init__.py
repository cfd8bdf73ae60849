"""Attention by name. A new kind is one file and one line in ATTENTION."""

import inspect
from typing import Any

from .base import QKVAttention
from .softmax import SoftmaxAttention
from .vca import VisualContrastAttention

ATTENTION: dict[str, type[QKVAttention]] = {
    "softmax": SoftmaxAttention,
    "vca": VisualContrastAttention,
}

_GIVEN_BY_THE_NETWORK = {"dim", "num_heads", "layer"}


def option_defaults(name: str) -> dict[str, Any]:
    """The options of a kind and their defaults, read from its constructor; ValueError for an unknown kind."""
    if name not in ATTENTION:
        raise ValueError(f"unknown attention {name!r}; there is {', '.join(ATTENTION)}")
    parameters = inspect.signature(ATTENTION[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in _GIVEN_BY_THE_NETWORK}


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


def build_attention(name: str, dim: int, num_heads: int, *, layer: int, options: dict[str, Any]) -> QKVAttention:
    """The attention module of one block."""
    resolved = resolve_options(name, options)  # refuses an unknown name too
    return ATTENTION[name](dim, num_heads, layer=layer, **resolved)


__all__ = ["ATTENTION", "QKVAttention", "build_attention", "option_defaults", "resolve_options"]
