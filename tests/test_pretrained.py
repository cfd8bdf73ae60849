import argparse
import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from diffusers import DiTTransformer2DModel
from diffusers.models.embeddings import Timesteps
from golden_values import metadata, section
from made import dit_vca, dit_vca_forked, equal_state, tiny_config, tree
from safetensors.torch import load_file, save_file

from dit_vca.backbones.dit import DiT
from dit_vca.backbones.layers import TimestepEmbedder, sincos_position_embedding
from dit_vca.pretrained import export_weights, import_weights
from dit_vca.pretrained.diffusers import to_diffusers
from dit_vca.pretrained.read import DIT_LICENSE, PUBLISHED, fetch
from dit_vca.runs import RunFolder, build_network, open_model, read_weights, write_weights
from dit_vca.sampling import sample_to_folder
from dit_vca.training import train
from dit_vca.training.loop import _load_initial

HEADS, CLASSES = 16, 10
SIZES = {"input_size": 8, "patch_size": 2, "in_channels": 4, "dim": 64, "depth": 3, "num_heads": HEADS, "num_classes": CLASSES}
TOLD = {"num_heads": HEADS, "vae": "embedded"}  # of what no file of this size says


def awake(network: torch.nn.Module) -> torch.nn.Module:
    """With every parameter but the position embedding random: zeros would hide what is exchanged."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        if name != "pos_embed":
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return network.eval().requires_grad_(False)


def original(**changes) -> DiT:
    """The network of DiT's layout whose files are read; tests/backbones compares it with recorded values of DiT."""
    network = awake(DiT(**{**SIZES, "learn_sigma": True, **changes}))
    network.pos_embed += 1e-4 * torch.randn(network.pos_embed.shape, generator=torch.Generator().manual_seed(2))
    return network


def of_diffusers(**changes) -> DiTTransformer2DModel:
    """A random DiT of diffusers, with one embedder for all blocks as a converted DiT has."""
    sizes = {"num_attention_heads": HEADS, "attention_head_dim": 4, "out_channels": 8, "num_layers": 3, "sample_size": 8,
             "patch_size": 2, "num_embeds_ada_norm": CLASSES, "norm_eps": 1e-6}  # fmt: skip
    model = awake(DiTTransformer2DModel(**{**sizes, **changes}))
    for block in model.transformer_blocks[1:]:
        block.norm1.emb.load_state_dict(model.transformer_blocks[0].norm1.emb.state_dict())
    return model


def output(network, times=(0.0, 250.0, 500.0, 999.0), size: int = 8) -> torch.Tensor:
    x = torch.randn(len(times), 4, size, size, generator=torch.Generator().manual_seed(3))
    t, y = torch.tensor(times), torch.arange(len(times)) + CLASSES - 3  # the last is the null class
    with torch.no_grad():
        if isinstance(network, DiTTransformer2DModel):
            return network(x, timestep=t, class_labels=y).sample
        return network(x, t, y)


@dataclass
class Form:
    """A written form: where, what it must be read as, and which options that needs."""

    path: Path
    network: torch.nn.Module
    options: dict
    path_kind: str = "ddpm"
    data_at_1: bool = False
    says: str = ""


def write_flat(folder, network=None, name="weights.pt", **options):
    network = network or original()
    (save_file if name.endswith("safetensors") else torch.save)(network.state_dict(), folder / name)
    return Form(folder / name, network, {**TOLD, "objective": "ddpm", **options})


def write_checkpoint(folder, arguments, *, prefix="", changes=None, extra=None, name="0000500.pt", **form):
    network = original(**(changes or {}))
    state = {prefix + key: tensor for key, tensor in network.state_dict().items()}
    state |= extra or {}
    other = {key: tensor + 1 for key, tensor in state.items()}
    checkpoint = {"model": other, "ema": state, "opt": {"state": {0: {"step": torch.tensor(500.0)}}, "param_groups": []}}
    torch.save(checkpoint | ({"args": argparse.Namespace(**arguments)} if arguments else {}), folder / name)
    return Form(folder / name, network, form.pop("options", {"vae": "embedded"}), **form)


