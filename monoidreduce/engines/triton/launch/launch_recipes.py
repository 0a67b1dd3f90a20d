"""How a program's launches are repeated: a recipe for each kernel, and all of them as one replay.

A program whose steps are all launches is run once by the engine (``kernels/prepared_fold.py``); each kernel says how
it is launched again on other tensors of the same kind, as a :class:`Recipe`. :class:`ProgramReplay` turns these into
the steps of ``replay.py``: one function without look-ups or loops, since at small sizes Python overhead dominates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.bounded_cache import BoundedCache, LastComputed
from ...common.evaluate import Form, Sizes
from ...common.torch_code import Step as ProgramStep
from ...common.torch_code import number
from .replay import (
    Descriptor,
    Launch,
    LaunchTimeArguments,
    Number,
    NumberStep,
    Operation,
    Place,
    Replay,
    Step,
    allocate,
)

Strides = tuple[int, ...] | None  # of a tensor; None: contiguous
_ALIGNED = 128  # bytes: where the tensors of a buffer begin
_NUMBERS = 64  # sets of numbers whose results are remembered
_LITTLE = 2**20  # bytes


class Leaf(NamedTuple):
    """The argument of a launch that is one of its leaves."""

    at: int
    is_tensor: bool


class DescriptorOf(NamedTuple):
    """The argument of a launch that is the tensor descriptor of one of its leaves."""

    at: int
    template: Any


class FoundAtLaunch(NamedTuple):
    """``places`` consecutive arguments, which ``find`` computes at every launch from some of the leaves (numbers, or
    tensors that were given to the program): numbers, and tensors. ``by_address``: it asks tensors for nothing else."""

    leaves: tuple[int, ...]
    find: Callable[..., tuple]
    places: int
    by_address: bool = False


View = Callable[[Tensor], Tensor]
Views = Sequence[View | None]


def _call_on_views(run: Callable[..., Any], views: Views, *given: Any) -> Any:
    """Call a function on what is given, seen through ``views`` where there are some."""
    return run(*[v if view is None else view(v) for v, view in zip(given, views, strict=True)])


class LastFound(LastComputed):
    """The arguments that ``find`` computes of tensors, addresses in place of tensors, remembered for the last ones.
    ``views``: what makes the tensors that ``find`` takes of those that are given, or None."""

    def __init__(self, find: Callable[..., tuple], views: Views):
        super().__init__(self._find)
        self.find, self.views, self.held = find, views, list[Tensor]()

    def _find(self, *given: Any) -> tuple:
        found = _call_on_views(self.find, self.views, *given)
        in_given = {t.untyped_storage()._cdata for t in given if isinstance(t, Tensor)}
        self.held = [t for t in found if isinstance(t, Tensor) and t.untyped_storage()._cdata not in in_given]
        return tuple([v.data_ptr() if isinstance(v, Tensor) else v for v in found])


class Recipe(NamedTuple):
    """How a kernel is launched again: what launches it, the forms of its outputs, the arguments after them, and the
    strides of the outputs (nothing: all are contiguous; None: this one is)."""

    relaunch: Callable[..., None]
    outputs: tuple[Form, ...]
    arguments: tuple[Any, ...]
    strides: tuple[Strides, ...] = ()


class ProgramLaunch(NamedTuple):
    """A launch in a program: what its leaves (names, or numbers) and its outputs are called there."""

    recipe: Recipe
    feeds: tuple[str | float, ...]
    outputs: tuple[str, ...]


class NumberArithmetic:
    """A program's arithmetic of Python numbers, remembered by the numbers. ``names``: of the inputs that are numbers,
    in their order; ``results``: what its results are called."""

    def __init__(self, steps: Sequence[ProgramStep], names: Sequence[str], sizes: Sizes):
        self.steps, self.names, self.sizes = steps, names, sizes
        self.results = [str(step.results[0]) for step in steps]
        self.known: BoundedCache[tuple[str, ...], tuple] = BoundedCache(_NUMBERS)

    def __call__(self, *given: Any) -> tuple:
        key = tuple(map(repr, given))  # tells -0.0 from 0.0 and 1 from True
        found = self.known.find(key)
        return self.known.keep(key, self._compute(given)) if found is None else found

    def _compute(self, given: tuple) -> tuple:
        known = dict(zip(self.names, given, strict=True))
        for step, name in zip(self.steps, self.results, strict=True):
            e: Any = step.what
            feeds = tuple(known[feed] if isinstance(feed, str) else feed for feed in step.feeds)
            known[name] = self.sizes.of(e.attrs[0]) if e.op == "size" else number(e, feeds)
        return tuple(known[name] for name in self.results)


class TorchCall(NamedTuple):
    """A call of torch's before all launches: what it is fed (names, or numbers), and what its result is called."""

    run: Callable[..., Tensor]
    feeds: tuple[str | float, ...]
    result: str


