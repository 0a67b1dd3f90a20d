"""A lowered program as a straight line of torch calls: written once as a Python function, independent of sizes.

What ``evaluate.py`` finds out node by node at every call (the order, which arguments need an axis, which numbers need
a tensor) is decided here once. Outside the passes no value belongs to rows and to columns, so it is held as users hold
it, ``[*batch, M or N, f]``: what is fed to a fold and what comes out of one needs no view at all. Differentiable by
autograd, and traceable.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...program import constructors
from ...program.expression import Expr, node, topological
from ...program.lower import Fold, Lowered
from ...program.philox import DRAWS
from ...program.primitives import PRIMITIVES
from ...program.reverse_mode import backpropagate
from ...reductions import KINDS
from .evaluate import NUMBER_KINDS, Sizes, cast, einsum, evaluate_numbers, from_layout, look_up, part, to_layout, unpack

# Python functions that are written as text: the one place that compiles and runs such text.
#
# A call that is known to be the same sequence of operations every time is written out as one straight-line function:
# no look-ups, no loops, no checks. Used for a program between its passes (``torch_code.py``), for the key of a call
# (``runtime/call.py``), for a layer's Python (``runtime/torch_replay.py``), for recorded launches
# (``engines/triton/launch/replay.py``) and for the modules of Triton kernels (``engines/triton/launch/driver.py``).


def run_text(text: str, scope: dict[str, Any], path: str = "<generated>") -> None:
    """Run the definitions in ``text`` with the names in ``scope``, where what they define is found afterwards."""
    exec(_compile(text, path), scope)


@functools.lru_cache(maxsize=512)
def _compile(text: str, path: str) -> types.CodeType:
    """The code of a text. Calls of another length have the same text, with other numbers in their scope."""
    return compile(text, path, "exec")


def define(name: str, parameters: Iterable[str], lines: Sequence[str], scope: dict[str, Any]) -> Callable[..., Any]:
    """The function ``name`` with these parameters and lines; ``scope``: the objects that the lines name."""
    run_text(function_text(name, parameters, lines), scope)
    return scope[name]


def function_text(name: str, parameters: Iterable[str], lines: Sequence[str]) -> str:
    """The text of a function with these parameters and lines."""
    return "\n    ".join([f"def {name}({', '.join(parameters)}):", *lines])


def tuple_text(names: Iterable[str]) -> str:
    """A tuple of names (one name too) as it is written."""
    return f"({''.join([f'{name}, ' for name in names])})"


class FunctionWriter:
    """Collects the lines of a function, and the objects that have no text (``scope``) under names of their own."""

    def __init__(self, **scope: Any):
        self.lines: list[str] = []
        self.scope: dict[str, Any] = scope
        self._names: dict[Any, str] = {}

    def hold(self, thing: Any, key: Any = None) -> str:
        """A name for an object; the same name for the same ``key``, where one is given."""
        if key is not None and key in self._names:
            return self._names[key]
        name = f"k{len(self.scope)}"
        self.scope[name] = thing
        if key is not None:
            self._names[key] = name
        return name


# Elementwise arithmetic of rows alone or columns alone, between passes, grouped into one kernel.
#
# Examples are a row's ⟨g, P⟩, or a loss from its sums. A script runs such arithmetic node by node, one torch call each;
# on a GPU a call costs more on the host than its arithmetic on the device. So neighbours are grouped as
# :class:`Elementwise`, which is one kernel (``engines/triton/kernels/elementwise.py``), and so is its gradient.

_MIN_CALLS = 2  # torch calls from which on one kernel is faster
_CALLS = {"spread": 0, "word": 12, "mark": 36}  # torch calls of a node, if not one
_PER_PAIR = {*DRAWS} - {"word", "mark"}
_FREE = ("const", "nan", "size", "row_index", "col_index")  # known without being given


@dataclass(frozen=True)
class Elementwise:
    """Expressions per row (or per column) of leaves; independent of the program that they come from."""

    axis: str
    leaves: tuple[Expr, ...]
    outputs: tuple[Expr, ...]


def _is_simple(e: Expr) -> bool:
    """Whether an expression is elementwise arithmetic of rows alone or columns alone that a kernel can compute."""
    known = e.op in ("fsum", "spread") or (
        e.op in PRIMITIVES and e.op not in _PER_PAIR and bool(PRIMITIVES[e.op].triton)
    )
    return known and e.rows != e.cols


# with what it is fed, and what its outputs are in the program
ElementwiseGroup = tuple[Elementwise, tuple[Expr, ...], tuple[Expr, ...]]


def group_elementwise(
    roots: Sequence[Expr], written: frozenset[Expr], least: int = _MIN_CALLS
) -> list[ElementwiseGroup]:
    """The groups of elementwise nodes under ``roots``, of rows and of columns, that are ``least`` torch calls; without
    those that are already ``written``."""
    order = topological(roots, stop=written.__contains__)
    found = (_group_axis(axis, [e for e in order if e not in written], roots, least) for axis in ("rows", "cols"))
    return [group for group in found if group is not None]


def _group_axis(axis: str, order: Sequence[Expr], roots: Sequence[Expr], least: int) -> ElementwiseGroup | None:
    inside = {e for e in order if _is_simple(e) and e.rows is (axis == "rows")}
    inside -= _find_blocked(order, inside)
    if sum(_CALLS.get(e.op, 1) for e in inside) < least:
        return None
    used = {a for e in order if e not in inside for a in e.args}
    outputs = tuple(e for e in order if e in inside and (e in used or e in roots))
    under = topological(outputs, stop=lambda e: e not in inside)
    fed = tuple(e for e in under if e not in inside and e.op not in _FREE)
    return _with_numbered_leaves(axis, outputs, fed), fed, outputs


def _find_blocked(order: Sequence[Expr], inside: set[Expr]) -> set[Expr]:
    """The nodes that depend on a node outside which itself depends on one of these: they cannot be in one kernel."""
    waiting: set[Expr] = set()
    tainted: set[Expr] = set()
    for e in order:
        if any(a in tainted for a in e.args) or (e not in inside and any(a in inside for a in e.args)):
            tainted.add(e)
            if e in inside:
                waiting.add(e)
    return waiting


def _with_numbered_leaves(axis: str, outputs: tuple[Expr, ...], fed: tuple[Expr, ...]) -> Elementwise:
    leaves = {
        e: node("leaf", (), (f"x{k}",), rows=e.rows, cols=e.cols, feature=e.feature, dtype=e.dtype)
        for k, e in enumerate(fed)
    }
    return Elementwise(axis, tuple(leaves.values()), constructors.substitute(outputs, leaves))


@functools.lru_cache(maxsize=4096)
def differentiate_elementwise(
    group: Elementwise, wanted: tuple[bool, ...], given: tuple[bool, ...]
) -> tuple[tuple[Expr, ...], tuple[Expr | None, ...]]:
    """The leaves that stand for the outputs' cotangents, and the gradient of each leaf (None: not asked for, or zero).

    Gradients have the axis of the group even if their leaf does not: the caller sums over it."""
    cotangents = tuple(
        node("leaf", (), (f"g{k}",), rows=e.rows, cols=e.cols, feature=e.feature, dtype="float")
        for k, e in enumerate(group.outputs)
    )
    seeds = [(e, g) for e, g, k in zip(group.outputs, cotangents, given, strict=True) if k and e.dtype == "float"]
    wrt = [e for e, want in zip(group.leaves, wanted, strict=True) if want]
    pulled = dict(zip(wrt, backpropagate(seeds, wrt), strict=True))
    return cotangents, tuple(pulled.get(e) for e in group.leaves)


Value = Any  # a Tensor as users hold it, or a Python number
Folder = Callable[[Fold, list[Value], Sizes, tuple[int, ...]], Sequence[Tensor]]  # the results asked for

_ORDER = {"bool": 0, "int": 1, "float": 2}
# Primitives whose second argument may be a Python number, and what to call when the first is one.
_MIRRORED: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.rsub,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.gt,
    "gt": torch.lt,
    "le": torch.ge,
    "ge": torch.le,
}


@dataclass(frozen=True, eq=False)
class BatchArithmetic:
    """Arithmetic of numbers per batch element, by torch: ``run(sizes, *leaves)`` gives its one result."""

    run: Callable[..., Any]


class Step(NamedTuple):
    """A fold, elementwise arithmetic of rows or columns, arithmetic of batch elements or of numbers alone (an
    expression; also the batch elements' own): what it is fed (names of values, or numbers) and what its results are
    called (None: not asked for)."""

    what: Fold | Elementwise | BatchArithmetic | Expr
    feeds: tuple[str | float, ...]
    results: tuple[str | None, ...]


@dataclass(frozen=True)
class Script:
    """``run(sizes, folder, *inputs)`` gives the outputs; ``folder`` runs the passes, where there are any.

    ``steps``: all that it does, where that is nothing but folds, grouped elementwise arithmetic and arithmetic of
    numbers; ``names`` are those of its inputs and ``returned`` those of its outputs in there."""

    inputs: tuple[str, ...]
    outputs: tuple[Expr, ...]
    run: Callable[..., list[Value]]
    text: str
    steps: tuple[Step, ...] | None
    names: tuple[str, ...]
    returned: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def inputs(program: Lowered) -> tuple[str, ...]:
    """The names of a program's inputs, in the order in which its script takes them."""
    roots = [*(e for p in program.passes for e in p.feeds), *program.outputs]
    return tuple(e.attrs[0] for e in topological(roots) if e.op in ("input", "leaf"))


@functools.lru_cache(maxsize=4096)
def script(
    program: Lowered,
    numbers: frozenset[str] = frozenset(),
    grouped: bool = False,
    row_dot: Callable[[Tensor, Tensor, torch.dtype], Tensor] | None = None,
) -> Script:
    """Write a program as Python; ``numbers`` are the inputs that are Python numbers. ``row_dot(x, y, dtype)`` computes
    the product of two vectors of rows, or of columns, summed over their features.

    ``grouped``: the elementwise arithmetic of rows, or of columns, between two passes is one step, run by
    ``folder.run_elementwise``."""
    writer = Writer(numbers, frozenset() if grouped or row_dot is None else _find_products(program), row_dot)
    # A scale that leaves its product is a call of its own: as a kernel, the program is nothing but launches
    stored = any(e.is_stored for p in program.passes for e in p.feeds)
    least = 1 if stored else _MIN_CALLS
    for p in program.passes:
        if grouped:
            writer.write_groups(p.feeds, least)
        if grouped and stored:
            writer.write_batch_arithmetic(p.feeds)
        writer.fold(p.fold, [writer.of(e) for e in p.feeds], p.results)
    if grouped:
        writer.write_groups(program.outputs, least)
    return writer.script(inputs(program), program.outputs, "folder")


def _find_products(program: Lowered) -> frozenset[Expr]:
    """The products of two vectors of rows, or of columns, that are only ever summed over their features: such a product
    is never written out."""
    roots = [*(e for p in program.passes for e in p.feeds), *program.outputs]
    order = topological(roots)
    found = {
        e.args[0]
        for e in order
        if e.op == "fsum" and e.args[0].op == "mul" and all(a.dtype == "float" for a in e.args[0].args)
    }
    found = {e for e in found if all(a.feature is not None and (a.rows, a.cols) == (e.rows, e.cols) for a in e.args)}
    return frozenset(found - set(roots) - {a for e in order if e.op != "fsum" for a in e.args})


class Writer(FunctionWriter):
    """Writes one line per node, arguments first. ``v`` are values, ``r`` raised ones, ``k`` what is not text."""

    def __init__(self, numbers: frozenset[str], products: frozenset[Expr], row_dot: Any = None):
        super().__init__(filled=_fill, number=number, row_dot=row_dot)
        self.numbers, self.products = numbers, products
        self.names: dict[Expr, str] = {}
        self.inputs: dict[str, str] = {}
        self.plain: set[Expr] = set()  # nodes whose values are Python numbers
        self.views: dict[tuple[str, str], str] = {}
        self.steps: list[Step] = []
        self.stepped = 0  # lines that belong to steps

    def script(self, names: tuple[str, ...], outputs: tuple[Expr, ...], *before: str) -> Script:
        """What was written, as a function of the inputs with these names (and of what comes before them)."""
        returned = tuple(self.of(e) for e in outputs)
        given = tuple(self.inputs.get(n, f"unused_{k}") for k, n in enumerate(names))
        lines = ["C = S.compute", *self.lines, f"return [{', '.join(returned)}]"]
        text = function_text("run", ["S", *before, *given], lines)
        run_text(text, self.scope)
        steps = tuple(self.steps) if self.stepped == len(self.lines) else None
        return Script(names, outputs, self.scope["run"], text, steps, given, returned)

    def of(self, e: Expr) -> str:
        """The name of a node's value, written if it is not yet."""
        for n in topological([e], stop=self.names.__contains__):
            if n not in self.names and n not in self.products:
                self.names[n] = self._node(n)
        return self.names[e]

    def fold(self, fold: Fold, feeds: list[str], results: Sequence[Sequence[Expr]]) -> None:
        shown, before = tuple(k for k, nodes in enumerate(results) if nodes), len(self.lines)
        found = self._line(f"folder({self.hold(fold)}, [{', '.join(feeds)}], S, {shown})")
        for k, nodes in enumerate(results[k] for k in shown):
            for e in nodes:
                self.names[e] = self._line(f"{found}[{k}]") if e is nodes[0] else self.names[nodes[0]]
        self._step(fold, feeds, [self.names[nodes[0]] if nodes else None for nodes in results], before)

    def write_batch_arithmetic(self, roots: Sequence[Expr]) -> None:
        """Write arithmetic of numbers per batch element (a scale for each head) as one step each."""
        for e in dict.fromkeys(roots):
            fed = [n for n in topological([e]) if n.op in ("input", "leaf")]
            sides = any(n.rows or n.cols or n.feature is not None for n in topological([e]))
            if e in self.names or sides or e in fed or all(n.attrs[0] in self.numbers for n in fed):
                continue
            numbers = frozenset(n.attrs[0] for n in fed if n.attrs[0] in self.numbers)
            own, names, before = script(Lowered((), (e,)), numbers), [self.of(n) for n in fed], len(self.lines)
            order = [[n.attrs[0] for n in fed].index(name) for name in own.inputs]
            run = functools.partial(_run_alone, own, tuple(order))
            self.names[e] = self._line(f"{self.hold(run)}({', '.join(['S', *names])})")
            self._step(BatchArithmetic(run), names, [self.names[e]], before)

    def _step(
        self,
        what: Fold | Elementwise | BatchArithmetic | Expr,
        feeds: Sequence[str],
        results: Sequence[str | None],
        before: int,
    ) -> None:
        """Note what the lines since ``before`` are."""
        given = tuple(self.scope.get(name, name) for name in feeds)
        self.steps.append(Step(what, given, tuple(results)))
        self.stepped += len(self.lines) - before

    def write_groups(self, roots: Sequence[Expr], least: int) -> None:
        """Write elementwise arithmetic that is done together, ``least`` torch calls of it, as one step each."""
        for group, fed, outputs in group_elementwise(roots, frozenset(self.names), least):
            names = [self.of(e) if e.packing is None else self._widen(e) for e in fed]
            before = len(self.lines)
            found = self._line(f"folder.run_elementwise({self.hold(group)}, [{', '.join(names)}], S)")
            for k, e in enumerate(outputs):
                self.names[e] = self._line(f"{found}[{k}]")
            self._step(group, names, [self.names[e] for e in outputs], before)

    def _line(self, expression: str) -> str:
        self.lines.append(f"v{len(self.lines)} = {expression}")
        return f"v{len(self.lines) - 1}"

    def _node(self, e: Expr) -> str:
        if e.op in ("input", "leaf"):
            name = self.inputs[e.attrs[0]] = f"x{len(self.inputs)}"
            if e.attrs[0] in self.numbers:
                self.plain.add(e)
            return name
        if e.op in ("const", "nan"):
            self.plain.add(e)
            return self.hold(e.attrs[0] if e.op == "const" else float("nan"))
        if e.op == "size":
            return self._write_number(e, f"S.of({e.attrs[0]!r})")
        if e.op in PRIMITIVES:
            return self._primitive(e)
        if e.op == "fsum" and e.args[0] in self.products:
            sides = (self.names[a] if a.packing is None else self._widen(a) for a in e.args[0].args)
            return self._line(f"row_dot({', '.join(sides)}, C)")
        name = e.op.removesuffix("_index")
        if name == "batch":  # the same in every call
            found = self._line(f"{self.hold(_index(e))}(S)")
            self._step(e, (), [found], len(self.lines) - 1)
            return found
        args = [self._fit_axes(a, e) if e.op == "einsum" else self._raise_dtype(a) for a in e.args]
        if name in _TEXTS and e.args[0] not in self.plain:
            return self._line(_TEXTS[name].format(*args, *e.attrs))
        return self._line(f"{self.hold(_OTHERS[name](e))}({', '.join(['S', *args])})")

    def _write_number(self, e: Expr, text: str) -> str:
        """A number that is made of numbers."""
        self.plain.add(e)
        name = self._line(text)
        self._step(e, [self.names[a] for a in e.args], [name], len(self.lines) - 1)
        return name

    def _raise_dtype(self, e: Expr) -> str:
        """A value in the type of the arithmetic: 16-bit inputs, and shorter integers of pairs, are raised, once."""
        name = self.names[e]
        if e.op not in ("input", "leaf") or e.dtype == "bool" or e in self.plain:
            return name
        if e.dtype == "int":
            return self._view(name, f"{name}.long()") if e.is_pair else name
        if e.packing is not None:
            return self._widen(e)
        return self._view(name, f"{name} if {name}.dtype is C else {name}.to(C)")

    def _widen(self, e: Expr) -> str:
        """Packed vectors as plain ones, of which something is computed that engines do not compute in a tile."""
        name, scale, function = self.of(e), self.names[e.args[0]] if e.args else None, self.hold(unpack, "unpack")
        return self._view(name, f"{function}({e.packing}, S.of({str(e.feature)!r}), {name}, {scale}, C)")

    def _view(self, name: str, text: str) -> str:
        if (name, text) not in self.views:
            self.views[name, text] = self._line(text)
        return self.views[name, text]

    def _primitive(self, e: Expr) -> str:
        numbers = sum(1 << k for k, a in enumerate(e.args) if a in self.plain)
        if numbers == (1 << len(e.args)) - 1:
            return self._write_number(e, f"number({self.hold(e)}, ({', '.join(self.names[a] for a in e.args)},))")
        args = [self.names[a] if a in self.plain else self._fit_axes(a, e) for a in e.args]
        if e.op == "cast":
            return self._line(f"{self.hold(cast)}({args[0]}, {e.attrs[0]!r}, C)")
        primitive = PRIMITIVES[e.op]
        attributes = dict(zip(primitive.attributes, e.attrs, strict=True))
        function = self.hold(functools.partial(primitive.torch, **attributes) if attributes else primitive.torch)
        direct, mirrored = _takes_numbers(e)
        if numbers == 1 and mirrored is not None:
            return self._line(f"{self.hold(mirrored)}({args[1]}, {args[0]})")
        if numbers not in direct:
            args = [f"filled({a}, {x.dtype!r}, S)" if x in self.plain else a for a, x in zip(args, e.args, strict=True)]
        found = self._line(f"{function}({', '.join(args)})")
        kinds = {x.dtype for x in e.args}
        exact = e.dtype != "float" or ("float" in kinds and "int" not in kinds)
        return found if exact else self._line(f"{found} if {found}.dtype is C else {found}.to(C)")

    def _fit_axes(self, have: Expr, want: Expr) -> str:
        """A raised value with the axes that ``want`` has and ``have`` has not, of size 1."""
        name = self._raise_dtype(have)
        for at in missing(have, want):
            name = self._view(name, f"{name}.unsqueeze({at})")
        return name


def _run_alone(own: Script, order: tuple[int, ...], sizes: Sizes, *given: Any) -> Any:
    """The one output of a script without passes; ``order``: the places of its inputs in what is given."""
    (found,) = own.run(sizes, None, *(given[k] for k in order))
    return found


def missing(have: Expr, want: Expr) -> tuple[int, ...]:
    """Where to insert the axes that ``want`` has and ``have`` has not, the last first."""
    found, after = [], 0
    for wanted, there in ((_is_vector(want), _is_vector(have)), (want.cols, have.cols), (want.rows, have.rows)):
        after += wanted
        if wanted and not there:
            found.append(-after)
    return tuple(found)


def _is_vector(e: Expr) -> bool:
    return e.feature is not None


def _takes_numbers(e: Expr) -> tuple[frozenset[int], Callable[..., Any] | None]:
    """For which arguments (as bits) torch takes Python numbers as they are, and its mirror image for the first.

    Only where the tensor's class of number holds: torch would round a float beside integers to its default type.
    """
    order = [_ORDER[x.dtype] for x in e.args]
    if e.op == "where":
        return frozenset({0, 2, 4} if order[1] == order[2] > 0 else {0}), None
    if e.op in _MIRRORED or e.op == "div":
        second = order[0] >= order[1] and order[0] > (1 if e.op == "div" else 0)
        first = order[1] >= order[0] and order[1] > 0
        return frozenset({0, 2} if second else {0}), _MIRRORED.get(e.op) if first else None
    return frozenset({0}), None


def _fill(value: Value, kind: str, sizes: Sizes) -> Tensor:
    """A number as a tensor, filled where it is needed: no copy, no wait."""
    return torch.full((), value, dtype=NUMBER_KINDS.get(kind, sizes.compute), device=sizes.device)


# Numbers


def number(e: Expr, values: tuple[Value, ...]) -> Value:
    """Arithmetic on numbers only: exact, in float64, and it stays a number."""
    if any(isinstance(v, (torch.SymInt, torch.SymFloat)) for v in values):  # a length that the compiler leaves open
        if e.op in _OPEN:
            return _OPEN[e.op](*values)
        values = tuple(int(v) if isinstance(v, torch.SymInt) else float(v) for v in values)
    return _compute_numbers(e, values, tuple(map(repr, values)))  # the texts tell -0.0 from 0.0 and 1 from True


_OPEN: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
}


