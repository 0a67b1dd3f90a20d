"""``@mr.op``: the front door. Binds a call's arguments, checks them, traces the body once, and runs it.

Checks happen before any work. A new shape is the same program; only a new number class, a new fixed choice or a
left-out argument traces again. A call that was right once is kept as a plan (``runtime/call.py``); the next call like
it goes straight there, and a wrong one finds none.
"""

from __future__ import annotations

import contextvars
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from . import arrays
from .algebra import Monoid
from .autotune import Tuning, tune
from .block_runs import Argument, Place, Prepared
from .domains import jagged
from .engines.common.evaluate import Sizes
from .engines.ranks import agreement, distributed_fold, dtensors
from .engines.stream import ChunkedProgram
from .errors import ArgumentError, EngineError, MonoidReduceError, ShardError, StreamError, TableError, shown
from .explain import Explanation, Measured, Subject, cost_of, explain
from .explain import measure as measured
from .plan import panel_layout
from .plan.budget import budget
from .plan.candidates import Cost
from .plan.settings import requested_budget
from .program import trace
from .program.expression import Expr
from .program.lower import Lowered, compile_program
from .program.trace import RESERVED, Parameter, TracedBody, find_place, public_name
from .program.trace import inputs_of as domain_inputs
from .runtime import bind, call_cost, dispatch, recorder, table_range, torch_operator, torch_replay
from .runtime.bind import bind_inputs, check_kind, check_sizes, find_sizes, output_axes, output_form
from .runtime.call import CallForm, CallPlan, Plans, Programs, format_results
from .stored_vectors import Scaled, make_body, split_arguments
from .stream import Stream

MYPY = False  # mypy takes it for True
Result = TypeVar("Result")  # what a body returns: tensors, in whatever form
Calls = list[tuple["Op", tuple, Mapping[str, Any]]]
explained_calls: contextvars.ContextVar[Calls | None] = contextvars.ContextVar(
    "explained_calls", default=None
)  # to calls without a key
_MEASURED = 256  # kinds of calls whose measurements are kept


