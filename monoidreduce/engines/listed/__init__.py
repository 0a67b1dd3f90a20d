"""Folds over listed pairs: one wrapper around any engine, for forward and gradient alike, since both are folds.

The lists of the kept axis (rows for a reduction over columns, columns for one over rows) are cut into pieces of few
different lengths (``lists.py``). Pieces of one length are gathered into a batch of small dense problems, which the
inner engine folds (``run.py``), and the states of a list's pieces are combined with ⊙. Packed sequences on a CPU are
folded one by one (``packed.py``), and listed blocks where they lie (``blocks.py``).
Memory is that of one batch of pieces; nothing has the size of rows × columns, nothing is added atomically, and the
order of combination depends on the lists alone.
"""

from .other_gradients import differentiate_by_pieces
from .packed import run as run_packed
from .run import run

__all__ = ["differentiate_by_pieces", "run", "run_packed"]
