"""Ping-pong GEMM kernels (two consumer warp groups): which products get one, and what they compute.

They run on the CPU in ``tests/support/gluon_simulator.py``; ``test_aot_compile.py`` compiles them for a GPU, and
``tests/gpu`` runs the same cases there.
"""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import use_plan
from monoidreduce.engines.triton.panel import epilogue
from monoidreduce.engines.triton.schedules import pingpong
from monoidreduce.engines.triton.schedules.pingpong import GemmSchedule
from tests.support import gluon_simulator, internals
from tests.support.aot_compile import Case, best, calls, contrastive, drawn
from tests.support.pingpong_cases import (
    SIZES,
    by_turns,
    check_fold,
    check_gradients,
    check_labels,
    check_odd,
    head,
    lse,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")


@pytest.fixture
def seen(monkeypatch, tmp_path_factory):
    """Ping-pong kernels run on the simulator, as on three multiprocessors; the launches that did."""
    internals.pretend_device(monkeypatch, epilogue=True, processors=3)
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))
    with mr.use(engine="triton"):
        yield gluon_simulator.simulate(monkeypatch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("M", "N", "D"), SIZES)
def test_a_fold_against_float64(M, N, D, wide, seen):
    for parts in (1, 3):
        with use_plan(by_turns(parts, wide)):
            check_fold(M, N, D)
    assert [call.kernel.name for call in seen] == ["fold_over_cols"] * 2
    assert all(("extra_box" in call.kernel.text) == wide for call in seen)


@pytest.fixture
def shallow(monkeypatch):
    """A ring of two blocks: the least depth."""
    pingpong.write_kernel.cache_clear()
    monkeypatch.setitem(pingpong.FOLDS, False, GemmSchedule(stages=2))
    yield
    pingpong.write_kernel.cache_clear()


def test_another_depth_by_one_value(shallow, seen):
    with use_plan(by_turns()):
        check_fold(*SIZES[0])
    assert seen and all("slot = k_block % 2\n" in call.kernel.text for call in seen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 1}, "at least 2 blocks"),
        ({"stages": 8}, "263168 bytes of shared memory; an instance has 232448"),
        ({"stages": 7, "writes": True}, "263168 bytes"),
        ({"stages": 6, "wide": True}, "246784 bytes"),
    ],
)
def test_depths_that_cannot_run(change, message):
    with pytest.raises(ValueError, match=message):
        GemmSchedule(**change)


@pytest.mark.parametrize("wide", [False, True])
def test_nan_and_infinity_stay_in_their_rows(wide, seen):
    with use_plan(by_turns(wide=wide)):
        check_odd()
    assert seen


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("M", "N", "D"), [*SIZES, (256, 576, 264)])
def test_labels_in_whole_and_in_cut_tiles(M, N, D, wide, seen):
    for parts in (1, 2):
        with use_plan(by_turns(parts, wide)):
            check_labels(M, N, D)
    assert len(seen) == 2


@pytest.fixture(params=[False, True], ids=["narrow", "wide"])
def columns(request, monkeypatch):
    """Of a tile of weights. Epilogues are fused anew: their tiles are chosen with them."""
    epilogue.fuse_epilogue.cache_clear()
    epilogue.write_pingpong_kernel.cache_clear()
    monkeypatch.setattr(epilogue, "is_wide", lambda width: request.param)
    yield 192 if request.param else 128
    epilogue.fuse_epilogue.cache_clear()
    epilogue.write_pingpong_kernel.cache_clear()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("N", "size"), [(259, 1.0), (128, 40.0), (384, 1.0)], ids=["near", "far", "whole tiles"])
def test_weights_measured_from_a_guess(N, size, columns, seen):
    check_gradients(130, N, 264, size=size)
    assert [(call.kernel.name, call.plan.block_folded) for call in seen] == [("write_guessed", columns)]


def test_weights_that_are_known(columns, seen):
    with use_plan(by_turns()):
        check_gradients(256, 130, 264, total=False)
    assert [call.kernel.name for call in seen] == ["fold_over_cols", "write_weights"]
    assert seen[1].plan.block_folded == columns


def test_labels_are_left_out_of_tiles_that_hold_them(columns, seen):
    with mr.budget(256 * 264 * 3), use_plan(by_turns()):
        check_gradients(256, 1000, 264)
    written = [call for call in seen if call.kernel.name == "write_weights"]
    assert written and all("if met:" in call.kernel.text for call in written)
    assert {call.plan.block_folded for call in written} == {columns}


def vectors(dtype, sizes, D=264):
    return tuple(torch.zeros(n, D, dtype=dtype) for n in sizes)


@pytest.mark.parametrize(
    ("op", "make", "which"),
    [
        (contrastive, lambda t: vectors(t, (256, 256)), ["fold_over_cols", "fold_over_rows"]),
        (best, lambda t: vectors(t, (256, 256)), []),
        (drawn, lambda t: (*vectors(t, (256, 256)), 7), []),
        (lse, lambda t: (*vectors(t, (200, 256)), torch.zeros(256, dtype=t)), []),
        (head.total, lambda t: (*vectors(t, (128, 128)), torch.zeros(128, dtype=torch.int64)), ["write_guessed"]),
        (head.total, lambda t: (*vectors(t, (100, 128)), torch.zeros(100, dtype=torch.int64)), []),
    ],
    ids=["softmaxes", "argmax", "sample", "few rows", "a tile of rows", "less"],
)
def test_which_products_are_made_by_turns(op, make, which):
    found = [call.kernel.name for call in calls(Case("any", op, make), 90) if call.kernel.hand_scheduled]
    assert found == which
    assert not any(call.kernel.hand_scheduled for call in calls(Case("any", op, make), 80))


@pytest.mark.parametrize(
    ("op", "D", "version", "wide"),
    [
        (head, 776, (3, 6), True),
        (head, 512, (3, 6), False),
        (head, 776, (3, 9), False),
        (lse, 776, (3, 6), False),
    ],
    ids=["labels", "few features", "a later Triton", "a bias"],
)
def test_which_folds_have_wide_tiles(op, D, version, wide, monkeypatch):
    internals.pretend_triton_version(monkeypatch, version)
    other = torch.zeros(256, dtype=torch.int64 if op is head else torch.bfloat16)
    found = [call for call in calls(Case("any", op, lambda t: (*vectors(t, (256, 256), D), other)), 90)]
    assert [call.plan.block_folded for call in found if call.kernel.name == "fold_over_cols"] == [192 if wide else 128]


@pytest.mark.parametrize(
    ("D", "version", "columns"), [(3080, (3, 6), 192), (2048, (3, 6), 128), (3080, (3, 9), None), (2056, (3, 9), 128)]
)
def test_which_weights_have_wide_tiles(D, version, columns, monkeypatch):
    """By the compiler's schedule where a later Triton would spill, and narrow ones read too much."""
    internals.pretend_triton_version(monkeypatch, version)
    epilogue.fuse_epilogue.cache_clear()  # what was ready for another Triton
    label = torch.zeros(256, dtype=torch.int64)
    for op, name in ((head.total, "write_guessed"), (lambda *given: head(*given).sum(), "write_weights")):
        found = calls(Case("any", op, lambda t: (*vectors(t, (256, 512), D), label)), 90)
        (call,) = [call for call in found if call.kernel.name == name]
        assert (call.plan.block_folded if call.kernel.hand_scheduled else None) == columns
