"""A program of one pass as two registered torch operators: its forward, and its gradients.

``torch.ops.monoidreduce.program`` runs what an uncompiled call runs, the same executables with the same recorded
launches, and returns the outputs as users hold them; behind these, if a gradient is wanted, the pass's other results.
``program_gradient`` takes the inputs, the pass's results and the cotangents; its gradients have the inputs' types.
Neither has a gradient of its own (``traced_program.py`` puts them under one), state, or outputs that alias anything.

A program travels as its name, a digest of its text, as folds do (``torch_operator.py``). Shapes, types and strides that
the operators' fake forms promise are those of ``result_form.py``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engines import triton
from ..engines.common import oom_retry, unchanged_tensors
from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.evaluate import Form, Sizes
from ..engines.common.torch_code import inputs
from ..errors import EngineError
from ..program.expression import Expr
from ..program.loss_and_gradient import list_pass_results
from ..program.lower import Lowered, digest_program
from .autograd import GradientRunner, Runner, make_runner
from .replay import ProgramSteps, can_record, compile_gradients
from .result_form import contiguous_strides, gradient_strides, output_form, output_strides
from .torch_operator import (
    SIZES,
    TAGS,
    VALUES,
    join_values,
    library,
    narrow_shapes,
    read_sizes,
    split_values,
    write_sizes,
)

_FORWARD = f"program(str program, str engine, bool keep, {VALUES}, {SIZES}) -> Tensor[]"
_BACKWARD = (
    f"program_gradient(str program, str engine, bool[] needs, bool[] given, {VALUES}, Tensor[] results, "
    f"Tensor[] cotangents, {SIZES}) -> Tensor[]"
)
_MOST = 1024  # kinds of calls of all programs
_TYPES = {None: "", torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}
_lock = threading.Lock()
_PROGRAMS: dict[str, Program] = {}  # kept: a compiled graph may hold the name for as long as the process lives


@dataclass(frozen=True)
class Program:
    """A lowered program of one pass; ``numbers``: the inputs that are Python numbers; ``out``: the users' type."""

    lowered: Lowered
    numbers: frozenset[str]
    out: torch.dtype | None

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of its inputs in their order."""
        return inputs(self.lowered)

    @functools.cached_property
    def results(self) -> tuple[Expr, ...]:
        """The pass's results as the program's own nodes."""
        return tuple(list_pass_results(self.lowered.passes[0]))

    @functools.cached_property
    def kept(self) -> tuple[int, ...]:
        """Which of the pass's results are no outputs."""
        return tuple(k for k, e in enumerate(self.results) if e not in self.lowered.outputs)

    @functools.cached_property
    def keeping(self) -> Lowered:
        """The same program with all of the pass's results among its outputs."""
        (one,) = self.lowered.passes
        users = tuple(nodes or (e,) for nodes, e in zip(one.results, self.results, strict=True))
        more = tuple(self.results[k] for k in self.kept)
        return Lowered((replace(one, results=users),), (*self.lowered.outputs, *more))

    def join_results(self, found: Sequence[Tensor]) -> list[Tensor]:
        """The pass's results in order, of all that the forward operator returned."""
        places = {e: k for k, e in enumerate(self.keeping.outputs)}
        return [found[places[e]] for e in self.results]

    def forms(self, keep: bool, values: Sequence[Any], sizes: Sizes) -> list[tuple[Form, tuple[int, ...]]]:
        """Shape, type and strides of all that the forward operator returns."""
        named, found = dict(zip(self.inputs, values, strict=True)), []
        for k, e in enumerate(self.lowered.outputs):
            shape, dtype = output_form(e, sizes, self.out)
            found.append(((shape, dtype), output_strides(self.lowered, k, shape, named)))
        if keep:
            fold = self.lowered.passes[0].fold
            like = [_vector_like(self.out) if e.feature is not None else 0 for e in fold.leaves]
            made = narrow_shapes(fold, like, sizes)
            found += [(made[k], contiguous_strides(made[k][0])) for k in self.kept]
        return found


@functools.cache
def _vector_like(dtype: torch.dtype | None) -> Tensor:
    return torch.empty(0, dtype=dtype)


@functools.lru_cache(maxsize=4096)
def name(program: Program) -> str:
    """The name of a program: a digest of its text and of what else it holds."""
    found = "-".join([digest_program(program.lowered), *sorted(program.numbers), _TYPES[program.out]])
    with _lock:
        _PROGRAMS[found] = program
    return found


def _known(name: str) -> Program:
    if name not in _PROGRAMS:
        raise EngineError(
            detail="a graph from another process names a program that this process has not met",
            fix="Call the op once on any tensors of these types, with gradients if the graph has them, then the graph",
        )
    return _PROGRAMS[name]


# Calls of the operators


