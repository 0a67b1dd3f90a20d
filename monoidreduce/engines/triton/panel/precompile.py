"""The kernels around a product that guesses: eight of them, compiled at the same time (``parallel_compile.py``)."""

from __future__ import annotations

import copy
from typing import Any

from ...common.evaluate import Sizes
from ...panel import Part
from ..launch import parallel_compile
from .epilogue import Epilogue
from .fuse_stages import joint


def look(step: Any, group: range, part: Part, here: Sizes) -> None:
    """Compile what a panel needs, the first time that one is like it. ``step``: the ``KernelStep`` that does it."""
    fused: Epilogue | None = step._fused(step.panel.cols < step.sizes.cols)
    key = (here.cols, here.device, step.over, *here.letters.values())
    if fused is None or not fused.guesses or key in fused.met:
        return
    if parallel_compile.compile_ahead(here.device, lambda: _launches(copy.copy(step), fused, group, part, here)):
        fused.met.add(key)


def _launches(step: Any, fused: Epilogue, group: range, part: Part, here: Sizes) -> None:
    """What is done to a panel, but the vendor's products; ``step``: a copy, so that nobody has its sums."""
    for name in ("totals", "complete", "adding", "numbers"):
        setattr(step, name, dict(getattr(step, name)))
    step.labels, step.contract = {}, lambda *given, **named: None
    names = [n for names in joint(step.walk, group, False).names for n in names]
    weights = step._written(fused, part, here, [step._rows(n)[part.rows] for n in names])
    for place, over, products in step.parts[group[-1]].sums:
        if over in step.over:
            step._contract((group[-1], place), over, products, weights, part)
    step.add_waiting(group[-1])