class Op(torch_operator.Compiled, Generic[Result]):
    """A layer: call it like the function it decorates, with tensors for its Row, Col and Batch parameters.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def nearest(x: mr.Row["d"], y: mr.Col["d"]):
    ...     return mr.argmin(mr.sqdist(x, y))
    >>> nearest
    <op nearest(x: Row["d"], y: Col["d"])>
    >>> nearest(torch.eye(2), torch.eye(2).flip(0))
    tensor([1, 0])
    """

    def __init__(
        self,
        function: Callable,
        domain: tuple | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ):
        functools.update_wrapper(self, function)
        self.function = function
        self.parameters = trace.parameters(function) if parameters is None else dict(parameters)
        self.signature = inspect.signature(function)
        self.domain = domain  # the form of the pairs that exist (``runtime/bind.py``); None: all
        if domain is not None:
            self.parameters = bind.parameters_over(domain, self.parameters)
            given = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n, _ in domain_inputs(domain)]
            self.signature = self.signature.replace(parameters=[*self.signature.parameters.values(), *given])
        self._axes = {n: p.axis for n, p in self.parameters.items() if p.axis in ("rows", "cols")}
        self._choices = tuple(n if p.axis == "static" else None for n, p in self.parameters.items())
        self._programs = Programs(function, self.parameters, domain)
        self._plans = Plans(self.parameters, self.signature)
        self._measured: dict[tuple, Measured] = {}

    def __repr__(self) -> str:
        return f"<op {self.function.__name__}({', '.join(f'{n}: {p}' for n, p in self.parameters.items())})>"

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        if RESERVED in kwargs and kwargs[RESERVED] is None:  # all pairs
            del kwargs[RESERVED]
        if torch.compiler.is_dynamo_compiling():
            if _has_scaled(args, kwargs):
                op, call = self._find_stored_variant(args, kwargs)
                return op(**call.values)
            if arrays.are_traced(args, kwargs):
                return arrays.call_traced(self._call_compiled, args, kwargs)
            if dtensors.are_traced([*args, *kwargs.values()]):
                return torch._dynamo.disable(self._call_divided)(*args, **kwargs)
            if jagged.any_nested([*args, *kwargs.values()]):
                return self._call_with_values(args, kwargs)
            return self._run_compiled(args, kwargs)
        if RESERVED in kwargs:
            return self._call_variant(args, kwargs)
        values = (*args, *kwargs.values()) if kwargs else args
        key, plan = self._plans.find(len(args), kwargs, values)
        try:
            return self._run_uncached(args, kwargs, key) if plan is None else plan(values)
        except TableError as error:
            raise error.at(self._describe(args, kwargs)) from None

    def _call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_compiled(args, kwargs)

    def _call_with_values(self, args: tuple, kwargs: dict) -> Any:
        """A call with nested tensors among its arguments."""
        return jagged.call_with_values(
            self, self._axes, list(self.parameters), args, kwargs, lambda given, _: self._result_axes(dict(given))
        )

    def _result_axes(self, given: dict[str, Any]) -> Any:
        """``rows`` or ``cols`` for each result of a call that was just made, by the axis that it has an entry for, in
        the results' form."""
        if torch.compiler.is_dynamo_compiling():
            return self._last_axes()
        op, args, kwargs = self._resolve((), given)
        traced = op._programs.trace(op._bind(args, kwargs))
        return traced.pack(output_axes(traced.outputs))

    def _call_divided(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_uncached(args, kwargs, None)

    def _run_uncached(self, args: tuple, kwargs: dict, key: tuple | None) -> Any:
        """A call by the long way; ``key``: what its plan is to be found by, if it is an ordinary one."""
        if key is None and arrays.has_arrays((*args, *kwargs.values())):
            return arrays.call_with_tensors(self, list(self.parameters), args, kwargs)
        if key is None and _has_scaled(args, kwargs):
            return self._stored_calls(args, kwargs)
        if key is None and jagged.any_nested((*args, *kwargs.values())):
            return self._call_with_values(args, kwargs)
        if torch.jit.is_tracing():
            raise EngineError(
                detail=f"{self.function.__name__} is called under torch.jit.trace, which runs no op",
                fix="Use torch.compile, or torch.export for a graph to keep",
            )
        if explained_calls.get() is not None:
            return self._list_call(args, kwargs)
        form = None if key is None else self._plans.form(len(args), kwargs)
        if form is None:
            recorder.fail_recording()
        device = dispatch.autocast_device(args or kwargs.values())
        if device is not None:
            return dispatch.call_in_autocast(self, self.parameters, device, args, kwargs)
        if dispatch.is_divided() or (key is None and dtensors.any_dtensor((*args, *kwargs.values()))):
            return self._run_divided(args, kwargs)
        plan, bound = self._make_plan(args, kwargs, dispatch.engine(), None if form is None else form.order)
        if key is not None:
            self._plans.keep(key, plan)
        return plan(bound)

    def _list_call(self, args: tuple, kwargs: dict) -> Any:
        """A call of a layer that is explained: listed, and answered with zeros."""
        calls = explained_calls.get()
        assert calls is not None
        calls.append((self, args, kwargs))
        traced, bound, sizes, out = self._prepare(args, kwargs)
        device = next((v.device for v in bound.values() if isinstance(v, Tensor)), sizes.device)
        forms = [output_form(e, sizes, out) for e in traced.outputs]
        return traced.pack([torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in forms])

    def total(self, *args: Any, **kwargs: Any) -> Result:
        """The sums over rows of the body's numbers per row: ``self(*args).sum()``, in the form of what it returns.

        Of a sum all cotangents are known beforehand; where features are wide the gradient is taken in the forward, from
        the same pairs: nothing is computed again in the backward. Narrow features, batches, and bodies with several
        numbers that have gradients take the usual path.

        >>> import torch, monoidreduce as mr
        >>> @mr.op
        ... def loss(x: mr.Row["d"], w: mr.Col["d"], label: mr.Row):
        ...     s = x @ w
        ...     return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == label, s, 0.0))
        >>> x, w, label = torch.randn(5, 4), torch.randn(7, 4), torch.arange(5)
        >>> torch.allclose(loss.total(x, w, label), loss(x, w, label).sum())
        True
        """
        if torch.compiler.is_dynamo_compiling() and not _has_scaled(args, kwargs):
            return self._run_compiled(args, kwargs, total=True)
        if RESERVED in kwargs and arrays.has_arrays((*args, *kwargs.values())):
            return arrays.call_with_tensors(self.total, list(self.parameters), args, kwargs)
        op, args, kwargs = self._resolve(args, kwargs)
        if op is not self:
            return op.total(*args, **kwargs)
        given = (*args, *kwargs.values())
        key, plan = self._plans.find(len(args), kwargs, given, "total")
        if plan is not None:
            return plan(given)
        if key is None and arrays.has_arrays(given):
            return arrays.call_with_tensors(self.total, list(self.parameters), args, kwargs)
        form = self._plans.form(len(args), kwargs)
        if key is not None or not _is_wide(form, given):
            plan = self._make_total_plan(args, kwargs, form, key)
            return _sum_results(self(*args, **kwargs)) if plan is None else plan(given)
        if explained_calls.get() is not None:
            return _sum_results(self(*args, **kwargs))
        recorder.fail_recording()  # what is taken in the forward depends on who asks for gradients
        device = dispatch.autocast_device(given)
        if device is not None:
            return dispatch.call_in_autocast(self.total, self.parameters, device, args, kwargs)
        engine, divided = dispatch.engine(), dispatch.is_divided() or dtensors.any_dtensor(given)
        if divided or engine == "reference":
            return _sum_results(self(*args, **kwargs))
        plan, bound = self._make_plan(args, kwargs, engine, total=True)
        return plan.traced.pack(plan.sums(bound))

    def within(self, limit: int | str) -> Callable[..., Result]:
        """The same layer with a memory budget of its own, which its gradients keep.

        >>> import torch, monoidreduce as mr
        >>> @mr.op
        ... def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
        ...     return mr.softmax_mean(q @ k, v)
        >>> attention.within("64MB")(torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 3)).shape
        torch.Size([5, 3])
        """
        return budget(limit)(self)

    def tune(self, *args: Any, backward: bool = True, quiet: bool = False, **kwargs: Any) -> Tuning:
        """Find the fastest plans for calls like this one, and remember them: see :func:`monoidreduce.tune`.

        >>> import torch, monoidreduce as mr
        >>> @mr.op
        ... def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
        ...     return mr.softmax_mean(q @ k, v)
        >>> all(fold.seconds <= fold.safe_seconds for fold in attention.tune(*torch.randn(3, 300, 8)).folds)
        True
        """
        if RESERVED in kwargs:
            raise ArgumentError(detail="tune was given cols", fix="Call the op: listed pairs have one schedule")
        return tune(self, *args, backward=backward, quiet=quiet, **kwargs)

    def _make_total_plan(self, args: tuple, kwargs: dict, form: CallForm | None, key: tuple | None) -> CallPlan | None:
        """The plan of an ordinary call's sums, where they are of numbers per row."""
        if form is None or key is None:
            return None
        traced, bound, sizes, out = self._prepare(args, kwargs)
        if not _are_row_numbers(traced):
            return None
        plan = CallPlan.make(traced, self.parameters, bound, sizes, out, dispatch.engine(), form.order, total=True)
        self._plans.keep(key, plan)
        return plan

    def program(self, *args: Any, **kwargs: Any) -> Lowered:
        """The lowered program that this call would run: its passes and what is fed to them."""
        op, args, kwargs = self._resolve(args, kwargs)
        return compile_program(op._prepare(args, kwargs)[0].outputs)

    def cost(
        self, *args: Any, backward: bool = True, device: torch.device | str | None = None, ranks: int = 1, **kwargs: Any
    ) -> Cost:
        """What this call would cost by every schedule: floating operations, bytes, seconds, memory, as data.

        Nothing is run or allocated, and meta tensors will do. ``backward`` counts the gradients of the arguments that
        ask for one, or of all where none does; ``device``: another than the arguments'; ``ranks``: also divided over so
        many. (An op that has a parameter of one of these names is given it by position.)

        >>> import torch, monoidreduce as mr
        >>> @mr.op
        ... def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
        ...     return mr.softmax_mean(q @ k, v)
        >>> q = torch.empty(100_000, 64, device="meta")
        >>> cost = attention.cost(q, q, q, backward=False)
        >>> cost["flash"].flops == 4 * 100_000**2 * 64, cost["dense"].peak > 30e9, cost.chosen.schedule != "dense"
        (True, True, True)
        """
        op, args, kwargs = self._resolve(args, kwargs)
        return cost_of(op.subject(args, kwargs, backward), device, ranks)

    def explain(
        self, *args: Any, backward: bool = True, measure: bool = False, passes: bool = False, **kwargs: Any
    ) -> Explanation:
        """What would run for this call and why: a text, and data (``.as_dict()``).

        With ``measure`` the call is run a few times, and its time and memory stand beside the predicted ones, here and
        in later explanations of calls like it. With ``passes`` the program follows as it is after each pass of the
        compiler, forward and backward; as data it is ``["passes"]``.

        >>> import torch, monoidreduce as mr
        >>> @mr.op
        ... def nearest(x: mr.Row["d"], y: mr.Col["d"]):
        ...     return mr.min(mr.sqdist(x, y))
        >>> text = nearest.explain(torch.randn(500, 3), torch.randn(700, 3))
        >>> "1 pass over the pairs" in text, text.as_dict()["rows"]
        (True, 500)
        >>> print(nearest.explain(torch.randn(5, 3), torch.randn(7, 3), passes=True).as_dict()["passes"][0]["text"])
        return best[cols](sqdist(x, y), False).value
        """
        op, args, kwargs = self._resolve(args, kwargs)
        if op is not self:
            return op.explain(*args, **kwargs, backward=backward, measure=measure, passes=passes)
        subject = self.subject(args, kwargs, backward)
        key = (dispatch.engine(), backward, requested_budget(), *map(shown, (*args, *kwargs.values())))
        if measure:
            while len(self._measured) >= _MEASURED:
                del self._measured[next(iter(self._measured))]
            self._measured[key] = measured(self, args, kwargs, backward)
        return explain(subject, self._measured.get(key), passes)

    def subject(self, args: tuple, kwargs: Mapping[str, Any], backward: bool) -> Subject:
        """A call, as it is explained."""
        traced, bound, sizes, _ = self._prepare(args, kwargs)
        inputs = bind_inputs(self.parameters, bound, sizes)
        found = call_cost.count_pairs(traced.outputs, inputs, sizes)
        if found is not None:
            average = max(1, round(found.average))
            outputs, inputs, sizes = call_cost.as_dense(traced.outputs, inputs, sizes, self.parameters, average)
            traced = replace(traced, outputs=outputs)
        return Subject(self.function.__name__.lstrip("_"), traced, inputs, sizes, backward, found)

    # Over ranks, and over columns that come in chunks

    def _run_divided(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The call on this rank's part, where rows or columns are divided over ranks; in a stream, what it asks for."""
        streamed = agreement.streamed_call()
        if self.domain is not None and streamed is not None:
            raise StreamError(detail="a layer with cols= cannot be streamed", fix="Give all rows and columns at once")
        if self.domain is not None and dtensors.any_dtensor(kwargs.values()):
            raise ShardError(
                detail="DTensors were given with cols=, whose lists are not divided",
                fix="Give local tensors inside mr.shard(rows=group), and each rank the lists of its own rows",
            )
        if streamed is not None:
            return streamed.call(self, self._bind(args, kwargs))
        if dtensors.any_dtensor((*args, *kwargs.values())):
            return dtensors.run_on_dtensors(
                self.parameters, self._bind(args, kwargs), lambda local: self._run_shard((), local)
            )
        _, results, _, pack = self._run_shard(args, kwargs)
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
        if RESERVED in kwargs:
            raise StreamError(
                detail="stream was given cols, whose lists name columns that are not there yet",
                fix="Give all columns at once, or hide pairs with a condition in the body",
            )
        columns = {n: p for n, p in self.parameters.items() if p.axis in ("cols", "pairs")}
        names = [n for n in self.parameters if n not in columns]
        self._check_keywords(kwargs, self.parameters)
        if len(args) > len(names) or any(n in columns or n not in names for n in kwargs):
            raise ArgumentError(
                detail=f"{self.function.__name__}.stream takes {', '.join(names)}; columns come later",
                fix=f"It is declared as {self!r}",
            )
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if _has_scaled(args, kwargs):
            op, call = self._find_stored_variant((), given)
            return op.stream(**call.values)
        rows = {n: _describe_axis(p, "rows") for n, p in self.parameters.items() if p.axis == "rows"}
        cut = {n: _describe_axis(p, "cols") for n, p in columns.items()}
        return Stream(self._prepare_chunk, cut, given, rows)

    def _prepare_chunk(
        self, given: Mapping[str, Any], chunk: Mapping[str, Any], place: Place | None = None
    ) -> Prepared:
        traced, bound, sizes, out = self._prepare((), {**given, **chunk}, whole=False)
        inputs = bind_inputs(self.parameters, bound, sizes)
        engine = dispatch.FOLDERS["eager" if (name := dispatch.engine()) == "reference" else name]

        def results(found: list[Any], sizes: Sizes) -> list[Tensor]:
            check_sizes(traced.outputs, sizes)
            return format_results(found, traced, sizes, out)

        stays = {n: v for n, v in inputs.items() if n not in chunk}
        columns = functools.partial(bind_inputs, self.parameters, sizes=sizes)
        shape = (sizes.rows, sizes.batch, sorted(sizes.letters.items()), sizes.compute)
        name = f"{agreement.fingerprint(traced.outputs)} {shape}"
        program = dispatch.mark_exact_folds(compile_program(traced.outputs), frozenset(inputs), sizes)
        where = () if place is None else (place.first, place.total)
        forms = [output_form(e, sizes, out) for e in traced.outputs]
        return Prepared(
            ChunkedProgram(program, sizes, stays, engine, *where),
            name,
            columns,
            results,
            lambda found, rows, total: traced.pack(found),
            lambda total: check_sizes(traced.outputs, replace(sizes, cols=total)),
            tuple(-1 - (e.feature is not None) for e in traced.outputs),
            sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms) // max(1, sizes.rows),
        )

    def _run_shard(
        self, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Expr, ...], list[Tensor], Sizes, Callable]:
        traced, bound, sizes, out = self._prepare(args, kwargs)
        inputs = bind_inputs(self.parameters, bound, sizes)
        table_range.check_part(traced.outputs, sizes, inputs)
        inputs = inputs if sizes.shard is None else sizes.shard.replicate_inputs(inputs)
        needed = dispatch.names_needing_gradient(inputs)
        program = dispatch.mark_exact_folds(compile_program(traced.outputs), needed, sizes)
        results = distributed_fold.execute_program(program, inputs, sizes, dispatch.sharded_folder())
        return traced.outputs, format_results(results, traced, sizes, out), sizes, traced.pack

    # The same op for arguments that are stored as small numbers, or over some of the pairs: each is an op of its own

    def _find_variant(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Op, bind.DomainCall] | None:
        """The op that runs a call with stored arguments or listed columns, and what it is called with; None where that
        is this one."""
        if _has_scaled(args, kwargs):
            return self._find_stored_variant(args, kwargs)
        if kwargs.get(RESERVED) is not None:
            return self._find_domain_variant(args, kwargs)
        kwargs.pop(RESERVED, None)
        return None

    def _resolve(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Op, tuple, dict[str, Any]]:
        """The op that runs a call, and its arguments there: this one but for stored arguments and listed columns."""
        found = self._find_variant(args, kwargs)
        return (self, args, kwargs) if found is None else found[0]._resolve((), dict(found[1].values))

    @functools.cached_property
    def _stored_calls(self) -> torch_replay.LayerReplay:
        """Calls with stored arguments: how they are split is recorded, as a layer's own Python is."""
        return torch_replay.LayerReplay(lambda *args, **kwargs: self._call_variant(args, kwargs))

    def _call_variant(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if arrays.has_arrays((*args, *kwargs.values())):
            return arrays.call_with_tensors(self, list(self.parameters), args, kwargs)
        found = self._find_variant(args, kwargs)
        assert found is not None
        op, call = found
        return call.finish(op(**call.values))

    def _find_stored_variant(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Op, bind.DomainCall]:
        """The op for arguments of which some are stored (``stored_vectors.py``)."""
        if len(args) > len(self.parameters):
            raise ArgumentError(
                detail=f"{self.function.__name__}: too many positional arguments", fix=f"It is declared as {self!r}"
            )
        self._check_keywords(kwargs, (*self.parameters, RESERVED))
        forms, given = split_arguments({**dict(zip(self.parameters, args, strict=False)), **kwargs})
        op = getattr(self, self._name_variant("stored", *forms)) if forms else self
        return op, bind.DomainCall((), given)

    def _find_domain_variant(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Op, bind.DomainCall]:
        """The op over the pairs that the keyword ``cols`` says."""
        own = {n: v for n, v in kwargs.items() if n != RESERVED}
        try:
            domain = bind.check_domain(kwargs[RESERVED])
            parameters = getattr(self, self._name_variant("over", *domain.form)).parameters
            call = bind.bind_domain(parameters, self._bind(args, own, parameters), domain)
            return getattr(self, self._name_variant("over", *call.form)), call
        except MonoidReduceError as error:
            raise error.at(self._describe(args, own)) from None

    @torch_operator.constant
    def _name_variant(self, how: str, *form: Any) -> str:
        """The attribute that holds the op for stored arguments or pairs of a form: there dynamo can guard it."""
        name = f"_{how}_{form!r}".replace(".", "_")  # of dtypes: dynamo takes no dots
        if not hasattr(self, name):
            made: Op
            if how == "over":
                made = Op(self.function, form, self.parameters)
            else:
                body, parameters = make_body(self.function, self.parameters, dict(form))
                made = Op(body, parameters=parameters)
            setattr(self, name, made)
        return name

    # Plans

    def _make_plan(
        self, args: tuple, kwargs: dict, engine: str, order: Sequence[str] | None = None, total: bool = False
    ) -> tuple[CallPlan, Sequence[Any]]:
        """A plan by the long way, through every check, and the values in its order; ``total``: of the sums of the
        outputs, where these are numbers per row."""
        traced, bound, sizes, out = self._prepare(args, kwargs)
        plan = CallPlan.make(
            traced, self.parameters, bound, sizes, out, engine, order, total and _are_row_numbers(traced)
        )
        return plan, list(bound.values()) if order is None else [bound[n] for n in order]

    # An op is its function: a copy is itself, and it is pickled by name, as functions are

    def __copy__(self) -> Op:
        return self

    def __deepcopy__(self, memo: dict) -> Op:
        return self

    def __reduce__(self) -> str:
        return self.function.__qualname__

    # Binding and checking

    def _prepare(
        self, args: tuple, kwargs: Mapping[str, Any], whole: bool = True
    ) -> tuple[TracedBody, dict[str, Any], Sizes, torch.dtype | None]:
        try:
            values = self._bind(args, kwargs)
            divided = dispatch.is_divided()
            sizes, out = find_sizes(self.parameters, values, divided and agreement.pairs_have_all_columns())
            traced = self._programs.trace(values)
            sizes = agreement.place_call(sizes, traced.outputs, values) if divided else sizes
            if whole:  # of a stream's chunks only all together are
                check_sizes(traced.outputs, sizes)
        except MonoidReduceError as error:
            agreement.report_failure(error)
            raise error.at(self._describe(args, kwargs)) from None
        return traced, values, sizes, out

    def _bind(
        self, args: tuple, kwargs: Mapping[str, Any], parameters: Mapping[str, Parameter] | None = None
    ) -> dict[str, Any]:
        """The arguments by name; ``parameters``: as what they are declared, if not as the op's."""
        self._check_keywords(kwargs, self.parameters)
        form = self._plans.form(len(args), kwargs)
        if form is None:
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError as error:
                detail = f"{self.function.__name__}: {error}"
                raise ArgumentError(detail=detail, fix=f"It is declared as {self!r}") from None
        assert form is not None
        given = dict(zip(form.order, (*args, *kwargs.values()), strict=True))
        values = {name: given.get(name, p.default) for name, p in self.parameters.items()}
        for name, value in values.items():
            p = (parameters or self.parameters)[name]
            if value is None and p.optional:
                continue
            if not isinstance(value, (Tensor, type(None))) and p.is_tensor and arrays.is_array(value):
                values[name] = value = arrays.to_tensor(value, name)
            check_kind(p, value)
        return values

    def _check_keywords(self, given: Iterable[str], known: Iterable[str]) -> None:
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, list(known), n=1)
                meant = f", did you mean {near[0]!r}?" if near else ""
                raise ArgumentError(
                    detail=f"{self.function.__name__}: unknown keyword {name!r}{meant}",
                    fix=f"It is declared as {self!r}",
                )

    def _describe(self, args: tuple, kwargs: Mapping[str, Any]) -> str:
        names = list(self.parameters)
        given = [*zip(names, args, strict=False), *kwargs.items()]
        hidden = {n for n, p in self.parameters.items() if p.stored == "scale"}
        there = [(n, v) for n, v in given if v is not None and n not in hidden]
        told = "called with " + ", ".join(f"{public_name(n)}={shown(v)}" for n, v in there)
        if str(self.function.__module__).startswith(f"{__package__}.ops."):  # in a ready-made layer, not a user's line
            return told
        return f"{find_place(self.function).split(':')[0]}, {told}"


