"""The images that are scored: an npz, a folder, a data set or an array, read a batch at a time, and looked at before they are."""

import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from PIL import Image
from torch import Tensor

from ..data.archive import check_checksum, read_array, read_images, read_rows, sidecar
from ..data.images import EXTENSIONS, NAMED, UNREADABLE, open_images
from ..files import available_cores
from ..processes import add_up, shares, together
from ..progress import progress

LOSSY = {".jpg", ".jpeg", ".webp"}
ALLOWED_DUPLICATES = 0.001  # of the images
_READ_BYTES = 1 << 26  # of images in memory while pixels are looked at


@dataclass(frozen=True)
class ImageSet:
    """`num` images of `size` x `size` pixels; `read(start, stop)` gives uint8 (n, S, S, 3). What else is known of them.

    `verify()` raises ValueError if the file they come from is damaged.
    """

    name: str
    num: int
    size: int
    read: Callable[[int, int], np.ndarray]
    labels: np.ndarray | None = None
    made_from: dict[str, Any] | None = None
    kind: str = "array"
    verify: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return self.num


def open_image_set(
    ref: str | Path | np.ndarray, *, num: int | None = None, image_size: int | None = None, allow_lossy: bool = False
) -> ImageSet:
    """The first `num` images of an npz, a folder, a named data set (NAME or NAME:test), or an array.

    A folder's images are taken as they are, and must be lossless squares of one size; with `image_size` they are
    cropped as for training (ADM's centre crop), whatever they are. ValueError if there are fewer than `num`.
    """
    if num is not None and num < 2:
        raise ValueError(f"num must be at least 2, got {num}")
    if isinstance(ref, np.ndarray):
        found = _array("array", ref)
    elif str(ref).partition(":")[0] in NAMED:
        found = _data_set(str(ref))
    elif Path(ref).is_dir():
        found = _cropped(Path(ref), image_size) if image_size else _folder(Path(ref), num, allow_lossy)
    else:
        path = Path(ref)
        images = read_images(path)
        found = ImageSet(
            str(ref), len(images), images.shape[1], lambda start, stop: read_rows(images, start, stop),
            _labels(path, len(images)), sidecar(path).get("made_from"), "npz", lambda: check_checksum(path),
        )  # fmt: skip
    if num is not None and num > len(found):
        raise ValueError(f"{found.name} holds {len(found)} images, {num} were asked for")
    wanted = len(found) if num is None else num
    if wanted < 2:
        raise ValueError(f"{found.name} holds {len(found)} images; at least 2 are needed")
    return replace(found, num=wanted, labels=None if found.labels is None else found.labels[:wanted])


def _labels(path: Path, num: int) -> np.ndarray | None:
    """The labels beside the images of an npz, (num,) int64, if that is what its arr_1 is."""
    labels = read_array(path, "arr_1")
    if labels is None or labels.shape != (num,) or labels.dtype.kind not in "iu" or labels.min() < 0:
        return None
    return labels.astype(np.int64)


def _array(name: str, images: np.ndarray) -> ImageSet:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or images.shape[1] != images.shape[2]:
        raise ValueError(f"{name}: images must be uint8 (N, S, S, 3), got {images.dtype} {images.shape}")
    return ImageSet(name, len(images), images.shape[1], lambda start, stop: np.array(images[start:stop]))


def _data_set(ref: str) -> ImageSet:
    name, _, split = ref.partition(":")
    if split not in ("", "train", "test"):
        raise ValueError(f"{ref!r}: the splits of {name} are train and test")
    source = open_images(name, None, split=split or "train")
    return replace(_array(source.name, source.arrays), labels=source.labels, kind="data set")


def _cropped(folder: Path, image_size: int) -> ImageSet:
    source = open_images(str(folder), image_size)
    labels = source.labels if source.class_names else None
    return ImageSet(
        source.name, len(source), image_size, _reader(source.load), labels, kind=f"folder, {source.crop} {image_size}"
    )


def _folder(folder: Path, num: int | None, allow_lossy: bool) -> ImageSet:
    """A folder of samples, in the order of their numbers, or of their names where these are not numbers."""
    paths = [p for p in folder.rglob("*") if p.is_file() and p.suffix.lower() in EXTENSIONS]
    if not paths:
        others = sorted({p.suffix or p.name for p in folder.rglob("*") if p.is_file()})[:5]
        raise ValueError(
            f"no images in {folder}; found {', '.join(others) or 'nothing'}, expected {', '.join(sorted(EXTENSIONS))}"
        )
    numbers = [int(p.stem) if re.fullmatch(r"\d+", p.stem) else None for p in paths]
    numbered = None not in numbers and all(p.parent == folder for p in paths)
    if numbered:
        paths = [path for _, path in sorted(zip(numbers, paths, strict=True))]
        _check_numbers(folder, sorted(numbers), num)
    else:
        paths.sort()
        if num is not None and num < len(paths):
            raise ValueError(
                f"{folder} holds {len(paths)} images, {num} were asked for, and their names are no numbers that say which: "
                "remove the others, or leave --num out"
            )
    lossy = next((p for p in paths if p.suffix.lower() in LOSSY), None)
    if lossy is not None and not allow_lossy:
        raise ValueError(
            f"{lossy} is in a lossy format, which changes the distance: save PNG or npz; --allow-lossy takes it as it is, "
            "and --image-size crops a folder of photographs"
        )
    sizes = [_checked_size(p) for p in paths[: num or None]]
    other = next((i for i, size in enumerate(sizes) if size != sizes[0]), None)
    if other is not None:
        raise ValueError(
            f"the images are of several sizes: {paths[0].name} {sizes[0][0]}x{sizes[0][1]}, {paths[other].name} "
            f"{sizes[other][0]}x{sizes[other][1]}: --image-size crops them to one"
        )
    if sizes[0][0] != sizes[0][1]:
        raise ValueError(f"{paths[0]} is {sizes[0][0]}x{sizes[0][1]}, not square: --image-size crops")

    def load(index: int) -> np.ndarray:
        try:
            with Image.open(paths[index]) as image:
                return np.asarray(image.convert("RGB"))
        except UNREADABLE as error:
            raise ValueError(f"{paths[index]} cannot be read ({' '.join(str(error).split())})") from None

    formats = "+".join(sorted({p.suffix.lower().lstrip(".") for p in paths}))
    return ImageSet(str(folder), len(paths), sizes[0][0], _reader(load), kind=f"folder of {formats}")


