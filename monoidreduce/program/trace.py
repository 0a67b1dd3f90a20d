"""What a body is: its parameters, read from its signature, and the program that it becomes when it is traced.

``Row["f"]`` is a vector per row, ``Col["f"]`` one per column, a bare ``Row`` or ``Col`` one number, ``Batch`` one
number per batch element, ``Pair`` one number per pair and ``Table["n"]`` n numbers that pairs look up;
``Row["h", "f"]`` is several vectors per row, h of them; ``float``, ``int`` and ``bool`` are numbers given at the call;
``str`` and callables are fixed choices, a new one is a new trace. ``X | None`` may be left out. A domain (``cols=``)
adds inputs of its own, and restricts the reductions to its pairs.

The body is run on symbols twice and the two programs compared, so that a body with a side effect on itself (a counter,
a random number) is caught. Numbers stay symbols, so a new temperature or seed is the same program; when the body asks
for a number's Python value (``if causal:``, ``mr.topk(x, k)``), it is traced again with that number fixed. What a body
reads besides its arguments is watched: where that has changed, it is traced anew.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dis
import functools
import inspect
import linecache
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..algebra import Monoid
from ..errors import (
    DeclarationError,
    ImpureError,
    MonoidReduceError,
    NotReducedError,
    TraceError,
    UnreducedError,
    shown,
)
from ..reductions import kind_of
from . import constructors
from .constructors import apply, listed_node
from .expression import Expr, Feature, are_several, const, index, letters, node, reduce_node, size, topological
from .philox import DRAWS
from .symbol import NeedValue, Symbol, Trace, calls_torch, current_trace, expr_of


class _Side(type):
    """Makes ``Row`` both an annotation (one number) and subscriptable (``Row["f"]``, a vector)."""

    axis: str
    feature: Feature

    def __getitem__(cls, feature: Any) -> Any:
        if cls.__name__ == "Table" and isinstance(feature, tuple):
            raise DeclarationError(
                detail=f"Table[{', '.join(map(repr, feature))}] would be a table of vectors",
                fix='A Table["n"] holds one number per entry; declare one table for each number that is looked up',
            )
        if cls.axis == "pairs":
            raise DeclarationError(
                detail=f"{cls.__name__}[{feature!r}] would be a tensor of M × N × {feature}",
                fix="A Pair is one number per pair; give what depends on one side only as Row or Col",
            )
        several = isinstance(feature, tuple)
        names: tuple[Any, ...] = feature if several else (feature,)
        if len(names) > 2 or (several and len(names) < 2) or not all(map(_is_name, names)):
            raise DeclarationError(
                detail=f"{cls.__name__}[{feature!r}] is not a declaration",
                fix=f'Name the features, as in {cls.__name__}["f"], or {cls.__name__}["h", "f"] for several vectors',
            )
        if several and names[0] == names[1] and cls.axis != "batch":
            raise DeclarationError(
                detail=f"{cls.__name__}[{feature!r}] has one letter twice",
                fix=f'Use two letters, as in {cls.__name__}["h", "f"]: h vectors of f features each',
            )
        shown = ", ".join(f'"{name}"' for name in names)
        own = "*".join(map(str, names)) if several else feature
        return types.new_class(f"{cls.__name__}[{shown}]", (cls,), exec_body=lambda ns: ns.update(feature=own))

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise DeclarationError(detail=f"{cls.__name__}(...) is not a declaration", fix=f'Write {cls.__name__}["f"]')

    def __repr__(cls) -> str:
        return cls.__name__


def _is_name(feature: Any) -> bool:
    """Whether this can name features: a letter, or their number."""
    if isinstance(feature, str):
        return not {",", "*"} & set(feature)
    return isinstance(feature, int) and not isinstance(feature, bool) and feature >= 1


if TYPE_CHECKING:

    class _Declared(torch.Tensor):
        """What a type checker sees: in a body, arguments are used as tensors. Pyright honours ``__class_getitem__``, so
        that ``Row["f"]`` is a Row; mypy does not, and is told to leave bodies alone (``op`` in ``op.py``)."""

        axis: str
        feature: Feature

        def __class_getitem__(cls, feature: str | int | tuple[str | int, str | int]) -> type[_Declared]: ...

else:
    _Declared = _Side("_Declared", (), {})


class Row(_Declared):
    """One number per row; ``Row["f"]``: one vector per row. Shapes ``[..., M]`` and ``[..., M, f]``.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def total(x: mr.Row["d"], shift: mr.Row, y: mr.Col["d"]):
    ...     return mr.sum(x @ y) + shift
    >>> total(torch.ones(2, 3), torch.tensor([0.0, 1.0]), torch.ones(5, 3))
    tensor([15., 16.])
    """

    axis = "rows"
    feature: Feature = None


class Col(_Declared):
    """One number per column; ``Col["f"]``: one vector per column. Shapes ``[..., N]`` and ``[..., N, f]``.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def total(x: mr.Row["d"], y: mr.Col["d"], weight: mr.Col):
    ...     return mr.sum(x @ y * weight)
    >>> total(torch.ones(1, 3), torch.ones(2, 3), torch.tensor([1.0, 2.0]))
    tensor([9.])
    """

    axis = "cols"
    feature: Feature = None


class Batch(_Declared):
    """One number per batch element; ``Batch["f"]``: one vector. Shapes ``[...]`` and ``[..., f]``.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def total(x: mr.Row["d"], y: mr.Col["d"], slope: mr.Batch):
    ...     return mr.sum(x @ y * slope)
    >>> total(torch.ones(2, 1, 3), torch.ones(2, 5, 3), torch.tensor([1.0, 2.0]))
    tensor([[15.],
            [30.]])
    """

    axis = "batch"
    feature: Feature = None


class Pair(_Declared):
    """One number, integer or truth value per pair, as the caller holds it: a bias, a mask. Shape ``[..., M, N]``.

    It is only ever sliced, tile by tile; an axis of size 1 is broadcast; its gradient is as large as itself.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def degree(x: mr.Row, y: mr.Col, edge: mr.Pair):
    ...     return mr.sum(torch.where(edge, y, 0.0))
    >>> degree(torch.zeros(2), torch.ones(3), torch.tensor([[True, True, False], [False, False, False]]))
    tensor([2., 0.])
    """

    axis = "pairs"
    feature: Feature = None


class Table(Batch):
    """Numbers that pairs look up by an integer (:func:`monoidreduce.lookup`): ``Table["n"]`` has shape ``[..., n]``, so
    that batch dimensions give every head a table of its own.

    Its gradient sums, for every entry, the cotangents of the pairs that read it.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def smooth(x: mr.Row, y: mr.Col, taps: mr.Table["n"]):
    ...     return mr.sum(y * mr.lookup(taps, mr.row_index - mr.col_index + 1, clamp=True))
    >>> smooth(torch.zeros(3), torch.ones(3), torch.tensor([1.0, 10.0, 100.0]))
    tensor([ 12., 111., 210.])
    """


STORED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)  # of vectors with scales (``stored_vectors.py``)


AXES = {  # between batch and features; "list" and "lists" are the tensors of a domain (``domains/``)
    "rows": ("rows",), "cols": ("cols",), "pairs": ("rows", "cols"), "batch": (),
    "list": ("list",), "lists": ("groups", "list"), "edges": ("list",),
}  # fmt: skip


RESERVED = "cols"  # the keyword of every call that says which pairs exist


@dataclass(frozen=True)
class Parameter:
    """One parameter: where it lives (``rows``, ``cols``, ``pairs``, ``batch``, ``number``, ``static``) and what it may
    be."""

    name: str
    axis: str
    feature: Feature
    optional: bool
    default: Any
    python: type | None = None  # float, int or bool for numbers
    stored: str = ""  # "vectors" of small numbers, or their "scale" (``stored_vectors.py``)
    wide: torch.dtype | None = None  # the type that stored vectors stand for
    packing: tuple[int, int] | None = None  # of stored vectors (``Expr.packing``)
    blocks: Parameter | None = None  # the scales of their blocks
    is_table: bool = field(default=False, compare=False, repr=False)  # a Batch that was declared as a Table

    def expr(self, dtype: str) -> Expr:
        stored = ("stored", *(self.packing or ())) if self.stored == "vectors" else ()
        return node(
            "input",
            () if self.blocks is None else (self.blocks.expr("float"),),
            (self.name, *stored),
            rows=self.axis in ("rows", "pairs", "edges"),
            cols=self.axis in ("cols", "pairs", "edges"),
            feature=self.feature,
            dtype=dtype,
        )

    @functools.cached_property
    def tail(self) -> tuple[str, ...]:
        """The axes that its tensor has after the batch dimensions."""
        return (*AXES.get(self.axis, ()), *letters(self.feature))

    @property
    def is_tensor(self) -> bool:
        return self.axis in AXES

    @property
    def shape(self) -> str:
        """The shape of its tensor, in words."""
        return f"[{', '.join(['...', *({'rows': 'M', 'cols': 'N'}.get(a, a) for a in self.tail)])}]"

    def __str__(self) -> str:
        batch = "Table" if self.is_table else "Batch"
        side = {"rows": "Row", "cols": "Col", "pairs": "Pair", "edges": "Pair", "batch": batch}.get(self.axis)
        if side is None:
            return self.python.__name__ if self.python else "a fixed choice"
        names = ", ".join(f'"{name}"' for name in letters(self.feature))
        return f"{side}[{names}]" if names else side


def parameters(function: Any) -> dict[str, Parameter]:
    """Read the declarations of an op's body."""
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        raise DeclarationError(
            detail=f"op was given {shown(function)}", fix="Give a function, written with def or lambda"
        )
    hints = _read_annotations(function)
    found = {}
    for name, p in inspect.signature(function).parameters.items():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise DeclarationError(detail=f"{function.__name__} takes *{name}", fix="Name every argument of an op")
        if name == RESERVED:
            raise DeclarationError(
                detail=f"{function.__name__} has a parameter {name}, with which calls say which columns exist",
                fix="Give the parameter another name",
            )
        default = ... if p.default is p.empty else p.default
        found[name] = _make_parameter(function.__name__, name, hints.get(name), default)
    return found


