"""Calls inside ``torch.compile``: what its tracer (dynamo) sees of an op.

Dynamo runs our front door symbolically and must not look further: the body of an op, the checks and the plans are
ours. So it sees one function that it puts into its graph unread (:func:`in_graph`, tensors and numbers in, tensors
out); the compiler's next stage runs that on fake tensors, and finds the registered operators of ``torch_operator.py``.
Fixed choices (an activation) are no values of a graph: they stay with the op under a name, and so does the form in
which results are handed back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..algebra import Monoid
from ..domains import restore
from ..errors import TraceError
from ..program.declarations import RESERVED, Parameter
from . import dispatch
from .bind import output_axes

Choices = tuple[tuple[str, Any], ...]
Run = Callable[..., tuple[list[Tensor], Any]]  # (choices, *args, **kwargs) -> results, their form

_CALLS: dict[str, tuple[Run, Choices]] = {}
_lock = threading.Lock()
_last = threading.local()


def constant(function: Callable) -> Callable:
    """Dynamo runs the function at once and takes its answer for a constant, as ``assume_constant_result`` does.

    (That function would import dynamo, which takes longer than all of us.)
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def register_call(run: Run, choices: Choices) -> str:
    """The name of an op with its fixed choices, for :func:`in_graph`."""
    with _lock:
        for known, call in _CALLS.items():
            if call[0] == run and call[1] == choices:
                return known
        _register()
        found = f"op{len(_CALLS)}"
        _CALLS[found] = run, choices
        return found


@functools.cache
def _register() -> None:
    torch.compiler.allow_in_graph(in_graph)


