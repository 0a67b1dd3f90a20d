"""Who is near whom: nearest neighbours, assignment to centroids, late interaction, Chamfer distance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast, no_type_check, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import arrays
from ..errors import ArgumentError
from ..stored_vectors import Vectors
from ..stream import Stream
from . import checks, grouping, point_index
from . import language as mr
from .streaming import BothWays

if TYPE_CHECKING:
    from numpy.typing import NDArray

Metric = Literal["euclidean", "sqeuclidean", "dot", "cosine"]
METRICS = ("euclidean", "sqeuclidean", "dot", "cosine")


class Neighbours(NamedTuple):
    """What :func:`knn` and :func:`kmeans_assign` return: distances (or similarities), and whose they are.

    >>> import torch, monoidreduce as mr
    >>> found = mr.ops.knn(torch.tensor([[0.0]]), torch.tensor([[5.0], [1.0], [3.0]]), 2)
    >>> found.values, found.indices
    (tensor([[1., 3.]]), tensor([[1, 2]]))
    """

    values: Tensor
    indices: Tensor


if TYPE_CHECKING:

    class NeighbourArrays(NamedTuple):
        """:class:`Neighbours` of numpy arrays, as type checkers see them; at run time it is that class."""

        values: NDArray[Any]
        indices: NDArray[Any]


@no_type_check
def distance(x, y, metric):
    """What a metric says of a row's and a column's vector; larger is nearer for dot and cosine."""
    if metric in ("dot", "cosine"):
        return F.normalize(x, dim=-1) @ F.normalize(y, dim=-1) if metric == "cosine" else x @ y
    square = mr.sqdist(x, y)
    return square if metric == "sqeuclidean" else root(square)


@no_type_check
def root(square):
    """√square, whose slope at 0 is 0, as in torch's norms."""
    zero = square == 0
    return torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, square)))


@mr.op
@no_type_check
def _knn(x: mr.Row["d"], y: mr.Col["d"], k: int, metric: str, exclude_self: bool):
    euclidean, largest = metric == "euclidean", metric in ("dot", "cosine")
    near = distance(x, y, "sqeuclidean" if euclidean else metric)  # roots keep the order: those of the k found will do
    if exclude_self:
        near = torch.where(mr.row_index == mr.col_index, -torch.inf if largest else torch.inf, near)
    values, indices = mr.topk(near, k, largest=largest)
    return Neighbours(root(values) if euclidean else values, indices)


class PointIndex(point_index.PreparedPoints):
    """Points prepared for many searches; made by ``ops.knn.prepare(y)``. Call it with queries: ``index(x, k)``.

    ``index(x, k)`` gives what ``ops.knn(x, y, k)`` gives, with the same gradients by x and y: the same neighbours in
    the same order, the first of equally near ones first, and distances that are equal but for the rounding of the last
    bit. How it is found differs: points are sorted into a tree of bounding boxes, and boxes that are too far are never
    looked at.

    It holds y itself (of an array, a copy) and, with D features of s bytes (4; 8 for float64), about
    N · (1.25 · D · s + 8) bytes more (:attr:`nbytes`): 46 MB for two million points in three dimensions. It can be
    pickled, saved and loaded (:meth:`save`, :meth:`load`), and moved (:meth:`to`).

    >>> import torch, monoidreduce as mr
    >>> points = torch.rand(5000, 3)
    >>> index = mr.ops.knn.prepare(points)
    >>> queries = torch.rand(7, 3)
    >>> bool((index(queries, 4).indices == mr.ops.knn(queries, points, 4).indices).all())
    True
    >>> index
    <index of 5000 points in 3 dimensions, euclidean: a search looks at ... % of them>
    """

    @overload
    def __call__(self, x: Tensor, k: int, *, exclude_self: bool = False) -> Neighbours: ...
    @overload
    def __call__(self, x: NDArray[Any], k: int, *, exclude_self: bool = False) -> NeighbourArrays: ...
    def __call__(self, x: Any, k: int, *, exclude_self: bool = False) -> Any:
        """The k nearest of the points to each x: :class:`Neighbours`, as ``ops.knn(x, points, k)`` gives them.

        Raises :class:`ArgumentError` where torch has changed the points in place since the index was made, and
        whatever ``knn`` raises.

        >>> import torch, monoidreduce as mr
        >>> points = torch.rand(5000, 2)
        >>> found = mr.ops.knn.prepare(points)(points, 1, exclude_self=True)
        >>> bool((found.values > 0).all()), found.indices.shape
        (True, torch.Size([5000, 1]))
        """
        border = arrays.Border()
        return border.give(self._find(border.take(x, "x"), k, exclude_self))

    def _compare_all(self, x: Tensor, k: int, exclude_self: bool) -> Neighbours:
        return knn(x, self.points, k, metric=self.metric, exclude_self=exclude_self)  # type: ignore[call-overload]

    def _finish(self, squares: Tensor, places: Tensor, dtype: torch.dtype) -> Neighbours:
        values = root(squares) if self.metric == "euclidean" else squares
        return Neighbours(values.to(dtype), places)


