"""Encoded tensor descriptors, cached by address.

Triton's launchers take descriptors apart in Python and have the driver encode them at every launch, which takes longer
than the launch itself. The result depends only on the kernel, the descriptor's shape and its address, so it is cached
by address: the allocator returns tensors of one shape to the same addresses.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

_MOST = 1024  # addresses of one argument
_ANYWHERE = 1 << 30  # any address will do: nothing is read
Start = Callable[..., None]


class Address:
    """Stands for a tensor at an address: launchers ask a descriptor's tensor for nothing else."""

    __slots__ = ("at",)

    def __init__(self, at: int):
        self.at = at

    def data_ptr(self) -> int:
        """Where it begins."""
        return self.at


def make_descriptor_at(template: Any, address: int) -> Any:
    """The descriptor of what lies at an address."""
    return replace_base(template, Address(address))


def replace_base(made: Any, v: Any) -> Any:
    """A descriptor for another tensor of the same shape, strides and alignment, or for none."""
    found = object.__new__(type(made))
    found.__dict__ = {**made.__dict__, "base": v}
    return found


class EncodedByAddress(dict[int, tuple]):
    """By address: what is given to a compiled kernel's function in place of one of its descriptors."""

    def __init__(self, made: Callable[[int], tuple]):
        super().__init__()
        self.made = made

    def __missing__(self, address: int) -> tuple:
        if len(self) >= _MOST:
            self.clear()
        found = self[address] = self.made(address)
        return found


def bypass_encoding(
    launch: Any, before: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Start, dict[int, EncodedByAddress]] | None:
    """Launch a kernel with descriptors that are encoded already: the C launch function and, by argument, a cache of
    encoded descriptors. None without descriptors, or if this Triton builds its launchers differently.

    ``launch`` takes ``before`` and the arguments; of these only the shapes of descriptors are read."""
    places = [k for k, v in enumerate(arguments) if is_descriptor(v)]
    found = _beneath(launch) if places else None
    if found is None:
        return None
    start, on = found

    def taken_apart(place: int, address: int) -> tuple:
        """The arguments that the launcher passes on for one descriptor."""
        seen: list[tuple] = []
        given = [
            _Marked.of(make_descriptor_at(v, address)) if k in places else object() for k, v in enumerate(arguments)
        ]
        on(lambda *passed: seen.append(passed[len(before) :]))(*before, *given)
        (passed,) = seen
        begins = [*(_begin(passed, v) for v in given), len(passed)]
        return tuple(int(v) if isinstance(v, _Marked) else v for v in passed[begins[place] : begins[place + 1]])

    try:
        taken_apart(places[0], _ANYWHERE)
    except Exception:  # of another make
        return None
    return start, {k: EncodedByAddress(functools.partial(taken_apart, k)) for k in places}


def is_descriptor(v: Any) -> bool:
    """Whether a value is a tensor descriptor."""
    return hasattr(v, "block_shape")


class _Marked(int):
    """An integer with an identity, to find a descriptor's fields among the arguments that a launcher passes on."""

    @classmethod
    def of(cls, box: Any) -> Any:
        """A descriptor with marked lengths."""
        box.shape = [cls(n) for n in box.shape]
        return box


def _begin(passed: Sequence[Any], given: Any) -> int:
    """Where an argument begins in what was passed on: a descriptor one place before its first length."""
    mark = given.shape[0] if is_descriptor(given) else given
    return next(k for k, v in enumerate(passed) if v is mark) - is_descriptor(given)


def _beneath(launch: Any) -> tuple[Start, Callable[[Start], Start]] | None:
    """The C function in a launcher's closure, and what makes the same launcher around another function."""
    cells = getattr(launch, "__closure__", None) or ()
    found = [k for k, cell in enumerate(cells) if isinstance(cell.cell_contents, types.BuiltinFunctionType)]
    if len(found) != 1:
        return None

    def on(other: Start) -> Start:
        closure = tuple(types.CellType(other) if k == found[0] else cell for k, cell in enumerate(cells))
        return types.FunctionType(launch.__code__, launch.__globals__, closure=closure)

    return cells[found[0]].cell_contents, on
