"""MonoidReduce: write what happens to one pair, get a differentiable layer that never builds the pair matrix.

>>> import torch, monoidreduce as mr
>>> from monoidreduce import Row, Col
>>> @mr.op
... def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
...     return mr.softmax_mean(q @ k, v)
"""

from . import nn, ops
from ._version import __version__
from .algebra import Monoid, Scalar, Vector, dot, fold, laws, monoids
from .autotune import Tuning, tune
from .blockwise import MonoidReduce, mk_GeMMMapReduce
from .engines.common.skip_small_tiles import skip_below
from .engines.common.tile_counter import Tally, tally
from .engines.ranks.agreement import shard
from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .op import Op, op
from .plan import cache
from .plan.budget import budget
from .program.declarations import Batch, Col, Pair, Row
from .program.draws import dropout, gumbel, uniform
from .program.symbol import functions
from .program.vocabulary import all as all
from .program.vocabulary import any as any
from .program.vocabulary import (
    argmax,
    argmin,
    col_index,
    count,
    logsumexp,
    mean,
    num_cols,
    num_rows,
    reduce,
    row_index,
    sample,
    softmax_mean,
    sqdist,
    topk,
    var,
    weighted_mean,
)
from .program.vocabulary import max as max
from .program.vocabulary import min as min
from .program.vocabulary import sum as sum
from .runtime.registry import use
from .sources import chunks
from .stream import Stream

# Names that shadow a builtin (sum, max, ...) are reached as mr.sum; a star import leaves the builtins alone.
__all__ = [
    "Batch",
    "Col",
    "Monoid",
    "MonoidReduce",
    "Op",
    "Pair",
    "Row",
    "Scalar",
    "Stream",
    "Tally",
    "Tuning",
    "Vector",
    "__version__",
    "argmax",
    "argmin",
    "budget",
    "cache",
    "chunks",
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
    "nn",
    "num_cols",
    "num_rows",
    "op",
    "ops",
    "reduce",
    "row_index",
    "sample",
    "shard",
    "skip_below",
    "softmax_mean",
    "sqdist",
    "tally",
    "topk",
    "tune",
    "uniform",
    "use",
    "var",
    "weighted_mean",
]
__all__ += _errors
