"""Shared, once a session: shards of made images, and a run trained on them."""

import os

import pytest
import torch
from made import make_images, tiny_config

torch.set_num_threads(1)
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    # Each worker, and what it starts, has its own share of the cores: threads of one do not wait for those of another.
    cores, workers = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) % workers :: workers] or cores)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Cached features and downloads of the user's are neither read nor written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("made") / "images")


@pytest.fixture(scope="session")
def shards(tmp_path_factory, images):
    """40 images of 8 x 8 pixels in two classes."""
    from dit_vca.data.encode import encode
    from dit_vca.data.prepare import open_source

    folder = tmp_path_factory.mktemp("encoded") / "shards"
    encode(*open_source(str(images), 8, "none", "cpu"), folder, flip=True)
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory, shards):
    """A finished flow run of four steps."""
    from dit_vca.training import train

    return train(tiny_config(shards), tmp_path_factory.mktemp("runs") / "flow").path
