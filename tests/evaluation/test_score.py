import hashlib
import json
import os

import numpy as np
import pytest
import torch
from made import dit_vca

import dit_vca as product
from dit_vca.data.archive import ImageArchive
from dit_vca.data.images import open_images
from dit_vca.evaluation import collect as collect_module
from dit_vca.evaluation import features as feature_module
from dit_vca.evaluation.class_agreement import ClassAgreement
from dit_vca.evaluation.features import Extractor, open_extractor
from dit_vca.evaluation.gaussian import sample_class_gaussians
from dit_vca.evaluation.images import open_image_set
from dit_vca.evaluation.networks import Lite0
from dit_vca.evaluation.precision_recall import PrecisionRecall
from dit_vca.evaluation.score import features_of, make_reference
from dit_vca.files import trim_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lite0():
    return open_extractor("fd-lite0", CPU)


@pytest.fixture(scope="module")
def clothes():
    return open_images("fashion-mnist", None, split="test").arrays[:40]


def test_lite0_is_fed_as_its_protocol_says(lite0, clothes):
    x = torch.from_numpy(clothes[:2]).permute(0, 3, 1, 2).float()
    x = torch.nn.functional.interpolate(x, (128, 128), mode="bicubic", antialias=True, align_corners=False).clamp(0, 255)
    network = Lite0().network
    pooled = network.global_pool(network.forward_features((x - 127.5) / 127.5))
    outputs = lite0(torch.from_numpy(clothes[:2]))
    assert list(outputs) == ["features"] and outputs["features"].shape == (2, 1280)
    assert torch.allclose(outputs["features"], pooled, atol=1e-4)


def test_lite0_has_learnt_to_see():
    """The weights fit the names in order: a classifier with its tensors shuffled would not be so certain."""
    from timm.data import ImageNetInfo

    assert ImageNetInfo().num_classes() == 1000
    network = Lite0().network
    stripes = np.zeros((128, 128, 3), np.uint8)
    stripes[:, ::8] = 255
    stripes[:, 1::8] = 255
    x = (torch.from_numpy(stripes).permute(2, 0, 1)[None].float() - 127.5) / 127.5
    assert torch.softmax(network(x), 1).max() > 0.3


def test_features_do_not_depend_on_the_batch(lite0, clothes):
    one = torch.cat([lite0(torch.from_numpy(clothes[i : i + 1]))["features"] for i in range(4)])
    assert torch.allclose(one, lite0(torch.from_numpy(clothes[:4]))["features"], atol=1e-4)


def test_features_are_computed_once_for_the_same_pixels(lite0, clothes, monkeypatch):
    first = features_of(open_image_set(clothes[:6]), lite0)
    monkeypatch.setattr(lite0, "_module", None)  # would fail if it were called again
    assert torch.equal(features_of(open_image_set(clothes[:6].copy()), lite0), first)
    with pytest.raises(TypeError):
        features_of(open_image_set(clothes[1:7]), lite0)


def test_images_are_near_their_own_kind_and_far_from_noise(clothes):
    noise = np.random.default_rng(0).integers(0, 256, clothes.shape, dtype=np.uint8)
    report = product.score(clothes[:20], clothes[20:], metrics=["fd-lite0"])
    far = product.score(noise[:20], clothes[20:], metrics=["fd-lite0"])
    assert report["metrics"]["fd-lite0@20"] < far["metrics"]["fd-lite0@20"] / 1.5
    assert report["samples"]["num"] == 20 and report["reference"]["images"] == 20
    assert any("20 images" in warning for warning in report["warnings"])
    assert len(report["extractors"]["fd-lite0"]["weights_sha256"]) == 64


