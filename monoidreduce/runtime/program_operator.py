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
from ..program.expression import Expr
from ..program.loss_and_gradient import list_pass_results
from ..program.lower import Lowered, digest_program
from .autograd import GradientRunner, Runner, make_runner
from .bind import contiguous_strides, gradient_strides, output_form, output_strides
from .replay import ProgramSteps, can_record, make_steps
from .torch_operator import (
    TAGS,
    VALUES,
    Frame,
    join_values,
    library,
    narrow_shapes,
    split_values,
    unknown_name,
    write_lengths,
)

_FORWARD = f"program(str call, {VALUES}) -> Tensor[]"
_BACKWARD = f"program_gradient(str call, {VALUES}, Tensor[] results, Tensor[] cotangents) -> Tensor[]"
_MOST = 1024  # kinds of calls of all programs
_lock = threading.Lock()
_CALLS: dict[str, Call] = {}  # kept: a compiled graph may hold the name for as long as the process lives
_KNOWN: dict[str, Call] = {}  # any call of a program, by what is left of the name without the flags


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
    def number_places(self) -> tuple[int, ...]:
        """Which of its inputs are Python numbers."""
        return tuple(k for k, n in enumerate(self.inputs) if n in self.numbers)

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


@dataclass(frozen=True)
class Call:
    """All that is fixed of calls of an operator, and that its name stands for: few arguments take the dispatcher little
    time.

    ``keep``: the forward returns all of its pass's results; ``needs`` and ``given``: of a backward, the inputs whose
    gradients are asked for and the outputs that have a cotangent."""

    program: Program
    engine: str
    frame: Frame
    keep: bool = False
    needs: tuple[bool, ...] = ()
    given: tuple[bool, ...] = ()

    @functools.cached_property
    def steps(self) -> ProgramSteps:
        return make_steps(self.engine, self.program.lowered, self.program.numbers)

    def join_values(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
        """The program's inputs in their order."""
        return join_values(tensors, numbers, self.program.number_places) if numbers else list(tensors)


@functools.lru_cache(maxsize=4096)
def name(call: Call) -> str:
    """The name of a call: a digest of its program's text, and what else it holds."""
    program = call.program
    parts = [digest_program(program.lowered), ".".join(sorted(program.numbers)), program.out, call.engine, call.frame]
    flags = ["".join("01"[one] for one in part) for part in ((call.keep,), call.needs, call.given)]
    which = " ".join(map(str, parts))
    found = "|".join([which, *flags])
    with _lock:
        _CALLS[found] = call
        _KNOWN.setdefault(which, call)
    return found


def _known(name: str) -> Call:
    """The call of this name; a backward is known where its forward is."""
    found = _CALLS.get(name)
    if found is not None:
        return found
    which, *flags = name.split("|")
    if which not in _KNOWN:
        raise unknown_name("program")
    (keep,), needs, given = (tuple(one == "1" for one in part) for part in flags)
    return _CALLS.setdefault(name, replace(_KNOWN[which], keep=keep, needs=needs, given=given))


# Calls of the operators


def run_forward(program: Program, engine: str, keep: bool, values: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """The outputs, and where ``keep`` the pass's other results, by the operator."""
    call = Call(program, engine, Frame.of(sizes), keep)
    return torch.ops.monoidreduce.program(name(call), *split_values(values)[:2], write_lengths(sizes))


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
    given = tuple(g is not None for g in cotangents)
    call = Call(program, engine, Frame.of(sizes), needs=tuple(needs), given=given)
    there = [g for g in cotangents if g is not None]
    found = iter(
        torch.ops.monoidreduce.program_gradient(
            name(call), *split_values(values)[:2], write_lengths(sizes), list(results), there
        )
    )
    return [next(found) if need else None for need in needs]


# What they do

_forwards: BoundedCache[tuple, tuple[Sizes, Runner, list]] = BoundedCache(_MOST)
_backwards: BoundedCache[tuple, tuple[Sizes, GradientRunner, list]] = BoundedCache(_MOST)


def _forward(name: str, tensors: list[Tensor], numbers: list, lengths: list[int]) -> list[Tensor]:
    call = _known(name)
    values = call.join_values(tensors, numbers)
    key = (name, *triton.describe_leaves(values), *lengths, tensors[0].device)
    known = _forwards.find(key)
    if known is None:
        made, sizes = call.program, call.frame.read_lengths(lengths, tensors[0].device)
        lowered = made.keeping if call.keep else made.lowered
        run = make_runner(call.engine, lowered, made.numbers, can_record(call.engine, sizes))
        known = _forwards.keep(key, (sizes, run, made.forms(call.keep, values, sizes)))
    sizes, run, forms = known
    with torch.no_grad(), unchanged_tensors.allocate_in_own_thread():
        found = oom_retry.run_with_typed_error(run, (sizes, *values), sizes)
        return own_tensors(found, forms, tensors, sizes.device)


def _fake_forward(name: str, tensors: list[Tensor], numbers: list, lengths: list[int]) -> list[Tensor]:
    call = _known(name)
    sizes = call.frame.read_lengths(lengths, tensors[0].device)
    forms = call.program.forms(call.keep, call.join_values(tensors, numbers), sizes)
    return [torch.empty_strided(shape, strides, dtype=dtype, device=sizes.device) for (shape, dtype), strides in forms]


def _backward(
    name: str,
    tensors: list[Tensor],
    numbers: list,
    lengths: list[int],
    results: list[Tensor],
    cotangents: list[Tensor],
) -> list[Tensor]:
    call, there = _known(name), iter(cotangents)
    values = call.join_values(tensors, numbers)
    key = (name, *triton.describe_leaves(values), *lengths, tensors[0].device)
    known = _backwards.find(key)
    if known is None:
        sizes = call.frame.read_lengths(lengths, tensors[0].device)
        gradients = call.steps.gradient(call.needs, call.given, len(call.program.results))
        runner = GradientRunner(gradients, call.engine, can_record(call.engine, sizes))
        leaves = [v for v, need in zip(values, call.needs, strict=True) if need]
        forms: list = [((v.shape, v.dtype), gradient_strides(v)) for v in leaves]
        known = _backwards.keep(key, (sizes, runner, forms))
    sizes, runner, forms = known
    others = [*results, *(next(there) if one else None for one in call.given)]
    with torch.no_grad(), unchanged_tensors.allocate_in_own_thread():
        found = oom_retry.run_with_typed_error(runner, (sizes, values, others), sizes)
        return own_tensors([g for g in found if g is not None], forms, [*tensors, *results, *cotangents], sizes.device)


def _fake_backward(name: str, tensors: list[Tensor], numbers: list, *rest: Any) -> list[Tensor]:
    call = _known(name)
    leaves = [v for v, need in zip(call.join_values(tensors, numbers), call.needs, strict=True) if need]
    return [v.new_empty_strided(v.shape, gradient_strides(v)) for v in leaves]


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
