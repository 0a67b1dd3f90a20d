"""What a walk over panels does, heard while it is done: every operation of torch and every launch, in order.

What is heard can be done again on other tensors of the same kinds (``operation_replay.py``), so tensors are noted by
where they
lie: in which storage, how far from its beginning, in which form. Views are nothing but that; they are not noted as
operations. Whatever could turn out otherwise another time (a number read back from the device, a drawn one, memory
that nobody here allocated) ends the listening: ``lost`` says why.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import descriptors, launch_cache

_TINY = 16  # bytes: what was made elsewhere is held where it is no larger, a number that was written down
_OTHERWISE = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READS = torch.ops.aten._local_scalar_dense.default


@functools.cache
def _kind(func: Any) -> str:
    """What there is to hear of one of torch's operations."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return "made of others"
    if not _OTHERWISE.isdisjoint(func.tags):
        return "otherwise"
    if func._schema.is_mutable:
        return "writes"
    returned = func._schema.returns
    return "view" if returned and all(r.alias_info is not None for r in returned) else "makes"


class Unheard(Exception):
    """What was done cannot be done again by what was heard of it."""


class Place(NamedTuple):
    """A tensor: the name of its storage, bytes from where that begins, and its form."""

    store: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Box(NamedTuple):
    """A tensor descriptor, without its tensor."""

    template: Any
    base: Place


@dataclass(frozen=True)
class Operation:
    """One of torch's: ``made`` names the storages that it allocated, ``writes`` says whether it changes others."""

    function: Any
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    made: tuple[Place | None, ...]
    writes: bool


@dataclass(frozen=True)
class Launched:
    """One kernel: how it is launched again, and with what."""

    again: Any
    arguments: tuple[Any, ...]


Step = Operation | Launched


class Listener(TorchDispatchMode):
    """Hears all that is done inside its block. ``inputs``: the tensors that it is done to, by name."""

    def __init__(self, inputs: Mapping[str, Tensor]):
        super().__init__()
        self.steps: list[Step] = []
        self.choices: list[tuple[Any, Any]] = []  # of the walks: what chose their panels, and which
        self.held: dict[str, Tensor] = {}  # numbers that were made elsewhere
        self.fixed: set[str] = set()  # storages whose content depends on nothing that was given
        self.stores: dict[int, tuple[str, int]] = {}  # what storages are called, and where they begin
        self.tokens: list[Any] = []  # of blocks inside each other
        self.inputs, self.named, self.lost = inputs, 0, ""
        for name, t in inputs.items():
            if self.stores.setdefault(id(t.untyped_storage()), (name, t.data_ptr()))[1] != t.data_ptr():
                self.lost = "two inputs are parts of one tensor"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here; the guard against it would import dynamo."""
        return False

    def __enter__(self) -> Any:
        self.tokens.append(launch_cache.hearing.set(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        launch_cache.hearing.reset(self.tokens.pop())
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kind = _kind(func)
        if kind == "made of others":
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        try:
            if kind != "view" and not self.lost:
                self._hear(func, kind, args, kwargs or {}, result)
        except Unheard as reason:
            self.lost = str(reason)
        return result

    def _hear(self, func: Any, kind: str, args: tuple, named: dict[str, Any], result: Any) -> None:
        given = [self.place(v) for v in _tensors((args, named))]
        is_fixed = all(p.store in self.fixed for p in given)
        if func is _READS and is_fixed:
            return
        if kind == "otherwise":
            raise Unheard(f"{func} may turn out otherwise")
        writes, made = kind == "writes", tuple(self._made(t, is_fixed) for t in _tensors(result))
        if writes and not is_fixed:
            self.fixed -= {p.store for p in given}
        if writes or any(made):
            options = {name: self.noted(v) for name, v in named.items()}
            self.steps.append(Operation(func, self.noted(args), options, made, writes))

    def launched(self, again: Any, arguments: Sequence[Any]) -> None:
        """A kernel was launched."""
        try:
            if again is None:
                raise Unheard("a kernel is not launched again here")
            noted = self.noted(tuple(arguments))
        except Unheard as reason:
            self.lost = str(reason)
            return
        self.fixed -= {p.store for p in places(noted)}
        self.steps.append(Launched(again, noted))

    def begun(self, chooser: Any, panels: Any) -> None:
        """A walk over panels begins."""
        self.choices.append((chooser, panels))

    def noted(self, value: Any) -> Any:
        """A value with places for tensors."""
        if isinstance(value, Tensor):
            return self.place(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.noted, value))
        return (
            Box(descriptors.replace_base(value, None), self.place(value.base))
            if hasattr(value, "block_shape")
            else value
        )

    def place(self, t: Tensor) -> Place:
        """Where a tensor lies."""
        storage = t.untyped_storage()
        found = self.stores.get(id(storage))
        if found is None:
            if storage.nbytes() > _TINY:
                raise Unheard("memory that was allocated elsewhere")
            found = self._name(storage, "h", True)
            self.held[found[0]] = t.detach()
        if not t.numel():
            raise Unheard("a tensor of nothing lies nowhere")
        return Place(found[0], t.data_ptr() - found[1], t.dtype, tuple(t.shape), t.stride())

    def _made(self, t: Tensor, is_fixed: bool) -> Place | None:
        """Where a result lies, if that was allocated for it."""
        storage = t.untyped_storage()
        if id(storage) in self.stores:
            return None
        self._name(storage, "t", is_fixed)
        found = self.place(t)
        if found.offset:
            raise Unheard("a result that does not begin where its memory does")
        return found

    def _name(self, storage: Any, kind: str, is_fixed: bool) -> tuple[str, int]:
        name, key = f"{kind}{self.named}", id(storage)
        self.named += 1
        self.stores[key] = found = (name, storage.data_ptr())
        weakref.finalize(storage, self.stores.pop, key, None).atexit = False
        if is_fixed:
            self.fixed.add(name)
        return found


def places(value: Any) -> Iterator[Place]:
    """The places in what was noted."""
    if isinstance(value, Place):
        yield value
    elif isinstance(value, Box):
        yield value.base
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from places(v)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
