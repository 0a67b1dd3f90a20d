"""Steps run once by the engine, for what their launches are: a tape (``tape.py``) is written from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...program.lower import Fold
from ..evaluate import Sizes
from ..script import Step
from ..sides import Side
from . import launch, sides
from . import summed as summing
from .spec import Unsupported
from .tape import Launched, Recipe, Recorded

# The results of a fold, and which of them each of its launches makes, and how again; None: something else is done
Folder = Callable[[Fold, list[Any]], tuple[Sequence[Tensor], list[tuple[list[int], Recipe | None]] | None]]


def record(steps: Sequence[Step], values: dict[str, Any], folder: Folder, sizes: Sizes) -> Recorded | None:
    """The launches of steps on these inputs, which are run on the way; None where there is more to them."""
    if any(isinstance(v, int) and abs(v) >= launch.SMALL for v in values.values()):
        return None  # others of the same kind may be larger than kernels take
    found: list[Launched] = []
    called: tuple[str, ...] = ()
    for n, step in enumerate(steps):
        leaves = [values[name] if isinstance(name, str) else name for name in step.feeds]
        names = tuple(name or f"r{n}_{k}" for k, name in enumerate(step.results))
        if isinstance(step.what, Fold):
            called = names
            results, launches = folder(step.what, leaves)
        else:
            results, launches = _side(step.what, leaves, sizes)
        for theirs, recipe in launches or [([], None)]:
            if recipe is None:
                return None
            found.append(Launched(recipe, step.feeds, tuple(names[k] for k in theirs)))
        values.update(zip(names, results, strict=True))
    return Recorded(found, called)


def summed(recorded: Recorded, names: Sequence[str], shape: tuple[int, ...], values: dict[str, Any]) -> Recorded | None:
    """The same, and then the sums of some results of this shape, each called by its own name and ``_sum``."""
    found = list(recorded.launches)
    for name in names:
        recipe = summing.recipe(values[name]) if tuple(values[name].shape) == shape else None
        if recipe is None:
            return None
        found.append(Launched(recipe, (name,), (f"{name}_sum",)))
    return Recorded(found, recorded.results)


def _side(side: Side, leaves: list[Any], sizes: Sizes) -> tuple[Sequence[Tensor], list | None]:
    try:
        one = sides.Launch(side, leaves, sizes)
    except Unsupported:
        return [], None
    return one(leaves), [(list(range(len(side.outputs))), one.recipe())]
