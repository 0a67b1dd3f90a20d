"""Which unit a worker does next, and what is left after one was lost. Knows nothing of Ray.

A worker stays with the row block that it holds as long as there is something to do for it; then it begins a block that
nobody has begun, and last it helps with a block that another one holds. The order decides how often rows are read; it
does not change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ...engines.stream import checksum
from ...errors import ArgumentError, StreamError
from ...plan import disk

# How a fold is cut into units of work: row blocks × stretches of columns, and the tree in which their states merge.
#
# The cut depends on the sizes alone, never on the number of workers or on which of them is faster. A stretch is folded
# chunk by chunk in order, and the states of a row block's stretches merge in one fixed binary tree. So the result has
# the same bits on one worker and on a hundred, and after any number of them were lost.

ROWS = 2**17  # rows of a block: each reads all columns once, so fewer blocks read less
LEAST_ROWS = 2**10
CHUNK = 2**16  # columns read and folded at once
LEAST_CHUNK = 2**12
PAIRS = 2**34  # of a unit: on one core, with 64 features, about a minute; what a lost worker has to do again
UNITS = 64  # at least so many, if the sizes allow: for workers to share


@dataclass(frozen=True, order=True)
class Node:
    """A node of a row block's merge tree in one pass: the stretches ``[index 2^level, (index + 1) 2^level)``."""

    stage: int
    block: int
    level: int
    index: int

    def at(self, level: int, index: int) -> Node:
        """Another node of the same tree."""
        return Node(self.stage, self.block, level, index)

    def __str__(self) -> str:
        return f"pass{self.stage}-rows{self.block:06d}-level{self.level:02d}-{self.index:06d}"


