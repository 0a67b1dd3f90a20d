"""One kernel for the gradients of queries, keys and values: which calls get it, and what it computes.

It runs on the CPU in ``tests/support/gluon_simulator.py``, which sees additions out of turn; ``tests/gpu`` runs it on a
device."""

import pytest
import torch

import monoidreduce as mr
from tests.support import gluon_simulator, internals
from tests.support.joint_gradient_cases import CASES, check, gradients


@pytest.fixture
def launched(monkeypatch):
    """The staged launches of calls of any size, which run on the simulator."""
    found = gluon_simulator.simulate(monkeypatch)
    internals.pretend_device(monkeypatch, descriptors=True)
    internals.set_pair_thresholds(monkeypatch, many=0, very_many=0)
    return found


def joint(launches):
    return [c for c in launches if "joint_box" in c.kernel.text]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_against_float64(case, launched):
    found = gradients("triton", torch.bfloat16, *case)
    assert len(joint(launched)) == 1
    check(found, case, least=2**-7)  # the interpreter, which runs the last kernel, cuts bits off instead of rounding


def test_float16(launched):
    found = gradients("triton", torch.float16, *CASES[0])
    assert len(joint(launched)) == 1
    exact, plain = (gradients("reference", kind, *CASES[0]) for kind in (torch.float64, torch.float16))
    for got, right, theirs in zip(found, exact, plain, strict=True):
        assert (got.double() - right).norm() <= 2 * (theirs.double() - right).norm() + 2**-11 * right.norm()


@pytest.mark.parametrize(
    "case",
    [
        (1, 1, 1, 64, 64, 96, {}),  # other widths
        (1, 1, 1, 64, 64, 128, {"dropout_p": 0.2, "seed": 3}),
        (1, 1, 1, 64, 200, 128, {"is_causal": True}),  # columns that no row sees
    ],
    ids=["96", "dropout", "unseen"],
)
def test_others_have_two_kernels(case, launched):
    gradients("triton", torch.bfloat16, *case)
    assert not joint(launched)


def test_with_little_memory_there_are_two_kernels(launched):
    with mr.budget("64MB"):
        gradients("triton", torch.bfloat16, *CASES[0])
    assert not joint(launched)


@pytest.mark.parametrize(
    ("text", "instead", "message"),
    [
        (r"part_full.index\(GROUP\), \(step // 2\) & 1\)", "part_full.index(GROUP), ((step // 2) & 1) ^ 1)", "nobody"),
        (r"joint_ptr \+ place\) < turn", "joint_ptr + place) < turn - 1", "out of turn"),
        (r"score1 = warpgroup_mma_wait\(1, deps=\[score1\]\)", "pass", "Product"),
    ],
    ids=["phase", "turn", "wait"],
)
def test_the_machine_sees_a_broken_turn(text, instead, message, launched, monkeypatch):
    """Else it would prove nothing: tiles are run from the last to the first, so that turns are waited for."""
    pattern = r"tl\.program_id\(0\)"
    where = lambda call: "joint_box" in call.kernel.text
    gluon_simulator.change_kernels(monkeypatch, text, instead, where=where, patience=0.5)
    if message == "out of turn":
        gluon_simulator.change_kernels(
            monkeypatch, pattern, "(tiles * joint_batches - 1 - tl.program_id(0))", where=where, patience=0.5
        )
    with pytest.raises((AssertionError, TypeError), match=message):
        gradients("triton", torch.bfloat16, *CASES[0])
