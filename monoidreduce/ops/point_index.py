"""Points that are searched more than once: sorted into a tree of boxes once, then asked for neighbours again and again.

The index finds what ``knn`` finds. Where boxes can exclude most points (few features, points that have a structure) it
looks at a few hundred points for each query; where they cannot, it compares all pairs, as ``knn`` does.
"""

from __future__ import annotations

import itertools
import os
import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..engines.common.point_tree import PointTree
from ..errors import ArgumentError, DTypeError, ShapeError, shown
from ..plan import disk, settings
from ..runtime import dispatch, nearest
from . import checks, heads

if TYPE_CHECKING:
    from typing_extensions import Self

MIN_POINTS = 4096  # below, all pairs of a query take about as long as the call itself
# One call on a GPU. Measured on an H200, 10 neighbours of 10^5 to 2 * 10^6 points in 2 to 4 dimensions: a tree takes 2
# to 4 ms and its search 0.2 to 1 ms, where all pairs take 1 ms for each 6 * 10^8.
FEW_FEATURES, MIN_PAIRS_ON_GPU = 4, 2**32
MOST_SHARE = 0.03  # of all points: where a search looks at more, comparing all pairs is faster
_FORMAT = 1  # of saved files


class Searched(NamedTuple):
    """Squared distances, in the type of arithmetic, and places; None, None where all pairs are to be compared."""

    squares: Tensor | None
    places: Tensor | None