def prepare_points(y: Any, *, metric: Literal["euclidean", "sqeuclidean"] = "euclidean") -> PointIndex:
    """Points y as an index, for many searches: ``index(x, k)`` gives what ``ops.knn(x, y, k)`` gives, sooner.

    Called as ``ops.knn.prepare(y)``. Sorting two million points in three dimensions takes about a second on one core,
    as much as some 1,500 queries without an index; a query then takes microseconds. Where boxes would exclude too few
    points (many features, no structure) no tree is kept, and calls compare all pairs: :attr:`PointIndex.searches` says
    which. On a GPU trees are searched for float32 and 16-bit points, and up to 512 neighbours.

    Shapes: ``y`` [..., N, D]; a numpy array will do, and numpy queries give numpy results. The index of an array owns a
    copy of it: what is written to the array later does not change what it finds. The index of a tensor holds the tensor
    itself, so gradients reach it, and refuses to be called once torch has changed it in place. (Torch does not notice
    what is written through ``.data``, or through a numpy array that shares the tensor's memory.)

    Raises :class:`ArgumentError` for other metrics, which boxes do not bound, and :class:`ShapeError` or
    :class:`DTypeError` for points that are none.

    >>> import torch
    >>> from monoidreduce.ops import knn
    >>> index = knn.prepare(torch.rand(5000, 3))
    >>> values, indices = index(torch.rand(10, 3), 4)
    >>> values.shape
    torch.Size([10, 4])
    """
    shared = arrays.is_array(y) or (isinstance(y, Tensor) and y.is_inference())  # torch counts no changes of these
    y = arrays.to_tensor(y, "y") if arrays.is_array(y) else y
    point_index.check_points(y, metric)
    return PointIndex(y.clone() if shared else y, metric)


class KnnLayer(Protocol):
    """The type of :func:`knn`: a layer that can also prepare its points."""

    @overload
    def __call__(
        self, x: Vectors, y: Vectors, k: int, *, metric: Metric = "euclidean", exclude_self: bool = False
    ) -> Neighbours: ...
    @overload
    def __call__(
        self, x: NDArray[Any], y: NDArray[Any], k: int, *, metric: Metric = "euclidean", exclude_self: bool = False
    ) -> NeighbourArrays: ...
    def __call__(self, x: Any, y: Any, k: int, *, metric: Metric = "euclidean", exclude_self: bool = False) -> Any: ...

    def prepare(
        self, y: Tensor | NDArray[Any], *, metric: Literal["euclidean", "sqeuclidean"] = "euclidean"
    ) -> PointIndex: ...

    def stream(self, *args: Any, **kwargs: Any) -> Stream: ...


def _with_prepare(layer: Any) -> KnnLayer:
    layer.prepare = prepare_points
    return cast(KnnLayer, layer)


@_with_prepare
@checks.public_layer(rows={"x": "vectors"}, cols={"y": "vectors"})
def knn(x: Vectors, y: Vectors, k: int, *, metric: Metric = "euclidean", exclude_self: bool = False) -> Neighbours:
    """The k nearest y of each x, nearest first.

    The same as ``torch.cdist(x, y).topk(k, largest=False)`` (for ``"dot"`` and ``"cosine"``, similarities,
    ``(x @ y.mT).topk(k)``), without ever allocating the M × N distances or their gradient. The distances have
    gradients, indices have none.

    Shapes: ``x`` [..., M, D] and ``y`` [..., N, D] give values and int64 indices [..., M, k]; leading dimensions
    broadcast. ``exclude_self`` leaves the i-th y out for the i-th x. Which of equally near ones stand at the edge is
    not defined. Points that are searched more than once: ``index = knn.prepare(y)``, then ``index(x, k)``
    (:class:`PointIndex`).

    Raises :class:`TopKError` where k > N, :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or
    :class:`ArgumentError` for arguments that do not fit.

    >>> import torch
    >>> from monoidreduce.ops import knn
    >>> x, y = torch.randn(6, 4), torch.randn(9, 4)
    >>> bool((knn(x, y, 3).indices == torch.cdist(x, y).topk(3, largest=False).indices).all())
    True
    """
    if isinstance(y, PointIndex):
        raise ArgumentError(detail="y was given an index of points", fix="Call the index: index(x, k)")
    checks.floating(x=x, y=y)
    checks.one_of("metric", metric, METRICS)
    checks.whole("k", k, 1)
    by_distance = metric == "euclidean" or metric == "sqeuclidean"
    if by_distance and isinstance(x, Tensor) and isinstance(y, Tensor) and point_index.worth_a_tree(x, y):
        index = PointIndex(y, metric)
        if index.can_search(x, k):
            return index(x, k, exclude_self=exclude_self)
    return _knn(x, y, int(k), metric, bool(exclude_self))


