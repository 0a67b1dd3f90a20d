"""Warp-specialised attention kernels: which folds get one, the kernel's text, and what it consumer.

They run on the CPU in ``tests/support/gluon_simulator.py``; ``test_aot_compile.py`` compiles them for a GPU, and
``tests/gpu`` runs the same cases there.
"""

import math
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

import monoidreduce as mr
from benchmarks.accuracy import DATA
from monoidreduce import Col, Row, ops
from monoidreduce.engines.triton import KernelPlan, Rendering, use_plan
from monoidreduce.engines.triton.launch import driver
from monoidreduce.engines.triton.schedules import attention
from monoidreduce.engines.triton.schedules.attention import AttentionSchedule
from tests.support import gluon_simulator, internals
from tests.support.aot_compile import CASES, Case, calls
from tests.support.golden_files import compare
from tests.support.warp_specialised_attention_cases import (
    BY_TURNS,
    CAPPED,
    SLANTED,
    check,
    check_nan,
    check_peaked,
    check_slanted,
    shipped,
)
from tests.support.warp_specialised_attention_cases import CASES as TRIED

DOCUMENTS = torch.arange(300) // 60
# What tests of the text itself run, whatever ships: changes of it below name its groups, its ring and its lines.
KNOWN = AttentionSchedule(widest=128, groups=2, folded=128, ring=2, registers=(232, 40))
BY_KNOWN = {"cols": KernelPlan(*KNOWN.tile, splits=1, rendering=Rendering.HAND_SCHEDULED)}
known_tile = pytest.mark.parametrize("by_turns", [KNOWN], ids=[""], indirect=True)


def described(**options):
    """The spec of an attention's forward."""
    seen, real = [], attention.write_kernel
    with mock.patch.object(attention, "write_kernel", lambda spec, *a, **k: seen.append(spec) or real(spec, *a, **k)):
        first(**options)
    return seen[0]


def first(dtype=torch.bfloat16, d=128, plans=BY_TURNS, capability=90, inputs=None, **options):
    """The kernel of an attention's forward."""

    def make(dtype):
        return inputs or tuple(torch.zeros(3, 300, d, dtype=dtype) for _ in range(3))

    case = Case("attention", lambda q, k, v: ops.attention(q, k, v, **options), make, dtype)
    return next(c for c in calls(case, capability, plans) if c.kernel.name != "side")  # not what words are made by


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (64, 0)},
        {"documents": DOCUMENTS, "causal": True},
        {"softcap": 20.0},
        {"dtype": torch.float16},
        {"dropout_p": 0.1, "seed": 3},
        {"alibi_slopes": torch.ones(3)},
        {"return_lse": True, "scale": 0.3},
        {"d": 72},
        {"d": 96, "causal": True},
        {"d": 256, "plans": {"cols": KernelPlan(*shipped(256).tile, splits=1, rendering=Rendering.HAND_SCHEDULED)}},
    ],
    ids=lambda o: ", ".join(f"{k}={v}" if k == "d" else k for k, v in o.items()) or "plain",
)
def test_one_softmax_weighted_sum_has_one(options):
    call = first(**options)
    assert call.kernel.hand_scheduled
    assert "warp_specialize" in call.kernel.text and "tl.dot(" not in call.kernel.text
    compile(call.kernel.text, "kernel", "exec")


@pytest.mark.parametrize(
    "options",
    [
        {"d": 64, "plans": {}},  # where no plan asks for it
        {"dtype": torch.float32},
        {"d": 256},
        {"inputs": tuple(torch.zeros(3, 128, 300, dtype=torch.bfloat16).mT for _ in range(3))},  # not to be copied
        {"capability": 80},
        {
            "plans": {"cols": KernelPlan(64, 128, 4, 2, splits=1, rendering=Rendering.HAND_SCHEDULED)}
        },  # tiles of another kernel
        {"plans": {"cols": KernelPlan(128, 128, 4, 2, splits=2, rendering=Rendering.HAND_SCHEDULED)}},  # in parts
    ],
    ids=lambda o: f"{next(iter(o))}={str(next(iter(o.values())))[:20]}",
)
def test_others_are_scheduled_by_the_compiler(options):
    assert not first(**options).kernel.hand_scheduled


