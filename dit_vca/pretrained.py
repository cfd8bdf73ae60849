"""Other projects' weights to this project's and back: DiT, SiT, fast-DiT and REPA, and the DiT of diffusers.

Tensors have DiT's names here too (Peebles and Xie 2023), so all forms but diffusers' need little renaming. A file of
this project, or of an export of this project, says of itself what the others leave out.
"""

import argparse
import contextlib
import json
import math
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .attention import resolve_options
from .backbones.layers import NORM_EPS, sincos_position_embedding
from .config import AttentionConfig, Config, DataConfig, LatentConfig, ModelConfig, ObjectiveConfig, from_dict, to_dict
from .files import fsync_file, fsync_folder, sha256_of_file, write_text
from .presets import DDPM, SIT, SIZES, preset
from .runs import (
    HEADER_KEY,
    RunFolder,
    Weights,
    build_network,
    find_weights,
    objective_of,
    open_model,
    read_weights,
    write_weights,
)
from .vae import DEFAULT_SCALING_FACTOR, PIXELS, PixelCodec, open_codec

PUBLISHED = {
    "DiT-XL/2-256": "https://dl.fbaipublicfiles.com/DiT/models/DiT-XL-2-256x256.pt",
    "DiT-XL/2-512": "https://dl.fbaipublicfiles.com/DiT/models/DiT-XL-2-512x512.pt",
}
LINKED = {"SiT-XL/2-256": "https://github.com/willisma/SiT"}  # whose README links the file
DIT_LICENSE = "CC-BY-NC-4.0"

SD_VAE, SD_CHANNELS, SD_DOWNSAMPLING = "stabilityai/sd-vae-ft-", 4, 8  # -ema and -mse
OBJECTIVES = ("ddpm", "flow")
PATH_TYPES = {"linear": "linear", "gvp": "gvp", "cosine": "gvp", "vp": "vp"}  # SiT's and REPA's words
PREDICTIONS = {"velocity": "v", "v": "v", "noise": "eps", "score": "score"}
DIFFUSERS_FLOW = replace(SIT, time_scale=1000.0, data_at_1=False)  # what its flow-matching schedulers feed and expect
REPA_FLOW = replace(SIT, data_at_1=False)

EXPORT_KEY, EXPORT_RECORD = "dit_vca_export", "dit_vca.json"  # in the header of a file, and beside a folder's weights
EXPORT_FORMS = ("dit", "diffusers")
TIMES_COMPARED = (0, 250, 500, 999)
LARGEST_DRIFT = 1e-3  # of a position embedding that still counts as the fixed one; published averages drift by 1.6e-4

# diffusers' module: this project's; the embedders stand in every block there
OUTER = {"pos_embed.proj": "x_embedder.proj", "proj_out_1": "final_layer.adaLN_modulation.1", "proj_out_2": "final_layer.linear"}
BLOCK = {
    "norm1.linear": "adaLN_modulation.1", "attn1.to_out.0": "attn.proj", "ff.net.0.proj": "mlp.fc1", "ff.net.2": "mlp.fc2",
}  # fmt: skip
EMBEDDERS = {
    "norm1.emb.timestep_embedder.linear_1": "t_embedder.mlp.0", "norm1.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "norm1.emb.class_embedder.embedding_table": "y_embedder.embedding_table",
}  # fmt: skip
QKV = ("attn1.to_q", "attn1.to_k", "attn1.to_v")
WEIGHTS_NAME = "diffusion_pytorch_model"


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


def import_weights(
    ref: str, out: str | Path, *, objective: str | None = None, num_heads: int | None = None, weights: str = "ema",
    vae: str | None = None, time_freqs: str | None = None, source: str | None = None, license: str | None = None,
) -> list[str]:  # fmt: skip
    """Write the weights behind `ref` as a weight file of this project, and return lines that say what was read.

    `ref` is a published name, a file, or a folder. ValueError says what the file leaves open, or what is wrong with it.
    """
    out = Path(out)
    _check_new(out)
    if out.suffix != ".safetensors":
        raise ValueError(f"the file to write must end in .safetensors, got {out}")
    found = open_found(ref, weights, time_freqs)
    given = {"objective": objective, "num_heads": num_heads, "vae": vae, "time_freqs": time_freqs}
    if found.config is not None:
        config = _agreeing(found, given)
    else:
        config = config_of(found, objective=objective, num_heads=num_heads, vae=vae)
    objective_of(config)  # refuses a combination that a checkpoint's arguments may hold
    _check_tensors(found, config)
    source, license = source or found.source, license or found.license
    with _whole(out) as temporary:
        write_weights(temporary, found.tensors, config, step=found.step, kind=found.kind, source=source, license=license)
    return [
        *found.notes,
        _summary(out, config, found),
        f"source: {source or 'not recorded'}",
        f"license: {license or 'not known; --license records it'}",
    ]


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
    encoder_depth = len(_block_numbers(kept))
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
        dim, patch = _need(tensors, "x_embedder.proj.weight", str(folder)).shape[::3]
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