@mr.op
@no_type_check
def _kmeans_assign(x: mr.Row["d"], centroids: mr.Col["d"], metric: str):
    near = distance(x, centroids, metric)
    best, at = (mr.max, mr.argmax) if metric in ("dot", "cosine") else (mr.min, mr.argmin)
    return Neighbours(best(near), at(near))


@checks.public_layer(rows={"x": "vectors"}, cols={"centroids": "vectors"})
def kmeans_assign(x: Tensor, centroids: Tensor, *, metric: Metric = "sqeuclidean") -> Neighbours:
    """The nearest centroid of each x, and how near it is.

    The same as ``(torch.cdist(x, centroids) ** 2).min(-1)`` (``.max(-1)`` of the similarities for ``"dot"`` and
    ``"cosine"``), without ever allocating the M × K distances or their gradient. The mean of the values is the loss of
    k-means, differentiable by both arguments.

    Shapes: ``x`` [..., M, D] and ``centroids`` [..., K, D] give values and int64 indices [..., M]; leading dimensions
    broadcast. Of equally near centroids the first; without any the value is infinite and the index -1.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch
    >>> from monoidreduce.ops import kmeans_assign
    >>> x, centroids = torch.randn(60, 4), torch.randn(5, 4)
    >>> bool((kmeans_assign(x, centroids).indices == torch.cdist(x, centroids).argmin(-1)).all())
    True
    """
    checks.floating(x=x, centroids=centroids)
    checks.one_of("metric", metric, METRICS)
    return _kmeans_assign(x, centroids, metric)


@mr.op
@no_type_check
def _maxsim(
    q: mr.Row["f"],
    d: mr.Col["f"],
    normalize: bool,
    q_lengths: mr.Batch | None = None,
    d_lengths: mr.Batch | None = None,
):
    s = distance(q, d, "cosine" if normalize else "dot")
    s = s if d_lengths is None else torch.where(mr.col_index < d_lengths, s, -torch.inf)
    best = mr.max(s)
    return mr.sum(best if q_lengths is None else torch.where(mr.row_index < q_lengths, best, 0.0), over="rows")


@checks.public_layer(rows={"q": "vectors"}, cols={"d": "vectors"})
def maxsim(
    q: Vectors,
    d: Vectors,
    *,
    normalize: bool = False,
    q_lengths: Tensor | None = None,
    d_lengths: Tensor | None = None,
    all_pairs: bool = False,
) -> Tensor:
    """Late interaction (ColBERT): every token of a query finds its nearest token of a document, and these add up.

    The same as ``(q @ d.mT).amax(-1).sum(-1)``, without ever allocating the M × N similarities of a query and a
    document or their gradient. The gradient of a tie goes to its first token. For 16-bit inputs the scores are float32.

    Shapes: ``q`` [..., M, f] and ``d`` [..., N, f] give [...]; leading dimensions broadcast. With ``all_pairs`` queries
    [A, M, f] are scored against all documents [B, N, f]: [A, B]. ``q_lengths`` and ``d_lengths``, integers of the
    leading dimensions of q and d, say how many tokens each has; what lies beyond does not count. ``normalize`` takes
    cosines. A document without tokens scores minus infinity.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch
    >>> from monoidreduce.ops import maxsim
    >>> q, d = torch.randn(3, 5, 8), torch.randn(7, 20, 8)
    >>> expected = (q[:, None] @ d.mT).amax(-1).sum(-1)
    >>> torch.allclose(maxsim(q, d, all_pairs=True), expected, atol=1e-5)
    True
    """
    checks.floating(q=q, d=d)
    named = {"q_lengths": (q_lengths, q), "d_lengths": (d_lengths, d)}
    options = {n: grouping.lengths(n, t, side) for n, (t, side) in named.items() if t is not None}
    if all_pairs:
        for name, t in (("q", q), ("d", d)):
            checks.tensor(name, t, "[count, tokens, f]", 3, 3)
        q = q.unsqueeze(1)
        if "q_lengths" in options:
            options["q_lengths"] = options["q_lengths"].unsqueeze(1)
    return _maxsim(q, d, bool(normalize), **options)


