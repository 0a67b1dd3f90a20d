"""Streams: any chunking is the whole; resume to the bit; gradients by a second reading; files; little memory."""

import io
import os
import random
import subprocess
import sys
import weakref

import numpy
import pytest
import torch

import monoidreduce as mr
from tests.support import ROOT
from tests.support.allocations import Watch
from tests.support.comparison import Result, assert_equal, flatten, is_float, named, run, use_small_tiles
from tests.support.layers import BY_NAME, ZOO


@pytest.fixture(autouse=True)
def small_tiles(request, monkeypatch):
    if "memory" not in request.node.name:
        use_small_tiles(monkeypatch)


def sides(layer, args):
    """The arguments that stay and those that are streamed, by name."""
    given = dict(zip(layer.op.parameters, args, strict=False))
    columns = [n for n, p in layer.op.parameters.items() if p.axis in ("cols", "pairs") and given.get(n) is not None]
    return {n: v for n, v in given.items() if n not in columns}, {n: given[n] for n in columns}


def length(layer, columns):
    (name, value), *_ = columns.items()
    return value.shape[value.dim() - 1 - (layer.op.parameters[name].feature is not None)]


def cut(layer, columns, ends):
    found = []
    for start, stop in zip([0, *ends], [*ends, length(layer, columns)], strict=True):
        axis = lambda n, v: v.dim() - 1 - (layer.op.parameters[n].feature is not None)
        found.append({n: v.narrow(axis(n, v), start, stop - start).detach().clone() for n, v in columns.items()})
    return found


def ends_of(total, count, seed):
    chance = random.Random(seed)
    return sorted(chance.randint(0, total) for _ in range(count - 1))


def streams(layer):
    """Whether a layer's results are per row."""
    try:
        rows, columns = sides(layer, layer.args(4, 6, 0))
        layer.op.stream(**rows).over([columns])
    except mr.StreamError:
        return False
    return True


STREAMED = [layer for layer in ZOO if streams(layer)]


def test_most_layers_stream():
    assert len(STREAMED) > 0.7 * len(ZOO)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layer", named(STREAMED))
def test_any_chunking_is_the_whole_with_gradients_for_rows_and_columns(layer, seed):
    args = layer.args(13, 41, seed)
    whole = run(layer.op, args)
    rows, columns = sides(layer, args)
    rows = {n: v.clone().requires_grad_() if is_float(v) else v for n, v in rows.items()}
    chunks = cut(layer, columns, ends_of(length(layer, columns), 5, seed))
    found = {n: {} for n, v in columns.items() if is_float(v)}

    def collect(start, grads):
        for n, g in grads.items():
            key = (start, g.shape)  # an empty chunk starts where the next one does
            found[n][key] = found[n].get(key, 0) + g

    values = flatten(layer.op.stream(**rows).over(chunks, gradients=collect))
    gen = torch.Generator().manual_seed(11)
    cotangents = [torch.randn(v.shape, generator=gen, dtype=torch.float64) for v in values]
    moving = [(v, g) for v, g in zip(values, cotangents, strict=True) if v.requires_grad]
    if moving:
        torch.autograd.backward([v for v, _ in moving], [g for _, g in moving])
    got = Result({f"value {k}": v.detach() for k, v in enumerate(values)}, {})
    for k, (name, p) in enumerate(layer.op.parameters.items()):
        if k >= len(args) or not is_float(args[k]):
            continue
        axis = args[k].dim() - 1 - (p.feature is not None)
        if p.axis in ("cols", "pairs"):
            g = (
                torch.cat([g for _, g in sorted(found[name].items(), key=lambda item: item[0])], axis)
                if found[name]
                else None
            )
        else:
            g = rows[name].grad
        got.grads[f"gradient {k}"] = torch.zeros_like(args[k]) if g is None else g
    if not moving:
        got.grads.update({n: g for n, g in whole.grads.items()})
    assert_equal(got, whole)


