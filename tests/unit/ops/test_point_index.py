"""``ops.knn.prepare``: an index finds what all pairs give, bit for bit where both run as C++; the same gradients."""

import pickle
import resource

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engines.common.point_tree import build_in_torch, choose_depth
from monoidreduce.engines.eager import branch_and_bound
from monoidreduce.engines.eager.cpp import compiler, point_search
from monoidreduce.ops import point_index

pytestmark = pytest.mark.skipif(compiler.current_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def compiled_pairs(monkeypatch):
    """All pairs as C++ at any size, as users have them in large calls: of equal distances the first is found."""
    monkeypatch.setenv("MONOIDREDUCE_CPP", "always")


def cloud(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dtype", "features", "metric"),
    [(torch.float32, 3, "euclidean"), (torch.float64, 2, "sqeuclidean"), (torch.bfloat16, 2, "euclidean")],
)
def test_it_finds_what_all_pairs_give(dtype, features, metric):
    y, x = cloud(5003, features).to(dtype), cloud(2, 37, features, seed=1).to(dtype)
    index = ops.knn.prepare(y, metric=metric)
    assert index.searches and index.share < 0.03
    found, expected = index(x, 17), ops.knn(x, y, 17, metric=metric)
    assert torch.equal(found.indices, expected.indices) and torch.equal(found.values, expected.values)
    assert found.values.dtype is dtype and torch.equal(index(x, 1).indices, found.indices[..., :1])


def test_the_first_of_equals_and_oneself():
    y = torch.randint(0, 20, (6000, 2), generator=torch.Generator().manual_seed(0)).float()
    index = ops.knn.prepare(y.mT.contiguous().mT, metric="sqeuclidean")
    for given in ({}, {"exclude_self": True}):
        found, expected = index(y[:500], 40, **given), ops.knn(y[:500], y, 40, metric="sqeuclidean", **given)
        assert torch.equal(found.indices, expected.indices) and torch.equal(found.values, expected.values)


def test_points_and_queries_that_are_nowhere():
    y = cloud(60, 2)
    y[3], y[4, 1], y[5, 0] = float("nan"), float("inf"), -float("inf")
    x = torch.cat([cloud(5, 2, seed=1), torch.full((1, 2), float("inf")), torch.full((1, 2), float("nan"))])
    tree = point_search.build(y)
    assert tree.finite == 57 and set(tree.order[57:].tolist()) == {3, 4, 5}
    values, places = point_search.search(tree, x, 60)
    expected = ops.knn(x, y, 60, metric="sqeuclidean")
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places[:6], expected.indices[:6])


def test_batches_have_a_tree_each():
    y, x = cloud(2, 1, 4500, 2), cloud(3, 9, 2, seed=1)
    index = ops.knn.prepare(y)
    found, expected = index(x, 3), ops.knn(x, y, 3)
    assert found.indices.shape == (2, 3, 9, 3) and torch.equal(found.indices, expected.indices)
    own = index(y, 2, exclude_self=True)
    assert torch.equal(own.indices, ops.knn(y, y, 2, exclude_self=True).indices)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients_of_both_orders(batch):
    y, x = cloud(*batch, 4200, 2).double().requires_grad_(), cloud(*batch, 5, 2, seed=1).double().requires_grad_()
    with torch.no_grad():
        x[..., 0, :] = y[..., 7, :]  # a distance of 0, whose root has slope 0
    weights, results = cloud(*batch, 5, 3, seed=2).double(), []
    for found in (ops.knn.prepare(y)(x, 3), ops.knn(x, y, 3)):
        first = torch.autograd.grad((found.values * weights).sum(), (x, y), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, y))
        results.append((*first, *second))
    for own, theirs in zip(*results, strict=True):
        torch.testing.assert_close(own, theirs)


def test_compiled_without_a_break():
    y, x = cloud(5000, 2).requires_grad_(), cloud(11, 2, seed=1)
    index = ops.knn.prepare(y)
    compiled = torch.compile(lambda x: index(x, 3).values.sum(), fullgraph=True, backend="aot_eager")
    own, theirs = compiled(x), index(x, 3).values.sum()
    torch.testing.assert_close(own, theirs)
    for a, b in zip(torch.autograd.grad(own, y), torch.autograd.grad(theirs, y), strict=True):
        torch.testing.assert_close(a, b)


