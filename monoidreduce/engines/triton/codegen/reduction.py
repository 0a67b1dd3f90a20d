"""What every kind of reduction answers with lines of text when a kernel is written: ``start``, ``step``, ``finish``.

Apart from ``reductions.py``, the table of them, so that a kind may stand in a file of its own.
"""

from __future__ import annotations

from typing import Any

from ....program.expression import Expr
from .expressions import ExpressionWriter


class Kind:
    """A reduction in a kernel. ``fields`` are given anew to each step: loops differ in what is known of conditions."""

    guessing = False  # whether this loop has a guess of a softmax's maximum

    def __init__(self, place: int, reduction: Expr, scale: Expr, v: ExpressionWriter):
        self.place, self.reduction, self.scale, self.v = place, reduction, scale, v
        self.kind, self.over, self.params = reduction.attrs
        self.name = f"{self.kind}{place}"
        self.helpers: list[str] = []  # functions of its own that the kernel calls
        self.prepare()

    def prepare(self) -> None: ...

    @property
    def totals(self) -> list[Any]:
        """Its running sums of vectors, where it has any."""
        return []

    def start(self) -> list[str]:
        raise NotImplementedError

    def step(self, fields: tuple[Expr, ...]) -> None:
        raise NotImplementedError

    def finish(self) -> list[tuple[list[str], Any]]:
        """Per result: its text (one per feature where features are few) and its feature."""
        raise NotImplementedError