def from_diffusers(tensors: dict[str, Tensor], place: str) -> dict[str, Tensor]:
    """diffusers' names to this project's; ValueError if the embedders, which stand in every block there, are not equal."""
    ours: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        match = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", module)
        number, inner = match.groups() if match else ("", "")
        if name == "pos_embed.pos_embed":
            ours["pos_embed"] = tensor
        elif module in OUTER:
            ours[f"{OUTER[module]}.{last}"] = tensor
        elif inner in BLOCK:
            ours[f"blocks.{number}.{BLOCK[inner]}.{last}"] = tensor
        elif inner in EMBEDDERS:
            if not torch.equal(ours.setdefault(f"{EMBEDDERS[inner]}.{last}", tensor), tensor):
                raise ValueError(
                    f"{place}: {inner} of block {number} is not that of the blocks before it; a DiT has one for all blocks, so "
                    "this model (trained so by diffusers) cannot be held"
                )
        elif inner in QKV:
            parts.setdefault(f"blocks.{number}.attn.qkv.{last}", {})[inner] = tensor
        else:
            ours[name] = tensor  # unknown; named when all are compared
    for name, found in parts.items():
        if missing := [part for part in QKV if part not in found]:
            raise ValueError(f"{place}: {', '.join(missing)} missing for {name}")
        ours[name] = torch.cat([found[part] for part in QKV])
    return ours


def to_diffusers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `from_diffusers`; the position embedding, which diffusers computes, is left out."""
    theirs: dict[str, Tensor] = {}
    outer, block, embedders = ({ours: name for name, ours in table.items()} for table in (OUTER, BLOCK, EMBEDDERS))
    numbers = _block_numbers(tensors)
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if module in outer:
            theirs[f"{outer[module]}.{last}"] = tensor
        elif module in embedders:
            theirs |= {f"transformer_blocks.{i}.{embedders[module]}.{last}": tensor for i in numbers}
        elif module.startswith("blocks."):
            _, number, inner = module.split(".", 2)
            prefix = f"transformer_blocks.{number}"
            if inner == "attn.qkv":
                theirs |= {f"{prefix}.{part}.{last}": t for part, t in zip(QKV, tensor.chunk(3), strict=True)}
            else:
                theirs[f"{prefix}.{block[inner]}.{last}"] = tensor
    return theirs


def config_of(found: Found, *, objective: str | None, num_heads: int | None, vae: str | None) -> Config:
    """The config of foreign weights: sizes from shapes, the rest from the file, the options, or DiT's table of widths."""
    objective = _objective(found, objective)
    sizes = _sizes(found)
    model = ModelConfig(
        **sizes, num_heads=_heads(found, num_heads, sizes["dim"]), time_freqs=found.time_freqs,
        attention=AttentionConfig("softmax", resolve_options("softmax", {})),
    )  # fmt: skip
    latent = latent_of(vae or found.vae or f"{SD_VAE}ema", model.input_size, model.in_channels)
    recipe = preset(f"{'dit' if objective == 'ddpm' else 'sit'}-s2-softmax")
    return replace(
        recipe, preset="", model=model,
        objective=replace(DDPM, learn_variance=model.learn_sigma) if objective == "ddpm" else found.flow,
        data=DataConfig(
            name=None, image_size=latent.image_size, vae=latent.vae, flip=recipe.data.flip, latent=latent,
            class_names=[str(i) for i in range(model.num_classes)],
        ),
        sample=replace(recipe.sample, guidance_channels=found.guided_channels),
    )  # fmt: skip


def _objective(found: Found, given: str | None) -> str:
    if given is not None and given not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {given!r}")
    if given and found.objective and given != found.objective:
        raise ValueError(f"{found.place} says of itself that its objective is {found.objective}, --objective says {given}")
    if objective := given or found.objective:
        return objective
    raise ValueError(
        f"{found.place} does not say what it was trained for: files of DiT (ddpm: predicts noise) and of SiT (flow: predicts a "
        "velocity) have the same tensors; give --objective ddpm or --objective flow"
    )


