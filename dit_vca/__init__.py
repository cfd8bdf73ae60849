"""Diffusion and flow transformers with pluggable attention."""

from importlib.metadata import PackageNotFoundError, version

from .api import Model, load, score, train
from .config import Config

try:
    __version__ = version("dit-vca")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"

__all__ = ["Config", "Model", "load", "score", "train"]
