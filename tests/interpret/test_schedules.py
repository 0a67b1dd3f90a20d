"""One program under different schedules: split columns, guessed maxima, tensor descriptors, top-k, label gathers, and
launches that are prepared once. In the interpreter, with small tiles."""

import math
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, autotune
from monoidreduce.engines import triton as engine
from monoidreduce.engines.common.evaluate import Sizes
from monoidreduce.engines.triton import KernelPlan, Rendering, use_plan
from monoidreduce.engines.triton.codegen import compiler
from monoidreduce.engines.triton.schedules import kernel_plan
from monoidreduce.errors import EngineError
from monoidreduce.reductions import softmax
from monoidreduce.runtime import dispatch, torch_operator
from tests.support import internals
from tests.support.comparison import assert_equal, assert_error_rule, run
from tests.support.layers import BY_NAME

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SMALL = KernelPlan(16, 16, 4, 1)


@pytest.fixture(autouse=True)
def private_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path))


def planned(splits=1):
    return use_plan(dict.fromkeys(("cols", "rows"), replace(SMALL, splits=splits)))


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"], scale: float):
    return mr.softmax_mean(q @ k * scale, v)


@mr.op
def causal(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k * 0.3, -torch.inf), v)


@mr.op
def contrastive(x: Row["d"], y: Col["d"]):
    s = x @ y * 1.5
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0))


@mr.op
def cross_entropy(x: Row["d"], target: Row, w: Col["d"]):
    s = x @ w * 1.5
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))


SPLIT = [
    "causal_attention",
    "cross_entropy",
    "gaussian_kernel",
    "entropy_and_its_variance",
    "pooling",
    "maxsim",
    "nearest_neighbours",
]


def test_several_kernels_of_a_direction_keep_their_tiles_in_other_parts(monkeypatch):
    """A plan has room for one tile: that of the last kernel stands for each one's own, another is for all of them."""
    x, *weights = (torch.zeros(64, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
    with planned(), mr.use(engine="triton"):
        *_, (fold, leaves, sizes) = autotune.record_call(BY_NAME["swiglu"].op, [x, *weights], {}, backward=True).folds
    internals.pretend_device(monkeypatch, descriptors=True)
    internals.set_pair_thresholds(monkeypatch, very_many=0)
    monkeypatch.setitem(kernel_plan.COPIED, (128, 2, "plain"), (64, 32, 4, 2))

    def columns(asked=None):
        with use_plan({} if asked is None else {"rows": asked}):
            return [one for one in engine.PreparedFold(fold, leaves, sizes).launches if one.over == "rows"]

    own = [one.plan for one in columns()]
    assert len(set(own)) == len(own) == 2
    shown = engine.list_tiles(fold, leaves, sizes)["rows"]
    cut = columns(replace(KernelPlan(*shown), splits=2))
    assert [one.plan for one in cut] == [replace(p, splits=2) for p in own]
    assert {one.plan for one in columns(SMALL)} == {SMALL}


@pytest.mark.parametrize("size", [(1, 1), (59, 111), (65, 127), (32, 48)], ids=str)
def test_a_gated_row_gradient_multiplies_before_it_adds(size):
    """What is added to a sum would be waited for with the next product; whole tiles and ragged ones give the same."""
    layer, gen = BY_NAME["swiglu"], torch.Generator().manual_seed(7)
    exact = [torch.randn(n, 32, generator=gen, dtype=torch.float64) for n in (size[0], *[size[1]] * 3)]
    args = [a.half() for a in exact]
    with (
        use_plan(dict.fromkeys(("cols", "rows"), replace(SMALL, rendering=Rendering.DESCRIPTORS))),
        mr.use(engine="triton"),
    ):
        got = run(layer.op, args)
    *_, ready = engine.prepared_folds().values()
    (text,) = (one.kernel.text for one in ready.launches if one.over == "cols")
    whole = text.split("for t in range(")[1]
    assert whole.count("sum0 = tl.dot(") == 2 and "tl.trans(" not in whole.split("sum0 = tl.dot(", 1)[1]
    truth, plain = (run(layer.dense, given) for given in ([a.double() for a in args], args))
    assert_error_rule([(got, plain, truth)])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("name", SPLIT)
def test_a_split_walk_gives_the_whole(name, splits):
    layer = BY_NAME[name]
    args = layer.make(19, 85, torch.Generator().manual_seed(3), torch.float64)
    with planned(splits), mr.use(engine="triton"):
        got = run(layer.op, args)
    with mr.use(engine="eager"):
        assert_equal(got, run(layer.op, args), rtol=1e-9, atol=1e-9)


def test_few_rows_are_split_and_many_are_not():
    assert kernel_plan.count_splits(SMALL, instances=2, tiles=1000, processors=132) == 64
    assert kernel_plan.count_splits(SMALL, instances=20, tiles=1000, processors=132) == 13
    assert kernel_plan.count_splits(SMALL, instances=2, tiles=9, processors=132) == 1
    assert kernel_plan.count_splits(SMALL, instances=100, tiles=1000, processors=132) == 1


@mr.op
def capped(q: Row["f"], k: Col["f"], v: Col["d"], cap: Row):
    return mr.softmax_mean(cap * torch.tanh(q @ k * 0.01), v), mr.sum((q @ k) * v), mr.max(q @ k)


@mr.op
def sloped(q: Row["f"], k: Col["f"], v: Col["d"], slope: float):
    distance = (mr.row_index - mr.col_index).abs()
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index + 9, q @ k * 0.3 - slope * distance, -torch.inf), v)


