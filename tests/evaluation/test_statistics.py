import numpy as np
import pytest
import torch
from torch_fidelity.metric_fid import fid_statistics_to_metric

from dit_vca.evaluation.statistics import FeatureStatistics, StreamingStatistics, frechet_at_infinity, frechet_distance


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
    assert frechet_distance(a, b).value == pytest.approx(1 + 4 + (2 - 1) ** 2 + (3 - 1) ** 2, rel=1e-13)


def test_the_distance_of_one_dimension_is_exact_where_covariances_are_singular():
    direction = torch.tensor([[3.0], [4.0]]).double() / 5
    a = FeatureStatistics(torch.zeros(2).double(), 4 * direction @ direction.T, 5)
    b = FeatureStatistics(torch.zeros(2).double(), 9 * direction @ direction.T, 5)
    assert frechet_distance(a, b).value == pytest.approx(1.0, abs=1e-12)


def test_few_images_of_many_features_are_at_no_distance_from_themselves():
    statistics = stream(torch.randn(8, 300, generator=torch.manual_seed(0)))
    assert abs(frechet_distance(statistics, statistics).value) < 1e-10 * float(statistics.covariance.trace())


def test_the_distance_agrees_with_torch_fidelity_on_full_rank():
    g = torch.manual_seed(0)
    a, b = stream(torch.randn(200, 20, generator=g)), stream(torch.randn(200, 20, generator=g) * 2 + 1)
    theirs = fid_statistics_to_metric(
        {"mu": a.mean.numpy(), "sigma": a.covariance.numpy()}, {"mu": b.mean.numpy(), "sigma": b.covariance.numpy()}, False
    )["frechet_inception_distance"]
    assert frechet_distance(a, b).value == pytest.approx(theirs, rel=1e-9)


def test_the_terms_of_a_distance_add_up_to_it():
    a = FeatureStatistics(torch.tensor([1.0, 2.0]).double(), torch.diag(torch.tensor([4.0, 9.0]).double()), 10)
    b = FeatureStatistics(torch.tensor([0.0, 0.0]).double(), torch.diag(torch.tensor([1.0, 1.0]).double()), 10)
    found = frechet_distance(a, b)
    assert tuple(found) == pytest.approx((5, 13, 2, 5), rel=1e-12)


def test_the_distance_of_singular_covariances_that_do_not_commute_is_the_analytic_one():
    """Of rank r in D dimensions, with the trace of the root from the small problem of the factors."""
    g = torch.Generator().manual_seed(0)
    factors = [torch.randn(120, r, dtype=torch.float64, generator=g) for r in (30, 50)]
    a, b = (FeatureStatistics(torch.zeros(120).double(), f @ f.T, None) for f in factors)
    cross = torch.linalg.svdvals(factors[0].T @ factors[1]).sum()
    expected = float(a.covariance.trace() + b.covariance.trace() - 2 * cross)
    assert frechet_distance(a, b).value == pytest.approx(expected, abs=1e-9)


def test_sums_of_several_streams_add_up_to_the_statistics_of_all():
    features = torch.randn(50, 6, generator=torch.manual_seed(0)) * 3 + 100
    whole, parts = stream(features), [StreamingStatistics(6), StreamingStatistics(6)]
    for i, part in enumerate(features.split(7)):
        parts[i % 2].add(part)
    for sums in zip(*(p.sums for p in parts), strict=True):
        sums[0].add_(sums[1])
    found = parts[0].result()
    assert found.num == 50 and torch.allclose(found.mean, whole.mean, rtol=1e-12)
    assert torch.allclose(found.covariance, whole.covariance, rtol=1e-9, atol=1e-10)


def test_the_bias_of_few_images_is_extrapolated_away():
    g = torch.Generator().manual_seed(0)
    features = torch.randn(4000, 20, generator=g)
    reference = FeatureStatistics(torch.zeros(20).double(), torch.eye(20).double(), None)
    found = frechet_at_infinity(features, reference, start=200, points=8)
    assert found.nums[0] == 200 and found.nums[-1] == 4000 and len(found.distances) == 8
    assert found.distances[-1] == pytest.approx(frechet_distance(stream(features, 500), reference).value, abs=1e-9)
    assert found.distances[0] > 5 * abs(found.value) and abs(found.value) < found.distances[-1]


def test_an_extrapolation_of_equal_distances_is_that_distance():
    reference = FeatureStatistics(torch.zeros(1).double(), torch.zeros(1, 1).double(), None)
    found = frechet_at_infinity(torch.ones(100, 1), reference, start=10, points=5)
    assert found.value == pytest.approx(1, abs=1e-12)


def test_an_extrapolation_needs_twice_its_smallest_number():
    reference = FeatureStatistics(torch.zeros(1).double(), torch.zeros(1, 1).double(), None)
    with pytest.raises(ValueError, match="at least 10000 images, got 9999"):
        frechet_at_infinity(torch.zeros(9999, 1), reference)
