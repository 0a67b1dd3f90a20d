"""What a body may name: reductions, indices, sizes, distances and random numbers, to a user ``mr.sum`` and so on.

Each becomes one of the few kinds of ``reductions/`` and arithmetic on its results.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ..algebra import Monoid, Scalar, Vector
from ..algebra.laws import probe
from ..errors import ArgumentError, ShapeError, TraceError, UnreducedError, shown
from ..reductions import make
from . import constructors, philox
from .constructors import apply
from .expression import Expr, are_several, const, index, size, topological
from .symbol import Everywhere, Symbol, check_call, current_trace, expr_of, read_value
from .trace import first_entry

Element = TypeVar("Element", bound=Monoid)  # one of the user's

row_index: torch.Tensor = Everywhere(index("row"))  # type: ignore[assignment]  # in a body, a tensor
"""The number of the pair's row, from 0; over many ranks, of the whole.

>>> import torch, monoidreduce as mr
>>> @mr.op
... def seen(x: mr.Row, y: mr.Col):
...     return mr.count(mr.col_index <= mr.row_index)
>>> seen(torch.zeros(3), torch.zeros(5))
tensor([1, 2, 3])
"""

col_index: torch.Tensor = Everywhere(index("col"))  # type: ignore[assignment]  # in a body, a tensor
"""The number of the pair's column, from 0; over many ranks and in a stream, of the whole.

>>> import torch, monoidreduce as mr
>>> @mr.op
... def gather(label: mr.Row, y: mr.Col):
...     return mr.sum(torch.where(mr.col_index == label, y, 0.0))
>>> gather(torch.tensor([2, 0]), torch.tensor([5.0, 6.0, 7.0]))
tensor([7., 5.])
"""

num_rows: torch.Tensor = Everywhere(size("rows"))  # type: ignore[assignment]  # in a body, a tensor
"""How many rows there are, in all.

>>> import torch, monoidreduce as mr
>>> @mr.op
... def share(x: mr.Row, y: mr.Col):
...     return mr.sum(x * y, over="rows") / mr.num_rows
>>> share(torch.ones(4), torch.tensor([1.0, 2.0]))
tensor([1., 2.])
"""

num_cols: torch.Tensor = Everywhere(size("cols"))  # type: ignore[assignment]  # in a body, a tensor
"""How many columns there are, in all.

