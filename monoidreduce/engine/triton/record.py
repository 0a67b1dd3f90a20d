"""Steps run once by the engine, for what their launches are: a tape (``tape.py``) is written from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...program.expr import Expr
from ...program.lower import Fold
from ..evaluate import Sizes
from ..script import Step
from ..sides import Side
from . import ahead, launch, sides, source
from .spec import Unsupported
from .tape import Counted, Launched, Recipe, Recorded

# The results of a fold, and which of them each of its launches makes, and how again; None: something else is done
Folder = Callable[[Fold, list[Any]], tuple[Sequence[Tensor], list[tuple[list[int], Recipe | None]] | None]]


def record(
    steps: Sequence[Step],
    values: dict[str, Any],
    folder: Folder,
    sizes: Sizes,
    counted: Counted | None = None,
    total: bool = False,
) -> Recorded | None:
    """The launches of steps on these inputs, which are run on the way; None where there is more to them.

    ``counted``: the arithmetic of numbers among them; ``total``: of the last step's results the sums are asked for."""
    if counted is not None:
        values.update(zip(counted.results, counted(*(values[name] for name in counted.names)), strict=True))
    if not source.repeats(sizes.device) or any(isinstance(v, int) and abs(v) >= launch.SMALL for v in values.values()):
        return None  # (other integers of the same kind may be larger than kernels take)
    look(steps, values, folder, sizes, total)
    found = _recorded(steps, values, folder, sizes, total)
    return None if found is None else Recorded(*found, counted)


def look(steps: Sequence[Step], values: dict[str, Any], folder: Folder, sizes: Sizes, total: bool = False) -> None:
    """Compile the kernels of steps together; nothing is run."""
    ahead.compiled(sizes.device, lambda: _recorded(steps, dict(values), folder, sizes, total))


def _recorded(
    steps: Sequence[Step], values: dict[str, Any], folder: Folder, sizes: Sizes, total: bool
) -> tuple[list[Launched], tuple[str, ...]] | None:
    """The launches, and what the results of the last fold are called."""
    found: list[Launched] = []
    called: tuple[str, ...] = ()
    for n, step in enumerate(steps):
        if isinstance(step.what, Expr):
            continue
        leaves = [values[name] if isinstance(name, str) else name for name in step.feeds]
        names = tuple(name or f"r{n}_{k}" for k, name in enumerate(step.results))
        if isinstance(step.what, Fold):
            called = names
            results, launches = folder(step.what, leaves)
        else:
            results, launches = _side(step.what, leaves, sizes, total and step is steps[-1])
        for theirs, recipe in launches or [([], None)]:
            if recipe is not None:
                found.append(Launched(recipe, step.feeds, tuple(names[k] for k in theirs)))
            elif not ahead.looks():
                return None
        ahead.blank(results)
        values.update(zip(names, results, strict=True))
    return found, called


def _side(side: Side, leaves: list[Any], sizes: Sizes, total: bool) -> tuple[Sequence[Tensor], list | None]:
    try:
        one = sides.Launch(side, leaves, sizes, total)
    except Unsupported:
        return [], None
    return one(leaves), [(list(range(len(side.outputs))), one.recipe())]
