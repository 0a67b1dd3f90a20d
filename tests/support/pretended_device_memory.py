"""Calls on a GPU that is not there (``benchmarks/pretend.py``): of each, what is predicted to be held at once, and what
is, as JSON. Run by ``tests/interpret/test_memory_estimate_kernels.py`` in a process of its own."""

import itertools
import json
import weakref
from typing import no_type_check

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from benchmarks.planner_works import attention, cases, gated
from benchmarks.pretend import case, counted, h200, predicted
from monoidreduce import Col, Row, autotune
from monoidreduce.engines.triton.panel import accumulators, kernel_step
from monoidreduce.runtime import torch_operator
from monoidreduce.runtime.dry_run import LiveMemory
from tests.support import internals

B, S = torch.bfloat16, torch.float32


@mr.op
@no_type_check
def documents(q: Row["f"], k: Col["f"], v: Col["d"], here: Row, there: Col):
    return mr.softmax_mean(torch.where(here == there, q @ k, -torch.inf), v)


@mr.op
@no_type_check
def loss(x: Row["d"], w: Col["d"], label: Row):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == label, s, 0.0))


@mr.op
@no_type_check
def own(x: Row["d"], y: Col["d"]):
    s = x @ y
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0))


@mr.op
@no_type_check
def distilled(p: Row["d"], c: Col["d"], q: Row["e"], t: Col["e"]):
    student, teacher = p @ c, q @ t
    return mr.logsumexp(student) - mr.softmax_mean(teacher, student)


@mr.op
@no_type_check
def both_ways(x: Row["d"], y: Col["d"]):
    s = F.normalize(x) @ F.normalize(y)
    return mr.logsumexp(s), mr.logsumexp(s, over="rows")


@mr.op
@no_type_check
def cauchy(x: Row["d"], y: Col["d"], b: Col["n"]):
    return mr.sum(b / (1 + mr.sqdist(x, y)))


@mr.op
@no_type_check
def nearest(x: Row["d"], y: Col["d"]):
    return mr.topk(x @ y, 8)


@mr.op
@no_type_check
def spread(x: Row["d"], y: Col["d"]):
    return mr.var(x @ y), mr.max(x @ y)


@mr.op
@no_type_check
def biased(q: Row["f"], k: Col["f"], v: Col["d"], bias: mr.Pair):
    return mr.softmax_mean(q @ k + bias, v)


def given(*shapes, dtype=B):
    return [torch.zeros(s, dtype=dtype).requires_grad_() for s in shapes]


@mr.op
@no_type_check
def causal(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k, -torch.inf), v)


def labels(rows):
    return torch.arange(rows) % 7


CASES = {
    "heads": (attention, given((2, 3, 517, 64), (2, 3, 1031, 64), (2, 3, 1031, 32))),
    "shared keys": (attention, given((2, 6, 517, 64), (2, 1, 1031, 64), (2, 1, 1031, 64))),
    "one row": (attention, given((1, 128), (8191, 128), (8191, 128))),
    "float32": (attention, given((1023, 48), (4097, 48), (4097, 48), dtype=S)),
    "causal": (causal, given((1025, 64), (1025, 64), (1025, 64))),
    "documents": (documents, [*given((2049, 64), (2049, 64), (2049, 64)), labels(2049), labels(2049)]),
    "gated": (gated, given((1025, 128), (511, 128), (511, 128), (511, 64))),
    "wide gated": (gated, given((1025, 512), (2047, 512), (2047, 512), (2047, 512))),
    "labels": (loss, [*given((4097, 64), (4101, 64)), labels(4097)]),
    "wide labels": (loss, [*given((1025, 768), (8191, 768)), labels(1025)]),
    "wide labels, float32": (loss, [*given((511, 512), (2047, 512), dtype=S), labels(511)]),
    "wide own": (own, given((2051, 512), (2049, 512))),
    "wide batch": (loss, [*given((3, 259, 512), (3, 1031, 512)), labels(777).view(3, 259)]),
    "distilled": (distilled, given((1023, 64), (2049, 64), (1023, 96), (2049, 96))),
    "wide distilled": (distilled, given((511, 512), (2049, 512), (511, 768), (2049, 768))),
    "both ways": (both_ways, given((1023, 64), (2047, 64))),
    "wide both ways": (both_ways, given((1023, 512), (2047, 512))),
    "distances": (cauchy, given((4095, 3), (2047, 3), (2047, 16), dtype=S)),
    "distances in pieces": (cauchy, given((3, 4095, 48), (2047, 48), (3, 2047, 16), dtype=S)),
    "float32 in pieces": (attention, given((2, 2, 2049, 48), (2, 1, 4097, 48), (4097, 16), dtype=S)),
    "the best": (nearest, given((1023, 64), (4097, 64))),
    "wide best": (nearest, given((515, 512), (4097, 512))),
    "moments": (spread, given((1023, 64), (2047, 64))),
    "a number per pair": (biased, given((259, 64), (517, 64), (517, 64), (259, 517))),
}