def _has_scaled(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    return True in [isinstance(v, Scaled) for v in (*args, *kwargs.values())]


def _describe_axis(p: Parameter, axis: str) -> Argument:
    """How an argument of rows or columns is cut."""
    behind = len(p.tail) - p.tail.index(axis)
    return Argument(p.optional, lambda rank: rank - behind)


def _are_row_numbers(traced: TracedBody) -> bool:
    """Whether all outputs are numbers per row."""
    return all(e.rows and not e.cols and e.feature is None for e in traced.outputs)


def _is_wide(form: CallForm | None, values: Sequence[Any]) -> bool:
    """Whether an argument may have features enough; asked first, for it costs nothing."""
    given = () if form is None else [values[at] for at in form.vectors]
    limit = panel_layout.narrow_features
    return True in [isinstance(v, Tensor) and v.dim() > 0 and v.shape[-1] > limit(v.device) for v in given]


def _sum_results(value: Any) -> Any:
    """Every tensor of a result added up."""
    if isinstance(value, Tensor):
        return value.sum()
    if isinstance(value, dict):
        return type(value)({k: _sum_results(v) for k, v in value.items()})
    if isinstance(value, Monoid):
        return type(value)(**_sum_results(value.asdict()))
    parts = [_sum_results(v) for v in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


if MYPY:
    # Mypy takes the letter of ``Row["f"]`` for the name of a type, in any class and behind any alias. It leaves a
    # function alone that ``no_type_check`` decorates, and takes it for Any: so that is what ``op`` is to mypy, unless
    # ``integrations/mypy_plugin.py`` takes the letters out and puts the function below in the place of this statement.
    from typing import no_type_check as op
else:

    def op(function: Callable[..., Result]) -> Op[Result]:
        """Make a layer of a function that says what happens to one pair.

        >>> import torch, monoidreduce as mr
        >>> @mr.op
        ... def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
        ...     return mr.softmax_mean(q @ k, v)
        >>> attention(torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 3)).shape
        torch.Size([5, 3])
        """
        return Op(function)
