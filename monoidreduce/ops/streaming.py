"""Ready-made layers over rows and columns from files: ``ops.knn.stream(x, k=10).over("y.npy")``.

A layer is Python around one op: checks and views before it, a form or a mean after it. So a stream calls the layer on
the rows and a chunk of columns, to catch the call of the op (``_Caught``), which is then folded in chunks as any op
is; and at the end with the op's results in its place, to get what the layer makes of them. Layers that fold both ways
are two streams with rows and columns exchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from ..arrays import Border, is_array
from ..block_runs import Argument, Place, Prepared
from ..engines.ranks import agreement
from ..engines.ranks.agreement import StreamedCall
from ..errors import ArgumentError, MonoidReduceError, ShapeError, StreamError
from ..files import is_file, open_arrays
from ..op import Op
from ..sources import is_source_of_arrays
from ..stream import Stream


class _Caught(BaseException):
    """The call of an op, caught inside a layer. No Exception: a layer does not take it for an error of its own."""

    def __init__(self, op: Op, values: dict[str, Any]):
        super().__init__()
        self.op, self.values = op, values


def _catch(op: Op, values: dict[str, Any]) -> Any:
    raise _Caught(op, values)


def _axis(kind: str) -> Callable[[int], int]:
    """The axis that is cut: of numbers and of what is given per pair the last, of vectors the one before their
    features."""
    return {
        "numbers": lambda rank: rank - 1,
        "vectors": lambda rank: rank - 2,
        "several": lambda rank: rank - 3,  # vectors each
        "either": lambda rank: rank - 2 if rank > 1 else 0,  # a vector or a number each
        "first": lambda rank: 0,
    }[kind]


class LayerStreams:
    """Makes the streams of one layer. ``rows`` and ``cols``: which of its arguments have an entry a row or a column, by
    name, and what these are ("vectors", "several", "numbers", or "either")."""

    def __init__(self, layer: Callable[..., Any], rows: Mapping[str, str], cols: Mapping[str, str]):
        self.layer, self.signature = layer, inspect.signature(layer)
        known = self.signature.parameters
        self.rows = {n: Argument(known[n].default is not inspect.Parameter.empty, _axis(k)) for n, k in rows.items()}
        self.cols = {n: Argument(known[n].default is not inspect.Parameter.empty, _axis(k)) for n, k in cols.items()}

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """A stream of the layer: everything but the columns is given here, by position or by name."""
        name = self.layer.__name__
        if not self.cols:
            raise StreamError(
                detail=f"{name} does not fold rows over columns that could come in chunks", fix="Call it as it is"
            )
        if kwargs.get("cols") is not None:
            raise StreamError(
                detail=f"{name}.stream was given lists of columns (cols), but its columns come in chunks",
                fix="Give all columns at once, to the layer itself",
            )
        known = self.signature.parameters
        names = [n for n in known if n not in self.cols]
        for n in kwargs:
            if n not in names:
                what = "its columns come later" if n in self.cols else f"it has no argument {n!r}"
                raise ArgumentError(detail=f"{name}.stream: {what}", fix=f"Give {', '.join(names)}")
        places = [n for n in names if known[n].kind is not inspect.Parameter.KEYWORD_ONLY]
        if len(args) > len(places) or set(places[: len(args)]) & set(kwargs):
            raise ArgumentError(
                detail=f"{name}.stream was given {len(args)} arguments by position, but takes {', '.join(places)}; "
                "columns come later",
                fix="Give the others by name",
            )
        given = {**dict(zip(places, args, strict=False)), **kwargs}
        missing = [n for n in names if n not in given and known[n].default is inspect.Parameter.empty]
        if missing:
            raise ArgumentError(detail=f"{name}.stream was not given {', '.join(missing)}", fix="Give it by name")
        memo: dict[str, int] = {}
        call = lambda rows, chunk, place: self._prepare(rows, chunk, place, memo)
        return Stream(call, self.cols, given, self.rows, memo)

    def _call(self, rows: Mapping[str, Any], chunk: Mapping[str, Any], asked: StreamedCall) -> Any:
        with agreement.use_layout(asked):
            return self.layer(**rows, **chunk)

    def _prepare(
        self, rows: Mapping[str, Any], chunk: Mapping[str, Any], place: Place | None, memo: dict[str, int]
    ) -> Prepared:
        totals = (None if place is None else place.total, memo.get("columns"))
        asked = StreamedCall(call=_catch, totals=totals, memo=memo)
        op, values = self._catch_op(rows, chunk, asked)
        columns = {n: v for n, v in values.items() if op.parameters[n].axis in ("cols", "pairs") and v is not None}
        stays = {n: v for n, v in values.items() if n not in columns}
        if place is not None and any(op.parameters[n].axis == "pairs" for n in columns):
            raise StreamError(
                detail=f"{self.layer.__name__} was given numbers for every pair, and rows that are read in blocks",
                fix="Give the rows in memory",
            )
        found = op._prepare_chunk(stays, columns, place)
        forms = {n: (v.dtype, v.shape, v.device) for n, v in chunk.items() if isinstance(v, Tensor)}

        def inputs(named: Mapping[str, Any]) -> dict[str, Any]:
            _, values = self._catch_op(rows, named, asked)
            return found.inputs({n: values[n] for n in columns})

        def pack(results: Sequence[Tensor], all_rows: Mapping[str, Any], total: int) -> Any:
            filled = {n: self._stand_in(n, *form, total) for n, form in forms.items()}
            done = _Results(op, found.pack(results, all_rows, total), self.layer.__name__)
            known = replace(asked, call=done, totals=(None, total))
            return self._call(all_rows, {**chunk_options, **filled}, known)

        chunk_options = {n: v for n, v in chunk.items() if not isinstance(v, Tensor)}
        return replace(found, inputs=inputs, pack=pack)

    def _catch_op(
        self, rows: Mapping[str, Any], chunk: Mapping[str, Any], asked: StreamedCall
    ) -> tuple[Op, dict[str, Any]]:
        try:
            self._call(rows, chunk, asked)
        except _Caught as caught:
            return caught.op, caught.values
        except MonoidReduceError as error:
            raise error.at(f"in {self.layer.__name__}.stream") from None
        raise StreamError(detail=f"{self.layer.__name__} does not fold pairs for these options", fix="Call it as it is")

    def _stand_in(self, name: str, dtype: torch.dtype, shape: torch.Size, device: torch.device, total: int) -> Tensor:
        """Columns as a layer sees them after the fold: their number, type and place, but no values."""
        whole = list(shape)
        whole[self.cols[name].axis(len(shape))] = total
        return torch.zeros((), dtype=dtype, device=device).expand(whole)


class _Results:
    """Stands for an op whose results are known: a layer may ask for them once."""

    def __init__(self, op: Op, results: Any, name: str):
        self.op, self.results, self.name = op, [results], name

    def __call__(self, op: Op, values: dict[str, Any]) -> Any:
        if op is not self.op or not self.results:
            raise StreamError(
                detail=f"{self.name} folds more than once with these options, so its columns cannot come in chunks",
                fix="Leave options out, or give all columns at once",
            )
        return self.results.pop()


# Both ways ------------------------------------------------------------------------------------------------------------


class BothWays:
    """A layer that folds columns for rows and rows for columns: :meth:`over` runs one stream for each.

    ``run(rows, columns)`` does it; rows and columns are both arrays or files that can be read again."""

    def __init__(self, name: str, rows: Any, run: Callable[..., Any]):
        self.name, self.rows, self.run = name, rows, run

    def over(self, source: Any, *, quiet: bool = False) -> Any:
        """Read rows and columns, each as often as it takes; the result, without gradients."""
        for value in (self.rows, source):
            if not is_source_of_arrays(value):
                raise StreamError(
                    detail=f"{self.name} reads its rows and its columns several times, but was given "
                    f"{type(value).__name__}",
                    fix="Give arrays, tensors, or paths of files",
                )
            if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
                raise StreamError(
                    detail=f"{self.name} has no gradients in a stream, but one is asked for",
                    fix="Call it under torch.no_grad(), or as it is, with rows and columns in memory",
                )
        border = Border()
        mapped = [isinstance(v, numpy.memmap) for v in (self.rows, source)]  # read in chunks, as files are
        rows, cols = (
            v if m or not is_array(v) else border.take(v, self.name)
            for v, m in zip((self.rows, source), mapped, strict=True)
        )
        border.of_numpy = border.of_numpy or any(mapped)
        if not (is_file(rows) and is_file(cols)):
            border.of_others = border.of_others or not border.of_numpy
        with torch.no_grad():
            return border.give(self.run(rows, cols, quiet))


def count_entries(name: str, given: Any) -> int:
    """How many rows or columns an array or a file of vectors has."""
    (array,) = open_arrays(given)
    if len(array.shape) != 2:
        raise ShapeError(detail=f"{name} has shape {list(array.shape)}", fix="Give one vector each: [M, D]")
    return int(array.shape[0])
