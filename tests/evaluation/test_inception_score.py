import numpy as np
import pytest
import torch

from dit_vca.evaluation import inception_score
from dit_vca.evaluation.inception_score import StreamingInceptionScore


def naive(logits, block):
    scores = []
    for start in range(0, len(logits), block):
        p = torch.softmax(logits[start : start + block].double(), 1).numpy()
        kl = (p * (np.log(p) - np.log(p.mean(0)))).sum(1)
        scores.append(np.exp(kl.mean()))
    return float(np.mean(scores))


@pytest.mark.parametrize("batch", [1, 7, 100, 250])
def test_blocks_are_consecutive_and_the_short_one_counts_fully(monkeypatch, batch):
    monkeypatch.setattr(inception_score, "BLOCK", 100)
    logits = torch.randn(250, 12, generator=torch.manual_seed(0)) * 3
    stream = StreamingInceptionScore()
    for part in logits.split(batch):
        stream.add(part)
    assert stream.result() == pytest.approx(naive(logits, 100), rel=1e-10)


def test_certain_and_balanced_predictions_score_the_number_of_classes():
    stream = StreamingInceptionScore()
    stream.add(torch.eye(10).repeat(20, 1) * 1000)
    assert stream.result() == pytest.approx(10)


def test_equal_predictions_score_one():
    stream = StreamingInceptionScore()
    stream.add(torch.zeros(30, 10))
    assert stream.result() == pytest.approx(1)


def test_no_images_have_no_score():
    with pytest.raises(ValueError, match="at least one image"):
        StreamingInceptionScore().result()


def test_the_block_is_that_of_the_adm_evaluator():
    assert inception_score.BLOCK == 5000
