import json

import numpy as np
import pytest
import torch
from made import make_images, tree

from dit_vca.config import DataConfig
from dit_vca.data import encode as encoding
from dit_vca.data.encode import encode
from dit_vca.data.images import open_images
from dit_vca.data.latents import LatentShards, PositionOrder, flips, read_manifest
from dit_vca.data.prepare import open_source, prepare_shards
from dit_vca.evaluation.score import score
from dit_vca.files import only_process
from dit_vca.vae import latent_from_stored, open_codec


def copy(folder, to):
    import shutil

    return shutil.copytree(folder, to)


def test_every_position_of_an_epoch_is_another_image():
    order = PositionOrder(10, seed=3)
    epochs = [order.indices(np.arange(e * 10, e * 10 + 10)) for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])


def test_the_order_is_a_function_of_seed_and_position():
    asked_late = PositionOrder(10, seed=3).indices(np.array([25, 7]))
    in_turn = PositionOrder(10, seed=3)
    assert [int(in_turn.indices(np.array([p]))[0]) for p in (25, 7)] == list(asked_late)
    assert not np.array_equal(PositionOrder(10, 3).indices(np.arange(10)), PositionOrder(10, 4).indices(np.arange(10)))


def test_half_of_the_positions_are_flipped_whatever_the_batch():
    flipped = flips(0, np.arange(2000))
    assert 900 < flipped.sum() < 1100
    assert np.array_equal(flipped[500:600], flips(0, np.arange(500, 600)))


def test_rows_come_from_the_right_shard_and_pixels_are_mirrored_on_reading(tmp_path, images, monkeypatch):
    monkeypatch.setattr(encoding, "SHARD_IMAGES", 7)
    source, codec = open_source(str(images), 8, "none", "cpu")
    manifest = encode(source, codec, tmp_path / "shards", flip=True)
    shards = LatentShards(tmp_path / "shards")
    assert [s.count for s in manifest.shards] == [7, 7, 7, 7, 7, 5] and len(shards) == 40
    indices = np.array([39, 0, 7, 6, 20])
    stored, labels = shards.rows(indices, np.array([False, False, True, False, True]))
    for row, index, flip in zip(stored, indices, [False, False, True, False, True], strict=True):
        expected = source.load(index)[:, ::-1] if flip else source.load(index)
        assert np.array_equal(row.permute(1, 2, 0).numpy(), expected)
    assert labels.tolist() == source.labels[indices].tolist()


def test_moments_are_kept_plain_and_flipped():
    source, codec = open_source("fashion-mnist", None, None, "cpu")
    x = torch.from_numpy(np.stack([source.load(i) for i in range(4)]))
    stored, mirrored = codec.encode(x), codec.encode(x.flip(2))
    assert stored.shape == (4, 8, 16, 16) and stored.dtype == torch.float16
    latents = latent_from_stored(stored, torch.zeros(4, 4, 16, 16), codec.latent)
    assert not torch.equal(mirrored, stored.flip(-1))  # a VAE is not mirror-symmetric
    error = (codec.decode(latents).float() - x.float()).abs().mean()
    assert error < 5


def test_latents_of_the_embedded_vae_have_unit_deviation():
    source, codec = open_source("fashion-mnist", None, None, "cpu")
    stored = codec.encode(torch.from_numpy(source.arrays[:256]))
    latents = latent_from_stored(stored, torch.randn(256, 4, 16, 16, generator=torch.manual_seed(0)), codec.latent)
    assert 0.9 < float(latents.std()) < 1.1


def reconstructions(images):
    codec = open_codec("embedded", 32)
    stored = torch.cat([codec.encode(part) for part in images.split(100)])
    mean = latent_from_stored(stored, torch.zeros(len(images), 4, 16, 16), codec.latent)
    return torch.cat([codec.decode(part) for part in mean.split(100)])


def test_the_embedded_vae_reconstructs_held_out_images_to_28_decibels():
    x = torch.from_numpy(open_images("fashion-mnist", None, split="test").arrays[:500])
    error = ((reconstructions(x).double() - x.double()) / 255) ** 2
    assert float((-10 * torch.log10(error.mean((1, 2, 3)))).mean()) > 28


@pytest.mark.slow
def test_reconstructions_of_held_out_images_are_near_the_floor():
    held_out = open_images("fashion-mnist", None, split="test").arrays[:1000]
    training = open_images("fashion-mnist", None).arrays[:5000]
    rebuilt = reconstructions(torch.from_numpy(held_out)).numpy()
    floor, found = (score(x, training, metrics=["fd-lite0"])["metrics"]["fd-lite0@1000"] for x in (held_out, rebuilt))
    assert floor < 55 and found < floor + 25


def test_a_killed_encoding_goes_on_and_gives_the_same_bytes(tmp_path, images, monkeypatch):
    monkeypatch.setattr(encoding, "SHARD_IMAGES", 8)
    source, codec = open_source(str(images), 8, "none", "cpu")
    encode(source, codec, tmp_path / "whole", flip=False)

    class Killed(BaseException):
        pass

    real, calls = encoding._write_shard, []

    def dies_in_the_third(*arguments):
        calls.append(arguments[1])
        if len(calls) == 3:
            raise Killed
        real(*arguments)

    monkeypatch.setattr(encoding, "_write_shard", dies_in_the_third)
    with pytest.raises(Killed):
        encode(source, codec, tmp_path / "resumed", flip=False)
    assert not (tmp_path / "resumed").exists()
    monkeypatch.setattr(encoding, "_write_shard", lambda *a: (calls.append(a[1]), real(*a)))
    encode(source, codec, tmp_path / "resumed", flip=False)
    assert calls == [0, 1, 2, 2, 3, 4]
    assert tree(tmp_path / "resumed") == tree(tmp_path / "whole")
    assert not (tmp_path / "resumed.partial").exists()


