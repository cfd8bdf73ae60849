"""Every form of file that is read: what its tensors are in this project's names, and what it says of itself."""

import argparse
import contextlib
import json
import pickle
import re
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..backbones.layers import NORM_EPS, sincos_position_embedding
from ..config import Config, ObjectiveConfig, from_dict
from ..files import sha256_of_file, write_text
from ..presets import SIT, SIZES
from ..runs import HEADER_KEY, RunFolder, Weights, find_weights, read_weights
from .diffusers import block_numbers, from_diffusers

PUBLISHED = {
    "DiT-XL/2-256": "https://dl.fbaipublicfiles.com/DiT/models/DiT-XL-2-256x256.pt",
    "DiT-XL/2-512": "https://dl.fbaipublicfiles.com/DiT/models/DiT-XL-2-512x512.pt",
}
LINKED = {"SiT-XL/2-256": "https://github.com/willisma/SiT"}  # whose README links the file
DIT_LICENSE = "CC-BY-NC-4.0"
SD_VAE = "stabilityai/sd-vae-ft-"  # -ema and -mse
PATH_TYPES = {"linear": "linear", "gvp": "gvp", "cosine": "gvp", "vp": "vp"}  # SiT's and REPA's words
PREDICTIONS = {"velocity": "v", "v": "v", "noise": "eps", "score": "score"}
DIFFUSERS_FLOW = replace(SIT, time_scale=1000.0, data_at_1=False)  # what its flow-matching schedulers feed and expect
REPA_FLOW = replace(SIT, data_at_1=False)
EXPORT_KEY, EXPORT_RECORD = "dit_vca_export", "dit_vca.json"  # in the header of an export, and beside a folder's weights
WEIGHTS_NAME = "diffusion_pytorch_model"  # diffusers'


@dataclass(frozen=True)
class Found:
    """Weights under this project's names, and what their file says of itself; None where it is silent."""

    place: str
    tensors: dict[str, Tensor]
    kind: str = "ema"
    step: int = 0
    config: Config | None = None  # of a file of this project, or of an export of it
    objective: str | None = None
    flow: ObjectiveConfig = SIT  # what the objective flow means in files of this form
    num_heads: int | None = None
    time_freqs: str = "dit"
    vae: str | None = None
    guided_channels: int | None = 3
    source: str | None = None
    license: str | None = None
    notes: tuple[str, ...] = ()


def open_found(ref: str, weights: str = "ema", time_freqs: str | None = None) -> Found:
    """Read a published name, a file or a folder of any form; `weights` chooses among those of a training checkpoint."""
    path, source, license = _local(ref)
    if path.is_dir() and (folder := _diffusers_folder(path)):
        return _read_diffusers(folder, ref, time_freqs)
    if path.is_dir() and not (RunFolder(path).exists() or (path / "state.json").is_file()):
        raise ValueError(f"{path} is no folder in diffusers' format (no config.json that names a class) and no run folder")
    if path.is_dir():
        return _own(read_weights(find_weights(path, weights)))
    if _is_safetensors(path):
        tensors, metadata = _read_safetensors(path)
        if HEADER_KEY in metadata:
            return _own(read_weights(path))
        found = Found(str(path), _plain(tensors), kind=weights)
        found = _recorded(found, metadata[EXPORT_KEY]) if EXPORT_KEY in metadata else _of_name(found, path)
    else:
        found = _of_name(_from_checkpoint(_load_pickle(path), path, weights), path)
    if found.config is None:
        found = replace(found, source=source or str(ref), license=license)
    return _without_repa(found if time_freqs is None or found.config else replace(found, time_freqs=time_freqs))


