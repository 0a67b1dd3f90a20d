"""Launchers, cached: what a first launch compiled is launched again without a look-up, by all that it depends on.

Every kernel on a panel, and every small kernel whose text no program generates, is launched through this file; so this
is also where launches are reported to a recorder (``replay.py``).
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ...common.bounded_cache import BoundedCache
from . import jit_module

_MOST = 4096  # a launcher is made for one grid: hundreds of lengths of several kernels
Again = Callable[..., Any]


class LaunchRecorder(Protocol):
    """What launches on panels are reported to."""

    def launched(self, again: Again | None, arguments: Sequence[Any]) -> None:
        """A kernel was launched with these arguments; None: it cannot be launched again."""

    def chose_panels(self, chooser: Any, panels: Any) -> None:
        """A walk over panels begins; ``chooser``: what chose them."""


recording: contextvars.ContextVar[LaunchRecorder | None] = contextvars.ContextVar("recording", default=None)


def report(again: Again | None, arguments: Sequence[Any]) -> None:
    """Report a launch to the recorder, if there is one."""
    recorder = recording.get()
    if recorder is not None:
        recorder.launched(again, arguments)


class LaunchCache:
    """Launchers by their keys; the oldest is dropped where they are too many."""

    def __init__(self, most: int = _MOST):
        self.made: BoundedCache[tuple, Again] = BoundedCache(most)

    def __call__(self, key: tuple, first: Callable[[], Again | None], arguments: Sequence[Any]) -> Again | None:
        """Launch: again, where a launch with this key was made before, else by ``first``, which gives the launcher."""
        again = self.made.get(key)
        if jit_module.is_collecting():
            return again or first()
        if again is not None:
            again(*arguments)
        else:
            again = first()
            if again is not None:
                self.made.keep(key, again)
        report(again, arguments)
        return again


class Kernels:
    """The kernels of a text that is not generated from a program."""

    def __init__(self, text: str):
        self.text, self.kept = text, LaunchCache()

    def __call__(
        self,
        name: str,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        options: Mapping[str, int] | None = None,
    ) -> Again | None:
        """Launch one on the device of its first argument; what launches it again, if there is. ``constants``: in the
        order of the text, after all others; ``options``: for the compiler."""
        options = options or {}
        found, given = [name, grid, arguments[0].device, *constants.values(), *options.values()], []
        for v in arguments:
            if isinstance(v, int):
                found += specialized(v)
                given.append(v)
            else:
                address = v.data_ptr()
                found += v.dtype, address & 15
                given.append(address)
        key = tuple(found)
        again = self.kept.made.get(key)
        if again is None or jit_module.is_collecting():
            return self.kept(key, lambda: self._first(name, grid, arguments, constants, options), arguments)
        again(*given)
        report(again, arguments)
        return again

    def _first(
        self,
        name: str,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        options: Mapping[str, int],
    ) -> Again | None:
        device = arguments[0].device
        with jit_module.use_device(device):
            kernel = getattr(jit_module.load_module(self.text), name)
            compiled = jit_module.launch(kernel, grid, arguments, {**constants, **options})
            return jit_module.make_relauncher(compiled, grid, tuple(constants.values()), device)


def specialized(v: int) -> tuple[bool, ...]:
    """What a compiled kernel may rely on of an integer."""
    return v == 1, v & 15 == 0, -(2**31) <= v < 2**31
