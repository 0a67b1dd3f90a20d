"""Tiles that a condition cuts, in a kernel whose one loop meets all of them.

A condition decided on whole tiles leaves ``where(condition, x, y)`` as x there; what it asks is asked inside ``if cut:``,
in the tiles that it divides. So there is one pipeline of loads and one text of the products, and whole tiles pay a branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...program.expr import Expr
from .exponents import Exponents


class Cuts(Exponents):
    """The part of :class:`Values` that knows of cut tiles."""

    cuts: dict[Expr, bool]  # the conditions, and their truth in tiles that they do not cut; none where loops are two
    inside: list[str]
    inner: dict[object, str]
    _ended: tuple[object, ...] = ()  # what was last chosen, in which list of lines, and how long that was then

    def full(self, e: Expr) -> str:
        raise NotImplementedError

    def chosen(self, e: Expr) -> str:
        """A ``where`` whose condition is known in whole tiles."""
        condition, *choice = e.args
        usual, other = choice if self.cuts[condition] else choice[::-1]
        name = self.bind(e, self.full(usual), True)
        with self._in_cut_tiles(name):
            texts = [name, self.argument(other, e.dtype)]
            texts = texts if self.cuts[condition] else texts[::-1]
            self.inside.append(f"{name} = tl.where({self.number(condition)}, {', '.join(texts)})")
        return name

    def seen(self, text: str, otherwise: str) -> str:
        """A block with what lies beyond the folded axis replaced."""
        return f"tl.where(folded_in[None, :], {text}, {otherwise})" if self.masked else text

    def seen_name(self, text: str, otherwise: str) -> str:
        """The same by name: in one loop for all tiles it is replaced in those that are cut, as the last one is."""
        if not self.masked:
            return text
        if not self.cuts:
            return self.bind((text, otherwise), self.seen(text, otherwise), True)
        name = text if self._ended == self._end(text) else self.bind((text, otherwise), text, True)
        with self._in_cut_tiles(name):
            self.inside.append(f"{name} = {self.seen(name, otherwise)}")
        return name

    def _end(self, name: str) -> tuple[object, ...]:
        return name, id(self.inside), len(self.inside)

    @contextmanager
    def _in_cut_tiles(self, name: str) -> Iterator[None]:
        """The lines that are added make a name anew in cut tiles; what else they bind is forgotten after them."""
        lines, names = self.inside, self.inner
        self.inside, self.inner = [], dict(names)
        yield
        added, self.inside, self.inner = self.inside, lines, names
        again = self._ended == self._end(name)
        lines += [*([] if again else ["if cut:"]), *(f"    {line}" for line in added)]
        self._ended = self._end(name)
