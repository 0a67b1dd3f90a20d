"""What a monoid is: a class whose fields are its state and whose ``combine`` is ⊙.

Inside ``combine``, ``pullback`` and ``remove`` a Scalar field carries a trailing axis of size 1 and a Vector field its
feature axis, so that ``a.v * torch.exp(a.z - z)`` is plain broadcasting with no axes to count. The same bodies are also
traced with symbols instead of tensors; a body that needs shapes says ``tensor_only = True``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from monoidreduce.algebra.fields import (
    Domain,
    Field,
    Function,
    List,
    Matrix,
    Scalar,
    Vector,
    all_close,
    approximately,
    describe,
    fold_axis,
    read_fields,
)
from monoidreduce.errors import ArgumentError, DeclarationError, NoGradientError

from . import fields as domains
from .fields import field_domains

# Derivatives of functions between elements of a monoid, by autograd on concrete tensors.
#
# Used to derive a pullback from ``remove`` and, by the laws, as the truth that a pullback is held against. Elements are
# known here only by their fields. Imports torch only.


def vjp(function: Callable[[Any], Any], a: Any, g: Any) -> Any:
    """The transposed derivative of ``function`` at the element ``a``, applied to the cotangent ``g``.

    Differentiable again where ``a`` or ``g`` require a gradient. Fields that do not hold floating-point numbers get
    zeros.
    """
    values, cotangent = a.asdict(), g.asdict()
    twice = torch.is_grad_enabled() and any(_needs_grad(v) for v in (*values.values(), *cotangent.values()))
    with torch.enable_grad():
        inner = {name: _argument(v) for name, v in values.items()}
        floats = [v for v in inner.values() if v.is_floating_point()]
        out = function(type(a)(**inner)).asdict()
        reached = {name: v for name, v in out.items() if _needs_grad(v)}
        grads: Sequence[Tensor | None] = [None] * len(floats)
        if reached and floats:
            seeds = [cotangent[name].to(v.dtype).expand_as(v) for name, v in reached.items()]
            grads = torch.autograd.grad(list(reached.values()), floats, seeds, create_graph=twice, allow_unused=True)
    answers = iter(grads)
    result = {}
    for name, v in inner.items():
        grad = next(answers) if v.is_floating_point() else None
        result[name] = torch.zeros_like(values[name]) if grad is None else grad
    return type(a)(**result)


def _argument(v: Tensor) -> Tensor:
    # A fresh view, so that only the way through this argument counts even if the function closes over the element.
    if not v.is_floating_point():
        return v
    return v.view_as(v) if v.requires_grad else v.detach().requires_grad_()


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


M = TypeVar("M", bound="Monoid")


def dot(x: Any, y: Any) -> Any:
    """``⟨x, y⟩`` over the feature axis, as a Scalar: ``(x * y).sum(-1, keepdim=True)``; ``x @ y`` for symbols.

    A plain 0 (a cotangent that nobody asked for) gives 0.

    >>> dot(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([[11.]])
    """
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return (x * y).sum(-1, keepdim=True)
    if any(isinstance(each, (int, float)) and each == 0 for each in (x, y)):
        return 0.0
    return x @ y


# The product of monoids, and the type of monoid classes that lets one write it ``Sum * Count``.
#
# Factors are known here only by what their classes say of themselves. Several reductions in one pass are one fold
# over a product.


class MonoidType(type):
    """The type of monoid classes; it exists so that ``Sum * Count`` can mean their product."""

    def __mul__(cls, other: Any) -> Any:
        return product(cls, other)


def product(*monoids: Any) -> Any:
    """The product of monoids: one pass that folds them all; also written ``A * B``.

    ``(a₁, a₂) ⊙ (b₁, b₂) = (a₁ ⊙ b₁, a₂ ⊙ b₂)``. Its fields are those of the factors; a name that occurs twice gets the
    factor's name in front (``sum_v``, ``max_v``; ``sum2_v`` for a second Sum). It has a gradient if every factor has,
    or holds only booleans and whole numbers.

    >>> import torch
    >>> from monoidreduce.algebra import fold, monoids
    >>> both = fold(product(monoids.Sum, monoids.Max), torch.tensor([1.0, 5.0, 2.0]))
    >>> both.sum_v.item(), both.max_v.item()
    (8.0, 5.0)
    """
    for monoid in monoids:
        if not (isinstance(monoid, MonoidType) and monoid.fields()):  # type: ignore[attr-defined]
            raise ArgumentError(detail=f"product takes monoid classes, got {monoid!r}", fix="Pass subclasses of Monoid")
    if not monoids:
        raise ArgumentError(detail="product needs at least one monoid", fix="Pass subclasses of Monoid")
    return _product(tuple(part for monoid in monoids for part in (monoid.components or (monoid,))))


@lru_cache(maxsize=256)
def _product(parts: tuple[Any, ...]) -> Any:
    renamed = _field_names(parts)  # for each factor: its own name of a field -> the product's

    def owners() -> Iterator[tuple[Any, str, str]]:
        for part, names in zip(parts, renamed, strict=True):
            for old, new in names.items():
                yield part, old, new

    def split(x: Any) -> list[Any]:
        values = x.asdict()
        pairs = zip(parts, renamed, strict=True)
        return [part(**{old: values[new] for old, new in names.items()}) for part, names in pairs]

    def join(pieces: Sequence[Any]) -> Any:
        values: dict[str, Any] = {}
        for piece, names in zip(pieces, renamed, strict=True):
            values.update({new: piece.asdict()[old] for old, new in names.items()})
        return cls(**values)

    def combine(a: Any, b: Any) -> Any:
        return join([type(x).combine(x, y) for x, y in zip(split(a), split(b), strict=True)])

    def pullback(c: Any, a: Any, g: Any) -> Any:
        return join([_pullback_or_zero(*each) for each in zip(split(c), split(a), split(g), strict=True)])

    def fold_tile(x: Any, dim: int) -> Any:
        return join([fold_axis(piece, dim) for piece in split(x)])

    def legal(x: Any) -> Any:
        return join([type(piece).legal(piece) for piece in split(x)])

    def approx(a: Any, b: Any, *, scale: Mapping[str, Any] | None = None) -> bool:
        sizes = scale or {}
        scales = [{old: sizes[new] for old, new in names.items() if new in sizes} for names in renamed]
        return all(approximately(*each) for each in zip(split(a), split(b), scales, strict=True))

    def embed(_: Any, x: Any, dim: int | None, start: int = 0) -> Any:
        return join([part.embed(x, dim, start) for part in parts])

    fields: dict[str, Field] = {new: part.fields()[old] for part, old, new in owners()}
    body: dict[str, Any] = {
        "__doc__": "The product of " + " and ".join(part.__name__ for part in parts) + ".",
        "_fields": fields,
        "components": parts,
        "commutative": all(part.commutative for part in parts),
        "elementwise": all(part.elementwise for part in parts),
        "tensor_only": any(part.tensor_only for part in parts),
        "integers": tuple(new for part, old, new in owners() if old in part.integers),
        "component_fields": tuple(renamed),
        "domain": {new: field_domains(part)[old] for part, old, new in owners() if old in field_domains(part)},
        "combine": combine,
        "legal": legal,
        "approx": approx,
        "embed": classmethod(embed),
    }
    if all(part.has_gradient or part.discrete() for part in parts) and any(part.has_gradient for part in parts):
        body["pullback"] = pullback
    if all(field.marker is not Function for field in fields.values()):
        body["fold_tile"] = fold_tile
    base = next(c for c in reversed(parts[0].__mro__) if isinstance(c, MonoidType))
    cls: Any = MonoidType("*".join(part.__name__ for part in parts), (base,), body)
    return cls


def _pullback_or_zero(c: Any, a: Any, g: Any) -> Any:
    if type(c).has_gradient:
        return type(c).pullback(c, a, g)
    return type(c)(**{name: value * 0 for name, value in a.asdict().items()})


def _field_names(parts: Sequence[Any]) -> list[dict[str, str]]:
    every = [name for part in parts for name in part.fields()]
    seen: dict[str, int] = {}
    renamed = []
    for part in parts:
        stem = "".join(letter for letter in part.__name__.lower() if letter.isalnum())
        seen[stem] = seen.get(stem, 0) + 1
        prefix = stem if seen[stem] == 1 else f"{stem}{seen[stem]}"
        renamed.append({name: f"{prefix}_{name}" if every.count(name) > 1 else name for name in part.fields()})
    return renamed


class Monoid(metaclass=MonoidType):
    """A set with an associative ``combine`` and an identity; its instances are immutable records of the fields.

    ``a ⊙ (b ⊙ c) = (a ⊙ b) ⊙ c`` and ``identity ⊙ a = a = a ⊙ identity``; also ``a ⊙ b = b ⊙ a`` unless the class says
    ``commutative = False``. For fast gradients a monoid brings either ``pullback(c, a, g)``, the derivative
    ``D(c, a)`` of ``c = a ⊙ b`` by ``a`` applied to the cotangent ``g`` (Theorem 2.1), or ``remove(c, a)``, the rest of
    the fold without ``a``, from which it is derived. Without either (``has_gradient`` is False) ``mr.reduce`` derives
    gradients from ``combine`` alone, and ``mr.fold`` is differentiated by autograd.

    >>> class Total(Monoid):
    ...     v: Scalar = 0.0
    ...     def combine(a, b):
    ...         return Total(v=a.v + b.v)
    >>> Total.combine(Total(v=2.0), Total(v=3.0))
    Total(v=5.0)
    >>> Total.has_gradient, dict(Total.fields())["v"].identity
    (False, 0.0)
    """

    commutative: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False  # combine acts on each component alone: a Vector may stand for a Scalar
    tensor_only: ClassVar[bool] = False  # the bodies need shapes, so symbols cannot go through them
    integers: ClassVar[tuple[str, ...]] = ()  # fields that hold whole numbers: counts and positions
    domain: ClassVar[Any] = {}  # which states can be reached, where not all: see fields.py
    components: ClassVar[tuple[type[Monoid], ...]] = ()  # of a product: its factors
    component_fields: ClassVar[tuple[Mapping[str, str], ...]] = ()  # of each factor: its field -> the product's
    has_gradient: ClassVar[bool] = False
    gradient_source: ClassVar[str] = "none"  # "pullback", "remove" or "none"
    fold_tile: ClassVar[Any] = None  # optional: fold_tile(x, dim), all of one axis at once (dim >= 0)
    _fields: ClassVar[dict[str, Field]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherited: dict[str, Field] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited.update(base.__dict__.get("_fields", {}))
        own = cls.__dict__.get("_fields") or read_fields(cls, reserved=_RESERVED)  # a product knows its own already
        cls._fields = {**inherited, **own}
        _check_declaration(cls)
        if cls.pullback is not Monoid.pullback:
            cls.gradient_source = "pullback"
        elif cls.remove is not Monoid.remove:
            cls.gradient_source = "remove"
        cls.has_gradient = cls.gradient_source != "none"

    def __init__(self, /, **values: Any) -> None:
        if values.keys() != self._fields.keys():
            raise _wrong_fields(type(self), values)
        for name in self._fields:
            object.__setattr__(self, name, values[name])

    def __setattr__(self, name: str, value: Any) -> None:
        raise _unchanging(self, name)

    def __delattr__(self, name: str) -> None:
        raise _unchanging(self, name)

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.asdict().items())
        return f"{type(self).__name__}({inside})"

    def asdict(self) -> dict[str, Any]:
        """The fields and their values, in the order of declaration."""
        return dict(self.__dict__)

    @classmethod
    def fields(cls) -> Mapping[str, Field]:
        """The declared fields in order: name -> (marker, identity)."""
        return dict(cls._fields)

    @classmethod
    def identity(
        cls: type[M],
        like: M | None = None,
        *,
        batch: Sequence[int] = (),
        size: int | Mapping[str, int] = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> M:
        """The identity as tensors: shaped like the element ``like``, or of the given batch shape and feature size.

        Inner convention: a Scalar is ``[*batch, 1]``, a Vector ``[*batch, size]`` (size 1 broadcasts to any), a Matrix
        ``[*batch, size, size]``, a List ``[*batch, 0]``.

        >>> class Total(Monoid):
        ...     v: Vector = 0.0
        ...     def combine(a, b):
        ...         return Total(v=a.v + b.v)
        >>> Total.identity(batch=(2,), size=3).v.shape
        torch.Size([2, 3])
        """
        values: dict[str, Any] = {}
        for name, field in cls._fields.items():
            if field.marker is Function:
                values[name] = field.identity
                continue
            given = None if like is None else like.asdict()[name]
            if given is not None:
                shape, kind, place = tuple(given.shape), given.dtype, given.device
                shape = (*shape[:-1], 0) if field.marker is List else shape
            else:
                length = size.get(name, 1) if isinstance(size, Mapping) else size
                inner = {Scalar: (1,), Vector: (length,), Matrix: (length, length), List: (0,)}[field.marker]
                shape, kind, place = (*batch, *inner), cls._dtype(name, dtype), device
            if field.marker is Matrix:
                unit = torch.eye(shape[-1], dtype=kind, device=place) * field.identity
                values[name] = unit.expand(shape)
            elif field.marker is List:
                values[name] = torch.empty(shape, dtype=kind, device=place)
            else:
                values[name] = torch.full(shape, _fitting(field.identity, kind), dtype=kind, device=place)
        return cls(**values)

    @classmethod
    def embed(cls: type[M], x: Any, dim: int | None, start: int = 0) -> M:
        """One plain tensor as elements of the monoid (user's shapes), for ``fold(monoid, x)``.

        ``dim`` is the axis to be folded (None: ``x`` is a single element), ``start`` the position of its first
        element. A monoid of one field takes ``x`` as it is; others may define what one number means to them.
        """
        if len(cls._fields) != 1:
            names = ", ".join(f"{name}=..." for name in cls._fields)
            raise ArgumentError(
                detail=f"{cls.__name__} has {len(cls._fields)} fields ({describe(cls._fields)}), but got one tensor",
                fix=f"Give each field: {cls.__name__}({names}), or a dict",
            )
        return cls(**{name: x for name in cls._fields})

    def combine(a: Any, b: Any) -> Any:
        """``a ⊙ b``: what every monoid must define."""
        raise DeclarationError(detail=f"{type(a).__name__} defines no combine", fix="Define combine(a, b)")

    def pullback(c: Any, a: Any, g: Any) -> Any:
        """``D(c, a)`` applied to the cotangent ``g``, where ``c = a ⊙ rest``.

        Derived here, for a monoid that brings only ``remove``, as the transposed derivative of ``x ⊙ remove(c, a)`` at
        ``x = a``, by autograd on concrete tensors.
        """
        monoid = type(c)
        if monoid.gradient_source != "remove":
            raise _no_gradient(monoid)
        rest = monoid.remove(c, a)
        return vjp(lambda x: monoid.combine(x, rest), a, g)

    def remove(c: Any, a: Any) -> Any:
        """The rest of the fold without ``a``: ``c = a ⊙ remove(c, a)``. Optional."""
        raise _no_gradient(type(c))

    def legal(x: Any) -> Any:
        """The legal element nearest to ``x``, for monoids whose fields depend on one another; idempotent. Optional.

        Without it, and without an ``approx`` that knows better, this much is assumed: a number whose identity is
        infinite is a log-weight or a bound, and where it is at its identity the other numbers are at theirs.
        """
        monoid = type(x)
        kinds = {name: field for name, field in monoid._fields.items() if field.marker in (Scalar, Vector)}
        bounds = [name for name, field in kinds.items() if abs(field.identity) == math.inf]
        if not bounds or monoid.approx is not Monoid.approx:
            return x
        values = x.asdict()
        nothing = reduce(torch.logical_or, [values[name] == kinds[name].identity for name in bounds])
        for name, field in kinds.items():
            if name not in bounds and values[name].is_floating_point():
                values[name] = torch.where(nothing, float(field.identity), values[name])
        return monoid(**values)

    def approx(a: Any, b: Any, *, scale: Mapping[str, Any] | None = None) -> bool:
        """Whether two elements are equal but for rounding; ``scale``: size of the numbers behind each field."""
        sizes = scale or {}
        other = b.asdict()
        return all(all_close(x, other[name], sizes.get(name, 1.0)) for name, x in a.asdict().items())

    @classmethod
    def discrete(cls) -> bool:
        """Whether no field can have a derivative: all are booleans or whole numbers."""
        return all(isinstance(f.identity, bool) or name in cls.integers for name, f in cls._fields.items())

    @classmethod
    def _dtype(cls, name: str, floating: torch.dtype | None) -> torch.dtype:
        if isinstance(cls._fields[name].identity, bool):
            return torch.bool
        return torch.int64 if name in cls.integers else (floating or torch.get_default_dtype())


_RESERVED = frozenset(name for name in dir(Monoid) if not name.startswith("__"))


def _check_declaration(cls: type[Monoid]) -> None:
    combines = cls.combine is not Monoid.combine
    if combines and not cls._fields:
        raise DeclarationError(
            detail=f"{cls.__name__} has a combine but no fields",
            fix="Declare its state, for example v: Scalar = 0.0",
        )
    if cls._fields and not combines:
        raise DeclarationError(
            detail=f"{cls.__name__} has fields ({describe(cls._fields)}) but no combine",
            fix="Define combine(a, b), which returns a new element",
        )
    domains.check_domains(cls)
    for what, names in (("integers", cls.integers), ("domain", domains.field_domains(cls))):
        for name in names:
            if name not in cls._fields:
                raise DeclarationError(
                    detail=f"{cls.__name__}.{what} names {name}, which is no field of it",
                    fix=f"Its fields are: {', '.join(cls._fields) or 'none'}",
                )


def _wrong_fields(cls: type[Monoid], values: Mapping[str, Any]) -> ArgumentError:
    missing = [name for name in cls._fields if name not in values]
    unknown = [name for name in values if name not in cls._fields]
    trouble = [f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("has no field", unknown)) if names]
    return ArgumentError(
        detail=f"{cls.__name__}(...) {' and '.join(trouble)}",
        fix=f"Its fields are: {describe(cls._fields)}",
    )


def _unchanging(x: Monoid, name: str) -> ArgumentError:
    monoid = type(x).__name__
    return ArgumentError(
        detail=f"cannot change {name}: an element of {monoid} stays as it is", fix=f"Build a new one with {monoid}(...)"
    )


def _no_gradient(cls: type[Monoid]) -> NoGradientError:
    return NoGradientError(
        detail=f"{cls.__name__} has no local gradient",
        fix="Add pullback(c, a, g), the derivative of c = combine(a, b) by a applied to g, "
        "or remove(c, a), the rest of the fold without a",
    )


def _fitting(value: Any, dtype: torch.dtype) -> Any:
    """``value`` as ``dtype`` can hold it: the least integer does for minus infinity."""
    if dtype.is_floating_point or dtype == torch.bool or isinstance(value, int) or abs(value) != float("inf"):
        return value
    return torch.iinfo(dtype).max if value > 0 else torch.iinfo(dtype).min


__all__ = ["Domain", "Function", "List", "Matrix", "Monoid", "Scalar", "Vector", "dot", "product", "vjp"]
