"""What a call costs before any arithmetic: host time of tiny calls, ours against torch's own layers or, where it has
none, against its plain expression.

``python -m benchmarks.host`` prints a Markdown table. "Above the engine" runs the same call with an engine that hands
back buffers made beforehand and kernels that are not launched, so that only binding, checks, autograd, allocations and
the torch calls around the folds are left. The
floor is torch's own autograd: a function that allocates its results and computes nothing. On a GPU nothing is waited
for inside the loop: what is timed is the host. ``--profile`` says where it goes, in the caller's thread and in the
backward's."""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, no_type_check
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from monoidreduce.engines.common.evaluate import result_form
from monoidreduce.engines.triton.kernels import fold_kernel, prepared_fold
from monoidreduce.plan import settings
from monoidreduce.runtime import dispatch

Call = Callable[..., Tensor]


def cases(device: str, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, tuple[Tensor, ...], Call, Call]]:
    """Name, inputs, ours, theirs."""
    make = lambda *shape: torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)
    q, k, v = (make(1, 2, 128, 64) for _ in range(3))
    yield "attention 1×2×128×64", (q, k, v), ops.attention, F.scaled_dot_product_attention
    x, w = make(128, 64), make(512, 64)
    t = torch.randint(0, 512, (128,), device=device)
    yield (
        "linear cross-entropy 128×64×512",
        (x, w),
        lambda x, w: ops.cross_entropy(x, w, t),
        lambda x, w: F.cross_entropy(F.linear(x, w), t),
    )
    yield (
        "log-probabilities 128×64×512",
        (x, w),
        lambda x, w: ops.linear_logprobs(x, w, t),
        lambda x, w: F.log_softmax(F.linear(x, w), -1).gather(-1, t[:, None])[:, 0],
    )
    p, q = make(256, 64), make(256, 64)
    yield "MLP 128×64×256", (x, p, q), ops.mlp, lambda x, p, q: torch.relu(x @ p.mT) @ q
    u = make(256, 64)
    yield (
        "gated MLP 128×64×256",
        (x, p, u, q),
        ops.gated_mlp,
        lambda x, p, u, q: (F.silu(x @ p.mT) * (x @ u.mT)) @ q,
    )
    y, own = make(128, 64), torch.arange(128, device=device)
    yield (
        "InfoNCE 128×64×128",
        (x, y),
        lambda x, y: ops.contrastive_loss(x, y, kind="infonce", temperature=0.1),
        lambda x, y: F.cross_entropy(x @ y.mT / 0.1, own),
    )
    a, b, c = make(128, 3), make(256, 3), make(256, 1)
    yield (
        "kernel sum 128×3×256",
        (a, b, c),
        ops.kernel_sum,
        lambda a, b, c: torch.exp(-(torch.cdist(a, b) ** 2) / 2) @ c,
    )
    yield "an op with three outputs 128×64×512", (x, w, make(512, 32)), _added(several), _added(several_in_torch)


@mr.op
@no_type_check
def several(x: Row["d"], y: Col["d"], v: Col["e"]):
    """An op of a user's, with numbers and vectors for every row."""
    s = x @ y
    return mr.logsumexp(s), mr.sum(torch.relu(s)), mr.softmax_mean(s, v)


def several_in_torch(x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch."""
    s = x @ y.mT
    return torch.logsumexp(s, -1), torch.relu(s).sum(-1), torch.softmax(s, -1) @ v


def _added(call: Callable[..., Any]) -> Call:
    """Several outputs as one tensor, so that all of them have gradients."""

    def added(*given: Tensor) -> Tensor:
        z, total, mean = call(*given)
        return mean + (z + total)[:, None]

    return added


@contextmanager
def no_engine() -> Iterator[None]:
    """Every engine replaced by one that returns buffers made at its first call, every launch by none."""
    kept = dict(dispatch.FOLDERS)
    made: dict[Any, list[Tensor]] = {}

    def stub(fold: Any, leaves: list[Any], sizes: Any) -> list[Tensor]:
        if fold not in made:
            made[fold] = [_zeros(r, k, sizes) for r, k in fold.outputs]
        return [t.detach() for t in made[fold]]  # autograd asks for a tensor of its own each time

    dispatch.FOLDERS.update(dict.fromkeys(kept, stub))
    silent = mock.patch.object(fold_kernel, "execute", lambda call: lambda *arguments: None)
    try:
        with silent, mock.patch.object(prepared_fold, "_PREPARED", {}):  # launches are made anew, and after it
            yield
    finally:
        dispatch.FOLDERS.update(kept)


def _zeros(reduction: Any, k: int, sizes: Any) -> Tensor:
    shape, dtype = result_form(reduction, k, sizes)
    return torch.zeros(shape, dtype=dtype, device=sizes.device)


class Floor(torch.autograd.Function):
    """What torch's autograd itself costs: results and gradients are allocated, nothing is computed."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *inputs: Tensor) -> Tensor:
        out = torch.empty_like(like)
        ctx.save_for_backward(*inputs, out)
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.empty_like(t) for t in ctx.saved_tensors[:-1])


def microseconds(call: Callable[[], object], repeats: int, rounds: int = 15) -> float:
    """Of one call: the best of several rounds, each too short to fill a GPU's queue, which would be waited for."""
    best = float("inf")
    for round_ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        took = (time.perf_counter() - start) / repeats * 1e6
        best = min(best, took) if round_ else best
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return best


