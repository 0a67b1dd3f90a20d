"""Memory as something a test can ask about: what a call allocates, op by op, forward and backward.

Every operation that torch runs is watched; storages that were not there before are counted while they live. What an
operation allocates inside itself and frees before it returns is not seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoidreduce.runtime.dry_run import LiveMemory
from tests.support.comparison import flatten, is_float


@dataclass(frozen=True)
class Usage:
    """Bytes: the largest single storage and the operation that made it, and the most alive at once."""

    largest: int
    culprit: str
    peak: int


class Watch(LiveMemory):
    """Counts the storages made inside the block, and remembers which operation made the largest."""

    def __init__(self, given: Sequence[Any]):
        super().__init__([t for t in given if isinstance(t, Tensor)])
        self.largest, self.culprit, self.func = 0, "", None

    def on_operation(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        self.func = func

    def on_growth(self, t: Tensor, size: int) -> None:
        if size > self.largest:
            self.largest, self.culprit = size, f"{self.func} -> {str(t.dtype)[6:]}{list(t.shape)}"


def usage(function: Callable, args: Sequence[Any], *, backward: bool = True, held: Sequence[Any] = ()) -> Usage:
    """What a call and its backward allocate; the cotangents are ones, expanded. ``held``: what else was there."""
    given = [a.detach().requires_grad_(backward) if is_float(a) else a for a in args]
    with Watch([*given, *held]) as watch:
        values = [v for v in flatten(function(*given)) if v.requires_grad]
        if values:
            ones = [torch.ones((), dtype=v.dtype).expand(v.shape) for v in values]
            inputs = [a for a in given if is_float(a)]
            grads = torch.autograd.grad(values, inputs, ones, allow_unused=True)
            del grads
        del values
    return Usage(watch.largest, watch.culprit, watch.peak)
