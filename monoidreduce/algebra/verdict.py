"""Whether a case breaks a law, and what to tell the user if it does.

A law gives two sides; here they are compared, the smallest counterexample is found, and the message is written.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoidreduce.algebra.cases import Case, Family, domain_of, mapped, scale_of
from monoidreduce.algebra.fields import Domain, Function, List, Matrix, Scalar, Vector, approximately
from monoidreduce.algebra.monoid import Monoid
from monoidreduce.errors import MonoidLawError

from .fields import field_domains, is_related, is_sampled, reachable

# From a case that breaks a law to a small one that still does: fewer elements, fewer features, rounder numbers.
#
# Greedy: the first simplification under which the law still fails is taken, until none is left or the budget is spent.

_BUDGET = 2000  # law evaluations; most examples are as small as they get after a few hundred


def shrink(case: Case, fails: Callable[[Case], bool], fields: Mapping[str, Any], *, fewer: bool) -> Case:
    """The smallest failing case found. ``fewer``: the law takes any number of elements, so some may be dropped."""
    if case.batched:
        return case
    spent = 0
    progress = True
    while progress and spent < _BUDGET:
        progress = False
        for candidate in _simplify(case, fields, fewer):
            spent += 1
            if spent > _BUDGET:
                break
            if fails(candidate):
                case, progress = candidate, True
                break
    return case


def _simplify(case: Case, fields: Mapping[str, Any], fewer: bool) -> Iterator[Case]:
    monoid = type(case.elements[0])
    if fewer:
        yield from _drop_elements(case)
    yield from _join_parts(case)
    for k, x in enumerate(case.elements):
        identity = monoid.identity(x)
        if _weigh(identity) < _weigh(x):
            yield _with_element(case, k, identity)
    if is_sampled(monoid):  # only the sampler knows which numbers go together
        return
    yield from _drop_features(case)
    for k, x in enumerate(case.elements):
        for simpler in _round_elements(x, fields):
            if _weigh(simpler) < _weigh(x):
                yield _with_element(case, k, simpler)
    if monoid.has_gradient:
        for simpler in _round_elements(case.g, {}, cotangent=True):
            if _weigh(simpler) < _weigh(case.g):
                yield replace(case, g=simpler)


def _drop_elements(case: Case) -> Iterator[Case]:
    if len(case.elements) < 2:
        return
    for k in range(len(case.elements)):
        parts = tuple(tuple(i - (i > k) for i in part if i != k) for part in case.parts)
        if parts[0]:
            yield replace(case, elements=case.elements[:k] + case.elements[k + 1 :], parts=parts)


def _join_parts(case: Case) -> Iterator[Case]:
    for k in range(1, len(case.parts)):
        if not case.parts[k]:
            yield replace(case, parts=case.parts[:k] + case.parts[k + 1 :])
        joined = case.parts[k - 1] + case.parts[k]
        if case.parts[k]:
            yield replace(case, parts=(*case.parts[: k - 1], joined, *case.parts[k + 1 :]))


def _drop_features(case: Case) -> Iterator[Case]:
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


def _round_elements(x: Any, fields: Mapping[str, Any], *, cotangent: bool = False) -> Iterator[Any]:
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
            for new in _list_simpler_numbers(float(old)):
                legal = new if cotangent else domain.clamp(new)
                changed = value.clone().flatten()
                changed[at] = legal
                values = {**x.asdict(), name: changed.reshape(value.shape)}
                yield monoid(**values) if cotangent else monoid.legal(monoid(**values))


def _list_simpler_numbers(x: float) -> list[float]:
    candidates = [0.0, 1.0, -1.0, 2.0, -2.0, 0.5]
    if x == x and abs(x) != float("inf"):
        candidates += [float(round(x)) if abs(x) < 1e6 else x, float(f"{x:.1g}"), float(f"{x:.2g}"), float(f"{x:.4g}")]
    return [c for c in candidates if _count_digits(c) < _count_digits(x)]


def _count_digits(x: float) -> float:
    """How hard a number is to read: its significant digits count most, then its sign and its size; 0 is simplest."""
    if x == 0:
        return 0.0
    if abs(x) == float("inf"):
        return 4.0
    mantissa, exponent = f"{abs(x):.16e}".split("e")
    significant = len(mantissa.replace(".", "").rstrip("0"))
    return significant + 0.3 * (x < 0) + 0.1 * abs(int(exponent)) + 0.01 * float(mantissa)


def _weigh(x: Any) -> float:
    tensors = [t for t in x.asdict().values() if isinstance(t, Tensor)]
    numbers = torch.cat([t.double().flatten() for t in tensors]).tolist() if tensors else []
    return sum(map(_count_digits, numbers)) + 20.0 * len(numbers)


def _with_element(case: Case, k: int, x: Monoid) -> Case:
    return replace(case, elements=(*case.elements[:k], x, *case.elements[k + 1 :]))


class Sides(NamedTuple):
    """The two sides of a law: elements of the monoid, or cotangents in the same fields.

    >>> from monoidreduce.algebra.laws import commutativity
    >>> from monoidreduce.algebra.catalogue import Sum
    >>> left, right = commutativity(Sum, Sum(v=1), Sum(v=2))
    >>> left.v == right.v
    True
    """

    left: Any
    right: Any


@dataclass(frozen=True)
class Law:
    """A row of the table: how to try a law on a case, how to write it, and what to advise when it is broken.

    >>> from monoidreduce.algebra.laws import LAWS
    >>> [law.name for law in LAWS][:2]
    ['associativity', 'commutativity']
    """

    name: str
    run: Callable[[Any, Case], Sides]
    takes: int | None  # how many elements; None: any number
    left: str
    right: str
    fix: str
    unless: Callable[[Any], str] = lambda monoid: ""  # why it does not apply; "" if it does
    gradient: bool = False


def broken(law: Law, case: Case) -> Sides | None:
    """The two sides if they differ by more than rounding or hold a NaN, which no law allows: no example does."""
    sides, equal = _compare(law, case)
    if equal and not _has_nan(sides.left) and not _has_nan(sides.right):
        return None
    return None if _is_rounding(law, case, sides) else sides


def _compare(law: Law, case: Case) -> tuple[Sides, bool]:
    """The sides, made comparable, and whether they are equal by the monoid's own equality."""
    monoid: Any = type(case.elements[0])
    left, right = law.run(monoid, case)
    if law.gradient:
        right = _keep_differentiable(case, left, right)
        return Sides(left, right), Monoid.approx(left, right, scale=_find_gradient_scale(case))
    equal = approximately(left, right, {name: scale_of(case, name) for name in monoid.fields()})
    return Sides(left, right), equal and not _differ_within_a_small_domain(case, left, right)


