"""The plan of a call: what depends on types, shapes and options is decided once; later calls like it only move tensors.

A :class:`CallPlan` is one traced program made ready for arguments of one kind. :class:`Plans` is the cache of an op's
plans, by a key of everything that the checks of a call read (``torch_replay.py``) and of nothing else: values are no
part of it, so a new temperature finds the same plan. :class:`Programs` is the cache of its traced programs, which are
the same for all shapes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engines import dense, panel, triton
from ..engines.common import oom_retry
from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.evaluate import Form, Sizes, from_layout
from ..engines.common.torch_code import inputs
from ..engines.panel import as_program
from ..errors import BudgetError, NoGradientError
from ..plan import budget, settings
from ..program.expression import Expr, topological
from ..program.gradient import FoldGradient
from ..program.lower import compile_program, looks_up
from ..program.trace import ROW_SEQUENCE, Parameter, TracedBody, inputs_of, trace, watch
from . import dispatch, gradient_in_forward, table_range
from .autograd import ReplayedProgram, make_stepwise_runner, sum_rows, with_replay
from .bind import number_class, output_form, pad_batch_dims
from .call_cost import DenseOrTiled
from .dispatch import is_untraced, names_needing_gradient, need_gradient
from .program_operator import TracedProgram
from .recorder import recording
from .replay import CallViews, ProgramSteps, make_steps
from .torch_replay import NUMBER, STATIC, WHOLE, CallKeys


class CallForm(NamedTuple):
    """How calls with so many values by position and the same names for the others are read."""

    order: tuple[str, ...]  # the names of all values
    kinds: tuple[str, ...]  # what is declared of them (``torch_replay.py``)
    vectors: tuple[int, ...]  # which of them may have features


@dataclass(frozen=True)
class CallPlan:
    """One traced program on arguments of one kind."""

    traced: TracedBody
    sizes: Sizes
    run: Callable[..., Sequence[Any]]
    sources: tuple[tuple[int, Callable[[Any], Any] | None], ...]  # per input of ``run``: which value, and its view
    fixed: tuple[tuple[int, Any], ...]  # numbers that the program was traced with
    outputs: tuple[Form, ...]
    without_gradient: tuple[int, ...] = ()  # the tensors that may not require one: the plan was made for that

    @staticmethod
    def make(
        traced: TracedBody,
        parameters: dict[str, Parameter],
        values: dict[str, Any],
        sizes: Sizes,
        out: torch.dtype | None,
        engine: str,
        order: Sequence[str] | None = None,
        total: bool = False,
    ) -> CallPlan:
        """``order``: the names of the values that calls come with, each call like every other; else of all parameters,
        and nothing else is known of them. ``total``: the sums of the outputs, numbers per row, are asked for."""
        places = {name: k for k, name in enumerate(parameters if order is None else order)}
        forms = tuple([output_form(e, sizes, out, total) for e in traced.outputs])
        without: Sequence[str] = ()
        if engine not in ("reference", "eager") and settings.launches_kernels_on(sizes.device):
            triton.start_triton()
        if engine == "reference":
            names, run = _run_reference(traced, sizes, total)
        else:
            names, run, without = _run_by_passes(traced, values, sizes, engine, order is not None, forms, total, out)
        if looks_up(traced.outputs) and (look := table_range.make_range_check(traced.outputs, sizes)) is not None:
            run = table_range.check_before(run, look, names)
        aliases = _find_aliases(traced.outputs)
        run = (lambda *given, shared=run: _copy_aliases(shared(*given), aliases)) if aliases else run
        return CallPlan(
            traced,
            sizes,
            run,
            tuple([(places.get(n, 0), _view(values[n], parameters[n], sizes, n in places)) for n in names]),
            tuple([(places[n], values[n]) for n in traced.fixed if n in places]),
            forms,
            tuple([places[n] for n in without if n in places and parameters[n].feature is None]),
        )

    def serves(self, values: Sequence[Any]) -> bool:
        """Whether the program is the one for these numbers, for those of these tensors that ask for gradients, and for
        what the body reads besides its arguments."""
        watched = self.traced.watched
        if watched is not None and not watched.holds():
            return False
        for at in self.without_gradient:
            if values[at].requires_grad:
                return False
        for at, v in self.fixed:
            value = values[at]
            if value is not v and (value != v or type(value) is not type(v)):
                return False
        return True

    def __call__(self, values: Sequence[Any]) -> Any:
        layer = recording.get()
        return self.traced.pack(self.results(values)) if layer is None else layer.run_plan(self, values)

    def results(self, values: Sequence[Any]) -> Sequence[Tensor]:
        """The results in order, before the body's own form is put on them."""
        return self.run_program(*[values[at] if view is None else view(values[at]) for at, view in self.sources])

    def sums(self, values: Sequence[Any]) -> list[Tensor]:
        """Each result added up, where the program does not do it."""
        return [result.sum() if result.dim() else result for result in self.results(values)]

    def run_program(self, *inputs: Any) -> Sequence[Tensor]:
        """The results of the program's own inputs: values with all batch dimensions."""
        try:
            found = self.run(*inputs)
        except BudgetError as error:
            raise _name_sufficient_budget(error, self.traced, inputs, self.sizes) from None
        except Exception as error:
            reason = oom_retry.find_reason(error)
        else:
            return found if type(found) is tuple else self._format(list(found))
        oom_retry.raise_typed(reason, self.sizes)

    def fix(
        self, inputs: Sequence[Any], given: Sequence[Any] = (), views: CallViews | None = None
    ) -> Callable[..., Sequence[Tensor]] | None:
        """:meth:`run_program` for inputs like these with the same numbers, as long as ``launch_key`` is what it is now:
        the recording itself, without a look-up. None where there is none. ``views``: it takes what the inputs are views
        of (``given``, now), and returns views of the results."""
        found = getattr(self.run, "func", None)
        if not isinstance(found, ReplayedProgram):
            return None
        otherwise = self.run_program if views is None else functools.partial(self._run_views, views)
        return found.fix(self.sizes, inputs, otherwise, self._format, given, views)

    def _run_views(self, views: CallViews, *given: Any) -> Sequence[Tensor]:
        return views.leave(self.run_program(*views.enter(given)))

    def _format(self, found: list[Any]) -> list[Tensor]:
        """Results as users hold them. A tuple of results of recorded launches needs none of this: their form was
        compared when they were recorded."""
        for k, (shape, dtype) in enumerate(self.outputs):
            value = found[k]
            if type(value) is not Tensor or value.dtype is not dtype or value.shape != shape or value._base is not None:
                found[k] = _give_form(value, self.outputs[k], self.sizes)
        return found


