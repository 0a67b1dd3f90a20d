"""What to write instead of functions that the pair language does not have: a table, by what they mean.

People reach for torch's and NumPy's functions of whole tensors; a body is written for one pair. Each row says how the
same is written there. What has no row is answered with a name that is spelt alike, where there is one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from ..errors import ArgumentError, TraceError, UnknownFunctionError

_DISTANCE = "Write (x - y).norm() for the distance of a pair, mr.sqdist(x, y) for its square"
_PRODUCT = "A body is one pair: write x @ y for the product of a row's and a column's vector"
_JOIN = "Take both as arguments and add: x @ y + u @ v is the product of the joined vectors"
_BEFORE = "Apply it to the tensors before the call, for example op({name}(x, ...), y), or to the result"
_ORDER = "mr.topk(x, k) gives the k largest, or with largest=False the smallest, in order"
_RUNNING = "A running total is a sum under a condition: mr.sum(torch.where(mr.col_index <= mr.row_index, s, 0.0))"
_READ = "Read one column's value with mr.sum(torch.where(mr.col_index == i, value, 0.0)), which is a gather"
_TRIANGLE = "Hide pairs with torch.where(mr.col_index <= mr.row_index, s, 0.0), or -torch.inf for logits"
_PLAIN = "A body is one pair: write a plain number, such as 0.0 or 1.0"
_AXES = "There are no axes to arrange in a body: a value is one row's, one column's or one pair's"
_DRAW = "Draw with mr.uniform(seed), mr.gumbel(seed) or mr.dropout(x, p, seed), the same numbers in every recomputation"
_LOSS = "mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0)) is the cross entropy of a row"
_COUNT = "Count or mark pairs with a condition: mr.count(s != 0), mr.any(s == x)"

INSTEAD: dict[str, str] = {
    **dict.fromkeys(("cdist", "pairwise_distance", "dist", "pdist", "euclidean"), _DISTANCE),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "addbmm", "multi_dot", "chain_matmul"), _PRODUCT),
    **dict.fromkeys(
        ("einsum", "tensordot", "outer", "ger", "kron", "bilinear"), _PRODUCT + ", x * y for their products"
    ),
    **dict.fromkeys(
        ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "append", "column_stack"), _JOIN
    ),
    "linear": "Apply it to the tensors before the call, op(F.linear(x, weight), y); inside, x @ w is one output of it",
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "layer_norm", "batch_norm", "group_norm", "rms_norm", "instance_norm", "fft"),
        _BEFORE,
    ),
    **dict.fromkeys(
        ("median", "nanmedian", "quantile", "nanquantile", "percentile", "kthvalue", "mode", "sort", "argsort",
         "msort"),
        _ORDER,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "diff", "trapezoid"), _RUNNING),
    "softmax": "The mean under a softmax over columns is mr.softmax_mean(logit, value); a weight of it is "
    "torch.exp(s - mr.logsumexp(s)). torch.softmax itself is for the features of a row's or a column's vector",
    "log_softmax": "Over columns it is s - mr.logsumexp(s); torch.log_softmax itself is for the features of a row's or "
    "a column's vector",
    "softmin": "Over columns, mr.softmax_mean(-logit, value)",
    **dict.fromkeys(("cross_entropy", "nll_loss", "nll_loss_nd"), _LOSS),
    "scaled_dot_product_attention": "Write mr.softmax_mean(q @ k * scale, v)",
    "multi_head_attention_forward": "Write mr.softmax_mean(q @ k * scale, v), heads as a batch dimension",
    "one_hot": "mr.col_index == label is 1 at one column and 0 at all others",
    **dict.fromkeys(
        ("embedding", "gather", "index_select", "take", "take_along_dim", "take_along_axis", "scatter", "index_put"),
        _READ,
    ),
    **dict.fromkeys(("tril", "triu", "tril_indices", "triu_indices"), _TRIANGLE),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones"), _PLAIN),
    **dict.fromkeys(
        ("rand_like", "randn_like", "bernoulli", "normal", "uniform_", "poisson", "binomial", "alpha_dropout",
         "feature_alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d"),
        _DRAW,
    ),
    "gumbel_softmax": "Write mr.softmax_mean((s + mr.gumbel(seed)) / tau, value); mr.sample(s, seed) draws one column",
    **dict.fromkeys(
        ("flatten", "ravel", "chunk", "split", "roll", "flip", "repeat", "tile", "movedim", "swapaxes", "broadcast_to",
         "squeeze", "unsqueeze", "atleast_1d", "atleast_2d", "atleast_3d", "expand_as", "fliplr", "flipud"),
        _AXES,
    ),
    **dict.fromkeys(("clone", "contiguous"), "Nothing is changed in place in a body: leave it out"),
    **dict.fromkeys(("nonzero", "argwhere", "unique", "bincount", "histc", "histogram", "isin"), _COUNT),
    **dict.fromkeys(("allclose", "isclose", "equal", "array_equal"), "Write (a - b).abs() <= tolerance"),
    "mse_loss": "Write (a - b).square(), and fold it with mr.mean",
    "l1_loss": "Write (a - b).abs(), and fold it with mr.mean",
    **dict.fromkeys(
        ("smooth_l1_loss", "huber_loss"),
        "With d = (a - b).abs(), write torch.where(d < 1, 0.5 * d * d, d - 0.5), and fold it with mr.mean",
    ),
    "binary_cross_entropy_with_logits": "Write F.softplus(s) - s * target, and fold it with mr.mean",
    "binary_cross_entropy": "Of logits s, write F.softplus(s) - s * target, and fold it with mr.mean",
    "soft_margin_loss": "Write F.softplus(-target * s), and fold it with mr.mean",
    **dict.fromkeys(
        ("hinge_embedding_loss", "margin_ranking_loss", "multi_margin_loss", "cosine_embedding_loss"),
        "Write the hinge, torch.relu(margin - target * s), and fold it with mr.mean",
    ),
    **dict.fromkeys(
        ("triplet_margin_loss", "triplet_margin_with_distance_loss"),
        "With columns as negatives, fold torch.relu(near - mr.sqdist(x, y) + margin) with mr.mean; near is a Row",
    ),
    "kl_div": "Write mr.sum(torch.xlogy(p, p) - p * log_q); of two softmaxes over columns, "
    "mr.softmax_mean(t, t - s) + mr.logsumexp(s) - mr.logsumexp(t)",
    "poisson_nll_loss": "Write torch.exp(s) - target * s, and fold it with mr.mean",
    "gaussian_nll_loss": "Write 0.5 * (torch.log(v) + (a - b).square() / v), and fold it with mr.mean",
    **dict.fromkeys(("cross", "linalg_cross"), "Write its features: x[1] * y[2] - x[2] * y[1], and so on"),
    "glu": "Take both halves as vectors: a * torch.sigmoid(b)",
    **dict.fromkeys(
        ("searchsorted", "bucketize"),
        "Look the place up in a table, mr.lookup(table, index), or add conditions: (x > edge).to(torch.int64)",
    ),
    **dict.fromkeys(
        ("chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w",
         "shifted_chebyshev_polynomial_t", "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
         "shifted_chebyshev_polynomial_w", "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l",
         "legendre_polynomial_p"),
        "Write its recurrence with Python's own loop, p, last = 2 * x * p - last, p, whose length is a number",
    ),
    "cosine_similarity": "Write F.normalize(x, dim=-1) @ F.normalize(y, dim=-1)",
    **dict.fromkeys(
        ("bitwise_count", "bit_count", "popcount"), "Write mr.popcount(x, bits=32), with the width of the numbers"
    ),
    "hamming_distance": "Write mr.popcount(x ^ y, bits=32).sum(), with the width of the packed words",
    "log_ndtr": "Write torch.log(torch.special.ndtr(x)), of numbers above -12",
    "ndtri": "Write math.sqrt(2) * torch.erfinv(2 * p - 1)",
    "erfcx": "Write torch.exp(x * x) * torch.erfc(x), of numbers from -9 to 9",
    "multigammaln": "Write the sum of torch.lgamma(x - 0.5 * k) over k < p, plus p * (p - 1) / 4 * math.log(math.pi)",
    "mvlgamma": "Write the sum of torch.lgamma(x - 0.5 * k) over k < p, plus p * (p - 1) / 4 * math.log(math.pi)",
    "ldexp": "Write x * torch.exp2(n)",
    "softshrink": "Write torch.where(x.abs() > c, x - c * torch.sign(x), 0.0)",
    "hardshrink": "Write torch.where(x.abs() > c, x, 0.0)",
    **dict.fromkeys(("threshold", "_threshold"), "Write torch.where(x > threshold, x, value)"),
    "rrelu": "Write F.leaky_relu(x, slope)",
    "signbit": "Write x < 0",
    **dict.fromkeys(("isposinf", "isneginf"), "Write x == torch.inf, or x == -torch.inf"),
    "isreal": "All numbers of a body are real: leave it out",
    **dict.fromkeys(("gcd", "lcm"), "It takes a loop, which a body does not have: tabulate it before the call"),
    **dict.fromkeys(
        ("i0", "i0e", "i1", "i1e", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0",
         "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0",
         "scaled_modified_bessel_k1", "spherical_bessel_j0", "airy_ai", "zeta",
         "gammainc", "gammaincc", "igamma", "igammac"),
        "It has no closed form in the functions of a body: of one side's numbers, apply it before the call; of a "
        "pair's, write the polynomial that is exact enough",
    ),
    **dict.fromkeys(
        ("nextafter", "frexp"), "The bits of floating-point numbers are no part of a body",
    ),
    **dict.fromkeys(
        ("real", "imag", "angle", "conj", "polar", "view_as_real"),
        "Numbers of a body are real: take both parts as arguments; the angle is torch.atan2(y, x), the modulus "
        "torch.hypot(x, y)",
    ),
    "clamp_": "Nothing is changed in place in a body: use clamp",
    "nansum": "Write mr.sum(torch.where(torch.isnan(s), 0.0, s))",
    "nanmean": "Write mr.weighted_mean(~torch.isnan(s), torch.nan_to_num(s))",
    "average": "Write mr.mean(x), or mr.weighted_mean(weight, x)",
    "vectorize": "A body is written for one pair already: use torch's functions in it",
}  # fmt: skip

# torch's reductions over an axis that is not there, and what folds over columns or rows
REDUCTIONS = {
    **{n: f"mr.{n}" for n in ("max", "min", "argmax", "argmin", "logsumexp", "topk", "any", "all", "var")},
    "std": "mr.var(...).sqrt()", "count_nonzero": "mr.count", "prod": "mr.reduce(mr.monoids.Prod, ...)",
    "multinomial": "mr.sample",
}  # fmt: skip
_OF_TWO = {
    "max": "; the larger of two values is torch.maximum(a, b)",
    "min": "; the smaller of two is torch.minimum(a, b)",
}

# NumPy's names of what torch calls otherwise
_NUMPY = {
    "power": "pow", "true_divide": "div", "mod": "remainder", "fabs": "abs", "rint": "round", "conjugate": "positive",
    "cbrt": "pow", "invert": "bitwise_not", "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift",
    "bitwise_invert": "bitwise_not", "degrees": "rad2deg", "radians": "deg2rad",
}  # fmt: skip

# What NumPy calls when one of its numbers stands left of an operator
NUMPY_OPERATORS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "power": "pow",
    "floor_divide": "floor_divide", "remainder": "remainder", "equal": "eq", "not_equal": "ne", "less": "lt",
    "less_equal": "le", "greater": "gt", "greater_equal": "ge", "bitwise_and": "bitwise_and",
    "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor", "left_shift": "bitwise_left_shift",
    "right_shift": "bitwise_right_shift", "matmul": "matmul",
}  # fmt: skip

REFUSED_ATTRIBUTES = dict.fromkeys(
    ("shape", "size", "ndim", "dim", "dtype", "device", "numel"),
    "Sizes and types are not part of a body: it is written for one pair. Pass what is made of the number of features "
    "as an argument, scale: float; (x - y).abs().sum() folds features; mr.num_rows and mr.num_cols are numbers",
) | dict.fromkeys(
    ("T", "mT", "t", "H", "transpose", "unsqueeze", "squeeze", "view", "reshape", "expand", "permute"),
    "There are no axes to arrange in a body: a symbol is one row's or one column's value, so write q @ k",
) | dict.fromkeys(
    ("item", "numpy", "tolist", "cpu", "data", "grad", "backward"), "A body is traced, it has no values",
) | dict.fromkeys(
    ("values", "indices"),
    "mr.max and mr.min are the number itself, mr.argmax and mr.argmin its index; mr.topk has both",
)  # fmt: skip


def refuse(name: str, is_known: Callable[[str], bool], functions: Iterable[str]) -> NoReturn:
    """Say what to write instead of a function that is not in the language."""
    if name.endswith("_") and is_known(name.rstrip("_")):
        raise TraceError(
            detail=f"{name} writes in place",
            fix=f"Nothing is changed in place in a body: use {name.rstrip('_')} and keep its result",
        )
    if name in INSTEAD:
        raise UnknownFunctionError(name=name, nearest="", fix=INSTEAD[name])
    if name in REDUCTIONS:
        fix = "To fold over columns or rows use {nearest}" + _OF_TWO.get(name, "")
        raise UnknownFunctionError(name=name, nearest=REDUCTIONS[name], fix=fix)
    near = difflib.get_close_matches(name, functions, n=1, cutoff=0.75)
    if not near:
        fix = "Write it with the functions it has (monoidreduce.functions() lists them)"
        raise UnknownFunctionError(name=name, nearest="", fix=fix)
    raise UnknownFunctionError(name=name, nearest=near[0])


def refuse_numpy(name: str, is_known: Callable[[str], bool]) -> NoReturn:
    """Say what to write instead of a function of NumPy's."""
    ours = _NUMPY.get(name, name)
    if ours in ("sum", "mean"):
        fix = f"Use mr.{ours}(...) to fold over columns, or x.{ours}() for the features of a vector"
    elif ours in INSTEAD:
        fix = INSTEAD[ours]
    elif ours in REDUCTIONS:
        fix = f"Use {REDUCTIONS[ours]}"
    elif is_known(ours):
        fix = f"Use torch.{ours}, which the pair language has"
    else:
        fix = "Use torch's functions (monoidreduce.functions() lists those that the pair language has)"
    raise TraceError(detail=f"NumPy's {name} was called in a body", fix=fix.replace("{name}", name))


