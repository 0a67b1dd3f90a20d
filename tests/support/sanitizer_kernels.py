"""A sample of small, ragged kernels, forward and backward, to run under a checker of memory accesses.

``compute-sanitizer --tool memcheck python -m tests.support.sanitizer_kernels`` (or racecheck) runs all of them, and
``... 2/5`` the third of five shares. ``tests/gpu/test_sanitizer.py`` runs it.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engines.triton import KernelPlan, use_plan
from monoidreduce.engines.triton.launch import driver
from monoidreduce.engines.triton.panel import accumulators
from tests.support.single_warpgroup_cases import ALONE
from tests.support.warp_specialised_mlp_cases import ABREAST, BY_GROUPS

HALF, SINGLE = torch.bfloat16, torch.float32
BOXES = {over: KernelPlan(64, 64, 4, 2, 1, 1) for over in ("cols", "rows")}  # copied by tensor descriptors
PARTS = {over: KernelPlan(64, 32, 4, 2, 3, 0) for over in ("cols", "rows")}  # walks in three parts
TURNS = {"cols": KernelPlan(128, 128, 4, 2, 1, 2)}  # staged: copies and products by turns
# what our kernels are called: nobody else's are watched
KERNELS = (
    "_over_",
    "write",
    "side",
    "row_dot",
    "_guessed",
    "guess_maxima",
    "_own",
    "finish_rows",
    "scale_rows",
    "complete_rows",
    "sweep_rows",
    "add_labels",
    "share",
    "strip_maxima",
    "unite_softmax",
)


@dataclass(frozen=True)
class Case:
    """A call on tensors of some shapes. ``plan``: of its kernels, where it is not their own."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Tensor]
    dtype: torch.dtype = HALF
    plan: dict[str, KernelPlan] = field(default_factory=dict)
    backward: bool = True

    def run(self) -> None:
        drawn = [torch.randn(shape, device="cuda") for shape in self.shapes]
        given = [t.to(self.dtype).requires_grad_(self.backward) for t in drawn]
        told = mr.use(engine="triton") if self.plan else contextlib.nullcontext()
        here = torch.autograd.set_multithreading_enabled(False)  # a plan does not reach the backward's own thread
        with told, here, use_plan(self.plan) if self.plan else contextlib.nullcontext():
            out = self.call(*given)
            if self.backward:
                torch.autograd.grad(out.float().square().sum(), given, allow_unused=True)


def labelled(x: Tensor, w: Tensor) -> Tensor:
    return ops.linear_cross_entropy(x, w, torch.arange(len(x), device="cuda") % len(w))


def stowed(x: Tensor, w: Tensor) -> Tensor:
    with mr.budget("300KB"):
        return labelled(x, w)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.attention(q, k, v, causal=True)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.attention(q, k, v, window=20, dropout_p=0.1, seed=1)


def thinned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.attention(q, k, v, dropout_p=0.1, seed=1)


def contracted(weights: Tensor, vectors: Tensor) -> Tensor:
    out = torch.zeros(len(weights), vectors.shape[1], device="cuda").to(vectors)
    if not driver.runs_warp_specialized(out.device):
        return out.addmm_(weights, vectors)
    accumulators.PreparedContraction(out, weights, vectors, True)(out, weights, vectors)
    return out


def in_float32(out: Tensor, weights: Tensor, vectors: Tensor, add: bool) -> None:
    """A sum by the vendor's product, in float32: racecheck breaks off at some of 16 bits, with nobody else's kernel
    around (``torch.mm`` of (2304, 100) and (100, 600) in bfloat16, of which memcheck has nothing to say)."""
    product = weights.float() @ vectors.float()
    out.copy_(out.float() + product if add else product)


def drawn(x: Tensor, w: Tensor) -> Tensor:
    return ops.linear_sample(x, w, 7)[0]


def nearest(x: Tensor, y: Tensor) -> Tensor:
    return ops.knn(x, y, 5).values


def smoothed(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
    return ops.kernel_sum(x, y, b, bandwidth=0.7)


LONG, SHORT = (2, 133, 64), (2, 77, 64)
CASES = (  # kinds of kernels: conditions, few features, many features, lists, draws, splits; those alike in one share
    Case("causal attention", (LONG, LONG, LONG), causal),
    Case("causal attention, descriptors", (LONG, LONG, LONG), causal, plan=BOXES),
    Case("attention by turns", ((2, 259, 128), (2, 387, 128), (2, 387, 128)), causal, plan=TURNS, backward=False),
    Case("dropout by turns", ((2, 259, 128), (2, 387, 128), (2, 387, 128)), dropped, plan=TURNS, backward=False),
    Case("row gradients by groups", ((2, 259, 128), (2, 387, 128), (2, 387, 128)), dropped, plan={"cols": ABREAST}),
    Case("column gradients alone", ((2, 259, 128), (2, 388, 128), (2, 388, 128)), thinned, plan={"rows": ALONE}),
    Case("gated perceptron by groups", ((130, 128), *((200, 128),) * 3), ops.gated_mlp, plan=BY_GROUPS),
    Case("perceptron by groups", ((130, 128), *((200, 128),) * 2), ops.mlp, plan={"cols": ABREAST}),
    Case("contraction by turns", ((384, 1024), (1024, 384)), contracted, backward=False),
    Case("attention in parts", (LONG, SHORT, SHORT), ops.attention, plan=PARTS),
    Case("attention with dropout", (LONG, SHORT, SHORT), dropped),
    Case("one query", ((1, 1, 64), (1, 133, 64), (1, 133, 64)), ops.attention, SINGLE),
    Case("perceptron", ((59, 32), (111, 32), (111, 48)), ops.mlp),
    Case("perceptron, float32", ((59, 32), (111, 32), (111, 48)), ops.mlp, SINGLE),
    Case("cross-entropy", ((59, 32), (111, 32)), labelled),
    Case("wide cross-entropy", ((65, 600), (129, 600)), labelled),
    Case("wide cross-entropy, weights stowed", ((100, 600), (3000, 600)), stowed),
    Case("a class drawn, of many features", ((133, 600), (600, 600)), drawn, backward=False),
    Case("wide cross-entropy, float32", ((65, 600), (129, 600)), labelled, SINGLE),
    Case("five nearest", ((100, 3), (57, 3)), nearest, SINGLE),
    Case("kernel sum", ((100, 3), (57, 3), (57, 1)), smoothed, SINGLE),
)


def main(share: int, shares: int) -> None:
    torch.manual_seed(0)
    with mock.patch.object(accumulators, "contract_into", in_float32):
        for case in CASES[share::shares]:
            print(case.name, flush=True)
            case.run()
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main(*map(int, (sys.argv[1] if len(sys.argv) > 1 else "0/1").split("/")))