def _close(op, args, extra, bound):
    """Values and gradients of 16-bit kernels beside float64."""
    out = op(*args, *extra)
    values = [v for v in (out if isinstance(out, tuple) else (out,)) if v.requires_grad]
    gen = torch.Generator().manual_seed(9)
    cotangents = [torch.randn(v.shape, generator=gen).to(v.dtype) for v in values]
    got = [*values, *torch.autograd.grad(values, args, cotangents)]
    wide = [a.detach().double().requires_grad_() for a in args]
    with mr.use(engine="eager"):
        out = op(*wide, *extra)
        exact = [v for v in (out if isinstance(out, tuple) else (out,)) if v.requires_grad]
        exact += torch.autograd.grad(exact, wide, [c.double() for c in cotangents])
    for a, b in zip(got, exact, strict=True):
        assert (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [1.0, 60.0], ids=["near", "far"])
@pytest.mark.parametrize(
    ("op", "splits", "boxes"),
    [
        *((attention, 1, False), (attention, 3, True), (causal, 3, False), (causal, 1, True), (capped, 1, True)),
        *((sloped, 1, True), (sloped, 3, False)),
    ],
    ids=[
        *("full, loads", "full, split, boxes", "causal, split, loads", "causal, boxes", "capped, boxes"),
        *("sloped, boxes", "sloped, split, loads"),
    ],
)
def test_a_guessed_maximum(op, size, splits, boxes, monkeypatch):
    """Where later logits are far above those of the first tile, the guess is given up: here 15 powers of two,
    where float16 ends: the interpreter cuts bfloat16 off, which these gradients cannot bear."""
    internals.guess_maximum_for(monkeypatch, torch.float16)
    monkeypatch.setattr(softmax, "_MOST", 2.0**14)
    monkeypatch.setattr(softmax, "_ABOVE", 0)
    internals.forget_launches(monkeypatch)
    compiler.compile_fold.cache_clear()
    gen = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 70, 32, generator=gen) for _ in range(3))
    k = k + torch.linspace(0, 1, 70)[:, None] * (size > 1)  # later columns lie higher, for rows that look that way
    args = [t.half().requires_grad_() for t in (q.abs() * size**0.5 * 0.3, k * size**0.5, v)]
    extra = {attention: (0.25,), sloped: (size / 20,)}.get(op, ())
    args += [(10 + torch.arange(70.0) / 7).half().requires_grad_()] if op is capped else []
    plans = dict.fromkeys(("cols", "rows"), replace(SMALL, splits=splits, rendering=Rendering(boxes)))
    with use_plan(plans), mr.use(engine="triton"), monkeypatch.context() as patch:
        seen = internals.watch_generated_kernels(patch)
        # a cap's gradient nearly cancels: 1.9e-2 to 2.1e-2, as NumPy rounds powers on this CPU or that
        _close(op, args, extra, 2.5e-2 if op is capped else 4e-3)
    texts = [kernel.text for kernel in seen]
    assert any("near = " in text for text in texts)
    assert any("_box.load" in text for text in texts) == boxes
    assert any("_late + 0.0" in text for text in texts) == boxes
    compiler.compile_fold.cache_clear()


