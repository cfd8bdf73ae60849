import json
import zipfile

import numpy as np
import pytest

from dit_vca.data.archive import ImageArchive, read_array, read_images


def made(num=10, size=4):
    return np.random.default_rng(0).integers(0, 256, (num, size, size, 3), dtype=np.uint8)


def write(path, images, *, labels=True, tile=4, order=None, identity="a"):
    y = np.arange(len(images)) if labels else None
    archive = ImageArchive(path, num=len(images), size=images.shape[1], labels=y, identity=identity)
    archive.begin()
    for start in order or range(0, len(images), tile):
        archive.write_tiles({start: images[start : start + tile]})
    archive.finish()


@pytest.mark.parametrize("labels", [True, False], ids=["labelled", "unlabelled"])
def test_numpy_and_zipfile_read_what_was_written(tmp_path, labels):
    images = made()
    write(tmp_path / "images.npz", images, labels=labels)
    with np.load(tmp_path / "images.npz") as archive:
        assert np.array_equal(archive["arr_0"], images)
        assert set(archive) == ({"arr_0", "arr_1"} if labels else {"arr_0"})
        if labels:
            assert archive["arr_1"].dtype == np.int64 and np.array_equal(archive["arr_1"], np.arange(10))
    with zipfile.ZipFile(tmp_path / "images.npz") as archive:
        assert archive.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())


def test_a_checksum_is_of_all_chunks_of_a_long_member(tmp_path, monkeypatch):
    monkeypatch.setattr("dit_vca.data.archive._CHUNK", 100)
    write(tmp_path / "images.npz", made(10))
    with zipfile.ZipFile(tmp_path / "images.npz") as archive:
        assert archive.testzip() is None


def test_bytes_do_not_depend_on_the_order_of_tiles_or_on_the_time(tmp_path):
    images = made()
    write(tmp_path / "a.npz", images)
    write(tmp_path / "b.npz", images, order=[8, 0, 4])
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_the_file_is_hardly_larger_than_its_images_and_leaves_nothing_beside_it(tmp_path):
    images = made(100, 16)
    write(tmp_path / "images.npz", images)
    assert (tmp_path / "images.npz").stat().st_size < images.nbytes + 2000
    assert [p.name for p in tmp_path.iterdir()] == ["images.npz"]


def test_a_partial_file_keeps_its_finished_tiles_and_ignores_a_line_cut_short(tmp_path):
    images = made()
    path = tmp_path / "images.npz"
    first = ImageArchive(path, num=10, size=4, labels=None, identity="a")
    first.begin()
    first.write_tiles({0: images[:4]}, rank=0)
    first.write_tiles({4: images[4:8]}, rank=1)
    with open(tmp_path / "images.npz.partial.tiles-1", "a") as journal:
        journal.write("8")
    second = ImageArchive(path, num=10, size=4, labels=None, identity="a")
    second.begin()
    assert second.finished_tiles() == {0, 4}
    second.write_tiles({8: images[8:]}, rank=1)  # its journal ended in a line cut short
    assert second.finished_tiles() == {0, 4, 8}
    assert np.array_equal(second.first_images(3), images[:3])
    second.finish()
    assert np.array_equal(read_images(path), images)


def test_a_partial_file_of_other_settings_is_refused(tmp_path):
    first, other = (ImageArchive(tmp_path / "images.npz", num=10, size=4, labels=None, identity=name) for name in "ab")
    other.begin()
    first.begin()  # nothing was finished in it: it is laid out anew
    first.write_tiles({0: made(4)})
    with pytest.raises(ValueError, match="other settings"):
        other.begin()


@pytest.mark.parametrize(
    ("start", "tile"), [(8, made(4)), (0, made(4).astype(np.float32)), (0, made(4, 5))], ids=["past-the-end", "float", "size"]
)
def test_a_tile_that_does_not_fit_is_refused(tmp_path, start, tile):
    archive = ImageArchive(tmp_path / "images.npz", num=10, size=4, labels=None, identity="a")
    archive.begin()
    with pytest.raises(ValueError, match="a tile must be"):
        archive.write_tiles({start: tile})


def test_reading_maps_a_stored_file_and_reads_a_compressed_one(tmp_path):
    images = made()
    write(tmp_path / "stored.npz", images)
    np.savez_compressed(tmp_path / "compressed.npz", arr_0=images)
    assert isinstance(read_images(tmp_path / "stored.npz"), np.memmap)
    assert np.array_equal(read_images(tmp_path / "compressed.npz"), images)


def damaged(kind, tmp_path):
    path = tmp_path / "images.npz"
    if kind == "missing":
        return path
    if kind == "other-key":
        np.savez(path, images=made())
    elif kind == "float":
        np.savez(path, arr_0=made().astype(np.float32))
    elif kind == "grey":
        np.savez(path, arr_0=made()[..., 0])
    elif kind == "pickle":
        np.savez(path, arr_0=np.array([{"a": 1}], dtype=object))
    else:
        write(path, made(50, 16))
        path.write_bytes(path.read_bytes()[:-3000])
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "does not exist"), ("other-key", "it holds images"), ("float", "must be uint8"), ("grey", "must be uint8"),
        ("pickle", "never loaded"), ("truncated", "truncated"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path, kind, says):
    with pytest.raises(ValueError, match=says):
        read_images(damaged(kind, tmp_path))


def test_a_missing_array_is_none(tmp_path):
    np.savez(tmp_path / "a.npz", mu=np.zeros(3))
    assert read_array(tmp_path / "a.npz", "sigma") is None
    assert read_array(tmp_path / "a.npz", "mu").shape == (3,)


@pytest.mark.slow
def test_an_archive_above_four_gigabytes_is_read_by_numpy_and_zipfile(tmp_path):
    """Sparse: only the last tile is written."""
    num, size = 22_000, 256  # 4.3 GB
    archive = ImageArchive(tmp_path / "images.npz", num=num, size=size, labels=np.arange(num), identity=json.dumps({}))
    archive.begin()
    last = made(1, size)
    archive.write_tiles({num - 1: last})
    archive.finish()
    assert np.array_equal(read_images(tmp_path / "images.npz")[-1:], last)
    with zipfile.ZipFile(tmp_path / "images.npz") as file:
        assert file.testzip() is None
        assert np.array_equal(np.load(file.open("arr_1.npy")), np.arange(num))
