"""Folds as generated C++, against the reference engine in float64: layers, extremes, layouts, threads, the cache."""

import ctypes
import functools
import math
import os
import subprocess
import sys
import warnings
from typing import no_type_check

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Pair, Row
from monoidreduce.engines.eager import cpp
from monoidreduce.engines.eager.cpp import compiled_fold, compiler, primitive_text, support, variants

pytestmark = pytest.mark.skipif(
    compiler.current_compiler() is None or compiler.gemm_addresses() is None, reason="no C++ compiler, or no BLAS"
)
R = torch.randn


@pytest.fixture(autouse=True)
def at_any_size(monkeypatch):
    monkeypatch.setenv("MONOIDREDUCE_CPP", "always")


@pytest.fixture
def ran(monkeypatch):
    """The folds that ran as C++ (True) or were handed on (False)."""
    found, run = [], cpp.run

    def watched(*args, **kwargs):
        result = run(*args, **kwargs)
        found.append(result is not None)
        return result

    monkeypatch.setattr(cpp, "run", watched)
    return found


def results(layer, given, engine):
    given = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in given]
    with mr.use(engine=engine):
        outputs = layer(*given)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    total = sum(
        (x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in outputs if x.requires_grad
    )
    wanted = [t for t in given if t.is_floating_point()]
    gradients = torch.autograd.grad(total, wanted, allow_unused=True) if isinstance(total, torch.Tensor) else []
    return outputs + [g for g in gradients if g is not None]


def check(layer, *given, tolerance=4e-6):
    """Values and gradients as the reference engine has them in float64."""
    wide = [t.double() if t.is_floating_point() else t for t in given]
    for found, truth in zip(results(layer, given, "eager"), results(layer, wide, "reference"), strict=True):
        if not found.is_floating_point():
            assert torch.equal(found, truth)
            continue
        known = truth.isfinite()
        assert torch.equal(found.isfinite(), known)
        assert torch.equal(found.isnan(), truth.isnan())
        assert found.shape == truth.shape
        if known.any():
            error = (found.double() - truth)[known].abs().max()
            assert error <= tolerance * truth[known].abs().max().clamp_min(1e-30)


@mr.op
@no_type_check
def mixed(x: Row["d"], y: Col["d"], a: Row, c: Col):
    s = x @ y
    sums = mr.sum(torch.tanh(s) * c), mr.sum(torch.sigmoid(s - a), over="rows")
    return (*sums, mr.max(s + c), mr.logsumexp(2.0 * s), mr.logsumexp(s, over="rows"))


@mr.op
@no_type_check
def distances(x: Row["d"], y: Col["d"]):
    s = -mr.sqdist(x, y)
    return mr.softmax_mean(s, y), mr.logsumexp(s)


@mr.op
@no_type_check
def activations(x: Row["d"], p: Col["d"], q: Col["n"]):
    s = x @ p
    t = F.gelu(s) + torch.log1p(torch.exp(-torch.abs(s))) + F.softplus(s) + torch.expm1(-s * s) + F.logsigmoid(s)
    return mr.sum(t * q)


@mr.op
@no_type_check
def biased(x: Row["d"], y: Col["d"], v: Col["e"], bias: Pair):
    return mr.softmax_mean(torch.where(bias > -1.0, x @ y + bias, -torch.inf), v)


@mr.op
@no_type_check
def columns(x: Row["d"], y: Col["d"]):
    s = x @ y
    return mr.logsumexp(s, over="rows"), mr.topk(s, 5, over="rows").values


@mr.op
@no_type_check
def spread(x: Row["d"], y: Col["d"], c: Col):
    s = torch.cos(x @ y) + torch.sin(c) + torch.tan(0.1 * c)
    return mr.var(s), mr.mean(torch.abs(s) ** 1.7), mr.sum(F.mish(s))


@mr.op
@no_type_check
def highest(s: Pair):
    return mr.sum(torch.sin(s)), mr.max(s, over="rows"), mr.argmax(s, over="rows")


@mr.op
@no_type_check
def chamfer(x: Row["d"], y: Col["d"]):
    s = mr.sqdist(x, y)
    return mr.min(s), mr.min(s, over="rows"), mr.argmin(s, over="rows")


@mr.op
@no_type_check
def city_blocks(x: Row["d"], y: Col["d"], a: Row, c: Col, u: mr.Batch["d"]):
    """Vectors per pair: sums and extremes over features, beside products, conditions and numbers of one side."""
    gap = torch.abs(x - y) * u
    s = torch.where(mr.col_index <= mr.row_index + 90, -gap.sum() + a * c, -torch.inf)
    far = (torch.exp(-gap) * (x @ y)).amax(-1) + (gap - a).amin(-1)
    return mr.logsumexp(s), mr.softmax_mean(s, y), mr.sum(far), mr.sum(far * c, over="rows")


@mr.op
@no_type_check
def vectors_per_pair(x: Row["d"], y: Col["d"], c: Col):
    v = torch.sin(x * y) * torch.sigmoid(x @ y - c)
    return mr.sum(v), mr.sum(torch.where(y > x, v, x), over="rows")


def grid(*shape):
    """Numbers of which float32 and float64 agree which are equal."""
    return torch.randint(-9, 10, shape) / 8


CASES = {
    "vectors per pair": (city_blocks, lambda: [grid(150, 20), grid(600, 20), R(150), R(600), grid(20)]),
    "vectors per pair of few features": (
        city_blocks,
        lambda: [grid(2, 50, 3), grid(2, 600, 3), R(2, 50), R(600), grid(3)],
    ),
    "sums of vectors per pair": (vectors_per_pair, lambda: [R(70, 20) / 2, R(600, 20) / 2, R(600)]),
    "sums of few features": (vectors_per_pair, lambda: [R(70, 2), R(600, 2), R(600)]),
    "causal": (lambda q, k, v: mr.ops.attention(q, k, v, causal=True), lambda: [R(2, 1, 300, 24) for _ in range(3)]),
    "cross-entropy": (
        lambda x, w, t: mr.ops.cross_entropy(x, w, t, reduction="none"),
        lambda: [R(70, 24), R(700, 24), torch.randint(0, 700, (70,))],
    ),
    "mixed": (mixed, lambda: [R(150, 12) / 3, R(700, 12) / 3, R(150), R(700)]),
    "near points": (distances, lambda: [R(150, 3), R(600, 3)]),
    "many features": (distances, lambda: [R(70, 24) / 3, R(600, 24) / 3]),
    "activations": (activations, lambda: [R(70, 5), R(600, 5), R(600, 3)]),
    "a bias per pair": (biased, lambda: [R(2, 40, 9), R(2, 530, 9), R(2, 530, 7), R(40, 530)]),
    "moments": (spread, lambda: [R(70, 12), R(700, 12), R(700)]),
    "best of both sides": (chamfer, lambda: [R(150, 24), R(700, 24)]),
    "over rows": (columns, lambda: [R(600, 9), R(50, 9)]),
    "neighbours": (lambda x, y: tuple(mr.ops.knn(x, y, 10, metric="sqeuclidean")), lambda: [R(60, 3), R(1100, 3)]),
    "entropy": (mr.ops.linear_entropy, lambda: [R(70, 16), R(700, 16)]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_layers_and_their_gradients_are_the_references(name, ran):
    layer, make = CASES[name]
    check(layer, *make())
    assert all(ran) if "vectors" in name else ran[0]


def test_double_and_sixteen_bits(ran):
    q, k, v = (R(1, 1, 130, 16) for _ in range(3))
    check(mr.ops.attention, *(t.double() for t in (q, k, v)), tolerance=1e-13)
    narrow = [t.bfloat16() for t in (q, k, v)]
    with mr.use(engine="eager"):
        found = mr.ops.attention(*narrow)
    truth = F.scaled_dot_product_attention(*(t.double() for t in narrow))
    assert (found.double() - truth).abs().max() < 2e-2 and any(ran)


def test_integers_have_64_bits(ran):
    @mr.op
    @no_type_check
    def whole(x: Row, y: Col):
        small = (x % 100 - 50) ** (y % 9) + (x % 3 - 1) ** -torch.abs(y % 4)
        large = torch.square(x % 99991) * torch.sign(y) + torch.relu(x - y) + torch.maximum(x, y)
        return mr.sum(small), mr.sum(large + torch.abs(y) - torch.clamp(x, min=y), over="rows")

    check(whole, *(torch.randint(-(2**60), 2**60, (n,)) for n in (70, 600)))
    assert all(ran)


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan, 1e30])
def test_infinities_nan_and_rows_that_see_nothing(odd):
    """As tiles of torch calls have them: which results are finite, and those that are."""
    x, y, bias = R(40, 6), R(530, 6), R(40, 530)
    bias[3] = -torch.inf  # sees nothing
    bias[5, 7] = odd
    bias[6, :512] = odd

    def run():
        with mr.use(engine="eager"):
            return biased(x, y, y, bias)

    found = run()
    os.environ["MONOIDREDUCE_CPP"] = "never"
    truth = run()
    torch.testing.assert_close(found, truth, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[3], torch.zeros(6))


def test_top_k_with_nan_infinities_and_ties():
    s = torch.randint(0, 9, (20, 700)).float()
    s[1, 5] = s[2, 600] = torch.nan
    s[3, ::2] = torch.inf
    s[4, 3:] = torch.nan

    @mr.op
    @no_type_check
    def best(p: Pair):
        return mr.topk(p, 5, largest=True), mr.topk(p, 5, largest=False), mr.argmax(p)

    with mr.use(engine="eager"):
        (high, high_at), (low, low_at), first = best(s)
    for value, place, sorted_values in (
        (high, high_at, s.sort(dim=-1, descending=True, stable=True)),
        (low, low_at, s.sort(dim=-1, stable=True)),
    ):
        assert torch.equal(value.nan_to_num(nan=-5.0), sorted_values.values[:, :5].nan_to_num(nan=-5.0))
        seen = value.isfinite()
        assert torch.equal(place[seen], sorted_values.indices[:, :5][seen])
    assert torch.equal(first, s.argmax(-1))


def test_large_angles_and_the_best_over_rows(ran):
    """Sines of numbers that the quick form does not take, in one row; of equal values the first, NaN before all."""
    s = torch.randint(0, 5, (300, 530)).float()
    s[3] = torch.logspace(4, 38, 530)
    sines = torch.sin(s.double()).sum(1)
    with mr.use(engine="eager"):
        sums = highest(s)[0]
        s[7, 3] = s[9, 3] = s[150, 4] = torch.nan
        s[:, 5] = -torch.inf
        value, place = highest(s)[1:]
    assert (sums - sines).abs().max() < 1e-4
    first = s.argmax(0)
    first[5] = -1
    assert torch.equal(place, first) and torch.equal(value.isnan(), s.isnan().any(0)) and all(ran)
    assert torch.equal(value.nan_to_num(), s.amax(0).nan_to_num())


@mr.op
def windowed(q: Row["f"], k: Col["f"], v: Col["d"], left: int, slope: mr.Batch):
    i, j = mr.row_index, mr.col_index
    return mr.softmax_mean(torch.where((j <= i) & (i - j <= left), q @ k + slope, -torch.inf), v)


def test_tables_of_tiles_are_kept_where_only_indices_decide(monkeypatch):
    """Of packed sequences one for each; another window makes others, and data is read in every call."""
    made, decide = [], variants.decide_tiles
    monkeypatch.setattr(variants, "decide_tiles", lambda *given: made.append(1) or decide(*given))
    monkeypatch.setattr(variants, "_make_index_table", functools.lru_cache(variants._make_index_table.__wrapped__))
    x, ends = R(2, 700, 8), torch.tensor([0, 300, 700])
    for left, count in ((50, 2), (50, 0), (400, 2), (50, 0)):
        made.clear()
        with mr.use(engine="eager"):
            y = windowed(x, x, x, left, R(2), cols=mr.jagged(ends))
        assert bool(made) == bool(count)
        near = (torch.arange(700)[:, None] - torch.arange(700)).abs()[:, None] <= left
        near = near.squeeze(1) & (torch.arange(700)[:, None] >= torch.arange(700))
        same = (torch.arange(700) < 300)[:, None] == (torch.arange(700) < 300)
        torch.testing.assert_close(y, F.scaled_dot_product_attention(x, x, x, near & same, scale=1.0))


def test_layouts_batches_and_broadcast_inputs():
    q = R(3, 2, 24, 130).mT
    k, v = R(3, 1, 200, 24).expand(3, 2, 200, 24), R(1, 1, 200, 48)[..., ::2].expand(3, 2, 200, 24)
    check(mr.ops.attention, q, k, v)


@mr.op
@no_type_check
def masked(x: Row["d"], y: Col["d"], v: Col["e"], bias: Pair):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, x @ y + bias, -torch.inf), v)


