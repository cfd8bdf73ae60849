"""Writing files whole or not at all, and what else every part asks of the system."""

import contextlib
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor


@contextlib.contextmanager
def only_process(lock: Path, refusal: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file that dies with its process; ValueError(refusal) if another process holds it and `wait` is false."""
    held = FileLock(lock)
    try:
        held.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise ValueError(refusal) from None
    with held:
        yield


def write_text(path: Path, text: str) -> None:
    """Write through a temporary file in the same folder, synced and renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def check_new(out: Path) -> None:
    """ValueError if there is something at `out` already, or no folder for it."""
    if out.exists():
        raise ValueError(f"{out} exists already: choose another name")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent} is not a folder: make it first, or choose another name")


@contextlib.contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A temporary path beside `out`, for a file or a folder, that becomes `out` if nothing is raised and is removed if so."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        for path in (temporary, *temporary.rglob("*")):
            if path.is_file():
                fsync_file(path)
        os.replace(temporary, out)
        fsync_folder(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True) if temporary.is_dir() else temporary.unlink(missing_ok=True)


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file with the permissions of any other new file; safetensors makes its own for the owner alone."""
    save_file(tensors, path, metadata=metadata)
    mask = os.umask(0)  # there is no other way to read it
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def fsync_folder(folder: Path) -> None:
    """Make the renames in a folder durable; does nothing where folders cannot be opened (Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def available_cores() -> int:
    """The number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def trim_folder(folder: Path, limit: int) -> None:
    """Remove the files that were used longest ago until the rest hold at most `limit` bytes."""
    files = sorted(((f.stat().st_mtime_ns, f.stat().st_size, f) for f in folder.iterdir()), reverse=True)
    for held, (_, _, file) in zip(itertools.accumulate(size for _, size, _ in files), files, strict=True):
        if held > limit:
            file.unlink(missing_ok=True)


def cache_folder(kind: str) -> Path:
    """This project's folder for a kind of cached file: $XDG_CACHE_HOME/dit-vca/kind, by default under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dit-vca" / kind
