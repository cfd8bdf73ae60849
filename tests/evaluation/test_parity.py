"""torch-fidelity's calculate_metrics and ours, with the same features, give the same numbers."""

import numpy as np
import pytest
import torch
import torch_fidelity
from torch_fidelity import feature_extractor_inceptionv3 as theirs
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY

from dit_vca.data.images import open_images
from dit_vca.evaluation.features import Extractor
from dit_vca.evaluation.images import open_image_set
from dit_vca.evaluation.inception_score import StreamingInceptionScore
from dit_vca.evaluation.kernel_distance import kernel_distance
from dit_vca.evaluation.networks import InceptionCompat, Lite0
from dit_vca.evaluation.score import features_of
from dit_vca.evaluation.statistics import StreamingStatistics, frechet_distance

CPU = torch.device("cpu")


class Images(torch.utils.data.Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return torch.from_numpy(self.images[i]).permute(2, 0, 1)


@pytest.fixture(scope="module")
def clothes():
    return open_images("fashion-mnist", None, split="test").arrays[:120]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Inception with random weights, in a file of torch-fidelity's layout."""
    path = tmp_path_factory.mktemp("weights") / "random.pth"
    with pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(0)
        patch.setattr(theirs, "load_state_dict_from_url", lambda *a, **k: {})
        patch.setattr(theirs.FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        module = theirs.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
    for norm in module.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.momentum = None  # random convolutions shrink their input: the norms take the statistics of these images
    module.train()(torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8))
    torch.save(module.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def inception(weights):
    return Extractor("inception-v3-compat", InceptionCompat(weights), "0" * 64, InceptionCompat.outputs, CPU)


def statistics(features):
    stream = StreamingStatistics(features.shape[1])
    stream.add(features)
    return stream.result()


def calculate(one, other, **options):
    return torch_fidelity.calculate_metrics(
        input1=Images(one),
        input2=Images(other),
        cuda=False,
        cache=False,
        verbose=False,
        save_cpu_ram=True,
        batch_size=20,
        **options,
    )


def test_fid_inception_score_and_kid_of_random_inception(clothes, weights, inception):
    one, other = clothes[:24], clothes[24:48]
    expected = calculate(
        one, other, fid=True, isc=True, kid=True, isc_splits=3, kid_subset_size=16, kid_subsets=5,
        feature_extractor_weights_path=str(weights),
    )  # fmt: skip
    of_one, of_other = (inception(torch.from_numpy(images)) for images in (one, other))
    fid = frechet_distance(statistics(of_one["features"]), statistics(of_other["features"])).value
    # The covariances have rank 23 of 2048, where torch-fidelity's square root loses digits; see the next test.
    assert fid == pytest.approx(expected["frechet_inception_distance"], rel=1e-4)
    places = torch.from_numpy(np.random.RandomState(2020).permutation(24).argsort())
    score = StreamingInceptionScore(24, block=8, places=places)
    score.add(torch.arange(24), of_one["logits"])
    assert score.result() == pytest.approx(expected["inception_score_mean"], rel=1e-6)
    kid = kernel_distance(of_one["features"], of_other["features"], subsets=5, subset_size=16)
    assert kid.mean == pytest.approx(expected["kernel_inception_distance_mean"], rel=1e-4, abs=1e-7)


class FirstFeatures(Lite0):
    """The first 40 features of Lite0: fewer than there are images, so that covariances have full rank."""

    WIDTH = 40

    def forward(self, input):
        return (super().forward(input)[0][:, : self.WIDTH],)


def test_fid_and_kid_of_lite0_where_covariances_have_full_rank(clothes):
    if "first-features" not in FEATURE_EXTRACTORS_REGISTRY:
        torch_fidelity.register_feature_extractor("first-features", FirstFeatures)
    one, other = clothes[:60], clothes[60:]
    expected = calculate(
        one, other, fid=True, kid=True, kid_subset_size=40, kid_subsets=5, feature_extractor="first-features",
        feature_layer_fid="1280", feature_layer_kid="1280",
    )  # fmt: skip
    extractor = Extractor("first-features", FirstFeatures(), "0" * 64, {"features": FirstFeatures.WIDTH}, CPU)
    of_one, of_other = (features_of(open_image_set(images), extractor, batch=20) for images in (one, other))
    fid = frechet_distance(statistics(of_one), statistics(of_other)).value
    assert fid == pytest.approx(expected["frechet_inception_distance"], rel=1e-6, abs=1e-6)
    kid = kernel_distance(of_one, of_other, subsets=5, subset_size=40)
    assert kid.mean == pytest.approx(expected["kernel_inception_distance_mean"], rel=1e-4)


def test_spatial_features_are_the_first_seven_channels_of_mixed_6_conv_in_nhwc_order(inception, clothes):
    kept = []
    hook = inception._module.Mixed_6d.branch1x1.register_forward_hook(lambda module, inputs, output: kept.append(output.clone()))
    spatial = inception(torch.from_numpy(clothes[:2]))["spatial"]
    hook.remove()
    (output,) = kept
    assert output.shape == (2, 192, 17, 17) and spatial.shape == (2, 2023)
    for image, row, column, channel in ((0, 0, 0, 6), (1, 3, 16, 2), (0, 16, 0, 0)):
        assert spatial[image, (row * 17 + column) * 7 + channel] == output[image, channel, row, column]
    assert float(spatial.min()) >= 0 and float(spatial.std()) > 0


def test_spatial_features_of_a_made_tensor_count_as_nhwc():
    """Channel c at row h and column w is 10000 c + 100 h + w."""
    from dit_vca.evaluation.networks import InceptionCompat

    c, h, w = torch.meshgrid(torch.arange(192), torch.arange(17), torch.arange(17), indexing="ij")
    module = InceptionCompat.__new__(InceptionCompat)
    torch.nn.Module.__init__(module)
    module._keep_spatial(None, None, (10000 * c + 100 * h + w)[None].float())
    flat = module._spatial[0]
    assert flat[:8].tolist() == [0, 10000, 20000, 30000, 40000, 50000, 60000, 1] and flat[-1] == 61616


def test_the_extractor_gives_what_its_table_says(inception, clothes):
    assert isinstance(inception, Extractor)
    outputs = inception(torch.from_numpy(clothes[:3]))
    assert {name: tuple(value.shape) for name, value in outputs.items()} == {
        "features": (3, 2048), "logits": (3, 1008), "spatial": (3, 2023),
    }  # fmt: skip
