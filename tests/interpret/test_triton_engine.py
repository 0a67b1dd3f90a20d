"""The Triton engine in the interpreter: every layer of the zoo, ragged sizes, batches, strides, bounds, fallback.

Tiles are made small, so that small problems walk many ragged ones. Most 16-bit numbers are tried as float16: the
interpreter cuts bfloat16 off where a GPU rounds.
"""

import contextlib
import math
import os
import random
import stat
import threading
import warnings

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, autotune
from monoidreduce.engines import eager, triton
from monoidreduce.engines.common.evaluate import Sizes
from monoidreduce.engines.eager import tile_code
from monoidreduce.engines.triton import KernelPlan, use_plan
from monoidreduce.engines.triton.codegen import compiler, kernel_spec
from monoidreduce.engines.triton.kernels import fold_kernel as launch
from monoidreduce.engines.triton.launch import driver
from monoidreduce.errors import EngineError, FallbackWarning
from monoidreduce.program.expression import index
from monoidreduce.runtime import torch_operator
from tests.support import internals
from tests.support.comparison import assert_equal, assert_error_rule, cast, run
from tests.support.golden_files import compare
from tests.support.layers import BY_NAME, ZOO
from tests.support.random_programs import program_of

SMALL = KernelPlan(16, 32, 4, 1)
FALLS_BACK = [
    "biased_attention",
]  # a few that do
SLOW = {
    "grouped_query_attention",
    "maxsim",
    "chamfer",
}  # the interpreter folds pairs one by one, or batches by the dozen

# the interpreter computes both sides of a where, and NumPy tells of each infinity met there
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")


@contextlib.contextmanager
def kernels(plan=SMALL):
    with mr.use(engine="triton"), use_plan({"cols": plan, "rows": plan}):
        yield


@pytest.fixture(autouse=True, scope="module")
def private_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def draw(layer, M, N, seed, dtype=torch.float64):
    return layer.make(M, max(N, layer.least_cols), torch.Generator().manual_seed(seed), dtype)


def by_name(layers):
    return [pytest.param(layer, id=layer.name) for layer in layers]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layer", by_name(ZOO))
def test_float32_values_and_gradients(layer, seed):
    M, N = (17, 33) if layer.name in SLOW else (33, 70)
    trials = []
    for k in range(2):
        args = draw(layer, M, N, seed + k, torch.float32)
        with kernels():
            got = run(layer.op, args)
        trials.append((got, run(layer.dense, args), run(layer.dense, cast(args, torch.float64))))
    assert_error_rule(trials, factor=3.0)  # two small draws: the largest of few rounding errors is a matter of luck


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [(1, 1), (1, 65), (65, 1), (16, 32), (17, 31)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize(
    "name", ["causal_attention", "relu_mlp", "label_smoothing", "moments", "gaussian_kernel", "pooling"]
)
def test_ragged_sizes_in_float64(name, size, seed):
    args = draw(BY_NAME[name], *size, seed)
    with kernels():
        got = run(BY_NAME[name].op, args)
    assert_equal(got, run(BY_NAME[name].dense, args))


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k * 0.25, v)


