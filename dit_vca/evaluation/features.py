"""Feature extractors: a protocol's network with the numerics it is run under, and where its weights are."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..files import sha256_of_file
from .networks import Clip, DinoV2, InceptionCompat, Lite0, lite0_path
from .protocols import CLIP, DINOV2, INCEPTION, LITE0, WEIGHT_FILES

NETWORKS = {INCEPTION: InceptionCompat, DINOV2: DinoV2, CLIP: Clip}  # whose weights the user supplies


class Extractor:
    """A protocol: its name, its outputs and their widths in the order its module gives them, and the hash of its weights."""

    def __init__(self, protocol: str, module: nn.Module, weights_sha256: str, outputs: dict[str, int], device: torch.device):
        self.protocol = protocol
        self.weights_sha256 = weights_sha256
        self.outputs = outputs
        self.device = device
        self._module = module.to(device).eval()

    @torch.inference_mode()
    def __call__(self, images: Tensor, *, first: int = 0) -> dict[str, Tensor]:
        """uint8 (B, S, S, 3) -> {"features": (B, D), ...} float32 on the host.

        FloatingPointError names the image whose outputs are not finite; `first` is the number of the batch's first.
        """
        with pinned_numerics(self.device):
            outputs = self._module(images.to(self.device).permute(0, 3, 1, 2).contiguous())
        found = {name: value.float().cpu() for name, value in zip(self.outputs, outputs, strict=True)}
        for name, value in found.items():
            if value.shape != (len(images), self.outputs[name]):
                raise RuntimeError(f"{self.protocol} gave {name} of shape {tuple(value.shape)}")
            if not bool(torch.isfinite(value).all()):
                row = int((~torch.isfinite(value).all(1)).nonzero()[0])
                raise FloatingPointError(f"{self.protocol} gave {name} that are not finite for image {first + row}")
        return found


@contextlib.contextmanager
def pinned_numerics(device: torch.device) -> Iterator[None]:
    """float32 means float32: no TF32, no autocast, no choice of convolution by timing; restored afterwards."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    pinned = [
        (cuda.matmul, "fp32_precision", "ieee"), (cudnn.conv, "fp32_precision", "ieee"), (cudnn.rnn, "fp32_precision", "ieee"),
        (cudnn, "benchmark", False), (cudnn, "deterministic", True),
    ]  # fmt: skip
    before = [getattr(module, name) for module, name, _ in pinned]
    with torch.autocast(device.type, enabled=False):
        try:
            for module, name, value in pinned:
                setattr(module, name, value)
            yield
        finally:
            for (module, name, _), value in zip(pinned, before, strict=True):
                setattr(module, name, value)


def open_extractor(protocol: str, device: torch.device, *, weights: Mapping[str, str | Path] | None = None) -> Extractor:
    """The extractor of a protocol; `weights` maps protocols to weight files that are not in torch's hub cache."""
    if protocol == LITE0:
        return _extractor(protocol, Lite0(), sha256_of_file(lite0_path()), device)
    path = find_weights(protocol, weights)
    digest, expected = sha256_of_file(path), WEIGHT_FILES[protocol].sha256
    if expected and not digest.startswith(expected):
        raise ValueError(f"{path} has SHA-256 {digest[:8]}..., expected {expected}...: the file is damaged or another one")
    return _extractor(protocol, NETWORKS[protocol](path), digest, device)


def _extractor(protocol: str, network: nn.Module, weights_sha256: str, device: torch.device) -> Extractor:
    return Extractor(protocol, network, weights_sha256, network.outputs, device)


def find_weights(protocol: str, given: Mapping[str, str | Path] | None = None) -> Path:
    """A protocol's weight file; ValueError names the file, where it is from, and where to put it."""
    file = WEIGHT_FILES[protocol]
    path = Path((given or {}).get(protocol) or Path(torch.hub.get_dir()) / "checkpoints" / file.name)
    if path.is_file():
        return path
    known = f"SHA-256 {file.sha256}..., " if file.sha256 else ""
    raise ValueError(
        f"{protocol} needs {file.name} ({known}from {file.source}), which is not at {path}: put it there, or give its path "
        f"with {file.option}; --metrics fd-lite0 needs no file"
    )
