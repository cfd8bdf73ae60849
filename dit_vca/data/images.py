"""Where images come from: a folder, or a named data set. Every source gives uint8 squares and labels by index."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from . import fashion_mnist

NAMED = ("fashion-mnist", "fashion-mnist-full")
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what Pillow raises for a file it cannot read
EXTENSIONS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}


class BadImage(ValueError):
    """An image file that cannot be read, with its path in the message."""


@dataclass(frozen=True)
class ImageSource:
    """N images of image_size x image_size pixels. `labels` (N,) int64, all 0 where `class_names` is empty.

    `fingerprint` identifies the content as far as it can be told without reading every pixel.
    """

    name: str
    image_size: int
    crop: str
    class_names: tuple[str, ...]
    labels: np.ndarray
    fingerprint: str
    arrays: np.ndarray | None = None  # (N, S, S, 3), for sources held in memory
    paths: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int) -> np.ndarray:
        """One image, uint8 (S, S, 3); BadImage if its file cannot be read."""
        if self.arrays is not None:
            return self.arrays[index]
        path = self.paths[index]
        try:
            with Image.open(path) as image:
                return np.asarray(center_crop(image.convert("RGB"), self.image_size))
        except UNREADABLE as error:
            raise BadImage(f"{path} ({' '.join(str(error).split())})") from error


def open_images(name: str, image_size: int | None, *, split: str = "train") -> ImageSource:
    """A source by name: fashion-mnist, fashion-mnist-full, or a folder of images (which needs image_size)."""
    if name in NAMED:
        return _named(name, image_size, split)
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(f"{name!r} is neither a folder nor a named data set; named are {', '.join(NAMED)}")
    if image_size is None or image_size < 1:
        raise ValueError(f"the image size must be given for the folder {name} (--image-size, or --data.image_size in training)")
    return _folder(folder, image_size)


def _named(name: str, image_size: int | None, split: str) -> ImageSource:
    if image_size not in (None, fashion_mnist.SIZE):
        raise ValueError(f"{name} has images of {fashion_mnist.SIZE} pixels, not {image_size}")
    images, labels = fashion_mnist.load(name, split)
    return ImageSource(
        name=f"{name}/{split}",
        image_size=fashion_mnist.SIZE,
        crop="pad 28 to 32",
        class_names=fashion_mnist.CLASS_NAMES,
        labels=labels,
        fingerprint=hashlib.sha256(images.tobytes()).hexdigest(),
        arrays=images,
    )


def _folder(folder: Path, image_size: int) -> ImageSource:
    """One level of sub-folders are the classes, in sorted order; no sub-folders means no classes."""
    class_folders = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    loose = _image_files(folder)
    if class_folders and loose:
        raise ValueError(
            f"{folder} holds both images ({loose[0].name}) and sub-folders ({class_folders[0].name}): "
            "put every image in a class folder, or have no sub-folders"
        )
    groups = [(p.name, _image_files(p)) for p in class_folders] or [("", loose)]
    for class_name, paths in groups:
        if not paths:
            where = folder / class_name
            raise ValueError(f"no images in {where}: expected files ending in {', '.join(sorted(EXTENSIONS))}")
    paths = tuple(path for _, group in groups for path in group)
    labels = np.repeat(np.arange(len(groups)), [len(group) for _, group in groups])
    return ImageSource(
        name=folder.name,
        image_size=image_size,
        crop="ADM centre crop",
        class_names=tuple(class_name for class_name, _ in groups if class_name),
        labels=labels.astype(np.int64),
        fingerprint=_fingerprint(folder, paths),
        paths=paths,
    )


def _image_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in EXTENSIONS and p.is_file() and not p.name.startswith("."))


def _fingerprint(folder: Path, paths: Sequence[Path]) -> str:
    """Of names and sizes, relative to the folder: the folder may move."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\n".encode())
    return digest.hexdigest()


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """The crop of ADM (Dhariwal and Nichol 2021): halve with a box filter while possible, bicubic to `size`, centre."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))