def _heads(found: Found, given: int | None, dim: int) -> int:
    """Heads as the file says, as asked for, or as DiT's table has them for this width: shapes do not tell."""
    if given and found.num_heads and given != found.num_heads:
        raise ValueError(f"{found.place} says of itself that it has {found.num_heads} heads, --num_heads says {given}")
    heads = found.num_heads or given or {size["dim"]: size["num_heads"] for size in SIZES.values()}.get(dim)
    if heads is None:
        raise ValueError(
            f"{found.place} has width {dim}, whose number of heads cannot be read from the tensors: give --num_heads"
        )
    if heads < 1 or dim % heads:
        raise ValueError(f"the width {dim} of {found.place} is not divisible into {heads} heads: give another --num_heads")
    return heads


def _sizes(found: Found) -> dict[str, Any]:
    """The fields of ModelConfig that the shapes tell."""
    if any(name.startswith("transformer_blocks.") for name in found.tensors):
        raise ValueError(f"{found.place} has the names of diffusers: give the folder it is in, whose config.json is needed too")
    names = ("x_embedder.proj.weight", "pos_embed", "y_embedder.embedding_table.weight", "blocks.0.mlp.fc1.weight",
             "final_layer.linear.weight")  # fmt: skip
    patches, position, table, hidden, last = (tuple(_need(found.tensors, name, found.place).shape) for name in names)
    if len(patches) != 4 or len(position) != 3 or patches[2] != patches[3]:
        raise ValueError(f"{found.place} is no DiT: patches are embedded by {patches}, positions are {position}")
    dim, channels, patch, _ = patches
    tokens, outputs = math.isqrt(position[1]), last[0] / patch**2
    if tokens**2 != position[1] or outputs not in (channels, 2 * channels):
        raise ValueError(
            f"{found.place} is no DiT: {position[1]} tokens must be a square, {outputs:g} outputs be {channels} or {2 * channels}"
        )
    numbers = _block_numbers(found.tensors)
    return {
        "dim": dim, "depth": max(numbers) + 1, "patch_size": patch, "mlp_ratio": hidden[0] / dim,
        "learn_sigma": outputs != channels, "input_size": tokens * patch, "in_channels": channels, "num_classes": table[0] - 1,
    }  # fmt: skip


def _need(tensors: dict[str, Tensor], name: str, place: str) -> Tensor:
    if name not in tensors:
        raise ValueError(
            f"{place} has no tensor {name}: it is no DiT, or not all of one (it has {', '.join([*tensors][:4])}, ...)"
        )
    return tensors[name]


def _block_numbers(tensors: dict[str, Tensor]) -> list[int]:
    return sorted({int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})


