"""What a monoid class declares, what its elements are, and each way to a gradient."""

import copy
import math
import typing

import pytest
import torch

from monoidreduce import errors
from monoidreduce.algebra import Domain, Field, List, Matrix, Monoid, Scalar, Vector, dot, fold, laws, monoids, product


class LogMean(Monoid):
    z: Scalar = -math.inf
    v: Vector = 0.0

    def combine(a, b):
        z = torch.logaddexp(a.z, b.z)
        return LogMean(z=z, v=a.v * torch.exp(a.z - z) + b.v * torch.exp(b.z - z))

    def pullback(c, a, g):
        w = torch.exp(a.z - c.z)
        return LogMean(z=w * (g.z + dot(g.v, a.v - c.v)), v=w * g.v)


class Total(Monoid):
    v: Scalar = 0.0

    def combine(a, b):
        return Total(v=a.v + b.v)


class Times(Monoid):
    v: Scalar = 1.0

    def combine(a, b):
        return Times(v=a.v * b.v)

    def remove(c, a):
        return Times(v=c.v / a.v)


def declare(source: str) -> type[Monoid]:
    """Run the source of a module and return the class called M in it."""
    space: dict = {"__name__": __name__}
    exec(compile(source, "<declared>", "exec", dont_inherit=True), space)
    return space["M"]


COMBINE = "\n    def combine(a, b):\n        return a\n"


# --- declarations ---


def test_fields_keep_their_order_and_identity():
    assert list(LogMean.fields().items()) == [("z", Field(Scalar, -math.inf)), ("v", Field(Vector, 0.0))]
    marker, identity = LogMean.fields()["z"]
    assert marker is Scalar and identity == -math.inf


@pytest.mark.parametrize(
    "source",
    [
        "from monoidreduce.algebra import Monoid, Scalar\nclass M(Monoid):\n    z: Scalar = 0.0" + COMBINE,
        "from __future__ import annotations\nfrom monoidreduce.algebra import Monoid, Scalar\n"
        "class M(Monoid):\n    z: Scalar = 0.0" + COMBINE,
        "from __future__ import annotations\nimport monoidreduce.algebra as mr\n"
        "class M(mr.Monoid):\n    z: mr.Scalar = 0.0" + COMBINE,
        "import monoidreduce.algebra as mr\nclass M(mr.Monoid):\n    z: 'mr.Scalar' = 0.0" + COMBINE,
        "from __future__ import annotations\nimport monoidreduce.algebra as mr\n"
        "class M(mr.Monoid):\n    z: 'mr.Scalar' = 0.0" + COMBINE,
        # the marker is a name inside a function, where a string annotation cannot be evaluated
        "from __future__ import annotations\ndef make():\n    from monoidreduce.algebra import Monoid, Scalar\n"
        "    class M(Monoid):\n        z: Scalar = 0.0\n        def combine(a, b):\n            return a\n"
        "    return M\nM = make()",
    ],
)
def test_annotations_may_be_strings(source):
    assert dict(declare(source).fields()) == {"z": Field(Scalar, 0.0)}


def test_class_variables_and_known_attributes_are_not_fields():
    class Tagged(Monoid):
        commutative: bool = False
        unit: typing.ClassVar[str] = "m"
        v: Scalar = 0.0

        def combine(a, b):
            return Tagged(v=a.v + b.v)

    assert list(Tagged.fields()) == ["v"] and Tagged.commutative is False and Tagged.unit == "m"


def test_fields_and_roads_are_inherited():
    class Scaled(LogMean):
        s: Scalar = 1.0

    assert list(Scaled.fields()) == ["z", "v", "s"] and Scaled.has_gradient


