"""The protocols by name, and the weight files they need; light, for the commands list them in their help."""

from dataclasses import dataclass

INCEPTION, LITE0, DINOV2, CLIP = "inception-v3-compat", "fd-lite0", "dinov2-edm2", "clip-cmmd"  # the protocols


@dataclass(frozen=True)
class WeightFile:
    """A protocol's weights that the user supplies: `name` in torch's hub cache, or the path given with `option`.

    `sha256` is how its hash begins, None where the files in circulation differ (timm's and the authors' own); the
    hash is always recorded.
    """

    name: str
    option: str
    source: str
    sha256: str | None = None


WEIGHT_FILES = {
    INCEPTION: WeightFile(
        "weights-inception-2015-12-05-6726825d.pth", "--inception-weights", "torch-fidelity's releases", sha256="6726825d"
    ),
    DINOV2: WeightFile(
        "dinov2_vitl14_pretrain.pth", "--dinov2-weights", "facebookresearch/dinov2 or timm's vit_large_patch14_dinov2.lvd142m"
    ),
    CLIP: WeightFile(
        "clip_vitl14_336.safetensors", "--clip-weights", "timm's vit_large_patch14_clip_quickgelu_336.openai",
    ),
}  # fmt: skip