@pytest.mark.parametrize("shape", ["heads", "grouped", "strided", "ragged", "empty"])
def test_boxes_whatever_the_strides(shape):
    """Boxes for leaves whose strides allow them, loads for the others, and the same numbers."""
    gen = torch.Generator().manual_seed(6)
    make = lambda *s: torch.randn(*s, generator=gen).half()
    q, k, v = (make(2, 3, 37, 32) for _ in range(3))
    if shape == "grouped":
        k, v = (make(2, 1, 50, 32).expand(2, 3, 50, 32) for _ in range(2))
    elif shape == "strided":
        k, v = make(2, 50, 3, 32).transpose(1, 2), make(2, 3, 32, 50).mT
    elif shape == "ragged":
        k, v = make(2, 3, 33, 33)[..., :32], make(2, 3, 33, 20)
    elif shape == "empty":
        k, v = make(2, 3, 0, 32), make(2, 3, 0, 32)
    args = [t.requires_grad_() for t in (q, k, v)]
    with (
        use_plan(dict.fromkeys(("cols", "rows"), replace(SMALL, rendering=Rendering.DESCRIPTORS))),
        mr.use(engine="triton"),
    ):
        _close(attention, args, (0.2,), 4e-3)


@pytest.mark.parametrize("length", [48, 50])
@pytest.mark.parametrize("options", ["documents", "dropout"])
def test_numbers_have_boxes(options, length, monkeypatch):
    """Those along the folded axis, and the shifts of exponents where their rows begin on 16 bytes."""
    internals.set_pair_thresholds(monkeypatch, many=0)
    internals.forget_launches(monkeypatch)
    gen = torch.Generator().manual_seed(8)
    args = [torch.randn(2, 3, length, 32, generator=gen).half().requires_grad_() for _ in range(3)]
    documents = torch.arange(length) // 11
    given = {"documents": dict(documents=documents, causal=True), "dropout": dict(dropout_p=0.3, seed=5)}[options]
    plans = dict.fromkeys(("cols", "rows"), replace(SMALL, rendering=Rendering.DESCRIPTORS))
    with use_plan(plans), mr.use(engine="triton"), monkeypatch.context() as patch:
        seen = internals.watch_generated_kernels(patch)
        _close(lambda *a: mr.ops.attention(*a, **given), args, (), 4e-3)
    texts = "".join(kernel.text for kernel in seen)
    assert ("shift0_box.load" in texts) == (length % 4 == 0)
    boxed = re.search(r"x\d+ = .*_box\.load\(\[.*start\]\)", texts) is not None
    assert boxed == (length % 4 == 0)  # documents, and the words of columns, have no batch and no box


@pytest.mark.parametrize("splits", [1, 3])
def test_picks_are_computed_where_they_point(splits):
    gen = torch.Generator().manual_seed(7)
    x, y = (torch.randn(2, 60, 24, generator=gen).half() for _ in range(2))
    target = torch.randint(-3, 64, (2, 60), generator=gen)  # some beyond both ends: they pick nothing
    for op, args in ((contrastive, (x, y)), (cross_entropy, (x, target, y))):
        with planned(splits), mr.use(engine="triton"):
            got = op(*args)
        with mr.use(engine="eager"):
            exact = op(*(a.double() if a.is_floating_point() else a for a in args))
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


@mr.op
def best(x: Row["d"], y: Col["d"], b: Col):
    return mr.topk(x @ y + b, 12)


@mr.op
def nearest(x: Row["d"], y: Col["d"]):
    return mr.topk(mr.sqdist(x, y), 5, largest=False)


@pytest.mark.parametrize(("dtype", "splits"), [(torch.float32, 3), (torch.float64, 1)])
@pytest.mark.filterwarnings("error::monoidreduce.errors.FallbackWarning")
def test_the_k_best_in_a_kernel(dtype, splits):
    gen = torch.Generator().manual_seed(9)
    x, y = (torch.randn(2, n, 3, generator=gen, dtype=dtype) for n in (33, 150))
    b = torch.randn(150, generator=gen, dtype=dtype)
    b[3], b[100:] = math.nan, -math.inf
    for op, args in ((best, (x, y, b)), (nearest, (x, y))):
        with planned(splits), mr.use(engine="triton"):
            got = op(*args)
        with mr.use(engine="eager"):
            exact = op(*args)
        torch.testing.assert_close(got[0], exact[0], equal_nan=True)
        assert torch.equal(got[1], exact[1])


