"""A GPU that is not there: calls take the road that they would take on an H200, and nothing is computed.

Tensors lie on the CPU. All that asks for a device is told of an H200, kernels and the vendor's products do nothing, and
everything else is what runs: so what is allocated, in which order, and when it is let go, is what a GPU's allocator
would be asked for. For a process of its own: what is planned here is planned for that GPU.

    python -m benchmarks.pretend [--only WORD ...] [--part N]

shows of the planner's cases (``planner_works.py``) what is predicted to be held at once, and what is. Of 13 that were
measured on an H200, 12 are counted to 0.02 %; one scatters, and torch's sort inside of it is not seen: 4 % of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import monoidreduce as mr
from monoidreduce.engines import auto
from monoidreduce.engines.common import matmul
from monoidreduce.engines.triton.kernels import small_kernels
from monoidreduce.engines.triton.launch import descriptors, driver
from monoidreduce.engines.triton.panel import accumulators, kernel_step
from monoidreduce.plan import candidates, schedule
from monoidreduce.plan.candidates import ScheduleCost
from monoidreduce.runtime import call_cost, dispatch
from monoidreduce.runtime.dry_run import LiveMemory

from .planner_works import Size, Work, cases

_FREE = 139 * 2**30  # bytes
_BLOCK = 512  # bytes: what torch's allocator on a GPU rounds up to
_CPU = torch.device("cpu")
_ABILITIES = ["descriptors", "tanh", "fast_epilogues"]  # that an H200 has


@contextlib.contextmanager
def h200(again: bool = False) -> Iterator[None]:
    """Calls inside the block run as they would on an H200; ``again``: also walks over panels that were met before."""
    bare, form, line = auto.case_without_leaves, dispatch.find_saving_fold, descriptors.make_shift_descriptor
    repeated = kernel_step.replay_walk if again else lambda walked, *given: walked(*given)
    on_cpu = lambda length, count, block, device: line(length, count, block, _CPU)
    yes = lambda *given: True
    device = dict(find_family=lambda device: schedule.family(9, 0), count_processors=lambda device: 132)
    device |= dict(can_relaunch=yes, runs_warp_specialized=yes, splits_float32=yes)
    there: tuple[tuple[Any, dict[str, Any]], ...] = (
        (descriptors, dict(make_shift_descriptor=on_cpu)),
        (driver, {f"has_{name}": yes for name in _ABILITIES} | device | dict(make_relauncher=lambda *given: _nothing)),
        (candidates, dict(get_rates=lambda device: candidates.GPUS["hopper"])),
        (dispatch, dict(find_saving_fold=lambda fold, leaves, sizes, engine: form(fold, leaves, sizes, "triton"))),
        (dispatch, dict(is_untraced=yes)),
        (matmul, dict(free_memory=lambda device: _FREE, multiply_into_panel=_heard)),
        (accumulators, dict(contract_into=_contracted)),
        (auto, dict(_has_kernels=yes, case_without_leaves=lambda *given: replace(bare(*given), gpu=True))),
        (kernel_step, dict(replay_walk=repeated)),
        (call_cost, dict(fits_one_matrix=lambda *given: False)),
        (dispatch, dict(row_dot=_row_dot)),
    )
    with contextlib.ExitStack() as stack:
        for module, names in there:
            stack.enter_context(mock.patch.multiple(module, **names))
        stack.enter_context(driver.skip_launches())
        yield


def _nothing(*given: Any) -> None:
    pass


def _heard(*given: Any) -> None:
    """A product: whoever writes down a walk over panels hears of it as of a kernel."""
    driver.report(_nothing, given)


def _contracted(out: Tensor, weights: Tensor, vectors: Tensor, add: bool) -> None:
    if not accumulators.contract_by_pingpong(out, weights, vectors, add):
        _heard(out, weights, vectors, add)


_plain_row_dot = dispatch.row_dot


def _row_dot(x: Tensor, y: Tensor, compute: torch.dtype) -> Tensor:
    asks = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    narrow = x.dtype in matmul.SIXTEEN and compute is torch.float32
    found = small_kernels.compute_row_dots(x, y) if narrow and not asks else None
    return _plain_row_dot(x, y, compute) if found is None else found


@dataclass(frozen=True)
class Found:
    """Bytes alive at once, and what they were: the largest first."""

    peak: int
    largest: tuple[tuple[int, tuple[int, ...], str], ...]  # bytes, shape, type


class _Blocks(LiveMemory):
    """What a GPU's allocator would have handed out."""

    def __init__(self, given: list[Tensor]):
        super().__init__(given)
        self.whose: dict[int, tuple] = {}
        self.then: tuple = ()

    def size(self, t: Tensor) -> int:
        return -(-super().size(t) // _BLOCK) * _BLOCK

    def on_growth(self, t: Tensor, size: int) -> None:
        self.whose[id(t.untyped_storage())] = (size, tuple(t.shape), str(t.dtype)[6:])
        if self.total == self.peak:
            self.then = tuple(self.whose[k] for k in self.live)


def counted(op: Any, args: Sequence[Any], backward: bool = True, dense: bool = False) -> Found:
    """A call, and its backward, as they are measured on a GPU: what is kept from call to call is not counted.
    ``dense``: cotangents are whole tensors, made beforehand, which tensor descriptors can copy; else a number each."""
    given = [t for t in args if isinstance(t, Tensor)]
    wanted = [t for t in given if t.requires_grad]
    ones: list[Tensor] = []

    def step() -> None:
        found = op(*args)
        results = [v for v in tree_leaves(found) if isinstance(v, Tensor) and v.requires_grad]
        if results:
            if not (dense and ones):
                ones[:] = [
                    torch.ones_like(v) if dense else torch.ones((), dtype=v.dtype).expand(v.shape) for v in results
                ]
            torch.autograd.grad(results, wanted, ones, allow_unused=True)

    with mr.use(engine="auto"), torch.set_grad_enabled(backward):
        for _ in range(2):
            step()
        with _Blocks(given) as alive:
            step()
    return Found(alive.peak, tuple(sorted(alive.then, reverse=True)))


def predicted(op: Any, args: Sequence[Any], backward: bool = True) -> ScheduleCost:
    """What is said of the same call on a GPU."""
    with mr.use(engine="auto"):
        return op.cost(*map(_without_numbers, args), device="cuda", backward=backward).chosen


def _without_numbers(v: Any) -> Any:
    if not isinstance(v, Tensor):
        return v
    return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta").requires_grad_(v.requires_grad)


def case(work: Work, size: Size) -> tuple[ScheduleCost, Found]:
    """One of the planner's cases."""
    args = [torch.zeros(shape, dtype=dtype).requires_grad_() for shape, dtype in work.forms(size, "cuda")]
    return predicted(work.op, args), counted(work.op, args, dense=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--part", type=int, default=1, help="of the rows and columns, one in so many")
    asked = parser.parse_args()
    with h200():
        for work, (m, n, d) in cases("cuda", 3, asked.only):
            size = (-(-m // asked.part), -(-n // asked.part), d)
            told, found = case(work, size)
            held = ", ".join(f"{b:,} {kind} {shape}" for b, shape, kind in found.largest[:6])
            share = told.peak / found.peak
            print(f"{work.name} {size} {told.schedule}: {told.peak:,} of {found.peak:,} bytes, {share:.3f} ({held})")


if __name__ == "__main__":
    main()
