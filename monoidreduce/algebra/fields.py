"""What a monoid is made of: the markers a user annotates fields with, and the reading of such annotations.

A field is declared as ``z: Scalar = -math.inf``: the marker says what one element holds there, the value says what the
identity holds. Below stand the two things that all of the algebra does with such records of tensors: comparing them,
and folding one of their axes. Imports torch and the errors only.
"""

from __future__ import annotations

import inspect
import math
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor

from monoidreduce.errors import DeclarationError


class Marker:
    """The kind of a field. ``axes``: how many trailing axes one element has in a user's tensor (None: not a tensor)."""

    axes: int | None = None


if TYPE_CHECKING:
    # To a type checker a field is whatever its value is, so that both ``z: Scalar = -math.inf`` and ``a.z + b.z`` pass.
    Scalar: TypeAlias = Any
    Vector: TypeAlias = Any
    Matrix: TypeAlias = Any
    List: TypeAlias = Any
    Function: TypeAlias = Any
else:

    class Scalar(Marker):
        """One number per element. Inside ``combine`` it carries a trailing axis of size 1.

        >>> import math, torch, monoidreduce as mr
        >>> class Mine(mr.Monoid):
        ...     v: mr.Scalar = -math.inf
        ...     def combine(a, b):
        ...         return Mine(v=torch.maximum(a.v, b.v))
        >>> mr.fold(Mine, Mine(v=torch.tensor([[1.0], [4.0], [2.0]])), dim=0).v
        tensor([4.])
        """

        axes = 0

    class Vector(Marker):
        """A vector per element: one trailing feature axis.

        >>> import math, torch, monoidreduce as mr
        >>> class Mine(mr.Monoid):
        ...     v: mr.Vector = 0.0
        ...     def combine(a, b):
        ...         return Mine(v=a.v + b.v)
        >>> mr.fold(Mine, Mine(v=torch.tensor([[1.0], [4.0], [2.0]])), dim=0).v
        tensor([7.])
        """

        axes = 1

    class Matrix(Marker):
        """A square matrix per element: two trailing axes. A number ``c`` as its identity means ``c`` times the unit."""

        axes = 2

    class List(Marker):
        """A list of numbers per element: one trailing axis, whose length may differ; the identity is ``()``."""

        axes = 1

    class Function(Marker):
        """Any Python callable per element; such a monoid folds streams, not tensors."""

        axes = None


_MARKERS: dict[str, Any] = {
    "Scalar": Scalar,
    "Vector": Vector,
    "Matrix": Matrix,
    "List": List,
    "Function": Function,
}


class Field(NamedTuple):
    """A declared field: its marker and its value in the identity."""

    marker: Any
    identity: Any

    @property
    def trailing(self) -> int:
        """How many trailing axes the field has inside ``combine``: a scalar has one, of size 1."""
        axes = self.marker.axes
        return 0 if axes is None else max(axes, 1)


@dataclass(frozen=True)
class Domain:
    """The values a field may take, for those who make up examples: ``low <= x <= high``, and ``specials`` besides.

    >>> Domain(low=0.0).clamp(-2.0)
    2.0
    >>> Domain(low=-1.0, high=1.0).clamp(3.0)
    1.0
    """

    low: float = -math.inf
    high: float = math.inf
    specials: tuple[float, ...] = ()

    def clamp(self, x: float) -> float:
        """A legal value near ``x``: itself, its mirror image, or the nearest bound."""
        if x in self.specials or self.low <= x <= self.high:
            return x
        if self.low <= -x <= self.high:
            return -x
        return min(max(x, self.low), self.high)


