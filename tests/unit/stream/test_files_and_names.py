"""What a run may not write over, tables with a column for each feature, patterns, and what an interrupt says."""

import itertools
import os
import sys

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops, saved_runs

X = numpy.random.default_rng(0).random((400, 3)).astype(numpy.float32)


@pytest.fixture
def points(tmp_path):
    numpy.save(tmp_path / "x.npy", X)
    return tmp_path / "x.npy"


def test_out_that_is_an_input_is_refused_and_the_input_stays(points, tmp_path):
    hard, soft = tmp_path / "hard.npy", tmp_path / "soft.npy"
    os.link(points, hard)
    soft.symlink_to(points)
    weights = tmp_path / "b.npy"
    numpy.save(weights, X[:, 0])
    (tmp_path / "near.values.npy").symlink_to(points)
    runs = {
        "columns": lambda: ops.kernel_sum.stream(X[:50]).over(points, out=points),
        "second column": lambda: ops.kernel_sum.stream(X[:50]).over(points, weights, out=weights),
        "rows": lambda: ops.kernel_sum.stream(points).over(X, out=points),
        "mapped rows": lambda: ops.kernel_sum.stream(numpy.load(points, mmap_mode="r")).over(X, out=points),
        "mapped columns": lambda: ops.kernel_sum.stream(X).over(numpy.load(points, mmap_mode="r"), out=points),
        "one of a list": lambda: ops.kernel_sum.stream(X).over([weights.with_name("x.npy"), points], out=points),
        "chunks": lambda: ops.kernel_sum.stream(X).over(mr.chunks(points), out=points),
        "a hard link": lambda: ops.kernel_sum.stream(X[:50]).over(points, out=hard),
        "a symbolic link": lambda: ops.kernel_sum.stream(X[:50]).over(points, out=soft),
        "one of several results": lambda: ops.knn.stream(X[:50], k=2).over(points, out=tmp_path / "near.npy"),
    }
    for name, run in runs.items():
        with pytest.raises(mr.ArgumentError, match=r"that is read, and would replace it"):
            run()
        assert numpy.array_equal(numpy.load(points), X), name
    (tmp_path / "near.values.npy").unlink()
    ops.knn.stream(X[:50], k=2).over(points, out=tmp_path / "near.npy")  # an older result may be replaced
    ops.knn.stream(X[:50], k=2).over(points, out=tmp_path / "near.npy")