class RecordedLaunches(NamedTuple):
    """The launches of a program, in order; ``results``: what those of its one fold are called; ``numbers``: the
    arithmetic that comes before them; ``constants``: tensors that are the same in every call; ``calls``: what torch
    does before the launches."""

    launches: list[ProgramLaunch]
    results: tuple[str, ...]
    numbers: NumberArithmetic | None = None
    constants: Mapping[str, Tensor] = {}
    calls: Sequence[TorchCall] = ()

    @property
    def read_by_host(self) -> set[str]:
        """The names of values that the host reads at every launch, or torch before it."""
        given = [(one, v) for one in self.launches for v in one.recipe.arguments if type(v) is FoundAtLaunch]
        found = {
            name for one, v in given for k in v.leaves if not v.by_address and isinstance(name := one.feeds[k], str)
        }
        return found | {name for call in self.calls for name in call.feeds if isinstance(name, str)}

    @property
    def forms(self) -> dict[str, Form]:
        """The shapes and dtypes of all outputs, by name."""
        pairs = [zip(one.outputs, one.recipe.outputs, strict=True) for one in self.launches]
        return {name: form for found in pairs for name, form in found}

    @property
    def strides(self) -> dict[str, Strides]:
        """The strides of those that are not contiguous, by name."""
        pairs = [zip(one.outputs, one.recipe.strides, strict=False) for one in self.launches]
        return {name: strides for found in pairs for name, strides in found if strides is not None}


