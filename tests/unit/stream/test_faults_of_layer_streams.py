"""Bad inputs and faults of files, tried on the stream of every ready-made layer: refused by name, or gone on to the
bit."""

import os
import pathlib
import resource
import signal

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import block_runs, ops, sources
from monoidreduce import stream as stream_module
from monoidreduce.ops.streaming import BothWays
from tests.support.layer_streams import LAYERS, WITH_ROWS_IN_MEMORY, columns_of, flatten, give, rows_of

NOT_ARRAYS = {
    "an object": lambda t: object(),
    "a number": lambda t: numpy.float32(3),
    "bytes": lambda t: b"abc",
    "a dict": lambda t: {"a": 1},
    "lists": lambda t: t.tolist(),
    "texts": lambda t: t.numpy().astype(str),
    "objects": lambda t: t.numpy().astype(object),
    "complex": lambda t: t.numpy().astype(numpy.complex64),
    "masked": lambda t: numpy.ma.masked_array(t.numpy()),
    "no axes": lambda t: numpy.array(3.0, numpy.float32),
    "no such file": lambda t: "nothing.npy",
}


class Case:
    """A layer with its rows and columns, in memory and in files, cut into chunks of 23 and blocks of 17."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.layer, self.args = getattr(ops, name.split()[0]), LAYERS[name]
        self.cols = {n: self.args[n] for n in columns_of(self.layer, self.args)}
        self.stays = {n: v for n, v in self.args.items() if n not in self.cols}
        self.rows = [n for n in rows_of(self.layer, self.args) if isinstance(self.stays.get(n), torch.Tensor)]
        for n, value in self.args.items():
            if isinstance(value, torch.Tensor):
                numpy.save(folder / f"{n}.npy", value.numpy())
        self.files = dict(self.stays)
        if name not in WITH_ROWS_IN_MEMORY:
            self.files |= {n: folder / f"{n}.npy" for n in self.rows}
        self.col_files = {n: str(folder / f"{n}.npy") for n in self.cols}

    def over(self, stays=None, cols=None, **options):
        stays, cols = stays or self.files, cols or self.col_files
        return self.layer.stream(**stays).over(*give(cols), **options)

    @property
    def both_ways(self):
        return isinstance(self.layer.stream(**self.stays), BothWays)

    @property
    def first_reads(self):
        """How many arrays are read before the second chunk."""
        return 2 * len(self.cols) + len(self.rows)


@pytest.fixture(params=LAYERS)
def case(request, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "columns_per_chunk", lambda arrays, most: 23)
    monkeypatch.setattr(stream_module, "fits_in_memory", lambda files: not list(files))
    few = lambda run, limit: 0 if run.rows.total is None else 17
    monkeypatch.setattr(block_runs.BlockRun, "_rows_per_block", few)
    return Case(request.param, tmp_path)


def disturbed(case, number, act, **options):
    """A run in which something happens when arrays have been read ``number`` times."""
    read, left = sources.AlongAxis.__getitem__, [number]

    def get(self, which):
        left[0] -= which.stop > which.start
        if left[0] == 0:
            left[0] = -1
            act()
        return read(self, which)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources.AlongAxis, "__getitem__", get)
        return case.over(**options)


@pytest.mark.sampled(6)
def test_what_is_no_array_is_named_by_type_and_shape(case):
    """One of our errors, without the numbers of what was given."""
    for make in NOT_ARRAYS.values():
        for n, value in case.cols.items():
            with pytest.raises(mr.MonoidReduceError) as raised:
                case.over(case.stays, {**case.cols, n: make(value)})
            assert len(str(raised.value)) < 900
        for n in case.rows:
            with pytest.raises(mr.MonoidReduceError) as raised:
                case.over({**case.stays, n: make(case.stays[n])}, case.cols)
            assert len(str(raised.value)) < 900


@pytest.mark.sampled(6)
def test_a_file_or_map_that_is_cut_short_meanwhile_is_named(case):
    path = pathlib.Path(next(iter(case.col_files.values())))
    whole = path.read_bytes()
    for mapped in (False, True):
        cols = {n: numpy.load(v, mmap_mode="r") for n, v in case.col_files.items()} if mapped else case.col_files
        with pytest.raises(mr.StreamError, match=f"{path.name} has been cut short"):
            disturbed(case, 2 * len(case.cols) + 1, lambda: os.truncate(path, 200), cols=cols)
        path.write_bytes(whole)
    if case.name not in WITH_ROWS_IN_MEMORY:
        path = case.files[case.rows[0]]
        stays = {n: numpy.load(v, mmap_mode="r") if isinstance(v, pathlib.Path) else v for n, v in case.files.items()}
        stream = case.layer.stream(**stays)
        os.truncate(path, 100)
        with pytest.raises(mr.StreamError, match=f"{path.name} has been cut short"):
            stream.over(*give(case.col_files))
        with pytest.raises(mr.StreamError, match=path.name):
            case.over()


class Stopped(KeyboardInterrupt):
    pass


def stop():
    raise Stopped


def bits(result):
    if isinstance(result, numpy.ndarray):
        return [(result.dtype, result.shape, result.tobytes())]
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, tuple | list) else ()
    return [b for part in parts for b in bits(part)]


@pytest.mark.sampled(6)
def test_stopped_runs_go_on_to_the_bit_and_a_full_disk_leaves_nothing(case):
    if case.both_ways:
        pytest.skip("has neither out= nor state=")
    folder = case.folder
    expected = bits(case.over(out=folder / "undisturbed.npy", state=folder / "state"))
    assert expected
    for number in (case.first_reads, 5 * len(case.cols) + 2 * len(case.rows)):  # in the first block; in any
        saved = dict(out=folder / "result.npy", state=folder / "state", every=0)
        try:
            disturbed(case, number, stop, **saved)
        except Stopped:
            assert not [*folder.glob("result*")] and (folder / "state").exists()
        assert bits(case.over(**saved)) == expected and not (folder / "state").exists()
        for path in folder.glob("result*"):
            path.unlink()
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limit[1]))
        with pytest.raises(mr.StreamError, match="cannot be written: File too large"):
            case.over(out=folder / "result.npy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert not [p for p in folder.iterdir() if p.name.startswith((".", "result"))]


@pytest.mark.sampled(6)
def test_states_merge_once_in_any_order_and_a_changed_source_is_refused(case):
    streams = getattr(case.layer.stream, "__self__", None)
    if streams is None:
        pytest.skip("its stream is another layer's")
    count = {n: v.shape[streams.cols[n].axis(v.dim())] for n, v in case.cols.items()}
    (total,) = set(count.values())

    def cut(start, stop):
        return {n: v.narrow(streams.cols[n].axis(v.dim()), start, stop - start) for n, v in case.cols.items()}

    def fold(start, stop):
        part = case.layer.stream(**case.stays).starting(start)
        part.update(**cut(start, stop))
        return part

    try:
        whole, first = fold(23, total), fold(0, 23)
    except mr.StreamError as error:
        assert "over(source)" in str(error)  # several passes, or the number of columns is asked for
    else:
        found = flatten(whole.merge(first).result())
        for got, expected in zip(found, flatten(case.layer(**case.args)), strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
        with pytest.raises(mr.StreamError, match="folded twice"):
            whole.merge(first)

    class Changing:
        """Columns whose second half is other the second time."""

        def __init__(self, later):
            self.later = [[cut(0, 23), cut(23, total)], later]

        def __iter__(self):
            return iter(self.later.pop(0))

    asks = lambda n, v: v.clone().requires_grad_() if n in case.rows and v.is_floating_point() else v
    for later in ([cut(0, 23)], [cut(0, 23), cut(23, total), cut(0, 5)], [cut(0, 23), cut(23, 46)]):
        stays = {n: asks(n, v) for n, v in case.stays.items()}
        with pytest.raises(mr.StreamError, match="Changing"):
            results = [t for t in flatten(case.layer.stream(**stays).over(Changing(later))) if t.requires_grad]
            if not results:
                pytest.skip("has no gradient, and one pass")
            sum(t.sum() for t in results).backward()
