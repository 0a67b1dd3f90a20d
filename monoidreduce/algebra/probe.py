"""A quick look at a monoid's laws before its first fold, by ``mr.reduce`` and ``mr.fold``.

A ``combine`` that is not associative, not commutative although it claims to be, or whose identity is none gives results
that depend on how a fold is cut in tiles, without a sign. A few dozen small cases of ordinary numbers, drawn from the
monoid's ``domain``, show that in a few milliseconds, once for each class. ``laws.check`` looks at much more; what is
refused here is wrong by far more than rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from monoidreduce.algebra.cases import FAMILIES, Case, draw_case, mapped, scale_of
from monoidreduce.algebra.laws import LAWS
from monoidreduce.algebra.tree import combined
from monoidreduce.algebra.verdict import broken, law_error, smallest
from monoidreduce.errors import MonoidLawError

_CASES = 16
_SIZE = 2  # features of a vector
_TOLERANCE = 1e-3  # of the largest number involved: no rounding, even of 16 bits inside combine's sums, comes near
_MARK = "_laws_probed"
_PROBED = [law for law in LAWS if law.name in ("associativity", "commutativity", "left_identity", "right_identity")]
_ADVICE = (
    ". Its folds would depend on how they are cut in tiles. If such states cannot be reached, say which can with "
    "domain (docs/monoids.md)"
)


def probe(monoid: Any) -> None:
    """Raise MonoidLawError for a monoid that plainly breaks a law; nothing the second time."""
    if _MARK in monoid.__dict__ or torch.compiler.is_compiling() or _watched():
        return
    error = None
    try:
        with torch.device("cpu"), torch.no_grad():
            error = _first_broken(monoid)
    except Exception:  # combine does not take these numbers: the fold itself will say what is wrong
        pass
    if error is not None:
        raise error
    setattr(monoid, _MARK, True)


def _watched() -> bool:
    """Whether torch's calls do not compute here: fake tensors, or a function transform."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active())


def _first_broken(monoid: Any) -> MonoidLawError | None:
    gen = torch.Generator().manual_seed(0)
    family = FAMILIES[0]  # ordinary numbers
    for law in _PROBED:
        if law.unless(monoid):
            continue
        case: Case | None = draw_case(
            monoid, family, gen, count=_CASES, elements=max(2, law.takes or 2), size=_SIZE, uneven=False, fields={}
        )
        case = _where_defined(case) if case is not None and case.batched else case
        if case is None:
            continue
        if law.takes == 1:  # the identity of folds: a norm is none of negative numbers, which no fold of it gives
            case = replace(case, elements=(combined(*case.elements),))
        sides = broken(law, case)
        if sides is not None and _differ_much(case, sides.left, sides.right):
            return law_error(replace(law, fix=law.fix + _ADVICE), family, smallest(law, case, {}))
    return None


def _where_defined(case: Case) -> Case | None:
    """The cases whose elements combine with each other without a NaN: others lie outside what combine is meant for."""
    legal = torch.ones(_CASES, dtype=torch.bool)
    for a in case.elements:
        for b in case.elements:
            for v in combined(a, b).asdict().values():
                legal &= (v == v).reshape(_CASES, -1).all(-1)
    if not legal.any():
        return None
    return replace(
        case, elements=tuple(mapped(x, lambda t: t[legal]) for x in case.elements), g=mapped(case.g, lambda t: t[legal])
    )


def _differ_much(case: Case, left: Any, right: Any) -> bool:
    for name, x in left.asdict().items():
        y = getattr(right, name)
        if not isinstance(x, Tensor) or x.shape != y.shape or not x.is_floating_point():
            if not isinstance(x, Tensor) or x.shape != y.shape or not torch.equal(x, y):
                return True
            continue
        sizes = [torch.as_tensor(scale_of(case, n)).amax().item() for n in left.fields()]
        largest = max([1.0, *sizes, *(v.abs().nan_to_num(0.0, 0.0, 0.0).amax().item() for v in (x, y) if v.numel())])
        same = (x == y) | ((x != x) & (y != y))
        if not bool((same | ((x - y).abs() <= _TOLERANCE * largest)).all()):
            return True
    return False


__all__ = ["probe"]
