"""Which kernels a call launches on an H200 that is not there, called in each of the ways that torch has.

    python -m tests.support.launches_in_torch

prints, as JSON, the kernels (a name and a hash of the text, types and options that each is compiled from) and grids of
attention and of a vocabulary head, forward and backward: called plainly, compiled, under autocast, in checkpoints of
each kind, and sharded by FSDP2. For a process of its own: Triton is told that there is a GPU.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import triton.experimental.gluon.language
import triton.language  # noqa: F401  (before anything tells Triton to interpret)
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from monoidreduce import ops
from monoidreduce.ops import checks
from monoidreduce.runtime import dispatch
from tests.fingerprints import h200, hooks
from tests.fingerprints.ptx import without_assembler

Call = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def attention(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As models call it: split heads, grouped queries, the result joined again."""
    q = x.view(1, 1024, 8, 128).transpose(1, 2)
    k, v = (t.view(1, 1024, 2, 128).transpose(1, 2) for t in (k, v))
    y = ops.attention(q, k, v, causal=True, enable_gqa=True)
    return y.transpose(1, 2).reshape(1, 1024, 1024)


def head(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return ops.linear_cross_entropy(x, weight, labels)


def calls(dtype: torch.dtype = torch.bfloat16) -> dict[str, Call]:
    zeros = lambda *shape: torch.zeros(shape, dtype=dtype, requires_grad=True)
    return {
        "attention": (attention, (zeros(1, 1024, 1024), zeros(1, 1024, 256), zeros(1, 1024, 256))),
        "head": (head, (zeros(1024, 1024), zeros(32000, 1024), torch.arange(1024))),
    }


class _Sharded(torch.nn.Module):
    """A module whose weights are passed to the call."""

    def __init__(self, function: Callable[..., Tensor], args: tuple[Tensor, ...]):
        super().__init__()
        self.function, self.fixed = function, [a for a in args if not a.requires_grad]
        self.given = torch.nn.ParameterList(a for a in args if a.requires_grad)

    def forward(self) -> Tensor:
        return self.function(*self.given, *self.fixed)


def ways(function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> dict[str, Callable[[], Tensor]]:
    """A call in each of torch's ways."""

    def autocast(*given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(*(t.float() if t.is_floating_point() else t for t in given))

    policy = lambda context, op, *given, **named: False
    contexts = lambda: create_selective_checkpoint_contexts(policy)
    compile = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    return {
        "plain": lambda: function(*args),
        "compiled": lambda: compile(function)(*args),
        "compiled for any length": lambda: compile(function, dynamic=True)(*args),
        "autocast": lambda: autocast(*args),
        "compiled autocast": lambda: compile(autocast)(*args),
        "reentrant checkpoint": lambda: checkpoint(function, *args, use_reentrant=True),
        "checkpoint": lambda: checkpoint(function, *args, use_reentrant=False),
        "selective checkpoint": lambda: checkpoint(function, *args, use_reentrant=False, context_fn=contexts),
    }


@contextlib.contextmanager
def recorded(lines: list[str]) -> Iterator[None]:
    """Launches on an H200 that is not there are written down, each with the hash of what it is compiled from."""

    def compile(src: Any, target: Any = None, options: Any = None, **named: Any) -> Any:
        constants = sorted(map(str, getattr(src, "constants", {}).items()))
        text = f"{src.fn.src} {options} {constants} {src.signature} {src.attrs}"
        name = f"{src.fn.__name__} {hashlib.sha256(text.encode()).hexdigest()[:8]}"
        return h200._Compiled(name, lambda kernel, grid, given: lines.append(f"{kernel} {tuple(grid)}"))

    def again(compiled: Any, grid: tuple[int, ...], constants: Any, device: Any) -> Callable[..., None] | None:
        return None if compiled is None else lambda *given: lines.append(f"{compiled.name} {tuple(grid)}")

    untraced = lambda: not (dispatch.is_transformed() or torch._C._len_torch_dispatch_stack())
    with (
        without_assembler(),
        hooks.absent_h200(compile, again),
        mock.patch.object(dispatch, "is_untraced", untraced),
        mock.patch.object(checks, "can_inspect", lambda t: False),  # on a GPU nobody looks at labels
    ):
        yield


def main() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lines: list[str] = []
    found: dict[str, dict[str, list[str]]] = {}
    with recorded(lines):
        for name, (function, args) in calls().items():
            found[name] = {}
            for way, call in ways(function, args).items():
                if name == "head" and way not in ("plain", "compiled", "autocast"):
                    continue
                for _ in range(2):  # the second time by replay
                    lines.clear()
                    y = call()
                    y.backward(torch.ones_like(y))
                found[name][way] = list(lines)
            module = _Sharded(function, tuple(a.detach().requires_grad_(a.requires_grad) for a in args))
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
            for _ in range(2):
                lines.clear()
                y = module()
                y.backward(torch.ones_like(y))
            found[name]["FSDP2"] = list(lines)
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
