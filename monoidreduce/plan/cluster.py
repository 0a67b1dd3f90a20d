"""What a fold costs on many machines: row blocks × stretches of columns, states on disk between them.

Extends ``cost.py`` past one machine. A unit folds ``chunks`` chunks of columns over one block of rows on one worker;
all units are alike, and workers take them one after the other:

    unit     = chunks × seconds of one chunk (``cost.py``) + bytes of its columns and rows / read rate
               + bytes of its state, written, and read and written again by the merges / write rate + overhead
    job      = ⌈units / workers⌉ × unit, and no less than the bytes that a machine reads / its disk's rate

Traffic is equation 5 with l row blocks and r = 1: every block reads all columns once. The rates of disks and the
overhead are assumptions, said with the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

DISK = 1.0e9  # bytes a second that one machine reads and writes: a solid-state disk or a shared file system
OVERHEAD = 0.03  # seconds of a unit besides: a Ray call, the checksum and the fsync of its state (benchmarks/ray.py)


@dataclass(frozen=True)
class ClusterCost:
    """The cost of one job; see :func:`estimate_cluster`."""

    rows: int
    cols: int
    workers: int
    machines: int
    units: int
    unit_seconds: float  # what one lost worker costs at most
    compute_seconds: float  # of all workers together
    read_bytes: float  # by one machine
    state_bytes: float  # written and read by one machine
    peak: int  # bytes that one worker holds
    seconds: float
    measured: bool = False  # whether a worker's speed was measured, not modelled

    def __str__(self) -> str:
        return (
            f"{self.rows:.3g} × {self.cols:.3g} pairs on {self.workers} workers of {self.machines} machines: "
            f"{_duration(self.seconds)} ({self.units} units of {_duration(self.unit_seconds)}; a machine reads "
            f"{self.read_bytes / 1e9:.3g} GB and moves {self.state_bytes / 1e9:.3g} GB of states; a worker holds "
            f"{self.peak / 1e6:.3g} MB; a worker's speed was {'measured here' if self.measured else 'not measured'})"
        )


def estimate_cluster(
    *,
    rows: int,
    cols: int,
    block: int,
    chunk: int,
    stretch: int,
    chunk_seconds: float,
    row_bytes: float,
    col_bytes: float,
    state_bytes: float,
    pair_bytes: int,
    workers: int,
    machines: int = 1,
    passes: int = 1,
    disk: float = DISK,
    overhead: float = OVERHEAD,
) -> ClusterCost:
    """The cost of ``rows`` × ``cols`` pairs in units of ``block`` rows × ``stretch`` columns.

    ``chunk_seconds``: of one worker for ``block`` rows × ``chunk`` columns; ``row_bytes``, ``col_bytes`` and
    ``state_bytes``: of one row, one column, and the state of one row; ``pair_bytes``: held of pairs at once.

    >>> cost = estimate_cluster(rows=8, cols=8, block=4, chunk=2, stretch=4, chunk_seconds=1.0, row_bytes=0,
    ...     col_bytes=0, state_bytes=0, pair_bytes=0, workers=2, overhead=0)
    >>> cost.units, cost.unit_seconds, cost.seconds, cost.compute_seconds
    (4, 2.0, 4.0, 8.0)
    """
    blocks, stretches = -(-rows // block), -(-cols // stretch)
    units = blocks * stretches * passes
    height, width = min(block, rows), min(stretch, cols)
    chunks = -(-width // chunk)
    each = disk * machines / workers  # a machine's disk is shared by its workers
    read = width * col_bytes + height * row_bytes / stretches  # a block's rows are read once
    moved = height * state_bytes * (1 + 3 * (stretches > 1))  # written; merges read two and write one, for two units
    total_read = passes * (blocks * cols * col_bytes + rows * row_bytes)
    compute = chunks * chunk_seconds
    unit = compute + (read + moved) / each + overhead
    return ClusterCost(
        rows,
        cols,
        workers,
        machines,
        units,
        unit,
        units * compute,
        total_read / machines,
        units * moved / machines,
        int(height * (row_bytes + 2 * state_bytes) + min(chunk, cols) * col_bytes) + pair_bytes,
        max(-(-units // workers) * unit, (total_read + units * moved) / machines / disk),
    )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
