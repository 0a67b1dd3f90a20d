"""A layer to be run by a command: the function to call, its dense form, and how its arguments are made.

An op needs nothing else: its arguments are drawn from its declarations, and its dense form is built from its program.
Any other layer (a ``torch.autograd.Function``, a module, a function that calls ops) needs a function
``NAME_inputs(rows, cols)`` in its file that returns its arguments, and may have a ``NAME_dense(*arguments)`` in plain
torch.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import itertools
import math
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .. import ops
from ..algebra import Monoid
from ..engines.common.evaluate import Evaluator, Value
from ..errors import MonoidReduceError
from ..op import Op
from ..program.constructors import Term, terms
from ..program.expression import Expr, topological
from ..program.trace import Parameter
from ..runtime.bind import bind_inputs
from ..runtime.call import format_results
from .command import CommandError
from .layers import EXPLAINED, LOGIT, SEED, Layer, Size, find_ready_made

# Load what ``FILE.py:NAME`` or ``package.module:NAME`` names, and report errors of the user's code in one message.
#
# The file is run once, as Python runs it. A mistake in the file, the name or the user's code becomes a
# :class:`CommandError` that says on which line it happened.

_HINT = "Give FILE.py:NAME, such as layers.py:attention"


@dataclass(frozen=True)
class Target:
    """The object that was named, and the module that it stands in."""

    name: str
    thing: Any
    module: ModuleType
    file: str

    @property
    def is_monoid(self) -> bool:
        return _is_monoid(self.thing)

    @property
    def call(self) -> Callable[..., Any]:
        """The object as a function of its arguments: a ``torch.autograd.Function`` is called through ``apply``."""
        is_function = isinstance(self.thing, type) and issubclass(self.thing, Function)
        return self.thing.apply if is_function else self.thing

    def find_companion(self, name: str | None, suffix: str) -> Callable[..., Any] | None:
        """The function ``name`` of the same file or, without a name, ``NAME_suffix`` if the file has it."""
        found = getattr(self.module, name or f"{self.name}_{suffix}", None)
        if name and not callable(found):
            raise CommandError(f"{self.file} has no function {name}, which --{suffix} names")
        return found if callable(found) else None


def load(spec: str) -> Target:
    """The layer or monoid that ``spec`` names."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name or "/" in name or "\\" in name:
        known = _list_names(_load_module(spec)) if spec.endswith(".py") else []
        raise CommandError(f"{spec} names no layer. {_HINT}" + (f". The file has: {', '.join(known)}" if known else ""))
    module = _load_module(where)
    try:
        thing = getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("__")], n=1)
        advice = f"It has: {', '.join(_list_names(module)) or 'no op and no monoid'}"
        advice = f"Did you mean {near[0]}?" if near else advice
        raise CommandError(f"{where} has no {name}. {advice}") from None
    if not (_is_layer(thing) or _is_monoid(thing) or callable(thing)):
        kind = type(thing).__name__
        raise CommandError(
            f"{spec} is {'an' if kind[0] in 'aeiou' else 'a'} {kind}. Name an op (a function under @mr.op), a monoid "
            "(a subclass of mr.Monoid) or another layer that can be called"
        )
    return Target(name, thing, module, where)


def check_argument_count(function: Callable[..., Any], args: Sequence[Any], option: str) -> None:
    """Raise a CommandError if a user's function cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(function, "__name__", str(function))
        raise CommandError(f"{name}, which {option} names, is called with {len(args)} arguments: {error}") from None


# Errors of the user's code ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def report_user_errors(file: str) -> Iterator[None]:
    """Turn an error raised by the user's own lines into one message with the line; let any other error through."""
    try:
        yield
    except (CommandError, MonoidReduceError, KeyboardInterrupt):
        raise
    except BaseException as error:
        line = _find_line(error, file)
        place = _find_users_line(error) if line is None else f"{file}, line {line}"
        if place is None:
            raise
        raise CommandError(f"{place}: {describe_error(error)}") from None