def _read_annotations(function: Any) -> dict[str, Any]:
    """Annotations as objects, whether or not they were written under ``from __future__ import annotations``."""
    raw = dict(getattr(function, "__annotations__", {}))
    scope = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # assigned later: it has no value yet
            scope[name] = cell.cell_contents
    for name, hint in raw.items():
        if isinstance(hint, str):
            try:
                raw[name] = eval(hint, scope)  # the user's own source, as Python itself would read it
            except Exception as error:
                raise DeclarationError(detail=f"{function.__name__}: cannot read {name}: {hint} ({error})") from None
    return raw


def _make_parameter(op: str, name: str, hint: Any, default: Any) -> Parameter:
    optional = default is None
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [h for h in typing.get_args(hint) if h is not type(None)]
        optional, hint = optional or len(rest) < len(typing.get_args(hint)), rest[0] if len(rest) == 1 else hint
    if hint is Table:
        raise DeclarationError(
            detail=f"{op}: {name} is declared Table, without the name of its size", fix='Write Table["n"]'
        )
    if isinstance(hint, _Side):
        return Parameter(name, hint.axis, hint.feature, optional, default, is_table=issubclass(hint, Table))
    if hint in (float, int, bool):
        return Parameter(name, "number", None, optional, default, hint)
    if (
        hint is str
        or hint is collections.abc.Callable
        or typing.get_origin(hint) in (collections.abc.Callable, typing.Literal)
    ):
        return Parameter(name, "static", None, optional, default)
    if hint is None and name in ("self", "cls"):
        raise DeclarationError(
            detail=f"{op} is a method: its parameter {name} is no tensor",
            fix="Define the op outside the class, or as @staticmethod, and pass what it needs as arguments",
        )
    shown = "no annotation" if hint is None else f"the annotation {hint!r}"
    raise DeclarationError(detail=f"{op}: parameter {name} has {shown}")