class Buffer:
    """Several tensors in one allocation, one behind the other: ``places`` says at which bytes."""

    def __init__(self, name: str, forms: dict[str, Form], strides: Mapping[str, Strides]):
        self.name, self.forms, self.strides, self.places, size = name, forms, strides, dict[str, int](), 0
        for tensor, (shape, dtype) in forms.items():
            self.places[tensor] = size
            size += -(-_count_bytes(shape, dtype) // _ALIGNED) * _ALIGNED
        self.size = size

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """The tensors in it. A buffer that comes back at an offset where numbers cannot begin is copied first."""
        whole = whole.clone() if whole.storage_offset() % _ALIGNED else whole
        return {name: self._view(whole, at, name) for name, at in self.places.items()}

    def _view(self, whole: Tensor, at: int, name: str) -> Tensor:
        shape, dtype = self.forms[name]
        flat, strides = whole.narrow(0, at, _count_bytes(shape, dtype)).view(dtype), self.strides.get(name)
        return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


def _count_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _find_view(
    view: View, shape: tuple[int, ...], dtype: torch.dtype, strides: Strides
) -> tuple[tuple[int, ...], Strides] | None:
    """Shape and strides of a view of all of such a tensor; None where it is a copy."""
    whole = torch.empty(shape, dtype=dtype, device="meta")
    whole = whole if strides is None else torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    found = view(whole)
    if found.untyped_storage()._cdata != whole.untyped_storage()._cdata or found.storage_offset():
        return None
    return tuple(found.shape), None if found.is_contiguous() else found.stride()


class ReplayNames(NamedTuple):
    """What a program's replay is given and returns, by name."""

    inputs: Sequence[str]  # what it is given, in order
    tensors: Sequence[str]  # those of them that are tensors and are read
    returned: Sequence[str | None]  # None: None
    kept: Sequence[str] | None  # for a backward (perhaps nothing); None: there is none
    parts: Mapping[str, tuple[str, int]] = {}  # tensors that lie inside another, at so many bytes
    summed: Mapping[str, tuple[int, ...]] = {}  # the shapes of results that are returned as sums


class ReplayViews(NamedTuple):
    """The tensors of a call that have another form in its program: by name, what makes one of the other."""

    seen: Mapping[str, View] = {}  # inputs that are looked at; of others the address counts, which is the same
    copied: Mapping[str, View] = {}  # inputs of which only a copy has the program's form
    returned: Mapping[str, View] = {}  # what makes the tensor that is returned of a result


_NO_VIEWS = ReplayViews()


class ProgramReplay:
    """The recorded launches of a program as one function, ``run``.

    It allocates what is returned, one buffer for what is kept for a backward and one for intermediate results, and
    starts each kernel with their addresses. Where something may be kept, it also returns all that a backward needs: the
    tensors, the results and the buffer of what is kept; and the inputs that are numbers."""

    def __init__(self, recorded: RecordedLaunches, names: ReplayNames, sizes: Sizes, views: ReplayViews = _NO_VIEWS):
        forms, strides, kept = recorded.forms, recorded.strides, names.kept or ()
        shown = [name for name in names.returned if name is not None]
        self.kept = Buffer("kept", {name: forms[name] for name in kept}, strides)
        self.between = Buffer("between", {n: f for n, f in forms.items() if n not in (*shown, *kept)}, strides)
        most = max(_LITTLE, sum(_count_bytes(*forms[name]) for name in shown) // 16)
        # step by step, intermediate results would be released sooner; not so the parts of one fold, which are its last
        cut = [one for one in recorded.launches if all(name.endswith("_parts") for name in one.outputs)]
        alive = sum(_count_bytes(*form) for form in cut[0].recipe.outputs) if len(cut) == 1 else 0
        self.holds_little = self.between.size - alive <= most
        self.constants, self.seen = dict(recorded.constants), views.seen
        self.last_found: dict[Callable[..., tuple], LastFound] = {}  # by what they call: the same for all launches
        self.places = {name: Place(name, 0, None, (), ()) for name in (*names.tensors, *recorded.constants)}
        self.places |= {name: Place(owner, at, None, (), ()) for name, (owner, at) in names.parts.items()}
        given, given_as = {name: self.places.get(name) for name in names.inputs}, dict(self.places)
        steps = self._list_preparations(recorded, views.copied)
        made_after = dict(views.returned)
        for name in shown:
            (shape, dtype), own = forms[name], strides.get(name)
            if name in made_after and name not in names.summed:
                viewed = _find_view(made_after[name], shape, dtype, own)
                if viewed is not None:  # allocated as what is returned: the memory is the same
                    (shape, own), _ = viewed, made_after.pop(name)
            steps.append(self._add_allocation(name, shape, dtype, own))
        for buffer in (self.kept, self.between):
            if buffer.places:
                steps.append(self._add_allocation(buffer.name, (buffer.size,), torch.uint8))
                self.places |= {name: Place(buffer.name, at, None, (), ()) for name, at in buffer.places.items()}
        steps += [Launch(one.recipe.relaunch, self._arguments(one)) for one in recorded.launches]
        for name, shape in names.summed.items():
            total = Place(f"{name}_sum", 0, forms[name][1], shape, ())
            steps.append(Operation(Tensor.sum_to_size, (self.places[name], shape), {}, (total,), False))
            self.places[name] = total
        steps += [self._add_view(view, name, "shown") for name, view in made_after.items()]
        found: tuple = tuple(None if name is None else self.places[name] for name in names.returned)
        if names.kept is not None:
            saved = [*names.tensors, *shown, *(["kept"] if self.kept.places else [])]
            found = (
                found,
                tuple(given_as.get(name, self.places[name]) for name in saved),
                tuple(Number(n) for n in names.inputs if n not in names.tensors),
            )
        replay = Replay(steps, given, found, self.constants, sizes.device, always=True)
        self.run: Callable[..., tuple] = replay.run
        self.text = replay.text

    def _list_preparations(self, recorded: RecordedLaunches, copied: Mapping[str, View]) -> list[Step]:
        """What is done before all allocations and launches: arithmetic of numbers, copies of inputs, torch's calls."""
        steps: list[Step] = []
        if (arithmetic := recorded.numbers) is not None:
            steps.append(NumberStep(arithmetic, tuple(map(Number, arithmetic.names)), tuple(arithmetic.results)))
        steps += [self._add_view(view, name, "copied") for name, view in copied.items()]
        for call in recorded.calls:
            run = LastComputed(functools.partial(_call_on_views, call.run, self._list_views(call.feeds)))
            place = Place(call.result, 0, None, (), ())
            steps.append(Operation(run, tuple(map(self._value, call.feeds)), {}, (place,), False))
            self.places[call.result] = place
        return steps

    def _list_views(self, names: Sequence[Any]) -> Views:
        """How values are seen through views, by their names."""
        return [self.seen.get(name) if isinstance(name, str) else None for name in names]

    def _add_view(self, view: View, name: str, how: str) -> Step:
        """The step that computes a tensor from another, whose name it takes."""
        place = Place(f"{name}_{how}", 0, None, (), ())
        step = Operation(view, (self.places[name],), {}, (place,), False)
        self.places[name] = place
        return step

    def _add_allocation(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, strides: Strides = None) -> Step:
        step = allocate(name, shape, dtype, strides)
        (self.places[name],) = step.made  # type: ignore[assignment]
        return step

    def _arguments(self, one: ProgramLaunch) -> tuple[Any, ...]:
        """What a kernel is given: places for tensors, names for numbers that may change."""
        found: list[Any] = [self.places[name] for name in one.outputs]
        for given in one.recipe.arguments:
            kind = type(given)
            if kind is int:  # nearly all of them are
                found.append(given)
            elif kind is Leaf:
                found.append(self._value(one.feeds[given.at]))
            elif kind is DescriptorOf:
                found.append(Descriptor(given.template, self.places[str(one.feeds[given.at])]))
            elif kind is FoundAtLaunch:
                names = [one.feeds[k] for k in given.leaves]
                find = given.find
                if not given.by_address:
                    find = self.last_found.setdefault(find, LastFound(find, self._list_views(names)))
                found.append(LaunchTimeArguments(find, tuple(map(self._value, names)), given.places))
            else:
                found.append(self._value(given))
        return tuple(found)

    def _value(self, value: Any) -> Any:
        """A leaf by its name, or a constant."""
        if isinstance(value, Tensor):
            name = f"constant_{len(self.constants)}"
            self.constants[name] = value
            return Place.whole(name, value)
        return self.places.get(value, Number(value)) if isinstance(value, str) else value
