"""A worker: holds a row block, folds stretches of columns over it, merges states, writes results. One per Ray actor.

Everything it makes goes to files under the job's folder, so that losing it loses no more than the unit under way. Its
methods may be called again with the same arguments: they write the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...plan import settings
from ...plan.schedule import Choice
from .folds import Portable, RowBlock
from .schedule import DamagedState, Grid, Node, load_states, save_array, save_states
from .tables import Table, ray


@dataclass(frozen=True)
class Job:
    """All that a worker must know. ``function`` is the op's or layer's (pickled by value: it may be of a script)."""

    identity: str
    function: bytes
    rows: Table
    cols: Table
    options: Mapping[str, Any]
    grid: Grid
    folder: str
    settings: Mapping[str, Any]
    threads: int
    choices: list[Choice] | None = None

    def make_block(self, rows: Mapping[str, Tensor], start: int, device: torch.device) -> RowBlock:
        """A row block of these rows."""
        portable: Portable = _load(self.function)
        options = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in self.options.items()}
        empty = {n: c.empty(0).to(device) for n, c in self.cols.items()}
        stream = lambda: portable.stream(rows, empty, options)
        return RowBlock(stream, start, self.grid.rows, self.grid.cols, empty, self.choices)

    @property
    def states(self) -> Path:
        return Path(self.folder) / "states"

    def state_path(self, node: Node) -> Path:
        return self.states / f"{node}.pt"

    def results_path(self, stage: int, block: int) -> Path:
        return self.states / f"results-pass{stage}-rows{block:06d}.pt"

    def output_path(self, name: str, block: int) -> Path:
        return Path(self.folder) / f"{name}-{block:06d}.npy"


@functools.lru_cache(maxsize=8)
def _load(function: bytes) -> Any:
    """Loaded once in a process, so that an op is traced once."""
    return pickle.loads(function)


def name_outputs(value: Any) -> dict[str, Tensor]:
    """The tensors of an op's result by the names that their files get."""
    if isinstance(value, Tensor):
        return {"result": value}
    if isinstance(value, Mapping):
        return {str(n): t for n, t in value.items()}
    names = getattr(value, "_fields", None) or [f"result{k}" for k in range(len(value))]
    return dict(zip(names, value, strict=True))


@dataclass
class Worker:
    """What one Ray actor runs."""

    job: Job
    held: tuple[int, RowBlock] | None = None
    results: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(self.job.threads)
        self.device = torch.device("cuda" if torch.cuda.is_available() and _has_gpu() else "cpu")

    def ready(self) -> None:
        """Answers when the worker has started."""

    def fold(self, node: Node) -> tuple[str, Any]:
        """Fold a stretch of columns (a leaf of the tree); ("done", seconds of CPU time) or ("damaged", path)."""
        began = time.process_time()
        with self._settings():
            block = self._hold(node.block)
            try:
                found = block.fold(node.stage, self._results_before(node), self._read(node.index))
            except DamagedState as damaged:
                return "damaged", damaged.args[0]
            save_states(self.job.state_path(node), self.job.identity, found)
            return "done", time.process_time() - began

    def merge(self, node: Node) -> tuple[str, Any]:
        """Merge the states of a node's children, which are then deleted."""
        began = time.process_time()
        with self._settings():
            block = self.held[1] if self.held and self.held[0] == node.block else self._placeholder(node.block)
            left, right = map(self.job.state_path, self.job.grid.children(node))
            try:
                states = [load_states(p, self.job.identity, self.device) for p in (left, right)]
            except DamagedState as damaged:
                return "damaged", damaged.args[0]
            save_states(self.job.state_path(node), self.job.identity, block.merge(node.stage, *states))
            _delete(left, right)
            return "done", time.process_time() - began

    def finish(self, node: Node) -> tuple[str, Any]:
        """Close a pass of a row block at the root of its tree: keep its results for the next pass, or write files."""
        began = time.process_time()
        with self._settings():
            block = self._hold(node.block)
            path = self.job.state_path(node)
            try:
                found = block.close(node.stage, load_states(path, self.job.identity, self.device))
                before = self._results_before(node)
            except DamagedState as damaged:
                return "damaged", damaged.args[0]
            if node.stage + 1 < block.stages:
                save_states(self.job.results_path(node.stage, node.block), self.job.identity, [found])
                self.results[node.stage, node.block] = found
            else:
                for name, value in name_outputs(block.outputs({**before, node.stage: found})).items():
                    save_array(self.job.output_path(name, node.block), value)
                _delete(*(self.job.results_path(s, node.block) for s in range(node.stage)))
            _delete(path)
            return "done", time.process_time() - began

    # What it holds

    def _settings(self) -> contextlib.AbstractContextManager[None]:
        return settings.change(**self.job.settings)

    def _hold(self, block: int) -> RowBlock:
        """The row block, read from its files unless it is the one held."""
        if self.held is None or self.held[0] != block:
            self.held = None  # its memory is free before the next one is read
            self.results.clear()
            start, stop = self.job.grid.rows_of(block)
            rows = {n: c.read(start, stop).to(self.device) for n, c in self.job.rows.items()}
            self.held = block, self.job.make_block(rows, start, self.device)
        return self.held[1]

    def _placeholder(self, block: int) -> RowBlock:
        """A row block without numbers: enough to merge states."""
        start, stop = self.job.grid.rows_of(block)
        rows = {n: c.empty(stop - start).to(self.device) for n, c in self.job.rows.items()}
        return self.job.make_block(rows, start, self.device)

    def _read(self, stretch: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        for start, stop in self.job.grid.chunks_of(stretch):
            yield start, {n: c.read(start, stop).to(self.device) for n, c in self.job.cols.items()}

    def _results_before(self, node: Node) -> dict[int, list[Tensor]]:
        for stage in range(node.stage):
            if (stage, node.block) not in self.results:
                (found,) = load_states(self.job.results_path(stage, node.block), self.job.identity, self.device)
                self.results[stage, node.block] = found
        return {stage: self.results[stage, node.block] for stage in range(node.stage)}


def _has_gpu() -> bool:
    return bool(ray.get_gpu_ids())


def _delete(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