@pytest.mark.parametrize("name", ["scaled_attention", "cross_entropy", "categorical_sample", "nearest_neighbours"])
def test_stop_and_resume_to_the_bit(name, seed, tmp_path):
    layer = BY_NAME[name]
    rows, columns = sides(layer, layer.args(9, 50, seed, torch.float32))
    chunks = cut(layer, columns, [7, 20, 21, 40])
    straight, stopped = layer.op.stream(**rows), layer.op.stream(**rows)
    for chunk in chunks:
        straight.update(**chunk)
    for chunk in chunks[:2]:
        stopped.update(**chunk)
    torch.save(stopped.state_dict(), tmp_path / "state.pt")
    resumed = layer.op.stream(**rows).load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for chunk in chunks[2:]:
        resumed.update(**chunk)
    for a, b in zip(flatten(straight.result()), flatten(resumed.result()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["causal_attention", "nearest_neighbours", "cross_entropy"])
def test_streams_merge(name, seed):
    layer = BY_NAME[name]
    args = layer.args(9, 50, seed)
    rows, columns = sides(layer, args)
    first, second, third = cut(layer, columns, [20, 33])
    one, two = layer.op.stream(**rows), layer.op.stream(**rows).starting(20)
    one.update(**first)
    two.update(**second)
    two.update(**third)
    merged = two.merge(one).result()
    for a, b in zip(flatten(merged), flatten(layer.op(*args)), strict=True):
        torch.testing.assert_close(a, b)


def test_chunks_that_ask_get_their_gradient():
    layer = BY_NAME["scaled_attention"]
    args = layer.args(5, 12, 3)
    rows, columns = sides(layer, args)
    chunks = [{n: v.requires_grad_() for n, v in c.items()} for c in cut(layer, columns, [5])]
    rows = {n: v.requires_grad_() if is_float(v) else v for n, v in rows.items()}
    layer.op.stream(**rows).over(chunks).sum().backward()
    whole = run(layer.op, args, cotangents=[torch.ones(5, 3, dtype=torch.float64)])
    torch.testing.assert_close(torch.cat([c["k"].grad for c in chunks]), whole.grads["gradient 1"])


@mr.op
def find(x: mr.Row["d"], y: mr.Col["d"]):
    s = x @ y
    top = mr.topk(s, 10)
    return top.values, top.indices, mr.sum(s)


def test_sources_of_every_kind(tmp_path):
    from safetensors.torch import save_file

    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 6, generator=gen), torch.randn(1000, 6, generator=gen)
    expected = find(x, y)
    numpy.save(tmp_path / "y.npy", y.numpy())
    save_file({"y": y, "other": y[:3].clone()}, tmp_path / "y.safetensors")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(y), batch_size=64)
    flat = numpy.memmap(tmp_path / "y.raw", numpy.float32, "w+", shape=(1000, 6))
    flat[:] = y.numpy()
    sources = {
        "tensor": mr.chunks(y, size=130),
        "npy": mr.chunks(tmp_path / "y.npy", size=77),
        "memmap": mr.chunks(flat, size=500),
        "safetensors": mr.chunks(tmp_path / "y.safetensors", size=99, names=["y"]),
        "DataLoader": loader,
        "list": list(y.split(300)),
        "generator": (part for part in y.split(111)),
    }
    if _has("pyarrow"):
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"y": [row.tolist() for row in y.double()]})
        pyarrow.parquet.write_table(table, tmp_path / "y.parquet", row_group_size=150)
        sources["parquet"] = ((c.float(),) for (c,) in mr.chunks(tmp_path / "y.parquet", size=64))
    for name, source in sources.items():
        values, places, total = find.stream(x).over(source)
        torch.testing.assert_close(values, expected[0], msg=name)
        assert torch.equal(places, expected[1]), name
        torch.testing.assert_close(total, expected[2], msg=name)


def _has(name):
    import importlib.util

    return importlib.util.find_spec(name) is not None


