"""MonoidReduce: write what happens to one pair, get a differentiable layer that never builds the pair matrix.

>>> import torch, monoidreduce as mr
>>> from monoidreduce import Row, Col
>>> @mr.op
... def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
...     return mr.softmax_mean(q @ k, v)
"""

import difflib as _difflib
import gc as _gc
import importlib as _importlib
import os as _os
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._version import __version__

# ``monoidreduce --help`` answers without torch: where the command line starts this package, the names below are
# imported when one of them is first asked for, by executing this file once more. Everywhere else they are imported now.
_COMMAND = _os.path.splitext(_os.path.basename(_sys.argv[0] if _sys.argv else ""))[0] == "monoidreduce"
_MODULE = bool(_sys.argv) and _sys.argv[0] == "-m" and "monoidreduce" in _sys.orig_argv
_deferred = "_deferred" not in globals() and (_COMMAND or _MODULE)
_collects = _gc.isenabled()
_gc.disable()  # a collection looks at all of torch's objects, and is a third of the time of this import

try:
    if _TYPE_CHECKING or not _deferred:
        from . import linalg, nn, ops
        from .algebra import Monoid, Scalar, Vector, dot, fold, laws, monoids
        from .autotune import Tuning, tune
        from .blockwise import MonoidReduce, mk_GeMMMapReduce
        from .domains import Blocks as blocks
        from .domains import Edges as edges
        from .domains import Jagged as jagged
        from .domains import Pages
        from .domains import Pages as pages
        from .engines.common.skip_small_tiles import Tally, skip_below, tally
        from .engines.ranks.agreement import shard
        from .errors import *  # noqa: F403
        from .errors import __all__ as _errors
        from .op import Op, op
        from .plan import cache
        from .plan.budget import budget
        from .program.symbol import functions
        from .program.trace import Batch, Col, Pair, Row, Table
        from .program.vocabulary import all as all
        from .program.vocabulary import any as any
        from .program.vocabulary import (
            argmax,
            argmin,
            col_index,
            count,
            dropout,
            gumbel,
            logsumexp,
            lookup,
            mean,
            num_cols,
            num_rows,
            popcount,
            reduce,
            row_index,
            sample,
            softmax_mean,
            sqdist,
            topk,
            topk_mean,
            uniform,
            var,
            weighted_mean,
        )
        from .program.vocabulary import max as max
        from .program.vocabulary import min as min
        from .program.vocabulary import sum as sum
        from .runtime.dispatch import use
        from .sources import chunks
        from .stored_vectors import Scaled, scaled
        from .stream import Stream
finally:
    if _collects:
        if not _gc.get_freeze_count():  # what was made so far is here to stay: the next collection leaves it out
            _gc.freeze()
            _gc.unfreeze()
        _gc.enable()

if not _TYPE_CHECKING and _deferred:

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        del globals()["__getattr__"]
        return getattr(_importlib.reload(_sys.modules[__name__]), name)


elif not _TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        words = f"module {__name__!r} has no attribute {name!r}"
        if not name.startswith("_"):
            near = _difflib.get_close_matches(name, [*__all__, *(f"ops.{n}" for n in ops.__all__)], 1)
            near = [f"ops.{name}"] if name in ops.__all__ else near
            words += f". Did you mean mr.{near[0]}?" if near else ""
        raise AttributeError(words)


# Names that shadow a builtin (sum, max, ...) are reached as mr.sum; a star import leaves the builtins alone.
__all__ = [
    "Batch",
    "Col",
    "Monoid",
    "MonoidReduce",
    "Op",
    "Pages",
    "Pair",
    "Row",
    "Scalar",
    "Scaled",
    "Stream",
    "Table",
    "Tally",
    "Tuning",
    "Vector",
    "__version__",
    "argmax",
    "argmin",
    "blocks",
    "budget",
    "cache",
    "chunks",
    "col_index",
    "count",
    "dot",
    "dropout",
    "edges",
    "fold",
    "functions",
    "gumbel",
    "jagged",
    "laws",
    "linalg",
    "logsumexp",
    "lookup",
    "mean",
    "mk_GeMMMapReduce",
    "monoids",
    "nn",
    "num_cols",
    "num_rows",
    "op",
    "ops",
    "pages",
    "popcount",
    "reduce",
    "row_index",
    "sample",
    "scaled",
    "shard",
    "skip_below",
    "softmax_mean",
    "sqdist",
    "tally",
    "topk",
    "topk_mean",
    "tune",
    "uniform",
    "use",
    "var",
    "weighted_mean",
]
if not _deferred:
    __all__ += _errors
