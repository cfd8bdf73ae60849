"""Archives of images, `images.npz`: written in place, tile by tile, by any number of processes; read through a memory map.

An npz is a zip of `.npy` members. Ours are stored, not compressed, so every byte's place is known before the first image
exists: the file is laid out once, tiles are written at their offsets, checksums come last, and the file is renamed.
A journal of finished tiles lets a killed run go on.
"""

import io
import json
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from ..files import fsync_folder

IMAGES, LABELS = "arr_0", "arr_1"  # the names ADM's evaluator and its users know
_DOS_DATE = 1 << 5 | 1  # 1980-01-01: the bytes of a file do not depend on when it was made
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Member:
    """One stored .npy: its header, where its data begins, and how long it is."""

    name: str
    header: bytes
    local_offset: int
    data_bytes: int

    @property
    def size(self) -> int:
        return len(self.header) + self.data_bytes

    @property
    def content_offset(self) -> int:
        return self.local_offset + len(_local_header(self, 0))

    @property
    def data_offset(self) -> int:
        return self.content_offset + len(self.header)


class ImageArchive:
    """An images.npz being written: `num` images of size x size, and their labels where there are classes.

    `identity` is what the bytes depend on (weights, settings, seed): a partial file of another identity is refused.
    """

    def __init__(self, path: Path, *, num: int, size: int, labels: np.ndarray | None, identity: str):
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.num, self.size = num, size
        self._labels = labels
        self._identity = identity
        self._image_bytes = size * size * 3
        images = _member(IMAGES, (num, size, size, 3), np.uint8, 0)
        self._members = [images]
        if labels is not None:
            self._members.append(_member(LABELS, (num,), np.int64, images.content_offset + images.size))

    def begin(self) -> None:
        """Lay the file out, or keep a partial one of the same identity; call it in one process."""
        marker = self._journal("identity")
        if self.partial.exists() and self.finished_tiles():
            found = marker.read_text() if marker.is_file() else ""
            if found != self._identity:
                raise ValueError(
                    f"{self.partial} is of other settings or weights: remove it, or choose another folder with --out"
                )
            for journal in self._journals():  # a line cut short by a kill must not run into the next one
                text = journal.read_text()
                if not text.endswith("\n"):
                    os.truncate(journal, text.rfind("\n") + 1)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for stale in self.path.parent.glob(f"{self.partial.name}.*"):
            stale.unlink()
        marker.write_text(self._identity)
        with open(self.partial.with_suffix(".laying"), "wb") as file:
            for member in self._members:
                file.seek(member.local_offset)
                file.write(_local_header(member, 0) + member.header)
            last = self._members[-1]
            file.truncate(last.content_offset + last.size)
            if self._labels is not None:
                file.seek(last.data_offset)
                file.write(self._labels.astype("<i8").tobytes())
        os.replace(self.partial.with_suffix(".laying"), self.partial)

    def finished_tiles(self) -> set[int]:
        """First indices of the tiles that are on disk, by every process's journal."""
        done = set()
        for journal in self._journals():
            for line in journal.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # a line cut short by a kill does not count
                    done.add(int(line))
        return done

    def write_tiles(self, tiles: dict[int, np.ndarray], *, rank: int = 0) -> None:
        """{index of the first image: images uint8 (n, S, S, 3)}; the data is synced before the journal says so."""
        with open(self.partial, "r+b") as file:
            for start, images in tiles.items():
                expected = (len(images), self.size, self.size, 3)
                if images.dtype != np.uint8 or images.shape != expected or start + len(images) > self.num:
                    raise ValueError(
                        f"a tile must be uint8 {expected} within {self.num} images, got {images.dtype} {images.shape} at {start}"
                    )
                file.seek(self._members[0].data_offset + start * self._image_bytes)
                file.write(np.ascontiguousarray(images).data)
            file.flush()
            os.fsync(file.fileno())
        with open(self._journal(f"tiles-{rank}"), "a") as journal:
            journal.write("".join(f"{start}\n" for start in tiles))

    def first_images(self, count: int) -> np.ndarray:
        """The first images, uint8 (at most count, S, S, 3), once all tiles are there."""
        shape = (min(count, self.num), self.size, self.size, 3)
        return np.fromfile(self.partial, np.uint8, int(np.prod(shape)), offset=self._members[0].data_offset).reshape(shape)

    def finish(self) -> None:
        """Checksums, directory, sync, rename, and no journal any more; call it in one process, once all tiles are there."""
        with open(self.partial, "r+b") as file:
            directory = b""
            for member in self._members:
                crc = _crc(file, member)
                file.seek(member.local_offset)
                file.write(_local_header(member, crc))
                directory += _central_header(member, crc)
            last = self._members[-1]
            file.seek(last.content_offset + last.size)
            file.write(directory + _end_of_directory(len(self._members), len(directory), file.tell()))
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.partial, self.path)
        for journal in self.path.parent.glob(f"{self.partial.name}.*"):
            journal.unlink()
        fsync_folder(self.path.parent)

    def _journal(self, kind: str) -> Path:
        return self.path.parent / f"{self.partial.name}.{kind}"

    def _journals(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.partial.name}.tiles-*"))


