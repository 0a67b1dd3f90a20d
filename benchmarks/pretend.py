"""A GPU that is not there: calls take the road that they would take on an H200, and nothing is computed.

Tensors lie on the CPU. All that asks for a device is told of an H200, kernels and the vendor's products do nothing, and
everything else is what runs: so what is allocated, in which order, and when it is let go, is what a GPU's allocator
would be asked for. For a process of its own: what is planned here is planned for that GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import triton.language as tl

import monoidreduce as mr
from monoidreduce.engine import early, gradients, hardware, planner, replay, roads, script
from monoidreduce.engine.alive import Alive
from monoidreduce.engine.triton import boxes, describe, epilogue, rows, source, staged
from monoidreduce.plan import ceilings, defaults
from monoidreduce.plan.cost import Scheduled

_FREE = 139 * 2**30  # bytes
_BLOCK = 512  # bytes: what torch's allocator on a GPU rounds up to
_CPU = torch.device("cpu")


class _Kernels:
    """A module of kernels that do nothing."""

    tl = tl

    def __getattr__(self, name: str) -> Any:
        nothing = lambda *arguments, **constants: None
        return type("Kernel", (), {"__getitem__": lambda self, grid: nothing})()


@contextlib.contextmanager
def h200() -> Iterator[None]:
    """Calls inside the block run as they would on an H200."""
    nothing: Callable[..., None] = lambda *given, **more: None
    bare, form, line = planner.bare, early.form, boxes.line
    there = {
        boxes: dict(on=lambda device: True, line=lambda *given: line(*given[:-1], _CPU)),
        ceilings: dict(of=lambda device: ceilings.GPUS["hopper"]),
        describe: dict(family=lambda device: defaults.family(9, 0), has_tanh=lambda device: True, processors=_many),
        early: dict(form=lambda fold, leaves, sizes, engine: form(fold, leaves, sizes, "triton")),
        epilogue: dict(on=lambda device: True),
        gradients: dict(straight=lambda: True),
        hardware: dict(free_memory=lambda device: _FREE, panel_into=nothing, contract_into=nothing),
        planner: dict(_by_kernels=lambda device: True, bare=lambda *given: replace(bare(*given), gpu=True)),
        replay: dict(straight=lambda: True),
        script: dict(row_dot=_row_dot),
        roads: dict(may_be_dense=lambda program, sizes: False),
        source: dict(load=lambda text, functions=(): _Kernels(), again=_again, repeats=lambda device: True),
        staged: dict(on=lambda device: True, processors=_many),
    }
    with contextlib.ExitStack() as stack:
        for module, names in there.items():
            stack.enter_context(mock.patch.multiple(module, **names))
        yield


def _row_dot(x: Tensor, y: Tensor, compute: torch.dtype) -> Tensor:
    asks = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    found = rows.dot(x, y) if x.dtype in hardware.SIXTEEN and compute is torch.float32 and not asks else None
    return hardware.row_dot(x, y, compute) if found is None else found


def _many(device: torch.device) -> int:
    return 132


def _again(*given: Any) -> Callable[..., None]:
    return lambda *arguments: None


@dataclass(frozen=True)
class Found:
    """Bytes alive at once, and what they were: the largest first."""

    peak: int
    largest: tuple[tuple[int, tuple[int, ...], str], ...]  # bytes, shape, who asked for it


class _Blocks(Alive):
    """What a GPU's allocator would have handed out, and to whom."""

    def __init__(self, given: list[Tensor]):
        super().__init__(given)
        self.whose: dict[int, tuple] = {}
        self.then: tuple = ()

    def size(self, t: Tensor) -> int:
        return -(-super().size(t) // _BLOCK) * _BLOCK

    def grew(self, t: Tensor, size: int) -> None:
        self.whose[id(t.untyped_storage())] = (size, tuple(t.shape), f"{str(t.dtype)[6:]}")
        if self.total == self.peak:
            self.then = tuple(self.whose[k] for k in self.live)


def counted(op: Any, args: Sequence[Any], backward: bool = True) -> Found:
    """A call, and its backward, as they are measured on a GPU: what is kept from call to call is not counted."""
    given = [t for t in args if isinstance(t, Tensor)]
    wanted = [t for t in given if t.requires_grad]

    def step() -> None:
        found = op(*args)
        results = [v for v in tree_leaves(found) if isinstance(v, Tensor) and v.requires_grad]
        if results:
            ones = [torch.ones((), dtype=v.dtype).expand(v.shape) for v in results]
            torch.autograd.grad(results, wanted, ones, allow_unused=True)

    with mr.use(engine="auto"), torch.set_grad_enabled(backward):
        for _ in range(2):
            step()
        with _Blocks(given) as alive:
            step()
    return Found(alive.peak, tuple(sorted(alive.then, reverse=True)))


def predicted(op: Any, args: Sequence[Any], backward: bool = True) -> Scheduled:
    """What is said of the same call on a GPU."""
    with mr.use(engine="auto"):
        return op.cost(*map(_without_numbers, args), device="cuda", backward=backward).chosen


def _without_numbers(v: Any) -> Any:
    if not isinstance(v, Tensor):
        return v
    return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta").requires_grad_(v.requires_grad)
