"""Several vectors a row, a column or a batch element: ``Row["h", "f"]``, and how their products are written.

Such a value is one vector over the feature ``"h*f"``, of h × f numbers, so that all that is said of vectors holds for
it. What knows its two letters is one operation of two arguments, ``einsum``, whose derivatives are ``einsum`` again:
with a matrix M of a row and a vector y of a column, ``b,ab->a`` is M @ y (one number for each of the row's vectors),
and its two derivatives are ``a,ab->b``, a sum of the row's vectors, and ``a,b->ab``, an outer product. Only the first
is written in a body. Sums over pairs of the other two are matrix products, one for each a: engines never hold them.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ShapeError
from .expression import ONE, Expr, Feature, apply, is_constant, letters, node, topological

DOTS = ("b,ab->a", "ab,ab->a")  # a number for each a: made of one-sided values
MIX = "a,ab->b"  # a vector over b: the sum of b-vectors, each times a number
OUTER = ("a,b->ab", "a,ab->ab")  # a vector over a,b: one b-vector for each a, times a number

OF_VECTORS = ("dot", "sqdist", "fsum", "famax", "famin", "einsum")  # operations on vectors of a row and a column
_LINEAR = ("add", "sub", "neg", "mul", "where")  # what :func:`split_products` looks into


def einsum(spec: str, x: Expr, y: Expr, feature: Feature) -> Expr:
    """``torch.einsum(spec, x, y)`` over features, in one form for each meaning: a vector comes before a matrix, which
    is "ab", and of two vectors that comes first which is first in the result."""
    terms, out = spec.split("->")
    one, other = terms.split(",")
    if len(one) > len(other) or (len(one) == len(other) == 1 and out == other + one):
        one, other, x, y = other, one, y, x
    elif one == other and x.cols and not x.is_pair and y.rows:
        x, y = y, x
    names = dict(zip(dict.fromkeys(other if len(one) == 1 < len(other) else out + one + other), "abc", strict=False))
    one, other, out = ("".join(names[c] for c in part) for part in (one, other, out))
    spec = f"{one},{other}->{out}"
    numbers, args = ONE, [x, y]
    for at in (0, 1) if spec in DOTS else (1,):
        whole = args[at]
        if whole.is_pair and whole.op in ("add", "sub") and all(a.feature is not None for a in whole.args):
            parts = (einsum(spec, *((a, y) if at == 0 else (x, a)), feature=feature) for a in whole.args)
            return apply(whole.op, *parts)  # vectors are of one side, and so are those of a sum
        number, args[at] = _split_number(whole)
        numbers = apply("mul", numbers, number)
    if spec not in DOTS and numbers is not ONE:
        args[0] = apply("mul", args[0], numbers)
    rows, cols = (any(a.rows for a in args), any(a.cols for a in args))
    found = node("einsum", tuple(args), (spec,), rows=rows, cols=cols, feature=feature, dtype="float")
    return apply("mul", found, numbers) if spec in DOTS and numbers is not ONE else found


def _split_number(x: Expr) -> tuple[Expr, Expr]:
    """A value as a number and vectors of one side, where it is their product and that number is a pair's, or the scale
    of vectors that are stored as small numbers; else 1 and itself."""
    if x.op == "mul":
        for number, vector in (x.args, x.args[::-1]):
            if number.feature is None and vector.feature is not None and (x.is_pair or vector.is_stored):
                more, vector = _split_number(vector)
                return apply("mul", number, more), vector
    return ONE, x


def einsum_cotangents(e: Expr, g: Expr) -> tuple[Expr, Expr]:
    """The cotangents of the two arguments."""
    (x, y), (terms, out) = e.args, e.attrs[0].split("->")
    one, other = terms.split(",")
    return einsum(f"{out},{other}->{one}", g, y, x.feature), einsum(f"{out},{one}->{other}", g, x, y.feature)


def part(x: Expr, k: int) -> Expr:
    """The k-th of several vectors."""
    return node("part", (x,), (k,), rows=x.rows, cols=x.cols, feature=letters(x.feature)[1], dtype=x.dtype)


def product(a: Expr, b: Expr) -> Expr:
    """``a @ b``, where one of them, or each, is several vectors."""
    one, other = letters(a.feature), letters(b.feature)
    for side in (a, b):
        if side.is_pair or side.dtype != "float":
            what = "a value of the pair" if side.is_pair else "integers"
            raise ShapeError(
                detail=f"@ was asked of several vectors and of {what}",
                fix="Multiply rows' vectors by columns' vectors, of floats, and then do arithmetic on the product",
            )
    pair = (a.rows or b.rows) and (a.cols or b.cols)
    if one == other and one[0] != one[1]:
        return einsum("ab,ab->a", a, b, one[0])
    if len(one) == len(other) == 2 and one[1] == other[0] and not pair:
        return einsum("ab,bc->ac", a, b, f"{one[0]}*{other[1]}")
    if len(one) == 2 and len(other) == 1 and one[1] == other[0]:
        return einsum("ab,b->a", a, b, one[0])
    if len(other) == 2 and len(one) == 1 and other[1] == one[0] and (pair or other[0] != one[0]):
        return einsum("b,ab->a", a, b, other[0])
    if len(one) == 1 and other[0] == one[0] and not pair:
        return einsum("a,ab->b", a, b, other[1])
    raise ShapeError(
        detail=f"@ contracts a value over {_quote_letters(one)} with a value over {_quote_letters(other)}",
        fix='The last letter is summed over: Row["h", "f"] @ Col["f"] has a number for each h. Of two that are several '
        'vectors both letters must be equal. A matrix mr.Batch["d", "e"] is multiplied on one side: (x @ m) @ y',
    )


def _quote_letters(some: tuple[str, ...]) -> str:
    return ", ".join(f'"{one}"' for one in some)


def inner(e: Expr, g: Expr) -> Expr:
    """The sum over all features of a product times ``g``."""
    return apply("mul", e.args[0], einsum_cotangents(e, g)[0])


def is_product(e: Expr) -> bool:
    """Whether a value per pair is made by products that a sum over pairs turns into matrix products."""
    return e.op == "einsum" and e.is_pair and e.attrs[0] not in DOTS


def split_factor(e: Expr) -> tuple[Expr, Expr] | None:
    """A vector per pair as number × vector, if a number of the pair is a factor of it: of a product, of its weights.
    What it is chosen by, or multiplied with, stays in the vector."""
    if e.op == "spread":
        return e.args[0], node("spread", (ONE,), e.attrs, rows=False, cols=False, feature=e.feature, dtype="float")
    if is_product(e):
        found = split_factor(e.args[0])
        return None if found is None else (found[0], einsum(e.attrs[0], found[1], e.args[1], e.feature))
    if e.op == "mul":
        for one, other in (e.args, e.args[::-1]):
            if one.is_pair and one.feature is None:
                return one, other
            if (found := split_factor(one)) is not None:
                number, rest = found
                alone = rest.op == "spread" and other.feature is not None
                return number, other if alone else apply("mul", rest, other)
    if e.op == "neg" and (found := split_factor(e.args[0])) is not None:
        return found[0], apply("neg", found[1])
    if e.op == "where" and is_constant(e.args[2], 0) and (found := split_factor(e.args[1])) is not None:
        return found[0], apply("where", e.args[0], found[1], 0.0)
    return None


def scale(e: Expr, number: Expr) -> Expr:
    """A vector per pair times a number; of a product, its weights."""
    return _scale(e, number) if is_product(e) else apply("mul", e, number)


def folds(e: Expr, over: str) -> bool:
    """Whether a value varies along the axis that is folded."""
    return e.cols if over == "cols" else e.rows


def split_products(e: Expr) -> tuple[list[Expr], Expr | None]:
    """A vector per pair as a sum of :func:`is_product`, factors moved inside, and what is left (None: nothing)."""
    if e.feature is None or not any(map(is_product, topological([e], stop=lambda n: n.op not in _LINEAR))):
        return [], e
    if e.op in ("add", "sub"):
        (left, rest), (right, other) = map(split_products, e.args)
        if e.op == "sub":
            right, other = [_scale(p, -1.0) for p in right], None if other is None else apply("neg", other)
        return left + right, other if rest is None else rest if other is None else apply("add", rest, other)
    if e.op == "where":
        chosen, first, second = e.args
        if chosen.feature is None:
            (left, rest), (right, other) = split_products(first), split_products(second)
            found = [_inside(p, lambda w: apply("where", chosen, w, 0.0)) for p in left]
            found += [_inside(p, lambda w: apply("where", chosen, 0.0, w)) for p in right]
            alone = rest is None and other is None
            zero = [0.0 if r is None else r for r in (rest, other)]
            return found, None if alone else apply("where", chosen, *zero)
        return [], e
    if e.op in ("neg", "mul"):
        factor = -1.0 if e.op == "neg" else next((a for a in e.args if a.feature is None), None)
        vector = next((a for a in e.args if a.feature is not None), e)
        if factor is None:
            return [], e
        found, rest = split_products(vector)
        return [_scale(p, factor) for p in found], None if rest is None else apply("mul", rest, factor)
    return [e], None


def _inside(e: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """A product whose weights are changed."""
    return einsum(e.attrs[0], change(e.args[0]), e.args[1], e.feature)


def _scale(e: Expr, factor: Expr | float) -> Expr:
    return _inside(e, lambda w: apply("mul", w, factor))
