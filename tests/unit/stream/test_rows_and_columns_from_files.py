"""Rows and columns in files: every format, both axes longer than memory, results in files, saved and resumed."""

import io
import os
import re
import resource
import signal
import subprocess
import sys

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from tests.support import ROOT

SCRIPT = ROOT / "tests" / "support" / "stream_in_a_process.py"
SMALL = "200KB"  # at which the points below are read in several blocks of rows and chunks of columns


def points(count, seed):
    return numpy.random.default_rng(seed).standard_normal((count, 16), dtype=numpy.float32)


X, Y = points(250, 0), points(600, 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Points as .npy, in parts, as .safetensors and .parquet."""
    import pyarrow
    import pyarrow.parquet
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("points")
    numpy.save(folder / "x.npy", X)
    numpy.save(folder / "y.npy", Y)
    numpy.save(folder / "columns first.npy", numpy.asfortranarray(Y))
    numpy.save(folder / "big endian.npy", Y.astype(">f4"))
    for k, part in enumerate(numpy.split(Y, [160, 160, 440])):
        numpy.save(folder / f"part{k}.npy", part)
    save_file({"y": torch.from_numpy(Y), "other": torch.zeros(3)}, folder / "y.safetensors")
    fixed = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(Y.reshape(-1)), 16)
    lists = pyarrow.array(list(Y), pyarrow.list_(pyarrow.float32()))
    for name, column in (("fixed", fixed), ("lists", lists)):
        table = pyarrow.table({"y": column, "label": numpy.arange(600)})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=160)
    return folder


@pytest.fixture(scope="module")
def expected():
    return ops.knn(X, Y, 5)


SOURCES = {
    ".npy": lambda f: f / "y.npy",
    "as text": lambda f: str(f / "y.npy"),
    "Fortran order": lambda f: f / "columns first.npy",
    "big endian": lambda f: f / "big endian.npy",
    "parts": lambda f: [f / f"part{k}.npy" for k in range(4)],
    ".safetensors": lambda f: f / "y.safetensors",
    "fixed lists": lambda f: f / "fixed.parquet",
    "lists": lambda f: f / "lists.parquet",
    "memory map": lambda f: numpy.load(f / "y.npy", mmap_mode="r"),
    "array": lambda f: Y,
    "chunks": lambda f: mr.chunks(f / "y.npy", size=133),
    "list of chunks": lambda f: [torch.from_numpy(p) for p in numpy.split(Y, 3)],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", SOURCES)
def test_columns_of_every_kind_and_rows_in_blocks(kind, files, expected):
    source = SOURCES[kind](files)
    with mr.budget(SMALL):
        stream = ops.knn.stream(files / "x.npy", k=5)
        assert stream._files  # read in blocks
        found = stream.over(source)
    assert numpy.array_equal(found.indices, expected.indices)
    assert numpy.allclose(found.values, expected.values, atol=1e-5)


@pytest.mark.parametrize("kind", ["as text", "parts", ".safetensors", "lists", "memory map"])
def test_rows_of_every_kind(kind, files):
    rows = SOURCES[kind](files)
    rows = mr.chunks(rows, names=["y"]) if kind in (".safetensors", "lists") else rows
    with mr.budget(SMALL):
        found = ops.knn.stream(rows, k=5).over(files / "x.npy")
    assert numpy.array_equal(found.indices, ops.knn(Y, X, 5).indices)
    assert isinstance(found.indices, numpy.ndarray if kind == "memory map" else torch.Tensor)


def test_a_generator_is_read_once(files, expected):
    found = ops.knn.stream(files / "x.npy", k=5).over(part for part in numpy.split(Y, 3))
    assert numpy.array_equal(found.indices, expected.indices)
    with mr.budget(SMALL), pytest.raises(mr.StreamError, match=r"250 rows are read in blocks of .* read only once"):
        ops.knn.stream(files / "x.npy", k=5).over(part for part in numpy.split(Y, 3))


def test_numbers_of_rows_and_columns_are_those_of_all(files):
    @mr.op
    def numbered(x: Row["d"], y: Col["d"]):
        near = mr.argmin(torch.where(mr.row_index == mr.col_index, torch.inf, mr.sqdist(x, y)))
        return near, mr.row_index + 0 * near, mr.sum(torch.tanh(x @ y)) / mr.num_cols + mr.num_rows

    with mr.budget(SMALL):
        found = numbered.stream(files / "x.npy").over(files / "x.npy")
    for a, b in zip(found, numbered(torch.from_numpy(X), torch.from_numpy(X)), strict=True):
        torch.testing.assert_close(a, b)


def test_columns_by_name_and_by_order(files, tmp_path):
    @mr.op
    def weighted(x: Row["d"], y: Col["d"], b: Col, c: Col | None = None, e: Col | None = None):
        factor = b if c is None else b + c
        return mr.sum(torch.exp(-mr.sqdist(x, y) / 32) * (factor if e is None else factor - e))

    b, c = Y[:, 0].copy(), Y[:, 1].copy()
    numpy.save(tmp_path / "b.npy", b)
    x = X[:50]
    plain, both = weighted(x, Y, b), weighted(x, Y, b, c)
    for given, want in (
        ((files / "y.npy", tmp_path / "b.npy"), plain),
        ((files / "y.npy", b, c), both),  # the first of those that may be left out
        (({"c": c, "y": Y, "b": tmp_path / "b.npy"},), both),
    ):
        numpy.testing.assert_allclose(weighted.stream(x).over(*given), want, rtol=1e-5)
    chunks = [(Y[:99], b[:99], c[:99]), (Y[99:], b[99:], c[99:])]
    numpy.testing.assert_allclose(weighted.stream(x).over(chunks), both, rtol=1e-5, atol=1e-5)
    for wrong, error, said in (
        ((Y,), mr.ArgumentError, "over was given 1 source for y, b, c, e"),
        (({"y": Y, "bb": b},), mr.ArgumentError, "b, bb does not fit"),
        ((Y, b[:-1]), mr.ShapeError, "y has 600, b has 599"),
        ((Y, numpy.ones((), numpy.float32)), mr.ShapeError, r"b was given float32\[\]"),
        ((), mr.ArgumentError, "no columns"),
    ):
        with pytest.raises(error, match=said):
            weighted.stream(x).over(*wrong)


@mr.op
def softmax_of_products(x: mr.Row["d"], y: mr.Col["d"]):
    return mr.reduce(mr.monoids.LogWSum, z=x @ y, v=y)


def test_results_go_to_files(files, tmp_path, expected):
    found = ops.knn.stream(X, k=5).over(files / "y.npy", out=tmp_path / "near.npy")
    assert isinstance(found, ops.Neighbours) and isinstance(found.values, numpy.memmap)
    with mr.budget(SMALL):
        again = ops.knn.stream(files / "x.npy", k=5).over(files / "y.npy", out=tmp_path / "blocks.npy")
    for name in ("near", "blocks"):
        assert numpy.array_equal(numpy.load(tmp_path / f"{name}.indices.npy"), expected.indices)
        numpy.testing.assert_allclose(numpy.load(tmp_path / f"{name}.values.npy"), expected.values, atol=1e-5)
    assert not again.values.flags.writeable
    one = ops.kernel_sum.stream(X).over(Y, out=str(tmp_path / "sum.npy"))
    numpy.testing.assert_allclose(one, ops.kernel_sum(X, Y), rtol=1e-4)
    softmax = softmax_of_products.stream(X).over(Y, out=tmp_path / "softmax.npy")
    assert isinstance(softmax.v, numpy.memmap)
    assert numpy.array_equal(numpy.load(tmp_path / "softmax.z.npy"), softmax.z)
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith(".npy")) == []
    for out in (tmp_path / "near.txt", tmp_path / "no" / "near.npy"):
        with pytest.raises(mr.ArgumentError, match="out"):
            ops.knn.stream(X, k=5).over(Y, out=out)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_disk_that_is_full_leaves_the_old_result(blocks, files, tmp_path):
    (tmp_path / "sum.npy").write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))  # files of this process may not grow beyond
    try:
        full = pytest.raises(mr.StreamError, match="cannot be written: File too large")
        with full, mr.budget(SMALL if blocks else "1GB"):
            ops.kernel_sum.stream(files / "x.npy").over(Y, out=tmp_path / "sum.npy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "sum.npy").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_is_full_at_the_second_result_leaves_both_old_ones(files, tmp_path):
    for name in ("near.values.npy", "near.indices.npy"):
        (tmp_path / name).write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 + 250 * 5 * 4, before[1]))  # room for values, not for indices
    try:
        with pytest.raises(mr.StreamError, match=r"near\.indices\.npy cannot be written"):
            ops.knn.stream(files / "x.npy", k=5).over(Y, out=tmp_path / "near.npy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old", b"old"]


# Stopped and resumed ----------------------------------------------------------------------------------------------


class Interrupted:
    """Columns that are interrupted before chunk ``at``, as by Ctrl-C."""

    def __init__(self, at):
        self.at = at

    def __iter__(self):
        for n, part in enumerate(numpy.split(Y, 5)):
            if n == self.at:
                raise KeyboardInterrupt
            yield torch.from_numpy(part)


def run(files, state, columns=None, rows="x.npy", **options):
    with mr.budget(SMALL):
        return ops.knn.stream(files / rows, k=options.pop("k", 5)).over(
            files / "y.npy" if columns is None else columns, state=state, **options
        )


def test_interrupted_and_resumed_to_the_bit(files, tmp_path, monkeypatch):
    straight = run(files, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()  # over and done
    read, count = mr.sources.Chunks._cut, []

    def interrupt(self, chunk):
        for values in read(self, chunk):
            count.append(1)
            if len(count) in (2, 7, 9):
                raise KeyboardInterrupt
            yield values

    monkeypatch.setattr(mr.sources.Chunks, "_cut", interrupt)
    state = tmp_path / "state"
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(files, state)
    assert oct(state.stat().st_mode)[-3:] == "700" and oct((state / "progress").stat().st_mode)[-3:] == "600"
    with mr.budget("1MB"):  # another budget would cut otherwise: the run keeps its own
        resumed = ops.knn.stream(files / "x.npy", k=5).over(files / "y.npy", state=state)
    for a, b in zip(resumed, straight, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert not state.exists()


def test_chunks_of_a_source_without_a_file_are_compared_when_they_come_again(files, tmp_path):
    x = torch.from_numpy(X)
    straight = ops.knn.stream(x, k=5).over(Interrupted(9), state=tmp_path / "whole")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            ops.knn.stream(x, k=5).over(Interrupted(3), state=tmp_path / "state")
    other = [torch.from_numpy(p) for p in numpy.split(Y, 5)]
    other[1] = other[1] + 1
    with pytest.raises(mr.StreamError, match="chunk 1 of the source is not what it was"):
        ops.knn.stream(x, k=5).over(other, state=tmp_path / "state")
    resumed = ops.knn.stream(x, k=5).over(Interrupted(9), state=tmp_path / "state")
    assert all(torch.equal(a, b) for a, b in zip(resumed, straight, strict=True))


def test_killed_and_resumed_to_the_bit(files, tmp_path):
    straight = run(files, None, out=tmp_path / "straight.npy")
    command = [sys.executable, str(SCRIPT), "slowly", files / "x.npy", files / "y.npy", tmp_path / "out.npy"]
    command.append(tmp_path / "state")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # three chunks are folded and saved
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not list(tmp_path.glob("out*"))
    saved = torch.load(io.BytesIO((tmp_path / "state" / "progress").read_bytes()[51:]), weights_only=True)
    assert saved["progress"]["chunk"] == 3
    resumed = run(files, tmp_path / "state", out=tmp_path / "out.npy")
    for a, b in zip(resumed, straight, strict=True):
        assert numpy.array_equal(a, b)


@pytest.fixture
def stopped(files, tmp_path, monkeypatch):
    """A run that was interrupted in its second block of rows."""
    state, count = tmp_path / "state", []
    with monkeypatch.context() as patch:
        save = mr.saved_runs.SavedRun.save_block
        patch.setattr(mr.saved_runs.SavedRun, "save_block", lambda *a: (save(*a), count.append(1))[0])
        read = mr.sources.Chunks._cut

        def interrupt(self, chunk):
            for values in read(self, chunk):
                if count:
                    raise KeyboardInterrupt
                yield values

        patch.setattr(mr.sources.Chunks, "_cut", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(files, state)
    return state


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGED = {
    "progress flipped": lambda s: flip(s / "progress", 200),
    "progress cut": lambda s: os.truncate(s / "progress", 300),
    "progress empty": lambda s: (s / "progress").write_bytes(b""),
    "progress of another kind": lambda s: (s / "progress").write_bytes(b"hello" * 100),
    "block flipped": lambda s: flip(s / "rows-000000", 300),
    "block missing": lambda s: (s / "rows-000000").unlink(),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_state_is_refused(how, files, stopped):
    DAMAGED[how](stopped)
    with pytest.raises(mr.StreamError, match=f"cannot be used as a saved state.*Delete the folder {stopped} to begin"):
        run(files, stopped)
    assert stopped.exists()


def test_another_runs_state_is_refused(files, stopped, tmp_path):
    other = tmp_path / "other.npy"
    numpy.save(other, Y + 1)
    for change, what in (
        (dict(k=6), r"k was 5, and is 6\."),
        (dict(columns=other), r"the columns changed since\."),
        (dict(rows="y.npy"), r"the rows of x changed since\."),
    ):
        with pytest.raises(mr.StreamError, match=f"state of another run: {what}"):
            run(files, stopped, **change)
    with pytest.raises(mr.StreamError, match="the rows"), mr.budget(SMALL):
        ops.knn.stream(files / "x.npy", k=5, metric="sqeuclidean", exclude_self=True).over(other, state=stopped)
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    with pytest.raises(mr.StreamError, match="holds other things"):
        run(files, full)
    with pytest.raises(mr.StreamError, match="cannot be kept"):
        run(files, tmp_path / "no" / "state")
    assert (full / "thesis.txt").read_text() == "mine"


# Wrong files ------------------------------------------------------------------------------------------------------


def test_files_that_are_cut_or_changed(files, tmp_path):
    path = tmp_path / "y.npy"
    numpy.save(path, Y)

    class Cutting:
        def __iter__(self):
            for n, chunk in enumerate(mr.chunks(path, size=200)):
                yield chunk
                if not n:
                    os.truncate(path, 5000)

    with pytest.raises(mr.StreamError, match=r"y\.npy has been cut short"):
        ops.knn.stream(X, k=5).over(Cutting())
    with pytest.raises(mr.StreamError, match=r"y\.npy cannot be read as \.npy: it has 5000 bytes, but"):
        ops.knn.stream(X, k=5).over(path)
    with pytest.raises(mr.StreamError, match=r"y\.npy cannot be read"):
        ops.knn.stream(path, k=5).over(Y)
    numpy.save(path, Y)
    reader = iter(mr.chunks(path, size=200))
    next(reader)
    numpy.save(path, numpy.concatenate([Y, Y]))
    with pytest.raises(mr.StreamError, match="has been changed while it was read"):
        next(reader)


def test_a_later_part_that_does_not_fit(tmp_path, files):
    for name, part, error, said in (
        ("doubles", Y.astype(float), mr.DTypeError, r"doubles\.npy holds float64, but .*part0\.npy float32"),
        ("narrow", Y[:, :3], mr.ShapeError, r"narrow\.npy has shape \[600, 3\], but .*part0\.npy \[160, 16\]"),
        ("number", numpy.float32(1), mr.ShapeError, r"number\.npy has shape \[\]"),
    ):
        numpy.save(tmp_path / f"{name}.npy", part)
        with pytest.raises(error, match=said):
            ops.knn.stream(X, k=5).over([files / "part0.npy", tmp_path / f"{name}.npy"])
    with pytest.raises(mr.ArgumentError, match="no file"):
        ops.knn.stream(X, k=5).over([files / "part0.npy", tmp_path / "nothing.npy"])
    with pytest.raises(mr.ArgumentError, match=re.escape("y.safetensors has no")):
        mr.chunks(files / "y.safetensors", names=["z"])


def test_what_rows_in_a_file_cannot_do(files):
    with mr.budget(SMALL):
        stream = ops.knn.stream(files / "x.npy", k=5)
        for call in (lambda: stream.update(Y), stream.state_dict, lambda: stream.load_state_dict({})):
            with pytest.raises(mr.StreamError, match="holds all rows, but those of x are read from a file"):
                call()
        with pytest.raises(mr.ShapeError, match="the rows differ in number: x has 250, target has 3"):
            ops.linear_cross_entropy.stream(files / "x.npy", torch.zeros(3, dtype=torch.int64)).over(Y)
        with pytest.raises(mr.StreamError, match="adds up its rows"):
            ops.maxsim.stream(files / "x.npy").over(Y)
    numpy.save(files / "flat.npy", Y[:, 0])
    flat = r"was given .*flat.npy, float32\[\d+\]. Give one vector per {}: an array of 2 or more dimensions"
    with pytest.raises(mr.ShapeError, match="x " + flat.format("row")):
        ops.knn.stream(files / "flat.npy", k=5).over(Y)
    with pytest.raises(mr.ShapeError, match="y " + flat.format("column")):
        ops.knn.stream(Y, k=5).over(files / "flat.npy")
    x = torch.from_numpy(X).requires_grad_()
    with pytest.raises(mr.StreamError, match="have no gradients"):
        ops.knn.stream(x, k=5).over(Y, out="near.npy")


# Memory and progress ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_is_held_by_the_budget(tmp_path):
    """Rows and columns in files, each larger than the budget, in a process that may hardly allocate more."""
    budget, generator = 6 * 2**20, numpy.random.default_rng(0)
    x, y = (generator.standard_normal((1200, 2048), dtype=numpy.float32) for _ in "xy")
    numpy.save(tmp_path / "x.npy", x)
    numpy.save(tmp_path / "y.npy", y)
    assert x.nbytes > 1.5 * budget and y.nbytes > 1.5 * budget
    command = [
        sys.executable,
        SCRIPT,
        "bounded",
        *(tmp_path / f"{n}.npy" for n in ("x", "y", "near")),
        budget,
        2 * 2**20,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # allocators that keep nothing in reserve, so that the limit is felt (some builds of torch bring mimalloc)
    environment |= {"MALLOC_MMAP_THRESHOLD_": str(2**18), "MIMALLOC_ARENA_RESERVE": "0", "MIMALLOC_PURGE_DELAY": "0"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stdout + done.stderr[-1500:]
    near = torch.cdist(torch.from_numpy(x), torch.from_numpy(y)).topk(5, largest=False)
    assert numpy.allclose(numpy.load(tmp_path / "near.values.npy"), near.values, atol=1e-3)


def test_the_line_says_how_far_how_fast_and_how_long(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    meter = mr.sources.Meter(True, 3_000_000, "folding", "pairs", done=1_000_000)
    meter.add(500_000)
    assert meter.text(2.0) == "folding  50%  1.5M of 3M pairs  250k/s  0:00:06 left"
    unknown = mr.sources.Meter(True, None, "folding", "columns")
    unknown.add(4096)
    assert unknown.text(2.0) == "folding  4.1k columns  2.05k/s"
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    ops.knn.stream(X, k=5).over(Y, state=None)
    assert re.search(r"folding  100%  1 of 1", shown.getvalue()) and shown.getvalue().endswith("\r")


def test_a_file_of_no_columns_is_no_columns_and_a_source_of_nothing_an_error(tmp_path):
    x = numpy.ones((50, 3), numpy.float32)
    numpy.save(tmp_path / "x.npy", x)
    numpy.save(tmp_path / "none.npy", x[:0])
    for rows, more in ((x, {}), (tmp_path / "x.npy", {"out": tmp_path / "out.npy", "state": tmp_path / "run"})):
        found = ops.kernel_logsumexp.stream(rows).over(tmp_path / "none.npy", **more)
        assert numpy.array_equal(found, numpy.full(50, -numpy.inf, numpy.float32))
        for nothing in (iter([]), []):
            with pytest.raises(mr.StreamError, match="the source is empty"):
                ops.kernel_logsumexp.stream(rows).over(nothing, **more)