def test_a_base_without_fields_may_be_abstract():
    class Base(Monoid):
        def helper(self):
            return 1

    class Real(Base):
        v: Scalar = 0.0

        def combine(a, b):
            return Real(v=a.v + b.v)

    assert Real(v=1.0).helper() == 1 and not dict(Base.fields())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    v: int = 0" + COMBINE, ["field v of M", "int", "Scalar", "ClassVar"]),
        ("    v: 'Nonsense' = 0" + COMBINE, ["field v of M", "Nonsense"]),
        ("    v: Scalar" + COMBINE, ["has no identity value", "v: Scalar = 0.0"]),
        ("    v: Scalar = None" + COMBINE, ["None", "a number such as 0.0 or -math.inf"]),
        ("    v: Scalar = float('nan')" + COMBINE, ["nan", "a number"]),
        ("    v: List = (1.0,)" + COMBINE, ["(1.0,)", "()"]),
        ("    f: Function = 3" + COMBINE, ["3", "callable"]),
        ("    combine: Scalar = 0.0", ["cannot have a field called combine", "another name"]),
        ("    _v: Scalar = 0.0" + COMBINE, ["_v"]),
        ("    v: Scalar = 0.0", ["no combine", "Define combine(a, b)"]),
        (COMBINE, ["no fields", "v: Scalar = 0.0"]),
        ("    integers = ('n',)\n    v: Scalar = 0.0" + COMBINE, ["integers names n", "Its fields are: v"]),
        ("    domain = {'n': None}\n    v: Scalar = 0.0" + COMBINE, ["domain names n"]),
    ],
)
def test_a_wrong_declaration_says_how_to_mend_it(body, words):
    header = "from monoidreduce.algebra import Function, List, Monoid, Scalar\nclass M(Monoid):\n"
    with pytest.raises(errors.DeclarationError) as caught:
        declare(header + body)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_combine_must_return_an_element():
    class Tuple(Monoid):
        v: Scalar = 0.0

        def combine(a, b):
            return (a.v + b.v,)

    with pytest.raises(errors.DeclarationError, match=r"combine returned tuple.*return Tuple\(v=\.\.\.\)"):
        fold(Tuple, torch.ones(3))


def test_combine_decides_by_no_python_if():
    class Larger(Monoid):
        v: Scalar = -math.inf

        def combine(a, b):
            return Larger(v=a.v if a.v > b.v else b.v)

    with pytest.raises(errors.DeclarationError, match=r"Larger.combine decides by a Python if.*torch\.where"):
        laws.check(Larger)


# --- elements ---


def test_elements_are_immutable_records():
    x = Total(v=1.0)
    assert x.v == 1.0 and x.asdict() == {"v": 1.0} and repr(x) == "Total(v=1.0)"
    for change in (lambda: setattr(x, "v", 2.0), lambda: delattr(x, "v"), lambda: setattr(x, "w", 2.0)):
        with pytest.raises(errors.ArgumentError, match="stays as it is"):
            change()
    x.asdict()["v"] = 5.0
    assert x.v == 1.0 and copy.deepcopy(x).v == 1.0


def test_wrong_fields_are_named():
    with pytest.raises(errors.ArgumentError, match=r"LogMean\(\.\.\.\) lacks v and has no field w.*z: Scalar = -inf"):
        LogMean(z=1.0, w=2.0)
    with pytest.raises(TypeError):
        Total(1.0)


def test_combine_is_a_plain_function_and_a_method():
    a, b = Total(v=2.0), Total(v=3.0)
    assert Total.combine(a, b).v == a.combine(b).v == 5.0

    class Static(Monoid):
        v: Scalar = 0.0

        @staticmethod
        def combine(a, b):
            return Static(v=a.v + b.v)

    assert Static.combine(Static(v=2.0), Static(v=3.0)).v == 5.0


# --- the identity ---


def test_identity_takes_its_shape_from_sizes_or_from_an_element():
    x = LogMean.identity(batch=(2, 3), size=4, dtype=torch.float64)
    assert x.z.shape == (2, 3, 1) and x.v.shape == (2, 3, 4) and x.v.dtype == torch.float64
    assert (x.z == -math.inf).all() and (x.v == 0).all()
    y = LogMean.identity(x)
    assert y.z.shape == x.z.shape and y.v.dtype == torch.float64
    assert LogMean.identity(size={"v": 5}).v.shape == (5,)
    assert LogMean.combine(LogMean.identity(), LogMean(z=torch.zeros(7, 1), v=torch.ones(7, 4))).v.shape == (7, 4)


