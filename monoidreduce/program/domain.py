"""Folds over some of the pairs: the ``cols=`` of a call, as a part of the program.

The program of such a call is the dense one with a condition in every reduction: a pair that does not exist is the
identity (``Reduction.absent``). For packed sequences the condition compares two numbers, the sequence of the row and
that of the column, and every engine runs it as it runs any condition. For lists it is the node ``listed``, a truth
value per pair whose arguments are the domain's tensors: an engine never evaluates it, but visits the pairs that are
listed, each as often as it is, with ``listed`` true (``engines/listed``). The gradient program inherits the condition,
since cotangents flow through it.

Two more nodes belong to lists: ``listed_position``, the place of a column in a sequence of pages, and ``listed_once``,
true for the first of several equal entries of a list, which is where the gradient of a maximum goes.
"""

from __future__ import annotations

from ..reductions import kind_of
from . import constructors
from .constructors import apply, listed_node
from .expression import Expr, index, node, reduce_node, size, topological
from .philox import DRAWS

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
    """Indices counted from the start of the own sequence.

    Where rows and columns are packed alike and indices are only compared with or subtracted from each other, packed
    ones give the same numbers, and kernels know their ranges. Random numbers are those of the packed call."""
    row, col = index("row"), index("col")
    stop = lambda e: e.op in DRAWS
    order = topological(outputs, stop=stop)
    used = [e for e in order if not stop(e) and not {row, col}.isdisjoint(e.args)]
    apart = [e for e in used if e.op not in _COMPARED or set(e.args) != {row, col}]
    if form[1] and not apart and row not in outputs and col not in outputs:
        return outputs
    moved = {row: inputs["_cols_row_position"], col: inputs["_cols_col_position"]}
    return constructors.substitute(outputs, moved | {e: e for e in order if stop(e)})
