"""Gradient programs of folds: how they are built, where inputs come from, and how outputs become gradients.

The gradient of a fold is again a program (``program/gradient.py``), symbolic and the same for all shapes. Its inputs
are the leaves, the results and their cotangents. The runtime's backward, the backward over ranks and
the backward of a stream all build it here and differ only in how they run it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...program.expression import Expr
from ...program.gradient import collect_weights, differentiate_fold
from ...program.lower import Fold, Lowered, compile_program, name_gradients
from ...reductions import KINDS
from .torch_code import inputs, missing


@dataclass(frozen=True)
class GradientProgram:
    """A lowered gradient program. Its inputs are taken from a list of leaves, results and cotangents, in this order."""

    program: Lowered
    numbers: frozenset[str]  # the inputs that are Python numbers
    sources: tuple[int, ...]  # per input, its position in that list
    outputs: tuple[tuple[int, Expr | None], ...]  # per leaf asked for: its position and its gradient's expression
    leaves: tuple[Expr, ...]

    @staticmethod
    def of(
        leaves: Sequence[Expr],
        others: Sequence[str],
        outputs: Sequence[Expr | None],
        wanted: tuple,
        numbers: tuple,
        exact: bool = False,
    ) -> GradientProgram:
        """Lower the gradients ``outputs`` of ``leaves`` (those ``wanted``). ``others``: the names of the inputs besides
        the leaves; ``numbers``: which leaves are Python numbers; ``exact``: whether the fold's products are."""
        program = compile_program(tuple(e for e in outputs if e is not None)).with_exactness(exact)
        program = name_gradients(program, tuple(x for x, e in zip(leaves, outputs, strict=True) if e is not None))
        names = {name: k for k, name in enumerate((*(e.attrs[0] for e in leaves), *others))}
        lowered = iter(program.outputs)
        found = [(k, e if e is None else next(lowered)) for k, e in enumerate(outputs) if wanted[k]]
        known = frozenset(e.attrs[0] for e, is_number in zip(leaves, numbers, strict=True) if is_number)
        sources = tuple(names[n] for n in inputs(program))
        return GradientProgram(program, known, sources, tuple(found), tuple(leaves))

    def bind(self, leaves: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any]) -> dict[str, Any]:
        """The program's inputs by name."""
        values = [*leaves, *results, *cotangents]
        return {name: values[k] for name, k in zip(inputs(self.program), self.sources, strict=True)}

    def gradients(self, values: Sequence[Any], leaves: Sequence[Any]) -> tuple[list[Tensor | None], bool]:
        """The program's outputs as gradients, one per leaf (None where not asked); and whether they were gradients as
        they came, without a sum or a cast."""
        grads: list[Tensor | None] = [None] * len(leaves)
        rest, fits = iter(values), True
        for k, e in self.outputs:
            leaf, value = leaves[k], None if e is None else next(rest)
            grads[k] = zero_gradient(leaf) if e is None else to_gradient(value, e, leaf, self.leaves[k])
            fits = fits and grads[k] is value
        return grads, fits


@functools.lru_cache(maxsize=4096)
def build_gradient_program(
    fold: Fold,
    wanted: tuple[bool, ...],
    given: tuple[bool, ...],
    numbers: tuple[bool, ...] | None = None,
    saved: tuple[tuple[int, Expr], ...] = (),
    saved_names: tuple[str, ...] = (),
    narrow: bool = False,
) -> GradientProgram:
    """The gradient program of a fold, for the leaves ``wanted`` and the results whose cotangents are ``given``.

    ``saved``: gradients that the forward has prepared, as (leaf, expression); ``saved_names``: the names of the further
    inputs that they read; ``narrow``: whether vectors have 16 bits, so that weights may be multiplied out."""
    prepared = dict(saved)
    rest = tuple(want and k not in prepared for k, want in enumerate(wanted))
    results, cotangents, others = differentiate_fold(fold.pure, fold.leaves, rest, given)
    outputs = [prepared.get(k, e) for k, e in enumerate(collect_weights(others) if narrow else others)]
    names = [*(e.attrs[0] for e in (*results, *cotangents)), *saved_names]
    return GradientProgram.of(fold.leaves, names, outputs, wanted, numbers or (False,) * len(wanted), fold.exact)