# Folds over some of the pairs: the ``cols=`` of a call, as a part of the program.
#
# The program of such a call is the dense one with a condition in every reduction: a pair that does not exist is the
# identity (``Reduction.absent``). For packed sequences the condition compares two numbers, the sequence of the row
# and that of the column, and every engine runs it as it runs any condition. For lists it is the node ``listed``, a
# truth value per pair whose arguments are the domain's tensors: an engine never evaluates it, but visits the pairs
# that are listed, each as often as it is, with ``listed`` true (``engines/listed``). The gradient program inherits
# the condition, since cotangents flow through it.
#
# Two more nodes belong to lists: ``listed_position``, the place of a column in a sequence of pages, and
# ``listed_once``, true for the first of several equal entries of a list, which is where the gradient of a maximum
# goes.

HIDDEN = "_cols_"  # the inputs that a domain adds to a program are called so, and something more
ROW_SEQUENCE, COL_SEQUENCE = "_cols_row_sequence", "_cols_col_sequence"  # which packed sequence each belongs to
Form = tuple  # the static part of a domain: its kind first (``domains.base.Domain.form``)

NAMES = {  # the inputs that a domain adds to a program, and what each is: "list" and "lists" have axes of their own
    "edges": (("_cols_rowptr", "list"), ("_cols_index", "list")),
    "blocks": (("_cols_index", "lists"), ("_cols_count", "list")),
    "pages": (("_cols_table", "list"), ("_cols_lengths", "batch")),
    "jagged": (
        (ROW_SEQUENCE, "rows"),
        (COL_SEQUENCE, "cols"),
        ("_cols_row_position", "rows"),
        ("_cols_col_position", "cols"),
    ),
}
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "sub")


