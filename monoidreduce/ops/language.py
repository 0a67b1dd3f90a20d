"""The pair language as the layers of this room write it.

Users reach these names as ``mr.softmax_mean``, ``mr.Row`` and so on; this room may not import the package itself, so it
gathers them here once, and every layer imports this module as ``mr`` and reads as a user's op would.
"""

from __future__ import annotations

from ..op import op
from ..program.declare import Col, Pair, Row
from ..program.reductions import argmax, gumbel, logsumexp, max, softmax_mean, sum, topk
from ..program.symbol import col_index, num_cols, row_index

__all__ = [
    "Col", "Pair", "Row", "argmax", "col_index", "gumbel", "logsumexp", "max", "num_cols",
    "op", "row_index", "softmax_mean", "sum", "topk",
]  # fmt: skip
