"""Partial folds put together: the results of disjoint parts of the folded axis become the results of the whole.

This is ⊙ for whole results, in plain torch: the second step of a split schedule, what ranks exchange, what a stream
keeps. An engine's results are first opened into a *state* that combines without loss (a softmax mean into its weight
and sum, moments into a count as well), states lie stacked along a new leading dimension, and the combined state is
closed into results again (``reductions/base.py``: open, merge, close). An empty part, or one that saw only the
identity, changes nothing. The order of combination is that of the stack; where places tie, the smallest wins whatever
the order, as if the axis had never been cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...program.expression import Expr
from ...program.lower import Fold
from ...reductions import State, kind_of, outputs_of
from ...reductions.base import per_part


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
        if found is None and ordered:
            found = kind_of(r).merge_ordered(r.attrs[2], own)
        if found is None:
            found = close_state(r, merge_states(r, [open_state(r, own, lengths, starts or [0] * len(lengths))]))
        results += found
    return results


def open_state(r: Expr, stacked: list[Tensor], lengths: Sequence[int], starts: Sequence[int]) -> State:
    """A reduction's results of several parts as states; its places, counted from each part's start, are moved."""
    kind = kind_of(r)
    if kind.place is not None and any(starts):
        stacked = list(stacked)
        place = stacked[kind.place]
        stacked[kind.place] = torch.where(place < 0, place, place + per_part(starts, place))
    return kind.open(r.attrs[2], stacked, lengths)


def merge_states(r: Expr, states: Sequence[State]) -> State:
    """One part from those of all the states, in their order."""
    return kind_of(r).merge_all(r.attrs[2], states)


def close_state(r: Expr, state: State) -> list[Tensor]:
    """The state of one part as an engine would return it."""
    return [t.squeeze(0) for t in kind_of(r).close(r.attrs[2], state)]


def split(fold: Fold, results: list[Any]) -> list[tuple[Expr, list[Any]]]:
    """Each reduction with its own results."""
    found, at = [], 0
    for r in fold.reductions:
        count = len(outputs_of(r))
        found.append((r, results[at : at + count]))
        at += count
    return found
