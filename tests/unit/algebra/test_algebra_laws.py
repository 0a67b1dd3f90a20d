"""The catalogue obeys its laws, and monoids broken in one place each are caught by the law that names it."""

import math

import pytest
import torch
import torch.nn.functional as F

from monoidreduce import errors
from monoidreduce.algebra import Domain, Matrix, Monoid, Scalar, Vector, dot, laws, monoids, product

ALL = [getattr(monoids, name) for name in monoids.__all__ if name != "TopK"] + [monoids.TopK(1), monoids.TopK(3)]
PRODUCTS = [product(monoids.Sum, monoids.LogWSum, monoids.Or), monoids.Max * monoids.Max, monoids.Sum * monoids.MMul]
VALUE_LAWS = {"associativity", "commutativity", "left_identity", "right_identity", "partition", "tile"}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("monoid", ALL + PRODUCTS, ids=lambda m: m.__name__)
def test_the_catalogue_obeys_its_laws(monoid):
    report = laws.check(monoid)
    assert report.monoid == monoid.__name__
    assert min(report.counts.values()) >= 200
    assert {"associativity", "left_identity", "right_identity", "partition"} <= set(report.counts)
    assert ("commutativity" in report.counts) == monoid.commutative
    assert ("local_gradient" in report.counts) == ("partition_gradient" in report.counts) == monoid.has_gradient
    assert set(report.counts) | set(report.skipped) == {law.name for law in laws.LAWS}


def test_the_report_says_what_was_left_out():
    text = str(laws.check(monoids.MMul, cases=10))
    assert text.startswith("MMul obeys its laws:") and "associativity" in text
    assert "commutativity          not tried (declared commutative = False)" in text
    assert "local_gradient         not tried (it brings neither pullback nor remove)" in text


# --- broken in one place each ---


class MeanOfTwo(Monoid):
    v: Scalar = 0.0

    def combine(a, b):
        return MeanOfTwo(v=(a.v + b.v) / 2)


class KeepLeft(Monoid):
    v: Vector = 0.0

    def combine(a, b):
        return KeepLeft(v=a.v)


class FurthestFromZero(Monoid):
    """Of 1 and -1 the first: right but for ties of numbers that differ."""

    v: Scalar = 0.0

    def combine(a, b):
        return FurthestFromZero(v=torch.where(a.v.abs() >= b.v.abs(), a.v, b.v))


class UnorderedMatrices(Monoid):
    m: Matrix = 1.0

    def combine(a, b):
        return UnorderedMatrices(m=a.m @ b.m)


class MaxFromZero(Monoid):
    v: Scalar = 0.0

    def combine(a, b):
        return MaxFromZero(v=torch.maximum(a.v, b.v))


class RingMerge(Monoid):
    """The merge step of ring attention, as it is usually written: right on random data."""

    lse: Scalar = -math.inf
    out: Vector = 0.0

    def combine(a, b):
        out = a.out - torch.sigmoid(b.lse - a.lse) * (a.out - b.out)
        return RingMerge(lse=a.lse - F.logsigmoid(a.lse - b.lse), out=out)


class UnguardedMean(Monoid):
    """The papers' formula without its case for -inf: right wherever one of the two has a weight."""

    z: Scalar = -math.inf
    v: Vector = 0.0

    def combine(a, b):
        z = torch.logaddexp(a.z, b.z)
        return UnguardedMean(z=z, v=a.v * torch.exp(a.z - z) + b.v * torch.exp(b.z - z))


class OverflowingSum(Monoid):
    z: Scalar = -math.inf

    def combine(a, b):
        return OverflowingSum(z=torch.log(torch.exp(a.z) + torch.exp(b.z)))


class WrongPullback(Monoid):
    """LogWSum whose pullback forgets that the weights move the mean."""

    z: Scalar = -math.inf
    v: Vector = 0.0

    def combine(a, b):
        c = monoids.LogWSum.combine(monoids.LogWSum(z=a.z, v=a.v), monoids.LogWSum(z=b.z, v=b.v))
        return WrongPullback(z=c.z, v=c.v)

    def pullback(c, a, g):
        w = torch.exp(a.z - torch.where(c.z == -math.inf, 0.0, c.z))
        return WrongPullback(z=w * g.z, v=w * g.v)


class UnguardedPullback(Monoid):
    z: Scalar = -math.inf

    def combine(a, b):
        return UnguardedPullback(z=monoids.LogSumExp.combine(monoids.LogSumExp(z=a.z), monoids.LogSumExp(z=b.z)).z)

    def pullback(c, a, g):
        return UnguardedPullback(z=g.z * torch.exp(a.z - c.z))


class WrongRemove(Monoid):
    v: Scalar = 0.0

    def combine(a, b):
        return WrongRemove(v=a.v + b.v)

    def remove(c, a):
        return WrongRemove(v=c.v + a.v)


class WrongTile(Monoid):
    v: Scalar = 0.0

    def combine(a, b):
        return WrongTile(v=a.v + b.v)

    def fold_tile(x, dim):
        return WrongTile(v=x.v.mean(dim))


