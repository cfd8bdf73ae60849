import math

import pytest
import torch
from torch_fidelity.metric_kid import kid_features_to_metric

from dit_vca.evaluation import kernel_distance as module
from dit_vca.evaluation.kernel_distance import clip_discrepancy, kernel_distance


def two_sets(m, n, dim=8):
    g = torch.Generator().manual_seed(0)
    return torch.randn(m, dim, generator=g) + 0.3, torch.randn(n, dim, generator=g)


def naive(x, y):
    x, y = x.double(), y.double()

    def kernel(a, b):
        return (a @ b.T / a.shape[1] + 1) ** 3

    m, n = len(x), len(y)
    within = [(kernel(a, a).sum() - kernel(a, a).diagonal().sum()) / (len(a) * (len(a) - 1)) for a in (x, y)]
    return float(within[0] + within[1] - 2 * kernel(x, y).sum() / (m * n))


def test_subsets_are_those_of_torch_fidelity():
    x, y = two_sets(300, 250)
    theirs = kid_features_to_metric(x, y, kid_subset_size=100, kid_subsets=20, verbose=False)
    ours = kernel_distance(x, y, subset_size=100, subsets=20)
    assert ours.mean == pytest.approx(theirs["kernel_inception_distance_mean"], rel=1e-5)
    assert ours.std == pytest.approx(theirs["kernel_inception_distance_std"], rel=1e-4)


@pytest.mark.parametrize("block", [2048, 37])
def test_the_estimate_from_all_pairs_is_the_definition(monkeypatch, block):
    monkeypatch.setattr(module, "_BLOCK", block)
    x, y = two_sets(120, 90)
    found = kernel_distance(x, y, subset_size=50, subsets=2)
    assert found.all_pairs == pytest.approx(naive(x, y), rel=1e-6)


def test_two_halves_of_one_set_are_at_no_distance_on_average():
    x = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0))
    found = kernel_distance(x[:2000], x[2000:])
    assert abs(found.all_pairs) < 0.005 < kernel_distance(x[:2000] + 0.3, x[2000:]).all_pairs


def test_a_set_smaller_than_a_subset_is_refused_by_name():
    with pytest.raises(ValueError, match="at least 1000 images in the reference, got 10"):
        kernel_distance(*two_sets(1000, 10))


@pytest.mark.parametrize("block", [2048, 37])
def test_cmmd_is_its_definition_with_the_diagonal_and_times_a_thousand(monkeypatch, block):
    monkeypatch.setattr(module, "_BLOCK", block)
    x, y = (torch.nn.functional.normalize(z, dim=1) for z in two_sets(120, 90))

    def mean_kernel(a, b):
        return sum(math.exp(-float((u - v) @ (u - v)) / 200) for u in a.double() for v in b.double()) / (len(a) * len(b))

    expected = 1000 * (mean_kernel(x, x) + mean_kernel(y, y) - 2 * mean_kernel(x, y))
    assert clip_discrepancy(x, y) == pytest.approx(expected, rel=1e-6)
    assert clip_discrepancy(x, x.clone()) == pytest.approx(0, abs=1e-9)