def describe_error(error: BaseException) -> str:
    """The type of an error and the first line of its message.

    >>> describe_error(KeyError("q")), describe_error(ZeroDivisionError("division by zero"))
    ("KeyError: 'q'", 'ZeroDivisionError: division by zero')
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _find_line(error: BaseException, file: str) -> int | None:
    """The innermost line of this file in the error's traceback."""
    path = Path(file).resolve()
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path]
    return lines[-1] if lines else None


def _find_users_line(error: BaseException) -> str | None:
    """The innermost line of a file that is neither this package's nor installed: one that the target imports."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = [Path(__file__).parents[1], *(Path(p).resolve() for p in folders)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_file() and not any(path.is_relative_to(p) for p in installed):
            return f"{frame.filename}, line {frame.lineno}"
    return None


# Modules ----------------------------------------------------------------------------------------------------------


def _load_module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        return _import_module(where)
    path = Path(where)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError) as error:  # a name that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise CommandError(f"there is no file {where[:80]!r}: {reason}. {_HINT}") from None
    if not is_file:
        raise CommandError(f"the file {where} {'is a folder' if is_folder else 'does not exist'}. {_HINT}")
    spec = importlib.util.spec_from_file_location(f"_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise CommandError(f"{where} cannot be read as Python. {_HINT}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pickle, dataclasses and inspect look it up
    sys.path.insert(0, str(path.parent.resolve()))  # as ``python FILE.py`` does
    try:
        with report_user_errors(where):
            spec.loader.exec_module(module)
    except SyntaxError as error:  # in the file itself, so that none of its lines ran
        if error.lineno is None:  # bytes that are not text
            raise CommandError(f"{where} cannot be read as Python: {error.msg}") from None
        line = (error.text or "").strip()
        raise CommandError(f"{error.filename}, line {error.lineno}: {error.msg}: {line}") from None
    except ValueError as error:  # a wrong encoding, or a null byte before Python 3.12
        raise CommandError(f"{where} cannot be read as Python: {describe_error(error)}") from None
    except OSError as error:  # no permission
        raise CommandError(f"{where} cannot be read: {describe_error(error)}") from None
    except MonoidReduceError as error:
        raise CommandError(f"{where}, line {_find_line(error, where)}: {error}") from None
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(path.parent.resolve()))
    return module


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        is_path = "/" in name or "\\" in name or name.startswith(".")
        more = " (a file's path ends in .py)" if is_path else ""
        raise CommandError(f"{name[:200]!r} is neither a .py file nor an importable module{more}. {_HINT}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CommandError(f"{name} is neither a .py file nor an importable module ({error}). {_HINT}") from None
    except MonoidReduceError as error:
        raise CommandError(f"{name} cannot be imported: {error}") from None
    except (Exception, SystemExit) as error:  # raised by the module's own lines
        place = _find_users_line(error)
        reason = f"{place}: {describe_error(error)}" if place else describe_error(error)
        raise CommandError(f"{name} cannot be imported: {reason}") from None


def _list_names(module: ModuleType) -> list[str]:
    """The ops, layers and monoids that a module defines."""
    public = {n: v for n, v in vars(module).items() if not n.startswith("_")}
    return [n for n, v in public.items() if _is_layer(v) or (_is_monoid(v) and v.__module__ == module.__name__)]


def _is_monoid(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, Monoid)


def _is_layer(thing: Any) -> bool:
    is_function = isinstance(thing, type) and issubclass(thing, Function) and thing is not Function
    return is_function or isinstance(thing, (Op, nn.Module))


DEFAULT_FEATURES = 16  # the size of a feature axis, unless --features gives it
DEFAULT_NUMBERS = {float: 0.5, int: 3, bool: True}  # the value of a number, unless --set gives it
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

InputMaker = Callable[[int, int, torch.dtype, torch.device, int], tuple[Any, ...]]


@dataclass(frozen=True)
class Workload:
    """A layer and how to make its arguments."""

    name: str
    file: str
    call: Callable[..., Any]
    dense: Callable[..., Any] | None
    make_inputs: InputMaker  # (rows, cols, dtype, device, seed) -> arguments
    op: Op | None = None
    dense_code: str = ""  # the dense form, as shown on pages
    key: str = ""  # the key of a ready-made layer
    dense_is_handwritten: bool = True  # torch.compile cannot read a dense form that is built from a program

    def inputs(
        self, rows: int, cols: int, dtype: torch.dtype, device: torch.device, seed: int = SEED
    ) -> tuple[Any, ...]:
        """Arguments of this size. Floating-point arguments require gradients."""
        with report_user_errors(self.file):
            return self.make_inputs(rows, cols, dtype, device, seed)


def find(spec: str, features: Mapping[str, int] | None = None, **given: Any) -> Workload:
    """The ready-made layer with this key, or the layer that FILE.py:NAME names."""
    ready_made = find_ready_made(spec)
    if ready_made is not None:
        extra = [name for name, value in given.items() if value]
        if extra or set(features or {}) - {""}:
            raise CommandError(f"{spec} is a ready-made layer: only --features SIZE changes its arguments")
        return _from_ready_made(ready_made, (features or {}).get(""))
    if spec in ops.__all__:
        raise CommandError(
            f"{spec} is a ready-made layer whose arguments are not known here. Write a function NAME that calls "
            f"ops.{spec}, and NAME_inputs(rows, cols) that makes its arguments, and give FILE.py:NAME"
        )
    if ":" not in spec and not spec.endswith(".py"):
        raise CommandError(f"there is no layer {spec}. Give FILE.py:NAME, or one of {', '.join(EXPLAINED)}")
    return from_target(load(spec), features=features, **given)


def from_target(
    target: Target,
    settings: Sequence[tuple[str, str]] = (),
    features: Mapping[str, int] | None = None,
    batch: int | None = None,
    inputs_name: str | None = None,
    dense_name: str | None = None,
) -> Workload:
    """The workload of a layer in a file; the other arguments are the values of the command's options."""
    if target.is_monoid:
        raise CommandError(f"{target.name} is a monoid, not a layer. monoidreduce check tries its laws")
    op = target.thing if isinstance(target.thing, Op) else None
    users_inputs = target.find_companion(inputs_name, "inputs")
    users_dense = target.find_companion(dense_name, "dense")
    if users_inputs is not None:
        make = _call_users_inputs(users_inputs)
    elif op is not None:
        with report_user_errors(target.file):
            choice = choose_inputs(op, dict(settings), features or {})
        make = lambda rows, cols, *how: choice.draw(Sizes(rows, cols, batch, features or {}), *how)
    else:
        raise CommandError(
            f"{target.name} is no op, so its arguments are not declared. Put a function {target.name}_inputs(rows, "
            f"cols) that returns them into {target.file}, or name one with --inputs"
        )
    dense = users_dense or (make_dense(op) if op else None)
    code = getattr(users_dense, "__name__", "")
    return Workload(
        target.name, target.file, target.call, dense, make, op, code, dense_is_handwritten=users_dense is not None
    )


