"""Launches that were recorded, found again for calls of the same kind.

Which kernels run is decided by the tensors' types, shapes, strides and alignment (``triton.describe_leaves``), by the
signs of numbers, and by the settings (``dispatch.launch_key``). For tensors of one kind, three things are replayed:

- :class:`ForwardReplays`: a program of one pass whose steps are all launches, as one function;
- :class:`BackwardReplays`: the backward of such a program, likewise;
- :class:`PassReplay`: one fold of any other program (of several passes, with torch's arithmetic in between, or whose
  labels are gathered by torch): its launches, looked up once.

A layer often hands its op views of what it is given (heads in groups), and returns views of the results. A recorded
program needs none of them, since kernels are given addresses: :class:`CallViews` says which there were, and its results
and gradients are allocated in the form that the layer returns.

Nothing here differentiates or falls back: where there is no recording (torch's own arithmetic between the steps,
settings out of the ordinary, memory that runs out) the answer is None, and ``autograd.py`` runs the program step by
step. Torch calls, of layers and of folds on a CPU, are recorded by ``recorder.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engines import auto, triton
from ..engines.common import oom_retry
from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.evaluate import Form, Sizes
from ..engines.common.gradient_program import GradientProgram
from ..engines.common.torch_code import BatchArithmetic, Elementwise, Script, Step, define, script, tuple_text
from ..errors import NoGradientError
from ..plan import settings
from ..program.expression import Expr, topological
from ..program.gradient import collect_weights, differentiate_program, number_leaves
from ..program.lower import Fold, Lowered
from . import dispatch
from .dispatch import ENGINES, PLAIN, apply_settings, include_16_bits

MOST = 64  # recordings of one pass, program or backward
_PAIRS = 2**32  # of more pairs, the host's time for a call does not count beside the kernels
_MISSING: Any = object()
Needs = tuple[bool, ...]
Results = tuple[list[Tensor], list[Tensor]]  # those asked for, and those saved for a backward
Launches = Callable[[Sequence[Any]], Results]


# Views between what a call is given and its program


class View(NamedTuple):
    """A view of all of a tensor, and the view that undoes it."""

    run: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    undo: Callable[..., Tensor]
    undo_arguments: tuple[Any, ...]

    @staticmethod
    def of(run: Callable[..., Any], given: Sequence[Any], found: Tensor, reshapes: bool = False) -> View | None:
        """The view that a call of torch's made of its first argument; None where it copied, hid or repeated something.
        ``reshapes``: elements are known to keep their order."""
        source, *rest = given
        if not isinstance(source, Tensor) or found.dtype is not source.dtype or found.numel() != source.numel():
            return None
        if not source.numel() or found.data_ptr() != source.data_ptr():
            return None
        if reshapes or run in _RESHAPES:
            return View(Tensor.reshape, (tuple(found.shape),), Tensor.reshape, (tuple(source.shape),))
        if run in _SWAPS and len(rest) == 2:
            back = tuple(rest) if run is Tensor.transpose else (rest[1], rest[0])
            return View(run, tuple(rest), run, back)
        return None


_RESHAPES = frozenset(
    {Tensor.expand, Tensor.flatten, Tensor.reshape, Tensor.squeeze, Tensor.unflatten, Tensor.unsqueeze, Tensor.view}
)
_SWAPS = frozenset({Tensor.movedim, Tensor.transpose})
Views = tuple[View, ...]  # one after the other


def apply_views(views: Views, t: Tensor) -> Tensor:
    """A tensor through all of these views."""
    for view in views:
        t = view.run(t, *view.arguments)
    return t


def undo_views(views: Views, t: Tensor) -> Tensor:
    """The tensor that these views make this one of; differentiable, and a copy where no view can do it."""
    for view in reversed(views):
        t = view.undo(t, *view.undo_arguments)
    return t


Look = functools.partial  # of ``apply_views`` or ``undo_views``: a function of a tensor


def _split_looks(
    looks: Mapping[str, Look], given: Mapping[str, Tensor], looked: set[str]
) -> tuple[dict[str, Look], dict[str, Look]]:
    """Of the views of tensors, by name: those that kernels look at, and those that are copies. Of all others kernels
    need the address, which is the same."""
    copied = {name: look for name, look in looks.items() if look(given[name]).data_ptr() != given[name].data_ptr()}
    return {name: look for name, look in looks.items() if name in looked and name not in copied}, copied


class CallViews(NamedTuple):
    """Per input of a program, the views that make it of what is given; per output, those that make what is returned."""

    inputs: tuple[Views, ...]
    outputs: tuple[Views, ...]

    def enter(self, given: Sequence[Any]) -> list[Any]:
        """The inputs of the program."""
        return [apply_views(chain, v) if chain else v for chain, v in zip(self.inputs, given, strict=True)]

    def leave(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """What is returned."""
        return [apply_views(chain, t) for chain, t in zip(self.outputs, outputs, strict=True)]


def _prepare_kernels(fold: Fold, leaves: list[Any], sizes: Sizes) -> triton.PreparedFold | triton.ListedFold | None:
    if fold.domain is not None:
        return triton.prepare_listed(fold, leaves, sizes)
    return (triton.prepare_k_loop_fold if dispatch.takes_panels(fold, sizes) else triton.prepare)(fold, leaves, sizes)


PREPARE: dict[str, Callable[..., triton.PreparedFold | triton.ListedFold | None]] = {
    "auto": auto.prepare_launches,
    "triton": _prepare_kernels,
}


class _LaunchCache(BoundedCache[tuple, Any]):
    """Launches by the settings and by the numbers among the inputs, which are at ``numbers``; forgotten when the engine
    forgets the kernels that it prepared."""

    def __init__(self, numbers: Sequence[int]):
        super().__init__(MOST)
        self.numbers = tuple(numbers)
        self.arithmetic: triton.NumberArithmetic | None = None  # of these numbers: what kernels are given besides
        self.prepared: Any = None  # the engine's cache that the launches are from
        self.last: tuple[list[Any] | None, tuple] = (None, ())  # the numbers of the last call, and what is read of them

    def is_stale(self) -> bool:
        """Whether the launches are of kernels that the engine has forgotten; they are forgotten too then."""
        prepared = triton.prepared_folds()
        if self.prepared is prepared:
            return False
        self.clear()
        self.prepared, self.last = prepared, (None, ())
        return True

    def key(self, settings_key: tuple, values: Sequence[Any]) -> tuple:
        """The key of a call, of its ``launch_key`` and its inputs."""
        if not self.numbers:
            return settings_key
        numbers, (known, found) = [values[k] for k in self.numbers], self.last
        if numbers != known:
            more = () if self.arithmetic is None else self.arithmetic(*numbers)
            found = triton.describe_numbers((*numbers, *more))
            self.last = (numbers if all(numbers) else None, found)  # 0.0 equals -0.0, and 1 / 0.0 does not
        return settings_key + found


class PassReplay:
    """A fold on leaves of one kind: its launches, by the settings and by the numbers among the leaves.

    ``returned``: the results that are asked for; the others are saved for a backward."""

    def __init__(self, fold: Fold, sizes: Sizes, engine: str, returned: tuple[int, ...]):
        self.fold, self.sizes, self.engine, self.returned = fold, sizes, engine, returned
        self.saved = tuple(k for k in range(len(fold.outputs)) if k not in returned)
        self.known: _LaunchCache | None = None

    def __call__(self, leaves: Sequence[Any]) -> Results:
        """The results that are asked for, and the others."""
        key, known = dispatch.launch_key(), self.known
        if key is None:
            return self._run_engine(leaves)
        if known is None:
            known = self.known = _LaunchCache([k for k, v in enumerate(leaves) if not isinstance(v, Tensor)])
        known.is_stale()
        key = known.key(key, leaves)
        run = known.find(key)
        return self._run_first(leaves, known, key) if run is None else run(leaves)

    def join(self, returned: Sequence[Tensor], saved: Sequence[Tensor]) -> list[Tensor]:
        """All results in order; ``saved`` may be one tensor that holds them one behind the other."""
        found: list[Any] = [None] * len(self.fold.outputs)
        for k, t in zip(self.returned, returned, strict=True):
            found[k] = t
        for k, t in zip(self.saved, saved if len(saved) == len(self.saved) else saved[0].unbind(), strict=True):
            found[k] = t
        return found

    def _run_engine(self, leaves: Sequence[Any]) -> Results:
        return self._split(ENGINES[self.engine](self.fold, list(leaves), self.sizes))

    def _run_first(self, leaves: Sequence[Any], known: _LaunchCache, key: tuple) -> Results:
        """Run by the engine; what it did is cached, as launches where it is nothing else."""
        found = self._run_engine(leaves)
        ready = PREPARE[self.engine](self.fold, list(leaves), self.sizes)
        known.keep(key, self._find_run(leaves) if ready is None else triton.FoldSavingResults(ready, self.returned))
        return found

    def _find_run(self, leaves: Sequence[Any]) -> Launches:
        """The engine or, where it is known what it chooses, that."""
        run = auto.prepare_topk(self.fold, leaves, self.sizes) if self.engine == "auto" else None
        return self._run_engine if run is None else lambda given: self._split(run(given))

    def _split(self, found: list[Tensor]) -> Results:
        return [found[k] for k in self.returned], [found[k] for k in self.saved]


@dataclass(frozen=True, eq=False)
class ProgramSteps:
    """A program for an engine; ``numbers`` names the inputs that are Python numbers.

    ``total``: the sums of its outputs, which are numbers per row, are asked for."""

    engine: str
    program: Lowered
    numbers: frozenset[str]
    total: bool = False
    gradients: dict[tuple, GradientProgram] = field(default_factory=dict)
    failed: BoundedCache[tuple, bool] = field(default_factory=functools.partial(BoundedCache, MOST))  # to be recorded
    compiled: set[tuple] = field(default_factory=set)  # widths and types of inputs whose kernels were compiled together

    @functools.cached_property
    def script(self) -> Script:
        return script(self.program, self.numbers, True)

    @functools.cached_property
    def inputs(self) -> tuple[Expr, ...]:
        """The expressions of the inputs."""
        roots = [*(e for p in self.program.passes for e in p.feeds), *self.program.outputs]
        known = {e.attrs[0]: e for e in topological(roots) if e.op in ("input", "leaf")}
        return tuple(known[name] for name in self.script.inputs)

    @functools.cached_property
    def are_launches(self) -> bool:
        """Whether this is one pass, and nothing but steps that may be launches, whose results are returned; sums, only
        of the results of the last step, which is arithmetic of one side."""
        made = self.script
        if self.engine not in PREPARE or len(self.program.passes) != 1 or made.steps is None:
            return False
        if self.total and (
            not isinstance(made.steps[-1].what, Elementwise) or set(made.steps[-1].results) != {*made.returned}
        ):
            return False
        alone = Expr | BatchArithmetic
        theirs = {name for step in made.steps if not isinstance(step.what, alone) for name in step.results}
        return theirs.issuperset(made.returned) and len(set(made.returned)) == len(made.returned)

    @functools.cached_property
    def tensors(self) -> tuple[int, ...]:
        """The places of the inputs that are tensors."""
        return tuple(k for k, name in enumerate(self.script.inputs) if name not in self.numbers)

    @functools.cached_property
    def contributions(self) -> tuple[frozenset[int], ...] | None:
        """Per output, the tensors to whose gradients it contributes; None where the backward is no program."""
        inputs, count = self.inputs, len(self.program.outputs)
        wanted = tuple(k in self.tensors for k in range(len(inputs)))
        given = [tuple(k == n for k in range(count)) for n in range(count)]
        try:
            found = [differentiate_program(self.program, inputs, wanted, one) for one in given]
        except NoGradientError:  # torch may have one
            return None
        return tuple(frozenset(k for k, e in enumerate(grads) if e is not None) for grads in found)

    @functools.cached_property
    def may_need_gradients(self) -> bool:
        """Whether a backward may follow; which gradients there are (``contributions``), only the first one asks."""
        tensors = [self.inputs[k] for k in self.tensors]
        return all(any(e.dtype == "float" for e in side) for side in (tensors, self.program.outputs))

    @functools.cached_property
    def all_contribute(self) -> bool:
        """Whether all outputs contribute to all gradients that there can be."""
        floats = {k for k in self.tensors if self.inputs[k].dtype == "float"}
        return all(found == floats for found in self.contributions or ())

    def gradient(self, needs: Needs, given: tuple[bool, ...], results: int, narrow: bool) -> GradientProgram:
        """The gradients that are needed as a program of the inputs, its pass's ``results`` and the cotangents given.

        ``narrow``: whether vectors have 16 bits, so that weights may be multiplied out."""
        found = self.gradients.get((needs, given, results, narrow))
        if found is None:
            outputs: Sequence[Expr | None] = differentiate_program(self.program, self.inputs, needs, given)
            outputs = collect_weights(outputs) if narrow else outputs
            others = [*(f"P{k}" for k in range(results)), *(f"c{k}" for k in range(len(given)))]
            numbers = tuple(name in self.numbers for name in self.script.inputs)
            leaves = number_leaves("x", self.inputs)
            found = GradientProgram.of(leaves, others, outputs, needs, numbers, self.program.exact)
            self.gradients[needs, given, results, narrow] = found
        return found

    def number_arithmetic(self, sizes: Sizes) -> triton.NumberArithmetic | None:
        """The arithmetic of numbers alone among the steps, if there is any."""
        steps, names = self._number_steps
        return triton.NumberArithmetic(steps, names, sizes) if steps else None

    @functools.cached_property
    def _number_steps(self) -> tuple[list[Step], list[str]]:
        """The arithmetic of numbers alone, and the names of the inputs that are numbers."""
        pairs = zip(self.script.names, self.script.inputs, strict=True)
        of_numbers = (s for s in self.script.steps or () if isinstance(s.what, Expr) and s.what.op != "batch_index")
        return list(of_numbers), [name for name, given in pairs if given in self.numbers]

    def record(self, values: Sequence[Any], sizes: Sizes, forms: Sequence[Form] = ()) -> triton.RecordedLaunches | None:
        """The launches on these inputs, if nothing else is done; kernels are compiled on the way, and not run.
        ``forms``: those in which the outputs are expected."""
        if not self.are_launches:
            return None

        def key() -> tuple:
            numbers_of = triton.describe_numbers([v for v in values if not isinstance(v, Tensor)])
            lengths = sizes.rows, sizes.cols, sizes.batch
            return dispatch.launch_key(), *lengths, triton.describe_leaves(values), numbers_of

        if self.failed and key() in self.failed:
            return None
        found = self._record(values, sizes, forms)
        if found is None:
            self.failed.keep(key(), True)
        return found

    def _record(self, values: Sequence[Any], sizes: Sizes, forms: Sequence[Form]) -> triton.RecordedLaunches | None:
        folder, numbers = functools.partial(self._fold, sizes), self.number_arithmetic(sizes)
        expected = zip(self.script.returned, self.program.outputs, forms, strict=False)
        types = {name: form[1] for name, e, form in expected if e.feature is not None and e.dtype == "float"}

        def record() -> triton.RecordedLaunches | None:
            known = dict(zip(self.script.names, values, strict=True))
            return triton.record(self.script.steps or (), known, folder, sizes, numbers, self.total, types)

        with torch.no_grad(), triton.compile_only():
            kind = (*sizes.letters.values(), *(v.dtype for v in values if isinstance(v, Tensor)))
            if kind not in self.compiled and not self.program.is_listed:  # lists are read on the way
                self.compiled.add(kind)
                triton.compile_ahead(sizes.device, record)
            return record()

    def _fold(self, sizes: Sizes, fold: Fold, leaves: list[Any], is_last: bool) -> Any:
        ready = PREPARE[self.engine](fold, leaves, sizes)
        if ready is None:
            return [], None
        if isinstance(ready, triton.ListedFold):
            return ready(leaves), ready.recipes(leaves)
        return (ready.compile(leaves, not is_last), ready.recipes(leaves)) if ready.is_repeatable else ([], None)


# For all lengths of a call the steps are the same, and so is what is found out about them.
make_steps = functools.lru_cache(maxsize=1024)(ProgramSteps)


class ForwardReplays:
    """The recordings of a program on inputs of one kind, by the settings and by the numbers among the inputs."""

    def __init__(self, steps: ProgramSteps, forms: Sequence[Form] = ()):
        self.steps, self.forms = steps, tuple(forms)
        self.tensors = steps.tensors
        self.numbers = tuple(k for k in range(len(steps.script.inputs)) if k not in steps.tensors)
        self.known = _LaunchCache(self.numbers)

    def find(self, sizes: Sizes, values: Sequence[Any]) -> ForwardReplay | None:
        """The recording for these inputs, made now if there is none; None where there can be none."""
        key = dispatch.launch_key()
        if key is None:
            return None
        if self.known.is_stale():
            self.known.arithmetic = self.steps.number_arithmetic(sizes)
        key = self.known.key(key, values)
        found = self.known.get(key, _MISSING)
        if found is not _MISSING:
            return found
        made = None
        if self._pays(sizes):
            made = oom_retry.run_or_fall_back(self._record, lambda *_: None, (sizes, values), sizes)
        return self.known.keep(key, made)

    def _pays(self, sizes: Sizes) -> bool:
        """Whether the host's time counts, and the forward is the same with and without gradients: of many pairs it may
        keep more for a backward."""
        pairs = math.prod(sizes.batch) * sizes.rows * sizes.cols
        keeps = dispatch.has_many_pairs(sizes) and any(
            dispatch.may_save_row_gradients(p.fold) for p in self.steps.program.passes
        )
        return (pairs <= _PAIRS or self.steps.program.is_listed) and not keeps

    def _record(self, sizes: Sizes, values: Sequence[Any]) -> ForwardReplay | None:
        recorded, made = self.steps.record(values, sizes, self.forms), self.steps.script
        if recorded is None:
            return None
        kept = [name for name in recorded.results if self.steps.may_need_gradients and name not in made.returned]
        tensors = [made.names[k] for k in self.tensors]
        names = triton.ReplayNames(made.names, tensors, made.returned, kept)
        launches = triton.ProgramReplay(recorded, names, sizes)
        if dispatch.has_many_pairs(sizes) and not launches.holds_little:
            return None
        backwards = BackwardReplays(self.steps, sizes, recorded, launches.kept, include_16_bits(values))
        is_wide = any(dispatch.takes_panels(p.fold, sizes) for p in self.steps.program.passes)
        saved = len(self.tensors) + len(self.steps.program.outputs) + bool(launches.kept.places)
        forms = recorded.forms
        has_forms = tuple([forms[name] for name in made.returned]) == self.forms
        return ForwardReplay(launches, backwards, sizes, is_wide, saved, has_forms)

    def with_views(self, replay: ForwardReplay, values: Sequence[Any], views: CallViews) -> ForwardReplay | None:
        """The same recording for values that ``views`` make the program's inputs of, which returns views of its
        outputs; None where that is another program."""
        made, recorded, kept = self.steps.script, replay.backwards.recorded, replay.launches.kept
        if self.steps.total or not replay.has_forms:
            return None
        chains = {
            made.names[k]: functools.partial(apply_views, views.inputs[k]) for k in self.tensors if views.inputs[k]
        }
        given = {made.names[k]: values[k] for k in self.tensors}
        seen, copied = _split_looks(chains, given, recorded.read_by_host)
        returned_as = {
            name: functools.partial(apply_views, chain)
            for name, chain in zip(made.returned, views.outputs, strict=True)
            if chain
        }
        tensors = [made.names[k] for k in self.tensors]
        names = triton.ReplayNames(made.names, tensors, made.returned, [*kept.places])
        launches = triton.ProgramReplay(recorded, names, replay.sizes, triton.ReplayViews(seen, copied, returned_as))
        narrow = replay.backwards.narrow
        backwards = BackwardReplays(self.steps, replay.sizes, recorded, launches.kept, narrow, views)
        backwards.recorded_before = replay.backwards.recorded_before
        return replace(replay, launches=launches, backwards=backwards)

    def find_constant_outputs(self, values: Sequence[Any]) -> list[int]:
        """The outputs that contribute to no gradient that is needed."""
        contributions = self.steps.contributions or ()
        return [n for n, found in enumerate(contributions) if not any(values[k].requires_grad for k in found)]


@dataclass(frozen=True, eq=False)
class ForwardReplay:
    """A recorded forward: ``launches.run`` gives the outputs, the tensors that a backward needs, and the numbers."""

    launches: triton.ProgramReplay
    backwards: BackwardReplays
    sizes: Sizes
    is_wide: bool  # its gradients take panels, which are not recorded here
    saved: int  # how many tensors a backward needs
    has_forms: bool  # its outputs have the shapes and types that users expect


class SavedValues(NamedTuple):
    """What a backward is given: the inputs that are tensors, the outputs and (if there is one) the buffer of what was
    kept; a cotangent per output; the inputs that are numbers."""

    tensors: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    numbers: tuple[Any, ...]

    @property
    def given(self) -> tuple[bool, ...]:
        """Which cotangents there are."""
        return tuple([g is not None for g in self.cotangents])


@functools.lru_cache(maxsize=1024)
def _make_reader(types: tuple[type, ...]) -> Callable[..., tuple] | None:
    """A function that reads all that kernels look at in values of these types; None where one is no plain tensor.

    Saved tensors may come back otherwise than they were given, and cotangents have any strides: this is read in every
    backward."""
    if not PLAIN.issuperset(t for t in types if t is not type(None)):
        return None
    names = [f"v{k}" for k in range(len(types))]
    form = "{0}.dtype, {0}.shape, {0}.stride(), {0}.data_ptr() & 15"
    parts = ["None" if t is type(None) else form.format(name) for name, t in zip(names, types, strict=True)]
    return define("kind", names, [f"return {tuple_text(parts)}"], {})


def _broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    """True if a shape differs from the ``full`` one in axes of size 1 at most."""
    return len(shape) == len(full) and False not in [n in (1, own) for n, own in zip(shape, full, strict=True)]


class BackwardReplays:
    """The backward of a recorded forward: recordings by the gradients that are needed and the kind of all tensors.

    The results of its pass are outputs, or lie in the buffer ``kept``. ``views``: between what is saved and the
    program's inputs, and between its outputs and their cotangents."""

    def __init__(
        self,
        steps: ProgramSteps,
        sizes: Sizes,
        recorded: triton.RecordedLaunches,
        kept: triton.Buffer,
        narrow: bool,
        views: CallViews | None = None,
    ):
        self.steps, self.sizes, self.recorded, self.kept, self.views = steps, sizes, recorded, kept, views
        self.results, self.narrow = recorded.results, narrow
        # by the kind of the program's inputs; with and without views the launches are the same
        self.recorded_before: BoundedCache[tuple, triton.RecordedLaunches | None] = BoundedCache(MOST)
        self.settings = settings.now()
        self.known: BoundedCache[tuple, triton.ProgramReplay | None] = BoundedCache(MOST)
        self.arithmetic: dict[tuple, tuple[triton.NumberArithmetic | None, list[int]]] = {}
        # of the last backward: the types of its tensors, what reads them, its needs and numbers, what is read of these
        self.last: tuple[list[type], Any, tuple | None, tuple] = ([], None, None, ())

    def find(self, needs: Needs, saved: SavedValues) -> triton.ProgramReplay | None:
        """The recording for tensors like these, made now if there is none; None where there can be none."""
        given = (*saved.tensors, *saved.cotangents)
        types, read, state, signs = self.last
        now, asked = [*map(type, given)], (needs, saved.numbers)
        if now != types or asked != state:
            read = _make_reader(tuple(now))
            signs = () if read is None else self._describe_computed_numbers(needs, saved)
            self.last = (now, read, asked if all(saved.numbers) else None, signs)  # 0.0 equals -0.0, 1 / 0.0 does not
        if read is None:
            return None
        key = (needs, signs, read(*given))
        found = self.known.get(key, _MISSING)
        if found is not _MISSING:
            return found
        with apply_settings(self.settings):
            made = oom_retry.run_or_fall_back(self._record, lambda *_: None, (needs, saved), self.sizes)
        return self.known.keep(key, made)

    def program(self, needs: Needs, given: tuple[bool, ...]) -> GradientProgram:
        """The gradients that are needed as a program of the inputs, the pass's results and the cotangents given."""
        return self.steps.gradient(needs, given, len(self.results), self.narrow)

    def leaves(self, saved: SavedValues) -> list[Any]:
        """The program's inputs in their order."""
        tensors, numbers = iter(saved.tensors), iter(saved.numbers)
        found = [next(numbers if name in self.steps.numbers else tensors) for name in self.steps.script.inputs]
        return found if self.views is None else self.views.enter(found)

    def cotangents(self, saved: SavedValues) -> list[Tensor | None]:
        """The cotangents of the program's outputs."""
        return list(saved.cotangents) if self.views is None else self._undo_outputs(saved.cotangents)

    def gradients(self, found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the program's inputs as those of what was given."""
        if self.views is None:
            return list(found)
        pairs = zip(self.views.inputs, found, strict=True)
        return [undo_views(chain, g) if chain and g is not None else g for chain, g in pairs]

    def _undo_outputs(self, found: Sequence[Tensor | None]) -> list[Tensor | None]:
        assert self.views is not None
        pairs = zip(self.views.outputs, found, strict=True)
        return [undo_views(chain, t) if chain and t is not None else t for chain, t in pairs]

    def other_inputs(self, saved: SavedValues) -> list[Any]:
        """What gradient programs are given besides the forward's inputs: the pass's results, and the cotangents."""
        first, returned = len(self.steps.inputs) - len(saved.numbers), self.steps.script.returned
        outputs: Sequence[Any] = saved.tensors[first : first + len(returned)]
        known = dict(zip(returned, outputs if self.views is None else self._undo_outputs(outputs), strict=True))
        if self.kept.places:
            known |= self.kept.views(saved.tensors[-1])
        shape, total = (*self.sizes.batch, self.sizes.rows), self.steps.total
        cotangents = [g.expand(shape) if total and g is not None else g for g in self.cotangents(saved)]
        return [*(known[name] for name in self.results), *cotangents]

    def _describe_computed_numbers(self, needs: Needs, saved: SavedValues) -> tuple:
        """What kernels look at in the numbers that a backward computes from those it is given, whose own signs are
        fixed."""
        if not saved.numbers:
            return ()
        key = (needs, saved.given)
        if key not in self.arithmetic:
            made, names = self.program(*key), self.steps.script.inputs
            numbers = [k for k, name in enumerate(names) if name in self.steps.numbers]
            steps = make_steps(self.steps.engine, made.program, made.numbers)
            places = [numbers.index(k) for k in made.sources if k in numbers]
            self.arithmetic[key] = steps.number_arithmetic(self.sizes), places
        arithmetic, places = self.arithmetic[key]
        return () if arithmetic is None else triton.describe_numbers(arithmetic(*[saved.numbers[k] for k in places]))

    def _record(self, needs: Needs, saved: SavedValues) -> triton.ProgramReplay | None:
        made = self.program(needs, saved.given)
        steps = make_steps(self.steps.engine, made.program, made.numbers)
        pool = [*self.leaves(saved), *self.other_inputs(saved)]
        moved = self.kept.places and saved.tensors[-1].data_ptr() % 16  # its parts are not where kernels expect them
        if moved or not made.program.outputs:
            return None
        values = [pool[k] for k in made.sources]
        key = (needs, saved.given, self._describe_computed_numbers(needs, saved), triton.describe_leaves(values))
        recorded = self.recorded_before.get(key, _MISSING)
        if recorded is _MISSING:
            recorded = self.recorded_before.keep(key, steps.record(values, self.sizes))
        if recorded is None:
            return None
        grads: list[str | None] = [None] * len(needs)
        summed: dict[str, tuple[int, ...]] = {}
        returned, forms = iter(steps.script.returned), recorded.forms
        for place, e in made.outputs:
            grads[place] = None if e is None else next(returned)
            leaf, form = pool[place], forms.get(str(grads[place]))
            if form is None or form[1] is not leaf.dtype or not _broadcasts(leaf.shape, form[0]):
                return None  # zeros, or a gradient that is still to be cast, or summed over rows or columns
            if form[0] != leaf.shape:  # of heads that are shared
                summed[str(grads[place])] = tuple(leaf.shape)
        used = dict(zip(made.sources, steps.script.names, strict=True))
        inputs, tensors, parts = self._name_saved(used, saved)
        if recorded.read_by_host & parts.keys():
            return None
        seen, copied = self._looks(used, saved, recorded.read_by_host)
        returned_as: dict[str, Look] = {}
        for name, chain in zip(grads, self.views.inputs if self.views else (), strict=False):
            if chain and name is not None:
                returned_as[name] = functools.partial(undo_views, chain)
        names = triton.ReplayNames(inputs, tensors, [None, *grads], None, parts, summed)
        launches = triton.ProgramReplay(recorded, names, self.sizes, triton.ReplayViews(seen, copied, returned_as))
        return launches if launches.holds_little else None

    def _looks(
        self, used: Mapping[int, str], saved: SavedValues, looked: set[str]
    ) -> tuple[dict[str, Look], dict[str, Look]]:
        """What makes the tensors that kernels look at, or that only copies are, of those that are saved."""
        if self.views is None:
            return {}, {}
        inputs, count, tensors = self.steps.script.inputs, len(self.steps.inputs), iter(saved.tensors)
        there: dict[int, tuple[Look, Any]] = {}  # by the places of leaves and others
        for k, chain in enumerate(self.views.inputs):
            if inputs[k] not in self.steps.numbers:
                there[k] = functools.partial(apply_views, chain), next(tensors)
        undone = [functools.partial(undo_views, chain) for chain in self.views.outputs]
        for undo, name, t in zip(undone, self.steps.script.returned, tensors, strict=False):
            if name in self.results:
                there[count + self.results.index(name)] = undo, t
        for k, (undo, g) in enumerate(zip(undone, saved.cotangents, strict=True)):
            there[count + len(self.results) + k] = undo, g
        there = {k: (look, t) for k, (look, t) in there.items() if k in used and look.args[0] and t is not None}
        chains = {used[k]: look for k, (look, _) in there.items()}
        return _split_looks(chains, {used[k]: t for k, (_, t) in there.items()}, looked)

    def _name_saved(
        self, used: dict[int, str], saved: SavedValues
    ) -> tuple[list[str], list[str], dict[str, tuple[str, int]]]:
        """What a recording calls all that is saved, in its order, and the parts of what was kept; ``used``: what the
        inputs of the gradient program are called there, by their places among leaves and others."""
        names, count = self.steps.script.inputs, len(self.steps.inputs)

        def of(k: int) -> str:
            return used.get(k, f"unused_{k}")

        outputs, parts = {name: f"unused_{name}" for name in self.steps.script.returned}, {}
        for k, name in enumerate(self.results, count):
            if name in outputs:
                outputs[name] = of(k)
            elif k in used:
                parts[used[k]] = ("saved", self.kept.places[name])
        tensors = [of(k) for k in range(count) if names[k] not in self.steps.numbers]
        tensors += [*outputs.values(), *(["saved"] if self.kept.places else [])]
        tensors += [of(count + len(self.results) + k) for k in range(len(saved.cotangents))]
        numbers = [of(k) for k in range(count) if names[k] in self.steps.numbers]
        return [*tensors, *numbers], [t for t in tensors if not t.startswith("unused")], parts