def public_name(name: str) -> str:
    """The name of an input as users know it: that of a domain's is what it is called there."""
    return name.replace(HIDDEN, "cols.") if name.startswith(HIDDEN) else name


def inputs_of(form: Form) -> tuple[tuple[str, str], ...]:
    """The name and the axis of each input that a domain adds."""
    names = NAMES[form[0]]
    return names[:-1] if form[0] == "blocks" and not form[-1] else names


def _input_nodes(form: Form) -> dict[str, Expr]:
    return {
        name: node("input", (), (name,), rows=axis == "rows", cols=axis == "cols", feature=None, dtype="int")
        for name, axis in inputs_of(form)
    }


def first_entry(form: Form | None) -> Expr | None:
    """Whether a pair is the first of several equal entries of its list; None where no list names a pair twice."""
    if form is None or form[0] not in ("blocks", "edges"):
        return None
    return listed_node("listed_once", form, tuple(_input_nodes(form).values()))


def restrict(outputs: tuple[Expr, ...], form: Form) -> tuple[Expr, ...]:
    """A traced program whose reductions fold the pairs of a domain."""
    inputs = _input_nodes(form)
    if form[0] == "jagged":
        exists = apply("eq", inputs[ROW_SEQUENCE], inputs[COL_SEQUENCE])
        exists = apply("stretches", exists) if len(form) > 2 else exists
        outputs = _move_indices(outputs, form, inputs)
    else:
        exists = listed_node("listed", form, tuple(inputs.values()))
        if form[0] == "pages":
            position = listed_node("listed_position", form, tuple(inputs.values()))
            # in this order engines compute it, and nothing is computed of lengths before a launch
            row = apply("add", apply("sub", index("row"), size("rows")), inputs["_cols_lengths"])
            places = {index("col"): position, index("row"): row}
            outputs = constructors.substitute(outputs, places)
    done: dict[Expr, Expr] = {}
    for e in topological(outputs):
        args = tuple(done[a] for a in e.args)
        done[e] = _restrict_reduction(e, args, exists) if e.op == "reduce" else constructors.rebuild(e, args)
    return tuple(done[e] for e in outputs)


def _restrict_reduction(e: Expr, fields: tuple[Expr, ...], exists: Expr) -> Expr:
    name, over, params = e.attrs
    absent = kind_of(e).absent(params, fields)
    pairs = zip(fields, absent, strict=True)
    return reduce_node(name, over, params, tuple(f if a is None else apply("where", exists, f, a) for f, a in pairs))


def _move_indices(outputs: tuple[Expr, ...], form: Form, inputs: dict[str, Expr]) -> tuple[Expr, ...]:
    """Indices counted from the start of the own sequence, but where they are compared with places that were found.

    Where rows and columns are packed alike and indices are only compared with or subtracted from each other, packed
    ones give the same numbers, and kernels know their ranges. Random numbers are those of the packed call."""
    row, col = index("row"), index("col")
    order = topological(outputs, stop=lambda e: e.op in DRAWS)
    held = {e for e in order if _compares_place(e)}
    used = [e for e in order if e.op not in DRAWS and e not in held and not {row, col}.isdisjoint(e.args)]
    apart = [e for e in used if e.op not in _COMPARED or set(e.args) != {row, col}]
    if form[1] and not apart and row not in outputs and col not in outputs:
        return outputs
    moved = {row: inputs["_cols_row_position"], col: inputs["_cols_col_position"]}
    done: dict[Expr, Expr] = {}
    for e in order:
        args = (a if e in held and a in moved else done[a] for a in e.args)
        done[e] = e if e.op in DRAWS else moved[e] if e in moved else constructors.rebuild(e, tuple(args))
    return tuple(done[e] for e in outputs)


def _compares_place(e: Expr) -> bool:
    """Whether an index is compared with a place that a reduction found, which counts as packed indices do."""
    if e.op not in _COMPARED:
        return False
    for one, other in (e.args, e.args[::-1]):
        other = other.args[0] if other.op == "component" else other
        if one in (index("row"), index("col")) and other.op == "result":
            _, over, _ = other.args[0].attrs
            return other.attrs[0] == kind_of(other.args[0]).place and one.op == f"{over[:3]}_index"
    return False


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