@mr.op
@no_type_check
def _chamfer(
    x: mr.Row["d"],
    y: mr.Col["d"],
    metric: str,
    mean: bool,
    x_lengths: mr.Batch | None = None,
    y_lengths: mr.Batch | None = None,
):
    near = distance(x, y, metric)
    if x_lengths is not None:
        near = torch.where(mr.row_index < x_lengths, near, torch.inf)
    if y_lengths is not None:
        near = torch.where(mr.col_index < y_lengths, near, torch.inf)
    to_y, to_x = mr.min(near), mr.min(near, over="rows")
    if x_lengths is not None:
        to_y = torch.where(mr.row_index < x_lengths, to_y, 0.0)
    if y_lengths is not None:
        to_x = torch.where(mr.col_index < y_lengths, to_x, 0.0)
    to_y, to_x = mr.sum(to_y, over="rows"), mr.sum(to_x)
    if not mean:
        return to_y + to_x
    return to_y / (mr.num_rows if x_lengths is None else x_lengths) + to_x / (
        mr.num_cols if y_lengths is None else y_lengths
    )


def _stream_chamfer(
    x: Any,
    *,
    metric: Literal["sqeuclidean", "euclidean"] = "sqeuclidean",
    points: Literal["mean", "sum"] = "mean",
    reduction: checks.Reduction = "mean",
) -> BothWays:
    """Two streams: from each x to the nearest y, and from each y to the nearest x."""
    checks.reduction(reduction)
    checks.one_of("metric", metric, ("sqeuclidean", "euclidean"))
    checks.one_of("points", points, ("mean", "sum"))

    def run(x: Any, y: Any, quiet: bool) -> Tensor:
        to_y = kmeans_assign.stream(x, metric=metric).over(y, quiet=quiet).values
        to_x = kmeans_assign.stream(y, metric=metric).over(x, quiet=quiet).values
        return to_y.mean() + to_x.mean() if points == "mean" else to_y.sum() + to_x.sum()

    return BothWays("chamfer", x, run)


@checks.public_layer(rows={}, cols={}, stream=_stream_chamfer)
def chamfer(
    x: Tensor,
    y: Tensor,
    *,
    metric: Literal["sqeuclidean", "euclidean"] = "sqeuclidean",
    points: Literal["mean", "sum"] = "mean",
    reduction: checks.Reduction = "mean",
    x_lengths: Tensor | None = None,
    y_lengths: Tensor | None = None,
) -> Tensor:
    """The Chamfer distance of two clouds: from each point to the nearest of the other cloud, both ways.

    With ``d = torch.cdist(x, y) ** 2`` the same as ``d.amin(-1).mean(-1) + d.amin(-2).mean(-1)``, without ever
    allocating the M × N distances or their gradient. For 16-bit inputs it is float32.

    Shapes: ``x`` [..., M, D] and ``y`` [..., N, D] give one number, or [...] with ``reduction="none"`` (reductions are
    over the clouds, ``points="sum"`` adds up a cloud's points instead of averaging them). ``x_lengths`` and
    ``y_lengths``, integers of the leading dimensions, say how many points each cloud has. A cloud without points makes
    the mean NaN, and the distance to it infinite.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch
    >>> from monoidreduce.ops import chamfer
    >>> x, y = torch.randn(6, 3), torch.randn(9, 3)
    >>> d = torch.cdist(x, y) ** 2
    >>> torch.allclose(chamfer(x, y), d.amin(-1).mean() + d.amin(-2).mean(), atol=1e-5)
    True
    """
    checks.reduction(reduction)
    checks.floating(x=x, y=y)
    checks.one_of("metric", metric, ("sqeuclidean", "euclidean"))
    checks.one_of("points", points, ("mean", "sum"))
    named = {"x_lengths": (x_lengths, x), "y_lengths": (y_lengths, y)}
    options = {n: grouping.lengths(n, t, side) for n, (t, side) in named.items() if t is not None}
    clouds = _chamfer(x, y, metric, points == "mean", **options)
    return clouds if reduction == "none" else clouds.sum() if reduction == "sum" else clouds.mean()
