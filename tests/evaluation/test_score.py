import json

import numpy as np
import pytest
import torch
import torch_fidelity
from made import dit_vca

import dit_vca as product
from dit_vca.data.archive import ImageArchive
from dit_vca.data.images import open_images
from dit_vca.evaluation import features as feature_module
from dit_vca.evaluation.class_agreement import ClassAgreement
from dit_vca.evaluation.features import INCEPTION_FILE, Lite0, open_extractor
from dit_vca.evaluation.gaussian import sample_class_gaussians
from dit_vca.evaluation.score import features_of, open_image_set, write_reference

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
    features, logits = lite0(torch.from_numpy(clothes[:2]))
    assert features.shape == (2, 1280) and logits is None
    assert torch.allclose(features, pooled, atol=1e-4)


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
    one = torch.cat([lite0(torch.from_numpy(clothes[i : i + 1]))[0] for i in range(4)])
    assert torch.allclose(one, lite0(torch.from_numpy(clothes[:4]))[0], atol=1e-4)


def test_features_are_computed_once_for_the_same_pixels(lite0, clothes, monkeypatch):
    first = features_of(open_image_set(clothes[:6]), lite0)
    monkeypatch.setattr(lite0, "_module", None)  # would fail if it were called again
    assert torch.equal(features_of(open_image_set(clothes[:6].copy()), lite0), first)
    with pytest.raises(TypeError):
        features_of(open_image_set(clothes[1:7]), lite0)


def test_torch_fidelity_computes_its_metrics_on_these_features(clothes):
    class Images(torch.utils.data.Dataset):
        def __init__(self, images):
            self.images = images

        def __len__(self):
            return len(self.images)

        def __getitem__(self, i):
            return torch.from_numpy(self.images[i]).permute(2, 0, 1)

    theirs = torch_fidelity.calculate_metrics(
        input1=Images(clothes[:20]), input2=Images(clothes[20:]), fid=True, feature_extractor="fd-lite0", feature_layer_fid="1280",
        cuda=False, cache=False, verbose=False, save_cpu_ram=True,
    )["frechet_inception_distance"]  # fmt: skip
    ours = product.score(clothes[:20], clothes[20:], metrics=["fd-lite0"])["metrics"]["fd-lite0@20"]
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_images_are_near_their_own_kind_and_far_from_noise(clothes):
    noise = np.random.default_rng(0).integers(0, 256, clothes.shape, dtype=np.uint8)
    report = product.score(clothes[:20], clothes[20:], metrics=["fd-lite0"])
    far = product.score(noise[:20], clothes[20:], metrics=["fd-lite0"])
    assert report["metrics"]["fd-lite0@20"] < far["metrics"]["fd-lite0@20"] / 1.5
    assert report["samples"]["num"] == 20 and report["reference"]["num"] == 20
    assert any("20 images" in warning for warning in report["warnings"])
    assert len(report["extractors"]["fd-lite0"]["weights_sha256"]) == 64


def test_a_written_reference_scores_as_its_images_do(tmp_path, clothes):
    np.savez(tmp_path / "images.npz", arr_0=clothes[20:])
    write_reference(str(tmp_path / "images.npz"), tmp_path / "ref.npz", metrics=["fd-lite0"], num=15)
    by_file = product.score(clothes[:20], tmp_path / "ref.npz", metrics=["fd-lite0"])
    by_images = product.score(clothes[:20], clothes[20:35], metrics=["fd-lite0"])
    assert by_file["metrics"] == pytest.approx(by_images["metrics"])
    assert by_file["reference"]["num"] == 15 and by_file["reference"]["made_from"]["num"] == 15


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
    assert report["samples"]["made_from"] == {"seed": 7} and report["reference"]["num"] == 10
    assert f"fd-lite0@5 {report['metrics']['fd-lite0@5']:.4f}" in result.stdout


class FakeInception(torch.nn.Module):
    """Two features and three logits of an image's mean colour: enough to follow the numbers by hand."""

    def forward(self, x):
        mean = x.float().mean((2, 3))
        return torch.cat([mean, torch.zeros(len(x), 2045)], 1), mean


def test_fid_and_inception_score_come_from_one_pass_in_file_order(monkeypatch, clothes):
    from dit_vca.evaluation import score as score_module
    from dit_vca.evaluation.features import Extractor
    from dit_vca.evaluation.inception_score import StreamingInceptionScore

    calls = []

    def extractor(protocol, device, inception_weights=None):
        assert protocol == "inception-v3-compat"
        made = Extractor(protocol, FakeInception(), "0" * 64, 2048, device)
        monkeypatch.setattr(
            Extractor, "__call__", lambda self, x, real=Extractor.__call__: (calls.append(len(x)), real(self, x))[1]
        )
        return made

    monkeypatch.setattr(score_module, "open_extractor", extractor)
    report = product.score(clothes[:20], clothes[20:], metrics=["fid", "is"], batch=8)
    assert sum(calls) == 40 and set(report["metrics"]) == {"fid@20", "is@20"}
    expected = StreamingInceptionScore()
    expected.add(torch.from_numpy(clothes[:20]).float().mean((1, 2)))
    assert report["metrics"]["is@20"] == pytest.approx(expected.result(), rel=1e-6)


def test_adm_statistics_serve_as_a_reference(tmp_path, monkeypatch, clothes):
    from dit_vca.evaluation import score as score_module
    from dit_vca.evaluation.features import Extractor

    monkeypatch.setattr(
        score_module, "open_extractor", lambda p, device, inception_weights=None: Extractor(p, FakeInception(), "0", 2048, device)
    )
    x = clothes[20:].astype(np.float32).mean((1, 2))
    mu, sigma = np.zeros(2048, np.float32), np.zeros((2048, 2048))
    mu[:3], sigma[:3, :3] = x.mean(0), np.cov(x.T)
    np.savez(tmp_path / "VIRTUAL.npz", mu=mu, sigma=sigma, arr_0=clothes[:2])
    by_statistics = product.score(clothes[:20], tmp_path / "VIRTUAL.npz", metrics=["fid"])["metrics"]["fid@20"]
    by_images = product.score(clothes[:20], clothes[20:], metrics=["fid"])["metrics"]["fid@20"]
    assert by_statistics == pytest.approx(by_images, rel=1e-4)


def test_inception_weights_are_checked_by_hash_before_they_are_opened(tmp_path, monkeypatch):
    file = tmp_path / INCEPTION_FILE
    file.write_bytes(b"something else")
    monkeypatch.setattr(feature_module, "InceptionCompat", lambda path: pytest.fail("opened"))
    with pytest.raises(ValueError, match="expected 6726825d"):
        open_extractor("inception-v3-compat", CPU, inception_weights=str(file))


def test_a_weight_file_that_would_run_code_is_refused_by_torch(tmp_path):
    class Runs:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    torch.save({"fc.weight": Runs()}, tmp_path / "weights.pth")
    with feature_module._safe_torch_load(), pytest.raises(Exception, match="[Ww]eights.only"):
        torch.load(tmp_path / "weights.pth", weights_only=False)


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
