"""Record a sequence of torch operations and kernel launches once; replay it as one Python function.

What a call does on the host (which panels, which views, which arguments a kernel gets) depends on the program, the
sizes and the kinds of its tensors, and takes longer than the device takes for a small problem. So it is done once and
written out: allocations, views and addresses at fixed offsets, torch operations, launches.

There are two sources of steps, both written by :class:`Replay`. :class:`Recorder` watches a loop over panels while it
runs (``panel/kernel_step.py``). A program whose steps are all launches is run once by the engine
(``kernels/prepared_fold.py``): each kernel says how it is launched again on other tensors of the same kind, as a
:class:`Recipe`, and :class:`ProgramReplay` turns these into steps, with names for the Python numbers that may change
from call to call.

Tensors are recorded symbolically, as a :class:`Place`: in which storage, at which offset, in which form. Views are
nothing but that, so they are not recorded as operations. Whatever could differ in another call (a number read back from
the device, a random one, memory that was allocated elsewhere) ends the recording: ``failure`` says why. Storages are
released after their last use, so that a replay holds no more memory than what it replays.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...common.bounded_cache import BoundedCache, LastComputed
from ...common.evaluate import Allocator, Form, Sizes
from ...common.torch_code import FunctionWriter, function_text, number, run_text, tuple_text
from ...common.torch_code import Step as ProgramStep
from . import descriptors, driver

_LONGEST = 2**14  # steps: what takes longer to write down is done each time
_TINY = 16  # bytes: a tensor of this size that was allocated elsewhere is a constant
_aten = torch.ops.aten
_READS = _aten._local_scalar_dense.default
_VARIES = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_ALLOCATES = (_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default)
# the same operation under the name that takes torch half the time
_FASTER: dict[Any, Callable] = {
    _aten.mm.out: torch.mm,
    _aten.addmm.out: torch.addmm,
    _aten.copy_.default: Tensor.copy_,
    _aten.zero_.default: Tensor.zero_,
    _aten.add_.Tensor: Tensor.add_,
    getattr(_aten.mm, "dtype_out", None): torch.mm,  # since torch 2.8 or so
    getattr(_aten.addmm, "dtype_out", None): torch.addmm,
}


class NotRecordable(Exception):
    """What was done cannot be repeated from what was recorded of it."""


# Values: what stands for the arguments of a step


class Place(NamedTuple):
    """A tensor: the name of its storage, bytes from the beginning of that, and its form."""

    store: str
    offset: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def whole(name: str, t: Tensor) -> Place:
        """All of a tensor that begins where its storage's name says."""
        return Place(name, 0, t.dtype, tuple(t.shape), t.stride())


class Descriptor(NamedTuple):
    """A tensor descriptor: its template, and the tensor that it describes."""

    template: Any
    base: Place


class Number(NamedTuple):
    """A Python number by its name: a parameter of the replay, or the result of a :class:`NumberStep`."""

    name: str


class LaunchTimeArguments(NamedTuple):
    """``places`` consecutive arguments of a kernel, which ``function`` computes at every launch."""

    function: Callable[..., tuple]
    arguments: tuple[Any, ...]
    places: int


# Steps


@dataclass(frozen=True)
class Operation:
    """An operation of torch. ``made``: the places of the storages that it allocates; ``writes``: it changes others."""

    function: Any
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    made: tuple[Place | None, ...]
    writes: bool


@dataclass(frozen=True)
class Launch:
    """A kernel: what launches it again, and its arguments."""

    relaunch: Any
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class NumberStep:
    """Arithmetic of Python numbers: a function of numbers, and the names of its results."""

    function: Callable[..., tuple]
    arguments: tuple[Number, ...]
    results: tuple[str, ...]


Step = Operation | Launch | NumberStep


def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None) -> Operation:
    """The step that allocates a dense tensor as the storage ``name``; ``strides``: None for a contiguous one."""
    place = Place(name, 0, dtype, shape, strides or _make_strides(shape))
    return Operation(_aten.empty_strided.default, (shape, place.stride), {"dtype": dtype}, (place,), False)


def places(value: Any) -> Iterator[Place]:
    """The places in a recorded value."""
    if isinstance(value, Place):
        yield value
    elif isinstance(value, Descriptor):
        yield value.base
    elif isinstance(value, LaunchTimeArguments):
        yield from places(value.arguments)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from places(v)


# Recording