>>> import torch, monoidreduce as mr
>>> @mr.op
... def last(x: mr.Row, y: mr.Col):
...     return mr.sum(torch.where(mr.col_index == mr.num_cols - 1, x * y, 0.0))
>>> last(torch.ones(2), torch.tensor([1.0, 9.0]))
tensor([9., 9.])
"""


def _count(over: str) -> Any:
    """How many pairs a reduction folds: all columns or rows, or those that exist."""
    trace = current_trace.get()
    if trace is None or trace.domain is None:
        return Symbol(size(over))
    return _reduce("sum", over, (), Symbol(const(True)), name="count")[0]


@check_call
def sqdist(x: Any, y: Any) -> torch.Tensor:
    """|x - y|² of a row's and a column's vector, careful for close points.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def nearest(x: mr.Row["d"], y: mr.Col["d"]):
    ...     return mr.min(mr.sqdist(x, y))
    >>> nearest(torch.zeros(1, 2), torch.tensor([[3.0, 4.0], [1.0, 1.0]]))
    tensor([2.])
    """
    return cast(torch.Tensor, Symbol(constructors.sqdist(expr_of(x), expr_of(y))))


@check_call
def lookup(table: Any, index: Any, *, clamp: bool = False) -> torch.Tensor:
    """``table[index]``: an entry of a :class:`~monoidreduce.Table`, by any integer of the pair.

    The index may be made of row and column indices, of sizes, and of integer arguments per row, column, pair or batch
    element. An index below 0 or beyond the table at a pair that counts (one that no ``torch.where`` leaves out) is an
    :class:`~monoidreduce.TableError`; with ``clamp=True`` it reads the nearest entry. An index that depends on tensors
    is checked on a CPU, and on a GPU under ``mr.use(check=True)``, since there the check waits for the device; without
    it, over ranks and in streams, an entry that does not exist is NaN.

    The gradient of the table is summed in a fixed order, without atomics, and along diagonals where the index is a
    function of ``mr.row_index - mr.col_index``.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], bias: mr.Table["n"]):
    ...     return mr.softmax_mean(q @ k + mr.lookup(bias, mr.row_index - mr.col_index + mr.num_cols - 1), v)
    >>> q, k, v = torch.randn(3, 8, 5, 4).unbind()  # 8 heads of 5 tokens
    >>> bias = torch.zeros(8, 9, requires_grad=True)
    >>> attention(q, k, v, bias).sum().backward()
    >>> bias.grad.shape
    torch.Size([8, 9])
    """
    if current_trace.get() is None:
        raise TraceError(
            detail="mr.lookup was called outside the body of an op",
            fix="Decorate the function that calls it with @mr.op; elsewhere write table[..., index]",
        )
    entries, at = expr_of(table), expr_of(index)
    if entries.feature is None or entries.rows or entries.cols or are_several(entries):
        raise ArgumentError(
            detail=f"mr.lookup was given {shown(table)} as a table",
            fix="Give a parameter declared mr.Table[\"n\"]; read a row's or column's number with torch.where, as "
            "mr.sum(torch.where(mr.col_index == i, value, 0.0))",
        )
    if at.dtype != "int" or at.feature is not None:
        raise ArgumentError(
            detail=f"mr.lookup was given {shown(index)} as an index",
            fix="Give one integer per pair, row or column: x.to(torch.int64), or a // b for a quotient",
        )
    if clamp:
        at = apply("minimum", apply("maximum", at, 0), apply("sub", size(str(entries.feature)), 1))
    return Symbol(constructors.look_up(entries, at))  # type: ignore[return-value]  # in a body, a tensor


@check_call
def popcount(x: Any, bits: int) -> torch.Tensor:
    """How many of the lowest ``bits`` bits of a whole number are 1; its population count.

    Whole numbers have 64 bits in a body. Give the width of the numbers as they are stored, 8, 16, 32 or 64: a
    negative number of 32 bits would have 32 more of them.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def hamming(x: mr.Row["words"], y: mr.Col["words"]):
    ...     return mr.min(mr.popcount(x ^ y, bits=8).sum())
    >>> hamming(torch.tensor([[0b1111, 0b1]]), torch.tensor([[0b1010, 0b0], [0b1110, 0b11]]))
    tensor([2])
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 64:
        raise ArgumentError(detail=f"mr.popcount was given bits={bits!r}", fix="Give the width, from 1 to 64")
    e = expr_of(x)
    if e.dtype == "float":
        raise TraceError(
            detail=f"mr.popcount was asked of {x!r}, a floating-point number",
            fix="Pass the codes as whole numbers (torch.uint8 to torch.int64)",
        )
    return cast(torch.Tensor, Symbol(apply("popcount", apply("cast", e, to="int"), bits=bits)))


def _is_bool(x: Any) -> bool:
    return expr_of(x).dtype == "bool"


def _as_ordered(x: Any) -> Any:
    """Truth values as 0 and 1, which can be compared; anything else as it is."""
    return Symbol(apply("cast", expr_of(x), to="int")) if _is_bool(x) else x


def _reduce(kind: str, over: str, params: tuple, *values: Any, vectors: bool = False, name: str = "") -> list[Any]:
    if over not in ("cols", "rows"):
        raise ArgumentError(
            detail=f"{name} was given over={over!r}", fix='Use over="cols" (the default) or over="rows"'
        )
    if current_trace.get() is None:
        raise TraceError(
            detail=f"mr.{name} was called outside the body of an op",
            fix="Decorate the function that calls it with @mr.op",
        )
    fields = tuple(expr_of(v) for v in values)
    number_fields = fields[:1] if vectors and kind not in ("sum", "user") else () if vectors else fields
    for f in number_fields:
        if f.feature is not None:
            raise UnreducedError(
                detail=f'mr.{name} folds one number per pair, but was given a vector over "{f.feature}"; '
                "a whole vector per pair would be M × N × features",
                fix="Reduce it over its features first (x @ y, .sum()), or fold it with mr.sum or mr.softmax_mean",
            )
    return [Symbol(e) for e in make(kind, over, params, fields)]


def _number(x: Any) -> Expr:
    return apply("cast", expr_of(x), to="float")


