"""The laws of monoids, each a function that returns two sides which must be equal; and ``check``, which tries them.

Users run ``check`` on their own monoids, and tests on the catalogue. Laws are only approximately true of floating-point
numbers, so each monoid brings its own equality (``approx``); cotangents are compared number by number.

>>> from monoidreduce import laws, monoids
>>> laws.check(monoids.LogSumExp).counts["local_gradient"] >= 200
True
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from monoidreduce.algebra.cases import FAMILIES, Case, Family, NoExampleError, domain_of, draw_case, mapped, scale_of
from monoidreduce.algebra.fields import Domain, List, combined
from monoidreduce.algebra.monoid import Monoid
from monoidreduce.algebra.verdict import Law, Sides, broken, law_error, smallest
from monoidreduce.errors import ArgumentError, MonoidLawError, ShapeError

from .fields import is_sampled
from .monoid import vjp


def associativity(monoid: Any, a: Any, b: Any, c: Any) -> Sides:
    """``(a ⊙ b) ⊙ c = a ⊙ (b ⊙ c)``.

    >>> from monoidreduce.algebra.catalogue import Sum
    >>> associativity(Sum, Sum(v=1), Sum(v=2), Sum(v=3))
    Sides(left=Sum(v=6), right=Sum(v=6))
    """
    return Sides(combined(combined(a, b), c), combined(a, combined(b, c)))


def commutativity(monoid: Any, a: Any, b: Any) -> Sides:
    """``a ⊙ b = b ⊙ a``.

    >>> from monoidreduce.algebra.catalogue import Sum
    >>> commutativity(Sum, Sum(v=1), Sum(v=2))
    Sides(left=Sum(v=3), right=Sum(v=3))
    """
    return Sides(combined(a, b), combined(b, a))


def left_identity(monoid: Any, a: Any) -> Sides:
    """``identity ⊙ a = a``.

    >>> from monoidreduce.algebra.catalogue import Sum
    >>> left_identity(Sum, Sum(v=torch.ones(1)))
    Sides(left=Sum(v=tensor([1.])), right=Sum(v=tensor([1.])))
    """
    return Sides(combined(monoid.identity(a), a), a)


def right_identity(monoid: Any, a: Any) -> Sides:
    """``a ⊙ identity = a``.

    >>> from monoidreduce.algebra.catalogue import Sum
    >>> right_identity(Sum, Sum(v=torch.ones(1)))
    Sides(left=Sum(v=tensor([1.])), right=Sum(v=tensor([1.])))
    """
    return Sides(combined(a, monoid.identity(a)), a)


def partition(monoid: Any, xs: Sequence[Any], parts: Sequence[Sequence[int]]) -> Sides:
    """A fold is the fold of the folds of its parts, which may be empty; for ordered monoids the parts are in order.

    >>> from monoidreduce.algebra.catalogue import Sum
    >>> partition(Sum, [Sum(v=1), Sum(v=2), Sum(v=3)], [[0, 2], [1]])
    Sides(left=Sum(v=6), right=Sum(v=6))
    """
    folds = [_combine_in_order(monoid, [xs[i] for i in part], like=xs[0]) for part in parts]
    return Sides(_combine_in_order(monoid, xs, like=xs[0]), _combine_in_order(monoid, folds, like=xs[0]))


def tile(monoid: Any, xs: Sequence[Any]) -> Sides:
    """``fold_tile`` of elements along an axis is their fold one by one.

    >>> from monoidreduce.algebra.catalogue import Sum
    >>> tile(Sum, [Sum(v=torch.ones(1)), Sum(v=torch.ones(1))])
    Sides(left=Sum(v=tensor([2.])), right=Sum(v=tensor([2.])))
    """
    values = {name: torch.stack([getattr(x, name) for x in xs]) for name in monoid.fields()}
    return Sides(monoid.fold_tile(monoid(**values), 0), _combine_in_order(monoid, xs, like=xs[0]))


def removal(monoid: Any, a: Any, b: Any) -> Sides:
    """``a ⊙ remove(c, a) = c`` for ``c = a ⊙ b``.

    >>> from monoidreduce import Monoid, Scalar
    >>> class Plus(Monoid):
    ...     v: Scalar = 0.0
    ...     def combine(a, b):
    ...         return Plus(v=a.v + b.v)
    ...     def remove(c, a):
    ...         return Plus(v=c.v - a.v)
    >>> removal(Plus, Plus(v=1), Plus(v=2))
    Sides(left=Plus(v=3), right=Plus(v=3))
    """
    c = combined(a, b)
    return Sides(combined(a, monoid.remove(c, a)), c)


def local_gradient(monoid: Any, a: Any, b: Any, g: Any) -> Sides:
    """``D(c, a) g``, from the result alone, is the derivative of ``c = a ⊙ b`` by ``a`` (the condition of Theorem 2.1).

    >>> from monoidreduce.algebra.catalogue import Max
    >>> x, y, g = (Max(v=torch.tensor([n])) for n in (1.0, 2.0, 3.0))
    >>> local_gradient(Max, y, x, g)
    Sides(left=Max(v=tensor([3.])), right=Max(v=tensor([3.])))
    """
    g = _fit_cotangent(g, combined(a, b))
    return Sides(monoid.pullback(combined(a, b), a, g), vjp(lambda x: monoid.combine(x, b), a, g))


def partition_gradient(monoid: Any, xs: Sequence[Any], parts: Sequence[Sequence[int]], g: Any) -> Sides:
    """The derivative of a fold by an element goes through its part: ``D(part, x) D(fold, part) g`` (Corollary 2.1.1).

    The element is the first of the first part.

    >>> from monoidreduce.algebra.catalogue import Sum
    >>> partition_gradient(Sum, [Sum(v=torch.ones(1))] * 3, [[0, 2], [1]], Sum(v=torch.ones(1)))
    Sides(left=Sum(v=tensor([1.])), right=Sum(v=tensor([1.])))
    """
    part = _combine_in_order(monoid, [xs[i] for i in parts[0]], like=xs[0])
    total = _combine_in_order(monoid, xs, like=xs[0])
    k = parts[0][0]

    def whole(x: Any) -> Any:
        return _combine_in_order(monoid, [*xs[:k], x, *xs[k + 1 :]], like=x)

    g = _fit_cotangent(g, total)
    return Sides(monoid.pullback(part, xs[k], monoid.pullback(total, part, g)), vjp(whole, xs[k], g))


def _without_gradient(monoid: Any) -> str:
    return "" if monoid.has_gradient else "it brings neither pullback nor remove"


_IDENTITY_FIX = (
    "Mend the identity values of the fields, or guard combine there: -inf - -inf and 0 / 0 are NaN (replace the -inf "
    "or 0 with torch.where before the subtraction or division), and exp overflows (subtract the maximum first)"
)
_GRADIENT_FIX = (
    "pullback(c, a, g) must be the transposed derivative of c = combine(a, b) by a, applied to g and written with c "
    "and a only; guard it where c is the identity"
)

LAWS = (
    Law(
        "associativity",
        lambda m, case: associativity(m, *case.elements),
        3,
        "(a ⊙ b) ⊙ c",
        "a ⊙ (b ⊙ c)",
        "Carry enough state that grouping does not matter (a mean needs its weight), and guard against overflow",
    ),
    Law(
        "commutativity",
        lambda m, case: commutativity(m, *case.elements),
        2,
        "a ⊙ b",
        "b ⊙ a",
        "Make combine symmetric, or declare commutative = False and fold in order",
        unless=lambda m: "" if m.commutative else "declared commutative = False",
    ),
    Law("left_identity", lambda m, case: left_identity(m, *case.elements), 1, "identity ⊙ a", "a", _IDENTITY_FIX),
    Law("right_identity", lambda m, case: right_identity(m, *case.elements), 1, "a ⊙ identity", "a", _IDENTITY_FIX),
    Law(
        "partition",
        lambda m, case: partition(m, case.elements, case.parts),
        None,
        "fold of all",
        "fold of the folds of parts {parts}",
        "Every way of cutting a fold in parts must give the same result",
    ),
    Law(
        "tile",
        lambda m, case: tile(m, case.elements),
        None,
        "fold_tile(x, 0)",
        "one by one",
        "fold_tile(x, dim) must give what combine gives one by one",
        unless=lambda m: "no fold_tile" if m.fold_tile is None else "",
    ),
    Law(
        "removal",
        lambda m, case: removal(m, *case.elements),
        2,
        "a ⊙ remove(a ⊙ b, a)",
        "a ⊙ b",
        "remove(c, a) must be the rest of the fold without a",
        unless=lambda m: "no remove" if m.remove is Monoid.remove else "",
    ),
    Law(
        "local_gradient",
        lambda m, case: local_gradient(m, case.elements[0], case.elements[1], case.g),
        2,
        "pullback(a ⊙ b, a, g)",
        "derivative by a",
        _GRADIENT_FIX,
        unless=_without_gradient,
        gradient=True,
    ),
    Law(
        "partition_gradient",
        lambda m, case: partition_gradient(m, case.elements, case.parts, case.g),
        None,
        "pullback through parts {parts}",
        "derivative of the fold",
        _GRADIENT_FIX,
        unless=lambda m: _without_gradient(m) or ("" if m.commutative else "declared commutative = False"),
        gradient=True,
    ),
)
"""Every law, in the order in which ``check`` tries them: a row each, which a table of one's own may be made from.