def test_words_are_made_by_a_kernel_a_side_and_come_through_a_ring():
    case = Case(
        "dropout",
        lambda q, k, v: ops.attention(q, k, v, dropout_p=0.1, seed=3),
        lambda t: (torch.zeros(3, 300, 128, dtype=t),) * 3,
    )
    rows, cols, fold = calls(case, 90, BY_TURNS)[:3]
    assert (rows.kernel.name, cols.kernel.name, fold.kernel.hand_scheduled) == ("side", "side", True)
    consumer = fold.kernel.text.split("def consumer(")[1].split("# a weight was out of range")[0]
    assert "load_numbers(" in consumer and "drop_pairs(" in consumer
    assert consumer.count("tl.load(") == 2  # the rows' vectors and words


@mr.op
def over_rows(q: Row["f"], k: Col["f"], v: Row["d"]):
    return mr.softmax_mean(q @ k * 0.1, mr.dropout(v, 0.2, seed=3), over="rows")


def test_coins_are_tossed_two_at_once_where_columns_are_folded_and_even():
    """Two columns share a product; rows do not, nor does a last column alone."""
    drops = lambda q, k, v: ops.attention(q, k, v, dropout_p=0.2, seed=3)
    by_turns = {"cols": BY_TURNS["cols"], "rows": BY_TURNS["cols"]}

    def text(op, cols, name):
        sizes = (300, cols, cols if op is drops else 300)
        case = Case("drops", op, lambda t: tuple(torch.zeros(3, n, 128, dtype=t) for n in sizes))
        return next(c for c in calls(case, 90, by_turns) if c.kernel.name == name).kernel.text

    assert "drop_pairs(" in text(drops, 300, "fold_over_cols")
    assert "drop_pairs(" not in text(drops, 301, "fold_over_cols")
    assert "drop_pairs(" not in text(over_rows, 300, "fold_over_rows")


def test_a_row_of_queries_with_other_strides_has_one():
    q, k, v = (torch.zeros(2, 300, 384, dtype=torch.bfloat16).split(128, -1)[n] for n in range(3))
    assert first(inputs=(q, k, v)).kernel.hand_scheduled
    assert first(inputs=(q.mT.contiguous().mT, k, v)).kernel.hand_scheduled  # only what is met in tiles is copied


def test_the_text_of_a_staged_kernel():
    """Readable, complete, and the same in every process: change it knowingly."""
    (case,) = (c for c in CASES if c.name == "causal attention 128")
    text = calls(case, 90, BY_TURNS)[0].kernel.text
    compare("warp_specialised_attention", text)


def test_the_polynomial_is_tanh_as_far_as_it_reaches_and_rises_everywhere():
    gain, shift, base = first(softcap=20.0, scale=0.25).arguments[-3:]
    s = torch.linspace(-400, 400, 100001, dtype=torch.float64)
    logit = s * gain * ((s * s + shift) ** 2 + base) * math.log(2)
    assert (logit.diff() > 0).all()
    exact, near = 20 * torch.tanh(s / 80), s.abs() <= 64
    assert ((logit - exact).abs() <= 3.4e-4 * exact.abs() + 1e-12)[near].all()
    end = float(re.search(r"tl.minimum\(.* \* ([\d.]+), 64.0\)", first(softcap=20.0, scale=0.25).kernel.text)[1])
    assert 0.999 < end * 20 / min(logit[near].max(), exact[near].max()) < 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"alibi_slopes": torch.ones(3)}, 2),
        ({"alibi_slopes": torch.ones(3), "causal": True}, 2),
        ({"alibi_slopes": torch.ones(3), "causal": "lower_right"}, 0),  # rows have other indices than their own
        ({"alibi_slopes": torch.ones(3), "dtype": torch.float16}, 0),  # a maximum runs
        ({}, 0),
    ],
    ids=lambda o: ", ".join(map(str, o.values())) if isinstance(o, dict) else str(o),
)
def test_a_distance_is_a_line_in_whole_tiles(options, count, monkeypatch):
    """Said once, and used once: in the loop through whole tiles."""
    monkeypatch.setattr(attention, "SCHEDULES", (KNOWN,))
    inputs = tuple(torch.zeros(3, n, 128, dtype=options.get("dtype", torch.bfloat16)) for n in (300, 400, 400))
    text = first(inputs=inputs, plans=BY_KNOWN, **options).kernel.text
    assert text.count("alibi_line(") == count
    assert not count or "alibi_line(" in text.split("# whole tiles")[1].split("# tiles that a condition")[0]


