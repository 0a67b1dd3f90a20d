"""Memory as something a test can ask about: what a call allocates, op by op, forward and backward.

Every operation that torch runs is watched; storages that were not there before are counted while they live. What an
operation allocates inside itself and frees before it returns is not seen.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monoidreduce.engine import library
from tests.layers_compare import flatten, is_float


@dataclass(frozen=True)
class Usage:
    """Bytes: the largest single storage and the operation that made it, and the most alive at once."""

    largest: int
    culprit: str
    peak: int


class Watch(TorchDispatchMode):
    """Counts the storages made inside the block."""

    def __init__(self, given: Sequence[Any]):
        super().__init__()
        self.given = {id(t.untyped_storage()): t.untyped_storage() for t in given if isinstance(t, Tensor)}
        self.live: dict[int, int] = {}
        self.largest, self.culprit, self.total, self.peak = 0, "", 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.monoidreduce.fold.default:  # one operator to a mode: look inside
            with self:
                result = library._run(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        for t in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(t, Tensor):
                self._see(t, func)
        return result

    def _see(self, t: Tensor, func: Any) -> None:
        storage = t.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self.given or self.live.get(key, -1) >= size:
            return
        if key not in self.live:
            weakref.finalize(storage, self._gone, key).atexit = False
        self.total += size - self.live.get(key, 0)
        self.live[key] = size
        self.peak = max(self.peak, self.total)
        if size > self.largest:
            self.largest, self.culprit = size, f"{func} -> {str(t.dtype)[6:]}{list(t.shape)}"

    def _gone(self, key: int) -> None:
        self.total -= self.live.pop(key, 0)


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
