"""What the first call of a new length does, on a pretended H200: ``python -m tests.support.new_lengths`` prints JSON.

- ``anew``: functions of the library that run in the first call of a length, of those that run once for a program or for
  a class of lengths only;
- ``different``: lengths whose launches are others than in a process that meets no other length;
- ``calls``: how many Python functions of the library the first call of a length runs, forward and backward;
- ``held``: how many plans, prepared folds and recordings are alive after many lengths, with small caches.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.visited_files import run_noting

FIRST = (1000, 1001, 1002, 1004, 1008, 1024)  # the lengths from 993 to 1024 are one class
THEN = (993, 995, 996, 1006, 1012, 1016)
OTHERS = (1050, 1052)  # of a class that was not met: its schedule is chosen, and nothing else is done
BOUNDARIES = (1023, 1024, 1025, 1032, 1040, 1056, 1088, 1089, 130)
# What runs once for a program, and what runs once for a class of lengths
PROGRAM = ("program/trace:trace", "program/lower:run_passes", "program/lower:normalize", "program/reverse_mode")
PROGRAM += ("program/gradient",)
PROGRAM += ("engines/triton/codegen/compiler", "engines/triton/codegen/reductions", "runtime/dry_run")
CLASS = ("plan/candidates",)
# and what runs once for lengths whose strides are aligned alike
ALIGNED = ("engines/triton/schedules/spec_from_tensors:describe_fold", "engines/triton/launch/descriptors:find_copied")
LIKE_OTHERS, JOINED = 1016, "logprobs"  # of which one kernel for both sums is tried for every length
SMALL = 16  # entries of the caches where objects are counted


def run() -> dict[str, Any]:
    """The facts, from a process of their own."""
    command = [sys.executable, "-m", "tests.support.new_lengths"]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return json.loads(found.stdout.splitlines()[-1])


def main() -> None:
    import torch

    import monoidreduce as mr
    from benchmarks.pretend import h200
    from monoidreduce import ops

    def heads(n: int, split: bool = False, batch: int = 1, count: int = 4) -> list[Any]:
        shape = (batch, n, count, 64) if split else (batch, count, n, 64)
        made = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        return [t.transpose(1, 2) for t in made] if split else made

    def vectors(*lengths: int) -> list[Any]:
        return [torch.zeros(n, 64, dtype=torch.bfloat16, requires_grad=True) for n in lengths]

    calls: dict[str, Callable[[int], Any]] = {
        "attention": lambda n: ops.attention(*heads(n)),
        "causal": lambda n: ops.attention(*heads(n), is_causal=True),
        "split heads": lambda n: ops.attention(*heads(n, True), is_causal=True),
        "perceptron": lambda n: ops.mlp(*vectors(n, 512, 512)),
        "logprobs": lambda n: ops.linear_logprobs(*vectors(n, 512), torch.zeros(n, dtype=torch.int64)),
    }

    def step(call: Callable[[int], Any], n: int) -> None:
        y = call(n)
        y.backward(torch.zeros_like(y))

    found: dict[str, Any] = {"anew": {}, "different": {}, "calls": {}, "held": {}}
    with h200(), mr.use(engine="auto"):
        for name, call in calls.items():
            for n in FIRST:
                step(call, n)
            for n in (*THEN, *OTHERS):
                seldom = (
                    *PROGRAM,
                    *(CLASS if n in THEN else ()),
                    *(ALIGNED if n == LIKE_OTHERS and name != JOINED else ()),
                )
                ran = functions_of(lambda call=call, n=n: step(call, n))
                again = [f for f in ran if f.startswith(seldom)]
                if again:
                    found["anew"][f"{name} {n}"] = again
                if n == LIKE_OTHERS:
                    found["calls"][name] = sum(ran.values())
            if name not in ("causal", "split heads", "perceptron"):
                continue
            found["different"][name] = different(call, BOUNDARIES, step)
        wide = lambda n: [torch.zeros(k, 512, dtype=torch.bfloat16, requires_grad=True) for k in (n, 1000)]
        head = lambda n: ops.linear_cross_entropy(*wide(n), torch.zeros(n, dtype=torch.int64))
        joined = lambda n: ops.attention(*heads(n, batch=2, count=16))
        found["different"]["two kernels of gradients, then one for both"] = different(joined, (2048, 4096), step)
        found["different"]["vocabulary head"] = different(head, BOUNDARIES, step, panel_launches)
        found["held"] = held(calls["causal"], step)
    print(json.dumps(found))


def functions_of(call: Callable[[], object]) -> dict[str, int]:
    """The functions of the library that a call runs, as "folder/file:function", and how often."""
    seen: dict[str, int] = {}

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and "/monoidreduce/" in frame.f_code.co_filename:
            name = frame.f_code.co_filename.rpartition("/monoidreduce/")[2].removesuffix(".py")
            name = f"{name}:{frame.f_code.co_qualname}"
            seen[name] = seen.get(name, 0) + 1

    run_noting(call, note)
    return seen


def different(
    call: Callable[[int], Any], lengths: Sequence[int], step: Callable, launches: Callable | None = None
) -> list[int]:
    """Of these lengths, one after the other, those whose launches are others than in a process that met no other."""
    launches = launches or fold_launches
    known = {n: launches(call, n, step, forget=False) for n in lengths}
    fresh = {n: launches(call, n, step, forget=True) for n in lengths}
    return [n for n in lengths if known[n] != fresh[n] or not known[n]]


def panel_launches(call: Callable[[int], Any], n: int, step: Callable, forget: bool) -> list[Any]:
    """The kernels on panels of a call of length ``n``: text, plan, grid, lengths and what they are given; with empty
    caches where ``forget``."""
    from torch import Tensor

    from monoidreduce.engines.common.bounded_cache import clear_caches
    from monoidreduce.engines.triton.panel import epilogue, row_kernel

    if forget:
        clear_caches()
        epilogue.fuse_epilogue.cache_clear()
    found: list[Any] = []
    first = row_kernel.PreparedKernel._first

    def describe(v: Any) -> Any:
        if isinstance(v, Tensor):
            return tuple(v.shape), v.stride(), v.dtype
        box = ("shape", "strides", "block_shape")
        return tuple(tuple(getattr(v, name)) for name in box) if hasattr(v, "block_shape") else v

    def note(self: Any, arguments: list[Any], device: Any) -> Any:
        facts = hash(self.kernel.text), self.plan, self.grid, self.lengths, self.tiles, self.wide
        found.append((*facts, *map(describe, arguments)))
        return first(self, arguments, device)

    with mock.patch.object(row_kernel.PreparedKernel, "_first", note):
        step(call, n)
    return found


def fold_launches(call: Callable[[int], Any], n: int, step: Callable, forget: bool) -> list[Any]:
    """The kernels of a call of length ``n``: text, plan, grid, results and integers; with empty caches where
    ``forget``, else made of those of the lengths before."""
    from torch import Tensor

    from monoidreduce.engines import auto, triton
    from monoidreduce.engines.common.bounded_cache import clear_caches
    from monoidreduce.engines.triton.kernels import prepared_fold

    if forget:
        clear_caches()
        auto._CHOICES.clear()
    triton.prepared_folds().clear()
    others = {} if forget else dict(prepared_fold._OTHER_LENGTHS)
    clear_caches()  # so that folds are prepared again, by the choices that are known
    prepared_fold._OTHER_LENGTHS.update(others)
    step(call, n)
    every = triton.prepared_folds().values()
    made = [(one, ready.order) for ready in every for one in ready.launches if one.relaunch is not None]
    return [
        (
            *(
                one.over,
                hash(one.kernel.text),
                one.plan,
                one.grid,
                one.call_options,
                one.outputs,
                one.strides,
                one.split_lengths,
            ),
            [v for v in one.template.values if v],
            [(leaf, box.shape, box.strides, box.block_shape) for leaf, box in one.descriptors],
            [v.tolist() if isinstance(v, Tensor) else v for v in one.tile_range_arguments or ()],
            order,
        )
        for one, order in made
    ]


def held(call: Callable[[int], Any], step: Callable) -> dict[str, int]:
    """How many objects of each kind are alive after 30 lengths, with caches of a few entries."""
    from monoidreduce.engines import auto
    from monoidreduce.engines.common import bounded_cache
    from monoidreduce.engines.triton.kernels import prepared_fold

    bounded_cache.clear_caches()
    for cache in bounded_cache._caches.values():
        cache.size = SMALL
    prepared_fold._MOST = auto._MOST = bounded_cache._MAX_ENTRIES = SMALL
    for n in range(2050, 2110, 2):
        step(call, n)
        step(call, n)
    gc.collect()
    alive = [type(x).__name__ for x in gc.get_objects()]
    return {name: alive.count(name) for name in ("CallPlan", "PreparedFold", "ForwardReplay", "ProgramReplay")}


if __name__ == "__main__":
    main()
