"""The pair language as the layers of this room write it.

Users reach these names as ``mr.softmax_mean``, ``mr.Row`` and so on; this room may not import the package itself, so it
gathers them here once, and every layer imports this module as ``mr`` and reads as a user's op would.
"""

from __future__ import annotations

from ..op import op
from ..program.trace import Batch, Col, Pair, Row
from ..program.vocabulary import (  # fmt: skip
    argmax,
    argmin,
    col_index,
    count,
    dropout,
    gumbel,
    logsumexp,
    max,
    min,
    num_cols,
    num_rows,
    row_index,
    softmax_mean,
    sqdist,
    sum,
    topk,
)

__all__ = [
    "Batch", "Col", "Pair", "Row", "argmax", "argmin", "col_index", "count", "dropout", "gumbel", "logsumexp", "max",
    "min", "num_cols", "num_rows", "op", "row_index", "softmax_mean", "sqdist", "sum", "topk",
]  # fmt: skip