@check_call
def sum(x: Any, *, over: str = "cols") -> torch.Tensor:
    """Σ_j x: the sum over columns (or rows) of a number or a vector per pair.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def perceptron(x: mr.Row["d"], w: mr.Col["d"], out: mr.Col["n"]):
    ...     return mr.sum(torch.relu(x @ w) * out)
    >>> perceptron(torch.ones(1, 2), torch.eye(2), torch.ones(2, 3))
    tensor([[2., 2., 2.]])
    """
    return _reduce("sum", over, (), x, vectors=True, name="sum")[0]


@check_call
def mean(x: Any, *, over: str = "cols") -> torch.Tensor:
    """Σ_j x / N; with no columns it is NaN, as torch's mean of nothing.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def gap(x: mr.Row, y: mr.Col):
    ...     return mr.mean((x - y).abs())
    >>> gap(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([1., 1.])
    """
    count = _count(over)
    return torch.where(count == 0, math.nan, sum(x, over=over) / torch.clamp(count, min=1))


@check_call
def logsumexp(x: Any, *, over: str = "cols") -> torch.Tensor:
    """log Σ_j exp(x); minus infinity where there is nothing to see.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def normaliser(x: mr.Row, y: mr.Col):
    ...     return mr.logsumexp(x * y)
    >>> normaliser(torch.zeros(2), torch.zeros(4)).exp()
    tensor([4., 4.])
    """
    return _reduce("soft", over, (), Symbol(_number(x)), name="logsumexp")[0]


@check_call
def softmax_mean(logit: Any, value: Any, *, over: str = "cols") -> torch.Tensor:
    """Σ_j softmax_j(logit) value, of a vector or of a number; 0 where every logit is minus infinity.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    ...     return mr.softmax_mean(q @ k, v)
    >>> attention(torch.zeros(1, 4), torch.ones(2, 4), torch.tensor([[1.0], [3.0]]))
    tensor([[2.]])
    """
    values = Symbol(_number(logit)), Symbol(_number(value))
    return _reduce("soft", over, (), *values, vectors=True, name="softmax_mean")[1]


@check_call
def weighted_mean(weight: Any, value: Any, *, over: str = "cols") -> torch.Tensor:
    """Σ_j weight · value / Σ_j weight; 0 where the weights sum to 0.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def smoothed(x: mr.Row, y: mr.Col):
    ...     return mr.weighted_mean((x - y).abs() < 1.5, y)
    >>> smoothed(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([1., 2.])
    """
    total = sum(weight, over=over)
    seen = total != 0
    return torch.where(seen, sum(weight * value, over=over) / torch.where(seen, total, 1.0), 0.0)


@check_call
def max(x: Any, *, over: str = "cols") -> torch.Tensor:
    """The largest x; a tie's gradient goes to its first column. Minus infinity where there is nothing.

    Of truth values it is :func:`any`, as in torch.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def furthest(x: mr.Row, y: mr.Col):
    ...     return mr.max((x - y).abs())
    >>> furthest(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([2., 1.])
    """
    return any(x, over=over) if _is_bool(x) else _reduce("best", over, (True,), x, name="max")[0]


@check_call
def min(x: Any, *, over: str = "cols") -> torch.Tensor:
    """The smallest x; a tie's gradient goes to its first column. Infinity where there is nothing.

    Of truth values it is :func:`all`, as in torch.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def nearest(x: mr.Row, y: mr.Col):
    ...     return mr.min((x - y).abs())
    >>> nearest(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([0., 1.])
    """
    return all(x, over=over) if _is_bool(x) else _reduce("best", over, (False,), x, name="min")[0]


@check_call
def argmax(x: Any, *, over: str = "cols") -> torch.Tensor:
    """The first column of the largest x; -1 where every x is minus infinity or there is none.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def furthest(x: mr.Row, y: mr.Col):
    ...     return mr.argmax((x - y).abs())
    >>> furthest(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([1, 0])
    """
    return _reduce("best", over, (True,), _as_ordered(x), name="argmax")[1]


@check_call
def argmin(x: Any, *, over: str = "cols") -> torch.Tensor:
    """The first column of the smallest x; -1 where every x is infinity or there is none.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def nearest(x: mr.Row, y: mr.Col):
    ...     return mr.argmin((x - y).abs())
    >>> nearest(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([0, 0])
    """
    return _reduce("best", over, (False,), _as_ordered(x), name="argmin")[1]