# The body, run on symbols


@dataclass(frozen=True)
class TracedBody:
    """A program: its output expressions, how to give them back in the body's own shape, and which numbers were
    fixed."""

    outputs: tuple[Expr, ...]
    pack: Callable[[Sequence[Any]], Any]
    fixed: frozenset[str]
    watched: WatchedPlaces | None = None  # what was read besides arguments; None: nothing that may change


@calls_torch
def trace(
    function: Any,
    parameters: Mapping[str, Parameter],
    dtypes: Mapping[str, str],
    values: Mapping[str, Any],
    watched: WatchedPlaces | None = None,
    domain: tuple | None = None,
) -> TracedBody:
    """Trace ``function``; ``dtypes`` gives the number class of each input, ``values`` the Python values that may be
    fixed, ``watched`` what it reads besides its arguments, ``domain`` the form of the pairs that exist."""
    tensors = {} if watched is None else watched.tensors
    fixed: frozenset[str] = frozenset()
    while True:
        try:
            outputs, pack = _trace_once(function, parameters, dtypes, values, fixed, tensors, domain)
            again, _ = _trace_once(function, parameters, dtypes, values, fixed, tensors, domain)
        except NeedValue as need:
            unknown = [n for n in need.names if n not in values]
            if unknown or need.names <= fixed:
                raise TraceError(
                    detail=f"{function.__name__} looks at the value of {', '.join(unknown)}, which is a tensor",
                    fix="Give a plain number, or use torch.where",
                ).at(find_place(function, need.__traceback__)) from None
            fixed |= need.names
            continue
        if outputs != again:
            raise ImpureError(detail=f"{function.__name__} gave two different programs when traced twice").at(
                find_place(function)
            )
        return TracedBody(outputs, pack, fixed, watched or None)


def _trace_once(
    function: Any,
    parameters: Mapping[str, Parameter],
    dtypes: Mapping[str, str],
    values: Mapping[str, Any],
    fixed: frozenset[str],
    tensors: Mapping[int, str],
    domain: tuple | None,
) -> tuple[tuple[Expr, ...], Callable]:
    token = current_trace.set(Trace(tensors, domain))
    try:
        arguments: dict[str, Any] = {}
        for name, p in parameters.items():
            if p.axis == "static" or name not in dtypes:
                arguments[name] = values.get(name)
            elif name in fixed:
                arguments[name] = Symbol(
                    const(values[name])
                )  # still a symbol, but one that answers if, int() and float()
            else:
                arguments[name] = Symbol(p.expr(dtypes[name]))
        leaves: list[Symbol] = []
        returned = _run(function, arguments)
        try:
            pack = _unpack(returned, leaves)
            outputs = tuple(expr_of(leaf) for leaf in leaves)
            outputs = outputs if domain is None else restrict(outputs, domain)
            _check_outputs(function, outputs)
        except MonoidReduceError as error:
            raise error.at(_return_place(function, arguments)) from None
        return outputs, pack
    except MonoidReduceError as error:
        raise error.at(find_place(function, error.__traceback__)) from None
    finally:
        current_trace.reset(token)


def _run(function: Any, arguments: Mapping[str, Any]) -> Any:
    """A body's result; what it takes by position alone is given so."""
    kinds = inspect.signature(function).parameters
    first = [n for n in arguments if kinds[n].kind is inspect.Parameter.POSITIONAL_ONLY]
    return function(*(arguments[n] for n in first), **{n: v for n, v in arguments.items() if n not in first})


def _check_outputs(function: Any, outputs: tuple[Expr, ...]) -> None:
    if not any(e.op == "reduce" for e in topological(outputs)):
        raise NotReducedError(name=function.__name__)
    for e in outputs:
        if e.is_pair:
            raise UnreducedError(
                detail=f"{function.__name__} returns {Symbol(e)!r}, a value for every pair",
                fix="Fold it over columns or rows first, for example with mr.sum(...)",
            )
        if are_several(e):
            raise TraceError(
                detail=f"{function.__name__} returns {Symbol(e)!r}",
                fix='Return one vector: declare what is folded with one letter, as in Col["d"], and view the result',
            )