def read_fields(cls: type, reserved: Collection[str]) -> dict[str, Field]:
    """The fields that the body of ``cls`` declares, in order; what is wrong with them is a DeclarationError.

    Annotations may be strings (``from __future__ import annotations``). They are evaluated where the class was
    written; when that fails (a marker imported inside a function, say), the last part of the name decides.
    """
    found: dict[str, Field] = {}
    for name, annotation in _read_annotations(cls).items():
        marker = _resolve(cls, annotation)
        if _is_class_variable(marker):
            continue
        if not (isinstance(marker, type) and issubclass(marker, Marker) and marker is not Marker):
            if name in reserved or name.startswith("_"):
                continue
            raise DeclarationError(
                detail=f"field {name} of {cls.__name__} is annotated {_show(annotation)}",
                fix="Annotate a field with Scalar or Vector, and a plain class attribute with typing.ClassVar",
            )
        if name in reserved or name.startswith("_"):
            raise DeclarationError(
                detail=f"{cls.__name__} cannot have a field called {name}: every monoid uses that name itself",
                fix="Give the field another name",
            )
        if name not in cls.__dict__:
            raise DeclarationError(
                detail=f"field {name} of {cls.__name__} has no identity value",
                fix=f"Write what it is in the identity, for example {name}: {marker.__name__} = 0.0",
            )
        found[name] = Field(marker, _check_identity(cls, name, marker, cls.__dict__[name]))
    return found


def describe(fields: Mapping[str, Field]) -> str:
    """The fields in words, for messages: ``z: Scalar = -inf, v: Vector = 0.0``."""
    return ", ".join(f"{name}: {field.marker.__name__} = {field.identity}" for name, field in fields.items())


def _read_annotations(cls: type) -> Mapping[str, Any]:
    try:
        return inspect.get_annotations(cls)
    except NameError as error:  # Python 3.14 evaluates annotations only when asked
        raise DeclarationError(
            detail=f"an annotation in {cls.__name__} could not be evaluated: {error}",
            fix="Import the markers (Scalar, Vector) before the class is written",
        ) from error


def _resolve(cls: type, annotation: Any) -> Any:
    if not isinstance(annotation, str):
        return annotation
    module = sys.modules.get(cls.__module__)
    try:
        value = eval(annotation, dict(vars(module)) if module else {}, dict(vars(cls)))
    except Exception:  # any failure of the user's text: fall back on the name
        text = annotation.strip().strip("'\"")
        if text.split("[")[0].rpartition(".")[2] == "ClassVar":
            return typing.ClassVar
        return _MARKERS.get(text.rpartition(".")[2], annotation)
    return _resolve(cls, value) if isinstance(value, str) else value  # a quoted annotation is a string twice over


def _is_class_variable(annotation: Any) -> bool:
    return annotation is typing.ClassVar or typing.get_origin(annotation) is typing.ClassVar


