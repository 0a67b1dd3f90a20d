"""Record a sequence of torch operations and kernel launches once; replay it as one Python function.

What a call does on the host (which panels, which views, which arguments a kernel gets) depends on the program, the
sizes and the kinds of its tensors, and takes longer than the device takes for a small problem. So it is done once and
written out: allocations, views and addresses at fixed offsets, torch operations, launches.

There are two sources of steps. :class:`Recorder` watches a loop over panels while it runs (``panel/kernel_step.py``).
``launch_recipes.py`` derives them from a program whose steps are all launches, with names for the Python numbers that
may change from call to call. Both are written by :class:`Replay`.

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

from ...common.evaluate import Allocator
from ...common.torch_code import FunctionWriter, function_text, run_text, tuple_text
from . import descriptors, jit_module

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
    """Records what is done inside its block: torch's operations, and launches (``jit_module.report``).

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
        self.tokens.append(jit_module.recording.set(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        jit_module.recording.reset(self.tokens.pop())
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
        starts = bool(launchers) and all(isinstance(relaunch, jit_module.Relauncher) for relaunch in launchers)
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
            self.scope["stream"] = jit_module.find_stream(self.device)
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

    def _encode(self, relaunch: jit_module.Relauncher, arguments: Sequence[Any]) -> tuple[Any, Any]:
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