def test_a_launch_is_made_once_and_takes_other_tensors(monkeypatch):
    internals.forget_launches(monkeypatch)
    gen = torch.Generator().manual_seed(11)
    draw = lambda: [torch.randn(40, 16, generator=gen) for _ in range(3)]
    with planned(), mr.use(engine="triton"):
        first = draw()
        attention(*first, 0.5)
        with mock.patch.object(engine, "PreparedFold", side_effect=AssertionError("planned again")):
            again = draw()
            got = attention(*again, 0.7)
    expected = torch.softmax(again[0] @ again[1].mT * 0.7, -1) @ again[2]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_the_operator_gives_what_it_tells_a_compiler():
    """16-bit vectors of a kernel are raised there: a graph is told one type for every engine."""
    args = [torch.randn(2, 20, 16).half() for _ in range(3)]
    fold = causal.program(*args).passes[0].fold
    sizes = Sizes(20, 20, (2,), {"f": 16, "d": 16}, torch.device("cpu"), torch.float32)
    given = []
    with mock.patch.object(torch.ops.monoidreduce, "fold", lambda *a: given.append(a) or []):
        torch_operator.call(fold, "triton", args, sizes)
    with planned():
        straight = dispatch.FOLDERS["triton"](fold, args, sizes)
        torch.library.opcheck(torch.ops.monoidreduce.fold.default, given[0], test_utils="test_faketensor")
    assert torch.float16 in [t.dtype for t in straight]  # else there was nothing to raise


def test_a_smaller_plan_has_bounds_of_its_own(monkeypatch):
    """A kernel that does not fit is planned anew with other tiles: what was found for the first ones is not theirs."""
    layer = BY_NAME["document_attention"]
    args = layer.make(90, 90, torch.Generator().manual_seed(13), torch.float64)
    failed = []

    class OutOfResources(Exception):
        pass

    def once(launch, call):
        if call.kernel.name != "side" and call.kernel.text not in failed:
            failed.append(call.kernel.text)
            raise OutOfResources
        return launch(call)

    internals.replace_launch(monkeypatch, once)
    internals.forget_launches(monkeypatch)
    large = dict.fromkeys(("cols", "rows"), KernelPlan(16, 64, 4, 1))
    with use_plan(large), mr.use(engine="triton"):
        got = run(layer.op, args)
    assert failed
    with mr.use(engine="eager"):
        assert_equal(got, run(layer.op, args), rtol=1e-9, atol=1e-9)


def test_an_unaligned_tensor_is_planned_anew(monkeypatch):
    internals.forget_launches(monkeypatch)
    flat = torch.randn(40 * 16 + 1)
    q, k, v = flat[:-1].view(40, 16), flat[1:].view(40, 16), flat[:-1].view(40, 16)
    with planned(), mr.use(engine="triton"):
        attention(q, q, v, 0.5)
        attention(q, k, v, 0.5)
        assert len(engine.prepared_folds()) == 2


def test_strict_refuses_what_has_no_kernel():
    @mr.op
    def many(x: Row["d"], y: Col["d"]):
        return mr.sum(torch.polygamma(3, x @ y))

    x, y = torch.rand(3, 4), torch.rand(80, 4)
    with mr.use(engine="triton", strict=True), pytest.raises(EngineError, match="polygamma has no Triton text"):
        many(x, y)
    with mr.use(engine="triton"), pytest.warns(mr.errors.FallbackWarning, match="polygamma has no Triton text"):
        many(x, y)


def test_precisions(monkeypatch):
    internals.forget_launches(monkeypatch)
    with pytest.raises(EngineError, match="ieee, tf32, tf32x3"), mr.use(precision="double"):
        pass
    x = [torch.randn(20, 16) for _ in range(3)]
    with planned():
        for precision in ("ieee", "tf32", "tf32x3"):
            with mr.use(engine="triton", precision=precision):
                attention(*x, 0.5)
        assert len(engine.prepared_folds()) == 3