>>> [law.name for law in LAWS if law.gradient]
['local_gradient', 'partition_gradient']
"""


@dataclass(frozen=True)
class Report:
    """What ``check`` tried: law -> number of cases, and law -> why it was left out.

    >>> from monoidreduce.algebra.catalogue import Sum
    >>> check(Sum, cases=28).counts["associativity"]
    28
    """

    monoid: str
    counts: Mapping[str, int]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.monoid} obeys its laws:"]
        lines += [f"  {name:<19}{count:>6} cases" for name, count in self.counts.items()]
        lines += [f"  {name:<19}    not tried ({why})" for name, why in self.skipped.items()]
        return "\n".join(lines)


def check(monoid: Any, *, seed: int = 0, cases: int = 200, fields: Mapping[str, Any] | None = None) -> Report:
    """Try every law on ``monoid`` in float64; a broken one is a MonoidLawError with the smallest counterexample found.

    At least ``cases`` cases for each law: ordinary numbers, ties, zeros, identities, large, huge and tiny numbers, and
    the special values (infinities) of a field's domain. ``fields`` narrows what a field is given, for example
    ``{"w": Domain(low=0.0)}`` or a function of a ``torch.Generator`` and a shape; what a monoid says of its own states
    for every call (``domain``: bounds, a predicate over all fields, or a sampler) is described in
    ``algebra/fields.py``. Differences that a change of the elements in the seventh digit explains are rounding. The
    same ``seed`` tries the same cases.

    >>> from monoidreduce.algebra.catalogue import And
    >>> print(check(And, cases=28))
    And obeys its laws:
      associativity          28 cases
      commutativity          28 cases
      left_identity          28 cases
      right_identity         28 cases
      partition              28 cases
      tile                   28 cases
      removal                not tried (no remove)
      local_gradient         not tried (it brings neither pullback nor remove)
      partition_gradient     not tried (it brings neither pullback nor remove)
    """
    with torch.device("cpu"):
        return _check(monoid, seed, cases, fields or {})


def _check(monoid: Any, seed: int, cases: int, fields: Mapping[str, Any]) -> Report:
    given = _check_fields(monoid, fields)
    gen = torch.Generator().manual_seed(seed)
    counts: dict[str, int] = {}
    hopeless: set[str] = set()  # kinds of numbers of which the domain accepted none
    for law, family, count, size, elements in _order_trials(monoid, cases, given):
        done = 0
        while done < count and family.name not in hopeless:
            lists_differ = law.takes is not None and not law.gradient
            try:
                case = draw_case(
                    monoid, family, gen, count=count, elements=elements, size=size, uneven=lists_differ, fields=given
                )
            except NoExampleError:
                hopeless.add(family.name)
                break
            if not counts:
                _check_shapes(case)
            if broken(law, case) is not None:
                raise law_error(law, family, smallest(law, case, given))
            done += count if case.batched else 1
        if done:
            counts[law.name] = counts.get(law.name, 0) + done
    if not counts:
        raise ArgumentError(
            detail=f"{monoid.__name__}.domain accepted none of the states that were drawn",
            fix="Declare a sampler instead: a static method domain(generator, batch, size) that draws reachable states",
        )
    return Report(monoid.__name__, counts, {law.name: law.unless(monoid) for law in LAWS if law.unless(monoid)})


_SIZES = ((1, 1), (2, 3), (3, 1), (7, 3))  # (elements of a fold, features)


def _order_trials(monoid: Any, cases: int, given: Mapping[str, Any]) -> Iterator[tuple[Law, Family, int, int, int]]:
    """What is tried in which order: a monoid that is wrong altogether should fail on ordinary numbers, at the law that
    says what is wrong; then come the corners, then gradients. Yields (law, family, cases, features, elements)."""
    domains = [domain_of(monoid, name, given) for name in monoid.fields()]
    families = [f for f in FAMILIES if not f.specials or any(d is not None and d.specials for d in domains)]
    if is_sampled(monoid):  # a sampler knows no families
        families = [f for f in families if f is FAMILIES[0] or f.identities]
    laws = [law for law in LAWS if not law.unless(monoid)]
    values = [law for law in laws if not law.gradient]
    order = [(law, families[0]) for law in values]
    corners = sorted(values, key=lambda law: "identity" not in law.name)  # a NaN at the identity is best named there
    order += [(law, family) for family in families[1:] for law in corners]
    order += [(law, family) for law in laws if law.gradient for family in families if family.gradient]
    for law, family in order:
        kinds = sum(1 for each, _ in order if each is law)
        for elements, size in _SIZES:
            yield law, family, -(-cases // (kinds * len(_SIZES))), size, law.takes or elements


def _check_fields(monoid: Any, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    if not (isinstance(monoid, type) and issubclass(monoid, Monoid) and monoid.fields()):
        raise ArgumentError(detail=f"check needs a monoid class, got {monoid!r}", fix="Pass a subclass of Monoid")
    for name, hint in fields.items():
        if name not in monoid.fields() or not (isinstance(hint, Domain) or callable(hint)):
            raise ArgumentError(
                detail=f"fields={{{name!r}: {hint!r}}} says nothing about {monoid.__name__}",
                fix=f"Give a Domain or a function of (generator, shape) for: {', '.join(monoid.fields())}",
            )
    return fields


def _check_shapes(case: Case) -> None:
    a = case.elements[0]
    c = combined(a, a)
    for name, field in type(a).fields().items():
        before, after = getattr(a, name), getattr(c, name)
        if not isinstance(before, Tensor) or field.marker is List:
            continue
        if not isinstance(after, Tensor) or after.shape != before.shape:
            found = list(after.shape) if isinstance(after, Tensor) else type(after).__name__
            raise ShapeError(
                detail=f"{type(a).__name__}.combine turned field {name} of shape {list(before.shape)} into {found}",
                fix="A Scalar keeps its trailing axis of size 1: take inner products with dot, sums with keepdim=True",
            )


def _combine_in_order(monoid: Any, xs: Sequence[Any], like: Any) -> Any:
    return reduce(combined, xs) if xs else monoid.identity(like)


def _fit_cotangent(g: Any, c: Any) -> Any:
    """A cotangent as long as ``c``, where lists have become shorter."""
    values = {name: v[..., : getattr(c, name).shape[-1]] for name, v in g.asdict().items()}
    return type(g)(**values)


# A quick look at a monoid's laws before its first fold, by ``mr.reduce`` and ``mr.fold``.
#
# A ``combine`` that is not associative, not commutative although it claims to be, or whose identity is none gives
# results that depend on how a fold is cut in tiles, without a sign. A few dozen small cases of ordinary numbers,
# drawn from the monoid's ``domain``, show that in a few milliseconds, once for each class. ``check`` looks at much
# more; what is refused here is wrong by far more than rounding.

_CASES = 16
_SIZE = 2  # features of a vector
_TOLERANCE = 1e-3  # of the largest number involved: no rounding, even of 16 bits inside combine's sums, comes near
_MARK = "_laws_probed"
_PROBED = [law for law in LAWS if law.name in ("associativity", "commutativity", "left_identity", "right_identity")]
_ADVICE = ". Its folds would depend on how they are cut in tiles (docs/monoids.md)"


def probe(monoid: Any) -> None:
    """Raise MonoidLawError for a monoid that plainly breaks a law; nothing the second time."""
    if _MARK in monoid.__dict__ or torch.compiler.is_compiling() or _is_watched():
        return
    try:
        with torch.device("cpu"), torch.no_grad():
            error = _find_broken(monoid)
    except Exception:  # combine does not take these numbers: the fold itself will say what is wrong
        error = None
    if error is None:
        setattr(monoid, _MARK, True)
        return
    try:
        raise error
    finally:
        del error  # this frame is on its traceback: a cycle that would hold the call's tensors


def _is_watched() -> bool:
    """Whether torch's calls do not compute here: fake tensors, or a function transform."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active())


