"""Which pairs of a call exist, as data: the ``cols=`` of an op.

Four domains, one file each: ``blocks`` (lists of column blocks for blocks of rows), ``pages`` (columns that lie in
pages), ``jagged`` (packed sequences) and ``edges`` (a list of columns for each row). Each is a frozen value of a few
integer tensors. ``base.py`` has the form in which engines read the lists. May import the errors and the
settings.
"""

from .base import ColumnLists, Domain
from .blocks import Blocks
from .edges import Edges
from .jagged import Jagged
from .pages import Pages

KINDS: dict[str, type[Domain]] = {kind.kind: kind for kind in (Blocks, Pages, Jagged, Edges)}


def restore(form: tuple, tensors: tuple) -> Domain:
    """The domain with this static form (:attr:`Domain.form`) and these tensors, which are not checked again."""
    return KINDS[form[0]]._restore(form, tensors)


__all__ = ["Blocks", "ColumnLists", "Domain", "Edges", "Jagged", "Pages", "restore"]
