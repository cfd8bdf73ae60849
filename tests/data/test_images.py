import numpy as np
import pytest
from made import make_images
from PIL import Image

from dit_vca.data import fashion_mnist
from dit_vca.data.images import center_crop, open_images


@pytest.mark.parametrize(("split", "num"), [("train", 10_000), ("test", 2_000)])
def test_the_embedded_images_are_padded_to_32_pixels_and_three_channels(split, num):
    source = open_images("fashion-mnist", None, split=split)
    assert len(source) == num
    assert source.arrays.shape == (num, 32, 32, 3) and source.arrays.dtype == np.uint8
    assert not source.arrays[:, :2].any() and not source.arrays[:, -2:].any()
    assert np.array_equal(source.arrays[..., 0], source.arrays[..., 2])
    assert len(source.class_names) == 10 and set(source.labels) == set(range(10))


def test_the_first_embedded_images_are_those_of_the_original_files():
    train, test = (open_images("fashion-mnist", None, split=s) for s in ("train", "test"))
    assert list(train.labels[:10]) == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert list(test.labels[:10]) == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]
    assert int(train.arrays[0, 2:30, 2:30, 0].astype(int).sum()) == 76247


@pytest.mark.skipif(not fashion_mnist.DEBIAN_FOLDER.is_dir(), reason="the Debian package dataset-fashion-mnist is not installed")
def test_the_complete_set_begins_with_the_embedded_one():
    full, embedded = fashion_mnist.load("fashion-mnist-full", "train"), fashion_mnist.load("fashion-mnist", "train")
    assert len(full[0]) == 60_000
    assert np.array_equal(full[0][:10_000], embedded[0]) and np.array_equal(full[1][:10_000], embedded[1])


def test_sub_folders_are_classes_in_sorted_order(tmp_path):
    source = open_images(str(make_images(tmp_path / "a b", classes=("zebra", "ant"), per_class=3)), 8)
    assert source.class_names == ("ant", "zebra")
    assert list(source.labels) == [0, 0, 0, 1, 1, 1]
    assert source.load(0).shape == (8, 8, 3)


def test_a_folder_without_sub_folders_has_no_classes(tmp_path):
    source = open_images(str(make_images(tmp_path / "a", classes=(), per_class=3)), 8)
    assert source.class_names == () and list(source.labels) == [0, 0, 0]


def test_the_fingerprint_survives_a_move_and_not_a_change(tmp_path):
    folder = make_images(tmp_path / "a", per_class=3)
    before = open_images(str(folder), 8).fingerprint
    moved = folder.rename(tmp_path / "b")
    assert open_images(str(moved), 8).fingerprint == before
    (moved / "cat" / "000.png").unlink()
    assert open_images(str(moved), 8).fingerprint != before


@pytest.mark.parametrize("shape", [(64, 64), (100, 70), (70, 100), (33, 32), (20, 500), (15, 15)], ids=str)
def test_the_crop_is_square_and_central(shape):
    width, height = shape
    ramp = np.tile(np.linspace(0, 255, width).astype(np.uint8)[None, :, None], (height, 1, 3))
    cropped = center_crop(Image.fromarray(ramp), 16)
    assert cropped.size == (16, 16)
    columns = np.asarray(cropped).astype(float).mean((0, 2))
    assert abs(columns.mean() - 127.5) < 255 / 16  # a centred window of a ramp has its middle grey


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_other_modes_become_rgb(tmp_path, mode):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (9, 9), (200, 200, 200)).convert(mode).save(tmp_path / "images" / ("a.tif" if mode == "CMYK" else "a.png"))
    loaded = open_images(str(tmp_path / "images"), 8).load(0)
    assert loaded.shape == (8, 8, 3) and abs(int(loaded.mean()) - 200) <= 2


def break_folder(kind, tmp_path):
    folder = tmp_path / "images"
    if kind == "empty":
        folder.mkdir()
    elif kind == "mixed":
        make_images(folder)
        make_images(folder, classes=(), per_class=1)
    elif kind == "empty-class":
        make_images(folder)
        (folder / "bird").mkdir()
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("absent", "neither a folder nor"),
        ("empty", "no images in"),
        ("mixed", "both images"),
        ("empty-class", "no images in .*bird"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(tmp_path, kind, says):
    with pytest.raises(ValueError, match=says):
        open_images(break_folder(kind, tmp_path), 8)


def test_a_folder_needs_an_image_size(images):
    with pytest.raises(ValueError, match="image size must be given"):
        open_images(str(images), None)