def _differ_within_a_small_domain(case: Case, left: Any, right: Any) -> bool:
    """Equality allows an absolute error of 1e-8; of a field whose bounds are much smaller that would be everything."""
    for name, domain in field_domains(type(left)).items():
        largest = max(abs(domain.low), abs(domain.high)) if isinstance(domain, Domain) else math.inf
        x, y = getattr(left, name), getattr(right, name)
        comparable = 0 < largest < 1 and x.is_floating_point() and x.shape == y.shape
        if comparable and bool(((x - y).abs() > 1.5e-8 * largest).any()):
            return True
    return False


# Rounding ----------------------------------------------------------------------------------------------------

_TRIES = 12
_NUDGE = 2e-7  # relative: more than combine loses where it computes in float32, much less than a broken law moves
_SHIFT = 1e-14
_FACTOR = 8.0


def _is_rounding(law: Law, case: Case, sides: Sides) -> bool:
    """Whether sides differ by no more than each moves by itself when the elements change in their seventh digit.

    So it is where the result is a choice between almost equal candidates, where numbers cancel, and where ``combine``
    rounds. Numbers of equal size are changed alike, so that exact ties stay ties: to break them differently is no
    rounding.
    """
    if _has_nan(sides.left) or _has_nan(sides.right):
        return False
    names = [n for n, v in sides.left.asdict().items() if isinstance(v, Tensor)]
    if len(names) < len(sides.left.asdict()):  # functions
        return False
    pairs = {n: (getattr(sides.left, n), getattr(sides.right, n)) for n in names}
    if any(x.shape != y.shape for x, y in pairs.values()):
        return False
    moved = {n: torch.zeros_like(x, dtype=torch.float64) for n, (x, _) in pairs.items()}
    for k in range(_TRIES):
        try:
            elements = tuple(_nudge(x, k, int(case.batched)) for x in case.elements)
            found, _ = _compare(law, replace(case, elements=elements))
        except Exception:  # the change went outside what combine can take
            return False
        for n, (x, y) in pairs.items():
            for before, now in ((x, getattr(found.left, n)), (y, getattr(found.right, n))):
                if before.shape != now.shape:
                    return False
                moved[n] = torch.maximum(moved[n], _measure_distance(before, now))
    return all(bool((_measure_distance(x, y) <= _FACTOR * moved[n]).all()) for n, (x, y) in pairs.items())