@functools.lru_cache(maxsize=4096)
def _compute_numbers(e: Expr, values: tuple[Value, ...], texts: tuple[str, ...]) -> Value:
    with _disable_current_modes():  # these are numbers, not a part of what is being traced
        return evaluate_numbers(e, values)


# What is no primitive

_TEXTS = {"fsum": "{0}.sum(-1)", "famax": "{0}.amax(-1)", "famin": "{0}.amin(-1)", "component": "{0}[..., {1}]"}


def _reduce(e: Expr) -> Callable[..., list[Value]]:
    """A reduction of a row or column vector, which torch does: its results, in the layout of ``evaluate.py``."""
    kind, over, params = e.attrs
    vectors = [a.feature is not None for a in e.args]

    def evaluate(sizes: Sizes, *values: Value) -> list[Value]:
        ones = (1,) * len(sizes.batch)
        tensors = [
            v if isinstance(v, Tensor) else _fill(v, a.dtype, sizes).expand(ones)
            for v, a in zip(values, e.args, strict=True)
        ]
        fields = [to_layout(v, a) for v, a in zip(tensors, e.args, strict=True)]
        return KINDS[kind].dense(fields, vectors, over, params, sizes.of(over))

    return evaluate


def batch_index(sizes: Sizes) -> Tensor:
    """The number of every batch element."""
    count = functools.reduce(operator.mul, sizes.batch, 1)
    return torch.arange(count, device=sizes.device).view(sizes.batch)


