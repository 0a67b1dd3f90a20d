"""The dense schedule: a program on whole M x N matrices of pairs, differentiated by autograd, for small problems.

It runs the program in normal form, as all engines do, so that sums of vectors are matrix products, written once as
straight-line torch code (``torch_code.py``). The backward recomputes nothing: autograd saves a few numbers per pair.
The planner decides whether that is worth its memory. Tests compare it with ``reference.py``.
"""

from __future__ import annotations

import functools

from torch import Tensor

from ..program.expression import Expr, topological
from ..program.lower import Lowered
from ..program.normal_form import is_pass
from ..reductions import kind_of
from .common import matmul
from .common.evaluate import Sizes
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
