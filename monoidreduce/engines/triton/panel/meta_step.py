"""The panel schedule on meta tensors, for estimates of memory: panels that are alike run once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from ...common.evaluate import Sizes
from ...panel.panel_program import PanelLoop
from .arena import MemoryPlan
from .epilogue import EpilogueGemm
from .kernel_step import KernelStep


class _MetaPlan(MemoryPlan):
    """A memory plan for meta tensors, with the fused GEMMs of the real device."""

    def __init__(self, loop: PanelLoop, sizes: Sizes, dtypes: set[torch.dtype], real_sizes: Sizes):
        self.real = MemoryPlan(loop, real_sizes, dtypes)
        super().__init__(loop, sizes, dtypes)

    def epilogue(self, shifted: bool) -> EpilogueGemm | None:
        return self.real.epilogue(shifted)


class MetaStep(KernelStep):
    """Runs the panel engine on meta tensors; of panels that are alike, only the first."""

    real_sizes: ClassVar[Sizes]

    def __init__(self, loop: PanelLoop, sizes: Sizes, dtypes: set[torch.dtype]):
        super().__init__(loop, sizes, dtypes)
        self.plan = _MetaPlan(loop, sizes, dtypes, self.real_sizes)

    def iterate_panels(self) -> Iterator[tuple[slice, slice]]:
        seen = set()
        for rows, cols in super().iterate_panels():
            own = self.arena.panel is self.arena.own
            kind = (rows.stop - rows.start, cols.stop - cols.start, self.directions, own)
            if kind not in seen:
                seen.add(kind)
                yield rows, cols