def _measure_distance(x: Tensor, y: Tensor) -> Tensor:
    """How far apart numbers are; 1 for whole numbers and booleans that differ, 0 for equal infinities."""
    if not (x.is_floating_point() and y.is_floating_point()):
        return (x != y).double()
    return torch.where((x == y) | ((x != x) & (y != y)), 0.0, (x.double() - y.double()).abs()).nan_to_num(math.inf)


def _nudge(x: Any, k: int, batch: int) -> Any:
    """The element with every number changed a little, those of equal size in a field alike; within the domain."""
    monoid = type(x)
    values = {}
    for name, t in x.asdict().items():
        if not t.is_floating_point():
            values[name] = t
            continue
        t = t.double()
        bits = (t.abs().contiguous().view(torch.int64) + k * 7919) * -7046029254386353131
        bits = (bits ^ (bits >> 29)) * -4658895280553007687  # a hash: numbers that are close move independently
        part = (((bits ^ (bits >> 32)) >> 16) & 0xFFFF).double() / 0x8000 - 1.0
        # and by rounding beside numbers of size 1 that combine may add; what is exactly 0 stays so
        new = torch.where(torch.isfinite(t) & (t != 0), t * (1.0 + _NUDGE * part) + _SHIFT * part * t.sign(), t)
        domain = field_domains(monoid).get(name)
        if isinstance(domain, Domain):
            new = torch.where((new < domain.low) | (new > domain.high), t, new)
        values[name] = new
    changed = monoid.legal(monoid(**values))
    if not is_related(monoid):
        return changed
    stays = ~reachable(changed, batch)
    return monoid(
        **{
            n: torch.where(stays.reshape(*stays.shape, *(1,) * (t.dim() - stays.dim())), getattr(x, n), t)
            for n, t in changed.asdict().items()
        }
    )


def _keep_differentiable(case: Case, left: Any, right: Any) -> Any:
    """``right``, but ``left`` where there is nothing to compare with; there ``left`` may be any number, but not NaN.

    That is where autograd itself gives NaN, and where many monoids have a kink: where all elements have the identity's
    value in some field, or two have the same infinity.
    """
    kink = torch.tensor(False, device="cpu")
    for name, field in type(left).fields().items():
        values = torch.stack([getattr(x, name) for x in case.elements])
        if values.is_floating_point() and field.marker is not List:
            alike = (values == field.identity).all(0)
            for infinity in (math.inf, -math.inf):
                alike = alike | ((values == infinity).sum(0) > 1) & (infinity != field.identity)
            kink = kink | alike.flatten(int(case.batched)).any(-1)
    chosen = {}
    for name, r in right.asdict().items():
        here = kink.reshape(kink.shape + (1,) * (r.dim() - kink.dim()))
        answer = getattr(left, name).to(r.dtype)
        chosen[name] = torch.where((r != r) | here, torch.where(answer != answer, 0, answer), r)
    return type(right)(**chosen)


