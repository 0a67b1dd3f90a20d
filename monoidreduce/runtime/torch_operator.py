"""What torch's compilers and tracers see of us: folds as registered operators, and calls inside ``torch.compile``.

The operator of a fold, ``torch.ops.monoidreduce.fold``, has no gradient of its own (``autograd.py`` puts it under one),
no state, and outputs that alias nothing. A fold travels as its name: a digest of its text, so that a graph kept on disk
means the same fold in the next process, or is not found in its cache at all.

Inside ``torch.compile`` its tracer, dynamo, runs our front door symbolically and must not look further: the body of an
op, the checks and the plans are ours. So it sees one function that it puts into its graph unread (:func:`in_graph`,
tensors and numbers in, tensors out); the compiler's next stage runs that on fake tensors, and finds the registered
operators. Fixed choices (an activation) are no values of a graph: they stay with the op under a name, and so does the
form in which results are handed back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algebra import Monoid
from ..domains import restore
from ..engines.common import bounded_cache
from ..engines.common.evaluate import (
    Form,
    Sizes,
    pair_result_form,
    result_form,
    sum_gradients,
    summed_batch,
    traced_length,
)
from ..engines.common.matmul import SIXTEEN
from ..errors import EngineError, TraceError
from ..plan import settings
from ..program.lower import Fold, digest_fold
from ..program.trace import RESERVED, Parameter
from ..reductions import kind_of
from . import dispatch
from .bind import output_axes
from .dispatch import FOLDERS

# The sizes of a call as an operator's arguments
SIZES = "SymInt rows, SymInt cols, SymInt[] batch, str letters, SymInt[] lengths, ScalarType compute, Device device"
# The values of a call whose other properties have a name (:class:`FixedSizes`), and its lengths
VALUES = "Tensor[] tensors, Scalar[]? numbers, SymInt[] lengths"
_SCHEMA = f"fold(str fold, str engine, Tensor[] leaves, Scalar[]? numbers, int[] places, {SIZES}) -> Tensor[]"
# Inductor gives the operators tensors with the strides that they were traced with and copies nothing to contiguous;
# before torch 2.8 or so, with strides of the same order.
TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
_lock = threading.Lock()
_FOLDS: dict[str, Fold] = {}  # kept: a compiled graph may hold the name for as long as the process lives

library = torch.library.Library("monoidreduce", "DEF")


def register_operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator of torch: what it runs, and the results that a compiler sees.

    In one place, since torch looks for the source of each line that registers such results: ten milliseconds a file."""
    operator = schema.partition("(")[0]
    library.define(schema, tags=TAGS)
    library.impl(operator, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"monoidreduce::{operator}", fake, lib=library)


