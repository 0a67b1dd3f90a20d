"""Symbols: what the body of an op sees instead of tensors.

A symbol wraps one expression and overloads what torch users write: operators, methods, and every torch function
(through ``__torch_function__``). Names are looked up in the table of primitives; what is not there is refused with
the nearest name that is. Python questions that have no answer for all pairs at once (``if s > 0``, ``len(x)``,
``s[...] = 0``) raise with the way to write it.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from ..errors import ImpureError, ShapeError, TraceError, shown
from . import constructors, several
from .advice import NUMPY_OPERATORS, REFUSED_ATTRIBUTES, check_truth_values, explain_call, refuse, refuse_numpy
from .expression import Expr, are_several, const, letters, size, topological
from .philox import DRAWS
from .primitives import COMPOSITES, NAMES, PRIMITIVES


class Trace:
    """One run of a body on symbols; ``tensors``: the names of the tensors that it can read besides its arguments;
    ``domain``: the form of the domain that it folds (``domains/``), None for all pairs."""

    __slots__ = ("domain", "tensors")

    def __init__(self, tensors: Mapping[int, str], domain: tuple | None = None):
        self.tensors, self.domain = tensors, domain


current_trace: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("current_trace", default=None)


def calls_torch(function: Callable) -> Callable:
    """A decorator for what calls torch functions with symbols: they reach them also while a tensor subclass (a nested
    tensor, in whose name autograd runs) has switched ``__torch_function__`` off."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return function(*args, **kwargs)

    return call


Given = ParamSpec("Given")
Result = TypeVar("Result")