def _unpack(value: Any, leaves: list[Any]) -> Callable[[Sequence[Any]], Any]:
    """Collect the symbols of a returned value and give back the function that rebuilds its shape."""
    if isinstance(value, (Symbol, int, float, bool)):
        at = len(leaves)
        leaves.append(value if isinstance(value, Symbol) else Symbol(const(value)))
        return lambda results: results[at]
    if isinstance(value, Monoid):
        parts = {n: _unpack(getattr(value, n), leaves) for n in type(value).fields()}
        return lambda results: type(value)(**{n: f(results) for n, f in parts.items()})
    if isinstance(value, dict):
        items = {k: _unpack(v, leaves) for k, v in value.items()}
        return lambda results: type(value)({k: f(results) for k, f in items.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = [_unpack(v, leaves) for v in value]
        return lambda results: type(value)(*(f(results) for f in named))
    if isinstance(value, (list, tuple)):
        inner = [_unpack(v, leaves) for v in value]
        return lambda results: type(value)(f(results) for f in inner)
    raise TraceError(
        detail=f"the body returned {shown(value)}" + (" (Tensor)" if isinstance(value, torch.Tensor) else ""),
        fix="Return a reduction, or a tuple, list, dict or NamedTuple of them",
    )


def _return_place(function: Any, arguments: dict[str, Any]) -> str:
    """The line at which a body returns: it is run again and watched."""
    code, lines = function.__code__, [function.__code__.co_firstlineno]

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is code:
            lines.append(frame.f_lineno)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        _run(function, arguments)
    finally:
        sys.setprofile(before)
    return _describe_place(function, code.co_filename, lines[-1])


def find_place(function: Any, traceback: TracebackType | None = None) -> str:
    """Where in the user's source something happened: the innermost frame that is neither ours nor torch's. A body that
    we wrote around the user's names that as ``user_body``."""
    code = getattr(function, "user_body", function).__code__
    name, line = code.co_filename, code.co_firstlineno
    while traceback is not None:
        frame = traceback.tb_frame
        file = os.path.abspath(frame.f_code.co_filename)
        if frame.f_code is code or not file.startswith((_PACKAGE + os.sep, _TORCH + os.sep)):
            name, line = frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return _describe_place(function, name, line)


def _describe_place(function: Any, name: str, line: int) -> str:
    text = linecache.getline(name, line).strip()
    return f"in {function.__name__}, {os.path.basename(name)}:{line}" + (f": {text}" if text else "")


# The Python numbers that a body reads besides its arguments: from its closure, from globals and from attributes.
#
# A body is traced once and its program cached, so a number that it reads from outside would keep its first value.
# :func:`watch` lists the places that a body, and the functions it calls, can read such a number from. They are found in
# the bytecode: names of globals and of the closure, each followed by attributes and constant subscripts
# (``config.scale``, ``settings["window"]``). Where such a name leads to no number but to a list, a dictionary or an
# object (``for w in weights``, ``helper(config, s)``), all that is plain in it is one place, and so is a function of
# torch. :meth:`WatchedPlaces.holds` compares them with what they were; where one has changed, the body is traced again.
# A tensor in such a place is no number: :attr:`WatchedPlaces.tensors` has its name.

_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_FIXED_PACKAGES = ("monoidreduce", "torch", "numpy", "math", "cmath", "operator", "functools", "itertools", "builtins")
_NOT_SETTINGS = tuple(n for n in _FIXED_PACKAGES if n not in ("numpy", "builtins"))
_MOST = 4096  # instructions and objects looked at: a body that reaches more is not followed further
_CHAIN = 16  # instructions after a name that may be attributes and subscripts of it
_LONGEST = 16  # items of a tuple that is compared as a value
_CONTENT = 256  # values looked at in a list, a dictionary or an object, in all
_READERS = ("get", "items", "values", "keys", "index", "count", "copy", "union", "intersection", "difference")

Read = functools.partial[Any]  # gives what is at a place now; its second argument is the last name of the place


@dataclass
class WatchedPlaces:
    """Places outside of a body that it reads, with what was there when the body was looked at."""

    names: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)  # globals
    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)  # of closures
    others: list[tuple[Read, Any]] = field(default_factory=list)  # attributes and items, read from their root
    tensors: dict[int, str] = field(default_factory=dict)  # by identity: how the body names it

    def __bool__(self) -> bool:
        return bool(self.names or self.cells or self.others)

    def holds(self) -> bool:
        """True where every watched place still has the value it had when the body was traced."""
        for scope, name, then in self.names:
            now = scope.get(name, _MISSING)
            if now is not then and not _is_same(now, then):
                return False
        for cell, then in self.cells:
            now = _read_content(cell)
            if now is not then and not _is_same(now, then):
                return False
        for read, then in self.others:
            now = _read_value(read)
            if now is not then and not _is_same(now, then):
                return False
        return True


