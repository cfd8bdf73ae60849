import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn.functional import interpolate

import dit_vca as product
from dit_vca.data.images import open_images
from dit_vca.evaluation import features, networks
from dit_vca.evaluation.features import open_extractor
from dit_vca.evaluation.networks import Clip, DinoV2
from dit_vca.evaluation.score import make_reference

CPU = torch.device("cpu")


class SmallDinoV2(DinoV2):
    """The protocol on a network that is quick to make."""

    ARCHITECTURE = "vit_small_patch14_dinov2"


class SmallClip(Clip):
    ARCHITECTURE, SIZE, CLASSES = "vit_small_patch16_224", 64, 48


def made(architecture, path, **options):
    """A network of timm with random weights and norms, and its file."""
    torch.manual_seed(0)
    network = timm.create_model(architecture, **options).eval()
    for name, p in network.named_parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, 1.0 if name.endswith("weight") else 0.0, 0.1)
    save_file(network.state_dict(), path)
    return network


@pytest.fixture(scope="module")
def images():
    return torch.randint(0, 256, (3, 3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def cubic(x, a=-0.75):
    """Keys' kernel (1981) with torch's parameter."""
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def resampling(old, new, scale):
    """The matrix of a bicubic interpolation without antialiasing, borders repeated: (new, old)."""
    matrix = np.zeros((new, old))
    for i in range(new):
        centre = (i + 0.5) / scale - 0.5
        for j in range(int(np.floor(centre)) - 1, int(np.floor(centre)) + 3):
            matrix[i, min(max(j, 0), old - 1)] += cubic(centre - j)
    return torch.from_numpy(matrix).float()


def test_dinov2_positions_are_interpolated_as_the_hub_does(tmp_path):
    trained = made("vit_small_patch14_dinov2", tmp_path / "w.safetensors", num_classes=0)  # 37 x 37 positions
    found = SmallDinoV2(tmp_path / "w.safetensors").network.pos_embed
    matrix = resampling(37, 16, 16.1 / 37)
    grid = trained.pos_embed[0, 1:].unflatten(0, (37, 37))
    expected = torch.einsum("ih,jw,hwd->ijd", matrix, matrix, grid)
    assert torch.equal(found[0, 0], trained.pos_embed[0, 0])
    assert torch.allclose(found[0, 1:].unflatten(0, (16, 16)), expected, atol=1e-6)


def test_dinov2_features_are_the_class_token_of_the_image_at_224_unclamped(tmp_path, images):
    made("vit_small_patch14_dinov2", tmp_path / "w.safetensors", num_classes=0)
    network = SmallDinoV2(tmp_path / "w.safetensors").eval()
    x = interpolate(images.double(), (224, 224), mode="bicubic", antialias=True) / 255
    assert float(x.min()) < 0  # bicubic overshoots, and EDM2 keeps it
    x = (x - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    (found,) = network(images)
    assert found.shape == (3, 384) and network.outputs == {"features": 384}
    assert torch.allclose(found, network.network.forward_features(x.float())[:, 0], atol=1e-4)


def test_the_authors_file_with_its_mask_token_is_read_too(tmp_path):
    trained = made("vit_small_patch14_dinov2", tmp_path / "w.safetensors", num_classes=0)
    torch.save(trained.state_dict() | {"mask_token": torch.zeros(1, 384)}, tmp_path / "w.pth")
    one, other = (SmallDinoV2(tmp_path / name).state_dict() for name in ("w.safetensors", "w.pth"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_clip_embeddings_are_projected_and_of_length_one(tmp_path, images):
    trained = made("vit_small_patch16_224", tmp_path / "w.safetensors", img_size=64, num_classes=48)
    (embeddings,) = SmallClip(tmp_path / "w.safetensors").eval()(images)
    x = interpolate(images.float(), (64, 64), mode="bicubic", antialias=True) / 255
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    expected = trained((x - mean) / deviation)
    assert torch.allclose(embeddings, expected / expected.norm(dim=1, keepdim=True), atol=1e-5)


def test_a_file_of_another_network_is_refused(tmp_path):
    made("vit_tiny_patch16_224", tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="does not hold the weights of vit_small_patch14_dinov2"):
        SmallDinoV2(tmp_path / "w.safetensors")


class Runs:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


def test_a_weight_file_that_would_run_code_is_refused_by_torch(tmp_path):
    torch.save({"fc.weight": Runs()}, tmp_path / "weights.pth")
    with networks._safe_torch_load(), pytest.raises(Exception, match=r"[Ww]eights.only"):
        torch.load(tmp_path / "weights.pth", weights_only=False)
    torch.save({"pos_embed": Runs()}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="does not hold the weights"):
        SmallDinoV2(tmp_path / "weights.pth")


def test_dinov2_and_clip_score_and_make_references(tmp_path, monkeypatch):
    monkeypatch.setitem(features.NETWORKS, "dinov2-edm2", SmallDinoV2)
    monkeypatch.setitem(features.NETWORKS, "clip-cmmd", SmallClip)
    made("vit_small_patch14_dinov2", tmp_path / "dino.safetensors", num_classes=0)
    made("vit_small_patch16_224", tmp_path / "clip.safetensors", img_size=64, num_classes=48)
    clothes = open_images("fashion-mnist", None, split="test").arrays
    np.savez(tmp_path / "real.npz", arr_0=clothes[6:16])
    options = {
        "metrics": ["fd-dinov2", "cmmd"],
        "weights": {"dinov2-edm2": tmp_path / "dino.safetensors", "clip-cmmd": tmp_path / "clip.safetensors"},
    }
    report = product.score(clothes[:6], tmp_path / "real.npz", **options)
    assert list(report["metrics"]) == ["fd-dinov2@6", "cmmd@6/10"] and min(report["metrics"].values()) > 0
    make_reference(str(tmp_path / "real.npz"), tmp_path / "ref.npz", **options)
    again = product.score(clothes[:6], tmp_path / "ref.npz", **options)["metrics"]
    assert again == pytest.approx(report["metrics"], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "architecture", "width"),
    [("dinov2-edm2", "vit_large_patch14_dinov2", 1024), ("clip-cmmd", "vit_large_patch14_clip_quickgelu_336", 768)],
)
def test_the_networks_themselves_are_made_and_run(tmp_path, images, protocol, architecture, width):
    made(architecture, tmp_path / "w.safetensors", num_classes=768 if protocol == "clip-cmmd" else 0)
    extractor = open_extractor(protocol, CPU, weights={protocol: tmp_path / "w.safetensors"})
    found = extractor(images.permute(0, 2, 3, 1))["features"]
    assert found.shape == (3, width) and float(found.std(0).max()) > 0
