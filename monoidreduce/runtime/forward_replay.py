"""A program of one pass, frozen whole: on inputs of one kind, forward and backward are each a tape of launches.

Step by step (``autograd.py``) each has a function of torch's autograd around it, and finds its launches by itself.
Where steps are nothing but launches (``replay_steps.py``), all of them are one function, whose backward is one program
(``backward_replay.py``). Whatever is out of the ordinary takes the road that it would have taken anyway: torch's own
arithmetic
between steps, a situation that is not the usual one, memory that runs out.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engines import panel, triton
from ..engines.common import oom_retry, skip_small_tiles
from ..engines.common.evaluate import Sizes
from ..engines.common.saved_tensors import detach_views
from ..engines.common.saved_tensors import load_saved as saved_tensors
from ..errors import NoGradientError
from ..program.backward import backward
from . import autocast, forward_settings, saved_row_gradients
from .backward_replay import Rewind, Saved
from .frozen_pass import situation
from .gradient_programs import Walked, Walker, refuse_batched, straight
from .replay_steps import Steps

_MOST = 64  # situations of a program
_PAIRS = 2**32  # of more, what the host does for a call does not count beside the kernels


class Program:
    """A program on inputs of one kind: its tapes, by the situation and by the numbers among the inputs.

    ``plainly`` is the road of what is out of the ordinary; ``walker`` makes one of a program."""

    def __init__(self, steps: Steps, plainly: Walked, walker: Walker):
        self.steps, self.plainly, self.walker = steps, plainly, walker
        names = steps.script.inputs
        self.numbers = tuple(k for k, name in enumerate(names) if name in steps.numbers)
        self.tensors = tuple(k for k, name in enumerate(names) if name not in steps.numbers)
        self.counted: triton.Counted | None = None
        self.store: Any = None  # the one that the launches are from
        self.kept: dict[tuple, Replay | None] = {}

    def __call__(self, sizes: Sizes, *values: Any) -> list[Any]:
        replay = self._replay(sizes, values)
        if replay is None:
            return self.plainly(sizes, *values)
        if torch.is_grad_enabled() and True in [values[k].requires_grad for k in self.tensors]:
            taped = self.moving is not None and not replay.wide
            return list(_replayed(replay, *values)) if taped else self.plainly(sizes, *values)
        return list(replay(values)[0])

    def _replay(self, sizes: Sizes, values: Sequence[Any]) -> Replay | None:
        now = situation()
        if now is None:
            return None
        if self.store is not triton.store():
            self.kept, self.store, self.counted = {}, triton.store(), self.steps.counted(sizes)
        if self.numbers:
            numbers = [values[k] for k in self.numbers]
            now += triton.signs(numbers if self.counted is None else (*numbers, *self.counted(*numbers)))
        found = self.kept.get(now, self)  # None: there is no tape
        return self._met(now, sizes, values) if found is self else found  # type: ignore[return-value]

    def _met(self, now: tuple, sizes: Sizes, values: Sequence[Any]) -> Replay | None:
        found = (
            oom_retry.run_or_fall_back(self._recorded, lambda *_: None, (sizes, values), sizes)
            if self._pays(sizes)
            else None
        )
        if len(self.kept) < _MOST:
            self.kept[now] = found
        return found

    def _pays(self, sizes: Sizes) -> bool:
        """Whether what the host does counts, and the forward is no other than the tape's: of many pairs it may keep
        more, where gradients are asked for."""
        pairs = math.prod(sizes.batch) * sizes.rows * sizes.cols
        keeps = saved_row_gradients.many(sizes) and any(
            saved_row_gradients.may_keep(p.fold) for p in self.steps.program.passes
        )
        return pairs <= _PAIRS and not keeps

    def _recorded(self, sizes: Sizes, values: Sequence[Any]) -> Replay | None:
        recorded, made = self.steps.recorded(values, sizes), self.steps.script
        if recorded is None:
            return None
        moves = any(self.moving or ())  # else nothing has a backward
        kept = [name for name in recorded.results if moves and name not in self.steps.script.returned]
        tensors = [made.names[k] for k in self.tensors]
        tape = triton.Tape(recorded, made.names, tensors, self.steps.script.returned, kept, sizes)
        if saved_row_gradients.many(sizes) and not tape.lean:
            return None
        return Replay(self, sizes, tape, Rewind(self.steps, self.walker, sizes, recorded.results, tape.kept))

    @functools.cached_property
    def moving(self) -> tuple[frozenset[int], ...] | None:
        """Per output, the tensors whose gradients it has a part in; None where the backward is no program."""
        inputs, count = self.steps.inputs, len(self.steps.program.outputs)
        wanted = tuple(k in self.tensors for k in range(len(inputs)))
        given = [tuple(k == n for k in range(count)) for n in range(count)]
        try:
            found = [backward(self.steps.program, inputs, wanted, one) for one in given]
        except NoGradientError:  # torch may have one
            return None
        return tuple(frozenset(k for k, e in enumerate(grads) if e is not None) for grads in found)

    @functools.cached_property
    def whole(self) -> bool:
        """Whether all outputs have a part in all gradients that can be asked for."""
        floats = {k for k in self.tensors if self.steps.inputs[k].dtype == "float"}
        return all(found == floats for found in self.moving or ())

    def fixed(self, values: Sequence[Any]) -> list[int]:
        """The outputs that have no part in any gradient that is asked for."""
        moving = self.moving or ()
        return [n for n, found in enumerate(moving) if not any(values[k].requires_grad for k in found)]


class Replay:
    """A program in one situation. ``wide``: its gradients take panels, which no tape has."""

    def __init__(self, program: Program, sizes: Sizes, tape: triton.Tape, rewind: Rewind):
        self.program, self.sizes, self.tape, self.rewind = program, sizes, tape, rewind
        self.wide = any(panel.is_wide(p.fold, sizes) for p in program.steps.program.passes)

    def __call__(self, values: Sequence[Any]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple]:
        """The outputs, and for a backward the tensors it needs (without what is kept, where memory ran out) and the
        numbers."""
        return oom_retry.run_or_fall_back(self.tape.run, self._plainly, values, self.sizes)

    def _plainly(self, *values: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple]:
        output, program = detach_views(self.program.plainly(self.sizes, *values)), self.program
        tensors = tuple(values[k] for k in program.tensors)
        return output, (*tensors, *output), tuple(values[k] for k in program.numbers)

    @functools.cached_property
    def count(self) -> int:
        """How many tensors a backward needs."""
        return len(self.program.tensors) + len(self.program.steps.program.outputs) + bool(self.tape.kept.places)


class _Replayed(torch.autograd.Function):
    """A program's tape; its backward is another."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, *values: Any) -> tuple[Tensor, ...]:
        output, saved, numbers = replay(values)
        ctx.kept = replay, numbers, len(saved) == replay.count, skip_small_tiles.requested()
        ctx.set_materialize_grads(False)
        if not replay.program.whole:
            ctx.mark_non_differentiable(*[output[k] for k in replay.program.fixed(values)])
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        refuse_batched(cotangents)
        replay, numbers, whole, skipped = ctx.kept
        first = len(replay.program.tensors)
        tensors, unchanged = saved_tensors(ctx, range(first, first + len(cotangents)))
        needs, saved = ctx.needs_input_grad[1:], Saved(tensors, cotangents, numbers)
        plain = whole and unchanged and not torch.is_grad_enabled()
        tape = replay.rewind.tape(needs, saved) if plain and straight() else None
        if tape is None:
            return _road(replay, needs, saved, plain, skipped)
        given = (*saved.tensors, *cotangents, *numbers)
        road = lambda *_: _road(replay, needs, saved, plain, skipped)
        return oom_retry.run_or_fall_back(tape.run, road, given, replay.sizes)


def _road(replay: Replay, needs: tuple[bool, ...], saved: Saved, kept: bool, skipped: Any) -> tuple:
    """A backward that is out of the ordinary, as its forward was asked."""
    rewind, sizes = replay.rewind, replay.sizes
    region = autocast.region(saved.tensors)
    uncast = torch.autocast(region, enabled=False) if region else contextlib.nullcontext()
    with forward_settings.again((*rewind.settings[:3], skipped)), uncast:
        return None, *oom_retry.run_with_typed_error(rewind.walked if kept else rewind.again, (needs, saved), sizes)


# ``apply`` without its look at transforms, for what is known to have none
_replayed: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Replayed).apply
