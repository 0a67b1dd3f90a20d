"""``panel``: folds nothing. It writes the number of every pair into a matrix, kept axis first, as the results of the
kept indices. The Triton engine makes this kind of a top-k whose list would not fit in registers, for some rows and
columns at a time, and selects from what was written. It is the only reduction of its fold.

Parameters: those of the top-k, ``(k, largest)``.
"""

from __future__ import annotations

from ..program import intervals as iv
from ..program.expression import Expr
from .base import Outputs, Reduction
from .kernel_lines import Lines
from .topk import TopK


class PanelLines(Lines):
    """A tile is stored where it belongs: program instances and splits write different pairs."""

    def start(self) -> list[str]:
        return []

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, value = self.v, self.v.full(fields[0])
        row = "(tl.cast(batch, tl.int64) * kept_size + kept_at[:, None]) * folded_size"
        mask = "kept_in[:, None]" + (" & folded_in[None, :]" if v.masked else "")
        v.inside.append(f"tl.store(out{self.place} + {row} + folded_at[None, :], {value}, mask={mask})")

    def finish(self) -> list:
        return []


class Panel(Reduction):
    """Pairs of tiles that are skipped keep what the matrix was filled with."""

    name = "panel"
    keeps_pairs = True
    lines = PanelLines
    plain_ops, combine_ops = 1, 0

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(None, fields[0].dtype)]

    def idle(self, params: tuple, fields: list[iv.Interval]) -> bool:
        return TopK().idle(params, fields)
