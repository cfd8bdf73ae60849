"""Names of tensors: those of diffusers' DiT, and this project's."""

import re

import torch
from torch import Tensor

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
    numbers = block_numbers(tensors)
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


def block_numbers(tensors: dict[str, Tensor]) -> list[int]:
    return sorted({int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})
