import numpy as np
import pytest
import torch

from dit_vca.evaluation import precision_recall as module
from dit_vca.evaluation.precision_recall import adm_distance, exact_distance, precision_recall


def brute_force(reference, samples, k=3):
    """Straight from the definition: a ball around each point, its radius the distance to the k-th other point."""

    def inside(points, centres):
        between = ((centres[:, None].double() - centres[None].double()) ** 2).sum(-1)
        radii = between.sort(1).values[:, k]  # the first is the point itself
        return float((((points[:, None].double() - centres[None].double()) ** 2).sum(-1) <= radii).any(1).double().mean())

    return inside(samples, reference), inside(reference, samples)


def two_sets(n_reference, n_samples, dim=6, spread=0.9):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n_reference, dim, generator=g), torch.randn(n_samples, dim, generator=g) * spread + 0.2


@pytest.mark.parametrize(("rows", "columns"), [(1024, 8192), (7, 11), (50, 3)])
@pytest.mark.parametrize(("n_reference", "n_samples"), [(60, 90), (90, 41), (4, 5)])
def test_blocks_give_what_the_definition_gives(monkeypatch, rows, columns, n_reference, n_samples):
    monkeypatch.setattr(module, "_ROWS", rows)
    monkeypatch.setattr(module, "_COLUMNS", columns)
    reference, samples = two_sets(n_reference, n_samples)
    found = precision_recall(reference, samples, distance=exact_distance)
    assert tuple(found) == pytest.approx(brute_force(reference, samples))
    if n_reference > 10:
        assert 0.1 < found.recall < found.precision < 1


def test_a_collapsed_set_is_precise_and_recalls_nothing():
    reference, _ = two_sets(300, 1)
    samples = reference[:1] + 1e-3 * torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    found = precision_recall(reference, samples, distance=exact_distance)
    assert found.precision == 1 and found.recall <= 0.01


def test_distances_are_rounded_to_float16_at_every_step_in_adm_mode():
    g = torch.Generator().manual_seed(0)
    u, v = (torch.rand(n, 2048, generator=g) * 0.8 for n in (5, 7))
    found = adm_distance(u, v)
    assert torch.equal(found, found.half().float())
    a, b = u.half().numpy(), v.half().numpy()
    norm_a, norm_b = ((x * x).astype(np.float32).sum(1).astype(np.float16) for x in (a, b))
    product = (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16)
    expected = np.maximum((norm_a[:, None] - np.float16(2) * product) + norm_b, np.float16(0))
    assert expected.dtype == np.float16
    spacing = 0.25  # of float16 at the norms, about 440
    assert np.abs(found.numpy() - expected.astype(np.float32)).max() <= spacing
    assert float((found - exact_distance(u, v)).abs().max()) > 1e-3


def test_an_overflow_of_float16_is_computed_in_float32():
    u, v = torch.full((2, 100), 60.0), torch.full((3, 100), 30.0)
    assert torch.allclose(adm_distance(u, v), torch.full((2, 3), 100 * 900.0))


def test_ties_of_float16_raise_both_numbers():
    g = torch.Generator().manual_seed(0)
    reference, samples = (torch.rand(300, 2048, generator=g) * 0.8 for _ in range(2))
    rounded, exact = (precision_recall(reference, samples, distance=d) for d in (adm_distance, exact_distance))
    assert rounded.precision >= exact.precision and rounded.recall >= exact.recall


def test_too_few_images_are_refused_by_name():
    reference, samples = two_sets(3, 10)
    with pytest.raises(ValueError, match="more than 3 images in the reference, got 3"):
        precision_recall(reference, samples, distance=exact_distance)