def _name_sufficient_budget(error: BudgetError, traced: TracedBody, inputs: Sequence[Any], sizes: Sizes) -> BudgetError:
    """The same error, naming an amount in which all passes of the call fit, and of its backward where one may follow.

    A pass knows only its own need; the call would be refused again by the next one.
    """
    own = error.details.get("bytes")
    if not isinstance(own, int):  # of tiles, whose least is the same for every pass
        return error
    step_class = dispatch.choose_step_class(dispatch.engine(), sizes.device)
    one = Sizes(sizes.rows, sizes.cols, (), sizes.letters, sizes.device, sizes.compute)
    kinds = {v.dtype for v in inputs if isinstance(v, Tensor) and v.is_floating_point()}
    folds = [p.fold for p in compile_program(traced.outputs).passes]
    if torch.is_grad_enabled() and need_gradient(inputs):
        for fold in list(folds):
            asked = tuple(e.dtype == "float" for e in fold.leaves)
            with contextlib.suppress(NoGradientError):
                source = FoldGradient(fold, asked, (True,) * len(fold.outputs))
                folds += [p.fold for p in compile_program(source).passes]
    folds = [f for f in folds if not panel.writes_pairs(f)]  # tiles do those
    bytes = max([own, *(panel.least_bytes(as_program(f), one, step_class, kinds) for f in folds)])
    return BudgetError(given=error.details["given"], least=budget.format_ceil(bytes), bytes=bytes)