def test_tiles_are_cut_where_numbers_of_pairs_would_not_fit_in_registers():
    text = "v0 = dot\nv1 = cos(v0)\nv2 = sin(v0)\nsum += v1 * v2\nv3 = dot\nsum += v3"
    assert compiler.count_held(text, {"v0", "v1", "v2", "v3"}) == 2
    assert compiler.count_held(text, set()) == 0
    widths = compiler.BlockWidths(kept=128, kept_blocks=1, folded=128, state=128)
    cut = {}
    for held in (3, 4, 100):
        traits = compiler.Traits(held_pairs=held)
        kernel = compiler.Kernel("fold_over_cols", "", (), widths=widths, traits=traits)
        cut[held] = kernel_plan.choose_plan(kernel, "cols", 2, copies=True).block_folded
    assert cut == {3: 128, 4: 64, 100: 64}


@pytest.mark.parametrize(
    ("shape", "guesses", "staged"),
    [
        ((64, 16, 128, 64), False, False),
        ((64, 16, 257, 64), True, False),
        ((64, 16, 128, 128), False, False),
        ((64, 16, 256, 128), True, True),
        ((2, 16, 128, 64), True, False),  # few pairs: nothing to gain
    ],
)
def test_short_loops_have_a_running_maximum(shape, guesses, staged, monkeypatch):
    internals.forget_launches(monkeypatch)
    internals.pretend_device(monkeypatch, descriptors=True, warp_specialised=True)
    found = internals.collect_launches(monkeypatch)
    with mr.use(engine="triton"), torch.no_grad():
        attention(*(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3)), 0.125)
    assert [(call.kernel.traits.guesses, call.kernel.hand_scheduled) for call in found] == [(guesses, staged)]


def test_quotients_by_whole_numbers_are_products(monkeypatch):
    @mr.op
    def gates(x: Row["d"], y: Col["d"]):
        return mr.sum(torch.nn.functional.hardswish(x @ y))

    internals.forget_launches(monkeypatch)
    found = internals.collect_launches(monkeypatch)
    with mr.use(engine="triton"), torch.no_grad():
        gates(*(torch.zeros(64, 16, dtype=torch.bfloat16) for _ in range(2)))
    (text,) = (call.kernel.text for call in found)
    assert f" * {1 / 6}" in text and " / 6" not in text


@pytest.mark.parametrize(("causal", "length"), [(False, 100), (True, 128), (True, 300)])
def test_short_softmaxes_have_a_running_maximum(causal, length, monkeypatch):
    internals.guess_maximum_for(monkeypatch, torch.float16)
    monkeypatch.setattr("monoidreduce.engines.triton.schedules.spec_from_tensors._SHORT_PAIRS", 0)
    internals.pretend_device(monkeypatch, descriptors=True)
    internals.forget_launches(monkeypatch)
    texts = []
    internals.replace_launch(monkeypatch, lambda launch, call: texts.append(call.kernel.text) or launch(call))
    gen = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, length, 64, generator=gen).half() for _ in range(3))
    with mr.use(engine="triton"):
        found = mr.ops.attention(q, k, v, is_causal=causal)
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), is_causal=causal)
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)
    (text,) = texts
    assert "stands in for the running one" not in text  # no maximum is guessed
    assert (".load([" in text) == causal  # descriptors copy what a condition cuts


@mr.op
def waves(x: Row["d"], y: Col["d"]):
    return mr.sum(torch.cos(x @ y))


@mr.op
def crowded_waves(x: Row["d"], y: Col["d"], b: Col):
    return mr.logsumexp(torch.cos(torch.nn.functional.softsign(x @ y + b)))


def test_a_cosine_shares_lines_with_a_sine_where_registers_allow(monkeypatch):
    internals.forget_launches(monkeypatch)
    internals.pretend_device(monkeypatch, tanh=True)
    found = internals.collect_launches(monkeypatch)
    x, y, b = (torch.zeros(s, dtype=torch.float16, requires_grad=True) for s in ((70, 128), (80, 128), (80,)))
    texts = []
    for op, args in ((waves, (x, y)), (crowded_waves, (x, y, b))):
        found.clear()
        with mr.use(engine="triton"):
            torch.autograd.grad(op(*args).sum(), args)
        texts.append("".join(call.kernel.text for call in found))
    assert "native_sin(" in texts[0] and "cos_apart(" not in texts[0]
    assert "native_sin(" in texts[1] and "native_cos_apart(v" in texts[1]