def latent_of(vae: str, size: int, channels: int) -> LatentConfig:
    """How latents (channels, size, size) become images; the Stable Diffusion VAEs are known, others are opened."""
    if vae == PIXELS:
        latent = PixelCodec(size).latent
    elif vae.startswith(SD_VAE):
        latent = LatentConfig(vae, "", DEFAULT_SCALING_FACTOR, 0.0, SD_CHANNELS, size, SD_DOWNSAMPLING * size)
    else:
        large = 64 * size  # divisible by any VAE's downsampling
        latent = open_codec(vae, large).latent
        latent = replace(latent, size=size, image_size=size * (large // latent.size))
    if latent.channels != channels:
        raise ValueError(
            f"the network has {channels} channels, the VAE {vae!r} {latent.channels}: give the network's own with --vae "
            "(none: pixels)"
        )
    return latent


def _agreeing(found: Found, given: dict[str, Any]) -> Config:
    """The config that a file of this project, or of an export of it, has; ValueError if an option says otherwise."""
    config = found.config
    own = {
        "objective": "ddpm" if config.objective.path == "ddpm" else "flow", "num_heads": config.model.num_heads,
        "vae": config.data.latent.vae if config.data.latent else None, "time_freqs": config.model.time_freqs,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None and value != own[name]:
            raise ValueError(
                f"{found.place} was written by this project and has {name} {own[name]}, --{name} says {value}: leave it out"
            )
    return config


def _check_tensors(found: Found, config: Config) -> None:
    """ValueError names tensors that are missing, not known, or of another shape than the network's."""
    with torch.device("meta"):
        expected = build_network(config).state_dict()
    missing = [name for name in expected if name not in found.tensors]
    unknown = [name for name in found.tensors if name not in expected]
    shapes = [n for n in expected if n in found.tensors and found.tensors[n].shape != expected[n].shape]
    problems = [f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
                for what, names in (("missing", missing), ("not known", unknown)) if names]  # fmt: skip
    problems += [f"{n} is {tuple(found.tensors[n].shape)}, expected {tuple(expected[n].shape)}" for n in shapes[:2]]
    if problems:
        raise ValueError(f"{found.place} does not hold the tensors of a DiT: {'; '.join(problems)}")


def _summary(out: Path, config: Config, found: Found) -> str:
    m, latent = config.model, config.data.latent
    parameters = sum(tensor.numel() for tensor in found.tensors.values())
    return (
        f"{out}: {parameters:,} parameters, width {m.dim}, {m.depth} blocks, {m.num_heads} heads, patches of side "
        f"{m.patch_size}, latents {m.in_channels}x{m.input_size}x{m.input_size} of VAE {latent.vae if latent else 'unknown'}, "
        f"{m.num_classes} classes, {'2C' if m.learn_sigma else 'C'} outputs; {in_words(config.objective)}; time_freqs "
        f"{m.time_freqs}"
    )


def in_words(objective: ObjectiveConfig) -> str:
    """What the network is fed for a time and what it predicts."""
    learned = " and a variance" if objective.learn_variance else ""
    if objective.path == "ddpm":
        return f"path ddpm: fed the index 0 to 999, predicts {objective.target}{learned}"
    time = "1 - t" if objective.data_at_1 else "t"
    fed = time if objective.time_scale == 1 else f"{objective.time_scale:g} ({time})"
    direction = ", from noise to data" if objective.data_at_1 and objective.target == "v" else ""
    return f"path {objective.path}: fed {fed} with t = 0 at the data, predicts {objective.target}{direction}"


def export_weights(
    ref: str | Path, out: str | Path, *, to: str, weights: str = "ema", allow_time_mismatch: bool = False
) -> list[str]:
    """Write a softmax model in DiT's or diffusers' form, and return lines that say what its readers should know."""
    out = Path(out)
    _check_new(out)
    if to not in EXPORT_FORMS:
        raise ValueError(f"--to must be one of {', '.join(EXPORT_FORMS)}, got {to!r}")
    network, _, found = open_model(ref, weights)
    _check_exportable(found, to)
    mismatch = found.config.model.time_freqs != to
    if mismatch and not allow_time_mismatch:
        reader = "the code of DiT" if to == "dit" else "stock diffusers"
        raise ValueError(
            f"{found.path} has time_freqs {found.config.model.time_freqs}, {reader} "
            f"computes those of {to}, and would sample from another function: --allow-time-mismatch true writes it all the same, "
            "with the difference measured"
        )
    said = [in_words(found.config.objective)]
    if to == "dit":
        if mismatch:
            said.append(_time_line(output_differences(network, _with_time_freqs(network, found.config, to), found.config)))
        with _whole(out) as temporary:
            save_file(found.tensors, temporary, metadata={EXPORT_KEY: json.dumps(_export_record(found, out=to))})
    else:
        theirs, drift = _diffusers_model(found)
        measured = output_differences(network, lambda x, t, y: theirs(x, timestep=t, class_labels=y).sample, found.config)
        said.append(
            _time_line(measured)
            if mismatch
            else f"largest difference of outputs to diffusers' code: {max(measured.values()):.1e}"
        )
        if drift:
            said.append(f"diffusers computes the position embedding; the one in the weights differs from it by up to {drift:.1e}")
        with _whole(out) as temporary:
            theirs.save_pretrained(temporary)
            (temporary / EXPORT_RECORD).write_text(json.dumps(_export_record(found, out=to), indent=1))
            (temporary / "README.md").write_text(model_card(found, said))
    return [*said, f"{out}: {to}, from {found.path} (step {found.step}, {found.kind} weights)"]


def _check_exportable(found: Weights, to: str) -> None:
    model = found.config.model
    plain = resolve_options("softmax", {})
    if model.attention.name != "softmax" or plain | model.attention.options != plain:
        raise ValueError(
            f"{found.path} has attention {model.attention.name} {model.attention.options}; {to} knows plain softmax "
            "attention alone"
        )
    if not model.num_classes:
        raise ValueError(f"{found.path} was trained without classes; {to} needs a table of labels")
    if to == "diffusers" and model.mlp_ratio != 4:
        raise ValueError(f"{found.path} has model.mlp_ratio {model.mlp_ratio:g}; diffusers' DiT has 4")


def _export_record(found: Weights, *, out: str) -> dict[str, Any]:
    return {"to": out, "config": to_dict(found.config), "step": found.step, "kind": found.kind, **found.origin}


def _diffusers_model(found: Weights) -> tuple[nn.Module, float]:
    """diffusers' DiT with these weights, and how far its position embedding is from theirs; ValueError if it is another one."""
    from diffusers import DiTTransformer2DModel

    model = found.config.model
    fixed = sincos_position_embedding(model.dim, (model.input_size // model.patch_size,) * 2)
    drift = float((found.tensors["pos_embed"].float() - fixed).abs().max())
    if drift > LARGEST_DRIFT:
        raise ValueError(
            f"the position embedding of {found.path} differs by {drift:.2g} from the fixed one, which diffusers computes: it "
            "cannot be held there"
        )
    theirs = DiTTransformer2DModel(
        num_attention_heads=model.num_heads, attention_head_dim=model.dim // model.num_heads, in_channels=model.in_channels,
        out_channels=model.in_channels * (2 if model.learn_sigma else 1), num_layers=model.depth, sample_size=model.input_size,
        patch_size=model.patch_size, num_embeds_ada_norm=model.num_classes, norm_eps=NORM_EPS,
    )  # fmt: skip
    theirs.load_state_dict(to_diffusers(found.tensors))
    return theirs.eval().requires_grad_(False), drift


def _with_time_freqs(network: nn.Module, config: Config, time_freqs: str) -> nn.Module:
    other = build_network(replace(config, model=replace(config.model, time_freqs=time_freqs)))
    other.load_state_dict(network.state_dict())
    return other.eval().requires_grad_(False)


@torch.no_grad()
def output_differences(ours: nn.Module, theirs: Callable[..., Tensor], config: Config) -> dict[float, float]:
    """{what is fed for a time: the largest difference of the outputs}, on one random input."""
    model, objective = config.model, config.objective
    scale = 1.0 if objective.path == "ddpm" else objective.time_scale / 1000
    x = torch.randn(1, model.in_channels, model.input_size, model.input_size, generator=torch.Generator().manual_seed(0))
    found = {}
    for time in TIMES_COMPARED:
        t, y = torch.tensor([time * scale]), torch.tensor([time % model.num_classes])
        found[time * scale] = float((ours(x, t, y) - theirs(x, t, y)).abs().max())
    return found


def _time_line(measured: dict[float, float]) -> str:
    shown = ", ".join(f"{difference:.2g} at {time:g}" for time, difference in measured.items())
    return f"time frequencies differ; largest difference of outputs on a random input by what is fed for the time: {shown}"


def model_card(found: Weights, said: list[str]) -> str:
    """README.md of a diffusers folder: where the weights come from, under which licence, and how they were trained."""
    config = to_dict(found.config)
    del config["data"]["class_names"]  # a thousand lines; dit_vca.json has them
    source = found.source or "trained with dit-vca"
    if found.source and config["data"]["manifest_hash"]:
        source += ", trained further with dit-vca"
    front = ["library_name: diffusers"]
    if found.license:
        front.append(f"license: {found.license.lower() if re.fullmatch(r'[A-Za-z0-9.-]+', found.license) else 'other'}")
    lines = ["---", *front, "---", "", f"# {found.config.preset or 'DiT'}, step {found.step}, {found.kind} weights", ""]
    lines += [f"Source: {source}", "", f"License: {found.license or 'not recorded'}", "", *(f"- {line}" for line in said)]
    lines += [f"- The null class of guidance is {found.config.model.num_classes}; diffusers' DiTPipeline takes 1000.", ""]
    lines += ["```python", "from diffusers import DiTTransformer2DModel", ""]
    lines += ['model = DiTTransformer2DModel.from_pretrained(".")', "```", ""]
    lines += ["Configuration of the training:", "", "```json", json.dumps(config, indent=1), "```", ""]
    return "\n".join(lines)


def _check_new(out: Path) -> None:
    if out.exists():
        raise ValueError(f"{out} exists already: choose another name")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent} is not a folder: make it first, or choose another name")


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[Path]:
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