def _check_numbers(folder: Path, numbers: Sequence[int], num: int | None) -> None:
    if twice := [a for a, b in itertools.pairwise(numbers) if a == b]:
        raise ValueError(f"{folder} holds two images with number {twice[0]}")
    first = numbers[0]
    wanted = range(first, first + (len(numbers) if num is None else min(num, len(numbers))))
    missing = set(wanted) - set(numbers)
    if first > 1 or missing:
        gap = 0 if first > 1 else min(missing)
        raise ValueError(
            f"{folder} holds {len(numbers)} numbered images from {first} to {numbers[-1]}, and number {gap} is missing"
        )


def _checked_size(path: Path) -> tuple[int, int]:
    try:
        with Image.open(path) as image:
            # Pillow reads 16-bit colour as 8-bit; the raw mode of its decoder tells.
            size, mode = image.size, f"{image.mode} of 16 bits" if ";16" in str(image.tile) else image.mode
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read ({' '.join(str(error).split())})") from None
    if mode not in ("RGB", "L"):
        raise ValueError(f"{path} is of mode {mode}; images must be RGB or 8-bit grey: convert it, without alpha or palette")
    return size


def _reader(load: Callable[[int], np.ndarray]) -> Callable[[int, int], np.ndarray]:
    """Images one by one in a few threads (decoding releases the interpreter)."""
    pool = ThreadPoolExecutor(min(8, available_cores()))
    return lambda start, stop: np.stack(list(pool.map(load, range(start, stop))))


@dataclass(frozen=True)
class Pixels:
    """What a look at all pixels says. Digests are BLAKE2b: of the images in order, and of them sorted."""

    low: int
    high: int
    mean: float
    duplicates: int
    digest_ordered: str
    digest_sorted: str


def look_at(images: ImageSet, state: PartialState, *, allow_duplicates: bool = False) -> Pixels:
    """Read every pixel once, shared out among the processes; ValueError for images that cannot be what was meant.

    Constant images, pixels from 0 to 1, and more than 0.1 % of equal images are refused before any network sees them.
    """
    digests = torch.zeros(len(images), 2, dtype=torch.int64)
    histogram = torch.zeros(256, dtype=torch.int64)
    desc = f"look at {Path(images.name).name}"
    read = max(1, _READ_BYTES // (images.size**2 * 3))
    bar = progress(len(images), "image", desc, disable=not state.is_main_process, delay=5)
    with together(state), bar:
        if state.is_main_process:
            images.verify()
        for start, stop in shares(len(images), read, state):
            for i, image in enumerate(images.read(start, stop), start):
                histogram += torch.from_numpy(np.bincount(image.reshape(-1), minlength=256))
                digest = hashlib.blake2b(image.data if image.flags.c_contiguous else image.tobytes(), digest_size=16).digest()
                digests[i] = torch.from_numpy(np.frombuffer(digest, np.int64).copy())
            bar.update(min((stop - start) * state.num_processes, bar.total - bar.n))
    add_up((digests, histogram), state)
    found = _pixels(digests, histogram)
    if found.high == found.low:
        raise ValueError(f"{images.name}: every pixel of the {len(images)} images is {found.low}")
    if found.high <= 1:
        raise ValueError(f"{images.name}: no pixel is above 1; images are uint8 from 0 to 255, not floats from 0 to 1")
    if found.duplicates > ALLOWED_DUPLICATES * len(images) and not allow_duplicates:
        raise ValueError(
            f"{images.name}: {found.duplicates} of {len(images)} images are copies of another one, more than 0.1 %: were they "
            "sampled with one seed? --allow-duplicates scores them"
        )
    return found


def _pixels(digests: Tensor, histogram: Tensor) -> Pixels:
    of_images = [row.tobytes() for row in digests.numpy()]
    levels = histogram.nonzero().reshape(-1)
    mean = float((histogram.double() * torch.arange(256)).sum() / histogram.sum())
    return Pixels(
        int(levels[0]), int(levels[-1]), round(mean, 4), len(of_images) - len(set(of_images)),
        hashlib.blake2b(b"".join(of_images), digest_size=16).hexdigest(),
        hashlib.blake2b(b"".join(sorted(of_images)), digest_size=16).hexdigest(),
    )  # fmt: skip
