"""``user``: any monoid of the user's, or of the catalogue. Parameters: ``(monoid,)``.

Its fields are the monoid's, and its results are its state. Nearly all of it follows from ``combine``, also the
pullback of one that brings none. :func:`gradient_source` says where a monoid's gradient comes from:

- ``pullback`` or ``remove``: the monoid brings it;
- ``trace``: ``combine`` is differentiated symbolically at (a, b), and b is eliminated with the help of c = a ⊙ b. Where
  that leaves a formula of c and a alone, and ``laws.local_gradient`` confirms it in float64, the formula is the
  pullback, and every engine, rank, stream and kernel uses it as if the monoid had brought it;
- ``others``: from ``combine`` at (a_j, ⊙ of all others), block by block (``engines/common/block_gradients.py``);
- ``none``: nothing in it has a derivative.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from ..algebra.cases import FAMILIES, draw_case
from ..algebra.fold import fold_pairs
from ..algebra.laws import LAWS
from ..algebra.verdict import Sides, broken
from ..errors import NoGradientError
from ..program import constructors
from ..program import intervals as iv
from ..program.constructors import apply, find_listed, listed_node
from ..program.expression import Expr, Feature, node, topological
from ..program.primitives import PRIMITIVES
from ..program.reverse_mode import backpropagate
from ..program.symbol import Symbol, current_trace, expr_of
from .base import FastForm, Lines, Outputs, Reads, Reduction

Fields = dict[str, Any]  # a symbol (or a number) for each field of a monoid

_LAW = next(law for law in LAWS if law.name == "local_gradient")
_CASES = 16  # of each family, with so many features
_SIZE = 2


@functools.lru_cache(maxsize=1024)
def gradient_source(monoid: Any) -> str:
    """``pullback``, ``remove``, ``trace``, ``others`` or ``none``: how a gradient goes back through the monoid."""
    if monoid.has_gradient:
        return str(monoid.gradient_source)
    if monoid.components:
        sources = {gradient_source(part) for part in monoid.components}
        return "none" if sources == {"none"} else "others" if "others" in sources else "trace"
    if monoid.discrete():
        return "none"
    found = _call_untraced(_derive, monoid, (None,) * len(monoid.fields()))
    if found == "none":
        return "none"
    vectors = tuple("d" if field.marker.axes else None for field in monoid.fields().values())
    return "trace" if _is_confirmed(monoid, vectors) else "others"


@functools.lru_cache(maxsize=1024)
def is_idempotent(monoid: Any) -> bool:
    """Whether a ⊙ a is a for some states that are drawn, exactly: what is folded twice then counts once."""
    return _call_untraced(_folds_twice_alike, monoid)


def _folds_twice_alike(monoid: Any) -> bool:
    make = torch.Generator().manual_seed(0)
    draw = lambda field: torch.rand(
        *(8, _SIZE)[: 1 + bool(field.marker.axes)], generator=make, dtype=torch.float64, device="cpu"
    )
    state = {name: 0.1 + draw(field) for name, field in monoid.fields().items()}
    try:
        twice = monoid.combine(monoid(**state), monoid(**state))
        return all(torch.equal(torch.as_tensor(getattr(twice, name)), value) for name, value in state.items())
    except Exception:  # of fields that are no such numbers
        return False


def local_pullback(monoid: Any, results: Fields, fields: Fields, g: Fields) -> Fields:
    """The cotangents of one pair's fields, from the results, the pair's fields and the cotangents of the results (0.0:
    none); of every source but ``others``."""
    source = gradient_source(monoid)
    if source == "none":
        return dict.fromkeys(monoid.fields())
    if source == "pullback":
        return dict(monoid.pullback(monoid(**results), monoid(**fields), monoid(**g)).asdict())
    if source == "remove":
        return _derive_from_remove(monoid, results, fields, g)
    if not monoid.components:
        return _derive_from_trace(monoid, results, fields, g)
    found: Fields = {}
    for one, names in zip(monoid.components, monoid.component_fields, strict=True):
        mine = [{old: values[new] for old, new in names.items()} for values in (results, fields, g)]
        found |= {names[old]: value for old, value in local_pullback(one, *mine).items()}
    return found


def _derive_from_trace(monoid: Any, results: Fields, fields: Fields, g: Fields) -> Fields:
    features = {n: expr_of(fields[n]).feature for n in monoid.fields()}
    formulas = _derive(monoid, tuple(features.values()))
    assert not isinstance(formulas, str)
    given = {
        _make_leaf(f"{name}/{n}", feature, name == "a"): expr_of(values[n])
        for name, values in (("c", results), ("a", fields), ("g", g))
        for n, feature in features.items()
    }
    return {n: None if e is None else Symbol(constructors.substitute((e,), given)[0]) for n, e in formulas.items()}


def _derive_from_remove(monoid: Any, results: Fields, fields: Fields, g: Fields) -> Fields:
    """D(c, a) g as the derivative of ``combine(a, rest)`` by a, then with ``rest = remove(c, a)`` put in its place."""
    rest = monoid.remove(monoid(**results), monoid(**fields)).asdict()
    values: dict[Expr, Expr] = {}  # of the leaves that stand for the fields of both
    operands = []
    for name, state in (("own", fields), ("rest", rest)):
        leaves = {n: _make_leaf(f"{name}/{n}", expr_of(v).feature, True) for n, v in state.items()}
        values |= {leaves[n]: expr_of(v) for n, v in state.items()}
        operands.append(leaves)
    combined = monoid.combine(*(monoid(**{n: Symbol(e) for n, e in leaves.items()}) for leaves in operands)).asdict()
    pulled = backpropagate([(expr_of(combined[n]), expr_of(g[n])) for n in combined], list(operands[0].values()))
    return {
        n: None if e is None else Symbol(constructors.substitute((e,), values)[0])
        for n, e in zip(operands[0], pulled, strict=True)
    }


# The formula ----------------------------------------------------------------------------------------------------


def _share_of_logaddexp(g: Any, y: Any, a: Any, b: Any) -> tuple:
    """exp(a - y), and 0 where there is nothing: y is minus infinity."""
    top = torch.where(y == -math.inf, 0.0, y)
    return g * torch.exp(a - top), g * torch.exp(b - top)


def _give_to_extremes(g: Any, y: Any, a: Any, b: Any) -> tuple:
    """All to those that equal the extreme: how many do cannot be told from it."""
    return torch.where(a == y, g, 0.0), torch.where(b == y, g, 0.0)


# Derivatives by one argument that are written with the result and that argument alone
_LOCAL: Mapping[str, Callable[..., tuple]] = {
    "logaddexp": _share_of_logaddexp,
    "maximum": _give_to_extremes,
    "minimum": _give_to_extremes,
}


@functools.lru_cache(maxsize=1024)
def _derive(monoid: Any, features: tuple[Feature, ...]) -> dict[str, Expr | None] | str:
    """Per field its cotangent, written with the leaves c/NAME, a/NAME and g/NAME; ``others`` where b cannot be
    eliminated or combine takes no symbols, ``none`` where nothing in it has a derivative."""
    forms = dict(zip(monoid.fields(), features, strict=True))
    a, b, c, g = ({n: _make_leaf(f"{side}/{n}", f, side in "ab") for n, f in forms.items()} for side in "abcg")
    try:
        combined = _combine_symbols(monoid, a, b)
        pulled = backpropagate([(combined[n], g[n]) for n in forms], list(a.values()), _LOCAL)
    except Exception:  # combine takes tensors alone, or has an operation without a symbolic derivative
        return "others"
    if all(e is None for e in pulled):
        return "none"
    found = dict(zip(forms, pulled, strict=True))
    return _eliminate(found, combined, set(b.values()), c) or "others"


def _combine_symbols(monoid: Any, a: dict[str, Expr], b: dict[str, Expr]) -> dict[str, Expr]:
    x, y = (monoid(**{n: Symbol(e) for n, e in side.items()}) for side in (a, b))
    return {n: expr_of(v) for n, v in monoid.combine(x, y).asdict().items()}


@functools.lru_cache(maxsize=1024)
def trace_combine(monoid: Any, features: tuple[Feature, ...]) -> tuple[Expr, ...]:
    """``combine`` of two elements with fields of these features, as an expression per field; of none where it takes
    tensors alone."""
    a, b = (
        {n: _make_leaf(f"{side}/{n}", f, True) for n, f in zip(monoid.fields(), features, strict=True)} for side in "ab"
    )
    try:
        return tuple(_call_untraced(_combine_symbols, monoid, a, b).values())
    except Exception:  # an operation without a symbolic form
        return ()


_KEEPS_RESULT = ("exp", "sqrt", "tanh", "sigmoid", "reciprocal")
_KEEPS_NOTHING = ("add", "sub", "neg", "cast", "fsum", "spread")


@functools.lru_cache(maxsize=1024)
def saved_by_autograd(monoid: Any, features: tuple[Feature, ...], given: tuple[bool, ...]) -> tuple[Feature, ...]:
    """The features of the numbers that autograd saves of one ``combine`` of tensors; ``given``: the fields that are no
    constants. Of a field they are its elements (if given) and its results, which are the next level's elements.
    Without a trace, two per field."""
    combined = trace_combine(monoid, features)
    if not combined:
        return features * 2
    names, order = list(monoid.fields()), topological(combined)
    moving, depends = dict(zip(names, given, strict=True)), dict[Expr, bool]()
    for _ in names:  # a constant field moves from some level on
        for n in order:
            own = moving[_name_field(n)] if n.op == "leaf" else n.dtype == "float" and any(depends[a] for a in n.args)
            depends[n] = own
        moving = {n: moving[n] or depends[e] for n, e in zip(names, combined, strict=True)}
    saved = {a for n in order if depends[n] and n.args for a in _list_saved(n, depends) if a.dtype == "float"}
    fields = {_name_field(e): e.feature for e in saved if e.op == "leaf"}
    first = [f for n, f in fields.items() if given[names.index(n)]]
    others = [e.feature for e in saved if e.op not in ("leaf", "const") and e not in combined]
    return (*first, *fields.values(), *others)


def _list_saved(n: Expr, depends: Mapping[Expr, bool]) -> Sequence[Expr]:
    """The numbers that autograd saves of one operation."""
    if n.op in _KEEPS_NOTHING:
        return ()
    if n.op in _KEEPS_RESULT:
        return (n,)
    if n.op in ("mul", "div"):
        x, y = n.args
        return [*((y,) if depends[x] or n.op == "div" else ()), *((x,) if depends[y] else ())]
    return n.args


def _name_field(leaf: Expr) -> str:
    return str(leaf.attrs[0]).partition("/")[2]


def _eliminate(
    found: dict[str, Expr | None], combined: dict[str, Expr], b: set[Expr], c: dict[str, Expr]
) -> dict[str, Expr | None] | None:
    """The same cotangents without b; None where it stays."""
    depends = functools.cache(lambda e: not b.isdisjoint(topological([e])))
    results = {e: c[n] for n, e in combined.items() if depends(e)}
    rest: dict[Expr, Expr] = {}  # of a result that is a sum, the part with b: the result less the part without
    for e, whole in list(results.items()):
        for known, hidden in (e.args, e.args[::-1]) if e.op == "add" else ():
            (known,) = constructors.substitute((known,), results)
            if not depends(known) and hidden not in b:
                rest[hidden] = constructors.apply("sub", whole, known)
    made = dict(found)
    for n, g in found.items():
        if g is None or not depends(g):
            continue
        (made[n],) = constructors.substitute((_gather_products(g, rest),), {**rest, **results})
        if depends(made[n]):
            return None
    return made


def _gather_products(e: Expr, known: Mapping[Expr, Expr]) -> Expr:
    """⟨x, y⟩ w as ⟨x, y w⟩ wherever y w is known."""
    done: dict[Expr, Expr] = {}
    for n in topological([e]):
        made = constructors.rebuild(n, tuple(done[a] for a in n.args)) if n.args else n
        for dot, w in (made.args, made.args[::-1]) if made.op == "mul" and made.feature is None else ():
            if dot.op != "fsum" or dot.args[0].op != "mul":
                continue
            for x, y in (dot.args[0].args, dot.args[0].args[::-1]):
                product = constructors.apply("mul", y, w)
                if product in known:
                    made = constructors.fsum(constructors.apply("mul", x, known[product]))
        done[n] = made
    return done[e]


def _make_leaf(name: str, feature: Feature, pair: bool) -> Expr:
    return node("leaf", (), (name,), rows=True, cols=pair, feature=feature, dtype="float")


# The confirmation -----------------------------------------------------------------------------------------------


def _is_confirmed(monoid: Any, features: tuple[Feature, ...]) -> bool:
    """Whether there is a formula, and ``laws.local_gradient`` holds with it as the pullback."""
    formulas = _call_untraced(_derive, monoid, features)
    if isinstance(formulas, str):
        return False

    def pullback(c: Any, a: Any, g: Any) -> Any:
        sides = {f"{side}/{n}": v for side, x in zip("cag", (c, a, g), strict=True) for n, v in x.asdict().items()}
        given = a.asdict()
        return type(a)(**{n: _evaluate(e, sides, given[n]) for n, e in formulas.items()})

    # elements of the subclass, since a law asks the class of an element for its pullback
    def combine(a: Any, b: Any) -> Any:
        return tried(**monoid.combine(monoid(**a.asdict()), monoid(**b.asdict())).asdict())

    own = {"pullback": pullback, "combine": combine, "__doc__": monoid.__doc__}
    tried: Any = type(monoid)(monoid.__name__, (monoid,), own)
    gen = torch.Generator().manual_seed(0)
    try:
        with _compute_plainly():
            return not any(_breaks(tried, family, gen) for family in FAMILIES if family.gradient)
    except Exception:  # its numbers are not what combine takes, or its domain accepts none: nothing is confirmed
        return False


@contextlib.contextmanager
def _compute_plainly() -> Iterator[None]:
    """Tensors compute here, whatever traces or transforms the call in which this is asked."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch.device("cpu"))
        yield


