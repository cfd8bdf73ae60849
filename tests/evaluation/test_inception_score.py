import numpy as np
import pytest
import torch
from torch_fidelity.metric_isc import isc_features_to_metric

from dit_vca.evaluation import inception_score
from dit_vca.evaluation.inception_score import StreamingInceptionScore


def naive(logits, block):
    scores = []
    for start in range(0, len(logits), block):
        p = torch.softmax(logits[start : start + block].double(), 1).numpy()
        kl = (p * (np.log(p) - np.log(p.mean(0)))).sum(1)
        scores.append(np.exp(kl.mean()))
    return float(np.mean(scores))


def streamed(logits, batch, **options):
    stream = StreamingInceptionScore(len(logits), classes=logits.shape[1], **options)
    for start in range(0, len(logits), batch):
        part = logits[start : start + batch]
        stream.add(torch.arange(start, start + len(part)), part)
    return stream.result()


@pytest.mark.parametrize("batch", [1, 7, 100, 250])
def test_blocks_are_consecutive_and_the_short_one_counts_fully(batch):
    logits = torch.randn(250, 12, generator=torch.manual_seed(0)) * 3
    assert streamed(logits, batch, block=100) == pytest.approx(naive(logits, 100), rel=1e-10)


def test_a_permutation_says_which_block_an_image_belongs_to():
    logits = torch.randn(240, 12, generator=torch.manual_seed(0)).sort(0).values * 3
    places = torch.randperm(240, generator=torch.manual_seed(1))
    in_that_order = torch.empty_like(logits)
    in_that_order[places] = logits
    assert streamed(logits, 32, block=100, places=places) == pytest.approx(naive(in_that_order, 100), rel=1e-10)
    assert streamed(logits, 32, block=100) != pytest.approx(naive(in_that_order, 100), rel=1e-3)


def test_ten_shuffled_blocks_are_the_score_of_torch_fidelity():
    logits = torch.randn(200, 30, generator=torch.manual_seed(0)) * 3
    theirs = isc_features_to_metric(logits)["inception_score_mean"]
    places = torch.from_numpy(np.random.RandomState(2020).permutation(200).argsort())
    assert streamed(logits, 32, block=20, places=places) == pytest.approx(theirs, rel=1e-10)


def test_sums_of_several_streams_add_up_to_the_score_of_all():
    logits = torch.randn(250, 12, generator=torch.manual_seed(0)) * 3
    streams = [StreamingInceptionScore(250, classes=12, block=100) for _ in range(2)]
    for start in range(0, 250, 30):
        part = logits[start : start + 30]
        streams[start // 30 % 2].add(torch.arange(start, start + len(part)), part)
    for sums in zip(*(s.sums for s in streams), strict=True):
        sums[0].add_(sums[1])
    assert streams[0].result() == pytest.approx(naive(logits, 100), rel=1e-10)


def test_certain_and_balanced_predictions_score_the_number_of_classes():
    assert streamed(torch.eye(10).repeat(20, 1) * 1000, 16) == pytest.approx(10)


def test_equal_predictions_score_one():
    assert streamed(torch.zeros(30, 10), 16) == pytest.approx(1)


def test_no_images_have_no_score():
    with pytest.raises(ValueError, match="at least one image"):
        StreamingInceptionScore(3).result()


def test_the_block_is_that_of_the_adm_evaluator():
    assert inception_score.BLOCK == 5000
