"""Fashion-MNIST (Xiao et al. 2017, MIT): the embedded subset and the complete set.

`fashion-mnist` is the first 10,000 training and the first 2,000 test images, shipped with this package, and is the
same on every machine. `fashion-mnist-full` is the complete set of 60,000 + 10,000 images, read from the Debian package
`dataset-fashion-mnist` where it is installed and by torchvision's data set class otherwise.
"""

import gzip
from importlib.resources import files
from pathlib import Path

import numpy as np

from ..files import cache_folder

CLASS_NAMES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot",
)  # fmt: skip
SIZE = 32  # 28x28 padded by two zero pixels on each side
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_SPLIT_FILES = {"train": "train", "test": "t10k"}


def load(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 32, 32, 3) uint8 and labels (N,) int64 of `name` (fashion-mnist, fashion-mnist-full), split train or test."""
    if name == "fashion-mnist":
        folder = files("dit_vca") / "assets" / "fashion_mnist"
        return _pad(*_read_pair(folder, split))
    if DEBIAN_FOLDER.is_dir():
        return _pad(*_read_pair(DEBIAN_FOLDER, split))
    return _pad(*_torchvision_pair(split))


def _read_pair(folder, split: str) -> tuple[np.ndarray, np.ndarray]:
    stem = _SPLIT_FILES[split]
    return (
        read_idx((folder / f"{stem}-images-idx3-ubyte.gz").read_bytes()),
        read_idx((folder / f"{stem}-labels-idx1-ubyte.gz").read_bytes()),
    )


def read_idx(compressed: bytes) -> np.ndarray:
    """Decode a gzip-compressed idx file of unsigned bytes (LeCun's format: 0, 0, type 8, rank, then the sizes)."""
    raw = gzip.decompress(compressed)
    if raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"not an idx file of unsigned bytes: starts with {raw[:4].hex()}, expected 000008")
    rank = raw[3]
    shape = np.frombuffer(raw, ">u4", count=rank, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)


def _torchvision_pair(split: str) -> tuple[np.ndarray, np.ndarray]:
    from torchvision.datasets import FashionMNIST

    root = cache_folder("torchvision")
    try:
        dataset = FashionMNIST(root, train=split == "train", download=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"fashion-mnist-full is neither in {DEBIAN_FOLDER} (Debian package dataset-fashion-mnist) "
            f"nor in {root}, and could not be downloaded: {error}"
        ) from error
    return dataset.data.numpy(), dataset.targets.numpy()


def _pad(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    margin = (SIZE - images.shape[1]) // 2
    padded = np.pad(images, ((0, 0), (margin, margin), (margin, margin)))
    return np.repeat(padded[..., None], 3, axis=3), labels.astype(np.int64)
