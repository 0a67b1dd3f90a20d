"""Who shares an instance of a staged kernel: two groups of four warps or, where a tanh is bent, three.

Three have 160 registers a thread, which is enough for tiles of 64 columns. They leave the matrix units time: a row's
total is a product with ones then, in place of an addition a pair. A soft cap takes 4 to 5 % less by both together, and
little less by either alone (H200, docs/gpu.md). Totals are of weights as they were rounded for the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from .turns import inside


@dataclass(frozen=True)
class Sharing:
    """How many groups share an instance, and how many blocks are in flight. ``most``: registers of a thread when the
    kernel starts; then the copying warp leaves most of its own to the others, the first of which has the rest."""

    groups: int
    ring: int
    most: int
    registers: tuple[int, ...]
    counts: bool  # whether totals are products

    def told(self, n: str, fields: dict[str, str]) -> dict[str, str]:
        """What the text of a kernel says of it, for the softmax ``n``; what it says of the rest is in ``fields``."""
        return (self._counted(n, fields) if self.counts else _added(n, fields)) | {
            "groups": str(self.groups),
            "ring": str(self.ring),
            "own_kept": f"KEPT // {self.groups}",
            "fours": "4, " * (self.groups - 1),
            "registers": ", ".join(map(str, self.registers)),
        }

    def _counted(self, n: str, fields: dict[str, str]) -> dict[str, str]:
        """Totals by a product before that of the sums, of the same weights; none has fewer columns than eight."""
        begun, narrow = f"{n}_count = counts({{}}, ones, {n}_count, COUNTED)\n", fields["narrow"]
        made = [
            "ones = tl.allocate_shared_memory(",
            f"    {narrow}, [8, FOLDED], tl.NVMMASharedLayout.get_default_for([8, FOLDED], {narrow})",
            ")",
            f"ones.store(tl.full([8, FOLDED], 1.0, {narrow}, tl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))",
        ]
        layouts = [
            "COUNTS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])",
            "COUNTED: tl.constexpr = tl.DotOperandLayout(0, COUNTS, 2)",
        ]
        return {
            "ones": ", ones",
            "made": f"{fields['made']}{inside(made, 4)}\n",
            "counts": f"\n{inside(layouts, 4)}",
            "zeros": f"\n    {n}_count = tl.zeros([KEPT, 8], tl.float32, COUNTS)",
            "counted": f"{' ' * 8}{begun.format(fields['operand'])}",
            "counted_other": f"{' ' * 12}{begun.format(fields['operand'])}",
            "counted_last": f"{' ' * 4}{begun.format(fields['last'])}",
            "count": f"{n}_count, ",
            "behind": "2",
            "found": f"tl.max(warpgroup_mma_wait(0, deps=[{n}_count]), 1)",
        }


def _added(n: str, fields: dict[str, str]) -> dict[str, str]:
    """Totals by additions, which the arithmetic of a tile has."""
    nothing = ("ones", "counts", "zeros", "counted", "counted_other", "counted_last", "count")
    return dict.fromkeys(nothing, "") | {"made": fields["made"], "behind": "1", "found": f"tl.sum({n}_total, 1)"}


TWO = Sharing(2, 2, 168, (232, 40), counts=False)
THREE = Sharing(3, 4, 128, (160, 160, 24), counts=True)
