"""How attention's heads are laid out: groups of heads that share keys, and numbers given per sequence.

Only views: nothing is repeated. May import the errors and the checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..domains import Domain, restore
from ..engines.ranks import agreement
from ..errors import ArgumentError, ShapeError
from . import checks

# what may come per head, and how many axes it has after the heads
_PER_HEAD = {
    "bias": 2, "attn_mask": 2, "row_documents": 1, "col_documents": 1, "row_blocks": 1, "col_blocks": 1,
    "alibi_slopes": 0, "sinks": 0, "lengths": 0,
}  # fmt: skip


def per_sequence(name: str, value: Any, shape: str, tail: int, *tensors: Any) -> Tensor:
    """Integers whose leading dimensions are the first of those of tensors [B, ..., L, f]; of size 1 where they end."""
    checks.tensor(name, value, shape, tail)
    checks.integers(name, value)
    for t in tensors:
        checks.vectors("q, k and the like", t, "[..., length, features]", 2)
    lead = max(t.dim() for t in tensors) - 2
    missing = lead - (value.dim() - tail)
    if missing < 0:
        raise ShapeError(
            detail=f"{name} has shape {tuple(value.shape)}, but there are only {lead} batch dimensions",
            fix=f"{shape} was expected",
        )
    for _ in range(missing):
        value = value.unsqueeze(-1 - tail)
    return value


def check_per_head(name: str, value: Tensor, *tensors: Any) -> None:
    """Raise ShapeError where numbers [..., H] have axes that tensors [..., H, L, f] do not have before the last two."""
    lead = max(2, *[t.dim() for t in tensors if hasattr(t, "dim")]) - 2
    if value.dim() > max(lead, 1):
        raise ShapeError(
            detail=f"{name} has shape {tuple(value.shape)}, but there are only {lead} batch dimensions",
            fix="Give one number for each head, [..., H], without axes for rows and columns",
        )


def lengths(name: str, value: Any, x: Any, *others: Any) -> Tensor:
    """How many of the vectors x [B, ..., L, f] has, one number per sequence; looked at where looking is free."""
    found = per_sequence(name, value, "[B], or more of the leading dimensions", 0, x, *others)
    if checks.can_inspect(value) and value.numel():
        low, high = int(value.min()), int(value.max())
        streamed = agreement.streamed_call() is not None  # x is a chunk, and others follow
        if low < 0 or (high > x.shape[-2] and not streamed):
            raise ArgumentError(
                detail=f"{name} holds {low if low < 0 else high}, but there are {x.shape[-2]} vectors",
                fix=f"Give numbers from 0 to {x.shape[-2]}",
            )
    return found


@dataclass(frozen=True)
class Groups:
    """``shared`` heads of keys and values, each for ``group`` heads of queries: [H] is seen as [shared, group]."""

    shared: int
    group: int

    @staticmethod
    def of(q: Any, k: Any, v: Any) -> Groups | None:
        """The groups of these heads; None where every query's head has its own."""
        for name, t in (("q", q), ("k", k), ("v", v)):
            checks.vectors(name, t, "[..., heads, length, features]", 3)
        counts = {name: t.shape[-3] for name, t in (("q", q), ("k", k), ("v", v))}
        many, few = counts["q"], counts["k"]
        if counts["v"] != few or not few or many % few:
            given = ", ".join(f"{name} has {count}" for name, count in counts.items())
            raise ShapeError(
                detail=f"heads do not go into each other: {given}",
                fix="k and v have equally many heads, and q a multiple of them",
            )
        return Groups(few, many // few) if many != few else None

    def split(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, dict]:
        """The same arguments with heads seen as [shared, group], of which keys and values have [shared, 1]."""
        seen = self.split_options(options)
        if type(q) is Tensor:  # half the time of unflatten, which is Python
            apart = q.view(*q.shape[:-3], self.shared, self.group, *q.shape[-2:])
        else:
            apart = q.unflatten(-3, (self.shared, self.group))
        return apart, k.unsqueeze(-3), v.unsqueeze(-3), seen

    def split_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The same options with heads seen as [shared, group]."""
        cols = options.get("cols")
        tails = _PER_HEAD if cols is None or cols.kind != "edges" else {**_PER_HEAD, "bias": 1, "attn_mask": 1}
        seen = {
            name: self._grouped(name, value, tails[name]) if name in tails and value is not None else value
            for name, value in options.items()
        }
        if cols is not None:
            seen["cols"] = self._grouped_lists(cols)
        return seen

    def _grouped_lists(self, cols: Domain) -> Domain:
        """Lists per head of the queries, or per head of the keys, which its group shares."""
        if not cols.batch:
            return cols
        heads, at = cols.batch[-1], len(cols.batch) - 1
        if heads not in (1, self.shared, self.shared * self.group):
            raise ShapeError(
                detail=f"cols has lists for {heads} heads, but q has {self.shared * self.group} and k {self.shared}",
                fix="Give one for each of q's heads, for each of k's, or for all",
            )
        split = (self.shared, self.group) if heads == self.shared * self.group else (heads, 1)
        return restore(cols.form, tuple(t.unflatten(at, split) for t in cols.tensors()))

    def _grouped(self, name: str, t: Any, tail: int) -> Any:
        if not isinstance(t, Tensor) or t.dim() <= tail:
            return t
        at = t.dim() - tail - 1
        if t.shape[at] == 1:
            return t.unsqueeze(at)
        if t.shape[at] != self.shared * self.group:
            raise ShapeError(
                detail=f"{name} has {t.shape[at]} heads, but q has {self.shared * self.group}",
                fix="Give one for each of q's heads, or one for all",
            )
        return t.unflatten(at, (self.shared, self.group))

    def merged(self, result: Any) -> Any:
        """A result [..., shared, group, M, d] with its heads in one dimension again; of several, those after the first
        are numbers [..., shared, group, M or N]."""
        if isinstance(result, Tensor):
            return result.flatten(-4, -3)
        first, *others = result
        merged = (None if t is None else t.flatten(-3, -2) for t in others)
        return type(result)(None if first is None else first.flatten(-4, -3), *merged)
