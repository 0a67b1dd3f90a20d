"""From the first call of a layer to its result, and to its gradients, on a GPU that has compiled nothing yet.

    python3 -m benchmarks.first --out DIR [--only WORD ...]

Each layer has a process of its own, with empty caches of Triton's and ours. All processes import torch and this library
and start CUDA (a small product) at once, and then take turns: what is timed is alone on the machine. Counted is all
that a user waits for from there on: tracing, planning, Triton's own import, compilation, and the work.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, no_type_check

import torch

import monoidreduce as mr
from monoidreduce import ops

from .cpu import commit, environment

GOAL = 5.0  # seconds


@mr.op
@no_type_check
def weighed(x: mr.Row["d"], y: mr.Col["d"], v: mr.Col["f"]):
    s = x @ y
    return mr.sum(torch.sigmoid(s) * v), mr.logsumexp(s)


def _labelled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ops.cross_entropy(x, w, torch.arange(len(x), device=x.device) % len(w))


@dataclass(frozen=True)
class Work:
    """A layer and the shapes of its inputs."""

    name: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.bfloat16
    backward: bool = True


WORKS = (
    Work("attention 2×8×1024×128", ops.attention, ((2, 8, 1024, 128),) * 3),
    Work("attention causal 2×8×1024×64", lambda *a: ops.attention(*a, causal=True), ((2, 8, 1024, 64),) * 3),
    Work("MLP relu 4096×8192 D128", ops.mlp, ((4096, 128), (8192, 128), (8192, 128))),
    Work("SwiGLU 4096×8192 D128", ops.gated_mlp, ((4096, 128), *((8192, 128),) * 3)),
    Work("cross-entropy M4096 D128 V32000", _labelled, ((4096, 128), (32000, 128))),
    Work("cross-entropy M1024 D1024 V32000", _labelled, ((1024, 1024), (32000, 1024))),
    Work("an op of one's own, two results, 4096×4096 D64", weighed, ((4096, 64),) * 3),
    Work("10 nearest 10000×10000 D3 float32", lambda x, y: ops.knn(x, y, 10), ((10000, 3),) * 2, torch.float32, False),
)


def timed(work: Work) -> Iterator[float]:
    """Make the inputs and start CUDA; then the seconds of the call, and with its backward."""
    made = [torch.randn(s, device="cuda", dtype=work.dtype).mul_(s[-1] ** -0.25) for s in work.shapes]
    args = [a.requires_grad_(work.backward) for a in made]
    torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    torch.cuda.synchronize()
    yield 0.0
    began = time.perf_counter()
    found = work.call(*args)
    torch.cuda.synchronize()
    yield time.perf_counter() - began
    if work.backward:
        results = found if isinstance(found, tuple) else (found,)
        torch.autograd.grad(sum(r.sum() for r in results), args)  # torch imports sympy where cotangents are given
        torch.cuda.synchronize()
        yield time.perf_counter() - began


def child(work: Work) -> None:
    """Be ready, wait for a line, and say what was measured."""
    steps = timed(work)
    next(steps)
    print("ready", flush=True)
    sys.stdin.readline()
    seconds = [round(s, 3) for s in steps]
    kernels = len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")))
    print(json.dumps({"work": work.name, "seconds": seconds, "kernels": kernels}), flush=True)


def measured(works: list[Work]) -> Iterator[dict[str, Any]]:
    """Each work in a process of its own, one after the other, once all are ready."""
    with contextlib.ExitStack() as stack:
        children = [_started(work, stack) for work in works]
        for process in children:
            _line(process)
        for work, process in zip(works, children, strict=True):
            said = _line(process, "now")
            yield json.loads(said) if said else {"work": work.name, "problem": f"ended with status {process.wait()}"}


def _started(work: Work, stack: contextlib.ExitStack) -> subprocess.Popen[str]:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "MONOIDREDUCE_CACHE": f"{folder}/ours"}
    command = [sys.executable, "-m", "benchmarks.first", "--child", work.name]
    pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return stack.enter_context(subprocess.Popen(command, env=os.environ | caches, **pipes))


def _line(process: subprocess.Popen[str], given: str | None = None) -> str:
    """The next line that a process says, after it was given one; nothing where it has ended."""
    assert process.stdin is not None and process.stdout is not None
    if given is not None:
        with contextlib.suppress(BrokenPipeError):
            print(given, file=process.stdin, flush=True)
    return process.stdout.readline()


def markdown(results: dict[str, Any]) -> str:
    """The results as a table."""
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += [
        "",
        "Seconds from the first call in a new process, nothing compiled before, to its result and to its gradients;",
        f"the goal is {GOAL:g}. Not counted: the imports of torch and of this library, and CUDA's start.",
        "",
        "| layer | kernels compiled | to the result | to the gradients |",
        "|---|---|---|---|",
    ]
    for row in results["rows"]:
        seconds = [f"{s:.2f}" for s in row.get("seconds", ())] or [row["problem"]]
        cells = [row["work"], str(row.get("kernels", "")), *seconds, *["–"] * (2 - len(seconds))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _environment(commit: str | None) -> dict[str, str]:
    found = environment()
    found["machine"] = f"{torch.cuda.get_device_name()}, {len(os.sched_getaffinity(0))} cores"
    found["versions"] += f", triton {importlib.metadata.version('triton')}"
    found["commit"] = commit or found["commit"]
    found["command"] = "python -m benchmarks.first"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", type=commit, help="what was measured, where the machine has no git")
    parser.add_argument("--only", nargs="*", default=[], help="words of the layers to do")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(next(work for work in WORKS if work.name == asked.child))
        return
    works = [work for work in WORKS if not asked.only or any(word in work.name for word in asked.only)]
    results: dict[str, Any] = {"rows": []}
    for row in measured(works):
        print(row, flush=True)
        results["rows"].append(row)
    results = {"environment": _environment(asked.commit), **results}
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        stem = asked.out / f"first-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(results))


if __name__ == "__main__":
    main()
