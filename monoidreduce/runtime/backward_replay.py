"""The backward of a program that is a tape (``forward_replay.py``): a tape too, by what is asked and the kind of all
tensors.

Saved tensors may come back otherwise than they were given, and cotangents have any strides: they are looked at in
every backward. Where there is no tape for them the same gradient program is walked; where results were not kept, or the
backward is itself to be differentiated, the forward is walked once more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engines import triton
from ..engines.common import oom_retry
from ..engines.common.evaluate import Sizes
from ..engines.common.gradient_program import GradientProgram, zero_gradient
from ..program.backward import backward, numbered
from . import forward_settings
from .gradient_programs import PLAIN, Gradient, Walker
from .replay_steps import Steps

_MOST = 64  # kinds of tensors
Needs = tuple[bool, ...]


class Saved(NamedTuple):
    """What a backward is given: the inputs that are tensors, the outputs and (if there is one) the buffer of what was
    kept; a cotangent per output; the inputs that are numbers."""

    tensors: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    numbers: tuple[Any, ...]

    def kind(self) -> tuple | None:
        """All that kernels look at in them; None where one is not a plain tensor."""
        found: list[Any] = []
        for v in (*self.tensors, *self.cotangents):
            if v is None:
                found.append(None)
            elif type(v) in PLAIN:
                found += (v.dtype, v.shape, v.stride(), v.data_ptr() & 15)
            else:
                return None
        return tuple(found)


class Rewind:
    """The backward of a program in one situation. ``results``: what those of its pass are called in the forward's
    tape, where they are outputs or lie in the buffer ``kept``."""

    def __init__(self, steps: Steps, walker: Walker, sizes: Sizes, results: Sequence[str], kept: triton.Buffer):
        self.steps, self.walker, self.sizes, self.results, self.kept = steps, walker, sizes, results, kept
        self.settings = forward_settings.now()
        self.tapes: dict[tuple, triton.Tape | None] = {}
        self.gradients: dict[tuple, Gradient] = {}
        self.counted: dict[tuple, tuple[triton.Counted | None, list[int]]] = {}

    def tape(self, needs: Needs, saved: Saved) -> triton.Tape | None:
        """The tape for tensors like these, if there is one."""
        kind = saved.kind()
        if kind is None:
            return None
        key = (needs, *kind, *self._signs(needs, saved)) if saved.numbers else (needs, *kind)
        found: Any = self.tapes.get(key, self)  # None: there is no tape
        return self._met(key, needs, saved) if found is self else found

    def _signs(self, needs: Needs, saved: Saved) -> tuple:
        """What kernels look at in numbers that a backward makes of those it is given, whose own signs are fixed."""
        counted, places = self._counted(needs, _there(saved))
        return () if counted is None else triton.signs(counted(*[saved.numbers[k] for k in places]))

    def _counted(self, needs: Needs, given: tuple[bool, ...]) -> tuple[triton.Counted | None, list[int]]:
        """A gradient program's arithmetic of numbers, and which of those that are saved it takes."""
        found = self.counted.get((needs, given))
        if found is None:
            ready, names = self.gradient(needs, given).ready, self.steps.script.inputs
            numbers = [k for k, name in enumerate(names) if name in self.steps.numbers]
            counted = Steps(self.steps.engine, ready.program, ready.numbers).counted(self.sizes)
            found = self.counted[needs, given] = counted, [numbers.index(k) for k in ready.sources if k in numbers]
        return found

    def _met(self, key: tuple, needs: Needs, saved: Saved) -> triton.Tape | None:
        if len(self.tapes) < _MOST:
            with forward_settings.again(self.settings):
                self.tapes[key] = oom_retry.run_or_fall_back(self._tape, lambda *_: None, (needs, saved), self.sizes)
        return self.tapes.get(key)

    def gradient(self, needs: Needs, given: tuple[bool, ...]) -> Gradient:
        """The gradients that are needed as a program of the inputs, the pass's results and the cotangents given."""
        found = self.gradients.get((needs, given))
        if found is None:
            inputs, names = self.steps.inputs, self.steps.script.inputs
            outputs = backward(self.steps.program, inputs, needs, given)
            others = [*(f"P{k}" for k in range(len(self.results))), *(f"c{k}" for k in range(len(given)))]
            numbers = tuple(name in self.steps.numbers for name in names)
            ready = GradientProgram.of(numbered("x", inputs), others, outputs, needs, numbers, self.steps.program.exact)
            found = self.gradients[needs, given] = Gradient(ready, inputs, self.walker, True)
        return found

    def walked(self, needs: Needs, saved: Saved) -> list[Tensor | None]:
        """The gradients by a walk over their program."""
        pool, count = self._pool(saved), len(needs)
        return self.gradient(needs, _there(saved))(self.sizes, pool[:count], pool[count:])

    def again(self, needs: Needs, saved: Saved) -> list[Tensor | None]:
        """The gradients of a forward that is walked once more; differentiable where that is asked for."""
        graph, leaves = torch.is_grad_enabled(), self._leaves(saved)
        run = self.walker(self.steps.program, self.steps.numbers, False)
        with torch.enable_grad():
            given = [v.detach().requires_grad_() if n and not graph else v for v, n in zip(leaves, needs, strict=True)]
            found = run(self.sizes, *given)
            pairs = zip(totals(found, self.sizes) if self.steps.total else found, saved.cotangents, strict=True)
            moving = [(y, g) for y, g in pairs if g is not None and y.requires_grad]
            wanted = [v for v, n in zip(given, needs, strict=True) if n]
            roots, seeds = [y for y, _ in moving], [g for _, g in moving]
            grads = iter(torch.autograd.grad(roots, wanted, seeds, create_graph=graph, allow_unused=True))
        made = [next(grads) if n else None for n in needs]
        return [zero_gradient(v) if n and g is None else g for v, n, g in zip(given, needs, made, strict=True)]

    def _leaves(self, saved: Saved) -> list[Any]:
        """The program's inputs in their order."""
        tensors, numbers = iter(saved.tensors), iter(saved.numbers)
        return [next(numbers if name in self.steps.numbers else tensors) for name in self.steps.script.inputs]

    def _pool(self, saved: Saved) -> list[Any]:
        """The inputs of gradient programs: those of the forward, the pass's results, and the cotangents."""
        first = len(self.steps.inputs) - len(saved.numbers)
        known = dict(zip(self.steps.script.returned, saved.tensors[first:], strict=False))
        if self.kept.places:
            known |= self.kept.views(saved.tensors[-1])
        shape, total = (*self.sizes.batch, self.sizes.rows), self.steps.total
        cotangents = [g.expand(shape) if total and g is not None else g for g in saved.cotangents]
        return [*self._leaves(saved), *(known[name] for name in self.results), *cotangents]

    def _tape(self, needs: Needs, saved: Saved) -> triton.Tape | None:
        ready = self.gradient(needs, _there(saved)).ready
        steps, pool = Steps(self.steps.engine, ready.program, ready.numbers), self._pool(saved)
        moved = self.kept.places and saved.tensors[-1].data_ptr() % 16  # its parts are not where kernels expect them
        if moved or not ready.program.outputs:
            return None
        recorded = steps.recorded([pool[k] for k in ready.sources], self.sizes)
        if recorded is None:
            return None
        grads: list[str | None] = [None] * len(needs)
        returned = iter(steps.script.returned)
        for place, e in ready.outputs:
            grads[place] = None if e is None else next(returned)
            leaf, form = pool[place], recorded.forms.get(str(grads[place]))
            if form != (tuple(leaf.shape), leaf.dtype):
                return None  # zeros, or a gradient that is still to be summed or raised
        inputs, tensors, parts = self._names(dict(zip(ready.sources, steps.script.names, strict=True)), saved)
        if recorded.looked & parts.keys():
            return None
        tape = triton.Tape(recorded, inputs, tensors, [None, *grads], None, self.sizes, parts)
        return tape if tape.lean else None

    def _names(self, used: dict[int, str], saved: Saved) -> tuple[list[str], list[str], dict[str, tuple[str, int]]]:
        """What a tape calls all that is saved, in its order, and the parts of what was kept; ``used``: what the
        inputs of a gradient program are called there, by their places in the pool."""
        names, count = self.steps.script.inputs, len(self.steps.inputs)
        of = lambda k: used.get(k, f"unused_{k}")
        outputs, parts = {name: f"unused_{name}" for name in self.steps.script.returned}, {}
        for k, name in enumerate(self.results, count):
            if name in outputs:
                outputs[name] = of(k)
            elif k in used:
                parts[used[k]] = ("saved", self.kept.places[name])
        tensors = [of(k) for k in range(count) if names[k] not in self.steps.numbers]
        tensors += [*outputs.values(), *(["saved"] if self.kept.places else [])]
        tensors += [of(count + len(self.results) + k) for k in range(len(saved.cotangents))]
        numbers = [of(k) for k in range(count) if names[k] in self.steps.numbers]
        return [*tensors, *numbers], [t for t in tensors if not t.startswith("unused")], parts


def totals(found: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """The sums over all rows, of every batch element, of numbers per row."""
    shape, filled = (
        (*sizes.batch, sizes.rows),
        functools.partial(torch.full, (), dtype=sizes.compute, device=sizes.device),
    )
    return [(v if isinstance(v, Tensor) else filled(v)).expand(shape).sum() for v in found]


def _there(saved: Saved) -> tuple[bool, ...]:
    return tuple([g is not None for g in saved.cotangents])
