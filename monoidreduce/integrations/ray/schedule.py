"""Which unit a worker does next, and what is left after one was lost. Knows nothing of Ray.

A worker stays with the row block that it holds as long as there is something to do for it; then it begins a block that
nobody has begun, and last it helps with a block that another one holds. The order decides how often rows are read; it
does not change the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from .grid import Grid, Node


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
