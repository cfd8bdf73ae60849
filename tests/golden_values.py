"""Recorded values of reference implementations, and how closely a test must meet them."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

FOLDER = Path(__file__).parent / "golden"


def load(name: str) -> dict[str, Tensor]:
    """The tensors of golden/NAME.safetensors."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict


def metadata(name: str) -> dict:
    """The header of golden/NAME.safetensors, with its JSON values decoded."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        return {key: json.loads(text) if text[0] in "[{0123456789" else text for key, text in sorted(file.metadata().items())}


def section(name: str, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with PREFIX, without it."""
    return {key.removeprefix(prefix): value for key, value in load(name).items() if key.startswith(prefix)}


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """The largest difference is at most `tolerance` times the largest expected magnitude."""
    assert actual.shape == expected.shape
    expected = expected.double()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))
