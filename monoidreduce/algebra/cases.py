"""Examples to try a law on: elements drawn at random, family by family, from ordinary numbers to the corners.

A family is one row in a table. Within a family all numbers are of one kind, so that rounding stays small beside the
numbers themselves and a broken law is not mistaken for it. Infinities are drawn only where a field's domain has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Generator, Tensor

from monoidreduce.algebra.fields import Domain, Function, List, Matrix, Scalar
from monoidreduce.algebra.monoid import Monoid

from . import fields as domains

Draw = Callable[[Generator, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Family:
    """One kind of numbers; ``gradient``: whether derivatives are looked at there (not where ties make kinks)."""

    name: str
    draw: Draw
    gradient: bool
    specials: bool = False  # half of the numbers of a field are its domain's special values
    identities: bool = False  # half of the elements are the identity
    ties: bool = False  # numbers are drawn from a few, so that many are equal


def _normal(factor: float) -> Draw:
    return lambda gen, shape: factor * torch.randn(shape, generator=gen, dtype=torch.float64)


def _draw_ties(gen: Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-2, 3, shape, generator=gen).double()


def _spread(gen: Generator, shape: tuple[int, ...]) -> Tensor:
    # Of one sign: numbers of such different sizes must not cancel.
    return 10.0 ** (60 * torch.rand(shape, generator=gen, dtype=torch.float64) - 30)


FAMILIES = (
    Family("ordinary numbers", _normal(2.0), gradient=True),
    Family("ties and zeros", _draw_ties, gradient=False, ties=True),
    Family("identities", _normal(2.0), gradient=True, identities=True),
    Family("special values", _normal(2.0), gradient=True, specials=True),
    Family("large numbers", _normal(1e5), gradient=True),
    Family("huge numbers", _normal(1e30), gradient=True),
    Family("tiny numbers", _normal(1e-30), gradient=True),
    Family("numbers of all sizes", _spread, gradient=False),
)


@dataclass(frozen=True)
class Case:
    """What a law is tried on: some elements, a partition of their positions, and a cotangent of the fold.

    ``batched``: every tensor has one leading axis of independent cases.
    """

    elements: tuple[Any, ...]
    parts: tuple[tuple[int, ...], ...]
    g: Any
    batched: bool

    def pick(self, i: int) -> Case:
        """Case number ``i`` of a batch."""
        return replace(
            self,
            elements=tuple(mapped(x, lambda t: t[i]) for x in self.elements),
            g=mapped(self.g, lambda t: t[i]),
            batched=False,
        )

    def first(self, n: int) -> Case:
        """The first ``n`` cases of a batch, still a batch."""
        return replace(
            self,
            elements=tuple(mapped(x, lambda t: t[:n]) for x in self.elements),
            g=mapped(self.g, lambda t: t[:n]),
        )


def mapped(x: Any, function: Callable[[Any], Any]) -> Any:
    """The element with ``function`` applied to each field."""
    return type(x)(**{name: function(value) for name, value in x.asdict().items()})


def domain_of(monoid: type[Monoid], name: str, given: Mapping[str, Any]) -> Domain | None:
    """The domain of a field: as given, as the monoid says, or guessed from the identity; None if a function draws it.

    An infinite identity is a value like any other in its field, so a log-weight can be -inf; nothing else is infinite.
    """
    if name in given:
        return given[name] if isinstance(given[name], Domain) else None
    own = domains.field_domains(monoid)
    if name in own:
        return own[name] if isinstance(own[name], Domain) else None
    identity = monoid.fields()[name].identity
    infinite = isinstance(identity, float) and math.isinf(identity)
    return Domain(specials=(identity,) if infinite else ())


def draw_case(
    monoid: type[Monoid],
    family: Family,
    gen: Generator,
    *,
    count: int,
    elements: int,
    size: int,
    uneven: bool,
    fields: Mapping[str, Any],
) -> Case:
    """``count`` cases at once (one, for functions, which have no batches). ``uneven``: lists may differ in length."""
    batched = all(field.marker is not Function for field in monoid.fields().values())
    batch = (count,) if batched else ()
    lengths = [_draw_whole_number(gen, size + 1) if uneven else size for _ in range(elements)]
    plain = family if uneven or not _has_lists(monoid) else replace(family, identities=False)
    drawn = [_Drawing(monoid, plain, gen, batch, size, length, fields).element() for length in lengths]
    return Case(tuple(drawn), _draw_parts(monoid, gen, elements), _draw_cotangent(monoid, gen, drawn), batched)


def scale_of(case: Case, name: str) -> Tensor | float:
    """The size of the numbers in one field of a case, shaped to broadcast against that field."""
    values = [getattr(x, name) for x in case.elements]
    if not isinstance(values[0], Tensor):
        return 1.0
    trailing = type(case.elements[0]).fields()[name].trailing
    sizes = [_measure_size(v, trailing) for v in values]
    top = torch.stack(sizes).amax(0)
    return top.reshape(*top.shape, *(1,) * trailing)


def _measure_size(v: Tensor, trailing: int) -> Tensor:
    flat = v.double().flatten(-trailing) if trailing > 1 else v.double()
    if flat.shape[-1] == 0:
        return flat.new_ones(flat.shape[:-1])
    return torch.where(torch.isfinite(flat), flat.abs(), 1.0).amax(-1)


class NoExampleError(Exception):
    """A predicate accepted none of the states that were drawn."""


@dataclass(frozen=True)
class _Drawing:
    """How one element (a whole batch of it) is drawn."""

    monoid: type[Monoid]
    family: Family
    gen: Generator
    batch: tuple[int, ...]  # the leading axes of every tensor
    size: int  # features of a vector
    length: int  # of a list
    fields: Mapping[str, Any]  # what the caller said of single fields

    def element(self) -> Any:
        """An element; half of them the identity where the family says so."""
        if domains.is_sampled(self.monoid):
            x = self._from_sampler()
        elif domains.is_related(self.monoid):
            x = self._draw_accepted()
        else:
            x = self._draw_independent()
        if not self.family.identities:
            return x
        identity, batch = self.monoid.identity(x), self.batch
        if not batch or _has_lists(self.monoid):
            return identity if _draw_whole_number(self.gen, 2) else x
        pick = torch.rand(batch, generator=self.gen) < 0.5
        chosen = {}
        for name, t in x.asdict().items():
            here = pick.reshape(*batch, *(1,) * (t.dim() - len(batch)))
            chosen[name] = torch.where(here, getattr(identity, name), t)
        return self.monoid(**chosen)

    def _from_sampler(self) -> Any:
        """States from the class's own sampler; of a product, each factor's from its own."""
        monoid, draw = self.monoid, domains.sampler(self.monoid)
        if draw is not None:
            found = draw(self.gen, self.batch, self.size)
            values = found.asdict() if isinstance(found, Monoid) else dict(found)
            return monoid(**{n: v.double() if v.dtype is torch.float32 else v for n, v in values.items()})
        joined: dict[str, Any] = {}
        for factor, names in zip(monoid.components, monoid.component_fields, strict=True):
            given = {old: self.fields[new] for old, new in names.items() if new in self.fields}
            family = replace(self.family, identities=False)
            piece = replace(self, monoid=factor, family=family, fields=given).element()
            joined |= {new: getattr(piece, old) for old, new in names.items()}
        return monoid(**joined)

    def _draw_accepted(self) -> Any:
        """States that the class's predicate accepts, among many that are drawn."""
        if not self.batch:
            for _ in range(1000):
                x = self._draw_independent()
                if bool(domains.reachable(x, 0)):
                    return x
            raise NoExampleError
        (count,) = self.batch
        found: list[Any] = []
        for _ in range(16):
            x = replace(self, batch=(64 * count,))._draw_independent()
            accepted = domains.reachable(x, 1)
            found.append(self.monoid(**{n: t[accepted] for n, t in x.asdict().items()}))
            if sum(len(next(iter(f.asdict().values()))) for f in found) >= count:
                joined = {n: torch.cat([getattr(f, n) for f in found])[:count] for n in self.monoid.fields()}
                return self.monoid(**joined)
        raise NoExampleError

    def _draw_independent(self) -> Any:
        """Every field by itself, then made legal."""
        values: dict[str, Any] = {}
        for name, field in self.monoid.fields().items():
            if field.marker is Function:
                values[name] = _draw_affine(self.gen)
                continue
            inner = {Scalar: (1,), Matrix: (self.size, self.size), List: (self.length,)}.get(field.marker, (self.size,))
            values[name] = self._draw_numbers(name, (*self.batch, *inner))
        return self.monoid.legal(self.monoid(**values))

    def _draw_numbers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The values of one field."""
        monoid, family, gen, fields = self.monoid, self.family, self.gen, self.fields
        if isinstance(monoid.fields()[name].identity, bool):
            return torch.rand(shape, generator=gen) < 0.5
        domain = domain_of(monoid, name, fields)
        if domain is None:
            draw = fields[name] if name in fields else domains.field_domains(monoid)[name]
            return torch.as_tensor(draw(gen, shape))
        if name in monoid.integers:
            least = int(max(domain.low, -3.0))
            return torch.randint(least, int(min(domain.high, least + 6)) + 1, shape, generator=gen)
        if math.isfinite(domain.low) and math.isfinite(domain.high):
            part = torch.rand(shape, generator=gen, dtype=torch.float64)
            if family.ties:
                part = (part * 5).floor() / 4
            x = domain.low + (domain.high - domain.low) * part
        else:
            x = family.draw(gen, shape)
            outside = (x < domain.low) | (x > domain.high)
            x = torch.where(outside, -x, x).clamp(domain.low, domain.high)
        if family.specials and domain.specials:
            chosen = torch.tensor(domain.specials, dtype=torch.float64)
            chosen = chosen[torch.randint(0, len(domain.specials), shape, generator=gen)]
            x = torch.where(torch.rand(shape, generator=gen) < 0.5, chosen, x)
        return x


def _draw_cotangent(monoid: type[Monoid], gen: Generator, elements: Sequence[Any]) -> Any:
    def like(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return torch.zeros_like(t) if isinstance(t, Tensor) else t
        return torch.randn(t.shape, generator=gen, dtype=torch.float64)

    if not monoid.has_gradient:
        return elements[0]
    # A fold of lists is longer than its elements, and its cotangent as long as the fold.
    total = reduce(monoid.combine, elements) if _has_lists(monoid) else elements[0]
    return mapped(total, like)


def _draw_parts(monoid: type[Monoid], gen: Generator, n: int) -> tuple[tuple[int, ...], ...]:
    """A partition of n positions in up to three parts, the first not empty; in order if the monoid is ordered."""
    order = torch.randperm(n, generator=gen).tolist() if monoid.commutative else list(range(n))
    first, second = sorted((1 + _draw_whole_number(gen, n), 1 + _draw_whole_number(gen, n)))
    return tuple(order[:first]), tuple(order[first:second]), tuple(order[second:])


def _has_lists(monoid: type[Monoid]) -> bool:
    return any(field.marker is List for field in monoid.fields().values())


def _draw_affine(gen: Generator) -> Callable[[Any], Any]:
    slope, offset = (torch.randint(-3, 4, (2,), generator=gen)).tolist()

    def function(x: Any) -> Any:
        return slope * x + offset

    function.__name__ = f"({slope}x{offset:+d})"
    return function


def _draw_whole_number(gen: Generator, below: int) -> int:
    return int(torch.randint(0, below, (), generator=gen))


__all__ = ["FAMILIES", "Case", "Family", "NoExampleError", "domain_of", "draw_case", "mapped", "scale_of"]
