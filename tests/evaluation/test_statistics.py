import numpy as np
import pytest
import torch
from torch_fidelity.metric_fid import fid_statistics_to_metric

from dit_vca.evaluation.statistics import FeatureStatistics, StreamingStatistics, frechet_distance


def stream(features, batch=7):
    s = StreamingStatistics(features.shape[1])
    for part in features.split(batch):
        s.add(part)
    return s.result()


def test_streamed_statistics_are_those_of_numpy():
    features = torch.randn(50, 6, generator=torch.manual_seed(0)) * 3 + 100
    found = stream(features)
    x = features.double().numpy()
    assert np.allclose(found.mean, x.mean(0), rtol=1e-13)
    assert np.allclose(found.covariance, np.cov(x.T), rtol=1e-9, atol=1e-10)
    assert found.num == 50


def test_batches_of_another_size_give_the_same_statistics():
    features = torch.randn(50, 6, generator=torch.manual_seed(0))
    a, b = stream(features, 1), stream(features, 50)
    assert torch.allclose(a.covariance, b.covariance, rtol=1e-12, atol=1e-14)


def test_one_image_has_no_covariance():
    with pytest.raises(ValueError, match="at least 2"):
        stream(torch.zeros(1, 3))


def test_the_distance_of_commuting_gaussians_is_the_closed_form():
    a = FeatureStatistics(torch.tensor([1.0, 2.0]).double(), torch.diag(torch.tensor([4.0, 9.0]).double()), 10)
    b = FeatureStatistics(torch.tensor([0.0, 0.0]).double(), torch.diag(torch.tensor([1.0, 1.0]).double()), 10)
    assert frechet_distance(a, b) == pytest.approx(1 + 4 + (2 - 1) ** 2 + (3 - 1) ** 2, rel=1e-13)


def test_the_distance_of_one_dimension_is_exact_where_covariances_are_singular():
    direction = torch.tensor([[3.0], [4.0]]).double() / 5
    a = FeatureStatistics(torch.zeros(2).double(), 4 * direction @ direction.T, 5)
    b = FeatureStatistics(torch.zeros(2).double(), 9 * direction @ direction.T, 5)
    assert frechet_distance(a, b) == pytest.approx(1.0, abs=1e-12)


def test_few_images_of_many_features_are_at_no_distance_from_themselves():
    statistics = stream(torch.randn(8, 300, generator=torch.manual_seed(0)))
    assert abs(frechet_distance(statistics, statistics)) < 1e-10 * float(statistics.covariance.trace())


def test_the_distance_agrees_with_torch_fidelity_on_full_rank():
    g = torch.manual_seed(0)
    a, b = stream(torch.randn(200, 20, generator=g)), stream(torch.randn(200, 20, generator=g) * 2 + 1)
    theirs = fid_statistics_to_metric(
        {"mu": a.mean.numpy(), "sigma": a.covariance.numpy()}, {"mu": b.mean.numpy(), "sigma": b.covariance.numpy()}, False
    )["frechet_inception_distance"]
    assert frechet_distance(a, b) == pytest.approx(theirs, rel=1e-9)