def _local(ref: str) -> tuple[Path, str | None, str | None]:
    """Where the file is, downloaded if it has a published name, its source and its licence."""
    if ref in LINKED:
        raise ValueError(
            f"{ref} is not downloaded from here: the README of {LINKED[ref]} links it; download it, then give its file in place "
            "of the name"
        )
    if ref not in PUBLISHED:
        if not Path(ref).exists():
            raise ValueError(f"{ref} does not exist: give a file, a folder, or one of {', '.join((*PUBLISHED, *LINKED))}")
        return Path(ref), None, None
    path, digest = fetch(PUBLISHED[ref])
    return path, f"{PUBLISHED[ref]} (SHA-256 {digest})", DIT_LICENSE


def fetch(address: str) -> tuple[Path, str]:
    """A file of the web in torch's hub cache, and its SHA-256, which the first download records and later uses check."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / address.rpartition("/")[2]
    record = path.with_name(f"{path.name}.sha256")
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(address, str(path))
        except OSError as error:
            raise ValueError(f"{address} cannot be downloaded ({error}): fetch it elsewhere and put it at {path}") from error
        record.unlink(missing_ok=True)
    digest = sha256_of_file(path)
    if not record.is_file():
        write_text(record, f"{digest}  {path.name}\n")
    recorded = record.read_text().split()[:1]
    if recorded != [digest]:
        raise ValueError(f"{path} is no longer the file that was downloaded (SHA-256 {digest[:12]}): remove it and {record.name}")
    return path, digest


def _own(found: Weights) -> Found:
    return Found(
        str(found.path), found.tensors, found.kind, found.step, found.config, time_freqs=found.config.model.time_freqs,
        source=found.source, license=found.license,
    )  # fmt: skip


def _recorded(found: Found, text: str) -> Found:
    """With what an export of this project wrote of itself."""
    try:
        record = json.loads(text)
        config = from_dict(record["config"])
        found = replace(found, kind=record["kind"], step=record["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{found.place}: the record of its export is damaged ({error})") from error
    return replace(
        found, config=config, time_freqs=config.model.time_freqs, source=record.get("source"), license=record.get("license")
    )


def _of_name(found: Found, path: Path) -> Found:
    """With the objective that a published file name tells, such as DiT-XL-2-256x256.pt, if nothing else did."""
    match = re.match(r"(DiT|SiT)-(S|B|L|XL)-[248]\b", path.name)
    if match is None or found.objective:
        return found
    return replace(found, objective="ddpm" if match[1] == "DiT" else "flow")


def _is_safetensors(path: Path) -> bool:
    """By its content: eight bytes of length, then a JSON object; or by its name, so that a damaged one is called so."""
    with open(path, "rb") as file:
        start = file.read(9)
    return path.suffix == ".safetensors" or start[8:] == b"{"


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file ({error}): copy it again") from error


def _load_pickle(path: Path) -> Any:
    """A PyTorch file of tensors, plain data and argparse.Namespace; ValueError for one that wants anything else."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
        wanted = re.search(r"GLOBAL (\S+)|`(?:add_)?safe_globals\(\[(\S+)\]\)`|Unsupported class (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and wanted:
            raise ValueError(
                f"{path} asks for {next(filter(None, wanted.groups()))} when it is read, which could run any code: only "
                "tensors, plain data and argparse.Namespace are read; ask for the state dict alone"
            ) from error
        raise ValueError(
            f"{path} is damaged or no PyTorch file ({' '.join(str(error).split())[:120]}): remove it and fetch it again"
        ) from error


def _from_checkpoint(loaded: Any, path: Path, weights: str) -> Found:
    """A flat state dict, or a training checkpoint {"model", "ema", "opt", "args"} of DiT, SiT, fast-DiT or REPA."""
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, expected a state dict or a training checkpoint")
    kinds = [name for name in ("ema", "model") if isinstance(loaded.get(name), dict)]
    if not kinds:
        return Found(str(path), _plain(_tensors_only(loaded, path)), kind=weights)
    if weights not in kinds:
        raise ValueError(f"{path} has no weights {weights!r}; it has {', '.join(kinds)}: choose with --weights")
    found = Found(str(path), _plain(_tensors_only(loaded[weights], path)), kind=weights, step=_step(loaded, path))
    return _with_arguments(found, loaded.get("args"))


def _tensors_only(state: dict, path: Path) -> dict[str, Tensor]:
    others = [str(name) for name, value in state.items() if not isinstance(value, Tensor)]
    if others or not state:
        shown = ", ".join(others[:5]) or "nothing"
        raise ValueError(
            f"{path} is neither a state dict nor a checkpoint with model or ema: it holds {shown}, not tensors alone"
        )
    return state


def _plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Float32 tensors without the prefixes of DistributedDataParallel and torch.compile."""
    wrappers = {"module", "_orig_mod"}
    return {".".join(p for p in name.split(".") if p not in wrappers): tensor.float() for name, tensor in state.items()}


def _step(checkpoint: dict, path: Path) -> int:
    """Optimizer steps: of the checkpoint (REPA's), of the optimizer's own count, or of the file name 0400000.pt."""
    if isinstance(checkpoint.get("steps"), int):
        return checkpoint["steps"]
    with contextlib.suppress(KeyError, TypeError, AttributeError, StopIteration, ValueError):
        return int(next(iter(checkpoint["opt"]["state"].values()))["step"])
    return int(path.stem) if path.stem.isdigit() else 0


def _with_arguments(found: Found, arguments: Any) -> Found:
    """With what a training script's arguments say: the model's family and heads, SiT's path and target, the VAE."""
    values = vars(arguments) if isinstance(arguments, argparse.Namespace) else arguments if isinstance(arguments, dict) else {}
    flow = found.flow
    for name, words, into in (("path_type", PATH_TYPES, "path"), ("prediction", PREDICTIONS, "target")):
        if (word := values.get(name)) is not None:
            if str(word).lower() not in words:
                raise ValueError(f"{found.place} was trained with {name} {word!r}; there is {', '.join(words)}")
            flow = replace(flow, **{into: words[str(word).lower()]})
    if values.get("loss_weight") and flow.target in ("eps", "score"):  # SiT's code passes over it for a velocity
        flow = replace(flow, weighting=values["loss_weight"])
    match = re.match(r"(DiT|SiT)-(S|B|L|XL)/", str(values.get("model")))
    return replace(
        found, flow=flow,
        objective=None if match is None else "ddpm" if match[1] == "DiT" else "flow",
        num_heads=SIZES[match[2].lower()]["num_heads"] if match else None,
        vae=SD_VAE + values["vae"] if values.get("vae") in ("ema", "mse") else None,
    )  # fmt: skip


def _without_repa(found: Found) -> Found:
    """Without REPA's projectors, and with its former decoder_blocks counted on from the blocks of its encoder.

    REPA (Yu et al. 2025) is a SiT that is fed t itself, t = 0 at the data, and predicts noise minus data.
    """
    projectors = [name for name in found.tensors if name.startswith("projectors.")]
    decoder = [name for name in found.tensors if name.startswith("decoder_blocks.")]
    if not projectors and not decoder:
        return found
    if found.objective == "ddpm":
        raise ValueError(f"{found.place} has REPA's projectors or decoder_blocks, which belong to a flow, not to a DiT")
    kept = {name: tensor for name, tensor in found.tensors.items() if name not in {*projectors, *decoder}}
    encoder_depth = len(block_numbers(kept))
    for name in decoder:
        _, number, rest = name.split(".", 2)
        kept[f"blocks.{int(number) + encoder_depth}.{rest}"] = found.tensors[name]
    notes = [f"dropped {len(projectors)} tensors of REPA's projectors, which only its training uses"] if projectors else []
    if decoder:
        notes.append(f"decoder_blocks follow the {encoder_depth} blocks of the encoder (REPA's former layout)")
    flow = replace(found.flow, data_at_1=REPA_FLOW.data_at_1)
    return replace(found, tensors=kept, objective="flow", flow=flow, guided_channels=None, notes=(*found.notes, *notes))


def _diffusers_folder(path: Path) -> Path | None:
    """The folder with a diffusers model's config.json: this one, or its transformer/; None if it is of another kind."""
    for folder in (path / "transformer", path):
        with contextlib.suppress(OSError, ValueError):
            if "_class_name" in json.loads((folder / "config.json").read_text()):
                return folder
    return None


def _read_diffusers(folder: Path, ref: str, time_freqs: str | None) -> Found:
    """A folder of DiTTransformer2DModel.save_pretrained, or of its predecessor Transformer2DModel with adaLN-Zero."""
    values = json.loads((folder / "config.json").read_text())
    _check_diffusers_config(values, folder)
    tensors, heads = from_diffusers(_diffusers_tensors(folder), str(folder)), values.get("num_attention_heads", 16)
    if "pos_embed" not in tensors:
        dim, patch = need(tensors, "x_embedder.proj.weight", str(folder)).shape[::3]
        side = values.get("sample_size", 32) // patch
        tensors["pos_embed"] = sincos_position_embedding(dim, (side, side))
    found = Found(str(folder), tensors, num_heads=heads, flow=DIFFUSERS_FLOW, source=str(ref))
    if (folder / EXPORT_RECORD).is_file():
        return _recorded(found, (folder / EXPORT_RECORD).read_text())
    names = f"{ref} {folder.resolve()} {values.get('_name_or_path', '')}"
    facebook = re.search(r"facebook(/|--)DiT", names) is not None
    guess = "dit" if facebook else "diffusers"
    why = "it was converted from DiT's own weights" if facebook else "diffusers' own code computes these"
    notes = [f"time_freqs {time_freqs or guess}: " + (why if time_freqs in (None, guess) else "as asked for")]
    if (eps := values.get("norm_eps", 1e-5)) != NORM_EPS:
        notes.append(f"norm_eps of the MLP's norm is {eps:g} there and {NORM_EPS:g} here: outputs differ a little")
    guided_channels = 3 if facebook else None
    return replace(
        found, time_freqs=time_freqs or guess, notes=tuple(notes), guided_channels=guided_channels,
        objective="ddpm" if facebook else None, license=DIT_LICENSE if facebook else None,
    )  # fmt: skip


def _check_diffusers_config(values: dict[str, Any], folder: Path) -> None:
    kind = values["_class_name"]
    if kind not in ("DiTTransformer2DModel", "Transformer2DModel"):
        raise ValueError(f"{folder} holds a {kind}; of diffusers' models only DiTTransformer2DModel is read")
    wanted = {"norm_type": "ada_norm_zero", "activation_fn": "gelu-approximate", "norm_elementwise_affine": False}
    for name, value in wanted.items():
        default = value if kind == "DiTTransformer2DModel" else None
        if values.get(name, default) != value:
            raise ValueError(f"{folder}/config.json has {name} {values.get(name)!r}, a DiT has {value!r}: it is another network")


def _diffusers_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of one file, or of the shards that an index lists, in float32."""
    index = folder / f"{WEIGHTS_NAME}.safetensors.index.json"
    single, pickled = folder / f"{WEIGHTS_NAME}.safetensors", folder / f"{WEIGHTS_NAME}.bin"
    if single.is_file():
        return _plain(_read_safetensors(single)[0])
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return _plain({name: t for shard in shards for name, t in _read_safetensors(folder / Path(shard).name)[0].items()})
    if pickled.is_file():
        return _plain(_tensors_only(_load_pickle(pickled), pickled))
    raise ValueError(f"{folder} has no {single.name}, no {index.name} and no {pickled.name}: the weights are missing")


def need(tensors: dict[str, Tensor], name: str, place: str) -> Tensor:
    if name not in tensors:
        raise ValueError(
            f"{place} has no tensor {name}: it is no DiT, or not all of one (it has {', '.join([*tensors][:4])}, ...)"
        )
    return tensors[name]