_NOT_OF_TRUTHS = (
    "abs", "floor", "ceil", "round", "trunc", "floor_divide", "remainder", "fmod", "bitwise_left_shift",
    "bitwise_right_shift",
)  # fmt: skip


def check_truth_values(name: str, truths: Sequence[bool]) -> None:
    """Refuse the arithmetic on truth values that torch refuses; ``truths``: which of the arguments are such."""
    if name in ("sub", "neg"):
        fix = "Negate a truth value with ~, compare two with ^, or take it as a number with .int() or .float()"
        raise TraceError(detail=f"{name} was asked of a truth value, which torch does not do either", fix=fix)
    if name in _NOT_OF_TRUTHS and all(truths):
        raise TraceError(detail=f"{name} was asked of truth values alone", fix="Take them as numbers with .int()")


# Keywords that torch's functions have and the language's own functions do not

_OVER = 'A reduction folds over columns, or with over="rows" over rows; the features of a vector are summed by x.sum()'
_KEYWORDS = {
    "dim": _OVER,
    "axis": _OVER,
    "keepdim": "Leave it out: there are no axes in a body",
    "keepdims": "Leave it out: there are no axes in a body",
    "dtype": "Leave it out, or cast what is reduced: x.to(torch.float32)",
    "out": "Leave it out: nothing is written in place in a body",
    "sorted": "Leave it out: the best come first",
    "unbiased": "Give correction=1 or correction=0",
    "ddof": "Give correction=1 or correction=0",
}


def explain_call(name: str, signature: inspect.Signature, keywords: Iterable[str], error: TypeError) -> ArgumentError:
    """The error of a call of the language's function ``name`` that does not fit its signature."""
    unknown = [k for k in keywords if k not in signature.parameters]
    given = f"mr.{name} has no keyword {unknown[0]!r}" if unknown else f"mr.{name}: {error}"
    shown = f"mr.{name}({', '.join(map(_parameter_text, signature.parameters.values()))})"
    advice = _KEYWORDS.get(unknown[0]) if unknown else _OVER if "too many positional" in str(error) else None
    fix = f"It is {shown}" if advice is None else f"{advice}. It is {shown}"
    return ArgumentError(detail=given, fix=fix.replace("{", "{{").replace("}", "}}"))


def _parameter_text(p: inspect.Parameter) -> str:
    stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
    return f"{stars}{p.name}" if p.default is p.empty else f"{p.name}={p.default!r}"
