"""Weights of this project in DiT's layout, and as a folder of diffusers."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import resolve_options
from ..backbones.layers import NORM_EPS, sincos_position_embedding
from ..config import Config, to_dict
from ..files import check_new, save_tensors, whole
from ..runs import Weights, build_network, open_model
from .configure import in_words
from .diffusers import to_diffusers
from .read import EXPORT_KEY, EXPORT_RECORD

EXPORT_FORMS = ("dit", "diffusers")
TIMES_COMPARED = (0, 250, 500, 999)
LARGEST_DRIFT = 1e-3  # of a position embedding that still counts as the fixed one; published averages drift by 1.6e-4


def export_weights(
    ref: str | Path, out: str | Path, *, to: str, weights: str = "ema", allow_time_mismatch: bool = False
) -> list[str]:
    """Write a softmax model in DiT's or diffusers' form, and return lines that say what its readers should know."""
    out = Path(out)
    check_new(out)
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
        with whole(out) as temporary:
            save_tensors(found.tensors, temporary, {EXPORT_KEY: json.dumps(_export_record(found, out=to))})
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
        with whole(out) as temporary:
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
