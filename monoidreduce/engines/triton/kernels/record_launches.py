"""Steps run once by the engine, for what their launches are: a tape (``launch_recipes.py``) is written from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....program.expression import Expr
from ....program.lower import Fold
from ...common import bounded_cache
from ...common.evaluate import Sizes
from ...common.torch_code import BatchArithmetic, Side, Step, batch_index
from ..codegen.kernel_spec import Unsupported
from ..launch import jit_module
from ..launch.launch_recipes import NumberArithmetic, ProgramLaunch, Recipe, RecordedLaunches, TorchCall
from . import elementwise, fold_kernel
from .split_combine import Joined


class Beside(NamedTuple):
    """A launch beside that of a step. It writes to some of the step's results (their number among those of
    :class:`Made`) or to memory of its own (a name), and has memory of others after the step's leaves."""

    recipe: Recipe
    written: tuple[int | str, ...]
    read: tuple[str, ...] = ()


class Made(NamedTuple):
    """How a launch is made again, and which of a step's results it makes; where it makes parts of them, ``joined`` are
    the launches that make them whole. ``shifted`` come before it: each makes a leaf that it has after all others.
    ``before`` and ``after``: what else writes to the same results."""

    recipe: Recipe
    results: Sequence[int]
    joined: Sequence[Joined] = ()
    shifted: Sequence[Recipe] = ()
    begun: Recipe | None = None  # makes what the launch adds its last result up in, and has after all leaves
    before: Sequence[Beside] = ()
    after: Sequence[Beside] = ()

    def launched(self, feeds: tuple[str | float, ...], names: Sequence[str]) -> Iterator[ProgramLaunch]:
        """These launches in a program, where the step's leaves and results are called so."""
        whole = tuple(names[k] for k in self.results)
        written = {k for one in self.joined for k in one.written}
        parts = tuple(f"{name}_parts" if k in written else name for k, name in enumerate(whole))
        last = parts[-1:] if self.begun is not None else ()
        made = tuple(f"{whole[0]}_shift{k}" for k in range(len(self.shifted)))
        for name, recipe in zip(made, self.shifted, strict=True):
            yield ProgramLaunch(recipe, feeds, (name,))
        if self.begun is not None:
            yield ProgramLaunch(self.begun, feeds, last)
        call = lambda name: whole[name] if isinstance(name, int) else f"{whole[0]}_{name}"
        beside = lambda one: ProgramLaunch(one.recipe, (*feeds, *map(call, one.read)), tuple(map(call, one.written)))
        yield from map(beside, self.before)
        yield ProgramLaunch(self.recipe, (*feeds, *made, *last), parts[: len(self.recipe.outputs)])
        yield from map(beside, self.after)
        for one in self.joined:
            yield ProgramLaunch(one.recipe, (*parts, *feeds), tuple(whole[k] for k in one.written))


# The results of a fold, and its launches; None: something else is done
Folder = Callable[[Fold, list[Any]], tuple[Sequence[Tensor], Sequence[Made] | None]]


def record(
    steps: Sequence[Step],
    values: dict[str, Any],
    folder: Folder,
    sizes: Sizes,
    numbers: NumberArithmetic | None = None,
    total: bool = False,
    types: Mapping[str, torch.dtype] | None = None,
) -> RecordedLaunches | None:
    """The launches of steps on these inputs, which are run on the way; None where there is more to them.

    ``numbers``: the arithmetic of numbers among them; ``total``: of the last step's results the sums are asked for;
    ``types``: of vectors that arithmetic of one side returns in another type than its own."""
    if numbers is not None:
        values.update(zip(numbers.results, numbers(*(values[name] for name in numbers.names)), strict=True))
    if not jit_module.can_relaunch(sizes.device) or any(
        isinstance(v, int) and abs(v) >= fold_kernel.SMALL for v in values.values()
    ):
        return None  # (other integers of the same kind may be larger than kernels take)
    found: list[ProgramLaunch] = []
    calls: list[TorchCall] = []
    given = set(values)
    constants: dict[str, Tensor] = {}
    called: tuple[str, ...] = ()
    for n, step in enumerate(steps):
        if isinstance(step.what, Expr):
            if step.what.op == "batch_index":
                if sizes.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    return None  # what is constants must not lie in a graph's memory
                parts = ("batch_index", sizes.batch, sizes.device)
                same = bounded_cache.compute_once(parts, functools.partial(batch_index, sizes), sizes.device)
                constants[str(step.results[0])] = values[str(step.results[0])] = same
            continue
        leaves = [values[name] if isinstance(name, str) else name for name in step.feeds]
        if isinstance(step.what, BatchArithmetic):
            if not given.issuperset(name for name in step.feeds if isinstance(name, str)):
                return None  # of what is made on the way addresses alone are known
            run, name = functools.partial(step.what.run, sizes), str(step.results[0])
            values[name] = run(*leaves)
            calls.append(TorchCall(run, step.feeds, name))
            continue
        names = tuple(name or f"r{n}_{k}" for k, name in enumerate(step.results))
        if isinstance(step.what, Fold):
            called = names
            results, launches = folder(step.what, leaves)
        else:
            asked = {k: (types or {})[name] for k, name in enumerate(names) if name in (types or {})}
            results, launches = _side(step.what, leaves, sizes, total and step is steps[-1], asked)
        if not launches:
            return None
        for one in launches:
            found += one.launched(step.feeds, names)
        values.update(zip(names, results, strict=True))
    recorded = RecordedLaunches(found, called, numbers, constants, calls)
    return recorded if recorded.looked <= given else None  # of what is made on the way addresses alone are known


def _side(
    side: Side, leaves: list[Any], sizes: Sizes, total: bool, types: Mapping[int, torch.dtype]
) -> tuple[Sequence[Tensor], Sequence[Made] | None]:
    try:
        one = elementwise.ElementwiseLaunch(side, leaves, sizes, total, types)
    except Unsupported:
        return [], None
    results, recipe = one(leaves), one.recipe()
    return results, None if recipe is None else [Made(recipe, range(len(side.outputs)))]
