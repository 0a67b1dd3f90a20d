"""What a subcommand is, what it answers, and the one error that the command line answers without a traceback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class CommandError(Exception):
    """The user asked for something that cannot be done; the message says what to do instead."""


@dataclass(frozen=True)
class Answer:
    """What a command found: as data for ``--json``, or shown on a console; and the exit code.

    ``code`` is 0, or 1 where the answer to the question asked is no.
    """

    data: Mapping[str, Any]
    show: Callable[[Any], None]
    code: int = 0


@dataclass(frozen=True)
class Command:
    """A row of the table of subcommands: ``params`` are click's, ``run`` takes them by name."""

    name: str
    run: Callable[..., Answer]
    params: Sequence[Any]

    @property
    def help(self) -> str:
        """What ``run`` says of itself."""
        return self.run.__doc__ or ""
