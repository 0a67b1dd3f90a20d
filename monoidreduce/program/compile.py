"""The compiler: from a traced body, or from a fold that is to be differentiated, to the passes that an engine runs.

:func:`run_passes` is the whole of it, one line for each compiler pass; :func:`compile_program` is the same with a
cache, and what the rest of the library calls. Nothing here depends on shapes, devices or engines, so a program is
compiled once for all calls that trace alike. ``op.explain(..., passes=True)`` prints the program after each pass.

Expressions are simplified as they are built (``expression.py``), so every pass receives and returns simplified ones.
An engine that runs only some of the rows or columns first applies :func:`offset_fold`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import NoGradientError
from ..reductions import kind_of
from . import constructors
from .expression import Expr, index, node, reduce_node, size, topological
from .gradient import FoldGradient
from .lower import Fold, Lowered, group_reductions, hoist_one_sided, merge_softmax
from .normal_form import normalize, split_index_match

Source = tuple[Expr, ...] | FoldGradient  # a body's outputs, or a fold and what of it is to be differentiated
Observe = Callable[[str, Any], None]  # is given the name of a compiler pass, and what that pass returned


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
    return program.with_exactness(source.fold.exact) if isinstance(source, FoldGradient) else program


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
    yield from _list_stages("forward", outputs)
    if not wanted:
        return
    program = compile_program(outputs)
    for number, p in reversed(list(enumerate(program.passes, 1))):
        asked = tuple(feed.dtype == "float" and _depends_on(feed, wanted) for feed in p.feeds)
        source = FoldGradient(p.fold, asked, (True,) * len(p.fold.outputs))
        try:
            yield from _list_stages(f"backward of pass {number}", source)
        except NoGradientError as error:
            yield Stage(f"backward of pass {number}", "gradient", str(error))


def _list_stages(program: str, source: Source) -> list[Stage]:
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


# Programs as text, for people: one line for each shared or long subexpression, then what is returned.
# ``t0 = q @ k  # per pair`` names a temporary; ``soft[cols](t0, v).mean1`` is a result of a reduction over columns;
# ``x0 <- q`` says what is fed to a leaf of a fold.


_WIDEST = 80  # characters of an expression, from which on it gets a line of its own
_ATOM = 9  # the precedence of names, numbers and calls, which need no parentheses
_INFIX = {  # sign and precedence, as in Python
    "eq": ("==", 1), "ne": ("!=", 1), "lt": ("<", 1), "le": ("<=", 1), "gt": (">", 1), "ge": (">=", 1),
    "logical_or": ("|", 2), "logical_xor": ("^", 3), "logical_and": ("&", 4), "bitwise_or": ("|", 2),
    "bitwise_xor": ("^", 3), "bitwise_and": ("&", 4), "add": ("+", 5), "sub": ("-", 5),
    "mul": ("*", 6), "div": ("/", 6), "dot": ("@", 6), "floor_divide": ("//", 6), "remainder": ("%", 6),
    "pow": ("**", 8),
}  # fmt: skip
_PREFIX = {"neg": ("-", 7), "logical_not": ("~", 7), "bitwise_not": ("~", 7)}


def format_outputs(outputs: Iterable[Expr | None], known: Mapping[Expr, str] | None = None) -> str:
    """Expressions, after the temporaries that they are made of; ``known``: the names that some of them already have."""
    roots = [e for e in outputs if e is not None]
    lines, texts = _format(roots, known or {})
    return "\n".join([*lines, f"return {', '.join(texts) or 'nothing'}"])


def format_groups(groups: Sequence[Sequence[Expr]]) -> str:
    """The reductions of each pass."""
    known = {e: f"pass{n}.r{k}" for n, group in enumerate(groups, 1) for k, e in enumerate(group)}
    lines = []
    for n, group in enumerate(groups, 1):
        mine = {e: name for e, name in known.items() if e not in group}
        made, texts = _format(group, mine)
        lines += [f"pass {n}:", *(f"    {line}" for line in made)]
        lines += [f"    {known[e]} = {text}" for e, text in zip(group, texts, strict=True)]
    return "\n".join(lines) or "no pass over the pairs"


def format_lowered(program: Lowered) -> str:
    """The passes, each with what is fed to its leaves, and the outputs that are made of their results."""
    known: dict[Expr, str] = {}
    lines = []
    for n, p in enumerate(program.passes, 1):
        made, texts = _format(p.feeds, known)
        fed = [f"{leaf} <- {text}" + _format_axes(leaf) for leaf, text in zip(p.fold.leaves, texts, strict=True)]
        inner, reductions = _format([e for pair in p.fold.scaled for e in pair], {})
        lines += [f"pass {n}:", *(f"    {line}" for line in (*made, *fed, *inner))]
        for k, (text, scale) in enumerate(zip(reductions[::2], reductions[1::2], strict=True)):
            lines.append(f"    pass{n}.r{k} = {text}" + ("" if scale == "1.0" else f" * {scale}"))
        places = {r: k for k, r in enumerate(p.fold.reductions)}
        for users, (r, k) in zip(p.results, p.fold.outputs, strict=True):
            known |= dict.fromkeys(users, f"pass{n}.r{places[r]}{_format_result_suffix(r, k)}")
    return "\n".join([*lines, format_outputs(program.outputs, known)])


def _format(roots: Sequence[Expr], known: Mapping[Expr, str]) -> tuple[list[str], list[str]]:
    """The lines of the temporaries, and the text of each root."""
    order = topological(roots, stop=known.__contains__)
    uses = Counter(a for e in order if e not in known for a in e.args)
    lines: list[str] = []
    texts: dict[Expr, tuple[str, int]] = {}  # the text of a node, and how strongly it binds
    for e in order:
        text, binds = (known[e], _ATOM) if e in known else _format_node(e, texts)
        if e.args and e not in known and (uses[e] > 1 or (uses[e] and len(text) > _WIDEST)):
            name = f"t{len(lines)}"
            lines.append(f"{name} = {text}{_format_axes(e)}")
            text, binds = name, _ATOM
        texts[e] = text, binds
    return lines, [texts[e][0] for e in roots]


def _format_node(e: Expr, texts: Mapping[Expr, tuple[str, int]]) -> tuple[str, int]:
    args = [texts[a] for a in e.args]
    if e.op in _INFIX:
        sign, binds = _INFIX[e.op]
        left, right = _in_parentheses(args[0], binds + (binds == 1)), _in_parentheses(args[1], binds + 1)
        return f"{left} {sign} {right}", binds
    if e.op in _PREFIX:
        sign, binds = _PREFIX[e.op]
        return f"{sign}{_in_parentheses(args[0], binds)}", binds
    if e.op in ("const", "input", "leaf"):
        return str(e.attrs[0]), _ATOM if not str(e.attrs[0]).startswith("-") else 7
    if e.op == "size":
        return f"num_{e.attrs[0]}", _ATOM
    if e.op == "result":
        return f"{args[0][0]}{_format_result_suffix(e.args[0], e.attrs[0])}", _ATOM
    inner = ", ".join(text for text, _ in args)
    if e.op == "reduce":
        kind, over, params = e.attrs
        extra = "".join(f", {getattr(p, '__name__', p)}" for p in params)
        return f"{kind}[{over}]({inner}{extra})", _ATOM
    attributes = "".join(f", {a}" for a in e.attrs if a is not None)
    return (f"{e.op}({inner}{attributes})" if e.args or e.attrs else e.op), _ATOM


def _format_result_suffix(reduction: Expr, k: int) -> str:
    """How the k-th result of a reduction is written: ``.index``; nothing where there is only one."""
    names = kind_of(reduction).result_names(reduction.args, reduction.attrs[2])
    return f".{names[k]}" if len(names) > 1 else ""


def _in_parentheses(arg: tuple[str, int], least: int) -> str:
    text, binds = arg
    return text if binds >= least else f"({text})"


def _format_axes(e: Expr) -> str:
    """A comment that says how many values an expression stands for."""
    place = "per pair" if e.is_pair else "per row" if e.rows else "per column" if e.cols else "one"
    return f"  # {place}" + ("" if e.feature is None else f', vector over "{e.feature}"')


_FORMATS: dict[str, Callable[[Any], str]] = {"group reductions": format_groups, "hoist one-sided": format_lowered}
