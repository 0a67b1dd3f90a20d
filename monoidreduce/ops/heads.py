"""What all vocabulary heads share: the logits of a head in the pair language, and the checks of what makes them.

A head is ``x`` [..., D], ``weight`` [V, D] and, optionally, ``bias`` [V], ``softcap`` and ``temperature``; its logits
are ``softcap · tanh((x @ weight.T + bias) / softcap) / temperature``, one number per row of x and class, never held as
a matrix."""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
from torch import Tensor

from . import checks
from . import language as mr


@no_type_check
def logits(x, weight, bias, softcap, temperature):
    """One pair's logit."""
    return apply_softcap(x @ weight if bias is None else x @ weight + bias, softcap, temperature)


def apply_softcap(s: Any, softcap: Any, temperature: Any) -> Any:
    """What becomes of a product: in the pair language or in plain torch."""
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    return s if temperature is None else s / temperature


@no_type_check
def subtract_shift(s, careful):
    """Logits less their logsumexp, held constant: a loss that no shift changes then is no gap of two large numbers.

    It costs one more pass, and is left out for 16-bit inputs, whose rounding is larger than that of the gap.
    """
    return s - shift(s) if careful else s


def shift(s: Any) -> Any:
    """A row's logsumexp as a constant."""
    return torch.detach(replace_minus_inf(mr.logsumexp(s)))


def replace_minus_inf(z: Any) -> Any:
    """A row's logsumexp to subtract from its logits: 0 where it sees nothing, since -inf less -inf were NaN."""
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
    """Whether the digits of a small loss are worth a first pass."""
    return isinstance(x, Tensor) and x.dtype.itemsize > 2


def check(x: Any, weight: Any, bias: Any, softcap: Any, temperature: Any = 1.0, *, prefix: str = "") -> dict[str, Any]:
    """Check the arguments of a head; returns those that an op is given as they are, None where nothing changes."""
    checks.head(x, weight, bias, prefix)
    if softcap is not None:
        checks.positive(f"{prefix}softcap", softcap)
    checks.positive("temperature", temperature)
    return options(bias, softcap, temperature)


def options(bias: Any, softcap: Any, temperature: Any) -> dict[str, Any]:
    """What an op is given of a head that was checked: None where nothing changes."""
    plain = not isinstance(temperature, Tensor) and temperature == 1
    return {"bias": bias, "softcap": softcap, "temperature": None if plain else temperature}
