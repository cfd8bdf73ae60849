"""Backbones by name."""

from .dit import DiT

BACKBONES = {"dit": DiT}
