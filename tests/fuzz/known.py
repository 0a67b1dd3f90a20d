"""Defects that are known and being mended: failures that the fuzzer looks past. It is to be empty.

Each is a name and a predicate on a program and its failure. With KNOWN empty, every failure counts.
"""

from __future__ import annotations

from collections.abc import Callable

from .compare import Failure
from .programs import Program
from .tree import Node, topological


def _nodes(program: Program) -> list[Node]:
    return topological(program.outputs)


def _has(program: Program, *ops: str, cls: str | None = None) -> bool:
    return any(n.op in ops and (cls is None or all(a.cls == cls for a in n.args)) for n in _nodes(program))


def _meets_both_indices(program: Program) -> bool:
    def leaves(n: Node) -> set[str]:
        return {m.op for m in topological([n])}

    return any(n.op == "eq" and {"mr.row_index", "mr.col_index"} <= leaves(n) for n in _nodes(program))


def _differs(failure: Failure) -> bool:
    return "differs" in failure.kind


KNOWN: list[tuple[str, Callable[[Program, Failure], bool]]] = [
    ("labels that are arithmetic on the other index", lambda p, f: _differs(f) and _meets_both_indices(p)),
    ("an empty batch in a gather or the gradient of max", lambda p, f: 0 in p.sizes.batch and "raised" in f.kind),
    ("no features", lambda p, f: 0 in dict(p.sizes.features).values() and "raised" in f.kind),
    ("outputs changed in place", lambda p, f: p.run.mode == "inplace"),
    ("whole numbers: pow, div", lambda p, f: _has(p, "pow_int", "trunc_divide", "div_int", cls="int")),
    ("ids beyond 2**53", lambda p, f: _differs(f) and any(q.style in ("beyond 2**53", "huge") for q in p.params)),
    ("top-k of whole numbers", lambda p, f: _has(p, "mr.topk.values", "mr.topk.indices", cls="int")),
    (
        "gradients of minimum, maximum, pow, xlogy",
        lambda p, f: "differs" in f.kind and _has(p, "minimum", "maximum", "pow_at_zero", "pow_const", "xlogy"),
    ),
    ("products and sums of truth values", lambda p, f: _has(p, "mul", "add", cls="bool")),
    ("checkpoint on a first call", lambda p, f: p.run.mode == "checkpoint"),
]


def known(program: Program, failure: Failure) -> str | None:
    """The name of the known defect that a failure is put down to."""
    return next((name for name, holds in KNOWN if holds(program, failure)), None)