@functools.cache
def _classify(func: Any) -> str:
    """What there is to record of one of torch's operations."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return "composite"
    if not _VARIES.isdisjoint(func.tags):
        return "varies"
    if func._schema.is_mutable:
        return "writes"
    returned = func._schema.returns
    return "view" if returned and all(r.alias_info is not None for r in returned) else "makes"


class Recorder(TorchDispatchMode):
    """Records what is done inside its block: torch's operations, and launches (``driver.report``).

    ``inputs``: the tensors that it is done to, by name. Afterwards ``failure`` says why it cannot be replayed, if so.
    """

    def __init__(self, inputs: Mapping[str, Tensor]):
        super().__init__()
        self.steps: list[Step] = []
        self.choices: list[tuple[Any, Any]] = []  # of loops over panels: what chose the panels, and the panels
        self.constants: dict[str, Tensor] = {}  # small tensors that were made elsewhere
        self.fixed: set[str] = set()  # storages whose content depends on no input
        self.stores: dict[int, tuple[str, int]] = {}  # by id: the names of storages, and where they begin
        self.tokens: list[Any] = []  # of nested blocks
        self.inputs, self.count, self.failure = inputs, 0, ""
        for name, t in inputs.items():
            if self.stores.setdefault(id(t.untyped_storage()), (name, t.data_ptr()))[1] != t.data_ptr():
                self.failure = "two inputs are parts of one tensor"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here; torch's guard against it would import dynamo."""
        return False

    def __enter__(self) -> Any:
        self.tokens.append(driver.recording.set(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        driver.recording.reset(self.tokens.pop())
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kind = _classify(func)
        if kind == "composite":
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        try:
            if kind != "view" and not self.failure:
                self._record(func, kind, args, kwargs or {}, result)
        except NotRecordable as reason:
            self.failure = str(reason)
        return result

    def _record(self, func: Any, kind: str, args: tuple, named: dict[str, Any], result: Any) -> None:
        given = [self.place(v) for v in _find_tensors((args, named))]
        is_fixed = all(p.store in self.fixed for p in given)
        if func is _READS and is_fixed:
            return
        if kind == "varies":
            raise NotRecordable(f"{func} may turn out otherwise")
        writes, made = kind == "writes", tuple(self._place_result(t, is_fixed) for t in _find_tensors(result))
        if writes and not is_fixed:
            self.fixed -= {p.store for p in given}
        if writes or any(made):
            options = {name: self.symbolic(v) for name, v in named.items()}
            self.steps.append(Operation(func, self.symbolic(args), options, made, writes))

    def add_launch(self, relaunch: Any, arguments: Sequence[Any]) -> None:
        """A kernel was launched; ``relaunch`` None: it cannot be launched again."""
        try:
            if relaunch is None:
                raise NotRecordable("a kernel is not launched again here")
            given = self.symbolic(tuple(arguments))
        except NotRecordable as reason:
            self.failure = str(reason)
            return
        self.fixed -= {p.store for p in places(given)}
        self.steps.append(Launch(relaunch, given))

    def chose_panels(self, chooser: Any, panels: Any) -> None:
        """A loop over panels begins."""
        self.choices.append((chooser, panels))

    def symbolic(self, value: Any) -> Any:
        """A value with places instead of tensors."""
        if isinstance(value, Tensor):
            return self.place(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.symbolic, value))
        if hasattr(value, "block_shape"):
            return Descriptor(descriptors.replace_base(value, None), self.place(value.base))
        return value

    def place(self, t: Tensor) -> Place:
        """Where a tensor lies."""
        storage = t.untyped_storage()
        found = self.stores.get(id(storage))
        if found is None:
            if storage.nbytes() > _TINY:
                raise NotRecordable("memory that was allocated elsewhere")
            found = self._name(storage, "h", True)
            self.constants[found[0]] = t.detach()
        if not t.numel():
            raise NotRecordable("a tensor of nothing lies nowhere")
        return Place(found[0], t.data_ptr() - found[1], t.dtype, tuple(t.shape), t.stride())

    def _place_result(self, t: Tensor, is_fixed: bool) -> Place | None:
        """Where a result lies, if a storage was allocated for it."""
        storage = t.untyped_storage()
        if id(storage) in self.stores:
            return None
        self._name(storage, "t", is_fixed)
        found = self.place(t)
        if found.offset:
            raise NotRecordable("a result that does not begin where its memory does")
        return found

    def _name(self, storage: Any, kind: str, is_fixed: bool) -> tuple[str, int]:
        name, key = f"{kind}{self.count}", id(storage)
        self.count += 1
        self.stores[key] = found = (name, storage.data_ptr())
        weakref.finalize(storage, self.stores.pop, key, None).atexit = False
        if is_fixed:
            self.fixed.add(name)
        return found


def record(
    run: Callable[..., list[Any]], tensors: Sequence[Tensor], device: torch.device
) -> tuple[list[Any], Replay | None, tuple[tuple[Any, Any], ...]]:
    """Run a function of tensors and record it: its results; its replay, None where there is more to it than can be
    recorded; and the panels that were chosen on the way."""
    named = {f"x{k}": v for k, v in enumerate(tensors)}
    recorder = Recorder(named)
    with recorder:
        found = run(*tensors)
    try:
        if recorder.failure or len(recorder.steps) > _LONGEST:
            raise NotRecordable(recorder.failure)
        given = {name: Place.whole(name, t) for name, t in named.items()}
        returned = recorder.symbolic(tuple(found))
        replay = Replay(drop_unused(recorder.steps, returned), given, returned, recorder.constants, device)
    except NotRecordable:
        return found, None, ()
    return found, replay, tuple(recorder.choices)


# Replaying


class Replay:
    """Steps as one Python function: ``run`` takes the inputs in their order and returns ``returned``.

    ``inputs``: by name, the place where each tensor begins, or None for a Python number. ``constants``: tensors that
    are the same in every call. Kernels are started by their addresses; where launches are watched by a profiler, or
    another device is the current one, ``run`` launches them as Triton does if ``always``, else it does nothing and
    returns None.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Mapping[str, Place | None],
        returned: Any,
        constants: Mapping[str, Tensor],
        device: torch.device,
        always: bool = False,
    ):
        launchers = [s.relaunch for s in steps if isinstance(s, Launch)]
        starts = bool(launchers) and all(isinstance(relaunch, driver.Relauncher) for relaunch in launchers)
        writer = _Writer(inputs, constants, device, starts)
        otherwise = "None"
        if starts and always:
            plain: list[Callable[..., Any]] = []  # written where it is needed

            def launch_plainly() -> Callable[..., Any]:
                if not plain:
                    plain.append(_Writer(inputs, constants, device, False).compile(steps, returned))
                return plain[0]

            writer.scope["launch_plainly"] = launch_plainly
            otherwise = f"launch_plainly()({', '.join(inputs)})"
        self.run: Callable[..., Any] = writer.compile(steps, returned, otherwise)
        self.text = writer.text


def drop_unused(steps: Sequence[Step], returned: Any) -> list[Step]:
    """The steps without operations whose results nobody reads."""
    live, found = {p.store for p in places(returned)}, []
    for step in reversed(steps):
        if isinstance(step, Operation):
            made = {p.store for p in step.made if p}
            if not step.writes and live.isdisjoint(made):
                continue
            live |= {p.store for p in places((*step.arguments, *step.named.values()))}
        else:
            live |= {p.store for p in places(step.arguments)}
        found.append(step)
    return found[::-1]


_WRITTEN = {Place, Descriptor, LaunchTimeArguments, Number}  # arguments that are no constants


class _Writer(FunctionWriter):
    """Writes steps as lines. ``starts``: kernels are started with their addresses, on the current stream."""

    def __init__(
        self,
        inputs: Mapping[str, Place | None],
        constants: Mapping[str, Tensor],
        device: torch.device,
        starts: bool,
    ):
        super().__init__(empty=torch.empty_like, descriptor=descriptors.make_descriptor_at, **constants)
        self.inputs, self.constants, self.device, self.starts = inputs, constants, device, starts
        self.given = inputs.keys() | constants.keys()
        self.whole = {name: p for name, p in inputs.items() if p is not None}  # how storages are bound to names
        self.whole |= {name: Place.whole(name, t) for name, t in constants.items()}
        self.encoded: dict[tuple, tuple[Any, Mapping[int, descriptors.EncodedByAddress]]] = {}  # by launcher and forms
        self.last: dict[str, int] = {}  # the last line that needs each name
        self.using: list[str] = []  # the names that the step being written uses
        self.known: dict[Any, str] = {}  # names of views and offsets
        self.addresses: dict[str, str] = {}  # the same of the addresses of storages
        self.text = ""

    def compile(self, steps: Sequence[Step], returned: Any, otherwise: str = "None") -> Callable[..., Any]:
        """The steps as a function; ``otherwise``: what it returns where kernels cannot be started by address."""
        for step in steps:
            if isinstance(step, Launch):
                self._launch(step)
            elif isinstance(step, Operation):
                self._operate(step)
            else:
                given = ", ".join(map(self._value, step.arguments))
                self._line(f"{tuple_text(step.results)} = {self.hold(step.function)}({given})")
            self.using.clear()
        self._line(f"return {self._value(returned)}")
        self._release()
        opening = []
        if self.starts:
            self.scope["stream"] = driver.find_stream(self.device)
            opening = ["s = stream()", "if s is None:", f"    return {otherwise}"]
        self.text = function_text("run", self.inputs, [*opening, *self.lines])
        run_text(self.text, self.scope, "<replay>")
        return self.scope["run"]

    def _release(self) -> None:
        """Delete names after their last use."""
        gone: dict[int, list[str]] = {}
        for name, at in self.last.items():
            if name not in self.given and at < len(self.lines) - 1:
                gone.setdefault(at, []).append(name)
        for at, names in gone.items():
            self.lines[at] += f"; del {', '.join(names)}"

    def _line(self, text: str, makes: Sequence[str] = ()) -> None:
        """A line of a step, or one that makes a name for it: what the step uses is needed until its own line."""
        self.last |= dict.fromkeys((*makes, *self.using), len(self.lines))
        self.lines.append(text)

    def _use(self, name: str) -> str:
        self.using.append(name)
        return name

    def _operate(self, step: Operation) -> None:
        made = [p.store if p else "_" for p in step.made]
        self.whole |= {p.store: p for p in step.made if p}
        place = step.made[0] if step.made else None
        if step.function in _ALLOCATES and place is not None:
            strides = None if place.stride == _make_strides(place.shape) else place.stride
            if strides is None or _is_dense(place):
                assert place.dtype is not None
                form = (place.shape, place.dtype)
                model = Allocator(form, self.device, strides).model
                self._line(f"{made[0]} = empty({self.hold(model, ('room', form, strides))})", made)
                return
        function = self.hold(_FASTER.get(step.function, step.function), step.function)
        given = [*map(self._value, step.arguments), *(f"{name}={self._value(v)}" for name, v in step.named.items())]
        call = f"{function}({', '.join(given)})"
        self._line(f"{', '.join(made)} = {call}" if any(step.made) else call, [name for name in made if name != "_"])

    def _launch(self, step: Launch) -> None:
        relaunch, encoded = step.relaunch, dict[int, descriptors.EncodedByAddress]()
        start, values, first = relaunch, list(step.arguments), 0
        if self.starts:
            start, encoded = self._encode(relaunch, step.arguments)
            first = len(relaunch.grid) + 1 + len(relaunch.inserted)
            values = [*relaunch.grid, Number("s"), *relaunch.inserted, *values, *relaunch.constants]
        given, done = list[str](), 0
        for k, value in enumerate(values):
            kind = type(value)
            if kind in _WRITTEN:
                if done < k:
                    given.append(self._write_constants(values[done:k]))
                given.append(self._address(value) if kind is Place else self._argument(value, encoded.get(k - first)))
                first -= value.places - 1 if kind is LaunchTimeArguments else 0
                done = k + 1
        if done < len(values):
            given.append(self._write_constants(values[done:]))
        self._line(f"{self.hold(start, id(start))}({', '.join(given)})")

    def _write_constants(self, values: list[Any]) -> str:
        """Arguments that are the same in every call; all at once, so that other lengths have the same text."""
        return f"*{self.hold(tuple(values))}" if len(values) > 1 else self._value(values[0])

    def _encode(self, relaunch: driver.Relauncher, arguments: Sequence[Any]) -> tuple[Any, Any]:
        """What starts a kernel, and its encoded descriptors by their places among the arguments: the same for all
        launches with descriptors of one form."""
        templates: list[Any] = []
        for v in arguments:
            if type(v) is LaunchTimeArguments:
                templates += [None] * v.places
            else:
                templates.append(v.template if type(v) is Descriptor else None)
        key = (id(relaunch), *(_describe_descriptor(v) for v in templates if v is not None))
        if key not in self.encoded:
            self.encoded[key] = relaunch.open_descriptors(templates)
        return self.encoded[key]

    def _argument(self, value: Any, encoded: descriptors.EncodedByAddress | None) -> str:
        """An argument of a kernel that is no tensor; a descriptor, as a whole or by its ``encoded`` parts."""
        if isinstance(value, LaunchTimeArguments):
            call = f"{self.hold(value.function)}({', '.join(map(self._value, value.arguments))})"
            known = self.known.get(value)
            if known is not None:  # another launch of this call has it
                return f"*{known}"
            self.known[value] = f"c{len(self.known)}"
            return f"*({self.known[value]} := {call})"
        if not isinstance(value, Descriptor):
            return self._value(value)
        address = self._address(value.base)
        if encoded is None:
            template = self.hold(value.template, ("template", _describe_descriptor(value.template)))
            return f"descriptor({template}, {address})"
        return f"*{self.hold(encoded, id(encoded))}[{address}]"

    def _address(self, place: Place) -> str:
        """Where a tensor begins."""
        store = place.store
        if store in self.constants:
            return self.hold(self.constants[store].data_ptr() + place.offset)
        self.using.append(store)
        name = self.addresses.get(store)
        if name is None:
            name = self.addresses[store] = f"{store}_at"
            self._line(f"{name} = {store}.data_ptr()")
        return f"{name} + {self.hold(place.offset)}" if place.offset else name

    def _view(self, place: Place) -> str:
        if place == self.whole[place.store]:
            return self._use(place.store)
        if place not in self.known:
            assert place.dtype is not None
            whole, item = self._view_as(place.store, place.dtype), place.dtype.itemsize
            begin = f"{self._begin(place.store)} + " if place.store in self.given else ""
            name = self.known[place] = f"v{len(self.known)}"
            call = f"{whole}.as_strided({place.shape}, {place.stride}, {begin}{place.offset // item})"
            self._line(f"{name} = {call}", [name])
        return self._use(self.known[place])

    def _view_as(self, store: str, dtype: torch.dtype) -> str:
        """A storage as a tensor of a dtype."""
        if self.whole[store].dtype is dtype:
            return self._use(store)
        if store in self.given:  # it may begin anywhere
            raise NotRecordable("an input is read as numbers of another type")
        key = (store, dtype)
        if key not in self.known:
            name = self.known[key] = f"{store}_{str(dtype)[6:]}"
            self._line(f"{name} = {self._use(store)}.view(-1).view({self.hold(dtype, dtype)})", [name])
        return self._use(self.known[key])

    def _begin(self, store: str) -> str:
        """Where an input begins in its storage."""
        key = (store, "begin")
        if key not in self.known:
            self.known[key] = f"{store}_begin"
            self._line(f"{store}_begin = {store}.storage_offset()")
        return self.known[key]

    def _value(self, value: Any) -> str:
        if isinstance(value, Place):
            return self._view(value)
        if isinstance(value, Number):
            return value.name
        if isinstance(value, list):
            return f"[{', '.join(map(self._value, value))}]"
        if type(value) is tuple:
            return tuple_text(map(self._value, value))
        if value is None or value is True or value is False or (type(value) is int and value in (0, 1)):
            return repr(value)  # others are held, so that calls of another length have the same text
        if type(value) is int:
            return self.hold(value)
        return self.hold(value, ("float", repr(value)) if type(value) is float else id(value))


def _describe_descriptor(template: Any) -> tuple:
    """What tells descriptors apart."""
    more = (getattr(template, name, None) for name in ("padding", "layout"))
    return type(template), *map(tuple, (template.shape, template.strides, template.block_shape)), *more


def _is_dense(place: Place) -> bool:
    """True when a tensor's memory has no gaps: ``empty_like`` then gives another one of the same strides."""
    order = sorted(zip(place.stride, place.shape, strict=True))
    steps, step = [(s, n) for s, n in order if n != 1], 1
    for stride, length in steps:
        if stride != step:
            return False
        step *= length
    return True


def _make_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    found, step = [], 1
    for length in reversed(shape):
        found.append(step)
        step *= max(length, 1)
    return tuple(reversed(found))


def _find_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _find_tensors(v)
    elif isinstance(value, dict):
        yield from _find_tensors(tuple(value.values()))


# Programs whose steps are all launches: a recipe for each kernel, and all of them as one replay


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
