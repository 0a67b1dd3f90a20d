"""Laws: monoids that break one are refused before their first fold; rounding and unreachable states are no breach."""

import math
import time

import pytest
import torch

import monoidreduce as mr
from monoidreduce.algebra import Domain, Matrix, laws, monoids, product
from monoidreduce.algebra.laws import probe


def make_mean():
    class Mean(mr.Monoid):
        v: mr.Scalar = 0.0

        def combine(a, b):
            return Mean(v=(a.v + b.v) / 2)

    return Mean


def make_left():
    class Left(mr.Monoid):
        v: mr.Vector = 0.0

        def combine(a, b):
            return Left(v=a.v + 0.5 * b.v)

    return Left


def make_identity():
    class FromZero(mr.Monoid):
        v: mr.Scalar = 0.0

        def combine(a, b):
            return FromZero(v=torch.maximum(a.v, b.v))

    return FromZero


def make_matrix():
    class Product(mr.Monoid):
        m: Matrix = 1.0

        def combine(a, b):
            return Product(m=a.m @ b.m)

    return Product


@pytest.mark.parametrize("make", [make_mean, make_left, make_identity], ids=lambda f: f.__name__)
@pytest.mark.parametrize("engine", ["reference", "eager", "panel"])
def test_reduce_refuses_a_monoid_that_breaks_a_law(make, engine):
    monoid = make()
    vector = monoid.fields()["v"].marker is mr.Vector

    @mr.op
    def layer(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.reduce(monoid, v=y if vector else x @ y).v

    x, y = torch.randn(3, 4), torch.randn(7, 4)
    for _ in range(2):  # not only the first time
        with pytest.raises(mr.MonoidLawError, match=f"{monoid.__name__} breaks the law of") as raised, mr.use(engine):
            layer(x, y)
        assert "a = " in str(raised.value) and "domain" in str(raised.value)


@pytest.mark.parametrize("make", [make_mean, make_identity, make_left], ids=lambda f: f.__name__)
def test_fold_refuses_it_too(make):
    monoid = make()
    with pytest.raises(mr.MonoidLawError, match="breaks the law"):
        mr.fold(monoid, torch.randn(9) if monoid.fields()["v"].marker is mr.Scalar else torch.randn(9, 2), dim=0)
    with pytest.raises(mr.MonoidLawError, match="breaks the law"):
        mr.fold(monoid, iter([torch.randn(2), torch.randn(2)]))


def test_an_ordered_monoid_is_not_asked_to_commute():
    claimed = make_matrix()
    with pytest.raises(mr.MonoidLawError, match="commutativity"):
        mr.fold(claimed, torch.randn(4, 3, 3), dim=0)

    class Ordered(mr.Monoid):
        commutative = False
        m: Matrix = 1.0

        def combine(a, b):
            return Ordered(m=a.m @ b.m)

    m = torch.randn(4, 3, 3)
    torch.testing.assert_close(mr.fold(Ordered, m, dim=0).m, m[0] @ m[1] @ m[2] @ m[3])


@pytest.mark.parametrize("name", [n for n in monoids.__all__ if n != "TopK"])
def test_the_catalogue_passes(name):
    probe(getattr(monoids, name))


def test_products_and_lists_pass():
    for monoid in (monoids.TopK(3), product(monoids.Sum, monoids.LogWSum, monoids.Or), monoids.Max * monoids.WSum):
        probe(monoid)


def test_a_monoid_is_looked_at_once_and_quickly():
    calls = []

    class Total(mr.Monoid):
        v: mr.Scalar = 0.0

        def combine(a, b):
            calls.append(1)
            return Total(v=a.v + b.v)

    start = time.process_time()
    probe(Total)
    assert time.process_time() - start < 1.0  # a few milliseconds; the bound is for blow-ups only
    assert 0 < len(calls) < 64
    calls.clear()
    probe(Total)
    assert not calls

    class Other(Total):  # a subclass is another monoid
        def combine(a, b):
            return Other(v=(a.v + b.v) / 2)

    with pytest.raises(mr.MonoidLawError):
        probe(Other)


def test_it_leaves_the_random_state_alone_and_runs_anywhere():
    class Total(mr.Monoid):
        v: mr.Scalar = 0.0

        def combine(a, b):
            return Total(v=a.v + b.v)

    before = torch.get_rng_state()
    with torch.device("meta"), torch.inference_mode():
        probe(Total)
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(mr.MonoidLawError), torch.device("meta"):
        probe(make_mean())


def test_a_combine_that_raises_is_told_by_the_fold():
    class Broken(mr.Monoid):
        v: mr.Scalar = 0.0

        def combine(a, b):
            raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        mr.fold(Broken, torch.randn(4))


# Domains: states that can be reached -----------------------------------------------------------------------------


def make_capped(domain):
    class Capped(mr.Monoid):
        """A sum that stops at 1: associative where no number is negative."""

        n: mr.Scalar = 0.0

        def combine(a, b):
            return Capped(n=(a.n + b.n).clamp(max=1.0))

    if domain is not None:
        Capped.domain = domain
    return Capped


def make_top_two(declared):
    class TopTwo(mr.Monoid):
        """The two largest numbers; right only where ``first >= second``."""

        domain = declared
        first: mr.Scalar = -math.inf
        second: mr.Scalar = -math.inf

        def combine(a, b):
            return TopTwo(
                first=torch.maximum(torch.maximum(a.first, a.second), torch.maximum(b.first, b.second)),
                second=torch.maximum(torch.minimum(a.first, b.first), torch.maximum(a.second, b.second)),
            )

    return TopTwo


def in_order(x):
    return x.first >= x.second


def draw_in_order(generator, batch, size):
    a, b = torch.randn(2, *batch, 1, generator=generator, dtype=torch.float64)
    return {"first": torch.maximum(a, b), "second": torch.minimum(a, b)}


def test_a_domain_silences_what_cannot_happen():
    with pytest.raises(mr.MonoidLawError, match="associativity"):
        probe(make_capped(None))
    uniform = lambda gen, shape: torch.rand(shape, generator=gen, dtype=torch.float64)
    for domain in ({"n": Domain(low=0.0, high=1.0)}, {"n": uniform}):
        probe(make_capped(domain))
        laws.check(make_capped(domain), cases=50)


def test_an_identity_of_all_folds_will_do():
    class Norm(mr.Monoid):
        """The identity is none of negative numbers, but no fold is negative."""

        n: mr.Scalar = 0.0

        def combine(a, b):
            return Norm(n=torch.hypot(a.n, b.n))

    probe(Norm)
    with pytest.raises(mr.MonoidLawError, match="left_identity"):
        laws.check(Norm)


@pytest.mark.parametrize("domain", [in_order, draw_in_order], ids=["predicate", "sampler"])
def test_a_domain_relates_fields(domain):
    unrelated = make_top_two({})
    with pytest.raises(mr.MonoidLawError):
        laws.check(unrelated)
    monoid = make_top_two(staticmethod(domain))
    report = laws.check(monoid)
    assert report.counts["associativity"] >= 100
    probe(monoid)
    both = monoid * monoids.Sum
    laws.check(both, cases=60)
    probe(both)

    @mr.op
    def best(x: mr.Row["d"], y: mr.Col["d"]):
        two = mr.reduce(monoid, first=x @ y, second=torch.where(mr.col_index < 0, x @ y, -torch.inf))
        return two.first, two.second

    x, y = torch.randn(4, 3), torch.randn(50, 3)
    expected = (x @ y.T).topk(2).values
    for found, value in zip(best(x, y), expected.T, strict=True):
        torch.testing.assert_close(found, value)


@pytest.mark.parametrize("domain", [in_order, draw_in_order], ids=["predicate", "sampler"])
def test_within_a_domain_a_broken_law_is_still_found_and_the_example_is_reachable(domain):
    class Wrong(mr.Monoid):
        first: mr.Scalar = -math.inf
        second: mr.Scalar = -math.inf

        def combine(a, b):
            return Wrong(first=torch.maximum(a.first, b.first), second=(a.second + b.second) / 2)

    Wrong.domain = staticmethod(domain)
    with pytest.raises(mr.MonoidLawError, match="Wrong breaks the law") as raised:
        laws.check(Wrong)
    lines = [line for line in str(raised.value).splitlines() if line.strip()[:4] in ("a = ", "b = ", "c = ")]
    for line in lines:
        first, second = (float(part.split("=")[1]) for part in line.split("(")[1].rstrip(")").split(", "))
        assert first >= second


def test_what_is_no_domain():
    with pytest.raises(mr.DeclarationError, match="domain"):
        make_top_two(staticmethod(lambda a, b: True))
    with pytest.raises(mr.DeclarationError, match="domain"):
        make_top_two(3)
    with pytest.raises(mr.ArgumentError, match="accepted none"):
        laws.check(make_top_two(staticmethod(lambda x: x.first * 0 == 1)))


# Rounding is no breach; a choice between equals is ---------------------------------------------------------------


class Float32Sum(mr.Monoid):
    """Rounds inside combine: right to seven digits."""

    v: mr.Vector = 0.0

    def combine(a, b):
        return Float32Sum(v=(a.v.float() + b.v.float()).double())


class Moments(mr.Monoid):
    """Mean and squared deviations with no ``approx`` of its own: m2 is as good as the squares that it is made of."""

    domain = {"n": Domain(low=0.0, high=100.0), "m2": Domain(low=0.0)}
    n: mr.Scalar = 0.0
    mean: mr.Scalar = 0.0
    m2: mr.Scalar = 0.0

    def combine(a, b):
        n = a.n + b.n
        part = torch.where(n == 0, 0.0, b.n / torch.where(n == 0, 1.0, n))
        delta = b.mean - a.mean
        return Moments(n=n, mean=a.mean + delta * part, m2=a.m2 + b.m2 + delta * (delta * (a.n * part)))

    def legal(x):
        n = x.n.round()
        return Moments(n=n, mean=torch.where(n == 0, 0.0, x.mean), m2=torch.where(n <= 1, 0.0, x.m2))


class NearestToOne(mr.Monoid):
    """Of tiny numbers all distances to 1 round to 1: which of them wins is rounding."""

    integers = ("label",)
    v: mr.Scalar = math.inf
    label: mr.Scalar = 99

    def combine(a, b):
        da, db = (a.v - 1.0).abs(), (b.v - 1.0).abs()
        take = (db < da) | ((b.v == a.v) & (b.label < a.label))
        return NearestToOne(v=torch.where(take, b.v, a.v), label=torch.where(take, b.label, a.label))

    def legal(x):  # two numbers equally far from 1 on both sides, 0 and 2, are ties that this monoid does not break
        return NearestToOne(v=torch.where(x.v > 1.0, 1.0, x.v), label=torch.where(x.v == math.inf, 99, x.label))


@pytest.mark.parametrize("monoid", [Float32Sum, Moments, NearestToOne], ids=lambda m: m.__name__)
def test_rounding_is_no_breach(monoid):
    laws.check(monoid)
    probe(monoid)


def test_near_ties_of_a_rounded_key_are_no_breach():
    class Best(mr.Monoid):
        """Candidates with a score that is computed: 0.1 * 3 and 0.3 differ in the last digit."""

        integers = ("label",)
        s: mr.Scalar = -math.inf
        label: mr.Scalar = 99

        def combine(a, b):
            ka, kb = torch.exp(a.s * 1e-7), torch.exp(b.s * 1e-7)  # almost all of s is rounded away
            take = (kb > ka) | ((b.s == a.s) & (b.label < a.label))
            return Best(s=torch.where(take, b.s, a.s), label=torch.where(take, b.label, a.label))

    laws.check(Best, cases=60, fields={"s": close_numbers})


def close_numbers(gen, shape):
    return 1.0 + 1e-10 * torch.rand(shape, generator=gen, dtype=torch.float64)


def make_first_wins(low, high):
    class FirstWins(mr.Monoid):
        """Of equal probabilities whichever comes first: depends on the order."""

        integers = ("label",)
        domain = {"p": Domain(low=low, high=high), "label": Domain(low=0.0)}
        p: mr.Scalar = 0.0
        label: mr.Scalar = 0

        def combine(a, b):
            take = b.p > a.p
            return FirstWins(p=torch.where(take, b.p, a.p), label=torch.where(take, b.label, a.label))

        def legal(x):
            return FirstWins(p=x.p, label=torch.where(x.p == 0, 0, x.label))

    return FirstWins


@pytest.mark.parametrize("high", [1.0, math.inf], ids=["bounded", "unbounded"])
def test_ties_are_tried_in_every_domain(high):
    with pytest.raises(mr.MonoidLawError, match="commutativity"):
        laws.check(make_first_wins(0.0, high))


def test_small_domains_are_compared_by_their_own_size():
    small = make_mean()
    small.domain = {"v": Domain(low=-1e-9, high=1e-9)}
    with pytest.raises(mr.MonoidLawError, match=r"associativity|identity"):
        laws.check(small)

    class Total(mr.Monoid):
        domain = {"v": Domain(low=-1e-9, high=1e-9)}
        v: mr.Scalar = 0.0

        def combine(a, b):
            return Total(v=a.v + b.v)

    laws.check(Total)
