"""From outputs to passes: which reductions run together, and what is hoisted out of them.

A reduction whose fields live on pairs belongs to a pass; its level is one more than the deepest pass that its fields
use, so there are as few passes as the dependencies allow. Every maximal one-sided subexpression (``F.normalize(x)``,
``⟨g, P⟩``) is *fed* to the pass, computed once by plain torch. A :class:`Fold` is what an engine runs: reductions
over numbered leaves, independent of the layer it came from, and equal folds are the same object.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from . import build
from .expr import Expr, node, reduce_node, result, topological
from .normal import is_pass, normalize
from .reductions import KINDS

_BUILTIN = ("const", "nan", "size", "row_index", "col_index")  # engines make these themselves


@dataclass(frozen=True)
class Fold:
    """Reductions over leaves, run in one pass over the pairs."""

    leaves: tuple[Expr, ...]
    reductions: tuple[Expr, ...]

    @property
    def outputs(self) -> list[tuple[Expr, int]]:
        """(reduction, k) for every result, in order."""
        return [(r, k) for r in self.reductions for k in range(len(KINDS[r.attrs[0]].outputs(r.args, r.attrs[2])))]


@dataclass(frozen=True)
class Pass:
    """A fold, the expressions fed to its leaves, and the program's nodes that its outputs are."""

    fold: Fold
    feeds: tuple[Expr, ...]
    results: tuple[tuple[Expr, ...], ...]


@dataclass(frozen=True)
class Lowered:
    """What runs: passes in order, then the outputs (plain torch on inputs and results)."""

    passes: tuple[Pass, ...]
    outputs: tuple[Expr, ...]


@functools.lru_cache(maxsize=4096)
def lower(outputs: tuple[Expr, ...]) -> Lowered:
    """Normalize, cut into passes, hoist."""
    outputs = normalize(outputs)
    levels = _levels(outputs)
    for level in range(1, max(levels.values(), default=0) + 1):
        outputs = build.substitute(outputs, _merge_soft(outputs, levels, level))
        levels = _levels(outputs)
    deepest = max(levels.values(), default=0)
    passes = []
    for level in range(1, deepest + 1):
        reductions = [e for e in topological(outputs) if is_pass(e) and levels[e] == level]
        passes.append(_make_pass(reductions, topological(outputs)))
    return Lowered(tuple(passes), outputs)


def _levels(outputs: tuple[Expr, ...]) -> dict[Expr, int]:
    levels: dict[Expr, int] = {}
    for e in topological(outputs):
        levels[e] = max((levels[a] for a in e.args), default=0) + is_pass(e)
    return levels


def _merge_soft(outputs: tuple[Expr, ...], levels: dict[Expr, int], level: int) -> dict[Expr, Expr]:
    """One ``soft`` for all softmax means and logsumexps of one logit: the exponentials are computed once."""
    groups: dict[tuple[Expr, str], list[Expr]] = {}
    order = topological(outputs)
    for e in order:
        if is_pass(e) and e.attrs[0] == "soft" and levels[e] == level:
            groups.setdefault((e.args[0], e.attrs[1]), []).append(e)
    replace: dict[Expr, Expr] = {}
    for (logit, over), members in groups.items():
        if len(members) == 1:
            continue
        values = tuple(dict.fromkeys(v for m in members for v in m.args[1:]))
        whole = reduce_node("soft", over, (), (logit, *values))
        for e in order:
            if e.op == "result" and e.args[0] in members:
                k, own = e.attrs[0], len(e.args[0].args) - 1
                place = 0 if k == 0 else 1 + values.index(e.args[0].args[k]) if k <= own else len(values) + k - own
                replace[e] = result(whole, place, e.feature, e.dtype)
    return replace


def _is_fed(e: Expr) -> bool:
    """What a pass is given: what lives on one side, and what is given per pair."""
    return not e.is_pair or e.op in ("input", "leaf")


def _make_pass(reductions: list[Expr], order: list[Expr]) -> Pass:
    feeds: dict[Expr, Expr] = {}
    for e in topological([a for r in reductions for a in r.args], stop=_is_fed):
        if _is_fed(e) and e.op not in _BUILTIN:
            feeds[e] = node("leaf", (), (f"x{len(feeds)}",), rows=e.rows, cols=e.cols, feature=e.feature, dtype=e.dtype)
    fields = build.substitute(tuple(a for r in reductions for a in r.args), feeds)
    renamed, at = [], 0
    for r in reductions:
        count = len(r.args)
        renamed.append(reduce_node(r.attrs[0], r.attrs[1], r.attrs[2], fields[at : at + count]))
        at += count
    users: dict[tuple[Expr, int], list[Expr]] = {}
    for e in order:
        if e.op == "result":
            users.setdefault((e.args[0], e.attrs[0]), []).append(e)
    fold = Fold(tuple(feeds.values()), tuple(renamed))
    results = tuple(
        tuple(users.get((r, k), ()))
        for r in reductions
        for k in range(len(KINDS[r.attrs[0]].outputs(r.args, r.attrs[2])))
    )
    return Pass(fold, tuple(feeds), results)
