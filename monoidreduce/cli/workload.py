"""A layer to be run by a command: the function to call, its dense form, and how its arguments are made.

An op needs nothing else: its arguments are drawn from its declarations, and its dense form is built from its program.
Any other layer (a ``torch.autograd.Function``, a module, a function that calls ops) needs a function
``NAME_inputs(rows, cols)`` in its file that returns its arguments, and may have a ``NAME_dense(*arguments)`` in plain
torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..engines.common.evaluate import Evaluator, Value
from ..errors import MonoidReduceError
from ..op import Op
from ..program.constructors import Term, terms
from ..program.declarations import Parameter
from ..program.expression import Expr, topological
from ..runtime.bind import inputs_of
from ..runtime.call import formed
from .command import CommandError
from .layers import LAYERS, LOGIT, SEED, Layer, Size
from .target import Target, check_argument_count, load, report_user_errors

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
    if spec in LAYERS:
        extra = [name for name, value in given.items() if value]
        if extra or set(features or {}) - {""}:
            raise CommandError(f"{spec} is a ready-made layer: only --features SIZE changes its arguments")
        return _from_ready_made(LAYERS[spec], (features or {}).get(""))
    if ":" not in spec and not spec.endswith(".py"):
        raise CommandError(f"there is no layer {spec}. Give FILE.py:NAME, or one of {', '.join(LAYERS)}")
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
        args = layer.inputs(Size(rows, cols, features or layer.full.features))
        return tuple(_place(x, dtype, device, isinstance(x, Tensor) and x.requires_grad) for x in args)

    return Workload(layer.name, "", layer.ours, layer.naive, make, dense_code=layer.dense, key=layer.key)


def _call_users_inputs(function: Callable[..., Any]) -> InputMaker:
    def make(rows: int, cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        check_argument_count(function, (rows, cols), "--inputs")
        args = function(rows, cols)
        if not isinstance(args, tuple | list):
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
        evaluate = DenseEvaluator(own, inputs_of(op.parameters, bound, sizes))
        return traced.pack(formed([evaluate(e) for e in traced.outputs], traced, own, out))

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
