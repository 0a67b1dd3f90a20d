"""All that fingerprints import of the library's insides and of the tests that know them.

Everything else here is written against Triton, torch and the library's public names, so that a refactoring has this
file alone to keep up to date.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monoidreduce

LIBRARY = str(Path(monoidreduce.__file__).parent)


def compile_cases(capability: int, quick: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """The cases of the compile tests: a name, and what compiles its kernels.

    ``triton.compile`` is called for each of them; it may raise ``ptx.Compiled``, which ends that kernel alone."""
    from tests.interpret import test_aot_compile as test_compile
    from tests.support import aot_compile as aot
    from tests.support import aot_fixed_kernels as small

    from .ptx import Compiled

    def compile_case(case: Any) -> None:
        for call in aot.calls(case, capability):
            with contextlib.suppress(Compiled):
                aot.assemble(case, call, capability)

    def compile_small() -> None:
        for case in small.CASES:
            with contextlib.suppress(Compiled):
                small.compiled(*case, capability)

    chosen = aot.CASES if not quick else [c for c in aot.CASES if c.name in test_compile.QUICK.get(capability, ())]
    for case in chosen:
        if capability >= 90 or not case.hopper:
            yield case.name, lambda case=case: compile_case(case)
    if capability >= 90:
        yield "small kernels", compile_small


@contextlib.contextmanager
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter with the same results in less time."""
    from tests.support.fast_interpreter import quicken

    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        yield


@contextlib.contextmanager
def launched_by_address() -> Iterator[None]:
    """Interpreted kernels are launched again by address, as on a GPU, so that calls are replayed."""
    from tests.interpret.conftest import by_address

    with pytest.MonkeyPatch.context() as patch:
        by_address.__wrapped__(patch)
        yield


@contextlib.contextmanager
def absent_h200(compile: Callable[..., Any], again: Callable[..., Any]) -> Iterator[None]:
    """Calls run as on an H200, of which nothing is there. ``compile``: in place of Triton's compiler; ``again``: given
    what was compiled, its grid, constants and device, returns what launches it again."""
    from unittest import mock

    import triton
    from triton import knobs

    from benchmarks import pretend
    from monoidreduce.engines.triton.launch import driver
    from tests.support import fake_cuda_driver

    knobs.propagate_env = False
    knobs.runtime.interpret = False
    triton.runtime.driver.set_active(fake_cuda_driver.Driver())
    with (
        mock.patch.object(driver, "skip_launches", contextlib.nullcontext),
        mock.patch.object(triton.compiler, "compile", compile),
        pretend.h200(),
        mock.patch.object(driver, "make_relauncher", again),
        mock.patch.object(driver, "_can_compile_ahead", lambda device: False),
        monoidreduce.use(engine="auto"),
    ):
        yield
