"""A program's launches, one behind the other: what is left of a call whose kernels are known.

Steps that are nothing but launches are written out as one Python function: it allocates what is returned, one buffer
for what is kept for a backward and one for what lies between, and starts each kernel with the addresses in their
places. There is no look-up and no loop: at small sizes the host is what is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.evaluate import Allocator, Form, Sizes
from ...common.torch_code import Step, number
from . import encoded_descriptors, jit_module

_ALIGNED = 128  # bytes: where parts of a buffer begin
_MOST = 64  # numbers that are remembered
_LITTLE = 2**20  # bytes


class Leaf(NamedTuple):
    """A place among a launch's arguments for one of its leaves."""

    at: int
    is_tensor: bool


class Boxed(NamedTuple):
    """A place for the tensor descriptor of one of its leaves, which is a tensor."""

    at: int
    template: Any


class Found(NamedTuple):
    """Room for as many arguments as ``places`` says, which ``find`` finds at every launch from some of its leaves:
    numbers, or tensors that were given."""

    leaves: tuple[int, ...]
    find: Callable[..., tuple]
    places: int


class Recipe(NamedTuple):
    """How a kernel is launched again: the forms of its outputs, and what comes after them."""

    again: Callable[..., None]
    outputs: tuple[Form, ...]
    arguments: tuple[Any, ...]


class Launched(NamedTuple):
    """A launch in a program: what its leaves (names, or numbers) and its outputs are called there."""

    recipe: Recipe
    feeds: tuple[str | float, ...]
    outputs: tuple[str, ...]


class Counted:
    """A program's arithmetic of numbers alone, found again for the same numbers. ``names`` are those of the inputs that
    are numbers, in their order; what it gives is called ``results``."""

    def __init__(self, steps: Sequence[Step], names: Sequence[str], sizes: Sizes):
        self.steps, self.names, self.sizes = steps, names, sizes
        self.results = [str(step.results[0]) for step in steps]
        self.kept: dict[tuple[str, ...], tuple] = {}

    def __call__(self, *given: Any) -> tuple:
        key = tuple(map(repr, given))  # tells -0.0 from 0.0 and 1 from True
        found = self.kept.get(key)
        return self._met(key, given) if found is None else found

    def _met(self, key: tuple[str, ...], given: tuple) -> tuple:
        known = dict(zip(self.names, given, strict=True))
        for step, name in zip(self.steps, self.results, strict=True):
            e: Any = step.what
            feeds = tuple(known[feed] if isinstance(feed, str) else feed for feed in step.feeds)
            known[name] = self.sizes.of(e.attrs[0]) if e.op == "size" else number(e, feeds)
        if len(self.kept) >= _MOST:
            self.kept.clear()
        found = self.kept[key] = tuple(known[name] for name in self.results)
        return found


class Recorded(NamedTuple):
    """The launches of a program, in order, what the results of its one fold are called, the arithmetic of numbers
    that comes before them, and the tensors that are the same in every call."""

    launches: list[Launched]
    results: tuple[str, ...]
    counted: Counted | None = None
    held: Mapping[str, Tensor] = {}

    @property
    def looked(self) -> set[str]:
        """The names of what is looked at at every launch."""
        given = [(one, v) for one in self.launches for v in one.recipe.arguments if isinstance(v, Found)]
        return {name for one, v in given for k in v.leaves if isinstance(name := one.feeds[k], str)}

    @property
    def forms(self) -> dict[str, Form]:
        """Of everything that is launched for, by name."""
        pairs = [zip(one.outputs, one.recipe.outputs, strict=True) for one in self.launches]
        return {name: form for found in pairs for name, form in found}


