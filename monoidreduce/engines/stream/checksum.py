"""Checksums of tensors, and the check that a source of chunks gives the same columns every time it is read.

A gradient, and a program of several passes, read a source again. A source that is then shorter, longer, in another
order or simply different would give wrong numbers without a sign, so every later reading is compared with the first.
Used by ``chunked_passes.py`` and by ``stream.py``, which also stores the checksums of the rows in a saved state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import StreamError

Chunk = tuple[int, int, dict[str, Any]]  # first column, how many, and the column arguments by name

_LINE_WORDS = 1024  # words of a line: sums along both axes of [lines, width] are weighted by their position
_WORDS_AT_ONCE = 2**24  # words that are summed at once where they must be widened to int64 first: bounds the copy
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(t: Tensor) -> Tensor:
    """A 64-bit checksum of a tensor's bits, as a 0-dim int64 tensor on its device; the same on every device.

    Position-dependent, so that a permutation changes it. It reads the tensor twice and does not synchronise.
    """
    flat = t.detach().contiguous().view(-1)
    flat = flat.view(_INTEGERS[flat.element_size()])
    step = 8 // flat.element_size()
    if flat.numel() % step == 0 and flat.storage_offset() % step == 0 and flat.data_ptr() % 8 == 0:
        return _sum_words(flat.view(torch.int64)) + flat.nbytes
    # Unaligned, or a length that is no multiple of 8 bytes: the same 64-bit words, assembled from shorter ones.
    total = flat.new_full((), flat.nbytes, dtype=torch.int64)  # so that trailing zeros count
    for at in range(0, flat.numel(), _WORDS_AT_ONCE):
        padded = flat[at : at + _WORDS_AT_ONCE]
        padded = torch.cat([padded, padded.new_zeros(-padded.numel() % step)])  # a copy starts aligned
        total = total + _sum_words(padded.view(torch.int64), at // step)
    return total


def _sum_words(words: Tensor, start: int = 0) -> Tensor:
    """Words weighted by their position; arithmetic modulo 2**64, so that no order of summation changes it."""
    full = words.numel() // _LINE_WORDS * _LINE_WORDS
    lines = words[:full].view(-1, _LINE_WORDS)
    first = start // _LINE_WORDS
    total = (lines.sum(1) * _weights(first, first + lines.shape[0], words.device)).sum()
    total = total + (lines.sum(0) * _weights(0, _LINE_WORDS, words.device)).sum()
    rest = words[full:]
    line = _weights(first + lines.shape[0], first + lines.shape[0] + 1, words.device)
    return total + (rest * (_weights(0, rest.numel(), words.device) + line)).sum()


def _weights(start: int, stop: int, device: torch.device) -> Tensor:
    """Odd pseudo-random weights, one for each position (a multiplicative hash)."""
    n = torch.arange(start + 1, stop + 1, device=device) * -7046029254386353131
    return (n ^ (n >> 29)) * -4658895280553007687 | 1


def row_checksums(rows: Mapping[str, Any]) -> dict[str, int]:
    """Checksums of the arguments that are not streamed, by name, as stored in a saved state."""
    found = {}
    for name, value in rows.items():
        if isinstance(value, bool | int | float) or (hasattr(value, "item") and getattr(value, "ndim", 1) == 0):
            number = value.item() if hasattr(value, "item") else value
            value = torch.tensor(float(number), dtype=torch.float64)  # 1, 1.0 and a tensor of it are the same argument
        if isinstance(value, Tensor):
            found[name] = int(checksum(value))
    return found


@dataclass(frozen=True)
class _ChunkRecord:
    """One chunk that was read: its first column, its length, the types and shapes of its tensors, and checksums."""

    start: int
    count: int
    kinds: tuple[tuple[str, torch.dtype, torch.Size], ...]
    sums: Tensor | None


class Readings:
    """All readings of one source: each later one must give what the first gave.

    Args:
        source: the source's name, for messages.
        again: whether there can be a second reading; otherwise nothing is computed.
        verify: whether chunks are compared by checksum. The number of columns is compared always.
    """

    def __init__(self, source: str, again: bool, verify: bool):
        self.source, self.again, self.verify = source, again, verify
        self._first: list[_ChunkRecord] | None = None

    def watch(self, chunks: Iterator[Chunk], at_once: bool = False) -> Iterator[Chunk]:
        """The chunks of one reading, compared on the way.

        On a GPU checksums are compared after the last chunk, so that the host need not wait for each; with
        ``at_once`` before the chunk is handed on (as always on a CPU).
        """
        seen: list[_ChunkRecord] = []
        pending: list[int] = []
        for start, count, columns in chunks:
            seen.append(self._look(start, count, columns))
            if self._first is not None and self.verify and not self._compare(seen, at_once):
                pending.append(len(seen) - 1)
            yield start, count, columns
            del columns  # while the next chunk comes, nobody holds this one
        first = self._first
        if first is None:
            self._first = seen
            return
        before, now = (sum(s.count for s in each) for each in (first, seen))
        if before != now or (self.verify and len(first) != len(seen)):
            raise self._error(
                f"gave {before} columns in {len(first)} chunks when it was first read, but {now} columns in "
                f"{len(seen)} chunks when it was read again"
            )
        if pending:
            sums = [torch.stack([s for k in pending if (s := each[k].sums) is not None]) for each in (first, seen)]
            equal = (sums[0] == sums[1]).all(-1).tolist()
            if not all(equal):
                raise self._different(pending[equal.index(False)], seen)

    def _look(self, start: int, count: int, columns: Mapping[str, Any]) -> _ChunkRecord:
        if not (self.again and self.verify):
            return _ChunkRecord(start, count, (), None)
        tensors = sorted((n, v) for n, v in columns.items() if isinstance(v, Tensor))
        sums = torch.stack([checksum(v) for _, v in tensors]) if tensors else None
        return _ChunkRecord(start, count, tuple((n, v.dtype, v.shape) for n, v in tensors), sums)

    def _compare(self, seen: list[_ChunkRecord], at_once: bool) -> bool:
        """Whether the comparison of the last chunk is over; False leaves it for the end."""
        first, k = self._first or [], len(seen) - 1
        now = seen[k]
        if k >= len(first):
            raise self._error(
                f"gave {len(first)} chunks when it was first read, and now chunk {k} (from column {now.start}) as well"
            )
        before = first[k]
        if before.kinds != now.kinds or before.count != now.count:
            raise self._different(k, seen)
        if before.sums is None or now.sums is None:
            return True
        if now.sums.device.type != "cpu" and not at_once:
            return False
        if not torch.equal(before.sums, now.sums):
            raise self._different(k, seen)
        return True

    def _different(self, k: int, seen: list[_ChunkRecord]) -> StreamError:
        before, now = (self._first or [])[k], seen[k]
        if before.count != now.count:
            what = f"it had {before.count} columns, and has {now.count}"
        elif before.kinds != now.kinds:
            what = "its tensors have other types or shapes"
        else:
            what = "its values differ"
        return self._error(
            f"gave another chunk {k} (columns {before.start} to {before.start + before.count}) when it was read again: "
            f"{what}"
        )

    def _error(self, what: str) -> StreamError:
        return StreamError(
            detail=f"{self.source} {what}",
            fix="Gradients, and ops of several passes, read a source more than once: give one that yields the same "
            "columns in the same order every time (no shuffling, no files that change); verify=False skips the "
            "comparison of values, at your own risk",
        )