def write_repa(folder, *, legacy=False):
    projectors = {f"projectors.0.{i}.weight": torch.ones(4, 4) for i in (0, 2, 4)}
    form = write_checkpoint(
        folder, {"model": "SiT-XL/2", "path_type": "linear", "prediction": "v"}, changes={"learn_sigma": False},
        extra=projectors, path_kind="linear", says="dropped 3 tensors of REPA's projectors",
    )  # fmt: skip
    if legacy:
        checkpoint = torch.load(form.path, weights_only=False)
        for kind in ("model", "ema"):
            checkpoint[kind] = {k.replace("blocks.2.", "decoder_blocks.0."): t for k, t in checkpoint[kind].items()}
        torch.save(checkpoint, form.path)
        form.says = "decoder_blocks follow the 2 blocks of the encoder"
    return form


def write_diffusers(folder, *, inside=".", layout="one", **changes):
    model = of_diffusers(**changes)
    model.save_pretrained(folder / "published" / inside, max_shard_size="200KB" if layout == "shards" else "10GB")
    one = folder / "published" / inside / "diffusion_pytorch_model.safetensors"
    if layout == "bin":
        torch.save(load_file(one), one.with_suffix(".bin"))
        one.unlink()
    return Form(folder / "published", model, {"objective": "ddpm", "vae": "embedded"}, says="time_freqs diffusers")


def write_own(folder, *, exported=""):
    form = write_flat(folder)
    import_weights(str(form.path), folder / "own.safetensors", **form.options)
    if exported:
        mismatch = exported == "diffusers"
        export_weights(folder / "own.safetensors", folder / "out", to=exported, allow_time_mismatch=mismatch)
    return Form(folder / ("out" if exported else "own.safetensors"), form.network, {})


