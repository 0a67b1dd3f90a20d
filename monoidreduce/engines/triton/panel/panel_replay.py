"""Walks over panels that were met before: run as they were written down (``operation_replay.py``).

A walk is found again by its program, its sizes, the kinds of its tensors, its numbers and what was asked for. The first
of a kind is walked, the second is heard, from the third on it is run. Without a budget the panels depend on how
much memory is free: they are chosen each time, and must be the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....plan import budget
from ....program.lower import Lowered
from ...common import matmul, skip_small_tiles
from ...common.evaluate import Sizes
from ..launch import jit_module
from ..launch.operation_replay import Reel, heard
from . import epilogue, row_kernel

_MOST = 32  # kinds of walks
_ONCES = 256
_FEW = 4  # of one kind, with other panels
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
Walked = Callable[[Lowered, Mapping[str, Any], Sizes, int], list[Any]]


@dataclass(frozen=True)
class _Heard:
    """A walk that was written down."""

    reel: Reel
    plans: tuple  # the tiles of its kernels
    choices: tuple[tuple[Any, Any], ...]  # of every walk over panels: what chose these, and they

    def serves(self, asked: bool) -> bool:
        """Whether it would be the same now; ``asked``: the room is."""
        return self.plans == _plans() and (
            asked or all(plan.choose_default_layout() == layout for plan, layout in self.choices)
        )


@dataclass
class _Kind:
    """Walks of one kind: the program is held, so that its id stays its own."""

    program: Lowered
    lost: bool = False  # whether there is more to it than can be written down
    reels: list[_Heard] = field(default_factory=list)


_KINDS: dict[tuple, _Kind] = {}
_ONCE: dict[tuple, None] = {}  # the keys of walks that were met once: they may not be again, and push out no others
_lock = threading.Lock()


def repeated(walked: Walked, program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, room: int) -> list[Any]:
    """What ``walked`` returns."""
    key = _key(program, inputs, sizes, room)
    kind = None if key is None else _KINDS.get(key) or _met(key, program)
    if kind is None or kind.lost:
        return walked(program, inputs, sizes, room)
    asked = bool(room) or budget.asked() is not None
    for known in kind.reels:
        if known.serves(asked):
            found = known.reel.run(*[v for v in inputs.values() if isinstance(v, Tensor)])
            return walked(program, inputs, sizes, room) if found is None else list(found)
    if len(kind.reels) >= _FEW:
        return walked(program, inputs, sizes, room)
    return _heard(kind, walked, inputs, sizes, room)


def _key(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, room: int) -> tuple | None:
    """All that a walk depends on but its tiles; None where it may depend on more."""
    if budget.parts() > 1 or skip_small_tiles.active() is not None or not jit_module.repeats(sizes.device):
        return None
    if sizes.shard is not None or matmul.rehearsed.get() or torch._C._are_functorch_transforms_active():
        return None
    key: list[Any] = [id(program), room, budget.asked(), sizes.rows, sizes.cols, sizes.device, sizes.compute]
    key += [*sizes.letters.values(), *inputs]
    grad, first = torch.is_grad_enabled(), dict[int, int]()
    for at, v in enumerate(inputs.values()):
        if not isinstance(v, Tensor):
            key += (type(v), v, v == 0 and str(v))  # zeros have signs
        elif type(v) not in _PLAIN or v.device != sizes.device or (grad and v.requires_grad):
            return None
        else:
            address = v.data_ptr()
            key += (v.dtype, v.shape, v.stride(), address & 15, first.setdefault(address, at))
    return tuple(key)


def _met(key: tuple, program: Lowered) -> _Kind | None:
    """The kind of a walk that was met before; None of one that was not."""
    with _lock:
        if key not in _ONCE:
            _keep(_ONCE, key, None, _ONCES)
            return None
        del _ONCE[key]
        return _keep(_KINDS, key, _Kind(program), _MOST)


def _keep(store: Any, key: tuple, value: Any, most: int) -> Any:
    while len(store) >= most:
        del store[next(iter(store))]
    return store.setdefault(key, value)


def _heard(kind: _Kind, walked: Walked, inputs: Mapping[str, Any], sizes: Sizes, room: int) -> list[Any]:
    """Walk, and write down what is done."""
    tensors = [v for v in inputs.values() if isinstance(v, Tensor)]
    found, reel, choices = heard(lambda *_: walked(kind.program, inputs, sizes, room), tensors, sizes.device)
    if reel is None:
        kind.lost = True
    else:
        kind.reels.append(_Heard(reel, _plans(), choices))
    return found


def _plans() -> tuple:
    """The tiles of all kernels on panels."""
    return (*epilogue.PLANS.values(), *epilogue.SHALLOW.values(), *row_kernel.PLANS.values())
