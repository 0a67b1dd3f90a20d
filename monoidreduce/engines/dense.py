"""All pairs at once, differentiated by autograd: the dense schedule, for small problems, and the engine ``reference``.

The dense schedule runs the program in normal form, as all engines do, so that sums of vectors are matrix products,
written once as straight-line torch code (``torch_code.py``). The backward recomputes nothing: autograd saves a few
numbers per pair. The planner decides whether that is worth its memory.

The reference runs the program as traced, before any rewriting, and refuses to grow past a limit. So that normal form,
passes, symbolic gradients and tiles are all checked against something that has none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ReferenceLimitError
from ..program.expression import Expr, topological
from ..program.lower import Lowered, is_pass
from ..program.primitives import PRIMITIVES
from ..program.trace import COL_SEQUENCE, ROW_SEQUENCE
from ..reductions import kind_of
from .common import matmul
from .common.evaluate import Evaluator, Sizes, spread_edges
from .common.torch_code import Script, Writer, inputs


def has_dense_form(program: Lowered) -> bool:
    """Whether every reduction of a program has a form for whole matrices, and no vectors are packed."""
    nodes = topological(program.outputs)
    return all(kind_of(e).has_whole_form(e) if e.op == "reduce" else e.packing is None for e in nodes)


@functools.lru_cache(maxsize=1024)
def write_dense(program: Lowered, numbers: frozenset[str] = frozenset()) -> Script:
    """Write a program as torch code; ``run(sizes, *inputs)`` returns its outputs, which are differentiable."""
    used = {(e.args[0], e.attrs[0]) for e in topological(program.outputs) if e.op == "result"}
    writer = _DenseWriter(numbers, used)
    for e in topological(program.outputs):
        if is_pass(e):  # in topological order, so that a fold of folds is not written from within another
            writer.of(e)
    return writer.script(inputs(program), program.outputs)


class _DenseWriter(Writer):
    """Writes reductions of pairs from matrices of pairs and row or column vectors, as each kind requests."""

    def __init__(self, numbers: frozenset[str], used: set[tuple[Expr, int]]):
        super().__init__(numbers, frozenset())
        self.used = used

    def of(self, e: Expr) -> str:
        for n in topological([e], stop=lambda n: n in self.names or is_pass(n)):
            if n not in self.names:
                self.names[n] = self._node(n)
        return self.names[e]

    def _node(self, e: Expr) -> str:
        if is_pass(e):
            return self._fold(e)
        if e.op == "result" and is_pass(e.args[0]):
            return self._line(f"{self.names[e.args[0]]}[{e.attrs[0]}]")
        if e.op in ("dot", "sqdist"):
            x, y = (self._raise_dtype(a) for a in (e.args if e.args[0].rows else e.args[::-1]))
            return self._line(f"{self.hold(_dot if e.op == 'dot' else _sqdist)}({x}, {y})")
        return super()._node(e)

    def _fold(self, e: Expr) -> str:
        used = frozenset(k for r, k in self.used if r is e)
        compute, given = kind_of(e).whole_form(e, self, used)
        return self._line(f"{self.hold(compute)}(S, {', '.join(given)})")

    def vectors(self, e: Expr) -> str:
        """Row or column vectors, in the compute type."""
        self.of(e)
        return self._raise_dtype(e)

    def tensor(self, e: Expr) -> str:
        """A value as a tensor, also if it is a Python number."""
        name = self.of(e)
        return self._line(f"filled({name}, {e.dtype!r}, S).expand((1,) * (len(S.batch)))") if e in self.plain else name

    def matrix(self, e: Expr) -> str:
        """A number per pair, as a whole matrix [*batch, M, N]."""
        return self._line(f"{self.hold(_expand_matrix)}({self._on_pairs(e)}, S)")

    def field(self, e: Expr) -> str:
        """A number [*batch, M, N] or a vector [*batch, M, N, f] per pair, broadcast or not."""
        return (
            self._on_pairs(e)
            if e.feature is None
            else self._line(f"{self.hold(_expand_vectors)}({self._on_pairs(e)}, S)")
        )

    def _on_pairs(self, e: Expr) -> str:
        name = self.of(e)
        if e in self.plain:
            tail = 2 + (e.feature is not None)
            return self._line(f"filled({name}, {e.dtype!r}, S).expand((1,) * (len(S.batch) + {tail}))")
        name = self._raise_dtype(e)
        at = -1 if e.feature is None else -2
        for missing, place in ((not e.cols, at), (not e.rows, at - 1)):
            if missing:
                name = self._view(name, f"{name}.unsqueeze({place})")
        return name


def _expand_matrix(x: Tensor, sizes: Sizes) -> Tensor:
    shape = x.shape[-2:]
    return x if shape == (sizes.rows, sizes.cols) else x.expand(*x.shape[:-2], sizes.rows, sizes.cols)


def _expand_vectors(x: Tensor, sizes: Sizes) -> Tensor:
    return x.expand(*x.shape[:-3], sizes.rows, sizes.cols, x.shape[-1])


def _dot(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype.is_floating_point:
        return matmul.multiply_transposed(x, y)
    return (x.unsqueeze(-2) * y.unsqueeze(-3)).sum(-1)  # integer matrix products are slow on GPUs


def _sqdist(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)


def run(outputs: tuple[Expr, ...], inputs: Mapping[str, Any], sizes: Sizes, limit: int | None) -> list[Any]:
    """Evaluate the outputs of a traced program densely (in the evaluator's layout)."""
    pairs = torch.Size(sizes.batch).numel() * sizes.rows * sizes.cols
    widths = [sizes.of(str(e.feature)) for e in topological(outputs) if e.is_pair and e.feature is not None]
    widths += [sizes.of(str(e.args[0].feature)) for e in topological(outputs) if e.op == "sqdist"]
    elements = pairs * max([1, *widths])
    if limit is not None and elements > limit:
        raise ReferenceLimitError(elements=elements, limit=limit)
    evaluate: Evaluator = Evaluator(sizes, spread_edges(outputs, inputs, sizes.rows, sizes.cols))
    if (exists := _find_condition(outputs)) is not None:
        evaluate = _ListedEvaluator(sizes, evaluate.inputs, exists=evaluate(exists))
    return [evaluate(e) for e in outputs]


def _find_condition(outputs: tuple[Expr, ...]) -> Expr | None:
    """Which pairs a domain has: a node that lists them, or a row's sequence equal to a column's."""
    sequences = {ROW_SEQUENCE, COL_SEQUENCE}
    for e in topological(outputs):
        if e.op == "listed" or (e.op == "eq" and {a.attrs[0] for a in e.args if a.op == "input"} == sequences):
            return e
    return None


@dataclass
class _ListedEvaluator(Evaluator):
    """Pairs that a domain does not have pass no gradient: a mask alone would pass 0 times what is infinite of them."""

    exists: Any = None

    def _node(self, e: Expr) -> Any:
        value = super()._node(e)
        return self._guard(value, e.feature) if e.is_pair and e.op not in PRIMITIVES and e.op != "result" else value

    def _primitive(self, e: Expr, args: list[Any]) -> Any:
        if e.is_pair:
            args = [a if x.is_pair else self._guard(a, x.feature) for a, x in zip(args, e.args, strict=True)]
        return super()._primitive(e, args)

    def _guard(self, value: Any, feature: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.requires_grad):
            return value
        exists = self.exists if feature is None else self.exists.unsqueeze(-1)
        return torch.where(exists, value, value.detach())
