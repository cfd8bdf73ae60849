"""The published figures of ADM's own ImageNet samples, where their files and the Inception weights are."""

import os
from pathlib import Path

import pytest

import dit_vca as product
from dit_vca.evaluation.features import find_weights

# openai/guided-diffusion, evaluations/README: admnet_guided_upsampled_imagenet256.npz
PUBLISHED = {
    "fid@50000": (3.9426, 5e-3), "sfid@50000": (6.1404, 5e-3), "is@50000": (215.84, 0.2),
    "precision-adm,k3@50000/10000": (0.8265, 2e-3), "recall-adm,k3@50000/10000": (0.5309, 2e-3),
}  # fmt: skip


def missing() -> str | None:
    for variable in ("DIT_VCA_ADM_SAMPLES", "DIT_VCA_ADM_REFERENCE"):
        if not Path(os.environ.get(variable, "")).is_file():
            return f"{variable} names no file"
    try:
        find_weights("inception-v3-compat")
    except ValueError as error:
        return str(error).split(",")[0]
    return None


@pytest.mark.skipif(missing() is not None, reason=f"published figures: {missing()}")
def test_the_published_figures_of_adm_are_reproduced():
    samples, reference = os.environ["DIT_VCA_ADM_SAMPLES"], os.environ["DIT_VCA_ADM_REFERENCE"]
    found = product.score(samples, reference, metrics=["fid", "sfid", "is", "pr"])["metrics"]
    for key, (value, tolerance) in PUBLISHED.items():
        assert found[key] == pytest.approx(value, abs=tolerance), key