FORMS = {
    "a flat file": write_flat,
    "a flat safetensors file": lambda folder: write_flat(folder, name="weights.safetensors"),
    "a file whose name says DiT": lambda folder: write_flat(folder, name="DiT-XL-2-256x256.pt", objective=None),
    "DiT's checkpoint": lambda folder: write_checkpoint(folder, {"model": "DiT-XL/2", "vae": "ema"}),
    "fast-DiT's checkpoint": lambda folder: write_checkpoint(folder, {"model": "DiT-XL/2"}, prefix="module._orig_mod."),
    "a checkpoint without arguments": lambda folder: write_checkpoint(folder, {}, options={**TOLD, "objective": "ddpm"}),
    "SiT's checkpoint": lambda folder: write_checkpoint(
        folder, {"model": "SiT-XL/2", "path_type": "Linear", "prediction": "velocity", "loss_weight": None, "vae": "mse"},
        path_kind="linear", data_at_1=True,
    ),
    "SiT's checkpoint on another path": lambda folder: write_checkpoint(
        folder, {"model": "SiT-XL/2", "path_type": "GVP", "prediction": "velocity", "loss_weight": "velocity"}, path_kind="gvp", data_at_1=True
    ),
    "REPA's checkpoint": write_repa,
    "REPA's former checkpoint": lambda folder: write_repa(folder, legacy=True),
    "a diffusers folder": write_diffusers,
    "a diffusers pipeline": lambda folder: write_diffusers(folder, inside="transformer"),
    "a diffusers folder of shards": lambda folder: write_diffusers(folder, layout="shards"),
    "a diffusers folder of a pickle": lambda folder: write_diffusers(folder, layout="bin"),
    "a file of this project": write_own,
    "an export to DiT": lambda folder: write_own(folder, exported="dit"),
    "an export to diffusers": lambda folder: write_own(folder, exported="diffusers"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_read_answers_as_its_network_does_and_samples(tmp_path, form):
    written = FORMS[form](tmp_path)
    lines = import_weights(str(written.path), tmp_path / "read.safetensors", **written.options)
    assert written.says in " ".join(lines)
    network, _, weights = open_model(tmp_path / "read.safetensors")
    if isinstance(written.network, DiT):
        exact = form != "an export to diffusers"  # which has no place for a position embedding that drifted
        torch.testing.assert_close(output(network), output(written.network), rtol=0, atol=0 if exact else 2e-3)
        assert not exact or equal_state(weights.tensors, written.network.state_dict())
    else:
        torch.testing.assert_close(output(network), output(written.network), rtol=0, atol=1e-5)
    config = weights.config
    assert (config.objective.path, config.objective.data_at_1) == (written.path_kind, written.data_at_1)
    assert config.objective.learn_variance == (config.model.learn_sigma and written.path_kind == "ddpm")
    assert config.data.class_names == [str(i) for i in range(CLASSES)]
    sampler = {"sampler": "ancestral" if written.path_kind == "ddpm" else "euler", "num_steps": 2, "guidance": 2.0}
    folder = sample_to_folder(
        tmp_path / "read.safetensors", num=2, tile=2, out=str(tmp_path / "samples"), device="cpu", settings=sampler
    )
    assert (folder / "images.npz").is_file()


@pytest.mark.parametrize("name", ["dit", "sit"])
def test_a_file_with_the_recorded_weights_of_the_published_code_gives_its_recorded_output(tmp_path, name):
    recorded, sizes = section(f"{name}_backbone", ""), metadata(f"{name}_backbone")["config"]
    torch.save({key: tensor.clone() for key, tensor in section(f"{name}_backbone", "state.").items()}, tmp_path / "w.pt")
    told = {"num_heads": sizes["num_heads"], "vae": "embedded", "objective": "ddpm" if name == "dit" else "flow"}
    import_weights(str(tmp_path / "w.pt"), tmp_path / "read.safetensors", **told)
    network, _, weights = open_model(tmp_path / "read.safetensors")
    assert weights.config.objective.data_at_1 == (name == "sit") and weights.config.objective.time_scale in (1, 1000)
    out = network(recorded["x"], recorded["t"], recorded["y"])[:, : recorded["out"].shape[1]]
    torch.testing.assert_close(out, recorded["out"], rtol=0, atol=3e-6)


@pytest.mark.parametrize(("norm_eps", "tolerance"), [(1e-6, 1e-5), (1e-5, 1e-4)], ids=["DiT's eps", "diffusers' own eps"])
def test_a_model_of_diffusers_comes_back_with_equal_weights_and_outputs(tmp_path, norm_eps, tolerance):
    model = of_diffusers(norm_eps=norm_eps)
    model.save_pretrained(tmp_path / "theirs")
    said = import_weights(str(tmp_path / "theirs"), tmp_path / "ours.safetensors", objective="ddpm", vae="embedded")
    assert any("time_freqs diffusers" in line for line in said)
    assert any("norm_eps" in line and "1e-05" in line for line in said) == (norm_eps == 1e-5)
    said = export_weights(tmp_path / "ours.safetensors", tmp_path / "back", to="diffusers")
    back = DiTTransformer2DModel.from_pretrained(tmp_path / "back").eval()
    assert equal_state(back.state_dict(), model.state_dict())
    torch.testing.assert_close(output(back), output(model), rtol=0, atol=tolerance)
    assert back.config.norm_eps == 1e-6 and (tmp_path / "back" / "README.md").is_file()
    assert not (open_model(tmp_path / "ours.safetensors")[2].config.sample.guidance_channels)


def test_a_model_exported_to_dit_and_read_again_is_the_same_file(tmp_path):
    form = write_flat(tmp_path)
    import_weights(str(form.path), tmp_path / "a.safetensors", source="a source", license="MIT", **form.options)
    export_weights(tmp_path / "a.safetensors", tmp_path / "flat.safetensors", to="dit")
    assert equal_state(load_file(tmp_path / "flat.safetensors"), form.network.state_dict())
    import_weights(str(tmp_path / "flat.safetensors"), tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_sizes_are_read_from_the_shapes(tmp_path):
    network = original(input_size=16, patch_size=4, depth=2, num_classes=7, mlp_ratio=2.0, learn_sigma=False)
    form = write_flat(tmp_path, network)
    import_weights(str(form.path), tmp_path / "read.safetensors", **form.options)
    config = read_weights(tmp_path / "read.safetensors").config
    model = config.model
    assert (model.input_size, model.patch_size, model.depth, model.num_classes) == (16, 4, 2, 7)
    assert (model.mlp_ratio, model.learn_sigma, config.objective.learn_variance) == (2.0, False, False)
    assert (config.data.latent.size, config.data.image_size) == (16, 32)  # the embedded VAE halves


def test_without_a_vae_given_latents_are_those_of_stable_diffusion(tmp_path):
    form = write_checkpoint(tmp_path, {"model": "DiT-XL/2", "vae": "mse"}, options={})
    import_weights(str(form.path), tmp_path / "read.safetensors")
    latent = read_weights(tmp_path / "read.safetensors").config.data.latent
    assert (latent.vae, latent.scaling_factor, latent.size, latent.image_size) == ("stabilityai/sd-vae-ft-mse", 0.18215, 8, 64)
    with pytest.raises(ValueError, match=r"the network has 4 channels, the VAE 'none' 3"):
        import_weights(str(form.path), tmp_path / "pixels.safetensors", vae="none")


@pytest.mark.parametrize(("dim", "heads"), [(384, 6), (768, 12)])
def test_heads_of_a_published_width_come_from_dits_table(tmp_path, dim, heads):
    form = write_flat(tmp_path, DiT(**{**SIZES, "dim": dim, "depth": 1, "num_heads": heads, "learn_sigma": True}))
    import_weights(str(form.path), tmp_path / "read.safetensors", objective="ddpm")
    assert read_weights(tmp_path / "read.safetensors").config.model.num_heads == heads


def test_the_weights_asked_for_are_taken_and_their_step_is_recorded(tmp_path):
    form = write_checkpoint(tmp_path, {"model": "DiT-XL/2"}, name="last.pt")
    for kind in ("ema", "model"):
        import_weights(str(form.path), tmp_path / f"{kind}.safetensors", weights=kind, vae="embedded")
    ema, model = (read_weights(tmp_path / f"{kind}.safetensors") for kind in ("ema", "model"))
    assert (ema.kind, model.kind, ema.step) == ("ema", "model", 500)
    torch.testing.assert_close(model.tensors["pos_embed"], ema.tensors["pos_embed"] + 1)


def test_source_and_licence_stand_in_the_file_in_its_samples_and_in_what_is_trained_from_it(tmp_path, shards):
    network = original(in_channels=3, num_classes=2)
    form = write_flat(tmp_path, network)
    told = {**form.options, "vae": "none", "source": "its maker", "license": "CC-BY-NC-4.0"}
    lines = import_weights(str(form.path), tmp_path / "read.safetensors", **told)
    assert lines[-2:] == ["source: its maker", "license: CC-BY-NC-4.0"]
    origin = {"source": "its maker", "license": "CC-BY-NC-4.0"}
    assert read_weights(tmp_path / "read.safetensors").origin == origin
    folder = sample_to_folder(
        tmp_path / "read.safetensors", num=1, tile=1, out=str(tmp_path / "samples"), device="cpu", settings={"num_steps": 1}
    )
    assert origin.items() <= json.loads((folder / "images.json").read_text())["made_from"]["weights"].items()

    config = tiny_config(shards, ddpm=True, attention="softmax", steps=1, init_from=str(tmp_path / "read.safetensors"))
    config = replace(config, model=replace(config.model, dim=64, depth=3, num_heads=HEADS))
    run = train(config, tmp_path / "run")
    train(replace(config, train=replace(config.train, steps=2)), run.path)  # resumed
    for step in (1, 2):
        for kind in ("ema", "model"):
            assert read_weights(run.checkpoint(step) / f"{kind}.safetensors").origin == origin
    export_weights(run.path, tmp_path / "exported", to="diffusers", allow_time_mismatch=True)
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "license: cc-by-nc-4.0" in card and "Source: its maker, trained further with dit-vca" in card and '"steps": 2' in card


def test_a_file_that_began_here_has_no_source_in_its_header_or_record(run):
    weights = read_weights(RunFolder(run).checkpoint(4) / "ema.safetensors")
    assert weights.origin == {} and (weights.source, weights.license) == (None, None)


@pytest.mark.parametrize(("time_freqs", "shift"), [("dit", 0), ("diffusers", 1)])
def test_time_frequencies_are_those_of_the_code_they_are_named_after(time_freqs, shift):
    embedder = TimestepEmbedder(256, time_freqs)
    embedder.mlp = torch.nn.Sequential(torch.nn.Linear(256, 256))
    embedder.mlp[0].weight.data, embedder.mlp[0].bias.data = torch.eye(256), torch.zeros(256)
    t = torch.tensor([0.0, 0.3, 37.0, 500.0, 999.0])
    theirs = Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=shift)(t)
    torch.testing.assert_close(embedder(t), theirs, rtol=0, atol=1e-6)


def test_unknown_time_frequencies_are_refused():
    with pytest.raises(ValueError, match=r"model.time_freqs must be one of dit, diffusers, got 'sit'"):
        TimestepEmbedder(8, "sit")


def test_a_dit_model_goes_to_diffusers_only_with_the_difference_said_and_written(tmp_path):
    form = write_own(tmp_path)
    with pytest.raises(
        ValueError, match=r"time_freqs dit, stock diffusers computes those of diffusers.*--allow-time-mismatch true"
    ):
        export_weights(form.path, tmp_path / "out", to="diffusers")
    assert not (tmp_path / "out").exists()
    lines = export_weights(form.path, tmp_path / "out", to="diffusers", allow_time_mismatch=True)
    (measured,) = [line for line in lines if "time frequencies differ" in line]
    assert measured in (tmp_path / "out" / "README.md").read_text()
    assert all(f"at {t}" in measured for t in (0, 250, 500, 999))
    assert any("position embedding" in line for line in lines)  # which drifted by 1e-4 in the file

    theirs = DiTTransformer2DModel.from_pretrained(tmp_path / "out").eval()
    fixed = original()
    fixed.pos_embed.data = sincos_position_embedding(64, (4, 4))
    apart = (output(theirs) - output(fixed)).abs().amax(dim=(1, 2, 3))
    assert float(apart[0]) < 1e-5 and float(apart[1:].min()) > 1e-3
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    torch.testing.assert_close(output(theirs), output(fixed), rtol=0, atol=1e-6)


def test_a_model_with_the_frequencies_of_diffusers_goes_to_dit_only_when_allowed(tmp_path):
    form = write_diffusers(tmp_path)
    import_weights(str(form.path), tmp_path / "ours.safetensors", **form.options)
    with pytest.raises(ValueError, match=r"time_freqs diffusers, the code of DiT computes those of dit"):
        export_weights(tmp_path / "ours.safetensors", tmp_path / "flat.safetensors", to="dit")
    lines = export_weights(tmp_path / "ours.safetensors", tmp_path / "flat.safetensors", to="dit", allow_time_mismatch=True)
    assert any("time frequencies differ" in line for line in lines)


def test_a_folder_converted_from_dits_own_weights_keeps_dits_frequencies(tmp_path):
    form = write_diffusers(tmp_path)
    path = form.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_name_or_path": "facebook/DiT-XL-2-256"}))
    lines = import_weights(str(form.path), tmp_path / "dit.safetensors", vae="embedded")
    assert any("time_freqs dit: it was converted from DiT's own weights" in line for line in lines)
    weights = read_weights(tmp_path / "dit.safetensors")
    assert (weights.config.model.time_freqs, weights.config.objective.path, weights.license) == ("dit", "ddpm", DIT_LICENSE)
    asked = import_weights(str(form.path), tmp_path / "asked.safetensors", vae="embedded", time_freqs="diffusers")
    assert any("time_freqs diffusers: as asked for" in line for line in asked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"attention": "vca"}, "attention vca .* knows plain softmax attention alone"),
     ({"attention_options": {"depthwise": 3}}, "attention softmax .*'depthwise': 3"),
     ({"num_classes": 0}, "trained without classes"), ({"mlp_ratio": 2.0}, r"model.mlp_ratio 2; diffusers' DiT has 4"),
     ({"pos_embed": 0.1}, "position embedding .* differs by 0.1 from the fixed one")],
    ids=["another attention", "a wider softmax", "no classes", "another MLP", "a learned position embedding"],
)  # fmt: skip
def test_a_model_that_a_form_cannot_hold_is_not_exported(tmp_path, changes, message):
    config = replace(read_weights(write_own(tmp_path).path).config, preset="")
    model = config.model
    attention = replace(model.attention, name=changes.get("attention", "softmax"), options=changes.get("attention_options", {}))
    sizes = {name: changes[name] for name in ("num_classes", "mlp_ratio") if name in changes}
    config = replace(config, model=replace(model, attention=attention, **sizes))
    state = build_network(config).state_dict()
    state["pos_embed"] = state["pos_embed"] + changes.get("pos_embed", 0)
    write_weights(tmp_path / "other.safetensors", state, config, step=1, kind="ema")
    with pytest.raises(ValueError, match=message):
        export_weights(tmp_path / "other.safetensors", tmp_path / "out", to="diffusers", allow_time_mismatch=True)
    assert not (tmp_path / "out").exists()


