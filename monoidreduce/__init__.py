"""MonoidReduce: write what happens to one pair, get a differentiable layer that never builds the pair matrix.

>>> import torch, monoidreduce as mr
>>> from monoidreduce import Row, Col
>>> @mr.op
... def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
...     return mr.softmax_mean(q @ k, v)
"""

from . import ops
from ._version import __version__
from .algebra import Monoid, Scalar, Vector, dot, fold, laws, monoids
from .blockwise import MonoidReduce, mk_GeMMMapReduce
from .engine.registry import use
from .engine.tally import Tally, tally
from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .op import Op, op
from .program.declare import Batch, Col, Row
from .program.expr import index as _index
from .program.expr import size as _size
from .program.reductions import (
    all as all,
    any as any,
    argmax,
    argmin,
    count,
    dropout,
    gumbel,
    logsumexp,
    max as max,
    mean,
    min as min,
    reduce,
    sample,
    softmax_mean,
    sum as sum,
    topk,
    uniform,
    var,
    weighted_mean,
)
from .program.symbol import Everywhere as _Everywhere
from .program.symbol import functions, sqdist

row_index = _Everywhere(_index("row"))
col_index = _Everywhere(_index("col"))
num_rows = _Everywhere(_size("rows"))
num_cols = _Everywhere(_size("cols"))

# Names that shadow a builtin (sum, max, ...) are reached as mr.sum; a star import leaves the builtins alone.
__all__ = [
    "Batch",
    "Col",
    "Monoid",
    "MonoidReduce",
    "Op",
    "Row",
    "Scalar",
    "Tally",
    "Vector",
    "__version__",
    "argmax",
    "argmin",
    "col_index",
    "count",
    "dot",
    "dropout",
    "fold",
    "functions",
    "gumbel",
    "laws",
    "logsumexp",
    "mean",
    "mk_GeMMMapReduce",
    "monoids",
    "num_cols",
    "num_rows",
    "op",
    "ops",
    "reduce",
    "row_index",
    "sample",
    "softmax_mean",
    "sqdist",
    "tally",
    "topk",
    "uniform",
    "use",
    "var",
    "weighted_mean",
]
__all__ += _errors