def _show(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else repr(annotation)


def _check_identity(cls: type, name: str, marker: Any, value: Any) -> Any:
    if marker is Function:
        legal, expected = callable(value), "a callable that returns its argument"
    elif marker is List:
        legal, expected = isinstance(value, (tuple, list)) and len(value) == 0, "()"
    else:
        legal, expected = isinstance(value, (bool, int, float)) and value == value, "a number such as 0.0 or -math.inf"
    if not legal:
        raise DeclarationError(
            detail=f"the identity of field {name} of {cls.__name__} is {value!r}",
            fix=f"A {marker.__name__} needs {expected}",
        )
    return value


# The states that a monoid can reach, as its class declares them: what examples for the laws are drawn from.
#
# ``Monoid.domain`` is one of
#
# - a mapping from field names to :class:`Domain` (bounds and special values) or to a function ``(generator, shape) ->
#   Tensor``: each field by itself;
# - a predicate ``domain(x)``, a static method: whether the state ``x`` (all its fields) can be reached;
# - a sampler ``domain(generator, batch, size)``, a static method: reachable states, as an element or a dict of fields
# in
#   the shapes that ``combine`` sees (``[*batch, 1]`` for a Scalar, ``[*batch, size]`` for a Vector).
#
# Used by ``laws.check`` and by the probe of ``mr.reduce`` and ``mr.fold``. Imports torch and the errors only.


def field_domains(monoid: Any) -> Mapping[str, Any]:
    """What is said of single fields."""
    return monoid.domain if isinstance(monoid.domain, Mapping) else {}


def predicate(monoid: Any) -> Callable[[Any], Any] | None:
    """The predicate over all fields, if there is one."""
    return monoid.domain if callable(monoid.domain) and _count_arguments(monoid) == 1 else None


def sampler(monoid: Any) -> Callable[[Generator, tuple[int, ...], int], Any] | None:
    """What draws reachable states, if there is such a function."""
    return monoid.domain if callable(monoid.domain) and _count_arguments(monoid) == 3 else None


def check_domains(monoid: Any) -> None:
    """Whether the class declares its domain in one of the forms above; anything else is a DeclarationError."""
    if isinstance(monoid.domain, Mapping):
        return
    if not callable(monoid.domain) or _count_arguments(monoid) not in (1, 3):
        raise DeclarationError(
            detail=f"{monoid.__name__}.domain is {monoid.domain!r}",
            fix="Give a mapping of fields to Domain(low=..., high=...), a static method domain(x) that says whether a "
            "state can be reached, or a static method domain(generator, batch, size) that draws such states",
        )


def _count_arguments(monoid: Any) -> int:
    try:
        return len(inspect.signature(monoid.domain).parameters)
    except (TypeError, ValueError):
        return 0


def reachable(x: Any, batch: int) -> Tensor:
    """Which of a batch of elements (``batch`` leading axes) can be reached, as far as the class says."""
    made = (v for v in x.asdict().values() if isinstance(v, Tensor))
    first = next(made, torch.zeros((), device="cpu"))  # or all are functions
    shape = first.shape[:batch]
    found = torch.ones(shape, dtype=torch.bool, device="cpu")
    for piece in domain_pieces(x):
        says = predicate(type(piece))
        if says is not None:
            answer = torch.as_tensor(says(piece))
            found = found & answer.expand(torch.broadcast_shapes(answer.shape, shape)).reshape(*shape, -1).all(-1)
    return found


def domain_pieces(x: Any) -> list[Any]:
    """An element of a product as the elements of its factors; any other element by itself."""
    monoid = type(x)
    if not monoid.components:
        return [x]
    values = x.asdict()
    return [
        part(**{old: values[new] for old, new in names.items()})
        for part, names in zip(monoid.components, monoid.component_fields, strict=True)
    ]


def is_sampled(monoid: Any) -> bool:
    """Whether states (or those of a factor) come from a sampler, so that numbers must not be changed one by one."""
    return any(sampler(part) is not None for part in monoid.components or (monoid,))


def is_related(monoid: Any) -> bool:
    """Whether the class, or a factor, relates its fields to each other by a predicate."""
    return any(predicate(part) is not None for part in monoid.components or (monoid,))


# Approximate equality, as the laws need it: near for finite numbers, exact for infinities and NaN. Floating-point folds
# obey their laws only approximately, so each monoid brings its own equality; this is the part they share.


def close(x: Tensor, y: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Elementwise: equal, or finite and ``|x - y| <= tol * max(1, |x|, |y|, scale)`` with tol the square root of eps.

    ``scale`` is the size of the numbers that x and y were computed from: a sum that cancels is only as good as its
    largest term. Integers and booleans must be equal; so must infinities; NaN equals NaN.

    >>> close(torch.tensor([1.0, -torch.inf, torch.nan]), torch.tensor([1.0001, -torch.inf, 0.0])).tolist()
    [True, True, False]
    """
    exact = (x == y) | ((x != x) & (y != y))
    if not (x.is_floating_point() and y.is_floating_point()):
        return exact
    tolerance = math.sqrt(max(torch.finfo(x.dtype).eps, torch.finfo(y.dtype).eps))
    x, y = x.double(), y.double()
    size = torch.maximum(x.abs(), y.abs()).clamp(min=1.0)
    size = torch.maximum(size, torch.as_tensor(scale, dtype=torch.float64, device=x.device))
    return exact | (torch.isfinite(x) & torch.isfinite(y) & ((x - y).abs() <= tolerance * size))


def all_close(x: Tensor, y: Tensor, scale: Tensor | float = 1.0, where: Tensor | None = None) -> bool:
    """Whether ``close`` holds everywhere (or wherever ``where`` is true); shapes that do not broadcast are not close.

    >>> all_close(torch.zeros(3), torch.zeros(2))
    False
    """
    try:
        near = close(x, y, scale)
    except RuntimeError:  # lists of different lengths are simply not equal
        return False
    return bool((near if where is None else near | ~where).all())


def approximately(a: Any, b: Any, scale: Mapping[str, Any]) -> bool:
    """The monoid's own ``approx``; one that was written without ``scale`` is asked without."""
    equal = type(a).approx
    if "scale" in inspect.signature(equal).parameters:
        return bool(equal(a, b, scale=scale))
    return bool(equal(a, b))


# Folding one axis of a record: the balanced tree, and the monoid's own n-ary fold where it has one. A scalar field
# carries a trailing axis of size 1 here, and all batch axes come first, so that one ``dim >= 0`` means the same axis in
# every field.


def combined(a: Any, b: Any) -> Any:
    """``a ⊙ b``, insisting that the monoid's ``combine`` answers with an element of the monoid."""
    monoid = type(a)
    try:
        c = monoid.combine(a, b)
    except RuntimeError as error:
        if not str(error).startswith("Boolean value of Tensor"):
            raise
        raise DeclarationError(
            detail=f"{monoid.__name__}.combine decides by a Python if, and, or, min() or max() on its fields, which "
            "are tensors of many elements",
            fix="Use torch.where, &, |, torch.minimum",
        ) from error
    if not isinstance(c, monoid):
        names = ", ".join(f"{name}=..." for name in monoid.fields())
        raise DeclarationError(
            detail=f"{monoid.__name__}.combine returned {type(c).__name__}, not {monoid.__name__}",
            fix=f"End it with return {monoid.__name__}({names})",
        )
    return c


def fold_axis(x: Any, dim: int, in_order: bool = True) -> Any:
    """Fold axis ``dim >= 0`` (at least one long) of the record ``x``; that axis is gone from the result.

    Neighbours are combined in pairs, level by level, so rounding errors grow with the logarithm of the length. What is
    left over at a level waits: left-overs always stand behind everything combined later, so the order is kept. Where it
    need not be, halves are combined instead: numbers that lie beside one another in memory, three times as fast.
    """
    monoid = type(x)
    if monoid.fold_tile is not None:
        return monoid.fold_tile(x, dim)
    before = (slice(None),) * dim
    size = next(iter(x.asdict().values())).shape[dim]
    if size == 1:
        return with_identity(_take(x, (*before, 0)))
    waiting = None
    while size > 1:
        end = size - size % 2
        if in_order:
            last = _take(x, (*before, slice(end, size)))
            halves = [_take(x, (*before, slice(first, end, 2))) for first in range(2)]
        else:
            *halves, last = _split(x, [end // 2, end // 2, size - end], dim)
        if size % 2:
            waiting = last if waiting is None else combined(last, waiting)
        x = combined(*halves)
        size //= 2
    if waiting is not None:
        x = combined(x, waiting)
    return _take(x, (*before, 0))


def with_identity(x: Any) -> Any:
    """``x ⊙ identity``: the fold of one element, brought to the form that every other fold has (0 for no weight)."""
    return combined(x, type(x).identity(x))


def _split(x: Any, sizes: list[int], dim: int) -> list[Any]:
    """Stretches of an axis, so long each; their gradient is one concatenation."""
    parts = zip(*(value.split(sizes, dim) for value in x.asdict().values()), strict=True)
    return [type(x)(**dict(zip(x.asdict(), values, strict=True))) for values in parts]


def _take(x: Any, index: tuple[Any, ...]) -> Any:
    return type(x)(**{name: value[index] for name, value in x.asdict().items()})
