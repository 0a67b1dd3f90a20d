"""The warp-specialised attention with another tile: everything follows from one value, of ``attention.SCHEDULES``."""

from dataclasses import replace

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engines.triton import KernelPlan, Rendering, use_plan
from monoidreduce.engines.triton.schedules import attention, kernel_plan
from monoidreduce.engines.triton.schedules.attention import AttentionSchedule
from tests.support import gluon_simulator
from tests.support.aot_compile import CASES as COMPILED
from tests.support.aot_compile import calls
from tests.support.warp_specialised_attention_cases import CASES, check

SCHEDULES = {
    "smaller blocks, deeper ring": AttentionSchedule(widest=128, groups=2, folded=64, ring=4, registers=(232, 40)),
    "three groups": AttentionSchedule(widest=128, groups=3, folded=64, ring=3, registers=(160, 160, 24)),
    "one group": AttentionSchedule(widest=128, groups=1, folded=128, ring=2, registers=(40,)),
} | {str(s.tile): s for s in attention.SCHEDULES if not s.runs_by_default and s.widest == 128}
TRIED = ["300x385", "385x300 causal", "300x300 causal, softcap", "300x600 alibi_slopes", "200x300 dropout_p, seed"]


@pytest.fixture(params=SCHEDULES.values(), ids=list(SCHEDULES))
def schedule(request, monkeypatch):
    attention.write_kernel.cache_clear()
    monkeypatch.setattr(attention, "SCHEDULES", (request.param,))
    yield request.param
    attention.write_kernel.cache_clear()


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", [c for c in CASES if c.name in TRIED], ids=repr)
def test_another_tile_by_one_value(case, schedule, monkeypatch, tmp_path):
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path))
    seen = gluon_simulator.simulate(monkeypatch)
    plan = KernelPlan(*schedule.tile, splits=1, rendering=Rendering.HAND_SCHEDULED)
    with mr.use(engine="triton"), use_plan({"cols": plan}):
        check(case, "cpu")
    assert seen and all(call.kernel.consumers == schedule.groups for call in seen)
    assert all(call.plan == plan for call in seen)
    assert {call.kernel.text.count("(consumer, (") for call in seen} == {schedule.groups}


NARROW = AttentionSchedule(widest=64, groups=3, folded=64, ring=4, registers=(160, 160, 24), above=64)


@pytest.fixture
def narrow(monkeypatch, tmp_path):
    """A tile for up to 64 features, which runs where a plan asks for it, and nowhere else."""
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path))
    attention.write_kernel.cache_clear()
    monkeypatch.setattr(attention, "SCHEDULES", (NARROW, *attention.SCHEDULES))
    yield {"cols": KernelPlan(*NARROW.tile, splits=1, rendering=Rendering.HAND_SCHEDULED)}
    attention.write_kernel.cache_clear()


def test_a_tile_that_runs_where_it_is_asked_for(narrow, monkeypatch):
    seen = gluon_simulator.simulate(monkeypatch)
    q, k, v = (torch.randn(1, 400, 64).bfloat16() for _ in range(3))
    with mr.use(engine="triton"):
        usual = ops.attention(q, k, v)
        assert not any(call.kernel.hand_scheduled for call in seen)
        with use_plan(narrow):
            found = ops.attention(q, k, v)
    assert [call.kernel.consumers for call in seen if call.kernel.hand_scheduled] == [3]
    torch.testing.assert_close(found.float(), usual.float(), rtol=2**-6, atol=2**-8)


def test_a_plan_for_a_kernel_that_there_is_not_says_so(narrow, monkeypatch):
    """In float32, for one."""
    gluon_simulator.simulate(monkeypatch)
    q, k, v = (torch.randn(1, 400, 64) for _ in range(3))
    with use_plan(narrow), mr.use(engine="triton"), pytest.warns(mr.FallbackWarning, match="192 × 64 pairs"):
        torch.testing.assert_close(ops.attention(q, k, v), (q @ k.mT / 8).softmax(-1) @ v)


@pytest.mark.parametrize("tables", [False, True])
def test_the_widths_of_each_schedule(tables):
    """The first that is wide enough runs, above the widths that the compiler's schedule is faster for."""
    schedules = [s for s in attention.SCHEDULES if s.runs_by_default]
    widths = [s.widest for s in schedules]
    for one, narrower in zip(schedules, (0, *widths), strict=False):
        assert max(one.above_with_tables if tables else one.above, narrower) < one.widest
    assert widths == sorted(widths)
    assert (schedules[0].above, schedules[0].above_with_tables, widths[-1]) == (64, 32, 256)


@pytest.mark.parametrize("first", [False, True])
def test_of_values_with_as_many_kept_indices_a_plan_gets_the_one_that_it_names(first, monkeypatch):
    """Whatever their order; by default, with tables too, the one that is for plans alone does not run."""
    default = attention.SCHEDULES[0]
    asked = replace(default, folded=64, ring=4, registers=(224, 40), above=128)
    seen, write = [], attention.write_kernel
    monkeypatch.setattr(attention, "write_kernel", lambda spec, *more: seen.append(spec) or write(spec, *more))
    calls(next(c for c in COMPILED if c.name == "relative attention 128"), 90)
    spec = next(spec for spec in seen if spec.fold.tables and attention.find_schedule(spec))
    monkeypatch.setattr(attention, "SCHEDULES", (asked, default) if first else (default, asked))
    assert attention.find_schedule(spec) == default
    assert attention.find_schedule(spec, asked.tile) == asked
    assert attention.find_schedule(spec, (128, 32, 4, 4)) == replace(default, folded=32, ring=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widest": 100}, "a multiple of 16 up to 256, not 100"),
        ({"widest": 272}, "a multiple of 16 up to 256, not 272"),
        ({"folded": 96}, "a power of two, at least 16, not 96"),
        ({"folded": 8}, "a power of two, at least 16, not 8"),
        ({"groups": 3}, "3 groups need 3 register counts"),
        ({"registers": (233, 41)}, "multiples of 8 from 24 to 256"),
        ({"registers": (240, 16)}, "multiples of 8 from 24 to 256"),
        ({"registers": (240, 240)}, "leave the first group 32 of 512 registers"),
        ({"groups": 1, "ring": 1, "registers": (40,)}, "at least 2 blocks"),
        ({"groups": 3, "registers": (160, 160, 24)}, "as many as there are groups .3."),
        ({"folded": 256}, "bytes of shared memory"),
        ({"ring": 3}, "233472 bytes of shared memory; an instance has 232448"),
    ],
    ids=str,
)
def test_a_schedule_that_cannot_run_says_why(change, message):
    fits = AttentionSchedule(widest=128, groups=2, folded=128, ring=2, registers=(232, 40))
    with pytest.raises(ValueError, match=message):
        replace(fits, **change)


def test_registers_at_the_start_follow_from_the_number_of_consumers():
    assert kernel_plan.limit_registers(2) == {"maxnreg": 168}
    assert kernel_plan.limit_registers(3) == {"maxnreg": 128}
    assert kernel_plan.limit_registers(0) == {}
