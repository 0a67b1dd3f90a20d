"""The compiler: from a traced body, or from a fold that is to be differentiated, to the passes that an engine runs.

:func:`run_passes` is the whole of it, one line for each compiler pass; :func:`compile_program` is the same with a
cache, and what the rest of the library calls. Nothing here depends on shapes, devices or engines, so a program is
compiled once for all calls that trace alike. ``op.explain(..., passes=True)`` prints the program after each pass.

Expressions are simplified as they are built (``simplify.py``), so every pass receives and returns simplified ones.
An engine that runs only some of the rows or columns first applies :func:`offset_fold`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import NoGradientError
from ..reductions import kind_of
from . import constructors
from .expression import Expr, index, node, reduce_node, size, topological
from .gradient import FoldGradient
from .lower import Fold, Lowered, group_reductions, hoist_one_sided, merge_softmax
from .normal_form import normalize, split_index_match
from .printer import format_groups, format_lowered, format_outputs

Source = tuple[Expr, ...] | FoldGradient  # a body's outputs, or a fold and what of it is to be differentiated
Observe = Callable[[str, Any], None]  # is given the name of a compiler pass, and what that pass returned

_FORMATS: dict[str, Callable[[Any], str]] = {"group reductions": format_groups, "hoist one-sided": format_lowered}


def run_passes(source: Source, observe: Observe = lambda name, result: None) -> Lowered:
    """Compile ``source``; ``observe`` is called with the name and the result of each compiler pass, in order."""
    if isinstance(source, FoldGradient):
        outputs = source.outputs
        observe("gradient", outputs)
    else:
        outputs = source
        observe("trace", outputs)
    outputs = normalize(outputs)
    observe("normal form", outputs)
    outputs = merge_softmax(outputs)
    observe("merge softmax", outputs)
    groups = group_reductions(outputs)
    observe("group reductions", groups)
    program = hoist_one_sided(outputs, groups)
    observe("hoist one-sided", program)
    return program.having(source.fold.exact) if isinstance(source, FoldGradient) else program


@functools.lru_cache(maxsize=4096)
def compile_program(source: Source) -> Lowered:
    """The program that computes ``source``: :func:`run_passes`, with its answers cached."""
    return run_passes(source)


@dataclass(frozen=True)
class Stage:
    """A program after one compiler pass, as text."""

    program: str  # "forward", or "backward of pass 1"
    compiler_pass: str
    text: str


def list_stages(outputs: tuple[Expr, ...], wanted: Sequence[str] = ()) -> Iterator[Stage]:
    """The text of a program after each compiler pass; then that of the gradient of each of its passes, last first.

    ``wanted``: the names of the inputs whose gradients are asked for; none of them, and there is no backward."""
    yield from _stages("forward", outputs)
    if not wanted:
        return
    program = compile_program(outputs)
    for number, p in reversed(list(enumerate(program.passes, 1))):
        asked = tuple(feed.dtype == "float" and _depends_on(feed, wanted) for feed in p.feeds)
        source = FoldGradient(p.fold, asked, (True,) * len(p.fold.outputs))
        try:
            yield from _stages(f"backward of pass {number}", source)
        except NoGradientError as error:
            yield Stage(f"backward of pass {number}", "gradient", str(error))


def _stages(program: str, source: Source) -> list[Stage]:
    found: list[Stage] = []

    def observe(name: str, result: Any) -> None:
        write = _FORMATS.get(name, format_outputs)
        found.append(Stage(program, name, write(result)))

    run_passes(source, observe)
    return found


def _depends_on(feed: Expr, names: Sequence[str]) -> bool:
    return any(e.op == "input" and e.attrs[0] in names for e in topological([feed]))


# A part of a larger problem


@dataclass(frozen=True)
class Target:
    """A leaf that stands for ``of`` (a leaf or an index), counted from the first ``row`` or ``col`` of the part."""

    of: Expr
    axis: str


Fed = str | Target  # "row_start", "col_start", "num_rows", "num_cols", or a target


@functools.lru_cache(maxsize=1024)
def offset_fold(fold: Fold) -> tuple[Fold, tuple[Fed, ...]]:
    """The fold for a part, and what must be fed to it behind its own leaves (nothing where no place is asked for)."""
    fed: dict[Fed, Expr] = {}

    def number(name: str) -> Expr:
        return fed.setdefault(name, node("leaf", (), (name,), rows=False, cols=False, feature=None, dtype="int"))

    def target(of: Expr, axis: str) -> Expr:
        name = f"{of if of.op == 'leaf' else of.op}_from_{axis}"
        leaf = node("leaf", (), (name,), rows=of.rows, cols=of.cols, feature=of.feature, dtype="int")
        return fed.setdefault(Target(of, axis), leaf)

    fields = [f for r in fold.reductions for f in (r.args[1:] if kind_of(r).gathers else r.args)]
    replace: dict[Expr, Expr] = {}
    for e in topological(fields):
        hot = split_index_match(e)[0] if e.op == "eq" else None
        if hot is not None and not hot[1].args:
            replace[e] = constructors.apply("eq", index(hot[0]), target(hot[1], hot[0]))
    for e in topological([*fields, *fold.scales], stop=replace.__contains__):
        if e.op in ("row_index", "col_index"):
            replace[e] = constructors.apply("add", e, number(e.op.replace("index", "start")))
        elif e in (size("rows"), size("cols")):
            replace[e] = number(f"num_{e.attrs[0]}")
    reductions = []
    for r in fold.reductions:
        kind, over, params = r.attrs
        if kind_of(r).gathers:
            args = (target(r.args[0], params[0]), *constructors.substitute(r.args[1:], replace))
        else:
            args = constructors.substitute(r.args, replace)
        reductions.append(reduce_node(kind, over, params, args))
    scales = constructors.substitute(fold.scales, replace)
    return Fold((*fold.leaves, *fed.values()), tuple(reductions), scales, exact=fold.exact), tuple(fed)