def test_kept_on_disk_and_moved(tmp_path):
    y, x = cloud(5000, 3), cloud(9, 3, seed=1)
    index = ops.knn.prepare(y)
    index.save(tmp_path / "points")
    for other in (ops.PointIndex.load(tmp_path / "points"), pickle.loads(pickle.dumps(index)), index.to("cpu")):
        assert other.searches and torch.equal(other(x, 4).indices, index(x, 4).indices)
        assert repr(other) == repr(index) and other.nbytes == index.nbytes <= 5000 * (1.25 * 12 + 8) * 1.1
    whole = (tmp_path / "points").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    torch.save({"other": 1}, tmp_path / "other")
    spoilt = bytearray(whole)
    spoilt[len(whole) // 2] ^= 1
    (tmp_path / "spoilt").write_bytes(spoilt)
    for name in ("cut", "other", "spoilt"):
        with pytest.raises(mr.ArgumentError, match=f"{name} is not an index"):
            ops.PointIndex.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        ops.PointIndex.load(tmp_path / "none")
    with pytest.raises(mr.ArgumentError, match="cannot be written"):
        index.save(tmp_path / "none" / "points")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))  # files of this process may not grow beyond
    try:
        with pytest.raises(mr.ArgumentError, match="full cannot be written: File too large"):
            index.save(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not (tmp_path / "full").exists()
    with pytest.raises(mr.DTypeError, match="sparse"):
        ops.knn.prepare(y.to_sparse())


def test_numpy_comes_and_goes():
    y, x = cloud(5000, 2).numpy(), cloud(9, 2, seed=1).numpy()
    found, expected = ops.knn.prepare(y)(x, 17), ops.knn(x, y, 17)
    assert isinstance(found.values, numpy.ndarray)
    assert numpy.array_equal(found.indices, expected.indices) and numpy.array_equal(found.values, expected.values)


def test_where_boxes_exclude_nothing_all_pairs_are_compared(monkeypatch):
    monkeypatch.delenv("MONOIDREDUCE_CPP")
    monkeypatch.setattr(point_index, "MOST_SHARE", 1e-4)
    for y in (cloud(5000, 2), cloud(5000, 40), cloud(100, 2)):
        index = ops.knn.prepare(y)
        assert not index.searches and not index.nbytes and "all pairs" in repr(index)
        assert torch.equal(index(y[:7], 3).indices, ops.knn(y[:7], y, 3).indices)
    monkeypatch.undo()
    with mr.use(engine="reference"):
        assert ops.knn.prepare(cloud(5000, 2))(cloud(3, 2), 1).indices.shape == (3, 1)


def test_mistakes_are_those_of_knn():
    y = cloud(5000, 2)
    index = ops.knn.prepare(y)
    for given, error in (
        ((y[:, :1], 3), mr.ShapeError),
        ((y.double(), 3), mr.DTypeError),
        ((y, 5001), mr.TopKError),
        ((y, 0), mr.ArgumentError),
        (("y", 3), mr.MonoidReduceError),
    ):
        with pytest.raises(error):
            index(*given)
    for given, error in (((y.int(),), mr.DTypeError), ((y[0],), mr.ShapeError), ((y[:0],), mr.ShapeError)):
        with pytest.raises(error):
            ops.knn.prepare(*given)
    with pytest.raises(mr.ArgumentError, match="faiss"):
        ops.knn.prepare(y, metric="cosine")
    with pytest.raises(mr.ArgumentError, match=r"Call the index: index\(x, k\)"):
        ops.knn(y, index, 3)
    y += 1
    with pytest.raises(mr.ArgumentError, match="changed in place"):
        index(y, 3)


@pytest.mark.parametrize("count", [1, 33, 1000])
def test_trees_built_by_sorts_hold_the_same_points(count):
    points = torch.cat([cloud(count, 3), torch.full((2, 3), float("nan"))])
    for tree in (build_in_torch(points), point_search.build(points)):
        assert tree.depth == choose_depth(count) and tree.finite == count
        torch.testing.assert_close(points[tree.order].mT, tree.sorted, equal_nan=True)
        assert sorted(tree.order.tolist()) == list(range(count + 2))
        for level in range(tree.depth + 1):
            for node in range(2**level):
                inside = tree.sorted[:, node * count >> level : (node + 1) * count >> level]
                box = torch.cat([inside.amin(1), inside.amax(1)])
                assert torch.equal(box, tree.boxes[2**level + node])


def test_one_call_with_many_queries_builds_a_tree(monkeypatch):
    monkeypatch.setattr(branch_and_bound, "MOST_BOXED", 0)
    monkeypatch.setattr(branch_and_bound, "MIN_SEARCHED", 50)
    y, x = cloud(2, 700, 3), cloud(2, 60, 3, seed=1)
    built = []
    build = point_search.build
    monkeypatch.setattr(point_search, "build", lambda points: built.append(len(points)) or build(points))
    with mr.use(engine="eager"):
        for given in ({}, {"exclude_self": True}):
            found = ops.knn(x, y, 5, **given)
            count, built[:] = len(built), []
            expected = compare_all(x, y, 5, **given)
            assert count == 2 and not built
            assert torch.equal(found.indices, expected.indices) and torch.equal(found.values, expected.values)
        with mr.budget("1MB"):
            ops.knn(x, y, 5)
        assert not built  # a tree is memory too


def compare_all(x, y, k, **given):
    """What all pairs give; counted, so that what runs here is not recorded for later calls."""
    with pytest.MonkeyPatch.context() as patch, mr.tally():
        patch.setattr(branch_and_bound, "MIN_SEARCHED", 10**9)
        patch.setattr(branch_and_bound, "MIN_BATCHED", 10**9)
        return ops.knn(x, y, k, **given)


def clusters(count, features, seed=0):
    """Points in a few tight clusters, far from each other."""
    draw = torch.Generator().manual_seed(seed)
    own = torch.randint(0, 7, (count,), generator=draw)
    return 100 * cloud(7, features, seed=9)[own] + 0.01 * torch.randn(count, features, generator=draw)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("queries", [1, 7, 300])
@pytest.mark.parametrize(
    ("dtype", "features", "draw"),
    [(torch.float32, 3, cloud), (torch.float32, 1, clusters), (torch.float64, 2, clusters), (torch.float16, 4, cloud)],
)
def test_one_call_with_few_queries_is_one_pass_over_the_points(monkeypatch, queries, dtype, features, draw):
    """Few queries are compared with the points that may be near them alone: the same bits as all pairs."""
    passes, search = [], point_search.search_once
    monkeypatch.setattr(point_search, "search_once", lambda *given: passes.append(search(*given)) or passes[-1])
    y = draw(9001, features, seed=1).to(dtype)
    x = torch.cat([y[: queries // 2], draw(queries - queries // 2, features, seed=2).to(dtype)])
    for given in ({}, {"exclude_self": True}):
        found = ops.knn(x, y, 9, metric="sqeuclidean", **given)
        assert len(passes) == 1 and passes.pop() is not None
        expected = compare_all(x, y, 9, metric="sqeuclidean", **given)
        assert torch.equal(found.indices, expected.indices) and torch.equal(found.values, expected.values)


def test_one_pass_with_ties_threads_and_layouts():
    y = torch.randint(0, 60, (2, 66_000), generator=torch.Generator().manual_seed(0)).float().mT  # not contiguous
    x, threads = torch.cat([y[:3], y[-3:] + 0.5]).expand(2, 6, 2), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = ops.knn(x, y, 40)
    finally:
        torch.set_num_threads(threads)
    expected = compare_all(x, y, 40)
    assert torch.equal(found.indices, expected.indices) and torch.equal(found.values, expected.values)


def test_where_one_pass_does_not_pay_all_pairs_are_compared(monkeypatch):
    """Queries that are nowhere, and balls that hold most points."""
    results, search = [], point_search.search_once
    monkeypatch.setattr(point_search, "search_once", lambda *given: results.append(search(*given)) or results[-1])
    lost = cloud(9000, 2)
    lost[5, 0] = float("nan")
    wide = cloud(99, 2) + 100  # far from all points; a few would be compared with each of them
    for x, y in ((wide, lost), (torch.full((1, 2), float("nan")), lost), (lost[:8], lost)):
        found, expected = ops.knn(x, y, 3), compare_all(x, y, 3)
        assert torch.equal(found.indices, expected.indices)
        torch.testing.assert_close(found.values, expected.values, rtol=0, atol=0, equal_nan=True)
    assert len(results) == 3 and all(r is None for r in results)


def test_a_query_far_from_all_others_is_compared_with_every_point(monkeypatch):
    results, search = [], point_search.search_once
    monkeypatch.setattr(point_search, "search_once", lambda *given: results.append(search(*given)) or results[-1])
    y, x = clusters(9000, 2), torch.cat([clusters(99, 2, seed=3), torch.full((1, 2), 1e6)])
    found, expected = ops.knn(x, y, 3), compare_all(x, y, 3)
    assert torch.equal(found.indices, expected.indices) and torch.equal(found.values, expected.values)
    assert len(results) == 1 and results[0] is not None


@pytest.mark.parametrize("count", [300, 5000])  # all pairs, and a tree
def test_an_index_of_an_array_owns_a_copy_and_one_of_a_tensor_refuses_changes(count):
    points = numpy.random.default_rng(0).random((count, 3))
    index, query = ops.knn.prepare(points), numpy.full((1, 3), 5.0)
    before = index(query, 2)
    points[0] = 5
    after = index(query, 2)
    assert numpy.array_equal(before.values, after.values) and before.values[0, 0] > 5
    with torch.inference_mode():
        held = torch.rand(count, 3)
        index, query = ops.knn.prepare(held), torch.full((1, 3), 5.0)
        before = index(query, 2).values
        held[0] = 5
        assert torch.equal(index(query, 2).values, before)
    held = torch.rand(count, 3)
    index = ops.knn.prepare(held)
    held[0] = 5
    with pytest.raises(mr.ArgumentError, match="changed in place"):
        index(query, 2)