def test_identity_of_matrices_lists_functions_booleans_and_integers():
    assert torch.equal(monoids.MMul.identity(batch=(2,), size=3).m, torch.eye(3).expand(2, 3, 3))
    assert monoids.Cat.identity(batch=(2,)).items.shape == (2, 0)
    assert monoids.Compose.identity().f(17) == 17
    assert monoids.And.identity().v.dtype == torch.bool
    assert monoids.ArgMax.identity().index.dtype == torch.int64
    least = monoids.Max.identity(monoids.Max(v=torch.zeros(1, dtype=torch.int32)))
    assert least.v.item() == torch.iinfo(torch.int32).min


# --- dot ---


def test_dot_of_tensors_keeps_the_axis():
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    assert dot(x, y).shape == (4, 1) and torch.allclose(dot(x, y), (x * y).sum(-1, keepdim=True))


def test_dot_of_symbols_is_matmul():
    class Symbol:
        def __matmul__(self, other):
            return ("@", other)

        def __rmatmul__(self, other):
            return (other, "@")

    s = Symbol()
    assert dot(s, 3.0) == ("@", 3.0) and dot(3.0, s) == (3.0, "@")
    assert dot(0.0, s) == 0.0 and dot(s, 0) == 0.0


# --- gradients ---


def test_roads_to_a_gradient():
    assert (LogMean.has_gradient, LogMean.gradient_source) == (True, "pullback")
    assert (Times.has_gradient, Times.gradient_source) == (True, "remove")
    assert (Total.has_gradient, Total.gradient_source) == (False, "none")
    one = Total(v=torch.ones(1))
    for ask in (lambda: Total.pullback(one, one, one), lambda: Total.remove(one, one)):
        with pytest.raises(errors.NoGradientError, match=r"Total has no local gradient.*pullback.*remove"):
            ask()


def test_pullback_is_derived_from_remove():
    a, b, g = (Times(v=torch.tensor([[n]], dtype=torch.float64)) for n in (2.0, 5.0, 3.0))
    c = Times.combine(a, b)
    assert Times.pullback(c, a, g).v.item() == pytest.approx(15.0)
    with torch.no_grad():
        assert Times.pullback(c, a, g).v.item() == pytest.approx(15.0)


def test_a_derived_pullback_can_be_differentiated_again():
    def pulled(c, a, g):
        return Times.pullback(Times(v=c), Times(v=a), Times(v=g)).v

    points = [torch.tensor([n], dtype=torch.float64, requires_grad=True) for n in (6.0, 2.0, 1.5)]
    assert torch.autograd.gradcheck(pulled, points)  # D(c, a) g = g c / a, held against differences


def test_a_pullback_broadcasts_its_cotangent():
    a = Times(v=torch.full((4, 1), 2.0))
    c = Times(v=torch.full((4, 1), 6.0))
    assert Times.pullback(c, a, Times(v=torch.ones(1))).v.tolist() == [[3.0]] * 4


# --- products ---


def test_product_fields_are_the_union_with_prefixes_where_names_collide():
    both = product(monoids.Sum, monoids.LogWSum, monoids.Sum)
    assert list(both.fields()) == ["sum_v", "z", "logwsum_v", "sum2_v"]
    assert both.fields()["logwsum_v"] == Field(Vector, 0.0)
    assert list((monoids.Sum * monoids.Count).fields()) == ["v", "n"]


def test_products_are_associative_as_classes():
    a, b, c = monoids.Sum, monoids.Max, monoids.LogSumExp
    assert (a * b) * c is a * (b * c) is product(a, b, c)
    assert (a * b).components == (a, b)
    assert not (a * monoids.MMul).commutative and (a * monoids.MMul).tensor_only


def test_product_combines_and_pulls_back_each_part():
    both = monoids.Sum * monoids.Max
    a, b, g = (both(sum_v=torch.tensor([s]), max_v=torch.tensor([m])) for s, m in ((1.0, 5.0), (2.0, 3.0), (7.0, 9.0)))
    c = both.combine(a, b)
    assert (c.sum_v.item(), c.max_v.item()) == (3.0, 5.0)
    pulled = both.pullback(c, b, g)
    assert (pulled.sum_v.item(), pulled.max_v.item()) == (7.0, 0.0)


