"""Images to latent shards, resumable: a shard is a range of the source's indices, written whole or absent."""

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from ..files import fsync_folder, only_process, save_tensors, write_text
from ..progress import progress
from ..vae import Codec
from .images import BadImage, ImageSource
from .latents import MANIFEST, Manifest, ShardEntry, read_manifest

SHARD_IMAGES = 10_000
ENCODE_BATCH = 64  # fixed, so that a resumed run writes the same bytes as an uninterrupted one


def encode(
    source: ImageSource, codec: Codec, folder: Path, *, flip: bool, skip_bad: bool = False, wait: bool = False
) -> Manifest:
    """Write `folder` with shards and a manifest, through `folder`.partial, which a later call with the same input continues.

    Bad images are left out and listed in the manifest if `skip_bad`; otherwise ValueError names them all once every
    image has been tried, and the shards made so far are kept for a call with `skip_bad`. If another process encodes to
    the folder: ValueError, or with `wait` what it made.
    """
    folder = Path(folder)
    taken = f"{folder} exists already: choose another folder, or remove it"
    if folder.exists():
        raise ValueError(taken)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")
    with only_process(lock, f"another process is encoding to {folder}: wait for it, or choose another folder", wait=wait):
        if folder.exists() and not wait:
            raise ValueError(taken)
        manifest = read_manifest(folder) if folder.exists() else _encode(source, codec, folder, flip, skip_bad)
        lock.unlink(missing_ok=True)  # from here on the folder itself keeps others out
    return manifest


def _encode(source: ImageSource, codec: Codec, folder: Path, flip: bool, skip_bad: bool) -> Manifest:
    partial = folder.with_name(folder.name + ".partial")
    _begin(partial, {"source": source.fingerprint, "latent": asdict(codec.latent), "flip": flip})
    entries, bad = [], []
    starts = range(0, len(source), SHARD_IMAGES)
    with progress(len(source), "image", "encode") as bar:
        for number, start in enumerate(starts):
            indices = range(start, min(start + SHARD_IMAGES, len(source)))
            record = partial / f"{number:05d}.json"
            if not record.is_file():
                _write_shard(partial, number, source, indices, codec, flip, bar)
            else:
                bar.update(len(indices))
            shard = json.loads(record.read_text())
            bad += shard.pop("bad")
            entries.append(ShardEntry(**shard))
    if bad and not skip_bad:
        raise ValueError(
            f"{len(bad)} of {len(source)} images cannot be read: {'; '.join(bad)}. "
            f"Remove them, or leave them out with: dit-vca encode IMAGES SHARDS --skip-bad true (what is encoded is kept)"
        )
    entries = [entry for entry in entries if entry.count]
    if not entries:
        raise ValueError(f"none of the {len(source)} images of {source.name} can be read")
    manifest = Manifest(
        source=source.name, fingerprint=source.fingerprint, crop=source.crop, class_names=list(source.class_names),
        latent=codec.latent, flip=flip, shards=entries, bad=bad,
    )  # fmt: skip
    write_text(partial / MANIFEST, manifest.to_json())
    for leftover in partial.glob("[0-9]*.json"):
        leftover.unlink()
    (partial / "input.json").unlink()
    fsync_folder(partial)
    partial.rename(folder)
    fsync_folder(folder.parent)
    return manifest


def _begin(partial: Path, identity: dict) -> None:
    """Continue a partial folder made from the same input; ValueError for one of another input that holds shards."""
    marker = partial / "input.json"
    if marker.is_file() and json.loads(marker.read_text()) == identity:
        return
    if any(partial.glob("[0-9]*.json")):
        raise ValueError(
            f"{partial} holds shards of other images, another VAE or other options: remove it, or choose another folder"
        )
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    write_text(marker, json.dumps(identity))


def _write_shard(partial, number, source, indices, codec, flip, bar) -> None:
    rows, mirrored, labels, bad = [], [], [], []
    for start in range(0, len(indices), ENCODE_BATCH):
        images = []
        for index in indices[start : start + ENCODE_BATCH]:
            try:
                images.append(source.load(index))
                labels.append(source.labels[index])
            except BadImage as error:
                bad.append(str(error))
                bar.write(f"bad image: {error}")
            bar.update(1)
        if images:
            batch = torch.from_numpy(np.stack(images))
            rows.append(codec.encode(batch))
            if flip and batch_needs_mirror(rows[-1]):
                mirrored.append(codec.encode(batch.flip(2)))
    name = f"{number:05d}.safetensors"
    tensors = {"labels": torch.tensor(np.array(labels), dtype=torch.int64)}
    if rows:
        tensors["stored"] = torch.cat(rows)
    if mirrored:
        tensors["stored_flip"] = torch.cat(mirrored)
    save_tensors(tensors, partial / name)
    digest = hashlib.sha256((partial / name).read_bytes()).hexdigest()
    record = {"file": name, "count": len(labels), "bytes": (partial / name).stat().st_size, "sha256": digest, "bad": bad}
    write_text(partial / f"{number:05d}.json", json.dumps(record))


def batch_needs_mirror(stored: torch.Tensor) -> bool:
    """Moments of a mirrored image are not the mirrored moments; pixels are mirrored when they are read."""
    return stored.dtype != torch.uint8