def _count_possible_kinks(case: Case) -> int:
    """How many numbers of the elements are 0 or occur twice: where a derivative may well not exist."""
    total = 0
    for name, field in type(case.elements[0]).fields().items():
        values = (
            torch.stack([getattr(x, name) for x in case.elements])
            if field.marker is not List
            else torch.zeros(0, device="cpu")
        )
        if values.is_floating_point():
            total += int((values == 0).sum()) + sum(int((values == v).sum()) - v.numel() for v in values)
    return total


def _find_gradient_scale(case: Case) -> dict[str, Tensor]:
    """Cotangents of one field are made of all fields, so they are as good as the largest number there is."""
    fields = type(case.g).fields()
    floats = [name for name in fields if getattr(case.g, name).is_floating_point()]
    cotangent = replace(case, elements=(case.g,))
    sizes = [scale_of(each, name) for each in (case, cotangent) for name in floats]
    flat = torch.stack([torch.as_tensor(size).flatten(int(case.batched)).amax(-1) for size in sizes]).amax(0)
    return {name: flat.reshape(*flat.shape, *(1,) * field.trailing) for name, field in fields.items()}


def smallest(law: Law, case: Case, given: Mapping[str, Any]) -> Case:
    kinks = sys.maxsize

    def fails(candidate: Case) -> bool:
        try:
            if law.gradient and _count_possible_kinks(candidate) > kinks:
                return False  # it might fail there for another reason
            if not all(bool(reachable(x, int(candidate.batched)).all()) for x in candidate.elements):
                return False
            return broken(law, candidate) is not None
        except Exception:  # a simplification went outside what combine can take: not a counterexample
            return False

    if case.batched:
        count = next(iter(case.elements[0].asdict().values())).shape[0]
        alone = next((one for one in map(case.pick, range(count)) if fails(one)), None)
        if alone is None:
            firsts = (case.first(n) for n in range(1, count))
            return next((few for few in firsts if fails(few)), case)
        case = alone
    kinks = _count_possible_kinks(case) if law.gradient else 0
    return shrink(case, fails, given, fewer=law.takes is None)


def law_error(law: Law, family: Family, case: Case) -> MonoidLawError:
    sides = broken(law, case) or Sides(None, None)
    names = "abc" if law.takes else [f"x{i}" for i in range(len(case.elements))]
    lines = [(name, _show(x)) for name, x in zip(names, case.elements, strict=False)]
    if law.gradient:
        lines.append(("g", _show(case.g)))
    parts = [list(part) for part in case.parts]
    left, right = _show(sides.left), _show(sides.right)
    if left == right:  # they differ in later digits
        left, right = _show(sides.left, 17), _show(sides.right, 17)
    lines += [(law.left.format(parts=parts), left), (law.right.format(parts=parts), right)]
    fix = law.fix
    if case.batched:
        fix += ". It fails only for several elements at once: combine must treat every leading axis as a batch"
    if not getattr(type(case.elements[0]), "domain", None):
        fix += ". If no fold can reach such a state, say so with a domain over all fields (writing a monoid: domains)"
    example = "\n".join(f"  {name} = {value}" for name, value in lines) + f"\n  found among {family.name}"
    return MonoidLawError(monoid=type(case.elements[0]).__name__, law=law.name, example=example, fix=fix)


def _show(x: Any, digits: int = 6) -> str:
    def number(v: Any) -> str:
        if isinstance(v, list):
            return "[" + ", ".join(map(number, v)) + "]"
        return f"{v:.{digits}g}" if isinstance(v, float) else str(v)

    def value(name: str, v: Any) -> str:
        if not isinstance(v, Tensor):
            return str(v)
        return number((v.squeeze(-1) if type(x).fields()[name].marker is Scalar else v).tolist())

    return f"{type(x).__name__}({', '.join(f'{name}={value(name, v)}' for name, v in x.asdict().items())})"


def _has_nan(x: Any) -> bool:
    return any(bool((v != v).any()) for v in x.asdict().values() if isinstance(v, Tensor))


__all__ = ["Law", "Sides", "broken", "law_error", "shrink", "smallest"]
