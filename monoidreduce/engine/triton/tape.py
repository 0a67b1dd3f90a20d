"""A program's launches, one behind the other: what is left of a call whose kernels are known.

Steps that are nothing but launches are written out as one Python function: it allocates what is returned, one buffer
for what is kept for a backward and one for what lies between, and starts each kernel with the addresses in their
places. There is no look-up and no loop: at small sizes the host is what is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..evaluate import Form, Room
from . import source

_ALIGNED = 128  # bytes: where parts of a buffer begin


class Leaf(NamedTuple):
    """A place among a launch's arguments for one of its leaves."""

    at: int
    is_tensor: bool


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


class Recorded(NamedTuple):
    """The launches of a program, in order, and what the results of its one fold are called."""

    launches: list[Launched]
    results: tuple[str, ...]

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
        self.room = Room(((size,), torch.uint8), device)

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """The tensors in it; those of one that came back in another place, where numbers cannot begin, in a copy."""
        whole = whole.clone() if whole.storage_offset() % _ALIGNED else whole
        return {
            name: whole[at : at + _bytes(*self.forms[name])].view(self.forms[name][1]).view(self.forms[name][0])
            for name, at in self.places.items()
        }


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


class Tape:
    """``inputs``: the names of what it is given, ``tensors`` those of them that are tensors and are read, ``parts``
    those of what lies in one of them, behind so many bytes. ``run`` returns what ``returned`` names (None: None), and
    what is kept."""

    def __init__(
        self,
        recorded: Recorded,
        inputs: Sequence[str],
        tensors: Sequence[str],
        returned: Sequence[str | None],
        kept: Sequence[str],
        device: torch.device,
        parts: Mapping[str, tuple[str, int]] | None = None,
    ):
        launches, self.forms = recorded.launches, recorded.forms
        self.kept = Buffer({name: self.forms[name] for name in kept}, device)
        between = [name for name in self.forms if name not in (*returned, *kept)]
        self.between = Buffer({name: self.forms[name] for name in between}, device)
        self.scope: dict[str, Any] = {"empty": torch.empty_like}
        self.places = {name: f"{name}_at" for name in (*tensors, *returned) if name is not None}
        lines = [f"{name}_at = {name}.data_ptr()" for name in tensors]
        for name in dict.fromkeys(name for name in returned if name is not None):
            lines += [
                f"{name} = empty({self._held(Room(self.forms[name], device).model)})",
                f"{name}_at = {name}.data_ptr()",
            ]
        for owner, buffer in (("kept", self.kept), ("between", self.between)):
            if buffer.places:
                lines += [f"{owner} = empty({self._held(buffer.room.model)})", f"{owner}_at = {owner}.data_ptr()"]
                self.places |= {name: f"{owner}_at + {at}" for name, at in buffer.places.items()}
        self.places |= {name: f"{owner}_at + {at}" for name, (owner, at) in (parts or {}).items()}
        opening, given = lines, ", ".join(inputs)
        found = ", ".join([*(str(name) for name in returned), ""])
        closing = f"return ({found}), {'kept' if self.kept.places else None}"
        plain = [*opening, *(self._call(one) for one in launches), closing]
        self.text = "\n    ".join([f"def plainly({given}):", *plain])
        if all(isinstance(one.recipe.again, source.Again) for one in launches):
            self.scope["stream"] = source.stream(device)
            straight = ["s = stream()", "if s is None:", f"    return plainly({given})"]
            straight += [*opening, *(self._start(one) for one in launches), closing]
            self.text += "\n\n\n" + "\n    ".join([f"def run({given}):", *straight])
        exec(compile(self.text, "<tape>", "exec"), self.scope)
        self.run: Callable[..., tuple[tuple[Tensor, ...], Tensor | None]] = self.scope.get("run", self.scope["plainly"])

    def _held(self, thing: Any) -> str:
        name = f"k{len(self.scope)}"
        self.scope[name] = thing
        return name

    def _arguments(self, one: Launched) -> list[str]:
        found = [self.places[name] for name in one.outputs]
        for given in one.recipe.arguments:
            leaf = one.feeds[given.at] if isinstance(given, Leaf) else None
            if isinstance(given, Leaf) and given.is_tensor:
                found.append(self.places[str(leaf)])
            elif isinstance(leaf, str):
                found.append(leaf)
            else:
                found.append(self._constant(given if leaf is None else leaf))
        return found

    def _constant(self, value: Any) -> str:
        if isinstance(value, Tensor):
            self._held(value)  # what is given is its address alone
            value = value.data_ptr()
        return repr(value) if type(value) is int else self._held(value)

    def _call(self, one: Launched) -> str:
        return f"{self._held(one.recipe.again)}({', '.join(self._arguments(one))})"

    def _start(self, one: Launched) -> str:
        again: Any = one.recipe.again
        fixed = [self._constant(v) for v in (*again.before, *again.after)]
        given = [*fixed[:3], "s", *fixed[3:], *self._arguments(one), *map(self._held, again.constants)]
        return f"{self._held(again.start)}({', '.join(given)})"
