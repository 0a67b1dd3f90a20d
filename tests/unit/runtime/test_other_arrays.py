"""Numpy arrays, and arrays with DLPack, in place of tensors: taken without copies, handed back in the caller's kind."""

import os
import warnings

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, arrays, ops


@mr.op
def near(x: Row["d"], y: Col["d"], scale: float):
    s = x @ y * scale
    return {"total": mr.sum(torch.tanh(s)), "best": mr.argmax(s)}


@mr.op
def near_pairs(x: Row["d"], y: Col["d"]):
    return mr.sum(torch.exp(-mr.sqdist(x, y)))


def points(count, seed, dtype=numpy.float32):
    return numpy.random.default_rng(seed).standard_normal((count, 4)).astype(dtype)


X, Y = points(6, 0), points(9, 1)


def assert_same(got, expected):
    """Equal results, one in numpy arrays of the same types."""
    assert type(got) is type(expected)
    pairs = zip(*((r.values() if isinstance(r, dict) else r) for r in (got, expected)), strict=True)
    for a, b in pairs:
        assert type(a) is numpy.ndarray and a.dtype == b.numpy().dtype
        numpy.testing.assert_array_equal(a, b.numpy())


def test_numpy_in_and_numpy_out_of_ops_layers_and_folds():
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    for _ in range(3):  # called, recorded, replayed
        assert_same(ops.knn(X, Y, 3), ops.knn(x, y, 3))
        assert_same(near(X, y=Y, scale=0.5), near(x, y, 0.5))
    assert near.total(X, Y, 0.5)["total"] == near.total(x, y, 0.5)["total"].numpy()
    assert near.explain(X, Y, 0.5) == near.explain(x, y, 0.5)
    assert near.cost(X, Y, 0.5).chosen == near.cost(x, y, 0.5).chosen
    assert near.tune(X[:, :2], Y[:, :2], 0.5, quiet=True) is not None
    labels = (numpy.array([0, 1, 0, 1, 2, 2]), numpy.arange(9) % 3)
    loss = ops.contrastive_loss(X, Y, kind="infonce", labels=labels)
    assert type(loss) is numpy.ndarray and loss.shape == ()
    found = mr.fold(mr.monoids.LogWSum, {"z": X[:, 0], "v": X})
    assert_same(
        tuple(found.asdict().values()), tuple(mr.fold(mr.monoids.LogWSum, {"z": x[:, 0], "v": x}).asdict().values())
    )
    numpy.testing.assert_array_equal(mr.fold(mr.monoids.Sum, X, 0).v, mr.fold(mr.monoids.Sum, x, 0).v.numpy())
    numpy.testing.assert_array_equal(mr.fold(mr.monoids.Max, iter(X)).v, X.max(0))


def test_a_tensor_among_numpy_arrays_gives_tensors_with_gradients():
    x = torch.from_numpy(X).requires_grad_()
    found = ops.kernel_sum(x, Y)
    found.sum().backward()
    assert type(found) is torch.Tensor and x.grad is not None
    assert type(near(X, torch.from_numpy(Y), 1.0)["best"]) is torch.Tensor
    assert type(mr.fold(mr.monoids.Sum, iter([torch.ones(2), numpy.ones(2)])).v) is torch.Tensor


def test_arrays_with_dlpack_give_tensors():
    pyarrow = pytest.importorskip("pyarrow")

    class OnlyDLPack:
        """What another library's array is to us."""

        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **asked):
            return self.tensor.__dlpack__(**asked)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    expected = ops.knn(torch.from_numpy(X), torch.from_numpy(Y), 2)
    assert isinstance(ops.knn.prepare(Y)(OnlyDLPack(torch.from_numpy(X)), 2).indices, torch.Tensor)
    for x, y in ((OnlyDLPack(torch.from_numpy(X)), Y), (pyarrow.Tensor.from_numpy(X), pyarrow.Tensor.from_numpy(Y))):
        got = ops.knn(x, y, 2)
        assert torch.equal(got.indices, expected.indices) and torch.equal(got.values, expected.values)
    missing = pyarrow.array([1.0, None])
    with pytest.raises(mr.ArgumentError, match=r"b was given a .*DLPack does not hand over"):
        ops.kernel_sum(X, Y[:2], missing)


