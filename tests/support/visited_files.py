"""Which files of the library a call visits: ``python -m tests.support.visited_files ENGINE`` prints them as JSON.

An attention layer is called four times in a fresh process, with and without a backward; a file is visited where one of
its functions is called. The first call traces, plans and builds; from the third on nothing changes. ``h200`` instead of
an engine: calls take the road that they would take on that GPU, where launches are replayed, and nothing is computed.
"""

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

CALLS = 4
SHAPES = {"h200": (2, 4, 256, 64)}  # of 16-bit tensors; small ones of float32 elsewhere


@functools.cache
def visited(engine: str) -> dict[str, list[list[str]]]:
    """The files that each of the calls visits, in order: of "forward" and of "backward", which runs both."""
    command = [sys.executable, "-m", "tests.support.visited_files", engine]
    own = {"MONOIDREDUCE_ENGINE"} | ({"TRITON_INTERPRET"} if engine == "eager" else set())  # ``main`` chooses it
    environment = {k: v for k, v in os.environ.items() if k not in own}
    root = Path(__file__).parents[2]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root, env=environment)
    return json.loads(found.stdout.splitlines()[-1])


def run_noting(call: Callable[[], object], note: Callable) -> None:
    """Run a call with ``note`` as the profiler of this thread and of those that it starts."""
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def files_of(call: Callable[[], object], package: Path) -> list[str]:
    seen: dict[str, None] = {}

    def note(frame, event, _):
        if event == "call":
            seen[frame.f_code.co_filename] = None

    run_noting(call, note)
    found = [str(Path(name).relative_to(package)) for name in seen if name.startswith(str(package))]
    return [name for name in found if name != "value_classes.py"]  # the standard library's dataclasses, made faster


def assert_few(engine: str, most: tuple[int, int, int]) -> None:
    """A first forward, a known forward, and a known forward with its backward visit at most so many files."""
    found, (first, known, backward) = visited(engine), most
    assert len(found["forward"][0]) <= first, found["forward"][0]
    assert len(found["forward"][-1]) <= known, found["forward"][-1]
    assert len(found["backward"][-1]) <= backward, found["backward"][-1]
    assert found["forward"][-1] == found["forward"][-2]  # nothing is found out anew


def main(engine: str) -> None:
    import torch

    if engine == "h200":
        from benchmarks.pretend import h200
    import monoidreduce as mr
    from monoidreduce import ops
    from monoidreduce.engines import triton

    shape, dtype = SHAPES.get(engine, (2, 64, 16)), torch.bfloat16 if engine in SHAPES else torch.float32

    if engine in ("triton", "h200"):
        assert triton.KernelPlan  # the engine is imported when it is first needed: before the calls that are followed

    def forward(grads: bool = False):
        return ops.attention(*(torch.randn(shape, dtype=dtype, requires_grad=grads) for _ in range(3)))

    package, found = Path(mr.__file__).parent, {}
    with h200(again=True) if engine == "h200" else mr.use(engine=engine):
        calls = {"forward": forward, "backward": lambda: forward(True).sum().backward()}
        for name, call in calls.items():
            found[name] = [files_of(call, package) for _ in range(CALLS)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