@pytest.mark.parametrize(
    "batch, own, runs",
    [((2, 3), (2, 3), True), ((), (), True), ((2, 3), (1, 3), False), ((2,), (), False)],
    ids=["own", "no batch", "broadcast", "shared"],
)
def test_gradients_of_numbers_per_pair(batch, own, runs, ran):
    """Written where each belongs, and 0 in tiles that are left out; summed over the batch by torch's tiles."""
    bias = R(*own, 300, 290).mT
    check(masked, R(*batch, 290, 20), R(*batch, 300, 20), R(*batch, 300, 5), bias)
    assert ran[-1] is runs


@pytest.mark.parametrize("features, values", [(0, 3), (3, 0), (0, 0)])
def test_vectors_without_features_run_in_torch(features, values, ran):
    @mr.op
    def picked(x: Row["f"], t: Row, y: Col["f"], v: Col["d"]):
        return mr.softmax_mean(torch.where(mr.col_index == t + 1, x @ y, -torch.inf), v), mr.max(x @ y)

    check(picked, R(2, 6, features), torch.arange(6) % 4, R(2, 8, features), R(2, 8, values))
    assert ran and not ran[0]


def test_threads_and_repeated_runs_have_equal_bits(ran):
    q, k, v = (R(1, 1, 700, 16) for _ in range(3))
    one = [results(mr.ops.attention, (q, k, v), "eager") for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*one, strict=True))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        many = [results(mr.ops.attention, (q, k, v), "eager") for _ in range(2)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*many, strict=True)) and all(ran)
    for a, b in zip(one[0], many[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@mr.op
@no_type_check
def many_kinds(x: Row["d"], y: Col["d"], v: Col["e"], c: Col):
    s = x @ y
    best = mr.topk(torch.round(s), 5), mr.argmin(torch.round(s)), mr.max(s + c)
    (values, places), least, most = best
    return values, places, least, most, mr.softmax_mean(s, v), mr.logsumexp(s * c), mr.sum(torch.relu(s) * v)


@pytest.mark.parametrize("rows, batch, splits", [(1, (), 4), (5, (2,), 2), (33, (), 6), (64, (), 1), (5, (4,), 1)])
def test_columns_of_few_rows_are_split_over_threads(rows, batch, splits, monkeypatch):
    """Four threads; of equal numbers the first column is found, whichever split it is in."""
    monkeypatch.setattr(compiled_fold, "SPLIT_PAIRS", 2**8)
    seen, call = set(), compiled_fold.CompiledFold.__call__
    watched = lambda self, *given: seen.add(len(self.splits)) or call(self, *given)
    monkeypatch.setattr(compiled_fold.CompiledFold, "__call__", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        check(many_kinds, R(*batch, rows, 6), R(3000, 6), R(3000, 7), R(3000))
    finally:
        torch.set_num_threads(before)
    assert splits in seen  # of the gradient, which sums over both axes, there is one


def test_labels_are_read_in_tiles_not_before_them(monkeypatch):
    """What is true of one pair in a row decides no tile, unless a tile without it has nothing to do."""
    made, table = [], variants._make_table
    monkeypatch.setattr(variants, "_make_table", lambda *given: made.append(1) or table(*given))

    @mr.op
    @no_type_check
    def only_labels(x: Row["d"], t: Row, y: Col["d"]):
        return mr.logsumexp(torch.where(mr.col_index == t, x @ y, -torch.inf))

    x, y, t = R(300, 12), R(700, 12), torch.arange(300) * 2
    check(lambda *given: mr.ops.cross_entropy(*given, t), x, y)
    assert not made
    check(lambda x, y: only_labels(x, t, y), x, y)
    assert made


@mr.op
@no_type_check
def over_lists(x: Row["d"], y: Col["d"], v: Col["e"], bias: Pair, slope: mr.Batch):
    near = (mr.row_index - mr.col_index).abs() < 150
    s = torch.where(near, x @ y * slope + bias, -torch.inf)
    return mr.softmax_mean(s, v), mr.argmax(s), mr.logsumexp(s, over="rows")


LISTS = {  # sizes of blocks, batch dimensions of the lists, and whether the walk leaves out tiles
    "ragged": (64, 32, (), True),
    "of each head": (48, 64, (2, 3), True),
    "of some heads": (64, 128, (2, 1), True),
    "one tile is too small": (256, 512, (), True),
    "of prime size": (64, 521, (), False),
}


@pytest.mark.parametrize("name", LISTS)
def test_listed_blocks_are_tiles(name, monkeypatch):
    rows, cols, batch, walks = LISTS[name]
    keep = torch.rand(*batch, -(-300 // rows), -(-410 // cols)) < 0.5
    keep[..., 0, :] = False
    keep[..., -1, -1] = True
    domain, walked, run = mr.blocks.from_mask(keep, rows=rows, cols=cols), [], cpp.run

    def watched(*given, chosen=None, **kwargs):
        found = run(*given, chosen=chosen, **kwargs)
        walked.append(chosen is not None and found is not None)
        return found

    monkeypatch.setattr(cpp, "run", watched)
    call = lambda *given: over_lists(*given, cols=domain)
    for dtype, tolerance in ((torch.float32, 4e-6), (torch.float64, 1e-13))[: 1 + walks]:
        given = R(2, 3, 300, 20), R(2, 1, 410, 20), R(2, 3, 410, 5), R(2, 3, 300, 410), R(2, 3)
        check(call, *(t.to(dtype) for t in given), tolerance=tolerance)
    assert all(walked) if walks else not any(walked)


def test_lists_that_change_are_walked_anew():
    """Also where a call is replayed; what is listed twice is folded twice, and other lists are as they were."""
    index = torch.tensor([[0, 1], [2, 0], [1, 1]])
    q, k, v = R(96, 8), R(96, 8), R(96, 8)
    with mr.use(engine="eager"):
        for _ in range(4):
            for change in ([0, 1], [2, 1]):
                index[0] = torch.tensor(change)
                domain = mr.blocks(index, torch.tensor([2, 1, 2]), rows=32, cols=32)
                y = mr.ops.attention(q, k, v, cols=domain)
                seen = domain.mask(96, 96).to(q.dtype)
                p = seen * torch.exp(q @ k.mT * 8**-0.5)
                torch.testing.assert_close(y, p @ v / p.sum(-1, keepdim=True))
            index[2] = torch.tensor([1, 0])  # no block twice: from here on tiles are walked


def test_functions_are_as_exact_as_torchs(tmp_path):
    """Over their whole range, infinities and NaN: no more than twice torch's error, and 1.5 units in the last place."""
    functions = {
        "exp_": torch.exp,
        "log_": torch.log,
        "log1p_": torch.log1p,
        "expm1_": torch.expm1,
        "tanh_": torch.tanh,
        "erf_": torch.erf,
        "erfc_": torch.erfc,
        "exp2_": torch.exp2,
        "mish_gate_": lambda x: torch.tanh(F.softplus(x)),
        "normal_gate_": lambda x: torch.where(x < -12.94, 0.0, 0.5 * torch.erfc(x * -math.sqrt(0.5))),
        "logsigmoid_": F.logsigmoid,
        **{f"{name}_": getattr(torch, name) for name in ("log10", "atan", "asin", "acos", "asinh", "acosh", "atanh")},
        **{f"{name}_": getattr(torch, name) for name in ("logit", "erfinv", "sinc", "lgamma", "digamma")},
        "polygamma_1": lambda x: torch.polygamma(1, torch.where((x < 0) & (x == x.round()) & x.isfinite(), 0.0, x)),
    }
    text = "typedef float F; static const int BM = 1, BN = 1, LD = 1;" + support.TYPES + support.FUNCTIONS
    text += primitive_text.FUNCTIONS
    for name in functions:
        loop = f"for (int j = 0; j < n; j++) y[j] = {name}(x[j]);"
        text += f'extern "C" void f_{name}(F* y, const F* x, int n) {{ {loop} }}\n'
    source, library = tmp_path / "f.cpp", tmp_path / "f.so"
    source.write_text(text)
    found = compiler.current_compiler()
    subprocess.run([found.path, *found.flags, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    odd = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, -1.0, 1e-40, 88.7, 89.0, -103.0, -104.0])
    x = torch.cat([torch.linspace(-2, 2, 9999), torch.linspace(-100, 90, 9999), torch.logspace(-40, 38, 999), odd])
    x = torch.cat([x, -x])
    for name, truth in functions.items():
        y = torch.empty_like(x)
        getattr(loaded, f"f_{name}")(ctypes.c_void_p(y.data_ptr()), ctypes.c_void_p(x.data_ptr()), len(x))
        want, own = truth(x.double()), truth(x)
        assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y.isinf(), want.float().isinf()), name
        known = want.float().isfinite()
        unit = want.abs().clamp_min(2.0**-126)[known] * 2.0**-23
        error, allowed = ((t.double() - want)[known].abs() / unit for t in (y, own))
        assert error.max() <= max(2 * allowed.max(), 1.5 / 2), name


def test_small_work_and_what_has_no_form_run_in_torch(monkeypatch, ran):
    monkeypatch.delenv("MONOIDREDUCE_CPP")
    x, y = R(20, 4), R(30, 4)
    with mr.use(engine="eager"):
        distances(x, y)
    assert not any(ran)

    @mr.op
    @no_type_check
    def arcs(x: Row["d"], y: Col["d"]):
        return mr.sum(torch.polygamma(3, x @ y))

    monkeypatch.setenv("MONOIDREDUCE_CPP", "always")
    with mr.use(engine="eager"):
        torch.testing.assert_close(arcs(x, y), torch.polygamma(3, x @ y.T).sum(1))
    assert not any(ran)


def _use(folder, monkeypatch):
    """A cache folder of its own, and nothing loaded."""
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(folder))
    monkeypatch.setattr(compiler, "_loaded", {})
    compiler._noted.clear()
    compiled_fold.compile_form.cache_clear()
    cpp._calls.clear()


def test_damaged_and_missing_files_are_compiled_again(tmp_path, monkeypatch):
    x, y = R(40, 5), R(50, 5)
    _use(tmp_path, monkeypatch)
    with mr.use(engine="eager"), torch.no_grad():
        first = columns(x, y)
    (library,) = (tmp_path / "cpp").glob("*.so")
    good = library.read_bytes()
    for damage in (b"", good[: len(good) // 2]):
        library.unlink()  # a new file: this process has the old one loaded
        library.write_bytes(damage)
        library.chmod(0o600)
        _use(tmp_path, monkeypatch)
        with mr.use(engine="eager"), torch.no_grad():
            again = columns(x, y)
        assert torch.equal(again[0], first[0]) and library.read_bytes() == good
    assert mr.cache.clear() == 2 and not library.exists()


def test_without_a_compiler_torch_runs_with_one_note(tmp_path, monkeypatch):
    x, y = R(40, 5), R(50, 5)
    _use(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with mr.use(engine="eager"), torch.no_grad():
            found = [columns(x, y)[0] for _ in range(2)]
    torch.testing.assert_close(found[0], (x @ y.T).logsumexp(0))
    assert [w.category for w in told] == [mr.FallbackWarning] and not list(tmp_path.glob("cpp/*"))


@pytest.mark.slow  # each of them imports torch
def test_two_processes_compile_at_once(tmp_path):
    code = (
        "import torch, monoidreduce as mr; torch.manual_seed(0); x = torch.randn(40, 5)\n"
        "with mr.use(engine='eager'): print(mr.ops.kernel_sum(x, x, x[:, :1]).sum().item())"
    )
    environment = {**os.environ, "MONOIDREDUCE_CACHE": str(tmp_path), "MONOIDREDUCE_CPP": "always"}
    command = [sys.executable, "-W", "error", "-c", code]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [p.communicate(timeout=120)[0] for p in both]
    assert said[0] == said[1] != "" and len(list((tmp_path / "cpp").glob("*.so"))) == 1


def test_memory_is_a_few_tiles(monkeypatch):
    """The buffers of a thread do not grow with the lengths, and a budget that they exceed is kept by torch's tiles."""
    q = R(1, 1, 2048, 16)
    sizes = []
    empty = torch.empty
    monkeypatch.setattr(compiled_fold.torch, "empty", lambda *a, **k: (sizes.append(a[0]), empty(*a, **k))[1])
    with mr.use(engine="eager"), torch.no_grad():
        mr.ops.attention(q, q, q)
        numbers = [n for n in sizes if isinstance(n, int)]
        assert sum(numbers) < torch.get_num_threads() * 2**18 + 2048 * 16 + 2**10
        with mr.budget("100kB"):
            found = mr.ops.attention(q, q, q)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, q, q), rtol=1e-4, atol=1e-5)


def test_explain_says_what_runs_the_tiles(monkeypatch):
    x = R(64, 8)
    with mr.use(engine="eager"):
        assert "in C++;" in str(distances.explain(x, x))
        monkeypatch.setenv("MONOIDREDUCE_CPP", "never")
        assert "in torch;" in str(distances.explain(x, x))
        monkeypatch.delenv("MONOIDREDUCE_CPP")
        long = R(1024, 32)  # listed blocks run in C++ from fewer pairs on
        assert "in torch;" in str(distances.explain(long[:512], long[:512]))
        lists = mr.blocks.from_mask(torch.rand(32, 32) > 0.5, rows=32, cols=32)
        assert "in C++;" in str(distances.explain(long, long, cols=lists))