def both(call: Call, inputs: tuple[Tensor, ...], repeats: int) -> tuple[float, float]:
    """Microseconds of the forward (of inputs that ask for gradients), and of forward and backward."""
    cotangent = torch.ones_like(call(*inputs))

    def step() -> None:
        torch.autograd.grad(call(*inputs), inputs, cotangent)

    return microseconds(lambda: call(*inputs), repeats), microseconds(step, repeats)


def table(device: str, repeats: int) -> str:
    lines = [
        f"Host time in µs, forward / forward+backward, {device}, torch {torch.__version__}",
        "",
        "| call | ours | ours, above the engine | floor | torch |",
        "|---|---|---|---|---|",
    ]
    for name, inputs, ours, theirs in cases(device):
        whole = both(ours, inputs, repeats)
        with no_engine():
            above = both(ours, inputs, repeats)
        like = ours(*inputs).detach()
        floor = both(lambda *given, like=like: Floor.apply(like, *given), inputs, repeats)
        peer = both(theirs, inputs, repeats)
        shown = [f"{f:.0f} / {b:.0f}" for f, b in (whole, above, floor, peer)]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


_MET = (1000, 1001, 1002, 1004, 1008, 1024, 1050, 1052, 2048, 1111)  # lengths before those that are timed


def lengths(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    """Calls, and milliseconds of the first one of a new length."""
    make = lambda *shape: torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    causal = functools.partial(ops.attention, is_causal=True)
    each = 1 if device.type == "cuda" or settings.kernels_run_on(device) else 8  # fewer where numbers are computed

    def heads(n: int, split: bool, counts: tuple[int, int, int] = (4, 4, 4)) -> list[Tensor]:
        found = [make(1, n, h, 64) if split else make(1, h, n, 64) for h in counts]
        return [t.transpose(1, 2) for t in found] if split else found

    def labelled(n: int) -> list[Tensor]:
        return [make(n, 512), make(4096 // each, 512), torch.zeros(n, dtype=torch.int64, device=device)]

    cases: tuple[tuple[str, Call, Callable[[int], list[Tensor]]], ...] = (
        ("attention", ops.attention, lambda n: heads(n, False)),
        ("causal, split heads", causal, lambda n: heads(n, True)),
        (
            "causal, split heads, grouped queries",
            functools.partial(causal, enable_gqa=True),
            lambda n: heads(n, True, (8, 2, 2)),
        ),
        ("linear_cross_entropy", ops.linear_cross_entropy, labelled),
        ("an op of a user's", nearby, lambda n: [make(n, 64) for _ in range(3)]),
    )
    for name, call, inputs in cases:
        yield name, first_calls(call, lambda n, inputs=inputs: inputs(n // each))  # type: ignore[misc]


@mr.op
@no_type_check
def nearby(x: Row["d"], y: Col["d"], v: Col["e"]):
    """An op of a user's, of one kind of result."""
    return mr.weighted_mean(torch.sigmoid(x @ y), v)


def first_calls(call: Call, make: Callable[[int], list[Tensor]]) -> str:
    """Milliseconds of the process's time for the first call of a new length: the forward, forward and backward."""
    timed, found = list(range(1100, 1740, 16)), list[tuple[float, float]]()
    random.Random(0).shuffle(timed)
    for n in (*_MET, *timed):
        given = make(n)
        start = time.process_time()
        y = call(*given)
        forward = time.process_time() - start
        wanted, cotangent = [t for t in given if t.requires_grad], torch.zeros_like(y)
        start = time.process_time()
        torch.autograd.grad(y, wanted, cotangent)
        found.append((forward, forward + time.process_time() - start))
    forward, whole = (statistics.median(t[k] for t in found[len(_MET) :]) * 1e3 for k in (0, 1))
    return f"{forward:.1f} / {whole:.1f} ms"


def profile(call: Call, inputs: tuple[Tensor, ...], repeats: int) -> None:
    """Print where the time of a forward goes, and that of every node of its backward, in the thread that runs them."""
    cotangent = torch.ones_like(call(*inputs))
    forward, backward = cProfile.Profile(), cProfile.Profile()
    for _ in range(repeats):
        forward.enable()
        result = call(*inputs)
        forward.disable()
        for node in _nodes(result.grad_fn):
            node.register_prehook(lambda *_: backward.enable())
            node.register_hook(lambda *_: backward.disable())
        torch.autograd.grad(result, inputs, cotangent)
    for name, found in (("forward", forward), ("backward", backward)):
        print(f"\n{name}, {repeats} calls")
        pstats.Stats(found).sort_stats("tottime").print_stats(25)


def _nodes(root: Any) -> list[Any]:
    """A graph's nodes but for those that collect gradients."""
    found, left = [], [root]
    while left:
        node = left.pop()
        if node is not None and node not in found and node.next_functions:
            found.append(node)
            left += [after for after, _ in node.next_functions]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--lengths", action="store_true", help="the first calls of new lengths instead")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.lengths:
        device = torch.device(asked.device)
        for row in lengths(device, torch.bfloat16 if device.type == "cuda" else torch.float32):
            print(*row, sep=": ", flush=True)
        return
    print(table(asked.device, asked.repeats))
    if asked.profile:
        for name, inputs, ours, _ in cases(asked.device):
            print(f"\n{name}")
            profile(ours, inputs, asked.repeats)


if __name__ == "__main__":
    main()
