"""Declarations: what the parameters of an op are, read from its signature, and what a domain (``cols=``) adds to them.

``Row["f"]`` is a vector per row, ``Col["f"]`` one per column, a bare ``Row`` or ``Col`` one number, ``Batch`` one
number per batch element, ``Pair`` one number per pair and ``Table["n"]`` n numbers that pairs look up;
``Row["h", "f"]`` is several vectors per row, h of them; ``float``, ``int`` and ``bool`` are numbers given at the call;
``str`` and callables are fixed choices, a new one is a new trace. ``X | None`` may be left out.
"""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import inspect
import types
import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..errors import DeclarationError, shown
from ..reductions import kind_of
from . import constructors
from .constructors import apply, listed_node
from .expression import Expr, Feature, index, letters, node, reduce_node, size, topological
from .philox import DRAWS


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
    choice: Any = field(default=None, compare=False, repr=False)  # of a fixed choice: str, Callable or Literal[...]

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
        return Parameter(name, "static", None, optional, default, choice=hint)
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


def restrict(outputs: tuple[Expr, ...], form: Form) -> tuple[Expr, ...]:
    """A traced program whose reductions fold the pairs of a domain."""
    inputs = {
        name: node("input", (), (name,), rows=axis == "rows", cols=axis == "cols", feature=None, dtype="int")
        for name, axis in inputs_of(form)
    }
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
