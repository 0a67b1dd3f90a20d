"""How a fold is cut into units of work: row blocks × stretches of columns, and the tree in which their states merge.

The cut depends on the sizes alone, never on the number of workers or on which of them is faster. A stretch is folded
chunk by chunk in order, and the states of a row block's stretches merge in one fixed binary tree. So the result has the
same bits on one worker and on a hundred, and after any number of them were lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import ArgumentError

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
