"""Folds over edges: each row has its own list of columns. Graphs, neighbours, candidates, sampled negatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError, ColumnListError, ShapeError, shown
from . import base
from .base import ColumnLists, pack


@dataclass(frozen=True, eq=False, repr=False)
class Edges(base.Domain):
    """Row i folds the columns ``index[rowptr[i]:rowptr[i + 1]]``; an ``mr.Pair`` argument is one number an edge [E].

    ``rowptr`` [M + 1] and ``index`` [E] are compressed rows (CSR), as torch, scipy and PyG have them. With leading
    dimensions, ``rowptr`` [..., M + 1] and ``index`` [..., E], each element of the batch has its own lists, all with
    E edges, as in torch's batched CSR tensors. A column that is listed twice is folded twice; the order does not
    matter. ``index`` may be longer than ``rowptr[-1]``; the rest of it is not read.

    Raises :class:`ArgumentError`, :class:`DTypeError`, :class:`ShapeError` or :class:`DeviceError` for tensors that
    are no such lists, and :class:`ColumnListError` for offsets that decrease or columns that do not exist (see
    ``mr.use(check=True)``).

    >>> import torch, monoidreduce as mr
    >>> mr.edges(torch.tensor([0, 2, 2, 3]), torch.tensor([4, 0, 1]))
    mr.edges(3 rows, 3 edges)
    """

    kind = "edges"
    rowptr: Tensor
    index: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.index is None:
            raise ArgumentError(
                detail=f"mr.edges was given {shown(self.rowptr)} alone",
                fix="Give rowptr and index; of a CSR tensor, PyG's edge_index or columns [M, K], mr.edges.from_csr, "
                "from_edge_index and from_neighbours make them",
            )
        self.take_arrays("rowptr", "index")
        base.check_integers("rowptr", self.rowptr, "[..., M + 1]", 1)
        base.check_integers("index", self.index, "[..., E]", 1)
        base.check_one_device(rowptr=self.rowptr, index=self.index)
        if self.rowptr.shape[:-1] != self.index.shape[:-1] or not self.rowptr.shape[-1]:
            raise ShapeError(
                detail=f"rowptr has shape {tuple(self.rowptr.shape)} and index {tuple(self.index.shape)}",
                fix="Give [M + 1] and [E], or both with the same leading dimensions",
            )

    @classmethod
    def from_neighbours(cls, index: Tensor, count: Tensor | None = None) -> Edges:
        """Equally many columns for each row: neighbours, candidates or samples ``index`` [..., M, K].

        With ``count`` [M], row i has the first ``count[i]`` of them. A number per pair is then given as [..., M · K],
        or, with ``count``, as one per edge that is left, in order.

        >>> import torch, monoidreduce as mr
        >>> _, near = mr.ops.knn(torch.randn(5, 3), torch.randn(9, 3), 4)
        >>> mr.edges.from_neighbours(near)
        mr.edges(5 rows, 20 edges)
        """
        index, count = base.take_array("index", index), base.take_array("count", count)
        base.check_integers("index", index, "[..., M, K]", 2, None if count is None else 2)
        *lead, rows, most = index.shape
        if count is not None:
            base.check_integers("count", count, "[M]", 1, 1)
            base.check_one_device(index=index, count=count)
            if len(count) != rows:
                raise ShapeError(detail=f"count has {len(count)} numbers, but index {rows} rows", fix="Give one a row")
            if base.can_inspect(count) and len(count) and not 0 <= int(count.min()) <= int(count.max()) <= most:
                bad = int(count.min()) if int(count.min()) < 0 else int(count.max())
                raise ColumnListError(detail=f"count holds {bad}", fix=f"Give numbers from 0 to {most}")
            offsets, items = pack(index, count)
            if base.can_inspect(count):
                items = items[: int(offsets[-1])]
            return cls(offsets, items)
        rowptr = torch.arange(rows + 1, device=index.device, dtype=index.dtype) * most
        return cls(rowptr.expand(*lead, -1), index.reshape(*lead, rows * most))

    @classmethod
    def from_csr(cls, matrix: Tensor) -> Edges:
        """The places of a sparse CSR tensor's numbers, which are then an ``mr.Pair`` argument: ``matrix.values()``.

        >>> import torch, warnings, monoidreduce as mr
        >>> warnings.simplefilter("ignore")  # torch calls its CSR tensors a beta
        >>> mr.edges.from_csr(torch.eye(3).to_sparse_csr())
        mr.edges(3 rows, 3 edges)
        """
        if not isinstance(matrix, Tensor) or matrix.layout is not torch.sparse_csr:
            raise ArgumentError(
                detail=f"matrix was given {shown(matrix)}"
                + (f", laid out as {matrix.layout}" if isinstance(matrix, Tensor) else ""),
                fix="Give a tensor made by .to_sparse_csr()",
            )
        return cls(matrix.crow_indices(), matrix.col_indices())

    @classmethod
    def from_edge_index(cls, edge_index: Tensor, rows: int) -> tuple[Edges, Tensor]:
        """The edges of a PyG ``edge_index`` [2, E], from its sources (columns) to its targets (``rows`` of them), and
        their order: numbers of edges are to be given as ``numbers[order]``.

        The order among one target's edges stays as it is. A graph that is read more than once is converted once.

        >>> import torch, monoidreduce as mr
        >>> edges, order = mr.edges.from_edge_index(torch.tensor([[3, 1, 2], [1, 0, 1]]), rows=2)
        >>> edges.rowptr, edges.index, order
        (tensor([0, 1, 3]), tensor([1, 3, 2]), tensor([1, 0, 2]))
        """
        edge_index = base.take_array("edge_index", edge_index)
        base.check_integers("edge_index", edge_index, "[2, E]", 2, 2)
        if edge_index.shape[0] != 2:
            raise ShapeError(detail=f"edge_index has shape {tuple(edge_index.shape)}", fix="[2, E] was expected")
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 0:
            raise ArgumentError(detail=f"rows was given {shown(rows)}", fix="Give the number of targets")
        source, target = edge_index.unbind()
        if base.can_inspect(edge_index):
            base.check_range("edge_index[1]", target, rows - 1, "rows")
        target, order = target.sort(stable=True)
        rowptr = torch.searchsorted(target, torch.arange(rows + 1, device=target.device, dtype=target.dtype))
        return cls(rowptr.to(target.dtype), source[order]), order

    def tensors(self) -> tuple[Tensor, ...]:
        """``rowptr`` and ``index``."""
        return (self.rowptr, self.index)

    @property
    def form(self) -> tuple:
        return (self.kind, self.rowptr.dim() - 1)

    @classmethod
    def _restore(cls, form: tuple, tensors: tuple[Tensor, ...]) -> Edges:
        return base.build(cls, rowptr=tensors[0], index=tensors[1])

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.rowptr.shape[:-1])

    def _check_sizes(self, rows: int, cols: int) -> None:
        if self.rowptr.shape[-1] != rows + 1:
            raise ShapeError(
                detail=f"rowptr has {self.rowptr.shape[-1]} offsets, but there are {rows} rows",
                fix=f"Give {rows + 1}: where each row's list starts, and the end of the last",
            )

    def _check_values(self, rows: int, cols: int) -> None:
        edges = self.index.shape[-1]
        base.check_offsets("rowptr", self.rowptr, edges, "edges")
        self._check_elements()
        used = None if self.batch else torch.arange(edges, device=self.index.device) < self.rowptr[-1]
        base.check_range("index", self.index, cols - 1, "columns", used)

    def _check_elements(self) -> None:
        """Raise ColumnListError unless the lists of every element of the batch end with its last edge."""
        edges = self.index.shape[-1]
        if torch.Size(self.batch).numel() > 1 and int(self.rowptr[..., -1].min()) < edges:
            raise ColumnListError(
                detail=f"rowptr ends at {int(self.rowptr[..., -1].min())} for one element of the batch, but index has "
                f"{edges} edges",
                fix="Give all elements of a batch equally many edges, or their union as one graph",
            )

    def _make_listing(self, rows: int, cols: int) -> ColumnLists:
        if torch.Size(self.batch).numel() == 1:  # there may be room to spare
            return ColumnLists(self.rowptr.reshape(-1), self.index.reshape(-1), 1, 1, self.batch)
        if base.can_inspect(self.rowptr):  # those of a mapped call were not checked
            self._check_elements()
        edges, count = self.index.shape[-1], torch.Size(self.batch).numel()
        first = torch.arange(count, device=self.rowptr.device).unsqueeze(1) * edges
        starts = (self.rowptr[..., :-1].flatten(0, -2) + first).reshape(-1)
        offsets = torch.cat([starts, starts.new_full((1,), count * edges)])
        return ColumnLists(offsets, self.index.reshape(-1), 1, 1, self.batch)

    def _sizes(self) -> str:
        lead = f", per {list(self.batch)}" if self.batch else ""
        return f"{self.rowptr.shape[-1] - 1} rows, {self.index.shape[-1]} edges{lead}"