MANY = {"many labels": (loss, [*given((1250, 768), (33000, 768)), labels(1250)])}  # sums over rows go by turns
MANY["labels, summed"] = (loss.total, MANY["many labels"][1])  # some weights are stowed


def calls():
    for name, (op, args) in CASES.items():
        for backward in (True, False):
            how = "forward and backward" if backward else "forward"
            yield f"{name}, {how}", (predicted(op, args, backward).peak, counted(op, args, backward).peak)


WIDE = ("wide gated", "wide labels", "wide labels, float32", "wide own", "wide both ways")
WITHIN = list(itertools.product(WIDE, ("16MB", "1MB")))


def budgets():
    """Panels cut along one axis, along both, in blocks of rows, and in the column gradients' own memory."""
    for name, budget in WITHIN:
        with mr.budget(budget):
            op, args = CASES[name]
            yield f"{name}, {budget}", (predicted(op, args).peak, counted(op, args).peak)


def again():
    """Of walks over panels: bytes where each is walked, where it is run as it was written down, and how many were."""
    whole = [("wide labels", "10GB"), ("wide distilled", "10GB"), ("many labels", "10GB"), ("many labels", "45MB")]
    whole += [("labels, summed", "2MB"), ("labels, summed", "16MB")]
    for name, budget in [*WITHIN, *whole]:
        found = []
        for repeated in (False, True):
            with h200(repeated), mr.budget(budget), pytest.MonkeyPatch.context() as patch:
                internals.forget_panel_recordings(patch)
                found.append(counted(*(CASES | MANY)[name]).peak)
                written = sum(len(kind.recordings) for kind in kernel_step._LOOPS.values())
        yield f"{name}, {budget}", (*found, written)
    assert {key[0] for key, ready in accumulators._PREPARED.items() if ready} == {False, True}  # added to, and not


class Staying(LiveMemory):
    """Storages that were made inside the block by this thread, and still have memory."""

    def __init__(self, given):
        super().__init__(given)
        self.made = []

    def on_growth(self, t, size):
        self.made.append(weakref.ref(t.untyped_storage()))

    def bytes(self):
        return sum(ref().nbytes() for ref in self.made if ref() is not None)


def staying():
    """Bytes that calls of the operator leave behind: of a compiler's pool, in which nothing may stay."""
    for name, (op, args) in CASES.items():
        folds, left = autotune.record_call(op, args, {}, backward=True).folds, []
        for fold, leaves, sizes in folds:
            with pytest.MonkeyPatch.context() as patch:
                internals.forget_launches(patch)
                internals.forget_tile_ranges(patch)
                internals.forget_panel_recordings(patch)
                for _ in range(3):  # walks over panels are walked, heard, and run
                    with Staying([v for v in leaves if isinstance(v, torch.Tensor)]) as made:
                        torch_operator.call(fold, "triton", leaves, sizes)
                    left.append(made.bytes())
        yield name, left


def planners():
    for work, size in cases("cuda", 3, []):
        told, found = case(work, size)
        yield f"{work.name} {list(size)}", (told.peak, found.peak)


if __name__ == "__main__":
    with h200():
        found = {"calls": dict(calls()), "budgets": dict(budgets()), "planners": dict(planners())}
    found["again"] = dict(again())
    with h200(again=True), mr.use(engine="auto"):
        found["staying"] = dict(staying())
    print(json.dumps(found))