@pytest.fixture
def by_turns(monkeypatch, request):
    """Attention's forward is warp-specialised and runs on the simulator, in the shipped tile, in the known one or
    in tiles of as many columns as the parameter says; checks at the end that one launch did."""
    asked = getattr(request, "param", None)
    plan = (BY_KNOWN if asked is KNOWN else BY_TURNS)["cols"]
    if asked is KNOWN:
        monkeypatch.setattr(attention, "SCHEDULES", (KNOWN,))
    elif asked:
        plan = replace(plan, block_folded=asked)
    seen = gluon_simulator.simulate(monkeypatch)
    with use_plan({"cols": plan}), mr.use(engine="triton"):
        yield
    assert len(seen) == 1


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", TRIED, ids=repr)
def test_against_float64(case, by_turns):
    check(case, "cpu")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CAPPED, ids=repr)
def test_soft_caps_against_float64(case, by_turns):
    check(case, "cpu")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", DATA)
def test_peaked_rows_are_as_exact_as_by_a_running_maximum(kind, causal, by_turns):
    check_peaked(kind, "cpu", causal=causal)


@pytest.mark.parametrize(
    ("length", "count", "tile"),
    [(4096, 64, shipped(128).tile), (4096, 8, shipped(128).tile), (64, 132, None)],
)
def test_it_is_taken_where_processors_are_busy(length, count, tile, monkeypatch):
    internals.pretend_device(monkeypatch, warp_specialised=True)
    monkeypatch.setattr(driver, "count_processors", lambda device: 132)
    for spec in (described(softcap=30.0), described()):
        assert attention.choose_tile(spec, torch.device("cpu"), length, count) == tile


@pytest.mark.sampled(3)
@pytest.mark.parametrize("by_turns", [64, None], ids=["64", "shipped"], indirect=True)
@pytest.mark.parametrize("name", SLANTED)
def test_lines_against_float64(name, by_turns):
    check_slanted(name, "cpu")


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}], ids=repr)
def test_nan_and_infinity_stay_in_their_rows(options, by_turns):
    check_nan("cpu", **options)


@known_tile
@pytest.mark.parametrize(
    ("text", "instead", "message"),
    [
        (r"phase \^ 1\)", "phase)", "nobody ends"),  # the copying warp waits before it begins
        (r"mbarrier.arrive\(x3_empty.index\(\(step - 1\) % 2\)\)", "pass", "nobody ends"),  # a block is not given back
        (r"score = warpgroup_mma_wait\(1, deps=\[score\]\)", "pass", "Product"),  # a product is not waited for
    ],
    ids=["phase", "arrival", "wait"],
)
def test_the_machine_sees_a_broken_turn(text, instead, message, by_turns, monkeypatch):
    """Else it would prove nothing."""
    gluon_simulator.change_kernels(monkeypatch, text, instead, patience=0.5)
    with pytest.raises((AssertionError, TypeError), match=message):
        check(TRIED[4], "cpu")


@known_tile
@pytest.mark.parametrize(
    ("name", "pattern", "instead"),
    [
        ("200x520 softcap", r"soft0_total \+= lanes\(soft0_weight\)(?=\n.*\n +else:)", "pass"),
        ("beyond, capped at 20", r"& \(in_polynomial_range\(.*? == 0\)\)", ""),
    ],
    ids=["it runs", "beyond"],
)
def test_a_polynomial_stands_in_for_tanh_where_its_total_is_looked_at(name, pattern, instead, by_turns, monkeypatch):
    (case,) = (c for c in TRIED if c.name == name)
    gluon_simulator.change_kernels(monkeypatch, pattern, instead)
    with pytest.raises(AssertionError):
        check(case, "cpu")


@pytest.mark.sampled(3)
@known_tile
@pytest.mark.parametrize(
    ("name", "pattern", "instead"),
    [
        ("from columns", r"nearest = .*", "nearest = 0"),
        ("parted", r"away - tl.where\(away < whole, 0, between\)", "away"),
        ("parted", r"tl.where\(start < tile \* KEPT, (\w+), -\1\)", r"\1"),
    ],
    ids=["nearest", "runs", "sides"],
)
def test_the_tile_on_both_sides_is_met_first(name, pattern, instead, by_turns, monkeypatch):
    """And the others by the side on which they lie: else a line would be wrong."""
    gluon_simulator.change_kernels(monkeypatch, pattern, instead)
    with pytest.raises(AssertionError):
        check_slanted(name, "cpu")