def plain_attention(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


@pytest.mark.sampled(6)
@pytest.mark.parametrize("widths", [(16, 16), (59, 111), (9, 130), (8, 17), (256, 3)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=lambda d: str(d)[6:]
)
def test_feature_sizes(widths, dtype, seed):
    f, d = widths
    args = [torch.randn(n, w, dtype=torch.float64).to(dtype) for n, w in ((20, f), (37, f), (37, d))]
    with kernels():
        got = run(attention, args)
    truth = run(plain_attention, cast(args, torch.float64))
    if dtype is torch.float64:
        assert_equal(got, truth)
    else:
        assert_error_rule([(got, run(plain_attention, args), truth)], factor=3.0)


@pytest.mark.filterwarnings("error::monoidreduce.errors.FallbackWarning")
def test_more_features_than_registers_hold_go_by_panels(seed):
    args = [torch.randn(n, 300) for n in (5, 7, 7)]
    with kernels():
        got = attention(*args)
    torch.testing.assert_close(got, plain_attention(*args))


def test_batches_broadcast_and_strides_are_only_viewed(seed):
    q = torch.randn(3, 2, 20, 16, dtype=torch.float64).transpose(0, 1)[:, :, ::2]
    k = torch.randn(2, 1, 16, 37, dtype=torch.float64).mT
    v = torch.randn(37, 40, dtype=torch.float64)[:, 3:20]
    with kernels():
        got = run(attention, (q, k, v))
    assert_equal(got, run(plain_attention, (q, k, v)))


def test_random_numbers_are_those_of_the_table(seed):
    layer = BY_NAME["dropout_attention"]
    args = draw(layer, 33, 70, seed)
    with kernels():
        one = layer.op(*args)
    with kernels(KernelPlan(32, 16, 4, 1)):
        other = layer.op(*args)
    torch.testing.assert_close(one, layer.dense(*args))
    torch.testing.assert_close(one, other)


def test_results_repeat_exactly(seed):
    args = [torch.randn(n, 20) for n in (33, 70, 70)]
    with kernels():
        one, other = run(attention, args), run(attention, args)
    assert all(torch.equal(one.all()[n], other.all()[n]) for n in one.all())


@mr.op
def places(x: Row, y: Col):
    s = x * y
    return mr.max(s), mr.argmax(s), mr.argmin(s), mr.logsumexp(s)


def test_logarithms_are_exact_to_the_last_place():
    """A device's own may be off by four units; subnormals, infinities and NaN are as in torch."""

    @mr.op
    def logarithms(x: Row, y: Col):
        return mr.sum(torch.log(x * y)), mr.sum(torch.log1p(x * y))

    edges = torch.tensor([1e-40, 1e-45, 0.0, torch.inf, torch.nan, -1.0, 1e38, 1.0, 1 - 2**-24, 1 + 2**-23])
    x = torch.cat([torch.rand(500) * 4, torch.logspace(-30, 30, 99), edges])
    with mr.use(engine="triton"):
        found = logarithms(x, torch.ones(1))
    for got, function in zip(found, (torch.log, torch.log1p), strict=True):
        truth = function(x.double())
        places = (got.double() - truth).abs() / (truth.abs() * torch.finfo(torch.float32).eps)
        normal = truth.isfinite() & (truth.abs() > 1e-37)
        assert places[normal].max() < 1.0
        assert torch.equal(got[~normal].nan_to_num(nan=7.0), function(x)[~normal].nan_to_num(nan=7.0))


def test_ties_nothing_and_nan(seed):
    y = torch.tensor([1.0] * 40)
    x = torch.tensor([1.0, math.nan, -math.inf, 0.0])
    with kernels():
        top, best, least, z = places(x, y)
    assert best.tolist() == [0, 0, -1, 0] and least.tolist() == [0, 0, 0, 0]
    assert top[0] == 1 and top[1].isnan() and top[2] == -math.inf
    assert z[1].isnan() and z[2] == -math.inf and not z[0].isnan()


def test_nothing_to_fold():
    q, none = torch.randn(3, 20), torch.randn(0, 20)
    with kernels():
        assert torch.equal(attention(q, none, none), torch.zeros(3, 20))
        assert attention(none, q, q).shape == (0, 20)
        assert torch.equal(BY_NAME["causal_attention"].op(q, none, none), torch.zeros(3, 20))


# Bounds


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["causal_attention", "window_attention", "document_attention", "padded_attention", "prefix_attention"]
)
@pytest.mark.parametrize("over", ["cols", "rows"])
def test_bounds_agree_with_each_tile_taken_alone(name, over, seed):
    layer = BY_NAME[name]
    args = draw(layer, 70, 150, seed)
    found = []

    def spy(bounds, fold, over, values, lengths, blocks, device):
        edges = bounds(fold, over, values, lengths, blocks, device)
        found.append((fold, over, values, lengths, blocks, edges))
        return edges

    with pytest.MonkeyPatch.context() as patch, kernels():
        internals.watch_tile_ranges(patch, spy)
        internals.forget_tile_ranges(patch)
        internals.forget_launches(patch)  # a launch keeps what indices alone decide
        run(layer.op, args)
    checked = 0
    for fold, which, values, lengths, blocks, edges in found:
        if which != over:
            continue
        for b in range(edges.shape[0]):
            for t in range(edges.shape[1]):
                places = edges[b, t].tolist()
                assert places == sorted(places) and places[0] >= 0 and places[-1] <= -(-lengths[1] // blocks[1])
                first, whole_first, whole_last, again_first, again_last, last = places
                for f in range(-(-lengths[1] // blocks[1])):
                    known = _ranges(fold, which, values, lengths, blocks, b, t, f)
                    truths = {c: tile_code.interval(c, dict(known)) for c in kernel_spec.whole_tile_conditions(fold)}
                    if whole_first <= f < whole_last or again_first <= f < again_last:
                        assert all(
                            truths[c] == (float(want),) * 2
                            for c, want in kernel_spec.whole_tile_conditions(fold).items()
                        )
                    if not first <= f < last:
                        assert any(truths[c] == (0.0, 0.0) for c in truths)
                    checked += 1
    assert checked


@mr.op
def converted(q: Row["f"], k: Col["f"], v: Col["d"]):
    half = mr.col_index.float() * 0.5  # indices as numbers, and back
    seen = (half <= mr.row_index.float()) & (half.int() + 3 < mr.num_cols // 2)
    return mr.softmax_mean(torch.where(seen, q @ k, -torch.inf), v)


def test_conditions_on_converted_indices(seed):
    q, k, v = (torch.randn(n, 16, dtype=torch.float64) for n in (40, 90, 90))
    with kernels(KernelPlan(16, 16, 4, 1)):
        found = run(converted, (q, k, v))
    with mr.use(engine="reference"):
        assert_equal(found, run(converted, (q, k, v)))


@pytest.mark.parametrize("name", ["causal_attention", "document_attention"])
def test_what_the_operator_remembers_is_made_in_another_thread(name, monkeypatch):
    """And is the same."""
    layer, threads, here = BY_NAME[name], [], threading.get_ident()
    internals.watch_tile_ranges(
        monkeypatch, lambda bounds, *given: threads.append(threading.get_ident()) or bounds(*given)
    )

    def folded(run_fold):
        internals.forget_tile_ranges(monkeypatch)
        internals.forget_launches(monkeypatch)
        threads.clear()
        return [t for call in folds for t in run_fold(*call)]

    with kernels():
        folds = autotune.record_call(layer.op, draw(layer, 70, 150, 0), {}, backward=True).folds
        wanted = folded(triton.run)
        assert threads and set(threads) == {here}
        found = folded(lambda fold, *given: torch_operator.call(fold, "triton", *given))
        assert threads and here not in threads
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def _ranges(fold, over, values, lengths, blocks, b, t, f):
    def span(axis, at):
        return at * blocks[axis], min((at + 1) * blocks[axis], lengths[axis])

    kept, folded = span(0, t), span(1, f)
    rows, cols = (kept, folded) if over == "cols" else (folded, kept)
    known = {index("row"): (rows[0], rows[1] - 1), index("col"): (cols[0], cols[1] - 1)}
    for e, v in values.items():
        if not isinstance(v, torch.Tensor):
            known[e] = (float(v),) * 2
        elif not e.rows and not e.cols:
            known[e] = (float(v[b if v.shape[0] > 1 else 0]),) * 2
        else:
            part = v[b if v.shape[0] > 1 else 0, slice(*(rows if e.rows else cols))].double()
            known[e] = (part.min().item(), part.max().item())
    return known


def test_idle_tiles_are_not_visited(seed):
    """NaN in values that no row may see: a kernel that visited the tile would mix it in."""
    layer = BY_NAME["window_attention"]
    q, k, v = (torch.randn(n, 20) for n in (32, 320, 320))
    v[100:] = math.nan
    with kernels():
        assert not layer.op(q, k, v, 7).isnan().any()


# Text and files


def test_the_text_of_a_kernel():
    """Readable, complete, and the same in every process: change it knowingly."""
    compare("causal_attention", _spec_and_text(BY_NAME["causal_attention"].op, 20)[1])


def test_every_pass_of_the_compiler_can_be_printed():
    spec, text = _spec_and_text(BY_NAME["causal_attention"].op, 20)
    shown = str(compiler.run_passes(spec))
    names = ("spec", "conditions", "tile range", "loops", "results", "accumulators", "invariants", "kernel")
    places = [shown.index(f"== {name} ==") for name in names]
    assert places == sorted(places) and shown.endswith(text.rstrip("\n"))


def _spec_and_text(op, f):
    q, k, v = (torch.randn(n, f) for n in (16, 32, 32))
    fold = op.program(q, k, v).passes[0].fold
    sizes = Sizes(16, 32, (), {"f": f, "d": f}, torch.device("cpu"), torch.float32)
    values = dict(zip(fold.leaves, (t.unsqueeze(0) for t in (q, k, v)), strict=True))
    spec, _ = launch.spec_from_tensors.describe_fold(fold, "cols", values, (1,), sizes)
    return spec, compiler.compile_fold(spec).text


def test_kernels_lie_in_a_private_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path / "new"))
    path = driver.write_text("x = 1\n")
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
    path.write_text("x = 2\n")  # whatever the file holds, the text given runs
    assert driver.load_module("x = 1\n").x == 1 and path.read_text() == "x = 1\n"


# Choice and fallback


@pytest.mark.parametrize("name", FALLS_BACK)
def test_what_has_no_kernel_falls_back_and_says_so(name, seed):
    args = draw(BY_NAME[name], 9, 12, seed)
    triton.engine._warned.clear()
    with kernels(), pytest.warns(FallbackWarning, match="no kernel"):
        BY_NAME[name].op(*args)


def has_no_kernel(layer, args):
    """Whether a layer has a top-k or numbers given per pair."""
    if any(p.axis == "pairs" for p in layer.parameters):
        return True
    reductions = [r for p in layer.op.program(*args).passes for r in p.fold.reductions]
    return any(r.attrs[0] == "topk" for r in reductions)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layer", by_name(ZOO))
def test_nothing_else_falls_back(layer, seed, monkeypatch):
    args = draw(layer, 9, 12, seed)
    if has_no_kernel(layer, args):
        return
    internals.replace_launch(monkeypatch, lambda launch, call: None)
    triton.engine._warned.clear()
    with kernels(), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        run(layer.op, args)


def test_without_the_interpreter_a_cpu_tensor_falls_back(monkeypatch, seed):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    triton.engine._warned.clear()
    with kernels(), pytest.warns(FallbackWarning, match="on a CPU"):
        attention(*(torch.randn(3, 4) for _ in range(3)))


def test_without_fallback_it_raises(seed):
    @mr.op
    def many(x: Row["d"], y: Col["d"]):
        return mr.sum(torch.polygamma(3, x @ y))

    x, y = torch.rand(3, 4), torch.rand(80, 4)
    fold = many.program(x, y).passes[0].fold
    with pytest.raises(EngineError, match="polygamma has no Triton text"):
        triton.run(fold, [x, y], Sizes(3, 80, (), {"d": 4}, torch.device("cpu"), torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(4))
def test_random_programs(shard, monkeypatch):
    """Values, gradients and gradients of gradients of random programs against the reference engine, in float64."""

    def run_or_fall_back(fold, leaves, sizes):
        return triton.run(fold, leaves, sizes, fallback=eager.run)

    internals.replace_eager_engine(monkeypatch, run_or_fall_back)  # the engine that programs are checked by
    tiny = KernelPlan(16, 16, 4, 1)
    with use_plan({"cols": tiny, "rows": tiny}):
        for k in range(10):
            program_of(random.Random(100 * shard + k).randbytes(100)).check()


@pytest.mark.parametrize(
    ("name", "dtype", "exact"),
    [
        ("key_temperature_attention", torch.float32, True),
        ("key_temperature_attention", torch.bfloat16, False),  # as exact as 16 bits are
        ("cauchy_kernel", torch.float32, True),
        ("softcap_attention", torch.float32, False),  # by one number for all pairs
    ],
)
def test_float32_is_divided_exactly_where_the_divisor_differs(name, dtype, exact, seed, monkeypatch):
    internals.forget_launches(monkeypatch)
    texts = internals.watch_launches(monkeypatch, lambda call: call.kernel.text)
    with mr.use(engine="triton"):
        BY_NAME[name].op(*BY_NAME[name].args(5, 9, seed, dtype))
    assert texts and any("tl.div_rn(" in text for text in texts) == exact