@pytest.mark.parametrize(
    ("monoid", "law", "words"),
    [
        (MeanOfTwo, "associativity", ["(a ⊙ b) ⊙ c = MeanOfTwo(v=0.5)", "v=0.25", "a mean needs its weight"]),
        (KeepLeft, "commutativity", ["a ⊙ b = KeepLeft(v=[0])", "b ⊙ a = KeepLeft(v=[1])", "commutative = False"]),
        (FurthestFromZero, "commutativity", ["a ⊙ b = FurthestFromZero(v=", "commutative = False"]),
        (UnorderedMatrices, "commutativity", ["[[", "commutative = False"]),
        (MaxFromZero, "left_identity", ["a = MaxFromZero(v=-1)", "identity ⊙ a = MaxFromZero(v=0)"]),
        (RingMerge, "left_identity", ["identity ⊙ a = RingMerge(lse=nan", "torch.where"]),
        (UnguardedMean, "left_identity", ["a = UnguardedMean(z=-inf, v=[0])", "v=[nan]", "found among identities"]),
        (OverflowingSum, "left_identity", ["OverflowingSum(z=inf)", "subtract the maximum first"]),
        (WrongPullback, "local_gradient", ["g = WrongPullback(", "derivative by a = ", "transposed derivative"]),
        (UnguardedPullback, "local_gradient", ["z=nan", "derivative by a = UnguardedPullback(z=0)"]),
        (WrongRemove, "removal", ["a ⊙ remove(a ⊙ b, a)"]),
        (WrongTile, "tile", ["x0 = WrongTile(v=0)", "x1 = WrongTile(v=1)", "fold_tile(x, 0) = WrongTile(v=0.5)"]),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_broken_law_is_named_with_a_small_counterexample(monoid, law, words):
    with pytest.raises(errors.MonoidLawError) as caught:
        laws.check(monoid)
    error = caught.value
    assert error.details["law"] == law and error.details["monoid"] == monoid.__name__
    assert f"{monoid.__name__} breaks the law of {law}:" in str(error)
    assert all(word in str(error) for word in words), str(error)


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_law_that_is_named_does_not_depend_on_the_seed(seed):
    for monoid, law in ((MeanOfTwo, "associativity"), (KeepLeft, "commutativity"), (RingMerge, "left_identity")):
        with pytest.raises(errors.MonoidLawError, match=law):
            laws.check(monoid, seed=seed)


def test_the_same_seed_finds_the_same_example():
    texts = set()
    for _ in range(2):
        with pytest.raises(errors.MonoidLawError) as caught:
            laws.check(WrongPullback, seed=7)
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_a_pullback_wrong_for_parts_only_is_caught():
    class Halved(Monoid):
        """Right for two elements of weight 1, but c is mistaken for a fold of two."""

        s: Scalar = 0.0
        n: Scalar = 0.0

        def combine(a, b):
            return Halved(s=a.s + b.s, n=a.n + b.n)

        def pullback(c, a, g):
            return Halved(s=g.s * 2 * a.n / c.n, n=g.n)

    ones = {"n": lambda gen, shape: torch.ones(shape, dtype=torch.float64)}
    with pytest.raises(errors.MonoidLawError) as caught:
        laws.check(Halved, fields=ones)
    assert caught.value.details["law"] in ("partition_gradient", "local_gradient")


def test_a_body_that_mixes_its_batch_is_caught():
    class Mixing(Monoid):
        v: Scalar = 0.0

        def combine(a, b):
            return Mixing(v=a.v + b.v + (a.v * b.v - (a.v * b.v).flip(0)))

    with pytest.raises(errors.MonoidLawError, match="every leading axis as a batch"):
        laws.check(Mixing)


def test_a_body_that_loses_the_trailing_axis_is_caught():
    class Lost(Monoid):
        z: Scalar = 0.0
        v: Vector = 0.0

        def combine(a, b):
            return Lost(z=a.z + b.z + 0 * (a.v * b.v).sum(-1), v=a.v + b.v)

    with pytest.raises(errors.ShapeError, match=r"field z of shape \[\d+, 1\].*dot"):
        laws.check(Lost)


# --- monoids of one's own that are right ---


class GuardedMean(Monoid):
    z: Scalar = -math.inf
    v: Vector = 0.0

    def combine(a, b):
        z = torch.logaddexp(a.z, b.z)
        at = torch.where(z == -math.inf, 0.0, z)
        return GuardedMean(z=z, v=a.v * torch.exp(a.z - at) + b.v * torch.exp(b.z - at))

    def pullback(c, a, g):
        w = torch.exp(a.z - torch.where(c.z == -math.inf, 0.0, c.z))
        return GuardedMean(z=w * (g.z + dot(g.v, a.v - c.v)), v=w * g.v)


class Affine(Monoid):
    """``x ↦ s x + t``, composed: ordered."""

    commutative = False
    s: Vector = 1.0
    t: Vector = 0.0

    def combine(a, b):
        return Affine(s=a.s * b.s, t=a.s * b.t + a.t)


class SquareOfSum(Monoid):
    """Its gradient comes by ``remove``."""

    x: Scalar = 0.0
    y: Scalar = 0.0

    def combine(a, b):
        return SquareOfSum(x=a.x + b.x, y=a.y + b.y + 2 * a.x * b.x)

    def remove(c, a):
        return SquareOfSum(x=c.x - a.x, y=c.y - a.y - 2 * a.x * (c.x - a.x))


class CrossEntropy(Monoid):
    """Cross-entropy between two distributions, with an equality of its own that knows no scale."""

    p: Scalar = -math.inf
    q: Scalar = -math.inf
    n: Scalar = 0.0

    def combine(a, b):
        p, q = torch.logaddexp(a.p, b.p), torch.logaddexp(a.q, b.q)
        at = torch.where(q == -math.inf, 0.0, q)
        return CrossEntropy(p=p, q=q, n=a.n * torch.exp(a.q - at) + b.n * torch.exp(b.q - at))

    def pullback(c, a, g):
        p = torch.exp(a.p - torch.where(c.p == -math.inf, 0.0, c.p))
        q = torch.exp(a.q - torch.where(c.q == -math.inf, 0.0, c.q))
        return CrossEntropy(p=g.p * p, q=(g.q + g.n * (a.n - c.n)) * q, n=g.n * q)

    def approx(a, b):
        heavy = (a.q > -math.inf) & (b.q > -math.inf)
        return torch.allclose(a.p, b.p) and torch.allclose(a.q, b.q) and torch.allclose(a.n[heavy], b.n[heavy])


@pytest.mark.parametrize("monoid", [GuardedMean, Affine, SquareOfSum, CrossEntropy, GuardedMean * Affine])
def test_right_ones_pass_out_of_the_box(monoid):
    for seed in range(2):
        assert laws.check(monoid, seed=seed).counts["associativity"] >= 200


def test_fields_narrow_what_is_tried():
    assert laws.check(OverflowingSum, fields={"z": Domain(low=-50.0, high=50.0)}).counts["left_identity"] >= 200
    seen = []

    def draw(gen, shape):
        seen.append(shape)
        return torch.rand(shape, generator=gen, dtype=torch.float64)

    laws.check(monoids.Sum, cases=8, fields={"v": draw})
    assert seen
    for wrong in ({"w": Domain()}, {"v": 3}):
        with pytest.raises(errors.ArgumentError, match="for: v"):
            laws.check(monoids.Sum, fields=wrong)


def test_infinities_are_tried_only_where_the_domain_has_them():
    seen = {"z": set(), "v": set()}

    class Spy(Monoid):
        z: Scalar = -math.inf
        v: Scalar = 0.0

        def combine(a, b):
            for name in seen:
                seen[name].update(x for x in getattr(a, name).flatten().tolist() if math.isinf(x))
            return Spy(z=torch.maximum(a.z, b.z), v=a.v + b.v)

    laws.check(Spy, cases=60)
    assert seen == {"z": {-math.inf}, "v": set()}


def test_check_wants_a_monoid():
    for wrong in (3, Monoid, int, monoids.Sum(v=torch.ones(1))):
        with pytest.raises(errors.ArgumentError, match="subclass of Monoid"):
            laws.check(wrong)


def test_an_exception_in_combine_is_the_users_own():
    class Raises(Monoid):
        v: Scalar = 0.0

        def combine(a, b):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        laws.check(Raises)


# --- laws as functions ---


def test_laws_return_their_two_sides():
    x = [monoids.Sum(v=torch.tensor([n])) for n in (1.0, 2.0, 4.0)]
    for sides in (
        laws.associativity(monoids.Sum, *x),
        laws.commutativity(monoids.Sum, *x[:2]),
        laws.left_identity(monoids.Sum, x[0]),
        laws.right_identity(monoids.Sum, x[0]),
        laws.partition(monoids.Sum, x, [[2, 0], [], [1]]),
        laws.tile(monoids.Sum, x),
        laws.local_gradient(monoids.Sum, *x),
        laws.partition_gradient(monoids.Sum, x, [[1, 2], [0]], x[0]),
    ):
        assert isinstance(sides, laws.Sides) and monoids.Sum.approx(sides.left, sides.right)
    assert laws.associativity(monoids.Sum, *x).left.v.item() == 7.0


def test_every_law_has_a_row_and_a_function():
    names = {law.name for law in laws.LAWS}
    assert names == VALUE_LAWS | {"removal", "local_gradient", "partition_gradient"}
    assert all(callable(getattr(laws, name)) and name in laws.__all__ for name in names)


def test_a_state_that_no_fold_reaches_is_excluded_by_a_domain():
    class WeightedMean(Monoid):
        w: Scalar = 0.0
        m: Scalar = 0.0

        def combine(a, b):
            w = a.w + b.w
            return type(a)(w=w, m=(a.w * a.m + b.w * b.m) / torch.where(w == 0, 1.0, w))

    with pytest.raises(errors.MonoidLawError, match="If no fold can reach such a state, say so with a domain"):
        laws.check(WeightedMean)

    class Reachable(WeightedMean):
        @staticmethod
        def domain(x):
            return (x.w > 0) | ((x.w == 0) & (x.m == 0))

    laws.check(Reachable)