def watch(*functions: Any) -> WatchedPlaces:
    """The places that these functions, and the functions they call, read; this package's own functions are skipped."""
    found = WatchedPlaces()
    _Search(found).functions([f for f in functions if not _is_fixed_package(f)])
    return found


def _read_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _read_value(read: Read) -> Any:
    try:
        return read()
    except Exception:
        return _MISSING


def _is_same(now: Any, then: Any) -> bool:
    """Whether two values mean the same to a trace; by their text, which tells -0.0 from 0.0 and knows NaN again."""
    if type(now) is not type(then):
        return False
    if isinstance(now, types.MethodType):
        return now.__func__ is then.__func__ and now.__self__ is then.__self__
    return _is_plain(now) and (now == then or now != now) and repr(now) == repr(then)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= _LONGEST and all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_fixed_package(function: Any) -> bool:
    """Whether a function or module is this package's, torch's or the language's own, whose values do not change."""
    if isinstance(function, functools.partial):
        return False
    named = function.__name__ if isinstance(function, types.ModuleType) else getattr(function, "__module__", None)
    return str(named).split(".")[0] in _FIXED_PACKAGES


class _Search:
    """Searches the bytecode of functions, each function once."""

    def __init__(self, found: WatchedPlaces):
        self.found = found
        self.seen: set[int] = set()
        self.held: list[Any] = []  # what was seen, so that identities stay their own
        self.left = _MOST
        self.contents: list[Read] = []
        self.stored: set[Any] = set()  # attributes, globals and cells that a function writes: counters, no settings

    def functions(self, waiting: list[Any]) -> None:
        """Functions, methods, partials, modules or any other objects that can be called."""
        while waiting and self.left > 0:
            waiting += self._search_function(waiting.pop())
        found = self.found
        found.names = [one for one in found.names if (id(one[0]), one[1]) not in self.stored]
        found.cells = [one for one in found.cells if id(one[0]) not in self.stored]
        found.others = [one for one in found.others if one[0].args[1] not in self.stored]
        found.others += [(one, _read_value(one)) for one in self.contents if one.args[1] not in self.stored]

    def _search_function(self, called: Any) -> list[Any]:
        """Search one function; returns the functions that it names."""
        owner = _MISSING
        if isinstance(called, functools.partial):
            return [called.func, *(a for a in (*called.args, *called.keywords.values()) if callable(a))]
        if isinstance(called, torch.nn.Module):
            called = called.forward
        elif not isinstance(called, (types.FunctionType, types.MethodType)):
            called = getattr(called, "__call__", None)  # noqa: B004 - the method itself is looked through
        if isinstance(called, types.MethodType):
            owner, called = called.__self__, called.__func__
        if hasattr(called, "__wrapped__") and not isinstance(called, types.FunctionType):
            called = called.__wrapped__
        if not isinstance(called, types.FunctionType) or id(called) in self.seen or _is_fixed_package(called):
            return []
        self.seen.add(id(called))
        self.held.append(called)
        return list(self._names(called, called.__code__, owner))

    def _names(self, function: types.FunctionType, code: types.CodeType, owner: Any) -> Iterator[Any]:
        """Note every place that a function's code reads; yield the functions that it calls."""
        steps = list(dis.get_instructions(code))
        self.left -= len(steps)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self.stored |= {s.argval for s in steps if s.opname == "STORE_ATTR"}
        self.stored |= {(id(function.__globals__), s.argval) for s in steps if s.opname == "STORE_GLOBAL"}
        self.stored |= {id(cells[s.argval]) for s in steps if s.opname == "STORE_DEREF" and s.argval in cells}
        first = code.co_varnames[0] if code.co_argcount and owner is not _MISSING else None
        for at, step in enumerate(steps):
            name = step.argval
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in function.__globals__:
                root = function.__globals__[name]
                read: Read = functools.partial(function.__globals__.__getitem__, name)
                note: Callable[[], None] = functools.partial(
                    self.found.names.append, (function.__globals__, name, root)
                )
            elif step.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in cells:
                root = _read_content(cells[name])
                read = functools.partial(getattr, cells[name], "cell_contents")
                note = functools.partial(self.found.cells.append, (cells[name], root))
            elif step.opname.startswith("LOAD_FAST") and first is not None and name == first:
                root, read, note = owner, functools.partial(_return_value, owner), lambda: None
            else:
                continue
            yield from self._place(str(name), root, read, note, steps[at + 1 : at + 1 + _CHAIN])
        for inner in code.co_consts:  # lambdas and comprehensions
            if isinstance(inner, types.CodeType):
                yield from self._names(function, inner, _MISSING)

    def _place(self, name: str, value: Any, read: Read, note: Callable[[], None], steps: list[Any]) -> Iterator[Any]:
        """A name, and the attributes and constant subscripts that follow it, as far as they lead to something plain."""
        while value is not _MISSING:
            if isinstance(value, torch.Tensor):
                self.found.tensors[id(value)] = name
                self.held.append(value)
                return
            if _is_plain(value):
                note()
                return
            following = _read_following(steps)
            if _is_followed(value, steps, following is not None):
                note()
                yield value
            elif following is None and isinstance(value, _FUNCTIONS) and _is_fixed_package(value):
                note()
            elif following is None and _has_content(value, steps):
                self.contents.append(functools.partial(_describe_content, read, name, self.stored))
            if following is None or (isinstance(value, types.ModuleType) and _is_fixed_package(value)):
                return
            key, is_item, count = following
            name = f"{name}[{key!r}]" if is_item else f"{name}.{key}"
            read = functools.partial(_read_item if is_item else _read_attribute, read, key)
            value, steps = _read_value(read), steps[count:]
            note = functools.partial(self.found.others.append, (read, value))


