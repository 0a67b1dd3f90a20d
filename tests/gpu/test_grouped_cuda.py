"""Kernels that groups of warps share (Gluon, on Hopper), where they are meant to run: the cases of the machine.

``MONOIDREDUCE_TEST_SHARD=3/12`` runs a twelfth of the cases, so that twelve processes share the compiling.
"""

import os

import pytest
import torch

from monoidreduce import ops
from monoidreduce.engine import triton as engine
from monoidreduce.engine.triton import launch, staged, use_plan
from tests.grouped import ABREAST, BY_GROUPS, CASES, RELAY, check, check_infinite, made, ours, torchs

HOPPER = torch.cuda.is_available() and staged.on(torch.device("cuda"))
PART, PARTS = map(int, os.environ.get("MONOIDREDUCE_TEST_SHARD", "0/1").split("/"))
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, and Triton 3.6")


@pytest.fixture
def launched(monkeypatch):
    """What is launched for the first time: its kernel's name, whether it takes turns, and its plan."""
    found, real = [], launch.execute
    monkeypatch.setattr(engine, "_READY", {})
    monkeypatch.setattr(
        launch, "execute", lambda call: found.append((call.kernel.name, call.kernel.staged, call.plan)) or real(call)
    )
    return found


@pytest.mark.parametrize("case", CASES[PART::PARTS], ids=repr)
def test_against_float64(case, launched):
    with use_plan(BY_GROUPS):
        check(case, "cuda")
    assert set(launched) == {("fold_over_cols", True, ABREAST), ("fold_over_rows", True, RELAY)}


def test_an_infinite_cotangent_stays_with_what_is_seen(launched):
    with use_plan(BY_GROUPS):
        check_infinite("cuda")
    assert all(turns for _, turns, _ in launched)


def test_repeats_bit_for_bit():
    *args, y = (a.cuda() for a in made(1000, 777))
    with use_plan(BY_GROUPS):
        first = ours(args, y)
        for _ in range(50):
            assert all(torch.equal(a, b) for a, b in zip(first, ours(args, y), strict=True))


def test_chosen_where_pairs_are_many_and_nothing_of_their_size_is_kept(launched):
    *args, y = (a.cuda() for a in made(16400, 16500))
    leaves = [a.requires_grad_() for a in args]
    pull = lambda: torch.autograd.grad(ops.gated_mlp(*leaves), leaves, y)
    found = pull()
    assert [(name, turns, plan.block_kept) for name, turns, plan in launched] == [
        ("fold_over_cols", True, 128),
        ("fold_over_cols", True, 128),
        ("fold_over_rows", True, 64),
    ]
    exact = torchs([a.float() for a in args], y.float(), "silu")[1:]
    for got, right in zip(found, exact, strict=True):
        assert (got.float() - right).norm() <= 0.0045 * right.norm()
    del exact, right
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pull()
    assert torch.cuda.max_memory_allocated() - before <= 6 * y.nbytes
