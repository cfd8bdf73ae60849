import hashlib

import pytest
import torch
from made import dit_vca

from dit_vca.evaluation import selftest as module
from dit_vca.evaluation.features import open_extractor
from dit_vca.evaluation.selftest import golden_images, selftest


def test_the_golden_images_are_what_they_were():
    digest = hashlib.sha256(b"".join(golden_images(size).numpy().tobytes() for size in module.SIZES)).hexdigest()
    assert digest == "b88087d29790bf212763b16deeccfc7195c0782ed41265fd454f031d9b814366"


def test_this_machine_computes_the_recorded_features_of_lite0():
    found = selftest(open_extractor("fd-lite0", torch.device("cpu")))
    assert found.passed and found.golden < 1e-4 and found.batch < 1e-4 and found.images_per_second > 0


def test_another_preprocessing_does_not_pass(monkeypatch):
    extractor = open_extractor("fd-lite0", torch.device("cpu"))
    extractor._module.SIZE = 127
    assert not selftest(extractor).passed


def test_the_command_prints_what_it_measured(tmp_path):
    done = dit_vca("score", "selftest", cwd=tmp_path)
    assert done.returncode == 0 and "from the recorded values" in done.stdout, done.stderr
    done = dit_vca("score", "selftest", "--protocol", "fid", cwd=tmp_path)
    assert done.returncode == 2 and "--protocol must be one of fd-lite0, inception-v3-compat" in done.stderr


@pytest.mark.parametrize("difference", [0.0, 0.01])
def test_recorded_values_that_differ_are_told(monkeypatch, difference):
    extractor = open_extractor("fd-lite0", torch.device("cpu"))
    recorded = module.golden_features(extractor)
    monkeypatch.setattr(module, "_recorded", lambda extractor: recorded * (1 + difference))
    assert selftest(extractor).passed == (difference == 0)