class TopK(NamedTuple):
    """What :func:`topk` returns: k values, best first, and their columns."""

    values: torch.Tensor
    indices: torch.Tensor

    def gather(self, x: Any) -> torch.Tensor:
        """The number x of each chosen column (or pair), in the order of ``values``; 0 where the index is -1.

        Differentiable, and deterministic: a column's gradient is the sum over the rows that chose it, in their order.

        >>> import torch, monoidreduce as mr
        >>> @mr.op
        ... def labels(x: mr.Row, y: mr.Col, label: mr.Col):
        ...     return mr.topk((x - y).abs(), 2, largest=False).gather(label)
        >>> labels(torch.tensor([0.0]), torch.tensor([5.0, 1.0, 3.0]), torch.tensor([10, 11, 12]))
        tensor([[11, 12]])
        """
        if not isinstance(self.indices, Symbol):
            raise TraceError(
                detail="gather was called on the results of an op",
                fix="Call it in the body, where the columns are, or index a tensor with .indices",
            )
        if expr_of(x).feature is not None:
            raise UnreducedError(
                detail=f'gather was given a vector over "{expr_of(x).feature}"; a row would have k whole vectors',
                fix="Gather one feature at a time (x[0]), or average vectors with mr.topk_mean",
            )
        if _is_bool(x):
            return self.gather(_as_ordered(x)) != 0
        if expr_of(x).dtype == "int":  # in pieces that every float holds exactly
            low, middle, high = x % _PIECE, x // _PIECE % _PIECE, x // _PIECE**2
            pieces = [self._pick(Symbol(_number(piece))) for piece in (low, middle, high)]
            low, middle, high = (Symbol(apply("cast", expr_of(p), to="int")) for p in pieces)
            return low + _PIECE * (middle + _PIECE * high)
        return self._pick(x)

    def _pick(self, x: Any) -> Any:
        """The sum of x over each chosen column; of one that a list names several times, its first entry alone."""
        *_, search = (e for e in topological([expr_of(self.indices)]) if e.op == "reduce")
        over = search.attrs[1]
        return sum(torch.where(self._is_chosen(over), x, 0.0), over=over)

    def _is_chosen(self, over: str) -> Any:
        chosen: Any = (col_index if over == "cols" else row_index) == self.indices
        trace = current_trace.get()
        first = None if trace is None else first_entry(trace.domain)
        return chosen if first is None else chosen & Symbol(first)


_PIECE = 2**22  # integers below are floats


@check_call
def topk(x: Any, k: int, *, largest: bool = True, over: str = "cols") -> TopK:
    """The k largest x (or smallest), best first, with their columns; -1 marks places that only saw infinity.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def nearest(x: mr.Row, y: mr.Col):
    ...     return mr.topk((x - y).abs(), 2, largest=False).indices
    >>> nearest(torch.tensor([0.0]), torch.tensor([5.0, 1.0, 3.0]))
    tensor([[1, 2]])
    """
    k, largest = _read_count("topk", k), bool(largest)
    values, indices = _reduce("topk", over, (k, largest), _as_ordered(x), name="topk")
    return TopK(values != 0 if _is_bool(x) else values, indices)


def _read_count(name: str, k: Any) -> int:
    """A number of columns: a fixed choice, which is checked here."""
    k = read_value(k)
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt)) or k < 1:
        raise ArgumentError(detail=f"{name} was given k = {shown(k)}", fix="Ask for a whole number, at least one")
    return int(k)


@check_call
def topk_mean(score: Any, value: Any, k: int, *, over: str = "cols") -> torch.Tensor:
    """Σ_j softmax_j(score) value over the k columns of the largest scores alone; 0 where all scores are minus infinity.

    The value is a number, or a vector of the column. Pairs are scored once: the best k are then gathered, forward and
    backward, so that the gradient costs k columns a row.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def sparse_attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], best: int):
    ...     return mr.topk_mean(q @ k, v, best)
    >>> sparse_attention(torch.ones(1, 1), torch.tensor([[0.0], [4.0], [4.0]]), torch.tensor([[9.0], [1.0], [3.0]]), 2)
    tensor([[2.]])
    """
    best = topk(Symbol(_number(score)), _read_count("topk_mean", k), over=over)
    top = best.values.amax(-1).detach()
    weight = torch.exp(best.values - torch.where(top == -math.inf, 0.0, top))
    total = weight.sum(-1)
    weight = weight / torch.where(total == 0, 1.0, total)
    if expr_of(value).feature is None:
        return (weight * best.gather(Symbol(_number(value)))).sum(-1)
    chosen = torch.where(best._is_chosen(over), weight, 0.0).sum(-1)
    vector: Any = Symbol(_number(value))
    return sum(vector * chosen, over=over)