def _is_followed(value: Any, steps: list[Any], goes_on: bool) -> bool:
    """Whether what a name stands for is looked through: a function, or an object that may be called at this place."""
    if not callable(value) or isinstance(value, type) or _is_fixed_package(value):
        return False
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return True
    if not isinstance(getattr(type(value), "__call__", None), types.FunctionType):  # noqa: B004 - one of Python's own
        return False
    copied = bool(steps) and steps[0].opname in ("COPY", "DUP_TOP")  # an attribute of it is written
    return not goes_on and not copied


_CONTAINERS = (list, tuple, dict, set, frozenset)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def _has_content(value: Any, steps: list[Any]) -> bool:
    """Whether a body may read plain values of what a name stands for: of a list, a dictionary, a set or an object."""
    if isinstance(value, types.BuiltinMethodType):  # a method of a list or a dictionary
        return isinstance(value.__self__, _CONTAINERS) and value.__name__ in _READERS
    written = bool(steps) and steps[0].opname in ("STORE_ATTR", "STORE_SUBSCR", "COPY", "DUP_TOP")
    return not (written or isinstance(value, (types.ModuleType, type, torch.Tensor, *_FUNCTIONS)))


def _describe_content(read: Read, name: str, skipped: set[Any]) -> str:
    """A text of all that is plain in a list, a dictionary or an object. ``skipped``: attributes that are counters."""
    left = _CONTENT

    def describe(value: Any, depth: int) -> str:
        nonlocal left
        left -= 1
        if left < 0 or isinstance(value, torch.Tensor):
            return ""
        if isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, _CONTAINERS):
            value = value.__self__
        if isinstance(value, (*_PLAIN, *_FUNCTIONS)):
            return repr(value)
        kind = type(value)
        if depth == 0 or kind.__module__.split(".")[0] in _NOT_SETTINGS:
            return ""
        if kind.__module__ == "numpy":  # a number, or an array
            return repr(value)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{describe(k, 1)}: {describe(v, depth - 1)}" for k, v in value.items()) + "}"
        if isinstance(value, _CONTAINERS):
            return kind.__name__ + str([describe(v, depth - 1) for v in value])
        held = {n: getattr(value, n, None) for n in getattr(kind, "__slots__", ())} | getattr(value, "__dict__", {})
        return ", ".join(f"{n}={describe(v, depth - 1)}" for n, v in held.items() if n not in skipped)

    return describe(read(), 4)


def _return_value(value: Any) -> Any:
    return value


def _read_attribute(read: Read, key: str) -> Any:
    return getattr(read(), key)


def _read_item(read: Read, key: Any) -> Any:
    return read()[key]


def _read_following(steps: list[Any]) -> tuple[Any, bool, int] | None:
    """What instructions read of the value before them: an attribute, or an item (True), and how many they are."""
    if not steps:
        return None
    first, *rest = steps[:2]
    if first.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return first.argval, False, 1
    constant = first.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and isinstance(first.argval, (str, int))
    if constant and rest and (rest[0].opname == "BINARY_SUBSCR" or rest[0].argrepr == "[]"):
        return first.argval, True, 2
    return None
