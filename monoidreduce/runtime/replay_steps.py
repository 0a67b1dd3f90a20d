"""Programs that are nothing but launches: which are, and what their launches are on given tensors.

Two are made of them: the forward of a call (``forward_replay.py``) and its backward (``backward_replay.py``), each a tape
(``engines/triton/launch/launch_replay.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engines import triton
from ..engines.common.evaluate import Sizes
from ..engines.common.one_sided import Side
from ..engines.common.torch_code import Script, script
from ..program.expression import Expr, topological
from ..program.lower import Fold, Lowered
from .frozen_pass import READY


@dataclass(frozen=True, eq=False)
class Steps:
    """A program for an engine; ``numbers`` names the inputs that are Python numbers.

    ``total``: the sums of its outputs, which are numbers per row, are asked for."""

    engine: str
    program: Lowered
    numbers: frozenset[str]
    total: bool = False

    @functools.cached_property
    def script(self) -> Script:
        return script(self.program, self.numbers, True)

    @functools.cached_property
    def inputs(self) -> tuple[Expr, ...]:
        """The expressions of the inputs."""
        roots = [*(e for p in self.program.passes for e in p.feeds), *self.program.outputs]
        known = {e.attrs[0]: e for e in topological(roots) if e.op in ("input", "leaf")}
        return tuple(known[name] for name in self.script.inputs)

    @functools.cached_property
    def launches(self) -> bool:
        """Whether this is one pass, and nothing but steps that may be launches, whose results are returned: sums only
        those of the last, the arithmetic of one side."""
        made = self.script
        if self.engine not in READY or len(self.program.passes) != 1 or made.steps is None:
            return False
        if self.total and (
            not isinstance(made.steps[-1].what, Side) or set(made.steps[-1].results) != {*made.returned}
        ):
            return False
        theirs = {name for step in made.steps if not isinstance(step.what, Expr) for name in step.results}
        return theirs.issuperset(made.returned) and len(set(made.returned)) == len(made.returned)

    def counted(self, sizes: Sizes) -> triton.Counted | None:
        """The arithmetic of numbers alone among the steps, if there is any."""
        is_number = lambda what: isinstance(what, Expr) and what.op != "batch_index"
        steps = [step for step in self.script.steps or () if is_number(step.what)]
        pairs = zip(self.script.names, self.script.inputs, strict=True)
        return triton.Counted(steps, [name for name, given in pairs if given in self.numbers], sizes) if steps else None

    def recorded(self, values: Sequence[Any], sizes: Sizes) -> triton.Recorded | None:
        """The launches on these inputs, if nothing else is done; they are run on the way."""
        if not self.launches:
            return None
        with torch.no_grad():
            known = dict(zip(self.script.names, values, strict=True))
            folder = functools.partial(self._fold, sizes)
            return triton.record(self.script.steps or (), known, folder, sizes, self.counted(sizes), self.total)

    def _fold(self, sizes: Sizes, fold: Fold, leaves: list[Any]) -> Any:
        ready = READY[self.engine](fold, leaves, sizes)
        return ([], None) if ready is None else (ready(leaves), ready.recipes(leaves))