def _in_records(y):
    """As a field of packed records, whose steps are no multiple of a number's size."""
    records = numpy.zeros(len(y), [("y", "f4", 4), ("mark", "i1")])
    records["y"] = y
    return records["y"]


READABLE = {
    "as it is": lambda y: y,
    "Fortran order": numpy.asfortranarray,
    "read-only": lambda y: numpy.frombuffer(y.tobytes(), y.dtype).reshape(y.shape),
    "broadcast": lambda y: numpy.broadcast_to(y[:1], y.shape),
    "every other": lambda y: numpy.repeat(y, 2, 0)[::2],
}
CONVERTED = {
    "other byte order": lambda y: y.astype(y.dtype.newbyteorder()),
    "backwards": lambda y: y[::-1],
    "a field of records": lambda y: _in_records(y),
    "unaligned": lambda y: numpy.frombuffer(b"x" + y.tobytes(), y.dtype, offset=1).reshape(y.shape),
}


@pytest.mark.parametrize("how", [*READABLE, *CONVERTED])
def test_every_memory_is_read_and_shared_where_it_can_be(how):
    y = {**READABLE, **CONVERTED}[how](Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, tensor = ops.knn(X, y, 2), arrays.to_tensor(y)
    plain = numpy.array(y, numpy.float32)
    numpy.testing.assert_array_equal(got.indices, ops.knn(torch.from_numpy(X), torch.from_numpy(plain), 2).indices)
    assert (tensor.data_ptr() == y.__array_interface__["data"][0]) == (how in READABLE)


def test_results_share_memory_and_inputs_are_left_alone():
    x, y = X.copy(), Y.copy()
    found = ops.kernel_sum(x, y)
    assert found.base is not None and found.flags.writeable
    found += 1
    assert numpy.array_equal(x, X) and numpy.array_equal(y, Y)


def test_a_memory_map_is_read_in_place_and_a_short_one_is_an_error(tmp_path):
    path = tmp_path / "y.npy"
    numpy.save(path, numpy.tile(Y, (2000, 1)))
    mapped = numpy.load(path, mmap_mode="r")
    assert arrays.to_tensor(mapped).data_ptr() == mapped.ctypes.data
    assert ops.knn(X, mapped, 2).values.shape == (6, 2)
    os.truncate(path, 4096)
    with pytest.raises(mr.StreamError, match=r"y\.npy has been cut short"):
        ops.knn(X, mapped, 2)


def test_integers_and_halves():
    target = numpy.arange(6)
    expected = ops.linear_cross_entropy(torch.from_numpy(X), torch.from_numpy(Y), torch.from_numpy(target)).item()
    for kind in ("uint8", "int16", "uint16", "int32", "uint32", "uint64"):
        assert ops.linear_cross_entropy(X, Y, target.astype(kind)) == pytest.approx(expected)
    with pytest.raises(mr.DTypeError, match=r"target is uint64\[6\] and holds 18446744073709551615"):
        ops.linear_cross_entropy(X, Y, numpy.full(6, 2**64 - 1, numpy.uint64))
    assert ops.attention(X.astype(numpy.float16), Y.astype(numpy.float16), Y.astype(numpy.float16)).dtype == "float16"
    with torch.autocast("cpu"):
        assert ops.attention(X, Y, Y).dtype == "float32"  # numpy has no bfloat16


REFUSED = {
    "objects": (lambda: X.astype(object), mr.DTypeError, "x is object[6, 4]"),
    "dates": (lambda: numpy.zeros((2000000, 3), "datetime64[D]"), mr.DTypeError, "x is datetime64[D][2000000, 3]"),
    "texts": (lambda: numpy.array([["a"]]), mr.DTypeError, "x is <U1[1, 1]"),
    "long doubles": (lambda: X.astype(numpy.longdouble), mr.DTypeError, "float128[6, 4]"),
    "complex": (lambda: X.astype(complex), mr.DTypeError, "x is complex128"),
    "masked": (lambda: numpy.ma.masked_array(X, X > 0), mr.ArgumentError, "float32[6, 4], and the mask would be lost"),
    "lists": (lambda: [[1.0, 2.0]] * 3, mr.ArgumentError, "given a list of 3"),
    "doubles beside floats": (lambda: X.astype(float), mr.DTypeError, "x=float64[6, 4], y=float32[9, 4]"),
    "features": (lambda: numpy.zeros((2000000, 3), numpy.float32), mr.ShapeError, "x=float32[2000000, 3]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_taken_is_named_by_type_and_shape(what):
    make, error, said = REFUSED[what]
    with pytest.raises(error) as raised:
        ops.knn(make(), Y, 2)
    assert said in str(raised.value) and len(str(raised.value)) < 500


def test_an_array_where_a_number_or_a_choice_belongs_is_not_printed():
    for call in (
        lambda: ops.knn(X, Y, Y),
        lambda: ops.knn(X, Y, 2, metric=Y),
        lambda: ops.attention(X, Y, Y, causal=Y),
        lambda: ops.attention(X, Y, Y, window=Y),
        lambda: ops.kernel_sum(X, Y, bandwidth=Y),
        lambda: near(X, Y, Y),
        lambda: mr.fold(mr.monoids.Sum, X.astype(object)),
    ):
        with pytest.raises(mr.MonoidReduceError) as raised:
            call()
        assert "0." not in str(raised.value) and ("9, 4" in str(raised.value) or "6, 4" in str(raised.value))


def test_compiled_functions_take_and_give_numpy():
    expected = near(X, Y, 0.5)["total"]
    compiled = torch.compile(lambda x, y: near(x, y, 0.5)["total"], backend="aot_eager")
    numpy.testing.assert_allclose(compiled(X, Y), expected, rtol=1e-6)


def test_lists_and_stored_vectors_take_arrays():
    """So neighbours of a call go into the next one, and a scipy matrix is a list of edges."""
    near = ops.knn(X, Y, 2).indices
    edges = mr.edges.from_neighbours(near)
    found = ops.kernel_sum(X, Y, Y[:, 0], bandwidth=1.0, cols=edges)
    right = ops.kernel_sum(*map(torch.from_numpy, (X, Y, Y[:, 0])), bandwidth=1.0, cols=edges)
    assert isinstance(near, numpy.ndarray) and isinstance(found, numpy.ndarray)
    numpy.testing.assert_array_equal(found, right)
    for call in (near_pairs, near_pairs.total):
        assert isinstance(call(X, Y, cols=edges), numpy.ndarray)
        numpy.testing.assert_array_equal(call(X, Y, cols=edges), call(*map(torch.from_numpy, (X, Y)), cols=edges))
    near[:] = 0
    assert int(edges.index.max()) > 0  # what is derived from a list is kept, so the list is a copy
    offsets = numpy.array([0, 2, 5])
    assert mr.jagged(offsets).mask(5, 5).equal(mr.jagged(torch.tensor([0, 2, 5])).mask(5, 5))
    assert mr.edges(offsets, numpy.array([0, 1, 1, 2, 3])).index.tolist() == [0, 1, 1, 2, 3]
    assert mr.edges.from_edge_index(numpy.array([[1, 0], [0, 0]]), rows=1)[0].index.tolist() == [1, 0]
    kept = numpy.eye(2, dtype=bool)
    assert mr.blocks.from_mask(kept, rows=2, cols=2).mask(4, 4).sum() == 8
    assert mr.pages(numpy.array([[1, 0]]), numpy.array([3]), page=2).table.tolist() == [[1, 0]]
    stored = mr.scaled(numpy.ones((len(Y), Y.shape[1]), "int8"), numpy.full(len(Y), 0.5, X.dtype))
    assert isinstance(ops.kernel_sum(X, stored, Y[:, 0], bandwidth=1.0), numpy.ndarray)
    with pytest.raises(mr.DTypeError, match="rowptr is object"):
        mr.edges(offsets.astype(object), near)
