"""``@mr.op``: the front door. Binds a call's arguments, checks them, traces the body once, and runs it.

Checks happen here, before any work, and every message names the argument, what was given and what was expected. A new
shape is the same program; only a new number class, a new fixed choice or a left-out argument traces again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .engine import agree, autograd, dtensors, reference, registry, sharded
from .engine.eager import walk
from .engine.evaluate import Sizes, from_layout
from .engine.streaming import Walk
from .errors import ArgumentError, DeviceError, DTypeError, MonoidReduceError, ShapeError, TopKError
from .program import declare
from .program.declare import Parameter
from .program.expr import Expr, topological
from .program.lower import Lowered, lower
from .program.trace import Traced, place, trace
from .stream import Prepared, Stream

_TRACES = 256  # kept per op, the oldest dropped
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Op:
    """A layer: call it like the function it decorates, with tensors for its Row, Col and Batch parameters."""

    def __init__(self, function: Callable):
        functools.update_wrapper(self, function)
        self.function = function
        self.parameters = declare.parameters(function)
        self.signature = inspect.signature(function)
        self._traces: dict[tuple, list[tuple[Traced, dict[str, Any]]]] = {}

    def __repr__(self) -> str:
        return f"<op {self.function.__name__}({', '.join(f'{n}: {p}' for n, p in self.parameters.items())})>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if agree.current() is not None or dtensors.given((*args, *kwargs.values())):
            return self._divided(args, kwargs)
        settings = registry.settings()
        traced, inputs, sizes, out = self._prepare(args, kwargs)
        if settings.engine == "reference":
            results = reference.run(traced.outputs, inputs, sizes, settings.limit)
        else:
            results = autograd.execute(lower(traced.outputs), inputs, sizes, registry.FOLDERS[str(settings.engine)])
        shaped = [_shaped(v, e, sizes, out) for v, e in zip(results, traced.outputs, strict=True)]
        return traced.pack(shaped)

    def _divided(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The call on this rank's part, where rows or columns are divided over ranks."""
        if dtensors.given((*args, *kwargs.values())):
            return dtensors.call(self.parameters, self._bind(args, kwargs), lambda local: self._part((), local))
        _, results, _, pack = self._part(args, kwargs)
        return pack(results)

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """A fold over columns that come in chunks: give everything but the columns, then feed it.

        >>> import torch, monoidreduce as mr
        >>> @mr.op
        ... def nearest(x: mr.Row["d"], y: mr.Col["d"]):
        ...     return mr.argmin(mr.sqdist(x, y))
        >>> corpus = torch.arange(12.0).view(6, 2)
        >>> nearest.stream(corpus[3:5]).over(mr.chunks(corpus, size=4)).tolist()
        [3, 4]
        """
        columns = [n for n, p in self.parameters.items() if p.axis == "cols"]
        names = [n for n in self.parameters if n not in columns]
        if len(args) > len(names) or any(n in columns or n not in names for n in kwargs):
            raise ArgumentError(
                detail=f"{self.function.__name__}.stream takes {', '.join(names)}; columns come later",
                fix=f"It is declared as {self!r}",
            )
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        asks = any(isinstance(v, Tensor) and v.requires_grad for v in given.values())
        present = [n for n in columns if not self.parameters[n].optional]
        return Stream(functools.partial(self._streamed, given), present, asks)

    def _streamed(self, given: Mapping[str, Any], chunk: Mapping[str, Any]) -> Prepared:
        traced, inputs, sizes, out = self._prepare((), {**given, **chunk}, whole=False)
        engine = registry.FOLDERS["eager" if (name := str(registry.settings().engine)) == "reference" else name]

        def form(results: list[Any], sizes: Sizes) -> Any:
            _check_sizes(traced.outputs, sizes)
            return traced.pack([_shaped(v, e, sizes, out) for v, e in zip(results, traced.outputs, strict=True)])

        stays = {n: v for n, v in inputs.items() if n not in chunk}
        shape = (sizes.rows, sizes.batch, sorted(sizes.letters.items()), sizes.compute)
        name = f"{agree.fingerprint(traced.outputs)} {shape}"
        return Prepared(Walk(lower(traced.outputs), sizes, stays, engine), name, inputs, form)

    def _part(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple[Expr, ...], list[Tensor], Sizes, Callable]:
        traced, inputs, sizes, out = self._prepare(args, kwargs)
        results = sharded.execute(lower(traced.outputs), inputs, sizes, registry.sharded_folder())
        shaped = [_shaped(v, e, sizes, out) for v, e in zip(results, traced.outputs, strict=True)]
        return traced.outputs, shaped, sizes, traced.pack

    def program(self, *args: Any, **kwargs: Any) -> Lowered:
        """The lowered program that this call would run: its passes and what is fed to them."""
        return lower(self._prepare(args, kwargs)[0].outputs)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """What would run for this call and why, in words."""
        traced, _, sizes, _ = self._prepare(args, kwargs)
        program, engine = lower(traced.outputs), registry.settings().engine
        batch = f" × {tuple(sizes.batch)}" if sizes.batch else ""
        lines = [
            f"{self.function.__name__}: {sizes.rows} rows × {sizes.cols} columns{batch}, "
            f"{sizes.compute} arithmetic, engine {engine}"
        ]
        walks = [any(r.attrs[0] != "pick" for r in p.fold.reductions) for p in program.passes]
        count = sum(walks)
        lines.append(
            f"{count} pass{'es' if count != 1 else ''} over the pairs" + ("" if count else ": everything is one-sided")
        )
        for k, (p, walked) in enumerate(zip(program.passes, walks, strict=True), 1):
            kinds = ", ".join(f"{r.attrs[0]} over {r.attrs[1]}" for r in p.fold.reductions)
            lines.append(f"  {'pass' if walked else 'gather'} {k}: {kinds}; fed {', '.join(map(repr, p.feeds))}")
            if engine == "eager" and walked:
                lines += [f"    {line}" for line in walk(p.fold, sizes)]
        return "\n".join(lines)

    # Binding and checking

    def _prepare(
        self, args: tuple, kwargs: Mapping[str, Any], whole: bool = True
    ) -> tuple[Traced, dict[str, Any], Sizes, torch.dtype | None]:
        try:
            values = self._bind(args, kwargs)
            sizes, out = _sizes(self.parameters, values)
            traced = self._trace(values)
            sizes = agree.place(sizes, traced.outputs, values)
            if whole:  # of a stream's chunks only all together are
                _check_sizes(traced.outputs, sizes)
        except MonoidReduceError as error:
            agree.withdraw(error)
            raise error.at(self._describe(args, kwargs)) from None
        inputs = {n: _padded(v, self.parameters[n], len(sizes.batch)) for n, v in values.items() if v is not None}
        return traced, inputs, sizes, out

    def _bind(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError(
                detail=f"{self.function.__name__}: {error}", fix=f"It is declared as {self!r}"
            ) from None
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            self._check_kind(self.parameters[name], value)
        return dict(bound.arguments)

    def _check_kind(self, p: Parameter, value: Any) -> None:
        if value is None and p.optional:
            return
        if p.axis in ("rows", "cols", "batch"):
            if not isinstance(value, Tensor):
                raise ArgumentError(
                    detail=f"{p.name} is declared {p}, but was given {_shown(value)}", fix="Give a tensor"
                )
            least = (p.axis != "batch") + (p.feature is not None)
            if value.dim() < least:
                expected = {"rows": "..., M", "cols": "..., N", "batch": "..."}[p.axis] + (
                    f", {p.feature}" if p.feature else ""
                )
                raise ShapeError(
                    detail=f"{p.name} is declared {p}, so its shape is [{expected}], but it is {tuple(value.shape)}",
                    fix="Add the missing axis, or change the declaration",
                )
            if value.is_complex() or value.is_sparse or value.is_quantized:
                raise DTypeError(detail=f"{p.name} is {_shown(value)}", fix="Give a dense tensor of real numbers")
        elif p.axis == "number":
            if isinstance(value, Tensor):
                if value.dim() != 0:
                    raise ShapeError(
                        detail=f"{p.name} is declared {p}, one number, but was given a tensor {tuple(value.shape)}",
                        fix="Give a number or a 0-dim tensor, or declare it mr.Batch, Row or Col",
                    )
            elif (
                p.python is int and isinstance(value, float | int) and not (value == value // 1 and abs(value) < 2**63)
            ):
                raise ArgumentError(
                    detail=f"{p.name} is declared int, but was given {value}", fix="Give a whole number of 64 bits"
                )
            elif not isinstance(value, int | float) and not hasattr(value, "item"):
                raise ArgumentError(
                    detail=f"{p.name} is declared {p}, but was given {_shown(value)}", fix="Give a number"
                )

    def _trace(self, values: dict[str, Any]) -> Traced:
        dtypes: dict[str, str] = {}
        plain: dict[str, Any] = {}
        for name, value in values.items():
            p = self.parameters[name]
            if p.axis == "static" or value is None:
                plain[name] = value
            elif isinstance(value, Tensor):
                dtypes[name] = _number_class(value.dtype)
            else:
                plain[name] = value.item() if hasattr(value, "item") else value
                if p.python is int and not isinstance(plain[name], bool):
                    plain[name] = values[name] = int(plain[name])
                as_float = p.python is float and not isinstance(plain[name], bool)
                dtypes[name] = "bool" if isinstance(plain[name], bool) else "float" if as_float else "int"
        key = (tuple(sorted(dtypes.items())), tuple((n, v) for n, v in plain.items() if n not in dtypes))
        for traced, fixed in self._traces.get(key, ()):
            if all(n in plain and plain[n] == v and type(plain[n]) is type(v) for n, v in fixed.items()):
                return traced
        traced = trace(self.function, self.parameters, dtypes, plain)
        while len(self._traces) >= _TRACES:  # a new lambda in every call must not fill the memory
            del self._traces[next(iter(self._traces))]
        self._traces.setdefault(key, []).append((traced, {n: plain[n] for n in traced.fixed}))
        return traced

    def _describe(self, args: tuple, kwargs: Mapping[str, Any]) -> str:
        names = list(self.parameters)
        given = [*zip(names, args, strict=False), *kwargs.items()]
        return f"{place(self.function).split(':')[0]}, called with " + ", ".join(f"{n}={_shown(v)}" for n, v in given)


def _number_class(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "bool" if dtype is torch.bool else "int"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{value!r} ({type(value).__name__})" if not isinstance(value, int | float) else repr(value)


def _padded(value: Any, p: Parameter, rank: int) -> Any:
    """A tensor with all the batch dimensions there are (size 1 in front), a view; numbers and choices as they are."""
    if not isinstance(value, Tensor):
        return value.item() if hasattr(value, "item") else value
    own = value.dim() - (p.axis in ("rows", "cols")) - (p.feature is not None)
    if not value.is_floating_point() and value.dtype not in (torch.bool, torch.int64):
        value = value.long()  # indices are int64 everywhere
    return value[(None,) * (rank - own)] if rank > own else value


def _sizes(parameters: dict[str, Parameter], values: dict[str, Any]) -> tuple[Sizes, torch.dtype | None]:
    """Check that sizes, types and devices agree, and say what they are."""
    found: dict[str, tuple[str, int]] = {}
    batch: tuple[int, ...] = ()
    batch_of = ""
    floats: dict[str, torch.dtype] = {}
    devices: dict[str, torch.device] = {}
    for name, p in parameters.items():
        value = values.get(name)
        if not isinstance(value, Tensor):
            continue
        if p.axis == "number" and value.device.type == "cpu":
            continue
        devices[name] = value.device
        if p.axis == "number":
            continue
        if value.dtype.is_floating_point:
            floats[name] = value.dtype
        tail = (p.axis in ("rows", "cols")) + (p.feature is not None)
        own = tuple(value.shape[: value.dim() - tail])
        if p.axis in ("rows", "cols"):
            _agree(found, p.axis, name, value.shape[len(own)])
        if p.feature is not None:
            _agree(found, str(p.feature), name, value.shape[-1])
        try:
            batch = torch.broadcast_shapes(batch, own)
        except RuntimeError:
            raise ShapeError(
                detail=f"the batch dimensions of {name}, {own}, do not broadcast with {tuple(batch)} of {batch_of}",
                fix="Leading dimensions must be equal or 1",
            ) from None
        batch_of = batch_of or name
    if len(set(devices.values())) > 1:
        raise DeviceError(
            detail="arguments are on different devices: " + ", ".join(f"{n} on {d}" for n, d in devices.items())
        )
    if len(set(floats.values())) > 1:
        raise DTypeError(
            detail="arguments mix floating types: " + ", ".join(f"{n} is {str(d)[6:]}" for n, d in floats.items())
        )
    dtype = next(iter(floats.values()), None)
    if dtype is not None and dtype not in _FLOATS:
        raise DTypeError(
            detail=f"{next(iter(floats))} is {dtype}, which has no arithmetic here",
            fix="Use float64, float32, float16 or bfloat16",
        )
    compute = torch.float32 if dtype in (None, torch.float16, torch.bfloat16) else dtype
    device = next(iter(devices.values()), torch.device("cpu"))
    sizes = {k: s for k, (_, s) in found.items()}
    return Sizes(sizes.pop("rows", 1), sizes.pop("cols", 1), tuple(batch), sizes, device, compute), dtype


def _agree(found: dict[str, tuple[str, int]], axis: str, name: str, length: int) -> None:
    first, size = found.setdefault(axis, (name, length))
    if axis.isdigit() and length != int(axis):
        raise ShapeError(detail=f"{name} is declared with {axis} features, but has {length}", fix="Change one of them")
    if size != length:
        what = {"rows": "rows", "cols": "columns"}.get(axis, f'features "{axis}"')
        raise ShapeError(
            detail=f"{first} has {size} {what}, but {name} has {length}",
            fix="They must be equal"
            if axis in ("rows", "cols")
            else "Equal letters must be equal sizes; use two letters if they differ",
        )


def _check_sizes(outputs: tuple[Expr, ...], sizes: Sizes) -> None:
    """What the body asks of sizes that only the call knows: features that are there, a k that is not too large."""
    for e in topological(outputs):
        if e.op == "component" and not -(count := sizes.of(str(e.args[0].feature))) <= e.attrs[0] < count:
            raise ShapeError(
                detail=f'feature [{e.attrs[0]}] was asked of a vector over "{e.args[0].feature}", which has {count}',
                fix=f"Features are numbered from 0 to {count - 1}",
            )
        if e.op == "reduce" and e.attrs[0] == "topk" and e.attrs[2][0] > sizes.of(e.attrs[1]):
            raise TopKError(
                k=e.attrs[2][0], size=sizes.of(e.attrs[1]), axis={"cols": "columns"}.get(e.attrs[1], "rows")
            )


def _shaped(value: Any, e: Expr, sizes: Sizes, out: torch.dtype | None) -> Tensor:
    """An output as users hold it: every axis of its kind and the whole batch; vectors in the inputs' type.

    Numbers stay in the type they were accumulated in: rounding a loss or a logsumexp to 16 bits would cost 1e-3.
    """
    if not isinstance(value, Tensor):
        kind = {"bool": torch.bool, "int": torch.int64}.get(e.dtype, sizes.compute)
        value = torch.full((), value, dtype=kind, device=sizes.device)
    else:
        value = from_layout(value, e)
    tail = (*((sizes.rows,) if e.rows else ()), *((sizes.cols,) if e.cols else ()))
    tail += () if e.feature is None else (sizes.of(str(e.feature)),)
    value = value.expand((*sizes.batch, *tail))
    return value.to(out) if out is not None and e.feature is not None and e.dtype == "float" else value


def op(function: Callable) -> Op:
    """Make a layer of a function that says what happens to one pair.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    ...     return mr.softmax_mean(q @ k, v)
    >>> attention(torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 3)).shape
    torch.Size([5, 3])
    """
    return Op(function)
