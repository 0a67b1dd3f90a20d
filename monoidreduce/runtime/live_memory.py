"""Bytes alive at once: every operation that torch runs inside a block is seen, and the storages that it made counted.

What an operation allocates inside itself and frees before it returns is not seen.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import torch_operator


@functools.cache
def _composite(func: Any) -> bool:
    """Whether an operator is made of others alone. Asking the dispatcher takes longer than most operators."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


_DIVISIONS = ("aten::floor_divide", "aten::remainder", "aten::div")


class Alive(TorchDispatchMode):
    """Counts the storages made inside the block, those of ``given`` left out."""

    def __init__(self, given: Sequence[Tensor] = ()):
        super().__init__()
        self.given = {id(t.untyped_storage()): t.untyped_storage() for t in given}
        self.live: dict[int, int] = {}
        self.total = self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here; the guard against it would import dynamo, which takes longer than all of us."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.name == "monoidreduce::fold":  # one operator to a mode: look inside
            with self:
                result = torch_operator._run(*args, **(kwargs or {}))
        elif _composite(func):  # in there, what is made of others comes whole
            with self:
                result = func.decompose(*args, **(kwargs or {}))
        else:
            result = self.run(func, args, kwargs or {})
            self.noted(func, args, kwargs or {}, result)
        for t in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(t, Tensor):
                self._see(t)
        return result

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation. What runs here is often a rehearsal on numbers that are made up: where the divisor of an
        integer is 0 among them, which torch answers with an error, it is 1."""
        divides = func._schema.name in _DIVISIONS and isinstance(args[1], Tensor) and not args[1].is_floating_point()
        return (
            func(args[0], args[1].masked_fill(args[1] == 0, 1), *args[2:], **kwargs)
            if divides
            else func(*args, **kwargs)
        )

    def noted(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """What else is to be known of an operation."""

    def size(self, t: Tensor) -> int:
        """Bytes of a tensor's storage."""
        return 0 if t.is_meta else t.untyped_storage().nbytes()

    def grew(self, t: Tensor, size: int) -> None:
        """A storage is new, or larger than it was."""

    def _see(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key, size = id(storage), self.size(t)
        if key in self.given or self.live.get(key, -1) >= size:
            return
        if key not in self.live:
            weakref.finalize(storage, self._gone, key).atexit = False
        self.total += size - self.live.get(key, 0)
        self.live[key] = size
        self.peak = max(self.peak, self.total)
        self.grew(t, size)

    def _gone(self, key: int) -> None:
        self.total -= self.live.pop(key, 0)