def test_partial_shards_of_another_input_are_kept_and_the_folder_refused(tmp_path, images, monkeypatch):
    monkeypatch.setattr(encoding, "SHARD_IMAGES", 8)
    source, codec = open_source(str(images), 8, "none", "cpu")
    partial = tmp_path / "shards.partial"
    partial.mkdir()
    (partial / "input.json").write_text("{}")
    (partial / "00000.json").write_text("{}")
    with pytest.raises(ValueError, match=r"shards\.partial holds shards of other images"):
        encode(source, codec, tmp_path / "shards", flip=False)
    assert (partial / "00000.json").is_file()


def test_two_processes_do_not_encode_to_one_folder(tmp_path, images):
    source, codec = open_source(str(images), 8, "none", "cpu")
    with only_process(tmp_path / ".shards.lock", ""), pytest.raises(ValueError, match="another process is encoding"):
        encode(source, codec, tmp_path / "shards", flip=False)
    encode(source, codec, tmp_path / "shards", flip=False)
    assert [p.name for p in tmp_path.iterdir()] == ["shards"]  # the lock is gone


def test_bad_images_are_all_named_and_can_be_left_out(tmp_path):
    folder = make_images(tmp_path / "images", per_class=5)
    (folder / "cat" / "001.png").write_bytes(b"no image")
    whole = (folder / "dog" / "002.png").read_bytes()
    (folder / "dog" / "002.png").write_bytes(whole[: len(whole) // 2])
    source, codec = open_source(str(folder), 8, "none", "cpu")
    with pytest.raises(ValueError, match=r"2 of 10 images cannot be read: .*001\.png.*002\.png.*--skip-bad") as error:
        encode(source, codec, tmp_path / "shards", flip=False)
    assert "\n" not in str(error.value) and not (tmp_path / "shards").exists()
    manifest = encode(source, codec, tmp_path / "shards", flip=False, skip_bad=True)
    assert manifest.num_images == 8 and len(manifest.bad) == 2
    assert read_manifest(tmp_path / "shards") == manifest


def test_the_manifest_does_not_change_when_the_folder_moves(tmp_path, shards):
    moved = copy(shards, tmp_path / "elsewhere")
    assert read_manifest(moved).hash == read_manifest(shards).hash


@pytest.mark.parametrize("kind", ["truncated", "missing", "flipped-header", "manifest"])
def test_damaged_shards_are_refused_with_the_file_named(tmp_path, shards, kind):
    folder = copy(shards, tmp_path / "shards")
    file = folder / "00000.safetensors"
    content = file.read_bytes()
    if kind == "truncated":
        file.write_bytes(content[:-10])
    elif kind == "missing":
        file.unlink()
    elif kind == "flipped-header":
        file.write_bytes(b"\xff" * 8 + content[8:])
    else:
        (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="manifest.json" if kind == "manifest" else "00000.safetensors"):
        LatentShards(folder)


def test_other_images_than_the_embedded_need_a_vae(images):
    with pytest.raises(ValueError, match="the VAE must be given"):
        open_source(str(images), 8, None, "cpu")


def test_named_images_are_encoded_once_and_found_again(tmp_path, images):
    data = DataConfig(name=str(images), image_size=8, vae="none", cache=str(tmp_path / "cache"))
    first = prepare_shards(data)
    before = tree(tmp_path / "cache")
    assert prepare_shards(data).folder == first.folder
    assert tree(tmp_path / "cache") == before


def test_shards_with_another_vae_than_asked_are_refused(shards):
    with pytest.raises(ValueError, match=r"data\.vae is embedded"):
        prepare_shards(DataConfig(name=str(shards), vae="embedded"))


def test_a_vae_of_other_weights_is_refused():
    with pytest.raises(ValueError, match="the model was trained with"):
        open_codec("embedded", 32, expected_hash="0" * 64)


def test_a_scale_factor_is_taken_from_the_vae_and_only_an_old_config_has_the_default(tmp_path):
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=2, scaling_factor=0.5, shift_factor=0.25)
    vae.save_pretrained(tmp_path / "new")
    vae.save_pretrained(tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    del config["scaling_factor"], config["shift_factor"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    new, old = open_codec(str(tmp_path / "new"), 8).latent, open_codec(str(tmp_path / "old"), 8).latent
    assert (new.scaling_factor, new.shift_factor) == (0.5, 0.25)
    assert (old.scaling_factor, old.shift_factor) == (0.18215, 0.0)


def test_decoding_inverts_scale_and_shift(tmp_path):
    from diffusers import AutoencoderKL

    AutoencoderKL(
        block_out_channels=(4,), norm_num_groups=2, latent_channels=2, scaling_factor=0.5, shift_factor=0.25
    ).save_pretrained(tmp_path / "vae")
    codec = open_codec(str(tmp_path / "vae"), 8)
    z = torch.randn(1, 2, 8, 8)
    expected = codec._vae.decode(z).sample
    decoded = codec.decode((z - 0.25) * 0.5)
    assert torch.equal(decoded, (127.5 * expected + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1))
    with pytest.raises(FloatingPointError, match="NaN"):
        codec.decode(z * float("nan"))