@check_call
def any(x: Any, *, over: str = "cols") -> torch.Tensor:
    """Whether x holds for any column.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def known(x: mr.Row, y: mr.Col):
    ...     return mr.any(x == y)
    >>> known(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([ True, False])
    """
    return _count_true("any", x, over) > 0


@check_call
def all(x: Any, *, over: str = "cols") -> torch.Tensor:
    """Whether x holds for every column (true of none).

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def least(x: mr.Row, y: mr.Col):
    ...     return mr.all(x <= y)
    >>> least(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([ True, False])
    """
    return _count_true("all", x, over) == _count(over)


@check_call
def count(x: Any = True, *, over: str = "cols") -> torch.Tensor:
    """For how many columns x holds.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def rank(x: mr.Row, y: mr.Col):
    ...     return mr.count(y < x)
    >>> rank(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([0, 1])
    """
    return cast(torch.Tensor, _count_true("count", x, over))


def _count_true(name: str, x: Any, over: str) -> Any:
    if isinstance(x, bool):
        return _count(over) if x else Symbol(const(0))
    return _reduce("sum", over, (), Symbol(apply("cast", expr_of(x), to="bool")), name=name)[0]


@check_call
def var(x: Any, *, correction: float = 1, over: str = "cols") -> torch.Tensor:
    """The variance of x over columns, as torch.var: Σ (x - mean)² / (N - correction), in Welford's form.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def spread(x: mr.Row, y: mr.Col):
    ...     return mr.var(x * y, correction=0)
    >>> spread(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([1., 4.])
    """
    count, trace = _count(over), current_trace.get()
    if trace is not None and trace.domain is not None:  # the mean of the pairs that exist, then deviations from it
        x = Symbol(_number(x))
        apart = x - sum(x, over=over) / torch.clamp(count, min=1)
        total = torch.where(count > 1, sum(apart * apart, over=over), 0.0)  # of one pair: its mean may be rounded
        return total / torch.clamp(count - correction, min=0)
    moments: list[Any] = _reduce("moments", over, (), Symbol(_number(x)), name="var")
    return moments[1] / torch.clamp(count - correction, min=0)


@check_call
def sample(logit: Any, seed: Any, *, over: str = "cols") -> torch.Tensor:
    """One column drawn with probability softmax(logit), by the Gumbel-max trick.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def draw(x: mr.Row, logit: mr.Col):
    ...     return mr.sample(logit, seed=0)
    >>> draw(torch.zeros(2), torch.tensor([-torch.inf, 0.0]))
    tensor([1, 1])
    """
    return argmax(logit + gumbel(seed), over=over)


@check_call
def reduce(monoid: type[Element], *, over: str = "cols", **fields: Any) -> Element:
    """Fold a monoid of one's own: one value per declared field; returns the monoid with the results.

    A monoid that plainly breaks a law is a MonoidLawError with an example: its folds would depend on the tiles. It is
    looked at once, on ordinary numbers of its ``domain``; :func:`monoidreduce.laws.check` looks at much more. Gradients
    are those of its ``pullback`` or ``remove``; without either they are derived from ``combine`` (docs/monoids.md).

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def total(x: mr.Row, y: mr.Col):
    ...     return mr.reduce(mr.monoids.LogSumExp, z=x * y).z
    >>> total(torch.zeros(2), torch.zeros(4)).exp()
    tensor([4., 4.])
    """
    if not (isinstance(monoid, type) and issubclass(monoid, Monoid)):
        raise ArgumentError(detail=f"mr.reduce was given {monoid!r}", fix="Give a subclass of mr.Monoid")
    declared = monoid.fields()
    if set(fields) != set(declared):
        raise ArgumentError(
            detail=f"{monoid.__name__} has the fields {', '.join(declared)}, "
            f"but mr.reduce was given {', '.join(fields) or 'none'}",
            fix="Give every field by name",
        )
    if not monoid.commutative:
        raise ArgumentError(
            detail=f"{monoid.__name__} is not commutative, so its fold over pairs depends on the order of tiles",
            fix="Fold it in order with mr.fold",
        )
    probe(monoid)
    exprs = []
    letters = {expr_of(fields[name]).feature for name, (marker, _) in declared.items() if marker is Vector} - {None}
    for name, (marker, _) in declared.items():
        e = expr_of(fields[name])
        if marker is Vector and e.feature is None and len(letters) == 1:  # as wide as the other vectors
            e = constructors.spread(e, *letters)
        if marker is Scalar and e.feature is not None:
            raise UnreducedError(
                detail=f'field {name} of {monoid.__name__} is a Scalar, but was given a vector over "{e.feature}"',
                fix="Declare it mr.Vector, or reduce it over its features first",
            )
        if marker is Vector and e.feature is None:
            raise ShapeError(
                detail=f"field {name} of {monoid.__name__} is a Vector, but was given one number per pair",
                fix="Give it, or another Vector field, a vector (a Row or Col with a letter), or declare it mr.Scalar",
            )
        exprs.append(apply("cast", e, to="float"))
    results = (
        _reduce("user", over, (monoid,), *(Symbol(e) for e in exprs), vectors=True, name="reduce") if exprs else []
    )
    return monoid(**dict(zip(declared, results, strict=True)))