def test_a_product_has_a_gradient_if_its_parts_have_or_are_discrete():
    assert (monoids.Sum * monoids.Or).has_gradient
    assert not (monoids.Sum * Total).has_gradient
    assert not (monoids.And * monoids.Or).has_gradient
    mixed = monoids.Sum * monoids.Or
    x = mixed(sum_v=torch.ones(1), or_v=torch.tensor([True]))
    pulled = mixed.pullback(x, x, mixed(sum_v=torch.full((1,), 4.0), or_v=torch.zeros(1)))
    assert pulled.sum_v.item() == 4.0 and pulled.or_v.item() == 0


def test_product_of_something_else():
    for wrong in ((int,), (), (monoids.Sum, torch.ones(1)), (Monoid,)):
        with pytest.raises(errors.ArgumentError, match="subclasses of Monoid"):
            product(*wrong)


# --- approximate equality, domains ---


def test_default_equality_is_near_for_numbers_and_exact_for_infinities():
    def same(x, y):
        return Total.approx(*(Total(v=torch.tensor([n], dtype=torch.float64)) for n in (x, y)))

    assert same(1.0, 1.0 + 1e-10) and not same(1.0, 1.0 + 1e-6)
    assert same(1e30, 1e30 * (1 + 1e-10)) and not same(1e30, 1.0001e30)
    assert same(-math.inf, -math.inf) and not same(-math.inf, -1e308) and not same(math.inf, -math.inf)
    assert same(math.nan, math.nan) and not same(math.nan, 0.0)
    sized = [Total(v=torch.tensor([n], dtype=torch.float64)) for n in (0.0, 1e3)]
    assert not Total.approx(*sized) and Total.approx(*sized, scale={"v": 1e30})


def test_equality_ignores_what_has_no_weight():
    at_nothing = [monoids.LogWSum(z=torch.tensor([-math.inf]), v=torch.tensor([n])) for n in (0.0, 5.0)]
    assert monoids.LogWSum.approx(*at_nothing)
    weightless = [monoids.WSum(w=torch.zeros(1), v=torch.tensor([n])) for n in (0.0, 5.0)]
    assert monoids.WSum.approx(*weightless)
    heavy = [monoids.LogWSum(z=torch.tensor([0.0]), v=torch.tensor([n])) for n in (0.0, 5.0)]
    assert not monoids.LogWSum.approx(*heavy)
    assert not monoids.Cat.approx(*(monoids.Cat(items=torch.zeros(n)) for n in (2, 3)))


def test_domain_mirrors_or_clamps():
    assert Domain(low=0.0).clamp(-3.0) == 3.0
    assert Domain(low=1.0, high=2.0).clamp(7.0) == 2.0
    assert Domain(low=0.0, specials=(-math.inf,)).clamp(-math.inf) == -math.inf


# --- bodies that symbols can go through ---


class Traced:
    """A symbol that knows elementwise functions only: no shapes, no sums, no in-place."""

    seen: typing.ClassVar[set] = set()
    allowed = frozenset({"where", "exp", "log", "maximum", "minimum", "logical_and", "logical_or"})

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__.removeprefix("wrapped_")
        assert name in cls.allowed, f"{name} is not elementwise"
        cls.seen.add(name)
        return cls()

    def _same(self, *other):
        return Traced()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _same
    __lt__ = __gt__ = __eq__ = __ne__ = __and__ = __or__ = __neg__ = _same  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


ALL = [getattr(monoids, name) for name in monoids.__all__ if name != "TopK"] + [monoids.TopK(3)]


@pytest.mark.parametrize("monoid", [m for m in ALL if not m.tensor_only], ids=lambda m: m.__name__)
def test_catalogue_bodies_can_be_traced(monoid):
    a, b, g = (monoid(**{name: Traced() for name in monoid.fields()}) for _ in range(3))
    c = monoid.combine(a, b)
    assert all(isinstance(value, Traced) for value in c.asdict().values())
    if monoid.has_gradient:
        assert all(isinstance(value, Traced) for value in monoid.pullback(c, a, g).asdict().values())


def test_only_four_monoids_need_tensors():
    assert {m.__name__ for m in ALL if m.tensor_only} == {"TopK(3)", "MMul", "Cat", "Compose"}
    assert {m.__name__ for m in ALL if not m.commutative} == {"MMul", "Cat", "Compose"}
    assert {f.marker for m in ALL for f in m.fields().values()} >= {Scalar, Vector, Matrix, List}
