"""Files that ``mr.chunks`` cannot read: damaged, cut short before or while they are read, or of another kind."""

import os
import re

import numpy
import pytest
import torch

import monoidreduce as mr


@mr.op
def total(x: mr.Row["d"], y: mr.Col["d"]):
    return mr.sum(x @ y)


def write_npy(path):
    numpy.save(path, numpy.ones((5000, 4), numpy.float32))


def write_safetensors(path):
    torch_files = pytest.importorskip("safetensors.torch")
    torch_files.save_file({"y": torch.ones(5000, 4)}, path)


def write_parquet(path):
    pytest.importorskip("pyarrow.parquet")
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"y": [[1.0] * 4 for _ in range(5000)]})
    pyarrow.parquet.write_table(table, path, row_group_size=500)


WRITERS = {".npy": write_npy, ".safetensors": write_safetensors, ".parquet": write_parquet}


def cut_half(path):
    os.truncate(path, path.stat().st_size // 2)


def cut_head(path):
    os.truncate(path, 5)


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "text": lambda path: path.write_text("hello\n"),
    "half": cut_half,
    "head": cut_head,
    "other format": lambda path: path.write_bytes(b"\x93NUMPY\x09\x09" if path.suffix == ".npy" else b"PAR1PAR1"),
}


@pytest.mark.parametrize("suffix", list(WRITERS))
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, suffix, damage):
    path = tmp_path / f"y{suffix}"
    WRITERS[suffix](path)
    DAMAGES[damage](path)
    with pytest.raises(mr.StreamError, match=re.escape(f"{path} cannot be read as {suffix}: ")) as raised:
        list(mr.chunks(path, size=100))
    assert "write it again" in str(raised.value)


@pytest.mark.parametrize("suffix", list(WRITERS))
def test_a_file_that_is_cut_short_while_it_is_read(tmp_path, suffix):
    """A mapped file that is read behind its end would kill the process."""
    path = tmp_path / f"y{suffix}"
    WRITERS[suffix](path)
    reader = iter(mr.chunks(path, size=500))
    next(reader)
    os.truncate(path, 200)
    with pytest.raises(mr.StreamError, match=re.escape(str(path))):
        list(reader)


def test_memory_maps_that_are_whole_are_read_wherever_they_start(tmp_path):
    path = tmp_path / "y.raw"
    numpy.ones((20000, 4), numpy.float32).tofile(path)
    for offset in (0, 32, 70000):
        mapped = numpy.memmap(path, numpy.float32, "r", offset=offset, shape=(5000, 4))
        found = total.stream(torch.ones(2, 4)).over(mr.chunks(mapped, size=900))
        assert torch.equal(found, torch.full((2,), 20000.0))
        assert len(list(mr.chunks(mapped[100:], size=900))) == 6


def test_a_source_that_is_cut_short_in_a_stream(tmp_path):
    path = tmp_path / "y.raw"
    numpy.ones((20000, 4), numpy.float32).tofile(path)
    source = mr.chunks(numpy.memmap(path, numpy.float32, "r", offset=70000, shape=(5000, 4)), size=900)
    x = torch.ones(2, 4, requires_grad=True)
    found = total.stream(x).over(source)
    os.truncate(path, 80000)
    with pytest.raises(mr.StreamError, match=r"y\.raw has been cut short"):
        found.sum().backward()


def test_what_is_no_array_of_numbers(tmp_path):
    for name, values in {
        "texts": numpy.array(["a", "b"]),
        "dates": numpy.array(["2020-01-01"], "datetime64[D]"),
    }.items():
        with pytest.raises(mr.DTypeError, match="no type for"):
            mr.chunks(values)
        numpy.save(tmp_path / f"{name}.npy", values)
        with pytest.raises(mr.DTypeError, match=f"{name}.npy"):
            mr.chunks(tmp_path / f"{name}.npy")
    numpy.save(tmp_path / "objects.npy", numpy.array([{}, None], object), allow_pickle=True)
    with pytest.raises(mr.StreamError, match=r"objects\.npy"):
        mr.chunks(tmp_path / "objects.npy")
    numpy.save(tmp_path / "one.npy", numpy.float32(3))
    with pytest.raises(mr.ArgumentError, match="axes"):
        mr.chunks(tmp_path / "one.npy")
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(mr.ArgumentError, match="is a folder"):
        mr.chunks(tmp_path / "folder.npy")


def test_a_parquet_column_that_is_no_vector(tmp_path):
    pytest.importorskip("pyarrow.parquet")
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "y.parquet"
    for values, error in (
        ([[1.0], [1.0, 2.0]], mr.StreamError),
        ([[1.0], None], mr.MonoidReduceError),
        (["a", "b"], mr.MonoidReduceError),
    ):
        pyarrow.parquet.write_table(pyarrow.table({"y": values}), path)
        with pytest.raises(error):
            list(mr.chunks(path))