@functools.lru_cache(maxsize=4096)
def constant_results(fold: Fold) -> tuple[bool, ...]:
    """For each result of a fold, whether gradients treat it as a constant: integers, and the positions of a best."""
    found = []
    for r, k in fold.outputs:
        kind, _, params = r.attrs
        outputs = KINDS[kind].outputs(r.args, params)
        found.append(outputs[k][1] != "float" or not KINDS[kind].is_differentiable(k, len(outputs)))
    return tuple(found)


def zero_gradient(leaf: Tensor) -> Tensor:
    """Zeros that still depend on the leaf, so that a second derivative of them is zero and not an error."""
    if not torch.is_grad_enabled():
        return torch.zeros_like(leaf)
    return torch.where(torch.ones((), dtype=torch.bool, device=leaf.device), torch.zeros_like(leaf), leaf)


def to_gradient(value: Any, e: Expr, leaf: Tensor, expr: Expr, dtype: torch.dtype | None = None) -> Tensor:
    """The value of ``e`` (``[*batch, M or N, f]``) as the gradient of ``leaf``, whose expression is ``expr``: in its
    shape and type (or ``dtype``), summed over the axes that the leaf does not have."""
    if not isinstance(value, Tensor):
        return torch.full_like(leaf, value)
    if (e.rows or e.cols) and not expr.rows and not expr.cols:  # of a number used in arithmetic per row or column
        value = value.sum(-1 if e.feature is None else -2)
    else:
        for at in missing(e, expr):  # an axis that the gradient does not vary along has size 1
            value = value.unsqueeze(at)
    if value.shape != leaf.shape:
        value = value.expand(torch.broadcast_shapes(value.shape, leaf.shape)).sum_to_size(leaf.shape)
    dtype = dtype or leaf.dtype
    return value if value.dtype is dtype else value.to(dtype)  # even a .to that does nothing takes a microsecond


# What autograd saves for a backward: independent of caches, and safe against in-place changes of results.
#
# ``torch.utils.checkpoint`` compares the number of tensors that a call saves with that of its recomputation, so a call
# may save only what its own backward reads. Graphs that the library builds for itself (estimating costs, measuring,
# deriving a pullback) are built under :func:`private_graphs`.


@contextlib.contextmanager
def private_graphs() -> Iterator[None]:
    """A context for graphs of stand-in tensors on the CPU, isolated from the caller's autograd settings.

    The caller's saved-tensor hooks are not called: torch calls only the innermost pair, and the pair set here does
    nothing. Anomaly detection is off, since the numbers mean nothing. Tensors are created on the CPU, whatever the
    default device."""
    with contextlib.ExitStack() as stack:
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None:  # None outside torch.func
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_identity, _identity))
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def _identity(t: Tensor) -> Tensor:
    return t


def detach_views(results: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Results of an engine as outputs of an ``autograd.Function``, none of them a view.

    Engines return views of their buffers, and torch refuses to change a view in place that a custom function made."""
    return tuple([t if t._base is None else t.detach() for t in results])


def load_saved(ctx: Any, outputs: range) -> tuple[tuple[Tensor, ...], bool]:
    """``ctx.saved_tensors``, and whether the function's ``outputs`` among them (by position) still hold its results.

    They do not where the user changed one in place (``y += 1``); a backward then recomputes them. An input that was
    changed in place is torch's error, as ever."""
    if getattr(ctx, "outputs_changed", False):
        return ctx.saved_tensors, False
    try:
        return ctx.saved_tensors, True
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
    for k in outputs:  # torch does not compare the versions of what hooks unpack
        ctx._raw_saved_tensors[k].register_hooks(_identity, _identity)
    found = ctx.saved_tensors  # raises where it was an input
    ctx.outputs_changed = True
    return found, False


def save_values(ctx: Any, values: Sequence[Any], *tensors: Tensor) -> None:
    """Save the inputs of a function, of which some are no tensors, and other tensors behind them."""
    ctx.constants = [None if isinstance(v, Tensor) else v for v in values]
    ctx.save_for_backward(*[v for v in values if isinstance(v, Tensor)], *tensors)


def load_values(ctx: Any, count: int = 0) -> tuple[list[Any], list[Tensor], bool]:
    """What :func:`save_values` saved: the inputs, the tensors behind them, and whether the first ``count`` of these,
    the outputs of the function, still hold its results."""
    first = ctx.constants.count(None)
    tensors, unchanged = load_saved(ctx, range(first, first + count))
    rest = iter(tensors)
    return [c if c is not None else next(rest) for c in ctx.constants], list(rest), unchanged
