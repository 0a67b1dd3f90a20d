"""The tiles of the warp-specialised attention forward (``attention.py``): one frozen value per class of head widths.

**To give the kernel another tile, edit** ``SCHEDULES``. A value says how wide vectors may be, how many consumer groups
an instance has (64 kept indices each), how many folded indices a tile has, how deep the ring buffers are, and how
registers are shared out; everything else follows: the plan that is chosen, the kernel's text, the compiler's options.
The first value that is wide enough runs by default, from ``above`` features on. A value with ``above=widest`` runs
where a plan asks for its tile, and nowhere else; a plan may ask for any value with another ``folded`` and ``ring``.
A value that cannot run raises when this module is imported. ``docs/internals/schedules.md`` shows it step by step, with
what to run afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from .....plan.tiles import Tile
from ..gluon_parts import GROUP_ROWS, SHARED_BYTES, SPARE_BYTES

_WIDEST = 256  # features: the longest block that TMA copies
_REGISTERS = 65536 // 128  # that a multiprocessor has for each thread of a warp group
NUMBER_RINGS = 2  # rings of one number per folded index, at most: shared memory holds no more


@dataclass(frozen=True)
class AttentionSchedule:
    """How an instance of the kernel runs, for vectors of up to so many features."""

    widest: int  # features, of the slices that hold them: a multiple of 16
    groups: int  # consumer warp groups, of 64 kept indices each
    folded: int  # folded indices of a tile: a power of two, at least 16
    ring: int  # blocks of keys in flight, and of values
    registers: tuple[int, ...]  # of a thread: in each consumer group but the first, which has the rest; in the producer
    holds_queries: bool = True  # in registers, in whole tiles
    item: int = 2  # bytes of a number of queries, keys and values
    more_values: int = 0  # blocks of values in flight beyond those of keys: they are released a step later
    above: int = 64  # features up to which the compiler's own schedule is faster (H200: by 7 %)
    above_with_tables: int = 32  # the same of pairs that look up tables: those compete with MMAs' operands there

    def __post_init__(self) -> None:
        if not 16 <= self.widest <= _WIDEST or self.widest % 16:
            raise ValueError(f"widest is a multiple of 16 up to {_WIDEST}, not {self.widest}")
        if self.folded < 16 or self.folded & (self.folded - 1):
            raise ValueError(f"folded is a power of two, at least 16, not {self.folded}")
        if len(self.registers) != self.groups:
            raise ValueError(f"{self.groups} groups need {self.groups} register counts, not {self.registers}")
        if any(count % 8 or not 24 <= count <= 256 for count in self.registers):
            raise ValueError(f"registers are multiples of 8 from 24 to 256, not {self.registers}")
        if (left := _REGISTERS - sum(self.registers)) < max(self.registers[:-1], default=24):
            raise ValueError(
                f"{self.registers} leave the first group {left} of {_REGISTERS} registers, fewer than another has"
            )
        if self.ring < max(2, self.groups):
            raise ValueError(
                f"a ring holds at least 2 blocks, so that copies overlap, and as many as there are groups "
                f"({self.groups}), which need them in flight to retry, not {self.ring}"
            )
        staged = self.widest if self.item == 1 else 0
        taken = self.shared_bytes(self.widest, self.widest, staged, numbers=NUMBER_RINGS)
        if taken > SHARED_BYTES:
            raise ValueError(f"{taken} bytes of shared memory; an instance has {SHARED_BYTES}")

    @property
    def runs_by_default(self) -> bool:
        """False where only a plan chooses it."""
        return self.above < self.widest

    @property
    def kept(self) -> int:
        """Kept indices of an instance."""
        return self.groups * GROUP_ROWS

    @property
    def tile(self) -> Tile:
        """The tile as plans have it: kept and folded indices, warps (of the first group), ring depth."""
        return self.kept, self.folded, 4, self.ring

    def shared_bytes(
        self, queries: int, values: int, staged: int = 0, folded: int = 0, ring: int = 0, numbers: int = 0
    ) -> int:
        """All that a kernel takes: the resident tile and two rings of blocks for queries and values of so many
        features; ``staged`` features of results that are stored through 16-bit memory of their own; rings of
        ``numbers`` 32-bit numbers per folded index; barriers. ``folded``, ``ring``: if others."""
        folded, ring = folded or self.folded, ring or self.ring
        in_flight = ring * queries + (ring + self.more_values) * values
        blocks = self.item * (self.kept * queries + folded * in_flight) + 4 * numbers * ring * folded
        return blocks + 2 * self.kept * staged + SPARE_BYTES


SCHEDULES = (
    AttentionSchedule(widest=128, groups=2, folded=128, ring=2, registers=(232, 40)),
    AttentionSchedule(widest=192, groups=2, folded=64, ring=3, registers=(240, 24), holds_queries=False),
    AttentionSchedule(widest=256, groups=2, folded=64, ring=2, registers=(240, 24), holds_queries=False, more_values=1),
)

# Queries, keys and values in 8-bit floats. H200, as CUDA graphs, 64 heads of 4096 tokens, 128 features: 0.61 ms, in
# bfloat16 0.76; 16 heads of 16384: 2.72 (a ring of three 2.84) and 2.84. 32 heads of 256 features: 0.50 and 0.77. By
# three groups of 64 x 64 0.95 of bfloat16's time; groups that start their MMAs by turns were 2 % slower.
STORED_SCHEDULES = (
    AttentionSchedule(widest=128, groups=2, folded=128, ring=4, registers=(240, 24), holds_queries=False, item=1),
    AttentionSchedule(widest=256, groups=2, folded=128, ring=2, registers=(240, 24), holds_queries=False, item=1),
)
# The same where conditions cut tiles. 64 causal heads of 4096 tokens, 128 features: 0.44 ms, in bfloat16 0.48; by the
# schedule above, with groups by turns, 0.57.
CUT_SCHEDULES = (
    AttentionSchedule(widest=128, groups=2, folded=128, ring=2, registers=(232, 40), item=1),
    *STORED_SCHEDULES[1:],
)