# Random numbers per pair: functions of (seed, batch, i, j), the same for every tile, engine and recomputation.


@check_call
def uniform(seed: Any) -> torch.Tensor:
    """A uniform number in (0, 1) per pair, from Philox on (seed, batch, i, j).

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def fair(x: mr.Row, y: mr.Col):
    ...     return mr.mean(mr.uniform(seed=7) < 0.5)
    >>> fair(torch.zeros(1), torch.zeros(10_000)).round(decimals=1)
    tensor([0.5000])
    """
    return _draw("uniform", seed)


def _seed_key(seed: Any) -> Expr:
    key = const(0.0) if isinstance(seed, int) and not -(2**63) <= seed < 2**63 else expr_of(seed)
    if key.dtype != "int" or key.rows or key.cols:
        raise ArgumentError(detail=f"a seed was given as {shown(seed)}", fix="Give one whole number of 64 bits")
    return key


def _draw(name: str, seed: Any) -> Any:
    return Symbol(apply(name, _seed_key(seed), index("batch"), index("row"), index("col")))


@check_call
def gumbel(seed: Any) -> torch.Tensor:
    """A standard Gumbel number per pair, the same for every tile, engine and recomputation.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def drawn(x: mr.Row, y: mr.Col):
    ...     return mr.argmax(x * y + mr.gumbel(7)) == mr.sample(x * y, 7)
    >>> drawn(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([True, True])
    """
    return _draw("gumbel", seed)


@check_call
def dropout(x: Any, p: Any, seed: Any) -> torch.Tensor:
    """x with probability 1 - p, scaled by 1 / (1 - p), else 0; the mask depends on (seed, batch, i, j) alone.

    p is rounded to a multiple of 2**-15, other than 0 and 1 unless it is one of them: so the mean is kept.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def kept(x: mr.Row, y: mr.Col):
    ...     return mr.sum(mr.dropout(x * y, 0.5, seed=7))
    >>> kept(torch.zeros(2), torch.ones(3))
    tensor([0., 0.])
    """
    p = read_value(p)  # a fixed choice: it is checked here, and a new one is a new trace
    if not isinstance(p, Real) or not 0 <= float(p) <= 1:
        raise ArgumentError(detail=f"dropout was given p = {shown(p)}", fix="A probability lies between 0 and 1")
    p = float(p)
    _, least, _ = sorted((int(p > 0), round(p * philox.COINS), philox.COINS - int(p < 1)))
    kept, scale = _draw_coin(seed) >= least, 1 / (1 - least / philox.COINS) if p < 1 else 0.0
    vector = isinstance(x, Symbol) and x.expr.feature is not None
    return x * torch.where(kept, scale, 0.0) if vector else torch.where(kept, x * scale, 0.0)


def _draw_coin(seed: Any) -> Any:
    """15 bits per pair. Rows have words of their own in each batch element, columns the same in all of them."""
    key, col = _seed_key(seed), index("col")
    row = apply("word", key, index("batch"), index("row"))
    return Symbol(apply("coin", row, apply("mark", key, col), col))