def _run_by_passes(
    traced: TracedBody,
    values: dict[str, Any],
    sizes: Sizes,
    engine: str,
    one_kind: bool,
    forms: tuple[Form, ...],
    total: bool,
    out: torch.dtype | None,
) -> tuple[tuple[str, ...], Callable, list[str]]:
    """By passes over the pairs: the names of the inputs, what runs on them, and which of them must not require a
    gradient. ``one_kind``: all calls are on plain tensors of one kind, and nothing traces them."""
    program = compile_program(traced.outputs)
    names, records = inputs(program), one_kind and dispatch.can_record(engine, sizes)
    numbers = frozenset([n for n in names if not isinstance(values[n], Tensor)])
    needed = names_needing_gradient(values)
    if settings.kernels_run_on(sizes.device):
        program = dispatch.mark_exact_folds(program, needed, sizes)
    others = [n for n in names if n not in numbers and n not in needed] if program.exact else []
    without = [n for n in others if values[n].is_floating_point()]
    passes: Callable = functools.partial(make_stepwise_runner(engine, program, numbers, records), sizes)
    packed = ROW_SEQUENCE in names and sizes.device.type == "cpu"  # folded sequence by sequence
    choose = engine == "auto" and not program.is_listed and not packed
    rows = DenseOrTiled(program, names, sizes, numbers, passes, records) if choose else passes
    steps = make_steps(engine, program, numbers)
    if records:
        run = _with_replay(steps, rows, sizes, () if total else forms)
    else:
        run = rows if one_kind else TracedProgram(steps, sizes, out, rows)
    if not total:
        return names, run, without
    sums: Callable = lambda *given: sum_rows(run(*given), sizes)
    sums = _with_replay(make_steps(engine, program, numbers, total), sums, sizes, forms) if records else sums
    given = all(n in names for n in gradient_in_forward.find_inputs(traced.outputs)) and not program.is_listed
    if not given or not gradient_in_forward.is_wide(traced.outputs, sizes):
        return names, sums, without
    step_class = dispatch.choose_step_class(engine, sizes.device)
    return names, gradient_in_forward.LossRunner(traced.outputs, names, sizes, engine, step_class, sums), without


def _with_replay(steps: ProgramSteps, run: Callable, sizes: Sizes, forms: tuple[Form, ...]) -> Callable:
    """``run``, replaced by recorded launches where the program is nothing else; ``forms``: of its outputs."""
    if not steps.are_launches:
        return run
    return functools.partial(with_replay(steps, lambda _, *given: run(*given), forms), sizes)


def _run_reference(traced: TracedBody, sizes: Sizes, total: bool) -> tuple[tuple[str, ...], Callable]:
    """By the engine ``reference``, which shares nothing with the passes but the arguments: the names of the inputs, and
    what runs on them."""
    names = tuple(e.attrs[0] for e in topological(traced.outputs) if e.op == "input")

    def run(*given: Any) -> list[Any]:
        known = dict(zip(names, given, strict=True))
        found = dense.run(traced.outputs, known, sizes, settings.now().limit)
        rows = [from_layout(v, e) for v, e in zip(found, traced.outputs, strict=True)]
        return sum_rows(rows, sizes) if total else rows

    return names, run


def _view(value: Any, p: Parameter, sizes: Sizes, given: bool) -> Callable[[Any], Any] | None:
    """How an argument becomes an input: None where it is one already; a default, where it is not given."""
    if not given:
        return lambda _: value
    view = functools.partial(pad_batch_dims, p=p, rank=len(sizes.batch))
    if isinstance(value, Tensor) and value.device != sizes.device:  # a number that was given as a tensor on the host
        return lambda v: view(v).to(sizes.device, non_blocking=True)
    return None if view(value) is value else view