def test_what_a_stream_refuses(tmp_path):
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.randn(8, 4)
    with pytest.raises(mr.StreamError, match="read only once"):
        find.stream(x).over(part for part in y.split(3))
    with pytest.raises(mr.StreamError, match="no columns"):
        find.stream(x).result()
    with pytest.raises(mr.StreamError, match="empty"):
        find.stream(x).over([])
    with pytest.raises(mr.TopKError):
        find.stream(x).over([y])
    with pytest.raises(mr.ArgumentError, match="columns come later"):
        find.stream(x, y)
    with pytest.raises(mr.ArgumentError):
        find.stream(x).update(y, y)
    fold = find.stream(x.detach())
    fold.update(y)
    with pytest.raises(mr.ShapeError):
        fold.update(torch.randn(3, 5))
    with pytest.raises(mr.StreamError, match="do not fit"):
        fold.update(torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(mr.StreamError, match="share numbers"):
        other = find.stream(x.detach())
        other.update(y)
        fold.merge(other)
    with pytest.raises(mr.StreamError, match="fed already"):
        fold.over([y])
    with pytest.raises(mr.ArgumentError, match="no file"):
        mr.chunks(tmp_path / "nothing.npy")
    with pytest.raises(mr.ShapeError):
        mr.chunks(y, y[1:])
    for axes in ((0,), (0, 2), (-3, 0)):
        with pytest.raises(mr.ArgumentError, match="axes"):
            mr.chunks(y, y, axes=axes)
    with pytest.raises(mr.StreamError, match="a stream was fed"), mr.shard():
        find.stream(x.detach()).over([y])

    @mr.op
    def per_column(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.sum(x @ y, over="rows")

    with pytest.raises(mr.StreamError, match="every column"):
        per_column.stream(x).update(y)


def test_a_source_that_fails_leaves_a_fold_that_goes_on(seed):
    x, y = torch.randn(3, 4), torch.randn(40, 4)

    def broken():
        yield y[:15]
        raise OSError("the disk is gone")

    fold = find.stream(x)
    with pytest.raises(OSError, match="disk"):
        fold.over(broken())
    assert fold.stop == 15
    fold.update(y[15:])
    torch.testing.assert_close(fold.result()[0], find(x, y)[0])


@pytest.mark.parametrize("feed", ["over", "update"])
def test_memory_is_rows_state_and_two_chunks(feed):
    """However long the stream: twenty chunks hold no more than the fold of one, the state, and one more chunk."""
    x = torch.randn(64, 32)
    chunk = lambda: torch.randn(256, 32)
    chunk_bytes, state = 256 * 32 * 4, 64 * (10 * 12 + 4)

    def peak(count):
        def source():
            for _ in range(count):
                yield chunk()

        with Watch([x]) as watch, torch.no_grad():
            fold = find.stream(x)
            if feed == "over":
                fold.over(source())
            for y in source() if feed == "update" else ():
                fold.update(y)
        return watch.peak

    with Watch([x]) as alone, torch.no_grad():
        find(x, chunk())
    assert peak(20) <= peak(3) + 1024
    assert peak(20) <= alone.peak + chunk_bytes + 4 * state  # merging holds the old state, the new one and both as one


@pytest.mark.parametrize("again", [True, False], ids=["read again", "read once"])
def test_no_chunk_outlives_its_turn(again):
    """While a chunk is made, forward or backward, none but the last one is there."""
    x = torch.randn(64, 32, requires_grad=again)
    living, most = set(), []

    def fresh():
        gen = torch.Generator().manual_seed(0)  # a source that is read again gives the same columns again
        for n in range(12):
            chunk = torch.randn(256, 32, generator=gen)
            living.add(n)
            most.append(len(living))
            weakref.finalize(chunk.untyped_storage(), living.discard, n)
            yield chunk
            del chunk

    class Source:
        def __iter__(self):
            return fresh()

    found = find.stream(x).over(Source() if again else fresh())
    if again:
        found[2].sum().backward()
    assert len(most) == 12 * (1 + again) and max(most) <= 2 and not living


def test_pairs_are_streamed_with_their_columns_and_never_whole():
    """A bias as long as the stream: cut from where it lies, its gradient a chunk at a time."""
    layer = BY_NAME["biased_attention"]
    q, k, v, bias = layer.args(64, 4096, 0, torch.float32)
    source = mr.chunks(k, v, bias, size=256, axes=(0, 0, -1))
    q.requires_grad_()
    grads = []
    with Watch([q, k, v, bias]) as watch:
        y = layer.op.stream(q).over(source, gradients=lambda at, g: grads.append((at, g["bias"].abs().sum().item())))
        y.square().sum().backward()
    assert watch.largest < bias.nbytes / 4, watch.culprit
    assert [at for at, _ in grads] == list(range(0, 4096, 256))
    whole = bias.clone().requires_grad_()
    layer.op(q.detach(), k, v, whole).square().sum().backward()
    expected = torch.stack([p.abs().sum() for p in whole.grad.split(256, -1)])
    torch.testing.assert_close(torch.tensor([g for _, g in grads]), expected, rtol=1e-4, atol=1e-5)


def test_an_argument_that_may_be_left_out_is_streamed_where_it_is_given():
    @mr.op
    def scores(x: mr.Row["d"], y: mr.Col["d"], bias: mr.Col | None = None, seen: mr.Pair | None = None):
        s = x @ y if bias is None else x @ y + bias
        return mr.logsumexp(s if seen is None else torch.where(seen, s, -torch.inf))

    x, y, bias, seen = torch.randn(5, 4), torch.randn(9, 4), torch.randn(9), torch.rand(5, 9) > 0.5
    cut = mr.chunks(y, bias, seen, size=4, axes=(0, 0, 1))
    torch.testing.assert_close(scores.stream(x).over(cut), scores(x, y, bias, seen))
    torch.testing.assert_close(scores.stream(x).over(mr.chunks(y, size=4)), scores(x, y))
    named = [{"y": a, "seen": c} for a, _, c in cut]
    torch.testing.assert_close(scores.stream(x).over(named), scores(x, y, seen=seen))


def test_a_bar_for_whoever_sits_at_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown, quiet = Terminal(), Terminal()
    for terminal in (shown, quiet):
        monkeypatch.setattr(sys, "stderr", terminal)
        find.stream(torch.ones(2, 3)).over(mr.chunks(torch.ones(40, 3), size=20), quiet=terminal is quiet)
    assert "folding" in shown.getvalue() and not quiet.getvalue()


@pytest.mark.parametrize("what", ["topk", pytest.param("sum", marks=pytest.mark.slow)])
def test_a_corpus_four_times_the_memory(what, tmp_path):
    """In a process that may not allocate more: the ten best of, and the sum over, a file four times as large."""
    script = ROOT / "tests" / "support" / "stream_larger_than_memory.py"
    command = [sys.executable, str(script), what, str(tmp_path / "corpus.raw")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # allocators that keep nothing in reserve, so that the limit is felt (some builds of torch bring mimalloc)
    environment |= {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MIMALLOC_ARENA_RESERVE": "0", "MIMALLOC_PURGE_DELAY": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.strip() == "same", done.stdout + done.stderr[-1500:]