def test_a_written_reference_scores_as_its_images_do(tmp_path, clothes):
    np.savez(tmp_path / "images.npz", arr_0=clothes[20:])
    make_reference(str(tmp_path / "images.npz"), tmp_path / "ref.npz", metrics=["fd-lite0", "pr-lite0"], num=15)
    by_file = product.score(clothes[:20], tmp_path / "ref.npz", metrics=["fd-lite0", "pr-lite0"])
    by_images = product.score(clothes[:20], clothes[20:35], metrics=["fd-lite0", "pr-lite0"])
    assert by_file["metrics"] == pytest.approx(by_images["metrics"])
    assert "precision-lite0-exact,k3@20/15" in by_file["metrics"] and "recall-lite0-adm,k3@20/15" in by_file["metrics"]
    assert by_file["reference"]["made_from"]["num"] == 15
    assert by_file["reference"]["used"]["fd-lite0 features"] == "fd_lite0_mu and fd_lite0_sigma of the file"
    assert by_images["reference"]["used"]["fd-lite0 single features"] == "15 images"


def test_the_report_copies_what_made_the_samples(tmp_path, clothes):
    archive = ImageArchive(tmp_path / "images.npz", num=6, size=32, labels=None, identity="x")
    archive.begin()
    archive.write_tiles({0: clothes[:6]})
    archive.finish()
    (tmp_path / "images.json").write_text(json.dumps({"made_from": {"seed": 7}}))
    np.savez(tmp_path / "real.npz", arr_0=clothes[20:30])
    result = dit_vca("score", "images.npz", "--ref", "real.npz", "--metrics", "fd-lite0", "--num", "5", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "metrics.json").read_text())
    assert report["samples"]["made_from"] == {"seed": 7} and report["reference"]["images"] == 10
    assert f"fd-lite0@5 {report['metrics']['fd-lite0@5']:.6g}" in result.stdout


class FakeInception(torch.nn.Module):
    """The mean colour of an image as features and logits, its first pixel as spatial features: enough to follow by hand."""

    OUTPUTS = {"features": 3, "logits": 3, "spatial": 3}  # noqa: RUF012

    def forward(self, x):
        mean = x.float().mean((2, 3))
        return mean, mean, x[:, :, 0, 0].float()


@pytest.fixture
def fake_inception(monkeypatch, request):
    """Scoring with FakeInception, of other weights in every test; gives the list of the numbers of images of its calls."""
    from dit_vca.evaluation import score as score_module

    calls, digest = [], hashlib.sha256(request.node.name.encode()).hexdigest()
    real = Extractor.__call__
    monkeypatch.setattr(Extractor, "__call__", lambda self, x, **k: (calls.append(len(x)), real(self, x, **k))[1])
    monkeypatch.setattr(
        score_module, "open_extractor",
        lambda protocol, device, weights=None: Extractor(protocol, FakeInception(), digest, FakeInception.OUTPUTS, device),
    )  # fmt: skip
    return calls


def test_all_metrics_of_an_extractor_come_from_one_pass(fake_inception, clothes):
    report = product.score(clothes[:20], clothes[20:], metrics=["fid", "is", "sfid", "pr"], batch=8)
    assert sum(fake_inception) == 40
    assert list(report["metrics"]) == [
        "fid@20", "is@20", "is-permuted@20", "sfid@20", "precision-adm,k3@20/20", "recall-adm,k3@20/20",
        "precision-exact,k3@20/20", "recall-exact,k3@20/20",
    ]  # fmt: skip
    x, y = (clothes[part].astype(np.float64).mean((1, 2)) for part in (slice(20), slice(20, 40)))
    means, covariances = [z.mean(0) for z in (x, y)], [np.cov(z.T) for z in (x, y)]
    detail = report["details"]["fid@20"]
    assert detail["mean_term"] == pytest.approx(((means[0] - means[1]) ** 2).sum(), rel=1e-6)
    assert detail["trace_a"] == pytest.approx(np.trace(covariances[0]), rel=1e-6)
    assert report["metrics"]["sfid@20"] == pytest.approx(0, abs=1e-9)  # the first pixels are all black


def test_images_sorted_by_class_are_told_by_their_two_inception_scores(fake_inception, clothes, monkeypatch):
    monkeypatch.setattr("dit_vca.evaluation.inception_score.BLOCK", 5)
    light = clothes.astype(np.float64).mean((1, 2, 3)).argsort()
    colours = clothes[light] // np.array([1, 2, 4], np.uint8)
    by_order = product.score(colours, None, metrics=["is"])["metrics"]
    assert set(by_order) == {"is@40", "is-permuted@40"}