def format_results(found: list[Any], traced: TracedBody, sizes: Sizes, out: torch.dtype | None) -> list[Tensor]:
    """Results in the evaluator's layout as users hold them."""
    pairs = zip(_copy_aliases(found, _find_aliases(traced.outputs)), traced.outputs, strict=True)
    return [_give_form(from_layout(v, e), output_form(e, sizes, out), sizes) for v, e in pairs]


@functools.lru_cache(maxsize=1024)
def _find_aliases(outputs: tuple[Expr, ...]) -> tuple[int, ...]:
    """The outputs that would be the memory of an input, or of another output: a user may change each in place."""
    return tuple(k for k, e in enumerate(outputs) if e in outputs[:k] or _find_source(e).op == "input")


def _find_source(e: Expr) -> Expr:
    """What an output is at most a view of."""
    return _find_source(e.args[0]) if e.op in ("cast", "component", "spread") else e


def _copy_aliases(found: Sequence[Any], copied: tuple[int, ...]) -> list[Any]:
    """Results of which some are copied."""
    return [v.clone() if k in copied and isinstance(v, Tensor) else v for k, v in enumerate(found)]


def _give_form(value: Any, output: tuple[tuple[int, ...], torch.dtype], sizes: Sizes) -> Tensor:
    """A result in its output's shape and type, which may be changed in place: no element stands for several, and it is
    no view of an engine's buffer (torch would refuse one that was made under ``no_grad``)."""
    shape, dtype = output
    if not isinstance(value, Tensor):
        return torch.full(shape, value, dtype=dtype, device=sizes.device)
    if value.shape != shape:
        value = value.expand(shape).clone(memory_format=torch.contiguous_format)
    if value._base is not None and not value.requires_grad and is_untraced():
        value = value.detach()
    return value if value.dtype == dtype else value.to(dtype)


# The calls of an op that were made before. A call that is found goes straight to its plan; a wrong one finds none, and
# is explained by the checks of binding.

_PLANS = 1024  # kinds of calls of one op
_FIXED = 32  # plans or programs of one kind of call, by the numbers they were traced with
_TRACES = 256


class Plans:
    """The plans of an op with these parameters and this signature."""

    def __init__(self, parameters: Mapping[str, Parameter], signature: inspect.Signature):
        self.parameters, given = parameters, list(parameters.values())
        kinds = [p.kind for p in signature.parameters.values()]
        self.positional = sum(k is not inspect.Parameter.KEYWORD_ONLY for k in kinds)
        named = [kind is not inspect.Parameter.POSITIONAL_ONLY for kind in kinds]
        self.places = {name: at for at, name in enumerate(parameters) if named[at]}
        self.needed = frozenset(at for at, p in enumerate(given) if p.default is ...)
        self.kinds = tuple(STATIC if p.axis == "static" else WHOLE if p.python is int else NUMBER for p in given)
        self.keys = CallKeys(self._list_declared)
        self.known: BoundedCache[tuple, tuple[CallPlan, ...]] = BoundedCache(_PLANS)
        self.forms: dict[tuple, CallForm] = {}  # by how calls are spelt

    def __len__(self) -> int:
        """How many kinds of calls are known."""
        return len(self.known)

    def form(self, count: int, names: Iterable[str]) -> CallForm | None:
        """How a call with so many values by position, and these by name, is read; None where it does not fit, which
        binding explains."""
        spelt = count, (*names,)
        found = self.forms.get(spelt)
        if found is None and (found := self._find_form(*spelt)) is not None:
            self.forms[spelt] = found
        return found

    def _find_form(self, count: int, names: Sequence[str]) -> CallForm | None:
        by_name = [self.places.get(n, -1) for n in names]
        places = [*range(count), *by_name]
        if count > self.positional or min(by_name, default=count) < count or not self.needed.issubset(places):
            return None
        every = list(self.parameters)
        order = tuple([every[at] for at in places])
        vectors = tuple([k for k, name in enumerate(order) if self.parameters[name].feature is not None])
        return CallForm(order, tuple([self.kinds[at] for at in places]), vectors)

    def _list_declared(self, count: int, names: Iterable[str]) -> Sequence[str] | None:
        form = self.form(count, names)
        return None if form is None else form.kinds

    def find(
        self, count: int, names: Mapping[str, Any], values: Sequence[Any], more: str = ""
    ) -> tuple[tuple | None, CallPlan | None]:
        """The key of a call, None if it is out of the ordinary; and the plan that serves it, if there is one."""
        key = self.keys.key(count, names, values, more)
        for plan in () if key is None else self.known.find(key, ()):
            if plan.serves(values):
                return key, plan
        return key, None

    def keep(self, key: tuple, plan: CallPlan) -> None:
        """Cache a plan in front of others with its key, which were made for other numbers."""
        self.known.keep(key, (plan, *self.known.get(key, ())[: _FIXED - 1]))


