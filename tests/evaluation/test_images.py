import struct
import zlib

import numpy as np
import pytest
from accelerate import PartialState
from PIL import Image

from dit_vca.evaluation.images import look_at, open_image_set


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)


def save_folder(folder, pixels, names, extension="png", **options):
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in zip(names, pixels, strict=True):
        Image.fromarray(image).save(folder / f"{name}.{extension}", **options)
    return folder


def all_of(images):
    return images.read(0, len(images))


def test_a_folder_of_numbers_is_read_in_the_order_of_the_numbers(tmp_path, pixels):
    folder = save_folder(tmp_path / "samples", pixels, range(12))  # as names, 10 comes before 2
    found = open_image_set(folder)
    assert np.array_equal(all_of(found), pixels) and found.kind == "folder of png"
    assert np.array_equal(all_of(open_image_set(folder, num=5)), pixels[:5])


def test_a_missing_number_is_named(tmp_path, pixels):
    folder = save_folder(tmp_path / "samples", pixels, [*range(7), *range(8, 13)])
    with pytest.raises(ValueError, match="number 7 is missing"):
        open_image_set(folder)
    assert len(open_image_set(folder, num=7)) == 7


def test_a_number_that_is_there_twice_is_named(tmp_path, pixels):
    folder = save_folder(tmp_path / "samples", pixels, [*range(11), "0003"])
    with pytest.raises(ValueError, match="two images with number 3"):
        open_image_set(folder)


def test_a_part_of_a_folder_needs_names_that_say_which(tmp_path, pixels):
    folder = save_folder(tmp_path / "samples", pixels, "abcdefghijkl")
    assert np.array_equal(all_of(open_image_set(folder, num=12)), pixels)
    with pytest.raises(ValueError, match="holds 12 images, 11 were asked for"):
        open_image_set(folder, num=11)


def test_lossy_files_are_refused_unless_allowed_or_cropped(tmp_path, pixels):
    folder = save_folder(tmp_path / "samples", pixels, range(12), "jpg")
    with pytest.raises(ValueError, match="lossy format"):
        open_image_set(folder)
    assert open_image_set(folder, allow_lossy=True).kind == "folder of jpg"
    assert open_image_set(folder, image_size=4).size == 4


def test_sizes_that_differ_are_named_with_their_files(tmp_path, pixels):
    folder = save_folder(tmp_path / "samples", pixels, range(12))
    Image.fromarray(pixels[0, :6, :6]).save(folder / "3.png")
    with pytest.raises(ValueError, match=r"0\.png 8x8, 3\.png 6x6"):
        open_image_set(folder)
    assert open_image_set(folder, image_size=6).size == 6


def test_images_that_are_not_square_are_refused(tmp_path, pixels):
    folder = save_folder(tmp_path / "samples", pixels[:, :6], range(12))
    with pytest.raises(ValueError, match="8x6, not square"):
        open_image_set(folder)


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA", "I;16"])
def test_alpha_palettes_and_sixteen_bits_are_refused(tmp_path, pixels, mode):
    folder = save_folder(tmp_path / "samples", pixels, range(12))
    image = Image.fromarray(pixels[0, ..., 0].astype(np.uint16)) if mode == "I;16" else Image.fromarray(pixels[0]).convert(mode)
    image.save(folder / "0.png")
    with pytest.raises(ValueError, match=f"mode {mode}"):
        open_image_set(folder)


def test_sixteen_bit_colour_is_refused(tmp_path, pixels):
    """Pillow cannot write it: a PNG of one red pixel of 16 bits a channel."""
    folder = save_folder(tmp_path / "samples", pixels, range(12))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header, data = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0), zlib.compress(b"\0\xff\xff\0\0\0\0")
    (folder / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))
    with pytest.raises(ValueError, match="mode RGB of 16 bits"):
        open_image_set(folder)


@pytest.mark.parametrize(
    "labels", [np.eye(12), np.arange(12.0), np.arange(12) - 1, np.arange(11), np.array(list("abcdefghijkl"))],
    ids=["one-hot", "float", "negative", "fewer", "text"],
)  # fmt: skip
def test_what_is_no_list_of_labels_is_not_taken_for_one(tmp_path, pixels, labels):
    np.savez(tmp_path / "images.npz", arr_0=pixels, arr_1=labels)
    assert open_image_set(tmp_path / "images.npz").labels is None


@pytest.mark.parametrize("text", ["[1, 2]", "{", '"made_from"'])
def test_another_file_beside_an_npz_is_no_record(tmp_path, pixels, text):
    np.savez(tmp_path / "images.npz", arr_0=pixels)
    (tmp_path / "images.json").write_text(text)
    assert open_image_set(tmp_path / "images.npz").made_from is None


def test_one_flipped_byte_in_an_archive_is_found(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", arr_0=images)
    content = bytearray((tmp_path / "images.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "images.npz").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        look_at(open_image_set(tmp_path / "images.npz"), PartialState())


def test_grey_images_have_three_equal_channels(tmp_path, pixels):
    folder = save_folder(tmp_path / "samples", pixels[..., 0], range(12))
    assert np.array_equal(all_of(open_image_set(folder)), pixels[..., :1].repeat(3, 3))


def test_a_folder_without_images_says_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"no images in .*; found \.txt"):
        open_image_set(tmp_path)


def test_a_corrupt_file_is_named(tmp_path, pixels):
    folder = save_folder(tmp_path / "samples", pixels, range(12))
    (folder / "5.png").write_bytes((folder / "5.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"5\.png cannot be read"):
        look_at(open_image_set(folder), PartialState())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "compressed"])
def test_an_npz_is_read_by_slices(tmp_path, pixels, save):
    save(tmp_path / "images.npz", arr_0=pixels, arr_1=np.arange(12))
    found = open_image_set(tmp_path / "images.npz", num=9)
    assert np.array_equal(found.read(3, 7), pixels[3:7]) and np.array_equal(found.labels, np.arange(9))


def test_digests_tell_order_from_content(pixels):
    state = PartialState()
    one, other = look_at(open_image_set(pixels), state), look_at(open_image_set(pixels[::-1].copy()), state)
    assert one.digest_ordered != other.digest_ordered and one.digest_sorted == other.digest_sorted
    assert (one.low, one.high, one.duplicates) == (pixels.min(), pixels.max(), 0)
    assert one.mean == pytest.approx(pixels.mean(), abs=1e-3)


def test_copies_are_counted_and_refused(pixels):
    copies = np.concatenate([pixels, pixels[:1]])
    with pytest.raises(ValueError, match="1 of 13 images are copies"):
        look_at(open_image_set(copies), PartialState())
    assert look_at(open_image_set(copies), PartialState(), allow_duplicates=True).duplicates == 1


@pytest.mark.parametrize(("value", "message"), [(7, "every pixel of the 3 images is 7"), (0, "is 0")])
def test_constant_images_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        look_at(open_image_set(np.full((3, 4, 4, 3), value, np.uint8)), PartialState())


def test_images_scaled_to_one_are_refused():
    images = np.random.default_rng(0).integers(0, 2, (3, 4, 4, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="no pixel is above 1"):
        look_at(open_image_set(images), PartialState())