def _breaks(monoid: Any, family: Any, gen: torch.Generator) -> bool:
    case = draw_case(monoid, family, gen, count=_CASES, elements=2, size=_SIZE, uneven=False, fields={})
    return broken(replace(_LAW, run=_run_where_defined), case) is not None


def _run_where_defined(monoid: Any, case: Any) -> Sides:
    """The law's sides, without numbers at which combine itself has no derivative: its NaN is everybody's."""
    left, right = (x.asdict() for x in _LAW.run(monoid, case))
    none = {n: v.isnan() for n, v in right.items()}
    return Sides(*(monoid(**{n: v.masked_fill(none[n], 0.0) for n, v in x.items()}) for x in (left, right)))


def _evaluate(e: Expr | None, sides: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """A formula on tensors, in the convention of ``combine``: a number has a trailing axis of size 1."""
    if e is None:
        return torch.zeros_like(like)
    done: dict[Expr, Any] = {}
    for n in topological([e]):
        args = [done[a] for a in n.args]
        if n.op == "leaf":
            done[n] = sides[n.attrs[0]]
        elif n.op in PRIMITIVES:
            primitive = PRIMITIVES[n.op]
            kind = {"bool": torch.bool, "int": torch.int64}.get(n.attrs[0], like.dtype) if n.op == "cast" else None
            own = dict(zip(primitive.attributes, n.attrs, strict=True))
            done[n] = args[0].to(kind) if kind is not None else primitive.torch(*args, **own)
        else:
            done[n] = _FEATURES[n.op](n, like, *args)
    return done[e].expand_as(like)


_FEATURES: Mapping[str, Callable[..., Any]] = {
    "const": lambda n, like: torch.tensor(n.attrs[0], dtype=like.dtype if n.dtype == "float" else None, device="cpu"),
    "size": lambda n, like: torch.tensor(_SIZE, device="cpu"),
    "fsum": lambda n, like, x: x.expand(*x.shape[:-1], _SIZE).sum(-1, keepdim=True),
    "spread": lambda n, like, x: x.expand(*x.shape[:-1], _SIZE),
    "component": lambda n, like, x: x[..., n.attrs[0] : n.attrs[0] + 1],
}


def _call_untraced(function: Callable[..., Any], *args: Any) -> Any:
    """``function``, outside of the trace of a body: symbols belong to theirs."""
    token = current_trace.set(None)
    try:
        return function(*args)
    finally:
        current_trace.reset(token)


__all__ = ["gradient_source", "local_pullback", "saved_by_autograd", "trace_combine"]


# The lines of a Triton kernel that folds a monoid with vector fields.
#
# The state of a kept index is a number ``[KEPT]`` or a vector ``[KEPT, features]`` for each field. A tile's elements
# are made whole, ``[KEPT, FOLDED]`` and ``[KEPT, FOLDED, features]``, and folded as a tree: the two halves of the
# folded axis are combined until one element is left. So every pair is combined once, its numbers are not repeated for
# its features, and ``combine`` may take inner products.

_LEVELS = 8  # of the tree: tiles have at most 2**8 folded indices


class VectorLines(Lines):
    """Any monoid with vector fields; its results are its state."""

    def prepare(self) -> None:
        names, self.features = self.kind.state_names(self.params), [a.feature for a in self.reduction.args]
        self.state = [f"{self.name}_{n}" for n in names]
        self.widths = [0 if f is None else self.tools.pad_width(self.v.spec.width(f)) for f in self.features]
        self.identities = [self.tools.literal(float(value)) for value in self.kind.identity(self.params)]
        self.v.pair_features += sum(self.widths)
        sides = [[_make_argument(f"{s}_{n}", f) for n, f in zip(names, self.features, strict=True)] for s in "ab"]
        inner = self.tools.block_function(self.v.spec)
        inner.outer |= {e: str(e.attrs[0]) for side in sides for e in side}
        results = self.kind.combine(self.params, *([Symbol(e) for e in side] for side in sides))
        texts = [inner.number(apply("cast", expr_of(x), to="float")) for x in results]
        arguments = ", ".join(str(e.attrs[0]) for side in sides for e in side)
        self.combine = f"combine{self.place}"
        self.helpers += [f"def {self.combine}({arguments}):"]
        self.helpers += [f"    {line}" for line in inner.before] + [f"    return {', '.join(texts)}"]

    def start(self) -> list[str]:
        return [
            f"{s} = tl.full([KEPT{f', {w}' if w else ''}], {identity}, {self.v.float})"
            for s, w, identity in zip(self.state, self.widths, self.identities, strict=True)
        ]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v = self.v
        tiles = [f"{s}_tile" for s in self.state]
        parts = zip(tiles, fields, self.widths, self.identities, strict=True)
        v.inside += [f"{tile} = {self._elements(e, w, identity)}" for tile, e, w, identity in parts]
        seen = f"{self.name}_seen"
        v.inside += [f"{seen} = folded_in[None, :].to(tl.int32)"] if v.masked else []
        halves = [[f"{t}_{side}" for t in tiles] for side in "ab"]
        tree = [
            f"{a}, {b} = split_{'vectors' if w else 'numbers'}({t})"
            for t, a, b, w in zip(tiles, *halves, self.widths, strict=True)
        ]
        tree += [f"{seen}, {seen}_b = split_numbers({seen})"] if v.masked else []
        tree += self._combine(tiles, halves[0], halves[1], f"{seen}_b")
        v.inside += [
            f"for level in tl.static_range({_LEVELS}):",
            f"    if {tiles[0]}.shape[1] > 1:",
            *(f"        {line}" for line in tree),
        ]
        last = [f"tl.reshape({t}, [KEPT{f', {w}' if w else ''}])" for t, w in zip(tiles, self.widths, strict=True)]
        v.inside += [f"{seen} = tl.reshape({seen}, [1])"] if v.masked else []
        v.inside += self._combine(self.state, self.state, last, seen)

    def _combine(self, into: list[str], a: list[str], b: list[str], seen: str) -> list[str]:
        """Lines that combine two elements; where a tile reaches beyond the folded axis, only with what is ``seen``:
        the identity need not be one of itself (minus infinity less minus infinity is no number)."""
        if not self.v.masked:
            return [f"{', '.join(into)} = {self.combine}({', '.join((*a, *b))})"]
        new = [f"{s}_new" for s in self.state]
        lines = [f"{', '.join(new)} = {self.combine}({', '.join((*a, *b))})"]
        for x, y, z, w in zip(into, new, a, self.widths, strict=True):
            mask = f"tl.expand_dims({seen}, -1)" if w else seen
            lines.append(f"{x} = tl.where({mask} != 0, {y}, {z})")
        return lines

    def _elements(self, e: Expr, width: int, identity: str) -> str:
        """The elements of a tile: the identity beyond the folded axis."""
        v = self.v
        if not width:
            return f"tl.broadcast_to({v.mask_columns(v.full(e), identity)}, [KEPT, FOLDED])"
        text = self.tools.pair_vector(v, e)
        if v.masked:
            text = f"tl.where(folded_in[None, :, None], {text}, {identity})"
        return f"tl.broadcast_to({text}, [KEPT, FOLDED, {width}])"

    def finish(self) -> list[tuple[list[str], Any]]:
        found: list[tuple[list[str], Any]] = []
        for s, feature, width in zip(self.state, self.features, self.widths, strict=True):
            count = 0 if feature is None else self.v.spec.width(feature)
            if 0 < count <= self.tools.tiny:  # stored number by number
                lane = f"tl.arange(0, {width})[None, :]"
                texts = [f"tl.sum(tl.where({lane} == {f}, {s}, 0.0), 1)" for f in range(count)]
            else:
                texts = [s]
            found.append((texts, feature))
        return found


def _make_argument(name: str, feature: Any) -> Expr:
    return node("leaf", (), (name,), rows=False, cols=False, feature=feature, dtype="float")


def check_gradient(monoid: type) -> None:
    """Raise NoGradientError for a monoid that has no gradient, or none that is a formula of one pair."""
    source = gradient_source(monoid)
    if source == "none":
        raise NoGradientError(
            detail=f"a gradient was asked of {monoid.__name__}, whose combine has no derivative",
            fix="Detach what depends on it, or add pullback(c, a, g), the gradient that it should have",
        )
    if source == "others":
        raise NoGradientError(
            detail=f"the gradient of {monoid.__name__} is taken from combine with all other pairs, not from a formula",
            fix="Add pullback(c, a, g) (Theorem 2.1), or remove(c, a), to the monoid",
        )


class User(Reduction):
    name = "user"
    fast_forms = FastForm.LISTS | FastForm.CUT_LISTS | FastForm.LONG_LISTS
    vector_lines = VectorLines
    folds_trees = True
    merges_one = True  # x ⊙ identity: the form that every other fold has (0 for no weight)

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(f.feature, f.dtype) for f in fields]

    def result_names(self, fields: tuple[Expr, ...], params: tuple) -> tuple[str, ...]:
        return tuple(params[0].fields())

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        (monoid,) = params
        names = list(monoid.fields())
        check_gradient(monoid)
        whole, part = (dict(zip(names, values, strict=True)) for values in (results, fields))
        cotangents = {n: 0.0 if v is None else v for n, v in zip(names, g, strict=True)}
        pulled = local_pullback(monoid, whole, part, cotangents)
        listed = find_listed([f.expr for f in fields if isinstance(f, Symbol)])
        if listed is not None and listed.attrs[0][0] != "pages" and is_idempotent(monoid):
            first: Any = Symbol(listed_node("listed_once", listed.attrs[0], listed.args))  # of equal entries of a list
            pulled = {n: v if v is None else torch.where(first, v, 0.0) for n, v in pulled.items()}
        return [pulled[n] for n in names]

    def count_pair(self, counter: Any, r: Expr) -> None:
        for a in r.args:
            counter.count_value(a)
        counter.count_combination(trace_combine(r.attrs[2][0], tuple(a.feature for a in r.args)), self.plain_ops)

    def identity(self, params: tuple) -> tuple[float, ...]:
        return tuple(float(field.identity) for field in params[0].fields().values())

    def absent(self, params: tuple, fields: tuple[Expr, ...]) -> Sequence[float | None]:
        return self.identity(params)

    def idle(self, params: tuple, fields: list[iv.Interval]) -> bool:
        return fields == [(x, x) for x in self.identity(params)]

    def combine(self, params: tuple, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        (monoid,) = params
        names = list(monoid.fields())
        combined = monoid.combine(*(monoid(**dict(zip(names, values, strict=True))) for values in (a, b)))
        return [getattr(combined, n) for n in names]

    def state_names(self, params: tuple) -> list[str]:
        return list(params[0].fields())

    def fold(self, params: tuple, state: Sequence[Tensor], dim: int) -> list[Tensor]:
        (monoid,) = params
        names = list(monoid.fields())
        folded = fold_pairs(monoid, dict(zip(names, state, strict=True)), dim)
        return [getattr(folded, n) for n in names]

    def dense(self, fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
        (monoid,) = params
        results = super().dense(fields, vectors, over, params, size)
        for r in results:
            if r.requires_grad and gradient_source(monoid) == "none":  # autograd would give zeros
                r.register_hook(lambda g: check_gradient(monoid))
        return results

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        """The vectors, stacked, and the first levels of their tree."""
        return memory.wide * 2 * sum(memory.size_of(str(a.feature)) for a in reads[0] if a.feature is not None)

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return 0, sum(map(width, r.args)) * item