def test_adm_statistics_serve_as_a_reference_and_its_images_for_precision(tmp_path, fake_inception, clothes):
    x = clothes[20:].astype(np.float32).mean((1, 2))
    pixel = clothes[20:, 0, 0].astype(np.float32)
    np.savez(
        tmp_path / "VIRTUAL.npz", mu=x.mean(0), sigma=np.cov(x.T), mu_s=pixel.mean(0)[None], sigma_s=np.cov(pixel.T),
        arr_0=clothes[30:],
    )  # fmt: skip
    by_statistics = product.score(clothes[:20], tmp_path / "VIRTUAL.npz", metrics=["fid", "sfid", "pr"])["metrics"]
    by_images = product.score(clothes[:20], clothes[20:], metrics=["fid", "sfid"])["metrics"]
    by_part = product.score(clothes[:20], clothes[30:], metrics=["pr"])["metrics"]
    assert by_statistics == pytest.approx(by_images | by_part, rel=1e-4, abs=1e-6)


def test_statistics_alone_cannot_give_precision(tmp_path, fake_inception, clothes):
    np.savez(tmp_path / "ref.npz", mu=np.zeros(3), sigma=np.eye(3))
    with pytest.raises(ValueError, match=r"lacks inception_features, which pr would need: make a reference"):
        product.score(clothes[:20], tmp_path / "ref.npz", metrics=["pr"])
    with pytest.raises(ValueError, match=r"lacks mu_s, sigma_s"):
        product.score(clothes[:20], tmp_path / "ref.npz", metrics=["fid", "sfid"])
    np.savez(tmp_path / "part.npz", mu=np.zeros(3), sigma=np.eye(3), arr_0=clothes[20:])  # the images are not all of its data
    with pytest.raises(ValueError, match=r"lacks mu_s, sigma_s"):
        product.score(clothes[:20], tmp_path / "part.npz", metrics=["fid", "sfid"])


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_of_no_images_is_refused_and_leaves_no_features(fake_inception, clothes, batch):
    with pytest.raises(ValueError, match=f"batch must be at least 1, got {batch}"):
        product.score(clothes[:20], clothes[20:], metrics=["fid"], batch=batch)
    assert product.score(clothes[:20], clothes[20:], metrics=["fid"])["metrics"]["fid@20"] > 0


def test_a_failed_pass_leaves_no_features_behind(fake_inception, clothes, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def fails(self, x):
        calls.append(len(x))
        if len(calls) == 3:
            raise OSError("the disk went away")
        return x.float().mean((2, 3)), x.float().mean((2, 3)), x[:, :, 0, 0].float()

    monkeypatch.setattr(FakeInception, "forward", fails)
    with pytest.raises(OSError, match="went away"):
        product.score(clothes[:20], clothes[20:], metrics=["fid"], batch=8)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_the_same_images_in_another_order_are_no_reference(fake_inception, clothes):
    with pytest.raises(ValueError, match="hold the same images"):
        product.score(clothes[:20], clothes[19::-1].copy(), metrics=["fid"])


def test_matrix_products_of_a_score_do_not_follow_the_precision_of_the_process(fake_inception, clothes, monkeypatch):
    seen = []
    from dit_vca.evaluation import score as score_module

    monkeypatch.setattr(
        score_module, "precision_recall",
        lambda *a, **k: (seen.append(torch.backends.cuda.matmul.fp32_precision), PrecisionRecall(0.5, 0.5))[1],
    )  # fmt: skip
    torch.set_float32_matmul_precision("high")
    try:
        product.score(clothes[:20], clothes[20:], metrics=["pr"])
        assert seen == ["ieee", "ieee"] and torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("mu", "sigma", "message"),
    [(np.zeros(3), np.diag([1.0, 1, np.nan]), "NaN or infinity"), (np.zeros(3), np.triu(np.ones((3, 3))), "not symmetric"),
     (np.zeros(3), np.diag([1.0, 1, -1]), "eigenvalue of -1"), (np.zeros(4), np.eye(4), r"have 4 and \(4, 4\) entries")],
)  # fmt: skip
def test_statistics_that_cannot_be_are_refused(tmp_path, fake_inception, clothes, mu, sigma, message):
    np.savez(tmp_path / "ref.npz", mu=mu, sigma=sigma)
    with pytest.raises(ValueError, match=message):
        product.score(clothes[:20], tmp_path / "ref.npz", metrics=["fid"])