@dataclass(frozen=True)
class Grid:
    """The cut of ``rows`` × ``cols`` pairs.

    >>> grid = Grid(rows=10, cols=25, block=4, chunk=3, stretch=6)
    >>> grid.blocks, grid.stretches, grid.rows_of(2), list(grid.chunks_of(4))
    (3, 5, (8, 10), [(24, 25)])
    >>> root = grid.root(0, 2)
    >>> root, [(n.level, n.index) for n in grid.children(root)]  # five stretches: four and one
    (Node(stage=0, block=2, level=3, index=0), [(2, 0), (0, 4)])
    """

    rows: int
    cols: int
    block: int  # rows of a block
    chunk: int  # columns folded at once
    stretch: int  # columns of a unit, a multiple of the chunk

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.block)

    @property
    def stretches(self) -> int:
        return max(1, -(-self.cols // self.stretch))

    def rows_of(self, block: int) -> tuple[int, int]:
        """The first row of a block, and the last one's number plus one."""
        return block * self.block, min(self.rows, (block + 1) * self.block)

    def chunks_of(self, stretch: int) -> Iterator[tuple[int, int]]:
        """The chunks of a stretch, in order; one that is empty where there are no columns."""
        start, stop = stretch * self.stretch, min(self.cols, (stretch + 1) * self.stretch)
        yield from ((at, min(at + self.chunk, stop)) for at in range(start, max(stop, start + 1), self.chunk))

    def count_pairs(self, block: int, stretch: int) -> int:
        """The pairs of a unit."""
        (first, last), columns = self.rows_of(block), self.cols - stretch * self.stretch
        return (last - first) * max(0, min(self.stretch, columns))

    def root(self, stage: int, block: int) -> Node:
        """The node that covers all stretches."""
        return Node(stage, block, (self.stretches - 1).bit_length(), 0)

    def children(self, node: Node) -> tuple[Node, Node]:
        """The two nodes that merge to this one, in the order of their columns."""
        left, right = (self._shrink(node.at(node.level - 1, 2 * node.index + k)) for k in (0, 1))
        return left, right

    def parent(self, node: Node) -> Node | None:
        """The node that this one merges into; None of the root."""
        found = node
        while found != self.root(node.stage, node.block):
            found = found.at(found.level + 1, found.index // 2)
            if self._shrink(found) == found:
                return found
        return None

    def _shrink(self, node: Node) -> Node:
        """The lowest node with the same stretches: where their number is no power of two, the tree has gaps."""
        while node.level and (2 * node.index + 1) << (node.level - 1) >= self.stretches:
            node = node.at(node.level - 1, 2 * node.index)
        return node

    def leaves(self, node: Node) -> range:
        """The stretches below a node."""
        return range(node.index << node.level, min(self.stretches, (node.index + 1) << node.level))


def make_grid(rows: int, cols: int, block: int | None = None, chunk: int | None = None) -> Grid:
    """The cut for these sizes; ``block`` rows and ``chunk`` columns at a time, or what suits the sizes.

    >>> make_grid(10**6, 10**6).blocks, make_grid(1000, 10**9).stretches, make_grid(5, 7)
    (16, 64, Grid(rows=5, cols=7, block=1024, chunk=4096, stretch=4096))
    """
    for name, value in (("row_block", block), ("col_chunk", chunk)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ArgumentError(detail=f"{name} was given {value!r}", fix="Give a whole number from 1, or leave it out")
    block = block or _fit(rows, 16, LEAST_ROWS, ROWS)
    blocks = max(1, -(-rows // block))
    chunk = chunk or _fit(cols, -(-UNITS // blocks), LEAST_CHUNK, CHUNK)
    most = max(1, PAIRS // (block * chunk), 4 * block // chunk)  # chunks of a unit: a state is as large as the rows
    share = -(-cols // (chunk * -(-UNITS // blocks)))
    return Grid(rows, cols, block, chunk, chunk * max(1, min(most, share)))


def _fit(length: int, parts: int, least: int, most: int) -> int:
    """A part's length: a multiple of ``least`` that makes about ``parts`` parts, at most ``most``."""
    return min(most, max(1, -(-length // (parts * least))) * least)


@dataclass(frozen=True)
class Task:
    """One call of a worker's method: "fold" a leaf, "merge" a node's children, or "finish" at a root."""

    kind: str
    node: Node


@dataclass
class _Block:
    """A row block under way, in one of its passes."""

    stage: int
    waiting: list[int]  # stretches to fold, the next one last
    ready: list[Task] = field(default_factory=list)  # merges and the finish
    done: set[Node] = field(default_factory=set)


class Schedule:
    """The tasks of a job.

    ``written``: row blocks whose results are there; ``closed``: how many passes of other blocks are; ``states``: nodes
    whose states are.
    """

    def __init__(
        self,
        grid: Grid,
        stages: int,
        written: Collection[int] = (),
        closed: dict[int, int] | None = None,
        states: Iterable[Node] = (),
    ):
        self.grid, self.stages, self.written = grid, stages, set(written)
        self._closed: dict[int, int] = dict(closed or {})
        self._states: dict[int, set[Node]] = {}
        for node in states:
            self._states.setdefault(node.block, set()).add(node)
        self._active: dict[int, _Block] = {}
        self.running: set[Task] = set()
        self._fresh = iter(b for b in range(grid.blocks) if b not in self.written)
        self._begun = [b for b in sorted({*self._closed, *self._states}) if b not in self.written]
        for block in self._begun:
            self._begin(block)
        self.pairs = grid.rows * grid.cols * stages
        self.pairs_done = sum(self._count_done(b) for b in range(grid.blocks)) if self.written or self._begun else 0

    @property
    def finished(self) -> bool:
        return len(self.written) == self.grid.blocks

    def next(self, held: int | None, others: Collection[int]) -> Task | None:
        """The next task of a worker that holds the block ``held``, while others hold theirs; None: nothing for now."""
        found = self._pick(held, others)
        if found is not None:
            self.running.add(found)
        return found

    def _pick(self, held: int | None, others: Collection[int]) -> Task | None:
        if held in self._active and (own := self._take(self._active[held], held)) is not None:
            return own
        free = [b for b in self._active if b not in others]
        for number in free:
            if (own := self._take(self._active[number], number)) is not None:
                return own
        for number in self._fresh:
            if number not in self._active and number not in self.written:
                return self._take(self._begin(number), number)
        busy = sorted(self._active, key=lambda b: -len(self._active[b].waiting))
        return next((t for b in busy if (t := self._take(self._active[b], b)) is not None), None)

    def _take(self, block: _Block, number: int) -> Task | None:
        if block.ready:
            return block.ready.pop()
        if block.waiting:
            return Task("fold", Node(block.stage, number, 0, block.waiting.pop()))
        return None

    # What became of a task

    def complete(self, task: Task) -> None:
        """A task was done, and what it made is on disk."""
        self.running.discard(task)
        node = task.node
        if task.kind == "finish":
            del self._active[node.block]
            if node.stage + 1 == self.stages:
                self.written.add(node.block)
            else:
                self._closed[node.block] = node.stage + 1
                self._begin(node.block)
            return
        if task.kind == "fold":
            self.pairs_done += self.grid.count_pairs(node.block, node.index)
        self._mark(self._active[node.block], node)

    def lose(self, task: Task) -> None:
        """A task's worker died: it is to be done again."""
        self.running.discard(task)
        block = self._active[task.node.block]
        if task.kind == "fold":
            block.waiting.append(task.node.index)
        else:
            block.ready.append(task)

    def find_damaged(self, task: Task, node: Node) -> None:
        """A state that a task reads cannot be used: what lies below it is folded again."""
        self.running.discard(task)
        block = self._active[task.node.block]
        block.done.discard(node)
        if task.kind == "merge":
            block.done |= {n for n in self.grid.children(task.node) if n != node}
        redo = [k for k in self.grid.leaves(node) if k not in block.waiting]
        block.waiting += reversed(redo)
        self.pairs_done -= sum(self.grid.count_pairs(node.block, k) for k in redo)

    def begin_again(self, task: Task) -> None:
        """The results of an earlier pass of a block cannot be used: all its passes are done again."""
        self.running.discard(task)
        number = task.node.block
        stale = [t for t in self.running if t.node.block == number]
        if stale:  # they read the same results, and will say so too
            self.lose(task)
            self.running.discard(task)
            return
        self.pairs_done -= self._count_done(number)
        self._closed.pop(number, None)
        self._states.pop(number, None)
        self._begin(number)

    # A block's tree

    def _begin(self, number: int) -> _Block:
        stage = self._closed.get(number, 0)
        there = {n for n in self._states.pop(number, ()) if n.stage == stage}
        block = self._active[number] = _Block(stage, [])
        covered: set[int] = set()
        for node in sorted(there, key=lambda n: -n.level):  # a state whose columns a higher one holds is left over
            if not covered.intersection(self.grid.leaves(node)):
                covered.update(self.grid.leaves(node))
                self._mark(block, node)
        block.waiting = [k for k in reversed(range(self.grid.stretches)) if k not in covered]
        return block

    def _mark(self, block: _Block, node: Node) -> None:
        """A state is there: perhaps its sibling is too, or it is the last of its pass."""
        parent = self.grid.parent(node)
        if parent is None:
            block.ready.append(Task("finish", node))
            return
        block.done.add(node)
        children = self.grid.children(parent)
        if all(child in block.done for child in children):
            block.done.difference_update(children)
            block.ready.append(Task("merge", parent))

    def _count_done(self, number: int) -> int:
        """Pairs of a block that need not be computed, in all passes."""
        first, last = self.grid.rows_of(number)
        whole = (last - first) * self.grid.cols
        if number in self.written:
            return whole * self.stages
        block = self._active.get(number)
        if block is None:
            return 0
        left = sum(self.grid.count_pairs(number, k) for k in block.waiting)
        under_way = [t for t in self.running if t.kind == "fold" and t.node.block == number]
        left += sum(self.grid.count_pairs(number, t.node.index) for t in under_way)
        return whole * (block.stage + 1) - left


# Files of partial states and of results: written under another name first, checked when they are read.
#
# A state is what a stream keeps of the columns folded so far: tensors by reduction. Its file names the job it belongs
# to and holds a checksum of every tensor. A file that cannot be read, or is another job's, raises ``DamagedState``:
# whoever asked folds those columns again.

States = list[list[Tensor]]


class DamagedState(Exception):
    """A state file cannot be used; ``args[0]`` is its path."""


def write_whole(path: Path, write: Callable[[Any], None]) -> None:
    """Write a file so that it is there whole or not at all; raises StreamError where it cannot be written."""
    try:
        with disk.open_new(path, shared=True) as file:
            write(file)
    except OSError as error:
        raise StreamError(
            detail=f"{path} cannot be written: {error.strerror or error}",
            fix="Make room, or let the workers write there, and call run again: it goes on where it stopped",
        ) from error


def save_states(path: Path, job: str, states: States) -> None:
    """Write a state."""
    kept = [[t.detach().cpu().contiguous() for t in s] for s in states]
    sums = [[int(checksum(t)) for t in s] for s in kept]
    write_whole(path, lambda file: torch.save({"job": job, "states": kept, "sums": sums}, file))


def load_states(path: Path, job: str, device: torch.device) -> States:
    """Read a state; raises DamagedState."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        states, sums = found["states"], found["sums"]
        whole = found["job"] == job and [[int(checksum(t)) for t in s] for s in states] == sums
    except Exception:  # cut short, garbage, of another version: torch and zipfile raise a dozen types
        whole = False
    if not whole:
        raise DamagedState(str(path))
    return [[t.to(device) for t in s] for s in states]


def save_array(path: Path, value: Tensor) -> None:
    """Write a result as .npy; bfloat16, which numpy lacks, as float32."""
    value = value.detach().cpu()
    array = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    write_whole(path, lambda file: numpy.save(file, array, allow_pickle=False))