def _member(name: str, shape: tuple[int, ...], dtype, offset: int) -> Member:
    buffer = io.BytesIO()
    npy.write_array_header_1_0(buffer, {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape})
    return Member(f"{name}.npy", buffer.getvalue(), offset, int(np.prod(shape)) * np.dtype(dtype).itemsize)


def _local_header(member: Member, crc: int) -> bytes:
    """A zip64 local file header (APPNOTE 4.3.7, 4.5.3), stored, sizes known."""
    name = member.name.encode()
    extra = struct.pack("<HHQQ", 1, 16, member.size, member.size)
    fixed = struct.pack(
        "<4sHHHHHIIIHH", b"PK\x03\x04", 45, 0, 0, 0, _DOS_DATE, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra)
    )
    return fixed + name + extra


def _central_header(member: Member, crc: int) -> bytes:
    name = member.name.encode()
    extra = struct.pack("<HHQQQ", 1, 24, member.size, member.size, member.local_offset)
    fixed = struct.pack(
        "<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 45, 45, 0, 0, 0, _DOS_DATE, crc, 0xFFFFFFFF, 0xFFFFFFFF,
        len(name), len(extra), 0, 0, 0, 0, 0xFFFFFFFF,
    )  # fmt: skip
    return fixed + name + extra


def _end_of_directory(count: int, size: int, offset: int) -> bytes:
    zip64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + size, 1)
    plain = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, size, 0xFFFFFFFF, 0)
    return zip64 + locator + plain


def _crc(file, member: Member) -> int:
    file.seek(member.content_offset)
    crc, left = 0, member.size
    while left:
        chunk = file.read(min(_CHUNK, left))
        crc = zlib.crc32(chunk, crc)
        left -= len(chunk)
    return crc


def read_images(path: Path, key: str = IMAGES) -> np.ndarray:
    """The images of an npz, uint8 (N, S, S, 3): a read-only memory map where the member is stored, else in memory.

    ValueError says what is wrong: no zip, truncated, another key, another type or shape.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give an npz of images (sample.py writes one)")
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if f"{key}.npy" not in names:
                raise ValueError(f"{path} has no {key}; it holds {', '.join(n.removesuffix('.npy') for n in names) or 'nothing'}")
            info = archive.getinfo(f"{key}.npy")
            images = _map_member(path, archive, info) if info.compress_type == zipfile.ZIP_STORED else _read_member(archive, info)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        size = path.stat().st_size
        raise ValueError(f"{path} is truncated or no npz file ({size} bytes; {error}): sample or copy it again") from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or images.shape[1] != images.shape[2]:
        raise ValueError(f"{path}: {key} must be uint8 of shape (N, S, S, 3), got {images.dtype} {images.shape}")
    return images


def read_array(path: Path, key: str) -> np.ndarray | None:
    """A small array of an npz (labels, statistics), or None if it has no such key; nothing is unpickled."""
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no npz file")
        with np.load(path, allow_pickle=False) as archive:
            return archive.get(key)
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, zlib.error) as error:
        raise ValueError(f"{path}: {key} cannot be read ({error})") from error


def check_checksum(path: Path, key: str = IMAGES) -> None:
    """Read a member of an npz through; ValueError if its checksum is wrong."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            while file.read(_CHUNK):
                pass
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is damaged ({error}): sample or copy it again") from error


def _map_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as file:
        version = npy.read_magic(file)
        shape, fortran, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
        header_bytes = file.tell()
    if dtype.hasobject:
        raise ValueError(f"{path} holds Python objects, which are never loaded: save the images as uint8")
    with open(path, "rb") as raw:
        raw.seek(info.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", raw.read(4))
    begin = info.header_offset + 30 + name_length + extra_length + header_bytes
    needed = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if info.file_size - header_bytes != needed or begin + needed > path.stat().st_size:
        raise ValueError(f"{path} is truncated: its header promises {needed} bytes of images")
    return np.memmap(path, dtype, "r", begin, shape, "F" if fortran else "C")


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as file:
        try:
            return npy.read_array(file, allow_pickle=False)
        except zlib.error as error:
            raise zipfile.BadZipFile(str(error)) from error


def read_rows(images: np.ndarray, start: int, stop: int) -> np.ndarray:
    """images[start:stop] in memory; of a memory map they are read from the file, so that no mapped page stays resident."""
    if not isinstance(images, np.memmap) or not images.flags.c_contiguous:
        return np.array(images[start:stop])
    stop = min(stop, len(images))
    row = images[0].size
    flat = np.fromfile(images.filename, images.dtype, (stop - start) * row, offset=images.offset + start * images[0].nbytes)
    return flat.reshape(stop - start, *images.shape[1:])


def sidecar(path: Path) -> dict:
    """What images.json beside an npz says of it; empty if there is none, or another kind of file of that name."""
    file = Path(path).with_suffix(".json")
    try:
        found = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
