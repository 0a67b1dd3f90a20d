"""Partial folds put together: the results of disjoint parts of the folded axis become the results of the whole.

This is ⊙ for whole results, in plain torch: the second step of a split schedule, what ranks exchange, what a stream
keeps. An engine's results are first opened into a *state* that combines without loss (a softmax mean into its weight
and sum, moments into a count as well), states lie stacked along a new leading dimension, and the combined state is
closed into results again. An empty part, or one that saw only the identity, changes nothing. The order of combination
is that of the stack; where places tie, the smallest wins whatever the order, as if the axis had never been cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...algebra import fold as fold_monoid
from ...program.expression import Expr
from ...program.lower import Fold
from ...program.reductions import KINDS

State = list[Tensor]  # of one reduction: every tensor is [parts, *batch, length(, features)]


@dataclass(frozen=True)
class Combiner:
    """One row of the table, all on stacked parts: ``open(results, params, lengths)``, ``merge(state, params)`` to one
    part, ``close(state, params)``."""

    open: Callable[[State, tuple, Sequence[int]], State]
    merge: Callable[[State, tuple], State]
    close: Callable[[State, tuple], State]


def combine(
    fold: Fold,
    stacked: Sequence[Tensor],
    lengths: Sequence[int],
    starts: Sequence[int] | None = None,
    ordered: bool = False,
    faster: Callable[[Expr, State], State | None] | None = None,
) -> list[Tensor]:
    """The results of a whole fold from those of its parts.

    ``stacked[k]`` is ``[parts, *batch, length(, features)]``, in the order of ``fold.outputs``; all reductions of the
    fold go over the axis that was cut, and part p covers ``lengths[p]`` of it. Places (argmax, top-k, samples) count
    from the start of the whole axis; with ``starts``, each part's count from its own start and are moved here.
    ``ordered``: whether parts follow each other along the axis, so that of equal ones the first wins. ``faster``: what
    does the same to a reduction's stacked results, or says None where it cannot.
    """
    results: list[Tensor] = []
    for r, own in split(fold, list(stacked)):
        found = None if faster is None else faster(r, own)
        if found is not None:
            results += found
            continue
        if ordered and r.attrs[0] == "best":
            results += _first_best(own, r.attrs[2])
            continue
        results += closed(r, merged(r, [opened(r, own, lengths, starts or [0] * len(lengths))]))
    return results


def opened(r: Expr, stacked: list[Tensor], lengths: Sequence[int], starts: Sequence[int]) -> State:
    """A reduction's results of several parts as states; its places, counted from each part's start, are moved."""
    kind, _, params = r.attrs
    if kind in ("best", "topk") and any(starts):
        value, place = stacked
        stacked = [value, torch.where(place < 0, place, place + _per_part(starts, place))]
    return COMBINERS[kind].open(stacked, params, lengths)


def merged(r: Expr, states: Sequence[State]) -> State:
    """One part from those of all the states, in their order."""
    kind, _, params = r.attrs
    whole = states[0] if len(states) == 1 else [torch.cat(ts) for ts in zip(*states, strict=True)]
    if whole[0].shape[0] == 0:
        return _identity(r, whole)
    return whole if whole[0].shape[0] == 1 and kind != "user" else COMBINERS[kind].merge(whole, params)


def closed(r: Expr, state: State) -> list[Tensor]:
    """The state of one part as an engine would return it."""
    kind, _, params = r.attrs
    return [t.squeeze(0) for t in COMBINERS[kind].close(state, params)]


def split(fold: Fold, results: list[Any]) -> list[tuple[Expr, list[Any]]]:
    """Each reduction with its own results."""
    found, at = [], 0
    for r in fold.reductions:
        count = len(KINDS[r.attrs[0]].outputs(r.args, r.attrs[2]))
        found.append((r, results[at : at + count]))
        at += count
    return found


def _per_part(numbers: Sequence[int], like: Tensor) -> Tensor:
    """A number for each part, shaped to meet ``like``."""
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).view(-1, *(1,) * (like.dim() - 1))


def _identity(r: Expr, state: State) -> State:
    """The state of one part that saw nothing; ``state`` has none, but the shapes."""
    kind, _, params = r.attrs
    empty = [t.new_zeros(1, *t.shape[1:]) for t in state]
    if kind in ("best", "topk"):
        return [empty[0].fill_(worst(empty[0].dtype, params[-1])), empty[1].fill_(-1)]
    if kind == "soft":
        return [*empty[:-1], empty[-1].fill_(-math.inf)]
    if kind == "user":
        return [t.fill_(float(f.identity)) for t, f in zip(empty, params[0].fields().values(), strict=True)]
    return empty


# The kinds ---------------------------------------------------------------------------------------------------


def _as_is(state: State, *_: Any) -> State:
    return state


def _sum(state: State, params: tuple) -> State:
    return [state[0].sum(0, keepdim=True)]


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return x * (weight if x.dim() == weight.dim() else weight.unsqueeze(-1))


def _over(x: Tensor, weight: Tensor) -> Tensor:
    return x / (weight if x.dim() == weight.dim() else weight.unsqueeze(-1))


def _soft_open(results: State, params: tuple, lengths: Sequence[int]) -> State:
    """(z, means, log Σ exp(s - peak), peak) as (Σ exp(s - peak) × value, Σ exp(s - peak), peak)."""
    _, *means, log_total, peak = results
    total = log_total.exp()
    peak = torch.where(log_total.isinf(), log_total, peak)  # what saw nothing has none, what saw infinity has that
    return [*(_times(m, total) for m in means), total, peak]


def _soft_merge(state: State, params: tuple) -> State:
    *sums, total, peak = state
    top = peak.amax(0, keepdim=True)
    weight = torch.where(peak == top, 1.0, torch.exp(peak - top))
    return [*(_times(s, weight).sum(0, keepdim=True) for s in (*sums, total)), top]


def _soft_close(state: State, params: tuple) -> State:
    *sums, total, peak = state
    safe = torch.where(peak.isinf(), 0.0, peak)
    seen = torch.where(total == 0, 1.0, total)  # a row that sees nothing has mean 0
    log_total = torch.where(total == 0, -math.inf, seen.log())  # so written, its gradient is 0 there
    return [log_total + safe, *(_over(s, seen) for s in sums), log_total, safe]


def worst(dtype: torch.dtype, largest: bool) -> float:
    """What the best of nothing is; an end of int64 stays an exact Python integer."""
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    info = torch.iinfo(dtype)
    return info.min if largest else info.max


_NOWHERE = torch.iinfo(torch.int64).max


def _best(state: State, params: tuple) -> State:
    """The best value and the first place that has it; NaN beats all, as in torch."""
    value, place = state
    top = value.amax(0, keepdim=True) if params[0] else value.amin(0, keepdim=True)
    tied = (value == top) | (value != value)
    first, winner = torch.where(tied & (place >= 0), place, _NOWHERE).min(0, keepdim=True)
    return [value.gather(0, winner), torch.where(first == _NOWHERE, -1, first)]


def _first_best(state: State, params: tuple) -> State:
    """The same of parts in the order of their places: torch takes the first of equals, and NaN before all."""
    value, winner = state[0].max(0, keepdim=True) if params[0] else state[0].min(0, keepdim=True)
    return [value[0], state[1].gather(0, winner)[0]]


def _topk_open(results: State, params: tuple, lengths: Sequence[int]) -> State:
    """Where a part is shorter than k, the room it leaves is last of all: behind NaN too, when the smallest are kept."""
    value, place = results
    k, largest = params
    if min(lengths, default=k) >= k:
        return results
    seen = torch.arange(k, device=value.device) < _per_part(lengths, place)
    last = largest or not value.is_floating_point()  # an integer beats no room: ties are kept in the order of places
    return [value if last else torch.where(seen, value, math.nan), torch.where(seen, place, -2)]


def _topk_merge(state: State, params: tuple) -> State:
    """The k best of all parts: sorted by place first, then stably by value, so that ties keep their order."""
    k, largest = params
    value, place = (t.movedim(0, -2).flatten(-2) for t in state)
    order = torch.where(place == -2, _NOWHERE, place).argsort(dim=-1, stable=True)
    value, place = value.gather(-1, order), place.gather(-1, order)
    value, order = value.sort(dim=-1, descending=largest, stable=True)
    return [value[..., :k].unsqueeze(0), place.gather(-1, order)[..., :k].unsqueeze(0)]


def _topk_close(state: State, params: tuple) -> State:
    value, place = state
    return [torch.where(place == -2, worst(value.dtype, params[1]), value), place.clamp(min=-1)]


def _moments_open(results: State, params: tuple, lengths: Sequence[int]) -> State:
    mean, spread = results
    count = _per_part(lengths, mean).expand_as(mean)
    return [torch.where(count == 0, 0.0, mean), spread, count]


def _moments_merge(state: State, params: tuple) -> State:
    """Chan's formula for many parts: means around the first one, so that a large common mean costs no digits."""
    mean, spread, count = state
    total = count.sum(0, keepdim=True)
    share = count / torch.where(total == 0, 1.0, total)
    base = mean.gather(0, (count > 0).to(torch.uint8).argmax(0, keepdim=True))
    base = torch.where(base.isinf(), 0.0, base)
    middle = base + (share * (mean - base)).sum(0, keepdim=True)
    spread = spread + count * (mean - middle).square()
    return [middle, spread.sum(0, keepdim=True), total]


def _moments_close(state: State, params: tuple) -> State:
    mean, spread, count = state
    return [torch.where(count == 0, math.nan, mean), spread]


def _user(state: State, params: tuple) -> State:
    (monoid,) = params
    names = list(monoid.fields())
    folded = fold_monoid(monoid, dict(zip(names, state, strict=True)), dim=0)
    return [getattr(folded, n).unsqueeze(0) for n in names]


COMBINERS: dict[str, Combiner] = {
    "sum": Combiner(_as_is, _sum, _as_is),
    "pick": Combiner(_as_is, _sum, _as_is),  # a part that lacks the place adds nothing
    "soft": Combiner(_soft_open, _soft_merge, _soft_close),
    "best": Combiner(_as_is, _best, _as_is),
    "topk": Combiner(_topk_open, _topk_merge, _topk_close),
    "moments": Combiner(_moments_open, _moments_merge, _moments_close),
    "user": Combiner(_as_is, _user, _as_is),
    "pair": Combiner(_as_is, _as_is, _as_is),  # every pair is in one part: written there, never merged
}