def in_graph(call: str, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Run an op; what dynamo sees in its place."""
    run, choices = _CALLS[call]
    results, _last.form = run(choices, *args, **kwargs)
    return tuple(results)


def open_numbers(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Numbers that the compiler leaves open: a length stays one, a float becomes a tensor.

    As a product: of all ways to make a tensor of a float this is the one that the compiler does not fix the float for.
    A float that no open length is part of (1/√f of a width that is fixed by now) is the number that it is.
    """
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    wide = any(t.dtype is torch.float64 for t in tensors)
    device = tensors[0].device if tensors else None

    def one(value: Any) -> Any:
        if not isinstance(value, torch.SymFloat):
            return value
        if _is_fixed(value):
            return float(value)
        unit: Any = torch.ones((), dtype=torch.float64 if wide else torch.float32, device=device)
        return unit * value

    return tuple(map(one, args)), {k: one(v) for k, v in kwargs.items()}


def _is_fixed(value: torch.SymFloat) -> bool:
    """Whether guards that exist already leave a float one value."""
    expression = getattr(value.node, "expr", None)
    return expression is not None and not expression.free_symbols


def fix_numbers(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Numbers with their values, which the compiler then guards."""

    def one(value: Any) -> Any:
        return int(value) if isinstance(value, torch.SymInt) else float(value) if _is_open(value) else value

    return tuple(map(one, args)), {k: one(v) for k, v in kwargs.items()}


def _is_open(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def last_form() -> Any:
    """The form of the results of this thread's last :func:`in_graph`."""
    return _last.form


def fill_form(form: Any, results: Sequence[Any]) -> Any:
    """Results in a form (a nest of containers with a result's number at each place); plain enough for dynamo."""
    if isinstance(form, int):
        return results[form]
    if isinstance(form, dict):
        return type(form)({key: fill_form(value, results) for key, value in form.items()})
    if isinstance(form, Monoid):
        return type(form)(**{field: fill_form(getattr(form, field), results) for field in type(form).fields()})
    inside = [fill_form(value, results) for value in form]
    return type(form)(*inside) if hasattr(form, "_fields") else type(form)(inside)


class Compiled:
    """What an op does when dynamo reads a call of it."""

    parameters: dict[str, Parameter]
    _choices: tuple[str | None, ...]  # the names of the parameters that are fixed choices, by place

    def _make_plan(
        self, args: tuple, kwargs: dict, engine: str, order: Any = None, total: bool = False
    ) -> tuple[Any, Any]:
        raise NotImplementedError

    def _run_compiled(self, args: tuple, kwargs: dict, total: bool = False) -> Any:
        """What dynamo reads of a call: the fixed choices taken out, one opaque function, the results' form put on.

        ``total``: of a call of which the sums over rows are asked for."""
        choices: list[Any] = []
        values, named = list(args), dict(kwargs)
        for at, chosen in enumerate(self._choices):
            if chosen is not None and at < len(values):
                choices += (chosen, values[at])
                values[at] = None
            elif chosen is not None and chosen in named:
                choices += (chosen, named.pop(chosen))
        if RESERVED in named:  # a domain is a fixed choice and some tensors
            domain = named.pop(RESERVED)
            kind, *sizes = domain.form
            choices += (RESERVED, kind)
            for at, size in enumerate(sizes):  # a number that the compiler left open is no fixed choice
                named[f"_{RESERVED}_form_{at}"] = size
            for at, tensor in enumerate(domain.tensors()):
                named[f"_{RESERVED}_{at}"] = tensor
        call = self._call_name(total, *choices)
        results = in_graph(call, *values, **named)
        return fill_form(getattr(self, self._form_name()), results)

    @constant
    def _call_name(self, total: bool, *choices: Any) -> str:
        run = self._run_total_in_graph if total else self._run_in_graph
        return register_call(run, tuple(zip(choices[::2], choices[1::2], strict=True)))

    def _last_axes(self) -> Any:
        """The axes of the last results (``output_axes``), in their form."""
        return fill_form(getattr(self, self._form_name()), getattr(self, self._axes_name()))

    @constant
    def _axes_name(self) -> str:
        """The attribute where the axes of the last results are kept."""
        axes = _last.axes
        place = f"_axes_{'_'.join(axes)}"
        setattr(self, place, axes)
        return place

    @constant
    def _form_name(self) -> str:
        """The attribute where the form of the last results is kept: there dynamo can guard it."""
        form = last_form()
        place = f"_form_{form!r}"
        setattr(self, place, form)
        return place

    def _run_in_graph(
        self, choices: Choices, *args: Any, total: bool = False, **kwargs: Any
    ) -> tuple[list[Tensor], Any]:
        chosen = dict(choices)
        kind = chosen.pop(RESERVED, None)
        if kind is not None:
            return self._run_over_in_graph(kind, chosen, args, kwargs, total)
        values = [chosen.pop(n) if n in chosen else v for n, v in zip(self.parameters, args, strict=False)]
        given, named = (*values, *args[len(values) :]), kwargs | chosen
        device = dispatch.autocast_device((*given, *named.values()))
        if device is not None:
            run = functools.partial(self._run_in_graph, (), total=total)
            return dispatch.call_in_autocast(run, self.parameters, device, given, named)
        self._fix_widths(given, named)
        try:
            plan, bound = self._make_plan(*open_numbers(given, named), dispatch.engine(), total=total)
        except TraceError:  # the body asks for a number's value: then it is fixed in the compiled code too
            plan, bound = self._make_plan(*fix_numbers(given, named), dispatch.engine(), total=total)
        results = plan.sums(bound) if total else plan.results(bound)
        _last.axes = tuple(output_axes(plan.traced.outputs))
        return results, plan.traced.pack(list(range(len(results))))

    def _run_over_in_graph(
        self, kind: str, chosen: dict[str, Any], args: tuple, kwargs: dict[str, Any], total: bool
    ) -> tuple[list[Tensor], Any]:
        """The same over the pairs of a domain."""
        sizes = [kwargs.pop(n) for n in sorted(n for n in kwargs if n.startswith(f"_{RESERVED}_form_"))]
        form = (kind, *(size if isinstance(size, bool) else int(size) for size in sizes))
        tensors = [kwargs.pop(n) for n in sorted(n for n in kwargs if n.startswith(f"_{RESERVED}_"))]
        values = [chosen.pop(n) if n in chosen else v for n, v in zip(self.parameters, args, strict=False)]
        own, domain = {**kwargs, **chosen}, restore(form, tuple(tensors))
        self._fix_widths(values, own)

        def run(given: tuple, named: dict[str, Any]) -> tuple[list[Tensor], Any]:
            op, call = self._find_domain_variant(given, {**named, RESERVED: domain})
            results, packed = op._run_in_graph((), total=total, **call.values)
            return results if total else call.finish(results), packed

        try:
            return run(*open_numbers(tuple(values), own))
        except TraceError:
            return run(*fix_numbers(tuple(values), own))

    def _find_domain_variant(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Compiled, Any]:
        raise NotImplementedError

    def _fix_widths(self, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Guard the widths of features that the compiler left open: kernels are made for a width, as are a layer's
        numbers (a scale of 1/√f)."""
        pairs = [
            *zip(self.parameters.values(), given, strict=False),
            *((self.parameters.get(n), v) for n, v in named.items()),
        ]
        for p, value in pairs:
            if p is not None and p.feature is not None and isinstance(value, Tensor) and value.dim():
                int(value.shape[-1])

    def _run_total_in_graph(self, choices: Choices, *args: Any, **kwargs: Any) -> tuple[list[Tensor], Any]:
        return self._run_in_graph(choices, *args, total=True, **kwargs)