class PreparedPoints:
    """Points and the trees that were made of them. A layer's own index says what a call gives where all pairs are
    compared (``_compare_all``), and how its results are made of squared distances (``_finish``)."""

    def __init__(self, points: Tensor, metric: str):
        self.points, self.metric = points, metric
        self._version = 0 if points.is_inference() else points._version
        self._trees, self.share = _build_trees(points)

    @property
    def searches(self) -> bool:
        """Whether calls search the tree; False where all pairs are faster, and no tree is kept.

        >>> import torch, monoidreduce as mr
        >>> mr.ops.knn.prepare(torch.rand(5000, 2)).searches, mr.ops.knn.prepare(torch.rand(5000, 200)).searches
        (True, False)
        """
        return bool(self._trees)

    @property
    def nbytes(self) -> int:
        """Bytes held besides the points themselves."""
        return sum(tree.nbytes for tree in self._trees)

    def __repr__(self) -> str:
        *_, count, features = self.points.shape
        how = f"a search looks at {100 * self.share:.2g} % of them" if self.searches else "all pairs are compared"
        return f"<index of {count} points in {features} dimensions, {self.metric}: {how}>"

    def _compare_all(self, x: Tensor, k: int, exclude_self: bool) -> Any:
        raise NotImplementedError

    def _finish(self, squares: Tensor, places: Tensor, dtype: torch.dtype) -> Any:
        raise NotImplementedError

    def _find(self, x: Tensor, k: int, exclude_self: bool) -> Any:
        """What the layer returns for these queries."""
        self._check_unchanged()
        found = self._search(x, k, bool(exclude_self)) if self.can_search(x, k) else Searched(None, None)
        if found.squares is None or found.places is None:
            return self._compare_all(x, k, exclude_self)
        return self._finish(_attach_gradient(found.squares, found.places, x, self.points), found.places, x.dtype)

    def to(self, device: torch.device | str) -> Self:
        """The same index on another device, where its points are others than y: gradients end at them.

        >>> import torch, monoidreduce as mr
        >>> mr.ops.knn.prepare(torch.rand(9, 2)).to("cpu").points.device
        device(type='cpu')
        """
        state = self.__getstate__()
        other = type(self).__new__(type(self))
        moved = state["points"].to(device)
        trees = [tree.to(device) for tree in state["trees"]]
        if state["trees"] and torch.device(device).type != self.points.device.type:
            trees, share = _build_trees(moved)  # what can be searched, and what is worth it, is the device's
            state = {**state, "share": share}
        other.__setstate__({**state, "points": moved, "trees": trees})
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index and its points to a file.

        >>> import tempfile, torch, monoidreduce as mr
        >>> index = mr.ops.knn.prepare(torch.rand(5000, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     index.save(f"{folder}/points.index")
        ...     again = type(index).load(f"{folder}/points.index")
        >>> again.nbytes == index.nbytes
        True
        """
        state = self.__getstate__()
        trees = [(t.sorted, t.order, t.boxes, t.finite) for t in state["trees"]]
        whole = {"monoidreduce index": _FORMAT, **state, "trees": trees}
        where = Path(path)
        if not where.parent.is_dir() or where.is_dir():
            raise ArgumentError(detail=f"{where} cannot be written", fix="Give a path in a folder that exists")
        try:
            with disk.open_new(where, shared=True) as file:
                torch.save(whole, file)
        except OSError as error:
            raise ArgumentError(
                detail=f"{where} cannot be written: {error.strerror}", fix="Make room, or give another place"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Self:
        """An index from a file that :meth:`save` wrote; raises :class:`ArgumentError` for any other.

        >>> import torch, monoidreduce as mr
        >>> mr.ops.PointIndex.load("/dev/null")
        Traceback (most recent call last):
        ...
        monoidreduce.errors.ArgumentError: /dev/null is not an index that was saved...
        """
        path = os.fspath(path)
        try:
            with zipfile.ZipFile(path) as file:  # torch writes checksums, and does not read them
                if file.testzip() is not None:
                    raise _bad_file(path)
            whole = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise
        except (
            *(OSError, RuntimeError, ValueError, EOFError, KeyError),
            *(pickle.UnpicklingError, zipfile.BadZipFile, NotImplementedError),
        ) as error:
            raise _bad_file(path) from error
        if not isinstance(whole, dict) or whole.pop("monoidreduce index", None) != _FORMAT:
            raise _bad_file(path)
        index = cls.__new__(cls)
        index.__setstate__({**whole, "trees": [PointTree(*tree) for tree in whole["trees"]]})
        return index if torch.device(device).type == "cpu" else index.to(device)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "points": self.points.detach(),
            "metric": self.metric,
            "trees": self._trees,
            "share": self.share,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.points, self.metric, self._trees = state["points"], state["metric"], state["trees"]
        self.share, self._version = state["share"], self.points._version
        if self._trees and nearest.build(self._trees[0].sorted[:, :1].mT) is None:
            self._trees = []  # this machine has no compiler: all pairs

    def _check_unchanged(self) -> None:
        if torch.compiler.is_compiling() or self.points.is_inference() or self.points._version == self._version:
            return
        raise ArgumentError(
            detail="the points of this index were changed in place after it was made",
            fix="Prepare them again: ops.knn.prepare(y)",
        )

    def can_search(self, x: Any, k: Any) -> bool:
        """Whether the tree is to be searched; all else, mistakes included, goes to the layer itself."""
        if not self._trees or not isinstance(x, Tensor) or isinstance(k, bool) or not isinstance(k, int):
            return False
        y = self.points
        if x.dim() < 2 or x.dtype != y.dtype or x.device != y.device or x.shape[-1] != y.shape[-1]:
            return False
        if not 1 <= k <= y.shape[-2] or not x.numel() or torch.is_autocast_enabled(x.device.type):
            return False
        if y.dim() > 2 and not _broadcast(x.shape[:-2], y.shape[:-2]):
            return False
        if torch.compiler.is_compiling():  # a compiler cannot look at settings
            return True
        if dispatch.engine() != "auto" or dispatch.is_divided():
            return False
        return dispatch.are_plain([x, y])

    def _search(self, x: Tensor, k: int, exclude_self: bool) -> Searched:
        queries = x.detach().to(self._trees[0].sorted.dtype)
        batch, rows = torch.broadcast_shapes(x.shape[:-2], self.points.shape[:-2]), x.shape[-2]
        if self.points.dim() == 2 and (x.dim() == 2 or not exclude_self):
            found = nearest.search(self._trees[0], queries.reshape(-1, x.shape[-1]), k, 0 if exclude_self else None)
            if found is None:
                return Searched(None, None)
            return Searched(*(t.view(*batch, rows, k) for t in found))
        queries = queries.expand(*batch, *x.shape[-2:])
        own = torch.arange(len(self._trees), device="cpu").view(self.points.shape[:-2]).expand(batch)
        parts = []
        for at in itertools.product(*map(range, batch)):
            tree = self._trees[int(own[at])]
            part = nearest.search(tree, queries[at], k, 0 if exclude_self else None)
            if part is None:
                return Searched(None, None)
            parts.append(part)
        return Searched(*(torch.stack(t).view(*batch, rows, k) for t in zip(*parts, strict=True)))


def _bad_file(path: Any) -> ArgumentError:
    return ArgumentError(
        detail=f"{os.fspath(path)} is not an index that was saved by this version, or is damaged",
        fix="Make it again: ops.knn.prepare(y).save(path)",
    )


def check_points(y: Any, metric: Any) -> None:
    """Raise unless ``y`` holds points and ``metric`` is one that boxes bound."""
    checks.tensor("y", y, "[..., N, D]", 2)
    if y.layout is not torch.strided:
        raise DTypeError(detail=f"y is {shown(y)}, sparse", fix="Give a dense tensor of real numbers")
    if not y.is_floating_point():
        raise DTypeError(detail=f"y is {str(y.dtype)[6:]}", fix="Give floating numbers")
    if metric not in ("euclidean", "sqeuclidean"):
        raise ArgumentError(
            detail=f"metric was given {metric!r}",
            fix="A tree of boxes bounds 'euclidean' and 'sqeuclidean' distances; for others call ops.knn(x, y, k), or "
            "an index made for similarities, such as faiss",
        )
    if not y.shape[-2]:
        raise ShapeError(detail=f"y has shape {tuple(y.shape)}: no points", fix="Give at least one point")


def worth_a_tree(x: Any, y: Any) -> bool:
    """Whether one call on a GPU is faster with a tree that is built for it. (On a CPU the engine decides.)"""
    if not isinstance(y, Tensor) or y.device.type != "cuda" or not isinstance(x, Tensor) or y.dim() != 2:
        return False
    if (
        torch.compiler.is_compiling()
        or torch.cuda.is_current_stream_capturing()
        or settings.requested_budget() is not None
    ):
        return False  # whether a tree pays is read from the device, and a tree is memory
    return 0 < y.shape[1] <= FEW_FEATURES and x.numel() // y.shape[1] * len(y) >= MIN_PAIRS_ON_GPU


def _build_trees(points: Tensor) -> tuple[list[PointTree], float]:
    """A tree for each batch element, and the share of points a search looks at; no trees where all pairs are faster."""
    *batch, count, features = points.shape
    if count < MIN_POINTS or not 0 < features <= nearest.MOST_FEATURES or not torch.Size(batch).numel():
        return [], 1.0
    if dispatch.is_divided() or not dispatch.are_plain([points]):
        return [], 1.0
    found, shares = [], []
    with torch.no_grad():
        held = points.detach()
        held = held.float() if held.dtype.itemsize == 2 else held
        for at in itertools.product(*map(range, batch)):
            tree = nearest.build(held[at])
            if tree is None:
                return [], 1.0
            shares.append(nearest.measure_share(tree))
            if shares[-1] > MOST_SHARE:
                return [], shares[-1]
            found.append(tree)
    return found, max(shares)


def _broadcast(left: torch.Size, right: torch.Size) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(left), reversed(right), strict=False))


def _attach_gradient(squares: Tensor, places: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The squared distances with the gradient that they have by x and y: that of the pairs that were found."""
    if not torch.is_grad_enabled() or not (x.requires_grad or y.requires_grad):
        return squares
    *batch, rows, _ = places.shape
    x = x.to(squares.dtype).expand(*batch, rows, x.shape[-1])
    at = places.clamp(min=0)  # infinitely far ones have no place; they get no gradient below
    if y.dim() > 2:
        count = y.shape[-2]
        own = torch.arange(torch.Size(y.shape[:-2]).numel(), device=y.device).view(y.shape[:-2]).expand(batch)
        at = at + (own * count)[..., None, None]
    near = heads.take_vectors(at, y.to(squares.dtype).reshape(-1, y.shape[-1]))
    own_squares = (x.unsqueeze(-2) - near).square().sum(-1)
    return torch.where(squares.isfinite(), squares + (own_squares - own_squares.detach()), squares)
