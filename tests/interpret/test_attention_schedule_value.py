"""The warp-specialised attention with another tile: everything follows from one value, of ``attention.SCHEDULES``."""

from dataclasses import replace

import pytest

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, Rendering, use_plan
from monoidreduce.engines.triton.schedules import kernel_plan
from monoidreduce.engines.triton.schedules.resident import attention
from monoidreduce.engines.triton.schedules.resident.attention import AttentionSchedule
from tests.support import gluon_simulator
from tests.support.warp_specialised_attention_cases import CASES, check

SCHEDULES = {
    "smaller blocks, deeper ring": AttentionSchedule(widest=128, groups=2, folded=64, ring=4, registers=(232, 40)),
    "three groups": AttentionSchedule(widest=128, groups=3, folded=64, ring=3, registers=(160, 160, 24)),
    "one group": AttentionSchedule(widest=128, groups=1, folded=128, ring=2, registers=(40,)),
}
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