def run_forward(program: Program, engine: str, keep: bool, values: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """The outputs, and where ``keep`` the pass's other results, by the operator."""
    return torch.ops.monoidreduce.program(name(program), engine, keep, *split_values(values), *write_sizes(sizes))


def run_gradient(
    program: Program,
    engine: str,
    needs: Sequence[bool],
    values: Sequence[Any],
    results: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    sizes: Sizes,
) -> list[Tensor | None]:
    """A gradient for each input that ``needs`` one, by the operator; ``cotangents``: one for each output, or None."""
    found = iter(
        torch.ops.monoidreduce.program_gradient(
            name(program),
            engine,
            list(needs),
            [g is not None for g in cotangents],
            *split_values(values),
            list(results),
            [g for g in cotangents if g is not None],
            *write_sizes(sizes),
        )
    )
    return [next(found) if need else None for need in needs]


# What they do

_forwards: BoundedCache[tuple, tuple[Sizes, Runner, list]] = BoundedCache(_MOST)
_backwards: BoundedCache[tuple, tuple[Sizes, GradientRunner]] = BoundedCache(_MOST)


def _forward(program: str, engine: str, keep: bool, tensors: list[Tensor], numbers: list, places: list, *rest: Any):
    values = join_values(tensors, numbers, places)
    key = (program, engine, keep, *triton.describe_leaves(values), *sizes_key(*rest))
    known = _forwards.find(key)
    if known is None:
        made, sizes = _known(program), read_sizes(*rest)
        lowered = made.keeping if keep else made.lowered
        run = make_runner(engine, lowered, made.numbers, can_record(engine, sizes))
        known = _forwards.keep(key, (sizes, run, made.forms(keep, values, sizes)))
    sizes, run, forms = known
    with torch.no_grad(), unchanged_tensors.allocate_in_own_thread():
        found = oom_retry.run_with_typed_error(run, (sizes, *values), sizes)
        return own_tensors(found, forms, tensors, sizes.device)


def _fake_forward(
    program: str, engine: str, keep: bool, tensors: list[Tensor], numbers: list, places: list, *rest: Any
):
    sizes = read_sizes(*rest)
    forms = _known(program).forms(keep, join_values(tensors, numbers, places), sizes)
    return [torch.empty_strided(shape, strides, dtype=dtype, device=sizes.device) for (shape, dtype), strides in forms]


def _backward(
    program: str,
    engine: str,
    needs: list[bool],
    given: list[bool],
    tensors: list[Tensor],
    numbers: list,
    places: list[int],
    results: list[Tensor],
    cotangents: list[Tensor],
    *rest: Any,
) -> list[Tensor]:
    values, there = join_values(tensors, numbers, places), iter(cotangents)
    key = (program, engine, *needs, *given, *sizes_key(*rest))
    known = _backwards.find(key)
    if known is None:
        made, sizes = _known(program), read_sizes(*rest)
        steps = ProgramSteps(engine, made.lowered, made.numbers)
        gradients = compile_gradients(steps, len(made.results), tuple(needs), tuple(given))
        runner = GradientRunner(gradients, engine, can_record(engine, sizes))
        known = _backwards.keep(key, (sizes, runner))
    sizes, runner = known
    others = [*results, *(next(there) if one else None for one in given)]
    with torch.no_grad(), unchanged_tensors.allocate_in_own_thread():
        found = oom_retry.run_with_typed_error(runner, (sizes, values, others), sizes)
        leaves = [v for v, need in zip(values, needs, strict=True) if need]
        forms = [((v.shape, v.dtype), gradient_strides(v)) for v in leaves]
        return own_tensors([g for g in found if g is not None], forms, [*tensors, *results, *cotangents], sizes.device)


def _fake_backward(
    program: str,
    engine: str,
    needs: list[bool],
    given: list[bool],
    tensors: list[Tensor],
    numbers: list,
    places: list[int],
    *rest: Any,
) -> list[Tensor]:
    pairs = zip(join_values(tensors, numbers, places), needs, strict=True)
    leaves = [v for v, need in pairs if need]
    return [v.new_empty_strided(v.shape, gradient_strides(v)) for v in leaves]


def sizes_key(
    rows: int, cols: int, batch: list[int], letters: str, lengths: list[int], compute: Any, device: Any
) -> tuple:
    """Sizes as an operator is given them, as a key."""
    return rows, cols, *batch, None, letters, *lengths, compute, device


def own_tensors(
    found: Sequence[Any], forms: Sequence[tuple[Form, tuple[int, ...]]], given: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    """Results in the forms that were promised, none of them the memory of another or of what the operator was given."""
    seen = {t.untyped_storage()._cdata for t in given}
    owned: list[Tensor] = []
    for value, ((shape, dtype), strides) in zip(found, forms, strict=True):
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=dtype, device=device)
        place = value.untyped_storage()._cdata
        fits = value.shape == shape and value.dtype is dtype and _has_strides(value, strides)
        if not fits or place in seen:
            new = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            owned.append(new.copy_(value))
        else:
            seen.add(place)
            owned.append(value.detach() if value._base is not None else value)
    return owned


def _has_strides(t: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor has these strides, along the axes where they say anything."""
    found = t.stride()
    return found == strides or all(
        length == 1 or one == other for length, one, other in zip(t.shape, found, strides, strict=True)
    )


for schema, run, fake in ((_FORWARD, _forward, _fake_forward), (_BACKWARD, _backward, _fake_backward)):
    operator = schema.partition("(")[0]
    library.define(schema, tags=TAGS)
    library.impl(operator, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"monoidreduce::{operator}", fake, lib=library)
