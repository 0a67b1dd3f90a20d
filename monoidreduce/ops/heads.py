"""What all vocabulary heads share: the logits of a head in the pair language, and the checks of what makes them.

A head is ``x`` [..., D], ``weight`` [V, D] and, optionally, ``bias`` [V], ``softcap`` and ``temperature``; its logits
are ``softcap · tanh((x @ weight.T + bias) / softcap) / temperature``, one number per row of x and class, never held as
a matrix."""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentError, ShapeError, shown
from . import checks
from . import language as mr


@no_type_check
def logits(x, weight, bias, softcap, temperature, low_rows=None, low_cols=None):
    """One pair's logit; ``low_rows`` and ``low_cols`` are a second product, added to the first."""
    s = x @ weight if low_rows is None else x @ weight + low_rows @ low_cols
    return apply_softcap(s if bias is None else s + bias, softcap, temperature)


def apply_softcap(s: Any, softcap: Any, temperature: Any) -> Any:
    """Apply softcap and temperature to a logit, in the pair language or in plain torch."""
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    return s if temperature is None else s / temperature


@no_type_check
def subtract_shift(s, careful):
    """Logits minus their logsumexp, held constant. A loss that no shift changes is then not a difference of two large
    numbers.

    It costs one more pass, and is left out for 16-bit inputs, whose rounding is larger than that of the gap.
    """
    return s - shift(s) if careful else s


def shift(s: Any) -> Any:
    """A row's logsumexp as a constant."""
    return torch.detach(replace_minus_inf(mr.logsumexp(s)))


def replace_minus_inf(z: Any) -> Any:
    """A row's logsumexp to subtract from its logits: 0 where all logits are -inf, since -inf - -inf is NaN."""
    return torch.where(z == -math.inf, 0.0, z)


@no_type_check
def entropy(s, masked):
    """Of one row's softmax, in nats; 0 where there is nothing to see. ``masked``: whether a logit may be -inf."""
    z = mr.logsumexp(s)
    value = torch.where(s == -math.inf, 0.0, s) if masked else s  # 0 · log 0 = 0
    return torch.where(z == -math.inf, 0.0, z - mr.softmax_mean(s, value))


@no_type_check
def mask_ignored(target, ignore_index, value):
    """A value per row that belongs to its label: 0 where that is to be ignored, NaN where it is no class."""
    known = (target >= 0) & (target < mr.num_cols)
    return torch.where(target == ignore_index, 0.0, torch.where(known, value, math.nan))


def needs_shift(x: Any) -> bool:
    """True where a first pass is worth its cost: inputs wider than 16 bits, whose small losses would lose digits."""
    return isinstance(x, Tensor) and x.dtype.itemsize > 2


def check_low_rank(x: Any, weight: Any, low_rank: Any) -> tuple[Any, Any]:
    """Check the pair that makes a low-rank term of the logits; returns its rows and columns, None without it."""
    if low_rank is None:
        return None, None
    if not isinstance(low_rank, (tuple, list)) or len(low_rank) != 2:
        raise ArgumentError(
            detail=f"low_rank was given {shown(low_rank)}",
            fix="Give a pair of tensors, rows [..., r] and columns [V, r]",
        )
    rows, cols = low_rank
    checks.tensor("low_rank[0]", rows, "[..., r]", 1)
    checks.tensor("low_rank[1]", cols, "[V, r]", 2, 2)
    checks.alike(x=x, **{"low_rank[0]": rows, "low_rank[1]": cols})
    if rows.shape[:-1] != x.shape[:-1] or cols.shape[0] != weight.shape[0] or rows.shape[-1] != cols.shape[-1]:
        raise ShapeError(
            detail=f"low_rank has shapes {tuple(rows.shape)} and {tuple(cols.shape)} beside x {tuple(x.shape)} and "
            f"weight {tuple(weight.shape)}",
            fix="Give rows [..., r], a vector for each of x, and columns [V, r], a vector for each of weight",
        )
    return rows, cols


def check(x: Any, weight: Any, bias: Any, softcap: Any, temperature: Any = 1.0, *, prefix: str = "") -> dict[str, Any]:
    """Check the arguments of a head; returns the keyword arguments of an op, None for what changes nothing."""
    checks.head(x, weight, bias, prefix)
    if softcap is not None:
        checks.positive(f"{prefix}softcap", softcap)
    checks.positive("temperature", temperature)
    return options(bias, softcap, temperature)


def options(bias: Any, softcap: Any, temperature: Any) -> dict[str, Any]:
    """The keyword arguments of an op for a checked head; None for what changes nothing."""
    plain = not isinstance(temperature, Tensor) and temperature == 1
    return {"bias": bias, "softcap": softcap, "temperature": None if plain else temperature}


def take_vectors(at: Tensor, vectors: Tensor) -> Tensor:
    """``vectors[at]``, with a deterministic gradient; F.embedding has no second derivative where nothing is taken."""
    return F.embedding(at, vectors) if at.numel() else vectors[at]