def test_a_reference_of_other_weights_is_refused(tmp_path, fake_inception, clothes):
    provenance = np.array(json.dumps({"weights_sha256": {"inception-v3-compat": "1" * 64}}))
    np.savez(tmp_path / "ref.npz", mu=np.zeros(3), sigma=np.eye(3), provenance=provenance)
    with pytest.raises(ValueError, match="made with other weights"):
        product.score(clothes[:20], tmp_path / "ref.npz", metrics=["fid"])


def test_features_that_are_not_finite_are_told(fake_inception, clothes, monkeypatch):
    monkeypatch.setattr(
        FakeInception, "forward", lambda self, x: (x.float().mean((2, 3)) / 0, x.float().mean((2, 3)), x[:, :, 0, 0])
    )
    with pytest.raises(FloatingPointError, match="features that are not finite"):
        product.score(clothes[:20], clothes[20:], metrics=["fid"])


def test_labels_and_pixels_of_the_samples_are_in_the_report(tmp_path, clothes):
    np.savez(tmp_path / "images.npz", arr_0=clothes[:10], arr_1=np.arange(10) % 3)
    report = product.score(tmp_path / "images.npz", clothes[20:], metrics=["fd-lite0"])
    assert report["samples"]["labels"] == {"classes": 3, "min": 3, "max": 4, "balanced": True}
    assert report["samples"]["pixels"]["high"] == clothes[:10].max() and report["samples"]["kind"] == "npz"


def test_inception_weights_are_checked_by_hash_before_they_are_opened(tmp_path, monkeypatch):
    file = tmp_path / "weights.pth"
    file.write_bytes(b"something else")
    monkeypatch.setitem(feature_module.NETWORKS, "inception-v3-compat", lambda path: pytest.fail("opened"))
    with pytest.raises(ValueError, match="expected 6726825d"):
        open_extractor("inception-v3-compat", CPU, weights={"inception-v3-compat": file})


def test_the_cache_of_features_has_a_limit(monkeypatch, tmp_path, clothes):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(collect_module, "CACHE_BYTES", 3 * 10 * 1280 * 4)
    for start in (0, 10, 20, 0):
        product.score(clothes[start : start + 10], clothes[30:], metrics=["fd-lite0"])
    assert len(list((tmp_path / "dit-vca" / "features").iterdir())) == 3


def test_what_was_used_longest_ago_leaves_a_full_folder_first(tmp_path):
    for name, used in (("old", 1), ("again", 3), ("new", 2), ("newest", 4)):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (used, used))
    trim_folder(tmp_path, 25)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "newest"]


def test_class_agreement_is_the_share_of_images_found_in_their_class():
    rng = np.random.default_rng(0)
    labels = np.arange(300) % 3
    features = rng.normal(size=(300, 8)) + 6 * np.eye(8)[labels]
    agreement = ClassAgreement(features, labels)
    assert agreement(features, labels) > 0.95
    assert agreement(features, (labels + 1) % 3) < 0.05


def test_class_gaussians_have_the_mean_and_the_spread_of_their_class():
    rng = np.random.default_rng(0)
    labels = np.arange(400) % 2
    images = np.clip(rng.normal(120, 12, (400, 2, 2, 3)) + 60 * labels[:, None, None, None], 0, 255).astype(np.uint8)
    wanted = np.arange(600) % 2
    drawn = sample_class_gaussians(images, labels, wanted, seed=0)
    for label in (0, 1):
        real, made = images[labels == label].astype(float), drawn[wanted == label].astype(float)
        assert np.allclose(made.mean(0), real.mean(0), atol=3)
        assert np.allclose(made.std(0), real.std(0), atol=3)
    assert np.array_equal(drawn[:5], sample_class_gaussians(images, labels, wanted[:5], seed=0))
