"""Programs that are nothing but launches: which are, and what their launches are on given tensors.

Two are made of them: the forward of a call (``replay.py``) and its backward (``rewind.py``), each a tape
(``triton/tape.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..program.expr import Expr, topological
from ..program.lower import Fold, Lowered
from . import triton
from .evaluate import Sizes
from .frozen import READY
from .registry import ENGINES
from .script import Script, script


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
        """Whether this is one pass, and nothing but steps that may be launches, whose results are returned."""
        made = self.script
        if self.engine not in READY or len(self.program.passes) != 1 or made.steps is None:
            return False
        theirs = {name for step in made.steps for name in step.results}
        return theirs.issuperset(made.returned) and len(set(made.returned)) == len(made.returned)

    @functools.cached_property
    def returned(self) -> tuple[str, ...]:
        """What is returned, by the names of launches' results."""
        names = self.script.returned
        return tuple(f"{name}_sum" for name in names) if self.total else names

    def recorded(self, values: Sequence[Any], sizes: Sizes) -> triton.Recorded | None:
        """The launches on these inputs, if nothing else is done; they are run on the way."""
        if not self.launches:
            return None
        with torch.no_grad():
            known = dict(zip(self.script.names, values, strict=True))
            found = triton.record(self.script.steps or (), known, functools.partial(self._fold, sizes), sizes)
            if not self.total or found is None:
                return found
            return triton.summed(found, self.script.returned, (*sizes.batch, sizes.rows), known)

    def _fold(self, sizes: Sizes, fold: Fold, leaves: list[Any]) -> Any:
        results, ready = ENGINES[self.engine](fold, leaves, sizes), READY[self.engine](fold, leaves, sizes)
        return results, None if ready is None else ready.recipes()
