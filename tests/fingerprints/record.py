"""What calls launch, on interpreted kernels, and what the eager engine asks of torch."""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import monoidreduce as mr

from . import hooks
from .calls import CALLS, Call, run_call
from .identity import SOURCES, described, identity, python_function

Texts = dict[str, str]
TIMES = ("cold", "warm", "third")  # a third call: some things are cached only when they are met twice


def jobs(part: str) -> Iterator[tuple[str, Callable[[], Texts]]]:
    """A job for each of the calls."""
    if part == "visited":
        for engine in ("eager", "auto", "triton"):
            yield engine, functools.partial(_visited, engine)
        return
    run = {"launches": _launches, "replays": _replays, "aten": _aten, "profiled": _profiled}[part]
    for name, call in CALLS.items():
        yield name, functools.partial(run, name, call)


def _launches(name: str, call: Call, part: str = "launches", sources: str = "sources") -> Texts:
    """Launches of interpreted kernels, and apart from them the sources of these kernels."""
    from triton.runtime.interpreter import InterpretedFunction

    real = InterpretedFunction.run
    texts: Texts = {}
    found: list[str] = []
    kernels: list[str] = []

    def mark(phase: str) -> None:
        found.append(f"{phase}:")
        kernels.append(f"{phase}:")

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        function = python_function(self)
        kernels.append(identity(function))
        places = {n: k for k, n in enumerate(self.arg_names)}
        given = dict(enumerate(args)) | {places[n]: v for n, v in named.items() if n in places}
        options = {n: v for n, v in sorted(named.items()) if n not in places}
        found.append(f"grid {tuple(grid)} {options} " + " | ".join(str(described(given[k])) for k in sorted(given)))
        return real(self, *args, grid=grid, warmup=warmup, **named)

    with hooks.quick_interpreter(), mr.use(engine="triton"), mock.patch.object(InterpretedFunction, "run", run):
        for time in TIMES:
            found.clear()
            kernels.clear()
            run_call(call, mark)
            texts[f"{part}/{name}/{time}"] = "\n".join(found) + "\n"
            texts[f"{sources}/{name}/{time}"] = "\n".join(kernels) + "\n"
    return texts | {f"kernels/{kernel}": source for kernel, source in SOURCES.items()}


def _replays(name: str, call: Call) -> Texts:
    """The same with kernels that are launched again by address."""
    with hooks.launched_by_address():
        return _launches(name, call, "replays", "replay sources")


class _Operators(TorchDispatchMode):
    """Writes down torch's operators and the shapes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shapes = [f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.lines.append(f"{func} -> {', '.join(shapes)}")
        return result


def _aten(name: str, call: Call) -> Texts:
    """Operators of the eager engine, watched: a watched call is not replayed."""
    texts: Texts = {}
    for time in TIMES[:2]:
        with mr.use(engine="eager"), _Operators() as mode:
            run_call(call, lambda phase, mode=mode: mode.lines.append(f"{phase}:"))
        texts[f"aten/{name}/{time}"] = "\n".join(mode.lines) + "\n"
    return texts


def _profiled(name: str, call: Call) -> Texts:
    """Operators of the eager engine in order, as torch's profiler saw them: the call itself is left alone."""
    texts: Texts = {}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler says there when it starts and stops
    for time in TIMES:
        with mr.use(engine="eager"), torch.autograd.profiler.profile(record_shapes=True) as profile:
            run_call(call)
        events = sorted(profile.function_events, key=lambda e: (e.time_range.start, -e.time_range.end, e.id))
        lines = [f"{e.name} {e.input_shapes}" for e in events if e.name.startswith("aten::")]
        texts[f"profiled/{name}/{time}"] = "\n".join(lines) + "\n"
    return texts


@contextlib.contextmanager
def visits() -> Iterator[set[str]]:
    """The library's files in which a function is entered inside the block, in any thread."""
    found: set[str] = set()

    def entered(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(hooks.LIBRARY):
            found.add(frame.f_code.co_filename[len(hooks.LIBRARY) + 1 :])

    threading.setprofile(entered)
    sys.setprofile(entered)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _visited(engine: str) -> Texts:
    """How many files of the library a call of attention visits, forward and backward; then which."""
    texts: Texts = {}
    replayed = hooks.launched_by_address() if engine == "triton" else contextlib.nullcontext()
    with mr.use(engine=engine), replayed:
        for time in TIMES:
            with visits() as files:
                run_call(CALLS["attention"])
            texts[f"visited/{engine}/{time}"] = "\n".join([f"{len(files)} files", *sorted(files)]) + "\n"
    return texts