TracedFor = tuple[TracedBody, dict[str, Any]]  # a program, and the numbers that it was traced with


class Programs:
    """The traced programs of an op.

    A new shape is the same program; a new number class, a fixed choice, a left-out argument or the value of a number
    that the body looked at is another one. So is a new value of something that the body, or a function given as a
    choice, reads besides its arguments (``program/trace.py``)."""

    def __init__(self, function: Any, parameters: dict[str, Parameter], domain: tuple | None = None):
        self.function, self.parameters, self.domain = function, parameters, domain
        hidden = () if domain is None else [name for name, _ in inputs_of(domain)]
        self.body = {n: p for n, p in parameters.items() if n not in hidden}
        self.traces: BoundedCache[tuple, list[TracedFor]] = BoundedCache(_TRACES)
        self._lock = threading.Lock()

    def trace(self, values: dict[str, Any]) -> TracedBody:
        """The program for these arguments; whole numbers among them become ``int``."""
        dtypes, plain = self._classify_values(values)
        choices = tuple([(n, v) for n, v in plain.items() if n not in dtypes])
        key = (tuple(sorted(dtypes.items())), choices)
        known = self.traces.find(key, ())
        for found in known:
            traced, fixed = found
            same = all(n in plain and plain[n] == v and type(plain[n]) is type(v) for n, v in fixed.items())
            if same and (traced.watched is None or traced.watched.holds()):
                if found is not known[0]:
                    self._keep(key, found)
                return traced
        watched = watch(self.function, *(v for _, v in choices if callable(v)))
        traced = trace(self.function, self.body, dtypes, plain, watched, self.domain)
        self._keep(key, (traced, {n: plain[n] for n in traced.fixed}))
        return traced

    def _keep(self, key: tuple, used: TracedFor) -> None:
        """Put a program, new or found, in front of all others."""
        with self._lock:
            known = [one for one in self.traces.get(key, ()) if one is not used]
            self.traces.keep(key, [used, *known[: _FIXED - 1]])

    def _classify_values(self, values: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
        """The number class of each argument, and the Python values of those that are no tensors."""
        dtypes: dict[str, str] = {}
        plain: dict[str, Any] = {}
        for name, value in values.items():
            p = self.parameters[name]
            if p.axis == "static" or value is None:
                plain[name] = value
            elif isinstance(value, Tensor):
                dtypes[name] = "float" if p.stored else number_class(value.dtype)
            elif isinstance(value, torch.SymInt):  # a length that the compiler leaves open
                dtypes[name] = "float" if p.python is float else "int"
            else:
                plain[name] = value.item() if hasattr(value, "item") else value
                if p.python is int and not isinstance(plain[name], bool):
                    plain[name] = values[name] = int(plain[name])
                as_float = p.python is float and not isinstance(plain[name], bool)
                dtypes[name] = "bool" if isinstance(plain[name], bool) else "float" if as_float else "int"
        return dtypes, plain
