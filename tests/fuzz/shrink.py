"""Makes a failing program small: fewer outputs, operations, parameters and elements, as long as it fails likewise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from .compare import Failure, check
from .programs import Program, Sizes, param_node, with_run
from .tree import Node, const, make, topological


def shrink(program: Program, failure: Failure, seconds: float = 20.0) -> tuple[Program, Failure]:
    """The smallest program that single steps lead to, and how it fails; at most about so many seconds are spent."""
    end = time.monotonic() + seconds
    while True:
        for candidate in _simpler(program):
            if time.monotonic() > end:
                return program, failure
            try:
                found = check(candidate)
            except Exception:  # a step that left the language
                continue
            if found is not None and found.kind == failure.kind:
                program, failure = candidate, found
                break
        else:
            return program, failure


def _simpler(program: Program) -> Iterator[Program]:
    for k in range(len(program.outputs)):
        if len(program.outputs) > 1:
            yield replace(program, outputs=program.outputs[:k] + program.outputs[k + 1 :])
    yield from _unused(program)
    if program.form == "dict" or (program.form == "tuple" and len(program.outputs) == 1):
        yield replace(program, form="single" if len(program.outputs) == 1 else "tuple")
    if program.run.mode != "plain":
        yield with_run(program, mode="plain")
    if program.run.second:
        yield with_run(program, second=False)
    if program.run.tile is not None:
        yield with_run(program, tile=None)
    if program.run.engine not in ("eager", "triton"):
        yield with_run(program, engine="eager", tile=None)
    yield from _smaller(program)
    yield from _simpler_trees(program)
    for k, p in enumerate(program.params):
        for change in (
            {"view": "plain"}, {"alias": None}, {"batch": "full"}, {"grad": False}, {"narrow": False},
            {"style": "grid"} if p.cls == "float" else {"style": "small"} if p.cls == "int" else {},
        ):  # fmt: skip
            changed = replace(p, **change)
            if changed != p and (p.axis != "number" or "view" not in change or not p.grad):
                yield _with_param(program, k, changed)
    if program.dtype != "float64":
        yield replace(program, dtype="float64")


def _unused(program: Program) -> Iterator[Program]:
    used = {n.attrs[0] for n in topological(program.outputs) if n.op == "param"}
    for k, p in enumerate(program.params):
        others = program.params[:k] + program.params[k + 1 :]
        sized = all(any(o.axis in (axis, "pair") for o in others) for axis in ("row", "col"))
        if p.name not in used and sized:
            yield replace(program, params=others)


def _smaller(program: Program) -> Iterator[Program]:
    s = program.sizes
    tries: list[Sizes] = []
    if s.batch:
        tries.append(replace(s, batch=()))
        tries += [replace(s, batch=s.batch[1:])] if len(s.batch) > 1 else []
    for name in ("rows", "cols"):
        size = getattr(s, name)
        tries += [replace(s, **{name: n}) for n in (1, 2, size // 2, size - 1) if 0 < n < size]
    for letter, size in s.features:
        for n in (1, 2):
            if n < size:
                tries.append(replace(s, features=tuple((x, n if x == letter else w) for x, w in s.features)))
    for sizes in tries:
        yield replace(program, sizes=sizes)


def _simpler_trees(program: Program) -> Iterator[Program]:
    """Each operation replaced by one of its arguments of the same class and features, or by a number."""
    for node in reversed(topological(program.outputs)):
        if not node.args:
            continue
        for a in node.args:
            if a.feature == node.feature and a.cls == node.cls and not (node.is_reduction and (a.rows and a.cols)):
                yield _replaced(program, node, a)
        if node.feature is None and not node.is_reduction:
            simple = {"float": 1.0, "int": 1, "bool": True}[node.cls]
            yield _replaced(program, node, const(simple))
        for row in program.params:
            if (row.feature, row.cls) == (node.feature, node.cls) and node.op != "param" and len(node.args) > 0:
                new = param_node(row)
                if (new.rows, new.cols) == (node.rows, node.cols):
                    yield _replaced(program, node, new)


def _replaced(program: Program, old: Node, new: Node) -> Program:
    """The same program with another node in place of ``old``; everything above it is made anew."""
    done: dict[int, Node] = {}
    for node in topological(program.outputs):
        if node is old:
            done[id(node)] = new
        elif any(done[id(a)] is not a for a in node.args):
            done[id(node)] = make(node.op, *(done[id(a)] for a in node.args), **dict(node.attrs))
        else:
            done[id(node)] = node
    return replace(program, outputs=tuple(done[id(n)] for n in program.outputs))


def _with_param(program: Program, k: int, changed) -> Program:
    params = (*program.params[:k], changed, *program.params[k + 1 :])
    new = replace(program, params=params)
    for node in topological(program.outputs):
        if node.op == "param" and node.attrs[0] == changed.name:
            new = replace(_replaced(new, node, param_node(changed)), params=params)
    return new
