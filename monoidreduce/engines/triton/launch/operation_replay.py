"""A walk over panels, written down: its operations and launches one behind the other, as one Python function.

Which rows and columns a panel has, where results go, what a kernel is called with: all of that depends on the program,
the sizes and the kinds of the tensors alone, and takes the host longer than the device takes for a small panel. So what
was heard of one walk (``operation_recorder.py``) is written out: allocations, views and addresses at fixed distances,
products,
launches. Storages are let go after their last use, so that no more is held than in the walk itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.evaluate import Allocator
from . import encoded_descriptors, jit_module
from .operation_recorder import Box, Launched, Listener, Operation, Place, Step, Unheard, places

_LONG = 2**14  # steps: what takes longer to write down is done each time
_aten = torch.ops.aten
_ALLOCATES = (_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default)
# what takes torch half the time by another name
_SHORTER: dict[Any, Callable] = {
    _aten.mm.out: torch.mm,
    _aten.addmm.out: torch.addmm,
    _aten.copy_.default: Tensor.copy_,
    _aten.zero_.default: Tensor.zero_,
    _aten.add_.Tensor: Tensor.add_,
    getattr(_aten.mm, "dtype_out", None): torch.mm,  # since torch 2.8 or so
    getattr(_aten.addmm, "dtype_out", None): torch.addmm,
}


class Reel:
    """Steps on ``inputs``, by name, of which each begins where its place says; ``held``: numbers that are always the
    same. ``run`` takes the inputs and gives what ``returned`` says; None where launches are watched, or another device
    is the current one: then nothing was done."""

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Mapping[str, Place],
        returned: Sequence[Any],
        held: Mapping[str, Tensor],
        device: torch.device,
    ):
        made = _Writer(steps, inputs, held, device)
        for step in needed(steps, returned):
            made.step(step)
        self.text = made.text(inputs, returned)
        exec(compile(self.text, "<reel>", "exec"), made.scope)
        self.run: Callable[..., tuple[Any, ...] | None] = made.scope["run"]


def heard(
    run: Callable[..., list[Any]], tensors: Sequence[Tensor], device: torch.device
) -> tuple[list[Any], Reel | None, tuple[tuple[Any, Any], ...]]:
    """What is found for these tensors; how it is done again, None where there is more to it than can be written down;
    and the panels that were chosen on the way."""
    named = {f"x{k}": v for k, v in enumerate(tensors)}
    listener = Listener(named)
    with listener:
        found = run(*tensors)
    try:
        if listener.lost or len(listener.steps) > _LONG:
            raise Unheard(listener.lost)
        given = {name: whole(name, t) for name, t in named.items()}
        reel = Reel(listener.steps, given, listener.noted(tuple(found)), listener.held, device)
    except Unheard:
        return found, None, ()
    return found, reel, tuple(listener.choices)


class _Writer:
    """Writes steps as lines. ``scope``: what they name."""

    def __init__(
        self, steps: Sequence[Step], inputs: Mapping[str, Place], held: Mapping[str, Tensor], device: torch.device
    ):
        self.scope: dict[str, Any] = {"empty": torch.empty_like, "box": encoded_descriptors.at, **held}
        self.opened: dict[tuple, tuple[Any, Mapping[int, encoded_descriptors.Opened]]] = {}  # descriptors of launchers
        self.given, self.device = inputs.keys() | held.keys(), device
        self.whole = {**inputs, **{name: whole(name, t) for name, t in held.items()}}  # how storages are bound
        self.lines: list[str] = []
        self.last: dict[str, int] = {}  # where each name is needed last
        self.using: list[str] = []  # by the step that is written
        self.names: dict[Any, str] = {}  # of views, addresses and what is held
        launchers = [s.again for s in steps if isinstance(s, Launched)]
        self.starts = bool(launchers) and all(isinstance(again, jit_module.Again) for again in launchers)

    def step(self, step: Step) -> None:
        """Write a step, and before it what it needs."""
        self._launch(step) if isinstance(step, Launched) else self._operate(step)
        self.using.clear()

    def text(self, inputs: Iterable[str], returned: Sequence[Any]) -> str:
        """All of it as a function ``run``; names are let go after their last use."""
        self._line(f"return ({', '.join([*map(self._value, returned), ''])})")
        gone: dict[int, list[str]] = {}
        for name, at in self.last.items():
            if name not in self.given and at < len(self.lines) - 1:
                gone.setdefault(at, []).append(name)
        for at, names in gone.items():
            self.lines[at] += f"; del {', '.join(names)}"
        opening = [f"def run({', '.join(inputs)}):"]
        if self.starts:
            self.scope["stream"] = jit_module.stream(self.device)
            opening += ["s = stream()", "if s is None:", "    return None"]
        return "\n    ".join([*opening, *self.lines])

    def _line(self, text: str, makes: Sequence[str] = ()) -> None:
        """A line of a step, or one that makes a name for it: what the step uses is needed until its own line."""
        self.last |= dict.fromkeys((*makes, *self.using), len(self.lines))
        self.lines.append(text)

    def _used(self, name: str) -> str:
        self.using.append(name)
        return name

    # Steps

    def _operate(self, step: Operation) -> None:
        made = [p.store if p else "_" for p in step.made]
        self.whole |= {p.store: p for p in step.made if p}
        if step.function in _ALLOCATES and made != ["_"] and _is_dense(step.made[0]):
            place = step.made[0]
            assert place is not None
            room = Allocator((place.shape, place.dtype), self.device)
            self._line(f"{made[0]} = empty({self._held(room.model, (place.shape, place.dtype))})", made)
            return
        function = self._held(_SHORTER.get(step.function, step.function), step.function)
        given = [*map(self._value, step.arguments), *(f"{name}={self._value(v)}" for name, v in step.named.items())]
        call = f"{function}({', '.join(given)})"
        self._line(f"{', '.join(made)} = {call}" if any(step.made) else call, [name for name in made if name != "_"])

    def _launch(self, step: Launched) -> None:
        again = step.again
        if not self.starts:
            given = [self._argument(v) for v in step.arguments]
            self._line(f"{self._held(again, id(again))}({', '.join(given)})")
            return
        start, taken_apart = self._opened(again, step.arguments)
        given = [self._argument(v, taken_apart.get(k)) for k, v in enumerate(step.arguments)]
        before, after = ([self._value(v) for v in part] for part in (again.before, again.after))
        given = [*before, "s", *after, *given, *map(self._value, again.constants)]
        self._line(f"{self._held(start, id(start))}({', '.join(given)})")

    def _opened(
        self, again: jit_module.Again, arguments: Sequence[Any]
    ) -> tuple[Any, Mapping[int, encoded_descriptors.Opened]]:
        """What starts a kernel, and its descriptors taken apart: the same for all launches with descriptors of one
        form."""
        templates = [v.template if isinstance(v, Box) else None for v in arguments]
        key = (id(again), *(_form(v) for v in templates if v is not None))
        if key not in self.opened:
            self.opened[key] = again.opened(templates)
        return self.opened[key]

    # What they are given

    def _argument(self, value: Any, box: encoded_descriptors.Opened | None = None) -> str:
        """An argument of a kernel: tensors by their addresses; ``box``: a descriptor, taken apart."""
        if isinstance(value, Place):
            return self._address(value)
        if not isinstance(value, Box):
            return self._value(value)
        address = self._address(value.base)
        if box is None:
            return f"box({self._held(value.template, _form(value.template))}, {address})"
        return f"*{self._held(box, id(box))}[{address}]"

    def _address(self, place: Place) -> str:
        store, key = place.store, (place.store, "address")
        if key not in self.names:
            self.names[key] = f"{store}_at"
            self._line(f"{store}_at = {self._used(store)}.data_ptr()")
        self._used(store)
        return f"{store}_at + {place.offset}" if place.offset else f"{store}_at"

    def _view(self, place: Place) -> str:
        if place == self.whole[place.store]:
            return self._used(place.store)
        if place not in self.names:
            whole, item = self._typed(place.store, place.dtype), place.dtype.itemsize
            begin = f"{self._begin(place.store)} + " if place.store in self.given else ""
            name = self.names[place] = f"v{len(self.names)}"
            call = f"{whole}.as_strided({place.shape}, {place.stride}, {begin}{place.offset // item})"
            self._line(f"{name} = {call}", [name])
        return self._used(self.names[place])

    def _typed(self, store: str, dtype: torch.dtype) -> str:
        """A storage whose numbers are of a type."""
        if self.whole[store].dtype is dtype:
            return self._used(store)
        if store in self.given:  # it begins anywhere
            raise Unheard("an input is read as numbers of another type")
        key = (store, dtype)
        if key not in self.names:
            name = self.names[key] = f"{store}_{str(dtype)[6:]}"
            self._line(f"{name} = {self._used(store)}.view(-1).view({self._held(dtype, dtype)})", [name])
        return self._used(self.names[key])

    def _begin(self, store: str) -> str:
        """Where an input begins in its storage."""
        key = (store, "begin")
        if key not in self.names:
            self.names[key] = f"{store}_begin"
            self._line(f"{store}_begin = {store}.storage_offset()")
        return self.names[key]

    def _value(self, value: Any) -> str:
        if isinstance(value, Place):
            return self._view(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._value, value))}]"
        if type(value) is tuple:
            return f"({', '.join([*map(self._value, value), ''])})"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self._held(value, (type(value), value) if type(value) is float else id(value))

    def _held(self, thing: Any, key: Any) -> str:
        key = ("held", key)
        if key not in self.names:
            self.names[key] = f"k{len(self.scope)}"
            self.scope[self.names[key]] = thing
        return self.names[key]


def _form(template: Any) -> tuple:
    """What tells descriptors apart."""
    more = (getattr(template, name, None) for name in ("padding", "layout"))
    return type(template), *map(tuple, (template.shape, template.strides, template.block_shape)), *more


def whole(name: str, t: Tensor) -> Place:
    """All of a tensor that begins where its name says."""
    return Place(name, 0, t.dtype, tuple(t.shape), t.stride())


def _is_dense(place: Place | None) -> bool:
    return place is not None and place.stride == torch.empty(place.shape, device="meta").stride()


def needed(steps: Sequence[Step], returned: Sequence[Any]) -> list[Step]:
    """The steps without those whose results nobody reads: of numbers that were computed while it was heard."""
    live, found = {p.store for p in places(tuple(returned))}, []
    for step in reversed(steps):
        if isinstance(step, Operation):
            made = {p.store for p in step.made if p}
            if not step.writes and live.isdisjoint(made):
                continue
            live |= {p.store for p in places((*step.arguments, *step.named.values()))}
        else:
            live |= {p.store for p in places(step.arguments)}
        found.append(step)
    return found[::-1]