def _from_ready_made(layer: Layer, features: int | None) -> Workload:
    def make(rows: int, cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Any, ...]:
        with device if device.type == "meta" else contextlib.nullcontext():  # there nothing is drawn
            args = layer.inputs(Size(rows, cols, features or layer.full.features))
        return tuple(_place(x, dtype, device, isinstance(x, Tensor) and x.requires_grad) for x in args)

    return Workload(layer.name, "", layer.ours, layer.naive, make, dense_code=layer.dense, key=layer.key)


def _call_users_inputs(function: Callable[..., Any]) -> InputMaker:
    def make(rows: int, cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        check_argument_count(function, (rows, cols), "--inputs")
        args = function(rows, cols)
        if not isinstance(args, (tuple, list)):
            raise CommandError(f"{function.__name__} returned a {type(args).__name__}. Return a tuple of arguments")
        return tuple(_place(x, dtype, device) for x in args)

    return make


def _place(x: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool = True) -> Any:
    """A tensor on the device and, if it is of floating type, in the dtype; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach().to(device)
    return x.to(dtype).requires_grad_(requires_grad) if x.is_floating_point() else x


# The arguments of an op -------------------------------------------------------------------------------------------
#
# Vectors are normal, scaled so that a product of two has standard deviation LOGIT. What a bare Row or Col holds is not
# declared, so the program is read: a value compared with mr.col_index is the index of a column, two values compared
# with each other are the ids of sorted groups, any other is normal. --set overrides this.


@dataclass(frozen=True)
class Sizes:
    """The sizes of an op's arguments."""

    rows: int
    cols: int
    batch: int | None = None
    features: Mapping[str, int] = field(default_factory=dict)  # by axis; "" is for every axis that is not named

    def of(self, axis: str) -> int:
        if axis in ("rows", "cols"):
            return getattr(self, axis)
        return int(axis) if axis.isdecimal() else self.features.get(axis, self.features.get("", DEFAULT_FEATURES))


def _draw_normal(g: torch.Generator, shape: tuple[int, ...], sizes: Sizes) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


FILLERS: dict[str, Callable[[torch.Generator, tuple[int, ...], Sizes], Tensor]] = {
    "normal": _draw_normal,
    "positive": lambda g, shape, sizes: _draw_normal(g, shape, sizes).abs() + 0.1,
    "uniform": lambda g, shape, sizes: torch.rand(shape, generator=g, dtype=torch.float64),
    "rows": lambda g, shape, sizes: torch.randint(max(1, sizes.rows), shape, generator=g),
    "cols": lambda g, shape, sizes: torch.randint(max(1, sizes.cols), shape, generator=g),
    "sorted": lambda g, shape, sizes: torch.randint(4, shape, generator=g).sort(-1).values,
    "int": lambda g, shape, sizes: torch.randint(-3, 4, shape, generator=g),
    "bool": lambda g, shape, sizes: torch.randint(2, shape, generator=g).bool(),
}


@dataclass(frozen=True)
class InputChoice:
    """What each parameter of an op is given: the name of a filler, a number or fixed choice, or None if left out."""

    op: Op
    values: Mapping[str, Any]

    def draw(self, sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int = SEED) -> tuple[Any, ...]:
        """The arguments, drawn in float64 so that every dtype rounds the same numbers."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            _draw_tensor(p, self.values[name], generator, sizes, dtype, device)
            if p.is_tensor and self.values[name] is not None
            else self.values[name]
            for name, p in self.op.parameters.items()
        )


def _draw_tensor(
    p: Parameter, filler: str, generator: torch.Generator, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Tensor:
    batch = () if sizes.batch is None else (sizes.batch,)
    shape = (*batch, *(sizes.of(axis) for axis in p.tail))
    if device.type == "meta":
        is_float = filler in ("normal", "positive", "uniform")
        kind = dtype if is_float else torch.bool if filler == "bool" else torch.int64
        return torch.empty(shape, dtype=kind, device=device)
    value = FILLERS[filler](generator, shape, sizes)
    if not value.is_floating_point():
        return value.to(device)
    scale = 1.0 if p.feature is None or not shape[-1] else (LOGIT / shape[-1] ** 0.5) ** 0.5
    return (value * scale).to(device, dtype).requires_grad_()


def choose_inputs(op: Op, settings: Mapping[str, str], features: Mapping[str, int]) -> InputChoice:
    """Choose what each parameter is given: its setting, else its default, else what its use in the body suggests."""
    unknown = [name for name in settings if name not in op.parameters]
    if unknown:
        raise CommandError(f"--set {unknown[0]}: there is no such parameter. {op!r}")
    values = {name: _choose_value(p, settings.get(name)) for name, p in op.parameters.items()}
    choice = InputChoice(op, _choose_fillers(op, values, [name for name, value in values.items() if value is ...]))
    axes = {axis for p in op.parameters.values() for axis in p.tail} - {"rows", "cols"}
    unknown = sorted(set(features) - axes - {""})
    if unknown:
        raise CommandError(f"--features {unknown[0]}={features[unknown[0]]}: there is no such letter. {op!r}")
    return choice


def _choose_value(p: Parameter, given: str | None) -> Any:
    """The value of one parameter; Ellipsis where it depends on the body."""
    if p.is_tensor:
        if given is None:
            return None if p.optional else ... if p.feature is None else "normal"
        if given not in FILLERS:
            raise CommandError(f"--set {p.name}={given}: {p.name} is a {p}. Fill it with one of {', '.join(FILLERS)}")
        return given
    if given is None:
        if p.default is not ...:
            return p.default
        if p.python is None:
            raise CommandError(f"{p.name} is a fixed choice without a default. Give it with --set {p.name}=…")
        return DEFAULT_NUMBERS[p.python]
    try:
        return _BOOLEANS[given.lower()] if p.python is bool else p.python(given) if p.python else given
    except (ValueError, KeyError):
        raise CommandError(f"--set {p.name}={given}: {p.name} is declared {p}") from None


def _choose_fillers(op: Op, values: dict[str, Any], undeclared: list[str]) -> dict[str, Any]:
    """Fill the undeclared parameters with the first combination that the body can be traced with."""
    first: MonoidReduceError | None = None
    for kinds in itertools.product(("normal", "bool", "int"), repeat=len(undeclared)):
        filled = values | dict(zip(undeclared, kinds, strict=True))
        try:
            # Large enough for any top-k; tensors on the meta device have no storage.
            args = InputChoice(op, filled).draw(Sizes(1 << 20, 1 << 20), torch.float32, torch.device("meta"))
            outputs = op._prepare(args, {})[0].outputs
        except MonoidReduceError as error:
            first = first or error
            continue
        return filled | {n: f for n, f in _find_indices(outputs) if n in undeclared and filled[n] != "bool"}
    assert first is not None
    raise first


def _find_indices(outputs: tuple[Expr, ...]) -> Iterator[tuple[str, str]]:
    """The inputs that the program compares for equality, and what to fill them with."""
    for e in topological(outputs):
        if e.op in ("eq", "ne"):
            sides = [_skip_casts(a) for a in e.args]
            names = [x.attrs[0] for x in sides if x.op == "input"]
            axes = [x.op.removesuffix("_index") + "s" for x in sides if x.op in ("row_index", "col_index")]
            if len(names) == 2:
                yield from ((name, "sorted") for name in names)
            elif names and axes:
                yield names[0], axes[0]


def _skip_casts(e: Expr) -> Expr:
    while e.op == "cast":
        e = e.args[0]
    return e


# The dense form of an op ------------------------------------------------------------------------------------------
#
# The plain torch that one would write first. Every pair is computed and kept for autograd, as (q @ k.T).softmax(-1) @ v
# does; sums of vectors are matrix products, so that it is as fast as such code is. The arithmetic is done in the
# arguments' own dtype. It shares neither passes nor gradients nor tiles with the engines, so it can check them.


def make_dense(op: Op) -> Callable[..., Any]:
    """``op`` as one would write it in plain torch.

    >>> import monoidreduce as mr
    >>> @mr.op
    ... def mlp(x: mr.Row["d"], p: mr.Col["d"], q: mr.Col["n"]):
    ...     return mr.sum(torch.relu(x @ p) * q)
    >>> x, p, q = torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 3)
    >>> torch.allclose(make_dense(mlp)(x, p, q), torch.relu(x @ p.T) @ q)
    True
    """

    def call(*args: Any) -> Any:
        traced, bound, sizes, out = op._prepare(args, {})
        own = replace(sizes, compute=out or sizes.compute)
        evaluate = DenseEvaluator(own, bind_inputs(op.parameters, bound, sizes))
        return traced.pack(format_results([evaluate(e) for e in traced.outputs], traced, own, out))

    return call


@dataclass
class DenseEvaluator(Evaluator):
    """Evaluates a traced program on all pairs at once, with matrix products for sums of vectors."""

    def __call__(self, e: Expr) -> Value:
        for n in topological([e], stop=lambda x: x in self.memo or _split_products(x) is not None):
            if n not in self.memo:
                products = _split_products(n)
                self.memo[n] = self._node(n) if products is None else self._reduce_products(n, products)
        return self.memo[e]

    def _reduce_products(self, e: Expr, products: list[list[Term]]) -> list[Tensor]:
        kind, over, _ = e.attrs
        if kind == "sum":
            return [self._sum_products(products[0], None, over, e.args[0])]
        log_total, weight = self._softmax_of_pairs(e.args[0], over)
        return [log_total, *(self._sum_products(p, weight, over, v) for p, v in zip(products, e.args[1:], strict=True))]

    def _softmax_of_pairs(self, logit: Expr, over: str) -> tuple[Tensor, Tensor]:
        """The log-sum-exp and the weights; zero weights where every logit is −∞."""
        s = self._expand_to_pairs(logit)
        dim = -1 if over == "cols" else -2
        if not s.shape[dim]:
            shape = list(s.shape)
            shape[dim] = 1
            return s.new_full(shape, -math.inf), s
        empty = (s == -math.inf).all(dim, keepdim=True)
        if not empty.any():
            return torch.logsumexp(s, dim, keepdim=True), torch.softmax(s, dim)
        safe = torch.where(empty, 0.0, s)
        log_total = torch.where(empty, -math.inf, torch.logsumexp(safe, dim, keepdim=True))
        return log_total, torch.where(empty, 0.0, torch.softmax(safe, dim))

    def _expand_to_pairs(self, e: Expr) -> Tensor:
        """A number per pair, expanded to all rows and columns."""
        value = self._tensor(self.to_compute(self(e), e), e)
        return value.expand(*value.shape[:-2], self.sizes.rows, self.sizes.cols)

    def _sum_products(self, products: list[Term], weight: Tensor | None, over: str, vector: Expr) -> Tensor:
        """Σ number × row vector × column vector over one axis: one matrix product each."""
        total: Any = 0.0
        for number, row, col in products:
            outer, inner = (row, col) if over == "cols" else (col, row)
            k = self._expand_to_pairs(number) if weight is None else weight * self.to_compute(self(number), number)
            if inner is None:
                part = k.sum(-1 if over == "cols" else -2, keepdim=True).unsqueeze(-1)
            else:
                vectors = self.to_compute(self(inner), inner).squeeze(-3 if over == "cols" else -2)  # [..., folded, f]
                product = (k if over == "cols" else k.mT) @ vectors
                part = product.unsqueeze(-2 if over == "cols" else -3)
            total = total + (part if outer is None else part * self.to_compute(self(outer), outer))
        return total.expand(*total.shape[:-1], self.sizes.of(str(vector.feature)))


def _split_products(e: Expr) -> list[list[Term]] | None:
    """Each vector of a reduction over pairs as a sum of products; None if the expression is no such reduction."""
    if e.op != "reduce" or e.attrs[0] not in ("sum", "soft"):
        return None
    values = e.args if e.attrs[0] == "sum" else e.args[1:]
    on_pairs = any(a.rows for a in e.args) and any(a.cols for a in e.args)
    if not on_pairs or not values or any(v.feature is None or v.dtype != "float" for v in values):
        return None
    over_rows = e.attrs[1] == "rows"
    found = []
    for v in values:
        products = terms(v)
        if products is None:
            return None
        for _, row, col in products:
            inner = row if over_rows else col
            if inner is not None and not (inner.rows if over_rows else inner.cols):  # not a vector of the folded axis
                return None
        found.append(products)
    return found