def test_what_is_no_state_is_refused():
    @mr.op
    def total(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.sum(x @ y)

    fold = total.stream(torch.tensor(X))
    fold.update(torch.tensor(X))
    state = fold.state_dict()
    with pytest.raises(mr.StreamError, match="the state is None"):
        total.stream(torch.tensor(X)).load_state_dict(None)
    for name, wrong in (("ranges", None), ("rows", 3), ("columns", 3), ("stop", "a"), ("states", 3)):
        with pytest.raises(mr.StreamError, match=f"the state lacks {name}"):
            total.stream(torch.tensor(X)).load_state_dict({**state, name: wrong})


def test_a_state_that_cannot_be_written_lets_go_of_its_buffer(tmp_path):
    """A view of a buffer in an error's frames made Python say "BufferError ignored" when the frames were collected."""
    with pytest.raises(mr.StreamError, match="cannot be written") as caught:
        saved_runs._write(tmp_path / "none" / "progress", {"a": torch.ones(3)})
    (buffer,) = (e.frame.f_locals["buffer"] for e in caught.traceback if "buffer" in e.frame.f_locals)
    buffer.close()


def test_folders_paths_and_budgets_that_do_not_do(points, tmp_path):
    with pytest.raises(mr.ArgumentError, match=r"is no file of .npy.* Give its files, as a list or a pattern"):
        ops.knn.stream(X[:50], k=2).over(tmp_path)
    with pytest.raises(mr.ArgumentError, match=r"op.stream\(rows\).over\(columns\)"):
        ops.knn(X[:50], str(points), 2)
    numpy.save(tmp_path / "many.npy", numpy.zeros((20_000, 3), "f"))
    with mr.budget("2KB"), pytest.raises(mr.BudgetError, match=r"of 2000B .* at least 26kB"):
        ops.kernel_sum.stream(tmp_path / "many.npy").over(points, X[:, 0], quiet=True)


def test_a_state_folder_that_holds_an_input_or_the_result_is_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    numpy.save(folder / "rows-1.npy", X)
    with pytest.raises(mr.ArgumentError, match="which is deleted when the run is done"):
        ops.kernel_sum.stream(X[:50]).over(folder / "rows-1.npy", state=folder)
    with pytest.raises(mr.ArgumentError, match="which is deleted when the run is done"):
        ops.kernel_sum.stream(X[:50]).over(X, out=folder / "sum.npy", state=folder)
    assert numpy.array_equal(numpy.load(folder / "rows-1.npy"), X)


def write_table(path, features=3, **more):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {f"f{k}": X[:, k] for k in range(features)}
    pq.write_table(pa.table({**columns, **more}), path, row_group_size=150)
    return path


def test_a_table_with_a_column_for_each_feature(tmp_path):
    wide = write_table(tmp_path / "wide.parquet", label=[str(k) for k in range(len(X))])
    want = ops.knn(X[:50], X, 4)
    features = {"y": ["f0", "f1", "f2"]}
    found = ops.knn.stream(X[:50], k=4).over(mr.chunks(wide, names=features, size=90))
    assert torch.equal(torch.as_tensor(found.indices), torch.as_tensor(want.indices))
    rows = mr.chunks(wide, names={"x": ["f0", "f1", "f2"]})
    found = ops.knn.stream(rows, k=4).over(X)
    assert numpy.array_equal(numpy.asarray(found.indices)[:50], want.indices)
    both = ops.kernel_sum.stream(X[:50]).over({"y": mr.chunks(wide, names=features), "b": X[:, 0]})
    numpy.testing.assert_allclose(both, ops.kernel_sum(X[:50], X, X[:, 0]), rtol=1e-5)


def test_errors_of_tables_name_the_file_its_columns_and_what_is_needed(tmp_path):
    wide = write_table(tmp_path / "wide.parquet", label=[str(k) for k in range(len(X))])
    numbers = write_table(tmp_path / "numbers.parquet")
    with pytest.raises(mr.ArgumentError, match=r"numbers.parquet has f0, f1, f2, but y is needed.*names=dict\(y=\["):
        ops.knn.stream(X, k=4).over(numbers)
    with pytest.raises(mr.ArgumentError, match=r"numbers.parquet has f0, f1, f2, but x is needed"):
        ops.knn.stream(numbers, k=4)
    with pytest.raises(mr.ArgumentError, match=r"wide.parquet has no f9.*It has f0, f1, f2, label"):
        mr.chunks(wide, names={"y": ["f0", "f9"]})
    with pytest.raises(mr.ArgumentError, match=r"label in .*wide.parquet holds .*, and cannot be a feature"):
        mr.chunks(wide, names={"y": ["f0", "label"]})
    with pytest.raises(mr.ArgumentError, match=r"over was given 3 sources for y\. .*end to end"):
        ops.knn.stream(X, k=4).over("y0.npy", "y1.npy", "y2.npy")


def test_patterns_are_files_in_the_order_of_their_names(tmp_path):
    for k, part in enumerate(numpy.array_split(X, 3)):
        numpy.save(tmp_path / f"y{k}.npy", part)
    want = ops.knn(X[:50], X, 4)
    found = ops.knn.stream(X[:50], k=4).over(tmp_path / "y?.npy")
    assert numpy.array_equal(found.indices, want.indices)
    assert numpy.array_equal(ops.knn.stream(str(tmp_path / "y*.npy"), k=4).over(X).indices[:50], want.indices)
    with pytest.raises(mr.ArgumentError, match="would replace it"):
        ops.kernel_sum.stream(X[:50]).over(tmp_path / "y?.npy", out=tmp_path / "y1.npy")
    with pytest.raises(mr.ArgumentError, match=r"no file fits .*z\*\.npy"):
        ops.knn.stream(X, k=4).over(tmp_path / "z*.npy")
    numpy.save(tmp_path / "a[1].npy", X)  # a name, not a pattern
    assert numpy.array_equal(ops.knn.stream(X[:50], k=4).over(tmp_path / "a[1].npy").indices, want.indices)


def test_an_interrupted_run_says_how_to_go_on(tmp_path, capsys):
    class Stops:
        def __iter__(self):
            yield X[:100]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        ops.knn.stream(X[:50], k=4).over(Stops(), state=tmp_path / "run")
    notes = getattr(stopped.value, "__notes__", []) if sys.version_info >= (3, 11) else [capsys.readouterr().err]
    assert len(notes) == 1 and f"the state is kept in {tmp_path / 'run'}, with 100 columns folded" in notes[0]
    assert "The same call goes on from there" in notes[0]


def test_home_folders_and_endings_in_capitals(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    numpy.save(tmp_path / "x.npy", X)
    (tmp_path / "x.npy").rename(tmp_path / "X.NPY")
    want = ops.kernel_sum(X, X, X[:, 0])
    numpy.save(tmp_path / "b.npy", X[:, 0])
    kept = ops.kernel_sum.stream("~/X.NPY").over("~/X*.NPY", "~/b.npy", out="~/sum.npy", state="~/run")
    assert torch.equal(torch.tensor(numpy.load(tmp_path / "sum.npy")), torch.tensor(kept))
    numpy.testing.assert_allclose(kept, want, rtol=1e-5)
    with pytest.raises(mr.ArgumentError, match=r"is the file .*b\.npy that is read"):
        ops.kernel_sum.stream("~/X.NPY").over("~/X.NPY", "~/b.npy", out=tmp_path / "b.npy")


def test_texts_beside_the_numbers_of_a_table_are_left_alone(tmp_path):
    vectors = pytest.importorskip("pyarrow").array(list(X))
    table = write_table(tmp_path / "table.parquet", 1, y=vectors, title=[str(k) for k in range(len(X))])
    want = ops.knn(X[:50], X, 4)
    assert numpy.array_equal(ops.knn.stream(X[:50], k=4).over(table).indices, want.indices)
    wide = write_table(tmp_path / "wide.parquet", title=[str(k) for k in range(len(X))])
    with pytest.raises(mr.ArgumentError, match=r"wide.parquet has f0, f1, f2, but y is needed"):
        ops.knn.stream(X, k=4).over(wide)


def test_a_large_group_of_a_table_is_decoded_piece_by_piece(tmp_path):
    """Writers put a million rows in one group unless told."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    x = numpy.random.default_rng(0).random((300_000, 16), numpy.float32)
    pq.write_table(pa.table({"y": pa.FixedSizeListArray.from_arrays(x.reshape(-1), 16)}), tmp_path / "y.parquet")
    at, held, before = 0, 0, pa.total_allocated_bytes()
    chunks = mr.chunks(tmp_path / "y.parquet", size=20_000)
    for (part,) in itertools.chain(chunks, chunks):  # as a second pass reads it
        assert numpy.array_equal(part, x[at : at + len(part)])
        at = (at + len(part)) % len(x)
        held = max(held, pa.total_allocated_bytes() - before)
    assert at == 0 and held < x.nbytes // 2
    opened = chunks.arrays[0]
    for start, stop in ((70_000, 70_001), (100, 20_000), (20_000, 20_100), (299_000, 300_000), (5, 5)):
        assert numpy.array_equal(opened.read(start, stop), x[start:stop])


def test_what_cannot_be_is_refused_before_any_work(points, tmp_path, monkeypatch):
    def read(self, chunk):
        yield (torch.tensor(X[:100]),)  # which says their type
        raise AssertionError

    columns = mr.chunks(points, size=100)
    monkeypatch.setattr(type(columns), "read_from", read)
    for rows in (X[:50], points):
        for more in ({}, {"state": tmp_path / "run"}, {"out": tmp_path / "out.npy"}):
            with pytest.raises(mr.TopKError, match="k = 401 of only 400 columns"):
                ops.knn.stream(rows, k=401).over(columns, **more)
            assert not (tmp_path / "run" / "progress").exists()  # which would refuse a run with another k
    for every in ("30s", -1, None, True, float("nan")):
        with pytest.raises(mr.ArgumentError, match="every was given"):
            ops.knn.stream(X, k=4).over(points, state=tmp_path / "run", every=every)
    for thing in (numpy, numpy.ndarray, 3.0):
        with pytest.raises(mr.MonoidReduceError, match="y was given"):
            ops.kernel_sum.stream(X).over(thing, X[:, 0])
    for size in (0, 2.5, "all"):
        with pytest.raises(mr.ArgumentError, match="chunks was given size = "):
            mr.chunks(points, size=size)
    for name, given in (("out", 3), ("out", b"near.npy"), ("state", 3)):
        with pytest.raises(mr.ArgumentError, match=f"{name} was given .* Give a path"):
            ops.knn.stream(X[:50], k=2).over(points, **{name: given})
    numpy.save(tmp_path / "flat.npy", X[:, 0])
    with pytest.raises(mr.ShapeError, match=r"y was given \S*flat.npy, float32\[400\]"):
        ops.knn.stream(X[:50], k=2).over(tmp_path / "flat.npy")


def test_chunks_of_wide_columns_have_few_of_them():
    """However long the vectors are, a chunk is no more than 128 MiB."""
    wide = torch.zeros(1, 1).expand(1000, 2**20)
    assert [len(c[0]) for c in itertools.islice(mr.chunks(wide), 2)] == [32, 32]
