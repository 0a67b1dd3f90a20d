"""From a case that breaks a law to a small one that still does: fewer elements, fewer features, rounder numbers.

Greedy: the first simplification under which the law still fails is taken, until none is left or the budget is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from monoidreduce.algebra.cases import Case, domain_of, mapped
from monoidreduce.algebra.fields import Function, List, Matrix, Vector
from monoidreduce.algebra.monoid import Monoid

from .fields import is_sampled

_BUDGET = 2000  # law evaluations; most examples are as small as they get after a few hundred


def shrink(case: Case, fails: Callable[[Case], bool], fields: Mapping[str, Any], *, fewer: bool) -> Case:
    """The smallest failing case found. ``fewer``: the law takes any number of elements, so some may be dropped."""
    if case.batched:
        return case
    spent = 0
    progress = True
    while progress and spent < _BUDGET:
        progress = False
        for candidate in _simpler(case, fields, fewer):
            spent += 1
            if spent > _BUDGET:
                break
            if fails(candidate):
                case, progress = candidate, True
                break
    return case


def _simpler(case: Case, fields: Mapping[str, Any], fewer: bool) -> Iterator[Case]:
    monoid = type(case.elements[0])
    if fewer:
        yield from _fewer_elements(case)
    yield from _coarser_parts(case)
    for k, x in enumerate(case.elements):
        identity = monoid.identity(x)
        if _weight(identity) < _weight(x):
            yield _with_element(case, k, identity)
    if is_sampled(monoid):  # only the sampler knows which numbers go together
        return
    yield from _fewer_features(case)
    for k, x in enumerate(case.elements):
        for simpler in _rounder(x, fields):
            if _weight(simpler) < _weight(x):
                yield _with_element(case, k, simpler)
    if monoid.has_gradient:
        for simpler in _rounder(case.g, {}, cotangent=True):
            if _weight(simpler) < _weight(case.g):
                yield replace(case, g=simpler)


def _fewer_elements(case: Case) -> Iterator[Case]:
    if len(case.elements) < 2:
        return
    for k in range(len(case.elements)):
        parts = tuple(tuple(i - (i > k) for i in part if i != k) for part in case.parts)
        if parts[0]:
            yield replace(case, elements=case.elements[:k] + case.elements[k + 1 :], parts=parts)


def _coarser_parts(case: Case) -> Iterator[Case]:
    for k in range(1, len(case.parts)):
        if not case.parts[k]:
            yield replace(case, parts=case.parts[:k] + case.parts[k + 1 :])
        joined = case.parts[k - 1] + case.parts[k]
        if case.parts[k]:
            yield replace(case, parts=(*case.parts[: k - 1], joined, *case.parts[k + 1 :]))


def _fewer_features(case: Case) -> Iterator[Case]:
    monoid = type(case.elements[0])
    kinds = {name: field.marker for name, field in monoid.fields().items()}
    widths = {getattr(case.elements[0], name).shape[-1] for name, kind in kinds.items() if kind in (Vector, Matrix)}
    if not widths or max(widths) < 2:
        return
    width = max(widths)
    for lost in range(width):
        kept = [i for i in range(width) if i != lost]

        def narrow(x: Any, kept: list[int] = kept) -> Any:
            values = x.asdict()
            for name, kind in kinds.items():
                if kind in (Vector, Matrix) and values[name].shape[-1] == width:
                    values[name] = values[name][..., kept]
                    values[name] = values[name][..., kept, :] if kind is Matrix else values[name]
            return type(x)(**values)

        yield replace(case, elements=tuple(narrow(x) for x in case.elements), g=narrow(case.g))


def _rounder(x: Any, fields: Mapping[str, Any], *, cotangent: bool = False) -> Iterator[Any]:
    """Elements like ``x`` with one list shorter or one number simpler."""
    monoid = type(x)
    lists = [name for name, field in monoid.fields().items() if field.marker is List]
    if lists and not cotangent and x.asdict()[lists[0]].shape[-1] > 0:
        yield mapped(x, lambda t: t[..., :-1])
    for name, field in monoid.fields().items():
        domain = domain_of(monoid, name, fields)
        if field.marker is Function or domain is None:
            continue
        value: Tensor = x.asdict()[name]
        for at in range(value.numel()):
            old = value.flatten()[at].item()
            for new in _simpler_numbers(float(old)):
                legal = new if cotangent else domain.clamp(new)
                changed = value.clone().flatten()
                changed[at] = legal
                values = {**x.asdict(), name: changed.reshape(value.shape)}
                yield monoid(**values) if cotangent else monoid.legal(monoid(**values))


def _simpler_numbers(x: float) -> list[float]:
    candidates = [0.0, 1.0, -1.0, 2.0, -2.0, 0.5]
    if x == x and abs(x) != float("inf"):
        candidates += [float(round(x)) if abs(x) < 1e6 else x, float(f"{x:.1g}"), float(f"{x:.2g}"), float(f"{x:.4g}")]
    return [c for c in candidates if _digits(c) < _digits(x)]


def _digits(x: float) -> float:
    """How hard a number is to read: its significant digits count most, then its sign and its size; 0 is simplest."""
    if x == 0:
        return 0.0
    if abs(x) == float("inf"):
        return 4.0
    mantissa, exponent = f"{abs(x):.16e}".split("e")
    significant = len(mantissa.replace(".", "").rstrip("0"))
    return significant + 0.3 * (x < 0) + 0.1 * abs(int(exponent)) + 0.01 * float(mantissa)


def _weight(x: Any) -> float:
    tensors = [t for t in x.asdict().values() if isinstance(t, Tensor)]
    numbers = torch.cat([t.double().flatten() for t in tensors]).tolist() if tensors else []
    return sum(map(_digits, numbers)) + 20.0 * len(numbers)


def _with_element(case: Case, k: int, x: Monoid) -> Case:
    return replace(case, elements=(*case.elements[:k], x, *case.elements[k + 1 :]))


__all__ = ["shrink"]