def check_call(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A decorator for the functions of the language: a call that does not fit the signature says what to write."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise explain_call(function.__name__, signature, kwargs, error) from None
        return function(*args, **kwargs)

    return call


class NeedValue(BaseException):
    """The body asked for the Python value of a number: trace again with it fixed (never seen by users)."""

    def __init__(self, names: frozenset[str]):
        self.names = names


class Symbol:
    """One value of the body: for a row, a column or a pair, whatever it depends on."""

    __slots__ = ("expr", "trace")
    __hash__ = object.__hash__
    __array_priority__ = 1000  # numpy scalars leave the operation to us

    def __init__(self, expr: Expr):
        self.expr = expr
        self.trace = current_trace.get()

    def __repr__(self) -> str:
        where = {(0, 0): "number", (1, 0): "per row", (0, 1): "per column", (1, 1): "per pair"}
        e = self.expr
        names = " and ".join(f'"{name}"' for name in letters(e.feature))
        kind = f"{'several vectors' if are_several(e) else 'vector'} over {names}" if names else "number"
        return f"<{kind} {where[e.rows, e.cols]}: {e!r}>" if (e.rows or e.cols) else f"<{kind}: {e!r}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return call(getattr(func, "__name__", str(func)), args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_fields",):
            raise AttributeError(name)
        if name in REFUSED_ATTRIBUTES:
            raise TraceError(detail=f".{name} was asked of a symbol", fix=REFUSED_ATTRIBUTES[name])
        if not is_known(name):
            refuse(name, is_known, functions())
        if name == "where":  # torch's order: self.where(condition, other)
            return lambda condition, other: call("where", (condition, self, other), {})
        return lambda *args, **kwargs: call(name, (self, *args), kwargs)

    def primitive(self, name: str) -> Symbol:
        """A primitive of this value, also one that torch has no name for: derivatives and composites use it."""
        return _primitive_call(PRIMITIVES[name], (self,), {})

    def __round__(self, digits: int | None = None) -> Symbol:
        if digits:
            raise TraceError(detail=f"round(..., {digits}) was asked of a symbol", fix="Scale, round and scale back")
        return call("round", (self,), {})

    def __pos__(self) -> Symbol:
        return self

    def __matmul__(self, other: Any) -> Symbol:
        return call("matmul", (self, other), {})

    def __rmatmul__(self, other: Any) -> Symbol:
        return call("matmul", (other, self), {})

    def __getitem__(self, key: Any) -> Symbol:
        key = key[1] if isinstance(key, tuple) and len(key) == 2 and key[0] is Ellipsis else key
        if not isinstance(key, int) or self.expr.feature is None:
            raise TraceError(detail=f"[{key!r}] was asked of {self!r}", fix=_advise_index(key))
        e = expr_of(self)
        return Symbol(several.part(e, key) if are_several(e) else constructors.component(e, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TraceError(
            detail="the body writes into a value", fix="Nothing is changed in place here: use torch.where(...)"
        )

    def __bool__(self) -> bool:
        return bool(
            self._value("a Python if, while, and, or, not, min() or max()", "Use torch.where, &, |, ~, torch.minimum")
        )

    def __float__(self) -> float:
        return float(self._value("float() or a math function", "Use the torch function of the same name"))

    def __int__(self) -> int:
        return int(self._value("int()", "Use .int() for a cast"))

    __index__ = __int__

    def __iter__(self, *_: Any) -> NoReturn:
        raise TraceError(
            detail=f"the body iterates over {self!r}",
            fix="A symbol stands for one value: fold the features of a vector with (x - y).abs().sum(), or pick some "
            "with x[0], x[1]",
        )

    __len__ = __contains__ = __iter__

    def __format__(self, spec: str) -> str:
        if spec:
            raise TraceError(
                detail=f"the format {spec!r} was asked of {self!r}",
                fix="A body is traced, so there is no number to print: leave the format out to see the expression",
            )
        return repr(self)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TraceError(
            detail=f"a NumPy array was asked of {self!r}",
            fix="A body is traced, it has no values: use torch's functions, and pick features with x[0], x[1]",
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """NumPy's numbers may stand in arithmetic; its functions may not."""
        operator = NUMPY_OPERATORS.get(ufunc.__name__)
        if method != "__call__" or operator is None or kwargs:
            refuse_numpy(ufunc.__name__, is_known)
        return call(operator, inputs, {})

    def __array_function__(self, func: Any, types: Any, args: tuple, kwargs: dict) -> NoReturn:
        refuse_numpy(func.__name__, is_known)

    def _value(self, asked: str, fix: str) -> Any:
        """Numbers given at the call may be looked at (we trace again with their value); nothing else may."""
        if self.expr.op == "const":
            return self.expr.const
        under = topological([expr_of(self)])
        inputs = [e for e in under if e.op == "input"]
        if inputs and not any(e.rows or e.cols or e.op in ("reduce", "size", "nan") for e in under):
            raise NeedValue(frozenset(e.attrs[0] for e in inputs))
        reason = "which differs from pair to pair"
        if not any(e.rows or e.cols or e.op in ("reduce", "nan") for e in under):
            reason = "and a body is traced for all sizes at once"
            fix = "Pass it as an argument, n: int; in arithmetic and torch.where it can stand as it is"
        raise TraceError(detail=f"{asked} needs the value of {self!r}, {reason}", fix=fix)


class Everywhere(Symbol):
    """A symbol that belongs to no trace: ``mr.row_index``, ``mr.col_index``, ``mr.num_rows``, ``mr.num_cols``."""

    __slots__ = ()


def _advise_index(key: Any) -> str:
    """What to write instead of an index that is no number of a feature."""
    parts = key if isinstance(key, tuple) else (key,)
    if any(isinstance(part, Symbol) for part in parts):
        return 'Look a table, declared mr.Table["n"], up with mr.lookup(table, index)'
    if any(part is None or isinstance(part, slice) for part in parts):
        return "There are no axes in a body: a row's and a column's value meet as they are, x - y; a feature is x[0]"
    return "Only one feature of a vector can be picked, with a plain integer such as x[0]"


def expr_of(value: Any) -> Expr:
    """The expression of a symbol or of a plain number; anything else is a mistake."""
    if isinstance(value, Everywhere):
        return value.expr
    if isinstance(value, Symbol):
        if value.trace is not current_trace.get():
            raise ImpureError(detail=f"{value!r} comes from an earlier trace of a body")
        return value.expr
    tensors = {} if (trace := current_trace.get()) is None else trace.tensors
    if id(value) in tensors:
        name = f"{tensors[id(value)]} of shape {tuple(value.shape)}"
        raise TraceError(
            detail=f"the body reads the tensor {name}, which is not one of its arguments",
            fix="Pass it as an argument: declared float for one number, else Row, Col, mr.Batch or mr.Pair",
        )
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.requires_grad and value.device.type == "cpu":
        value = value.item()
    if hasattr(value, "item") and not isinstance(value, torch.Tensor) and not getattr(value, "ndim", 0):
        value = value.item()  # a numpy scalar
    if isinstance(value, (bool, int, float)):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TraceError(
                detail=f"{value} cannot enter a pair expression: it has more than 64 bits",
                fix="Whole numbers of a body have 64 bits, from -2**63 to 2**63 - 1; a float may be larger",
            )
        return const(value)
    if isinstance(value, torch.Tensor):
        if current_trace.get() is None:
            raise TraceError(
                detail="a reduction of the pair language was called outside the body of an op",
                fix="Decorate the function that calls it with @mr.op",
            )
        raise TraceError(
            detail=f"the body uses a tensor of shape {tuple(value.shape)} that is not one of its arguments",
            fix="Pass it as an argument, declared Row, Col, mr.Batch or mr.Pair",
        )
    raise TraceError(detail=f"{shown(value)} cannot enter a pair expression", fix="Use numbers and arguments")


def read_value(value: Any) -> Any:
    """The Python value of a fixed choice (how many, a probability): a body is traced once for each."""
    if isinstance(value, Symbol):
        fix = "Give a plain number, or declare it int or float"
        return math.nan if value.expr.op == "nan" else value._value("a fixed choice", fix)
    one = hasattr(value, "item") and not getattr(value, "ndim", 0)  # a numpy scalar, or a tensor of no dimensions
    return value.item() if one and not getattr(value, "requires_grad", False) else value


def _operator(name: str, reflected: bool = False) -> Callable:
    def method(self: Symbol, other: Any) -> Any:
        return call(name, (other, self) if reflected else (self, other), {})

    return method


for _name, _primitive in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow", "floordiv": "floor_divide",
    "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}.items():  # fmt: skip
    setattr(Symbol, f"__{_name}__", _operator(_primitive))
    setattr(Symbol, f"__r{_name}__", _operator(_primitive, reflected=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Symbol, f"__{_name}__", _operator(_name))
for _name, _primitive in {
    "neg": "neg", "abs": "abs", "invert": "bitwise_not", "floor": "floor", "ceil": "ceil", "trunc": "trunc",
}.items():  # fmt: skip
    setattr(Symbol, f"__{_name}__", lambda self, _p=_primitive: call(_p, (self,), {}))


# Functions --------------------------------------------------------------------------------------------------


def _feature_sum(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return Symbol(constructors.fsum(_vector(x)))


def _vector(x: Any) -> Expr:
    """The expression of a value whose features are asked for together; several vectors have no such."""
    e = expr_of(x)
    if are_several(e):
        raise ShapeError(
            detail=f"the features of {x!r} were asked for together, and they are several vectors",
            fix="Pick one of them, as in x[0], or multiply them first: x @ y has one number for each",
        )
    return e


def _feature_mean(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Symbol:
    e = _vector(x)
    return Symbol(constructors.apply("div", constructors.fsum(e), size(str(e.feature))))


def _norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, ord: Any = None, dtype: Any = None) -> Any:
    p = p if ord is None else ord
    if isinstance(p, Symbol) and (p.expr.rows or p.expr.cols):
        raise TraceError(
            detail="norm was given two values", fix="The distance of a pair is torch.sqrt(mr.sqdist(x, y))"
        )
    return Symbol(constructors.vector_norm(_vector(x), read_value(p)))


def _normalize(x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    return Symbol(constructors.normalize_vector(_vector(x), read_value(p), read_value(eps)))


def _feature_extreme(largest: bool) -> Callable:
    def f(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        return Symbol(constructors.feature_extreme(_vector(x), largest))

    return f


def _has_features(x: Any) -> bool:
    return expr_of(x).feature is not None


def _over_features(name: str) -> Callable:
    """softmax, log_softmax or logsumexp over the features of a vector."""

    def f(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, _stacklevel: int = 3) -> Any:
        if isinstance(dim, Symbol) or not _has_features(x):
            refuse(name, is_known, functions())
        return Symbol(constructors.apply_over_features(name, _vector(x)))

    return f


def _extreme(name: str) -> Callable:
    """max and min of a vector; of two values they are the larger and the smaller."""

    def f(x: Any, other: Any = None, *, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(other, Symbol):
            return call(f"{name}imum", (x, other), {})
        if dim is not None or other is not None or not _has_features(x):
            refuse(name, is_known, functions())
        return _feature_extreme(name == "max")(x)

    return f


def _dot(x: Any, y: Any) -> Symbol:
    a, b = expr_of(x), expr_of(y)
    both = are_several(a) and are_several(b)
    return Symbol(several.product(a, b) if both else constructors.dot(a, b))


def _cast_to(kind: str) -> Callable:
    return lambda x: Symbol(constructors.apply("cast", expr_of(x), to=kind))


def _to(x: Any, target: Any, *rest: Any, **kwargs: Any) -> Symbol:
    if not isinstance(target, torch.dtype):
        raise TraceError(
            detail=f".to({target!r}) was asked of a symbol", fix="Only number types, as in .to(torch.float32)"
        )
    return _cast_to("float" if target.is_floating_point else "bool" if target is torch.bool else "int")(x)


def _divide(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    a, b = expr_of(x), expr_of(y)
    if rounding_mode not in (None, "floor", "trunc"):
        raise TraceError(
            detail=f"div was given rounding_mode={shown(rounding_mode)}",
            fix='Use "floor", "trunc" or None, as in torch',
        )
    if rounding_mode is not None:
        _check_divisor(a, b)
    if rounding_mode == "floor":
        return Symbol(constructors.apply("floor_divide", a, b))
    if rounding_mode is not None and "float" not in (a.dtype, b.dtype):
        return _truncate_quotient(a, b)
    quotient = constructors.apply("div", a, b)
    return Symbol(quotient if rounding_mode is None else constructors.apply("trunc", quotient))


def _check_divisor(a: Expr, b: Expr) -> None:
    """Raise TraceError for a whole number divided by the constant 0; a float has an infinity or NaN for it."""
    if "float" not in (a.dtype, b.dtype) and constructors.is_constant(b, 0):
        raise TraceError(
            detail="a whole number is divided by 0", fix="Divide by another number, or a float: x / 0 is an infinity"
        )


def _truncate_quotient(a: Any, b: Any) -> Symbol:
    """An integer quotient rounded to zero: the rounded-down one, and one more where it is negative and not exact."""
    down = constructors.apply("floor_divide", a, b)
    inexact = constructors.apply("ne", constructors.apply("mul", down, b), a)
    negative = constructors.apply("ne", constructors.apply("lt", a, 0), constructors.apply("lt", b, 0))
    return Symbol(
        constructors.apply(
            "add", down, constructors.apply("where", constructors.apply("logical_and", inexact, negative), 1, 0)
        )
    )


def _bits(name: str) -> Callable:
    """An operation on bits, as torch has it: the logical one of truth values, bitwise of whole numbers."""

    def f(*args: Any) -> Symbol:
        exprs = [expr_of(a) for a in args]
        if any(e.dtype == "float" for e in exprs):
            raise TraceError(
                detail=f"{name} was asked of floating-point numbers",
                fix="Combine truth values (s > 0) or whole numbers; .int() makes a whole number",
            )
        _check_truth_values(name, exprs)
        return Symbol(constructors.apply(name, *exprs))

    return f


def _check_truth_values(name: str, args: Sequence[Expr]) -> None:
    truths = [e.dtype == "bool" for e in args]
    if any(truths):
        check_truth_values(name, truths)


def _apply_polygamma(n: Any, x: Any) -> Any:
    """torch.polygamma(n, x) and x.polygamma(n)."""
    n, x = (x, n) if isinstance(n, Symbol) else (n, x)
    if not isinstance(n, int) or n < 0:
        raise TraceError(detail=f"polygamma of order {shown(n)}", fix="The order is a whole number from 0")
    return Symbol(constructors.apply("polygamma", expr_of(x), n=n) if n else constructors.apply("digamma", expr_of(x)))


def _logit(x: Any, eps: float | None = None) -> Any:
    return Symbol(constructors.apply("logit", expr_of(x if eps is None else torch.clamp(x, eps, 1 - eps))))


BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift")
SPECIAL: dict[str, Callable] = {
    "sum": _feature_sum, "mean": _feature_mean, "norm": _norm, "vector_norm": _norm, "normalize": _normalize,
    "softmax": _over_features("softmax"), "log_softmax": _over_features("log_softmax"),
    "logsumexp": _over_features("logsumexp"), "max": _extreme("max"), "min": _extreme("min"),
    "amax": _feature_extreme(True), "amin": _feature_extreme(False),
    "matmul": _dot, "dot": _dot, "vdot": _dot, "inner": _dot,
    "div": _divide, "divide": _divide, "true_divide": _divide,
    "float_power": lambda x, exponent: torch.pow(x * 1.0, exponent),  # integers are raised as floats
    **{name: _bits(name) for name in BITS}, "polygamma": _apply_polygamma, "logit": _logit,
    "float": _cast_to("float"), "double": _cast_to("float"), "half": _cast_to("float"), "bfloat16": _cast_to("float"),
    "int": _cast_to("int"), "long": _cast_to("int"), "bool": _cast_to("bool"), "to": _to, "type": _to,
}  # fmt: skip


def is_known(name: str) -> bool:
    return name in SPECIAL or name in NAMES or name in COMPOSITES


def functions() -> list[str]:
    """Every torch function and method that the pair language knows, by name.

    >>> "tanh" in functions() and "gelu" in functions()
    True
    """
    return sorted({*SPECIAL, *NAMES, *COMPOSITES})


def call(name: str, args: tuple, kwargs: dict) -> Any:
    """A torch function or method by name, on symbols and numbers."""
    name = name.removeprefix("special_").removeprefix("linalg_")
    plain = name.strip("_")
    name = (
        name
        if is_known(name)
        else plain[1:]
        if plain[:1] == "r" and is_known(plain[1:]) and name.startswith("__r")
        else plain
        if name.startswith("__")
        else name
    )
    if name != plain and name == plain[1:]:
        args = args[::-1]
    if "axis" in kwargs:  # as torch, which takes NumPy's name too
        kwargs["dim"] = kwargs.pop("axis")
    if kwargs.pop("inplace", False):
        raise TraceError(detail=f"{name}(inplace=True)", fix="Nothing is changed in place in a body: drop inplace")
    if kwargs.pop("out", None) is not None:
        raise TraceError(detail=f"{name}(out=...)", fix="Nothing is changed in place in a body: drop out")
    if not is_known(name):
        refuse(name, is_known, functions())
    try:
        if name in SPECIAL:
            return SPECIAL[name](*args, **kwargs)
        if name in COMPOSITES:
            return COMPOSITES[name](*args, **kwargs)
        return _primitive_call(PRIMITIVES[NAMES[name]], args, kwargs)
    except TypeError as error:
        if isinstance(error, TraceError) or "argument" not in str(error):
            raise
        raise TraceError(
            detail=f"{name}: {str(error).split('() ', 1)[-1]}", fix="Call it as torch does, without out or dim"
        ) from None


def _primitive_call(primitive: Any, args: tuple, kwargs: dict) -> Symbol:
    arity = _ARITY[primitive.name]
    alpha = kwargs.pop("alpha", 1) if primitive.name in ("add", "sub") else 1
    names = list(primitive.attributes)
    attributes = dict(zip(names, args[arity:], strict=False)) | kwargs
    tensors = list(args[:arity])
    for key in ("input", "self", "other", "exponent"):
        if key in attributes and len(tensors) < arity:
            tensors.append(attributes.pop(key))
    if set(attributes) - set(names) or len(args) > arity + len(names) or len(tensors) < arity:
        extra = sorted(set(attributes) - set(names)) or f"{len(args)} arguments"
        raise TraceError(
            detail=f"{primitive.name} was called with {extra}",
            fix=f"It takes {arity} values{' and ' + ', '.join(names) if names else ''}",
        )
    exprs = [expr_of(t) for t in tensors]
    for key, value in attributes.items():  # part of the program: a number given at the call is fixed in its trace
        if isinstance(value, Symbol):
            attributes[key] = float(value) if value.expr.dtype == "float" else int(value)
    _check_truth_values(primitive.name, exprs)
    if primitive.name in ("floor_divide", "remainder", "fmod"):
        _check_divisor(*exprs)
    if alpha != 1:
        exprs[1] = constructors.apply("mul", exprs[1], alpha)
    return Symbol(constructors.apply(primitive.name, *exprs, **attributes))


_ARITY = dict.fromkeys(PRIMITIVES, 1) | dict.fromkeys(
    ("add", "sub", "mul", "div", "pow", "minimum", "maximum", "logaddexp", "floor_divide", "remainder", "xlogy",
     "atan2", "hypot", "fmod", "copysign", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift",
     "bitwise_right_shift", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"), 2,
) | {"where": 3} | DRAWS  # fmt: skip
