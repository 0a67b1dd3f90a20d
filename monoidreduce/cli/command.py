"""What a subcommand is, and the one error that the command line answers without a traceback."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


class CommandError(Exception):
    """The user asked for something that cannot be done; the message says what to do instead."""


@dataclass(frozen=True)
class Command:
    """A row of the table of subcommands: ``configure`` declares the options, ``run`` returns the exit code."""

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
