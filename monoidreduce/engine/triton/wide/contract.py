"""Sums of vectors with a panel's weights, as groups of warps take turns at them: Gluon, on Hopper.

The vendor's products are as fast while they multiply; they wait to read what they add to and to write what they have.
Where sums over few indices are added to others, that is a fifth of the time. Here one group writes while the other one
multiplies (``text/contract_text.py``).

As many tiles as there are processors run at a time. Those of the last, incomplete round are cut along the folded axis,
so that all processors share them, where there is memory for the parts (``Cut``).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import hardware
from .. import boxes, describe, launch, staged
from ..kept import Again, Kept, Kernels
from ..plan import KernelPlan
from ..text import contract_text
from ..text.contract_text import DEPTH, OTHERS, Form
from ..text.paired_text import TILE

PLAN = KernelPlan(TILE, DEPTH, 4, 1)
WIDER = TILE + OTHERS
PART = TILE * TILE * 4  # bytes of the sums of a part
_LEAST = 16  # blocks of a part: less would be copying and writing
_SHORT = 3072  # folded indices
_LONG = 2**17
_ROUNDS = 8
_PADDED = 1.04
_MOST = 16  # parts of a tile
_KINDS = 1024

_TEXT = '''"""The parts of sums, added up."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["kept_size", "width", "whole", "tail", "parts", "tiles", "turns"])
def combine_parts(
    out, sums, out_s, kept_size, width, whole, tail, parts, tiles, turns,
    TILE: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):
    own = tl.program_id(0) // (TILE // ROWS)
    many = 16 * turns
    first = (whole + own) // many * 16
    size = tl.minimum(tiles - first, 16)
    rest = (whole + own) % many
    row = tl.program_id(0) % (TILE // ROWS) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, TILE)
    kept = (first + rest % size) * TILE + row
    feature = rest // size * TILE + lane
    inside = (kept < kept_size)[:, None] & (feature < width)[None, :]
    place = sums + own * (TILE * TILE) + row[:, None] * TILE + lane[None, :]
    total = tl.zeros([ROWS, TILE], tl.float32)
    for part in range(0, parts):
        total += tl.load(place + part * tail * (TILE * TILE), mask=inside, other=0.0)
    at = out + kept.to(tl.int64)[:, None] * out_s + feature[None, :]
    if ADD:
        total += tl.load(at, mask=inside, other=0).to(tl.float32)
    tl.store(at, total, mask=inside)
'''
_kernels = Kernels(_TEXT)


@dataclass(frozen=True)
class Cut:
    """``whole`` tiles as they are, then ``tail`` tiles in ``parts`` parts each."""

    whole: int
    tail: int = 0
    parts: int = 1

    @property
    def units(self) -> int:
        return self.whole + self.tail * self.parts


def cut(tiles: int, blocks: int, processors: int, room: int) -> Cut:
    """How tiles of so many blocks are shared; ``room``: how many parts there is memory for."""
    best, found = float(-(-tiles // processors)), Cut(tiles)
    rounds = tiles // processors
    for whole in {max(0, rounds - 1) * processors, rounds * processors}:
        tail = tiles - whole
        for parts in range(2, min(_MOST, blocks // _LEAST, room // max(1, tail)) + 1):
            time = whole / processors + -(-tail * parts // processors) / parts
            if tail and time < best - 0.03:
                best, found = time, Cut(whole, tail, parts)
    return found


def width_of(kept: int, folded: int, features: int, processors: int) -> int | None:
    """Features of a tile; None where the vendor's product is as fast."""
    if folded <= _SHORT:
        padded = -(-features // WIDER) * WIDER
        rounds = -(-kept // TILE) * padded / WIDER / processors
        return WIDER if rounds >= _ROUNDS and padded <= _PADDED * features else None
    tiles = -(-kept // TILE) * -(-features // TILE)
    return TILE if folded >= _LONG and tiles < 2 * processors else None


def into(out: Tensor, weights: Tensor, vectors: Tensor, add: bool, room: int) -> bool:
    """out[l, d] (+)= weights[l, n] @ vectors[n, d], accumulated in float32 and rounded once; False where the vendor's
    product is as fast, or there is no such kernel. ``room``: bytes that may be allocated meanwhile."""
    key = (add, room, out.device, *map(_form, (out, weights, vectors)))
    if key not in _READY:
        while len(_READY) >= _KINDS:
            del _READY[next(iter(_READY))]
        _READY[key] = _ready(out, weights, vectors, add, room)
    ready = _READY[key]
    if ready is None:
        return False
    ready(out, weights, vectors)
    return True


def _form(t: Tensor) -> tuple:
    return t.dtype, t.shape, t.stride(), t.data_ptr() & 15


def _ready(out: Tensor, weights: Tensor, vectors: Tensor, add: bool, room: int) -> Ready | None:
    """Hopper, 16 bits, all of it where tensor descriptors can be."""
    one = out.dtype is weights.dtype is vectors.dtype and out.dtype in hardware.SIXTEEN
    if not one or not staged.on(out.device) or weights.shape[1] < _LEAST * DEPTH:
        return None
    panel = weights if weights.stride(1) == 1 else weights.mT
    if not all(boxes.fits(t) for t in (out, panel, vectors)):
        return None
    processors = describe.processors(out.device)
    width = width_of(weights.shape[0], weights.shape[1], vectors.shape[1], processors)
    if width is None:
        return None
    over = "cols" if panel is weights else "rows"
    found = Ready(out, weights, vectors, Form(str(out.dtype)[6:], over, add, width), processors, room)
    return found if found.cut.tail or width > TILE else None


class Ready:
    """A sum on tensors of given types, shapes, strides and alignment."""

    def __init__(self, out: Tensor, weights: Tensor, vectors: Tensor, form: Form, processors: int, room: int):
        self.form = form
        tiles, turns, blocks = -(-out.shape[0] // TILE), -(-out.shape[1] // form.width), -(-weights.shape[1] // DEPTH)
        self.cut = own = cut(tiles * turns, blocks, processors, room // PART if form.width == TILE else 0)
        self.grid = min(processors, own.units)
        self.numbers = (own.whole, max(1, own.tail), own.parts, blocks, tiles, turns, own.units)
        template = functools.partial(boxes.template, dims=(), staged=True)
        panel, block = (weights, (TILE, DEPTH)) if form.over == "cols" else (weights.mT, (DEPTH, TILE))
        self.boxes = [template(panel, block=block), template(vectors, block=(DEPTH, TILE))]
        if form.width > TILE:
            self.boxes.append(template(vectors, block=(DEPTH, OTHERS)))
        self.out_box = template(out, block=(TILE, form.piece))
        self.kept = Kept()

    def __call__(self, out: Tensor, weights: Tensor, vectors: Tensor) -> None:
        own, sums = self.cut, out
        if own.tail:
            sums = torch.empty(own.tail * own.parts, TILE, TILE, dtype=torch.float32, device=out.device)
        given = (weights if self.form.over == "cols" else weights.mT, vectors, vectors)
        copied = [boxes.filled(box, t) for box, t in zip(self.boxes, given, strict=False)]
        arguments = [*copied, boxes.filled(self.out_box, out), sums, *self.numbers]
        self.kept((), functools.partial(self._first, arguments, out.device), arguments)
        if own.tail:
            told = (out, sums, out.stride(0), *out.shape, own.whole, own.tail, own.parts, *self.numbers[4:6])
            constants = dict(TILE=TILE, ROWS=_ROWS, ADD=self.form.add)
            _kernels("combine_parts", (own.tail * (TILE // _ROWS),), told, constants)

    def _first(self, arguments: list[Any], device: torch.device) -> Again | None:
        kernel, ragged = contract_text.kernel(self.form), self.cut.tail > 0
        return launch.execute(launch.Call(kernel, PLAN, self.grid, tuple(arguments), False, "ieee", ragged, device))


_ROWS = 16  # of a tile that are combined by one program instance
_READY: dict[tuple, Ready | None] = {}