class Buffer:
    """Several tensors in one allocation, one behind the other."""

    def __init__(self, forms: dict[str, Form], device: torch.device):
        self.forms, self.places, size = forms, dict[str, int](), 0
        for name, (shape, dtype) in forms.items():
            self.places[name] = size
            size += -(-_bytes(shape, dtype) // _ALIGNED) * _ALIGNED
        self.size, self.room = size, Allocator(((size,), torch.uint8), device)

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """The tensors in it; those of one that came back in another place, where numbers cannot begin, in a copy."""
        whole = whole.clone() if whole.storage_offset() % _ALIGNED else whole
        return {
            name: whole[at : at + _bytes(*self.forms[name])].view(self.forms[name][1]).view(self.forms[name][0])
            for name, at in self.places.items()
        }


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _tuple(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


class Tape:
    """``inputs``: the names of what it is given, ``tensors`` those of them that are tensors and are read, ``parts``
    those of what lies in one of them, behind so many bytes. ``run`` returns what ``returned`` names (None: None). Where
    something may be ``kept`` for a backward (a sequence, perhaps empty), it also returns all that one needs: the
    tensors, what is returned and the buffer of what is kept; and the inputs that are numbers."""

    def __init__(
        self,
        recorded: Recorded,
        inputs: Sequence[str],
        tensors: Sequence[str],
        returned: Sequence[str | None],
        kept: Sequence[str] | None,
        sizes: Sizes,
        parts: Mapping[str, tuple[str, int]] | None = None,
    ):
        forms, shown, device = recorded.forms, [name for name in returned if name is not None], sizes.device
        self.kept = Buffer({name: forms[name] for name in kept or ()}, device)
        self.between = Buffer({name: f for name, f in forms.items() if name not in (*shown, *(kept or ()))}, device)
        most = max(_LITTLE, sum(_bytes(*forms[name]) for name in shown) // 16)
        self.lean = self.between.size <= most  # what lies between is let go sooner, step by step
        self.scope: dict[str, Any] = {
            "empty": torch.empty_like,
            "counted": recorded.counted,
            "box": encoded_descriptors.at,
        }
        self.places = {name: f"{name}_at" for name in (*tensors, *shown)}
        self.places |= {name: f"{owner}_at + {at}" for name, (owner, at) in (parts or {}).items()}
        self.places |= {name: self._constant(t) for name, t in recorded.held.items()}
        counted = recorded.counted
        opening = [] if counted is None else [f"{_tuple(counted.results)} = counted({', '.join(counted.names)})"]
        opening += [f"{name}_at = {name}.data_ptr()" for name in tensors]
        opening += [line for name in shown for line in self._allocated(name, Allocator(forms[name], device))]
        for owner, buffer in (("kept", self.kept), ("between", self.between)):
            if buffer.places:
                opening += self._allocated(owner, buffer.room)
                self.places |= {name: f"{owner}_at + {at}" for name, at in buffer.places.items()}
        found = [_tuple(map(str, returned))]
        if kept is not None:
            found.append(_tuple([*tensors, *shown, *(["kept"] if self.kept.places else [])]))
            found.append(_tuple(name for name in inputs if name not in tensors))
        closing = f"return {', '.join(found)}"
        self.text = self._written(recorded.launches, ", ".join(inputs), opening, closing, device)
        exec(compile(self.text, "<tape>", "exec"), self.scope)
        self.run: Callable[..., tuple] = self.scope.get("run", self.scope["plainly"])

    def _written(
        self, launches: Sequence[Launched], given: str, opening: list[str], closing: str, device: torch.device
    ) -> str:
        """``plainly`` launches kernels as anybody would; ``run`` starts them, where nobody watches."""
        lines = [f"def plainly({given}):", *opening, *(self._call(one) for one in launches), closing]
        text = "\n    ".join(lines)
        if not all(isinstance(one.recipe.again, jit_module.Again) for one in launches):
            return text
        self.scope["stream"] = jit_module.stream(device)
        lines = [f"def run({given}):", "s = stream()", "if s is None:", f"    return plainly({given})", *opening]
        return text + "\n\n\n" + "\n    ".join([*lines, *(self._start(one) for one in launches), closing])

    def _allocated(self, name: str, room: Allocator) -> list[str]:
        return [f"{name} = empty({self._held(room.model)})", f"{name}_at = {name}.data_ptr()"]

    def _held(self, thing: Any) -> str:
        name = f"k{len(self.scope)}"
        self.scope[name] = thing
        return name

    def _arguments(self, one: Launched, boxes: Mapping[int, encoded_descriptors.Opened]) -> list[str]:
        """What a kernel is given; ``boxes``: its descriptors, taken apart."""
        found, place = [self.places[name] for name in one.outputs], len(one.outputs)
        for given in one.recipe.arguments:
            leaf = one.feeds[given.at] if isinstance(given, Leaf | Boxed) else None
            if isinstance(given, Boxed):
                address, box = self.places[str(leaf)], boxes.get(place)
                whole = f"box({self._held(given.template)}, {address})" if box is None else ""
                found.append(whole or f"*{self._held(box)}[{address}]")
            elif isinstance(given, Leaf) and given.is_tensor:
                found.append(self.places[str(leaf)])
            elif isinstance(leaf, str):
                found.append(leaf)
            elif isinstance(given, Found):
                leaves = [one.feeds[k] for k in given.leaves]
                named = [v if isinstance(v, str) else self._held(v) for v in leaves]
                found.append(f"*{self._held(given.find)}({', '.join(named)})")
            else:
                found.append(self._constant(given if leaf is None else leaf))
            place += given.places if isinstance(given, Found) else 1
        return found

    def _constant(self, value: Any) -> str:
        if isinstance(value, Tensor):
            self._held(value)  # what is given is its address alone
            value = value.data_ptr()
        return repr(value) if type(value) is int else self._held(value)

    def _call(self, one: Launched) -> str:
        return f"{self._held(one.recipe.again)}({', '.join(self._arguments(one, {}))})"

    def _start(self, one: Launched) -> str:
        again: Any = one.recipe.again
        templates: list[Any] = [None] * len(one.outputs)
        for v in one.recipe.arguments:
            templates += [None] * v.places if isinstance(v, Found) else [getattr(v, "template", None)]
        start, boxes = again.opened(templates)
        fixed = [self._constant(v) for v in (*again.before, *again.after)]
        given = [*fixed[:3], "s", *fixed[3:], *self._arguments(one, boxes), *map(self._held, again.constants)]
        return f"{self._held(start)}({', '.join(given)})"
