"""Products of many features with a fold as their epilogue, in the interpreter: numbers only, no pairs in memory."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, Rendering, use_plan
from monoidreduce.engines.triton.codegen import kernel_spec, special_functions
from monoidreduce.engines.triton.codegen.kernel_spec import Spec
from monoidreduce.engines.triton.kernels import fold_kernel
from monoidreduce.engines.triton.schedules import kernel_plan
from tests.support import internals

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PLANS = {over: KernelPlan(16, 32, 4, 1) for over in ("cols", "rows")}
BOXED = {over: KernelPlan(16, 32, 4, 1, rendering=Rendering.DESCRIPTORS) for over in ("cols", "rows")}


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch, tmp_path_factory):
    """No panel may stand in for the kernels."""

    def refuse(*args, **kwargs):
        raise AssertionError("a panel was used")

    internals.replace_panel_begin(monkeypatch, refuse)
    internals.replace_panel_begin(monkeypatch, refuse, kernels=False)
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))


@mr.op
def head(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row, bias: mr.Col):
    s = x @ w + bias
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0)), mr.argmax(s), mr.max(s)


@mr.op
def both_ways(x: mr.Row["d"], y: mr.Col["d"]):
    s = x @ y * 3.0
    return mr.logsumexp(s), mr.logsumexp(s, over="rows"), mr.var(s), mr.sum(torch.relu(s), over="rows")


@mr.op
def two_heads(p: mr.Row["d"], c: mr.Col["d"], q: mr.Row["e"], t: mr.Col["e"]):
    return mr.logsumexp(p @ c) - mr.softmax_mean(q @ t, p @ c)


@mr.op
def draw(x: mr.Row["d"], w: mr.Col["d"], seed: int):
    return mr.sample(x @ w, seed)


def vectors(rows, cols, features, seed):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((rows, features), (cols, features))
    return [(torch.randn(s, generator=gen) / features**0.25).half() for s in shapes]


SIZES = [(1, 59, 257, PLANS), (17, 33, 320, PLANS), (33, 130, 300, PLANS), (17, 33, 320, BOXED), (33, 70, 264, BOXED)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rows", "cols", "features", "plans"), SIZES)
def test_a_head_without_logits(rows, cols, features, plans, seed):
    x, w = vectors(rows, cols, features, seed)
    bias, target = torch.randn(cols).half(), torch.randint(cols, (rows,))
    with mr.use(engine="triton", strict=True), use_plan(plans):
        loss, best, most = head(x, w, target, bias)
    s = x.float() @ w.float().T + bias.float()
    torch.testing.assert_close(loss.float(), F.cross_entropy(s, target, reduction="none"), rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(most.float(), s.amax(1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(s.gather(1, best[:, None])[:, 0], s.amax(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("features", "plans"), [(300, PLANS), (264, BOXED)])
def test_both_directions_and_batches(features, plans, seed):
    x, y = vectors(20, 37, features, seed)
    x, y = torch.stack([x, x * 0.5]), torch.stack([y, -y])
    with mr.use(engine="triton", strict=True), use_plan(plans):
        found = both_ways(x, y)
    s = x.float() @ y.float().mT * 3.0
    expected = s.logsumexp(-1), s.logsumexp(-2), s.var(-1), torch.relu(s).sum(-2)
    for got, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(got.float(), truth, rtol=2e-3, atol=2e-3)


def test_two_products_of_other_features(seed):
    (p, c), (q, t) = vectors(9, 40, 300, seed), vectors(9, 40, 270, seed + 1)
    with mr.use(engine="triton", strict=True), use_plan(PLANS):
        got = two_heads(p, c, q, t)
    student, teacher = p.float() @ c.float().T, q.float() @ t.float().T
    expected = F.cross_entropy(student, teacher.softmax(-1), reduction="none")
    torch.testing.assert_close(got.float(), expected, rtol=2e-3, atol=2e-3)


def test_a_gpu_s_gumbel_numbers(monkeypatch):
    """The form with NVIDIA's logarithm, which the interpreter does not have, by torch's: none is infinite, and all but
    the least are exact. Near 1, where the logarithm is steepest, every float32 is tried."""
    words = torch.cat([torch.arange(1000), 2**32 - 1 - torch.arange(1000), torch.arange(0, 2**32, 20011)])
    near_one = torch.arange(*torch.tensor([0.99, 1.0]).view(torch.int32).tolist(), dtype=torch.int32)
    u = torch.cat([words.float() * 2.0**-32 + 2.0**-33, near_one.view(torch.float32)])
    monkeypatch.setattr(special_functions, "tl", torch)
    monkeypatch.setattr(special_functions, "native_normal_log2", torch.log2)
    monkeypatch.setattr(special_functions, "lot", lambda *place: u)
    got = special_functions.native_gumbel(0, 0, 0, 0, torch.float32).double()
    exact = -torch.log(-torch.log1p(-u.clamp(max=1 - 2.0**-24).double()))
    off = (got - exact).abs()
    assert u.max() == 1 and got.isfinite().all()
    assert off[exact > -2.18].max() < 5e-5 and off.max() < 0.05


@pytest.mark.parametrize(("features", "plans"), [(300, PLANS), (264, BOXED)])
def test_samples_are_those_of_every_engine(features, plans, seed):
    x, w = vectors(12, 90, features, seed)
    with mr.use(engine="triton", strict=True), use_plan(plans):
        got = draw(x, w, 5)
    with mr.use(engine="reference"):
        expected = draw(x.double(), w.double(), 5)
    torch.testing.assert_close(got, expected)


def test_one_fold_walks_tiles_and_features_in_one_loop(monkeypatch, seed):
    """Where tensor descriptors copy; two folds at once have no registers for it."""
    texts = internals.watch_launches(monkeypatch, lambda call: call.kernel.text)
    x, w = vectors(12, 90, 264, seed)
    with mr.use(engine="triton", strict=True):
        for plans in (PLANS, BOXED):
            with use_plan(plans):
                draw(x, w, 5)
                head(x, w, torch.zeros(12).long(), torch.zeros(90).half())
    folds = [text for text in texts if "fold_over_cols" in text]
    assert ["flatten=True" in text for text in folds] == [False, False, True, False]


def test_strided_vectors_and_rows_that_see_nothing(seed):
    x, w = (v.T.contiguous().T for v in vectors(5, 40, 300, seed))
    bias = torch.full((40,), -torch.inf).half()
    with mr.use(engine="triton", strict=True), use_plan(PLANS):
        loss, best, most = head(x, w, torch.zeros(5).long(), bias)
    assert (best == -1).all() and (most == -torch.inf).all() and loss.isnan().all()


def test_what_gradients_will_read_is_rounded_as_they_read_it():
    """bfloat16 products of a logsumexp are rounded as a panel holds them; those of an argmax are not."""

    def spec(op, *args):
        (one,) = op.program(*args).passes
        types = tuple("bfloat16" for _ in one.fold.leaves)
        given = (one.fold, "cols", types, (0,) * len(types), (("d", 300),), "float32", "bfloat16", 0)
        return Spec(*given, False, False, False, k_loop=True)

    x = torch.zeros(3, 300, dtype=torch.bfloat16)

    @mr.op
    def total(x: mr.Row["d"], w: mr.Col["d"]):
        return mr.logsumexp(x @ w)

    @mr.op
    def first(x: mr.Row["d"], w: mr.Col["d"]):
        return mr.argmax(x @ w)

    assert kernel_spec.rounds_products(spec(total, x, x)) and not kernel_spec.rounds_products(spec(first, x, x))


SHAPES = [(64, 1000), (8, 501), (1, 501), (71, 1000), (200, 40), (3, 1), (1, 1)]


@pytest.mark.parametrize("beside", [1000, 20, 8])
@pytest.mark.parametrize(("instances", "tiles"), SHAPES)
def test_no_processor_is_idle_for_long(instances, tiles, beside):
    count = kernel_plan.count_splits(KernelPlan(128, 256), instances, tiles, 132, beside)
    longest = -(-tiles * -(-instances * count // 132) // count)
    assert count * 2 <= max(2, tiles) and (instances * tiles / (longest * 132) > 0.75 or tiles < 4 * 132 // instances)
    if beside < instances and 4 * count < tiles:
        assert count * beside >= 132, "the tiles that run together, in all their parts, fill the device"


def test_a_few_rows_take_all_processors():
    assert kernel_plan.count_splits(KernelPlan(128, 256), 8, 501, 132, 1000) == 33


def test_parts_differ_by_one_tile():
    """And the longer ones come first, so that processors which are done early take shorter ones."""
    one = fold_kernel.FoldLaunch.__new__(fold_kernel.FoldLaunch)
    one.plan, one.lengths, one.splits = KernelPlan(128, 64, 4, 3, 5), (256, 1000), 5
    assert one._measure_splits() == [256, 192, 192, 192, 168]  # 16 tiles, the last of which is cut


def test_kept_tiles_that_run_together_leave_room_in_the_cache():
    one, other = (Spec(*_given(width), k_loop=True) for width in (512, 1024))
    many = 2**20
    assert (
        kernel_spec.count_concurrent_tiles(one, 128, many)
        == 2 * kernel_spec.count_concurrent_tiles(one, 256, many)
        == 4 * kernel_spec.count_concurrent_tiles(other, 256, many)
        > 0
    )
    assert kernel_spec.count_concurrent_tiles(one, 128, 8192) == 8192 // 128, "all of them, where they fit"
    assert kernel_spec.count_concurrent_tiles(Spec(*_given(2**24), k_loop=True), 128, many) == 1


def _given(width):
    @mr.op
    def total(x: mr.Row["d"], w: mr.Col["d"]):
        return mr.logsumexp(x @ w)

    (one,) = total.program(*(torch.zeros(3, 300, dtype=torch.bfloat16) for _ in range(2))).passes
    kinds = ("bfloat16",) * 2
    return one.fold, "cols", kinds, (0, 0), (("d", width),), "float32", "bfloat16", 0, False, False, False


@pytest.mark.parametrize("few", [1, 2, 3])
def test_parts_of_a_few_tiles_at_a_time(few, seed, monkeypatch):
    """The same numbers in whatever order program instances run, the last few tiles being fewer."""
    rows = 67 + few  # a launch of its own for each
    x, w = vectors(rows, 130, 300, seed)
    monkeypatch.setattr(kernel_spec, "_NEAR", few * 16 * 300 * 2)
    monkeypatch.setattr(kernel_spec, "_FITS", 0)
    label = torch.arange(rows)
    with mr.use(engine="triton", strict=True), use_plan({"cols": KernelPlan(16, 32, splits=3)}):
        loss, best, _ = head(x, w, label, torch.zeros(130).half())
    logits = x.float() @ w.float().T
    torch.testing.assert_close(loss.float(), F.cross_entropy(logits, label, reduction="none"), rtol=2e-3, atol=2e-3)
    assert torch.equal(best, logits.argmax(1))