def call(fold: Fold, engine: str, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """Run a fold through the operator: as an engine would be called."""
    return torch.ops.monoidreduce.fold(name_fold(fold), engine, *split_values(leaves), *write_sizes(sizes))


def split_values(values: Sequence[Any]) -> tuple[list[Tensor], list[Any] | None, list[int]]:
    """Values as an operator's arguments: the tensors, the numbers (None, not an empty list, which ``torch.export.save``
    does not write) and the places of these."""
    numbers = {k: v for k, v in enumerate(values) if not isinstance(v, Tensor)}
    return [v for v in values if isinstance(v, Tensor)], list(numbers.values()) or None, list(numbers)


def write_sizes(sizes: Sizes) -> tuple:
    """Sizes as an operator's arguments (:data:`SIZES`)."""
    letters = sizes.letters
    lengths = list(letters.values())
    return sizes.rows, sizes.cols, list(sizes.batch), ",".join(letters), lengths, sizes.compute, sizes.device


def read_sizes(
    rows: int,
    cols: int,
    batch: Sequence[int],
    letters: str,
    lengths: Sequence[int],
    compute: torch.dtype,
    device: torch.device,
) -> Sizes:
    """The inverse of :func:`write_sizes`."""
    named = dict(zip(letters.split(","), lengths, strict=True)) if lengths else {}
    return Sizes(rows, cols, tuple(batch), named, device, compute)


class FixedSizes(NamedTuple):
    """What is fixed of the sizes of a call in a compiled graph; the lengths are the rest."""

    letters: tuple[str, ...]
    compute: torch.dtype

    @staticmethod
    def of(sizes: Sizes) -> FixedSizes:
        return FixedSizes(tuple(sizes.letters), sizes.compute)

    def read_lengths(self, lengths: Sequence[int], device: torch.device) -> Sizes:
        """The inverse of :func:`write_lengths`."""
        first = 2 + len(self.letters)
        letters = dict(zip(self.letters, lengths[2:first], strict=True))
        return Sizes(lengths[0], lengths[1], tuple(lengths[first:]), letters, device, self.compute)


def write_lengths(sizes: Sizes) -> list[int]:
    """The lengths of a call: rows, columns, features, batch."""
    return [sizes.rows, sizes.cols, *sizes.letters.values(), *sizes.batch]


def fix_lengths(sizes: Sizes) -> Sizes:
    """Sizes whose lengths are numbers: where a compiler leaves one open, the number that it was traced with, without a
    guard."""
    letters = {name: traced_length(length) for name, length in sizes.letters.items()}
    rows, cols, *batch = map(traced_length, (sizes.rows, sizes.cols, *sizes.batch))
    return replace(sizes, rows=rows, cols=cols, batch=tuple(batch), letters=letters)


def _run(fold_name: str, engine: str, *given: Any) -> list[Tensor]:
    fold, leaves, sizes = _open_arguments(fold_name, *given)
    with torch.no_grad(), bounded_cache.allocate_in_own_thread():  # gradients are autograd.py's business
        found = FOLDERS[engine](fold, leaves, sizes)
    # kernels hand vectors back in 16 bits and in the memory order of their inputs, others do not: a graph is told one
    # type and one layout for all engines
    forms = _list_forms_of_engine(fold, engine, leaves, sizes)
    found = sum_gradients(fold, found, leaves, sizes)
    return [t.to(dtype).contiguous() for t, (_, dtype) in zip(found, forms, strict=True)]


def _make_fake(fold_name: str, engine: str, *given: Any) -> list[Tensor]:
    fold, leaves, sizes = _open_arguments(fold_name, *given)
    forms = _list_forms_of_engine(fold, engine, leaves, sizes)
    return [torch.empty(shape, dtype=dtype, device=sizes.device) for shape, dtype in forms]


def _list_forms_of_engine(fold: Fold, engine: str, leaves: list[Any], sizes: Sizes) -> list[Form]:
    kernels = engine in ("auto", "triton") and settings.kernels_run_on(sizes.device)
    return list_narrow_result_forms(fold, leaves, sizes) if kernels else list_result_forms(fold, leaves, sizes)


def _open_arguments(
    fold_name: str, leaves: list[Tensor], numbers: list[Any] | None, places: list[int], *sizes: Any
) -> tuple:
    """What an engine is called with, from what the operator is: the fold, its leaves and the sizes."""
    return _find_fold(fold_name), join_values(leaves, numbers, places), read_sizes(*sizes)


def join_values(tensors: Sequence[Any], numbers: Sequence[Any] | None, places: Sequence[int]) -> list[Any]:
    """The inverse of :func:`split_values`."""
    given: list[Any] = list(tensors)
    for place, number in zip(places, numbers or (), strict=True):
        given.insert(place, number)
    return given


def unknown_name_error(what: str, how: str = "with gradients if the graph has them") -> EngineError:
    """The error of a graph that names ``what``, a fold or a program, before this process has met it."""
    return EngineError(
        detail=f"a graph from another process names a {what} that this process has not met",
        fix=f"Call the op once on any tensors of these types, {how}, then the graph",
    )


def _find_fold(name: str) -> Fold:
    if name not in _FOLDS:
        raise unknown_name_error("fold")
    return _FOLDS[name]


def list_result_forms(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[Form]:
    """Shape and type of each of a fold's results."""
    return [
        pair_result_form(leaves[fold.leaves.index(r.args[1])], sizes)
        if kind_of(r).per_pair
        else result_form(r, k, sizes, summed_batch(fold, r, leaves, sizes) if _sums_gradients(fold) else None)
        for r, k in fold.outputs
    ]


def list_narrow_result_forms(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Form]:
    """The same where kernels run: sums of 16-bit vectors are stored in 16 bits."""
    made = list_result_forms(fold, list(leaves), sizes)
    pairs = zip(fold.leaves, leaves, strict=True)
    vectors = [v.dtype for e, v in pairs if e.feature is not None and isinstance(v, Tensor)]
    narrow = next((d for d in vectors if d in SIXTEEN), None)
    if narrow is None or fold.raised:
        return made
    tail = len(sizes.batch) + 1
    sums = [kind_of(r).sums_vectors and len(made[at][0]) > tail for at, (r, _) in enumerate(fold.outputs)]
    return [(shape, narrow if summed else dtype) for (shape, dtype), summed in zip(made, sums, strict=True)]


register_operator(_SCHEMA, _run, _make_fake)


def move_batch_to_front(fold: Fold, leaves: Sequence[Any], dims: Sequence[int | None], size: int) -> list[Any]:
    """Leaves with a mapped dimension as the first batch dimension.

    Those that do not have it broadcast; what is given per pair is expanded, for its gradient is written in its shape,
    and so are all tensors of a domain where one is mapped, for each element then has lists of its own.
    """
    found: list[Any] = []
    lists = () if fold.domain is None else fold.domain.args
    mapped = any(d is not None for e, d in zip(fold.leaves, dims, strict=True) if e in lists)
    for e, v, d in zip(fold.leaves, leaves, dims, strict=True):
        if isinstance(v, Tensor):
            v = v.unsqueeze(0) if d is None else v.movedim(d, 0)
            v = v.expand(size, *v.shape[1:]) if d is None and (e.is_pair or (mapped and e in lists)) else v
        found.append(v)
    return found


def _vmap(info: Any, dims: tuple, fold_name: str, engine: str, leaves: list[Tensor], *rest: Any) -> tuple:
    numbers, places, rows, cols, batch, *others = rest
    at = join_values(dims[2], [None] * len(places), places)
    moved = move_batch_to_front(_find_fold(fold_name), join_values(leaves, numbers, places), at, info.batch_size)
    found = torch.ops.monoidreduce.fold(
        name_fold(keep_batch(_find_fold(fold_name))),
        engine,
        [v for v in moved if isinstance(v, Tensor)],
        numbers,
        places,
        rows,
        cols,
        [info.batch_size, *batch],
        *others,
    )
    return found, [0] * len(found)


torch.library.register_vmap("monoidreduce::fold", _vmap, lib=library)


@functools.lru_cache(maxsize=4096)
def name_fold(fold: Fold) -> str:
    """The name of a fold: a digest of its text, node by node.

    A graph is told one shape for all engines: gradients are summed over the batch afterwards, by torch. Those of pages
    are summed by the fold, since a page has no memory for each sequence."""
    summed = _sums_gradients(fold)
    found = digest_fold(fold) + "-exact" * fold.exact
    if summed:
        found += "".join(f"-{fold.reductions.index(r)}.{fold.leaves.index(e)}" for r, e in fold.gradients)
    with _lock:
        _FOLDS[found] = fold if summed else keep_batch(fold)
    return found


def _sums_gradients(fold: Fold) -> bool:
    return bool(fold.gradients) and fold.domain is not None and fold.domain.attrs[0][0] == "pages"


@functools.lru_cache(maxsize=4096)
def keep_batch(fold: Fold) -> Fold:
    """The same fold, whose results are not summed over any batch dimension."""
    return replace(fold, gradients=())


Choices = tuple[tuple[str, Any], ...]
Run = Callable[..., tuple[list[Tensor], Any]]  # (choices, *args, **kwargs) -> results, their form

_CALLS: dict[str, tuple[Run, Choices]] = {}
_op_lock = threading.Lock()
_last = threading.local()


def constant(function: Callable) -> Callable:
    """Dynamo runs the function at once and takes its answer for a constant, as ``assume_constant_result`` does.

    (That function would import dynamo, which takes longer than all of us.)
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def register_call(run: Run, choices: Choices) -> str:
    """The name of an op with its fixed choices, for :func:`in_graph`."""
    with _op_lock:
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