def _find_broken(monoid: Any) -> MonoidLawError | None:
    gen = torch.Generator().manual_seed(0)
    family = FAMILIES[0]  # ordinary numbers
    for law in _PROBED:
        if law.unless(monoid):
            continue
        case: Case | None = draw_case(
            monoid, family, gen, count=_CASES, elements=max(2, law.takes or 2), size=_SIZE, uneven=False, fields={}
        )
        case = _keep_defined(case) if case is not None and case.batched else case
        if case is None:
            continue
        if law.takes == 1:  # the identity of folds: a norm is none of negative numbers, which no fold of it gives
            case = replace(case, elements=(combined(*case.elements),))
        sides = broken(law, case)
        if sides is not None and _differ_much(case, sides.left, sides.right):
            return law_error(replace(law, fix=law.fix + _ADVICE), family, smallest(law, case, {}))
    return None


def _keep_defined(case: Case) -> Case | None:
    """The cases whose elements combine with each other without a NaN: others lie outside what combine is meant for."""
    legal = torch.ones(_CASES, dtype=torch.bool, device="cpu")
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


__all__ = [
    "LAWS",
    "Law",
    "Report",
    "Sides",
    "associativity",
    "check",
    "commutativity",
    "left_identity",
    "local_gradient",
    "partition",
    "partition_gradient",
    "removal",
    "right_identity",
    "tile",
]