def _index(e: Expr) -> Callable[[Sizes], Tensor]:
    if e.op == "batch_index":
        return batch_index

    def evaluate(sizes: Sizes) -> Tensor:
        length = sizes.rows if e.op == "row_index" else sizes.cols
        return torch.arange(length, device=sizes.device).view(*(1,) * len(sizes.batch), length)

    return evaluate


def _spread(e: Expr) -> Callable[[Sizes, Value], Tensor]:
    def evaluate(sizes: Sizes, x: Value) -> Tensor:
        count = sizes.of(str(e.attrs[0]))
        if not isinstance(x, Tensor):
            return _fill(x, e.dtype, sizes).expand(*(1,) * len(sizes.batch), count)
        return x.unsqueeze(-1).expand(*x.shape, count)

    return evaluate


def _make_lookup(e: Expr) -> Callable[[Sizes, Value, Value], Tensor]:
    return lambda sizes, table, index: look_up(table, index, e.rows + e.cols)


_OTHERS: dict[str, Callable[[Expr], Callable[..., Value]]] = {
    "row": _index,
    "col": _index,
    "batch": _index,
    "reduce": _reduce,
    "result": lambda e: lambda sizes, found: from_layout(found[e.attrs[0]], e),
    "spread": _spread,
    "einsum": lambda e: functools.partial(einsum, e),
    "part": lambda e: functools.partial(part, e),
    "lookup": _make_lookup,
}