def initial(tmp_path, **changes):
    """A config like that of a weight file, but for `changes` of the model, which starts from it."""
    config = read_weights(write_own(tmp_path).path).config
    start = replace(config.train, init_from=str(tmp_path / "own.safetensors"))
    return replace(config, model=replace(config.model, **changes), train=start)


def test_training_starts_from_a_model_of_another_latent_size(tmp_path):
    config = initial(tmp_path, input_size=12)
    network = build_network(config)
    said = _load_initial(network, config)
    assert "position embedding is computed for latents of side 12, that file is of side 8" in said
    torch.testing.assert_close(network.pos_embed.data, sincos_position_embedding(64, (6, 6)))
    theirs = original().state_dict()
    assert equal_state({**network.state_dict(), "pos_embed": theirs["pos_embed"]}, theirs)


def test_a_model_of_the_same_size_keeps_the_position_embedding_of_the_file(tmp_path):
    config = initial(tmp_path)
    network = build_network(config)
    assert "position embedding" not in _load_initial(network, config)
    assert torch.equal(network.pos_embed, original().pos_embed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"patch_size": 4}, "has patches of side 2, this model 4: .* only the latent size may differ"),
     ({"time_freqs": "diffusers"}, "other frequencies of the time embedding: set model.time_freqs dit"),
     ({"dim": 128}, "does not fit this model")],
    ids=["patch size", "time frequencies", "width"],
)  # fmt: skip
def test_training_does_not_start_from_a_model_of_other_patches_frequencies_or_width(tmp_path, changes, message):
    config = initial(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        _load_initial(build_network(config), config)


def test_a_published_name_is_downloaded_once_and_its_hash_is_checked_afterwards(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    downloads = []

    def download(address, destination):
        downloads.append(address)
        torch.save(original().state_dict(), destination)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    name = "DiT-XL/2-256"
    for out in ("a", "b"):
        import_weights(name, tmp_path / f"{out}.safetensors", **TOLD)
    assert downloads == [PUBLISHED[name]]
    file = tmp_path / "hub" / "checkpoints" / "DiT-XL-2-256x256.pt"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert file.with_name(f"{file.name}.sha256").read_text().split() == [digest, file.name]
    weights = read_weights(tmp_path / "a.safetensors")
    assert (weights.source, weights.license) == (f"{PUBLISHED[name]} (SHA-256 {digest})", "CC-BY-NC-4.0")
    assert weights.config.objective.path == "ddpm"
    with open(file, "ab") as stream:
        stream.write(b"x")
    with pytest.raises(ValueError, match=r"no longer the file that was downloaded .* remove it"):
        fetch(PUBLISHED[name])


def test_offline_a_published_name_says_where_its_file_belongs(tmp_path, monkeypatch):
    from urllib.error import URLError

    def offline(*_):
        raise URLError("no route")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(ValueError, match=r"DiT-XL-2-512x512.pt cannot be downloaded .*no route.* put it at .*hub"):
        import_weights("DiT-XL/2-512", tmp_path / "out.safetensors")


class Malicious:
    def __reduce__(self):
        return os.system, ("touch was-run",)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder with one of everything that can be wrong."""
    here = tmp_path_factory.mktemp("weights")
    state = original().state_dict()
    torch.save(state, here / "good.pt")
    torch.save({"model": state, "ema": Malicious()}, here / "malicious.pt")
    torch.save({"ema": state, "args": Path("x")}, here / "classes.pt")
    torch.save({**state, "blocks.0.attn.q_norm.weight": torch.ones(4)}, here / "unknown.pt")
    torch.save({name: t for name, t in state.items() if name != "blocks.1.mlp.fc2.bias"}, here / "missing.pt")
    torch.save({name: t for name, t in state.items() if "embed" not in name}, here / "half.pt")
    torch.save({**state, "blocks.1.mlp.fc2.bias": torch.ones(3)}, here / "shape.pt")
    torch.save({"step": 3, "name": "x"}, here / "plain.pt")
    torch.save([1, 2], here / "list.pt")
    torch.save({"ema": state}, here / "ema-only.pt")
    torch.save({"ema": state, "args": argparse.Namespace(model="SiT-XL/2", path_type="spiral")}, here / "path.pt")
    write_checkpoint(here, {"model": "SiT-XL/2"}, name="sit.pt")
    (here / "text.pt").write_text("not weights")
    (here / "short.pt").write_bytes((here / "good.pt").read_bytes()[:-3000])
    save_file(state, here / "whole.safetensors")
    (here / "short.safetensors").write_bytes((here / "whole.safetensors").read_bytes()[:-100])
    save_file({name: tensor.clone() for name, tensor in to_diffusers(state).items()}, here / "loose.safetensors")
    model = of_diffusers()
    model.save_pretrained(here / "good")
    model.transformer_blocks[2].norm1.emb.class_embedder.embedding_table.weight += 1
    model.save_pretrained(here / "unequal")
    for name, change in (("unet", {"_class_name": "UNet2DModel"}), ("relu", {"activation_fn": "geglu"})):
        shutil.copytree(here / "good", here / name)
        path = here / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    shutil.copytree(here / "good", here / "emptied")
    (here / "emptied" / "diffusion_pytorch_model.safetensors").unlink()
    (here / "nothing").mkdir()
    import_weights(str(here / "good.pt"), here / "own.safetensors", **TOLD, objective="ddpm")
    return here


def read(ref, *more):
    return ["pretrained", ref, "new.safetensors", "--num_heads", "16", "--vae", "embedded", "--objective", "ddpm", *more]


# name: (arguments, words that the line must hold)
CASES = {
    "objective not told": (["pretrained", "good.pt", "new.safetensors"], ["--objective ddpm", "same tensors"]),
    "heads not told": (["pretrained", "good.pt", "new.safetensors", "--objective", "ddpm"], ["width 64", "--num_heads"]),
    "heads that do not divide": (["pretrained", "good.pt", "new.safetensors", "--objective", "ddpm", "--num_heads", "5"], ["64", "5 heads"]),
    "unknown objective": (["pretrained", "good.pt", "new.safetensors", "--objective", "edm"], ["objective", "ddpm", "flow"]),
    "objective of another family": (read("sit.pt"), ["its objective is flow", "ddpm"]),
    "malicious pickle": (read("malicious.pt"), ["malicious.pt", "system", "could run any code"]),
    "pickle of another class": (read("classes.pt"), ["classes.pt", "pathlib", "could run any code"]),
    "unknown tensor": (read("unknown.pt"), ["1 not known", "blocks.0.attn.q_norm.weight"]),
    "missing tensor": (read("missing.pt"), ["1 missing", "blocks.1.mlp.fc2.bias"]),
    "half a model": (read("half.pt"), ["half.pt", "no tensor x_embedder.proj.weight"]),
    "tensor of another shape": (read("shape.pt"), ["blocks.1.mlp.fc2.bias is (3,), expected (64,)"]),
    "no tensors": (read("plain.pt"), ["plain.pt", "step, name"]),
    "no dictionary": (read("list.pt"), ["list.pt", "list"]),
    "weights that are not there": (read("ema-only.pt", "--weights", "model"), ["no weights 'model'", "ema"]),
    "unknown path": (["pretrained", "path.pt", "new.safetensors"], ["path_type 'spiral'", "linear, gvp"]),
    "text": (read("text.pt"), ["text.pt", "damaged or no PyTorch file"]),
    "truncated pickle": (read("short.pt"), ["short.pt", "damaged"]),
    "truncated safetensors": (read("short.safetensors"), ["short.safetensors", "damaged"]),
    "a file without its folder": (read("loose.safetensors"), ["names of diffusers", "config.json"]),
    "unequal embedders": (read("unequal"), ["class_embedder", "block 2", "one for all blocks"]),
    "another model of diffusers": (read("unet"), ["UNet2DModel", "DiTTransformer2DModel"]),
    "another activation": (read("relu"), ["activation_fn 'geglu'", "gelu-approximate"]),
    "a folder without weights": (read("emptied"), ["emptied", "weights are missing"]),
    "a folder of nothing": (read("nothing"), ["nothing", "diffusers", "run folder"]),
    "no such file": (read("nowhere.pt"), ["nowhere.pt does not exist", "DiT-XL/2-256"]),
    "a name that is not downloaded": (read("SiT-XL/2-256"), ["SiT-XL/2-256", "github.com/willisma/SiT"]),
    "file to write exists": (["pretrained", "good.pt", "own.safetensors"], ["own.safetensors exists already"]),
    "file to write of another kind": (["pretrained", "good.pt", "new.pt"], ["must end in .safetensors"]),
    "file to write in no folder": (["pretrained", "good.pt", "no/new.safetensors"], ["no is not a folder"]),
    "own file with another objective": (["pretrained", "own.safetensors", "new.safetensors", "--objective", "flow"], ["objective ddpm", "leave it out"]),
    "VAE of other channels": (["pretrained", "good.pt", "new.safetensors", "--objective", "ddpm", "--num_heads", "16", "--vae", "none"], ["4 channels", "--vae"]),
    "export exists": (["export", "own.safetensors", "good", "--to", "diffusers"], ["good exists already"]),
    "export to something else": (["export", "own.safetensors", "new", "--to", "onnx"], ["to", "diffusers"]),
    "export of no model": (["export", "whole.safetensors", "new", "--to", "dit"], ["no dit-vca configuration"]),
    "export with other frequencies": (["export", "own.safetensors", "new", "--to", "diffusers"], ["time_freqs dit", "--allow-time-mismatch true"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(workshop, tmp_path_factory):
    """All cases, and two commands without a mistake, each in a process of its own, and what they left on disk."""
    before, made = tree(workshop), tmp_path_factory.mktemp("made")
    arguments = {name: case[0] for name, case in CASES.items()} | {
        "reading": ["pretrained", "sit.pt", str(made / "read.safetensors"), "--license", "MIT"],
        "writing": ["export", str(made / "read.safetensors"), str(made / "flat.safetensors"), "--to", "dit"],
    }
    if hasattr(os, "fork"):
        results = dit_vca_forked(arguments, cwd=workshop)
    else:
        results = {name: dit_vca(*words, cwd=workshop) for name, words in arguments.items()}
    return results, before, tree(workshop), made


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_one_line(outcomes, name):
    result, words = outcomes[0][name], CASES[name][1]
    assert result.returncode == 2, result.stderr
    said = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(said) == 1 and "Traceback" not in said[0], result.stderr
    assert all(word in said[0] for word in words), said[0]


def test_mistakes_leave_nothing_behind_and_run_nothing(outcomes, workshop):
    _, before, after, _ = outcomes
    assert after == before and not (workshop / "was-run").exists()


def test_the_two_commands_read_a_checkpoint_and_write_a_flat_file(outcomes):
    results, _, _, made = outcomes
    read, written = results["reading"], results["writing"]
    assert read.returncode == 0, read.stderr
    assert "3 blocks, 16 heads" in read.stdout and "license: MIT" in read.stdout
    assert written.returncode == 0, written.stderr
    assert "fed 1 - t" in written.stdout
    assert sorted(path.name for path in made.iterdir()) == ["flat.safetensors", "read.safetensors"]
