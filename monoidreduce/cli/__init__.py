"""The command line: ``monoidreduce COMMAND``. A command is a function under ``@command`` and a row of ``app.COMMANDS``.

This file imports only the standard library and the version, so that it can say what to install. Exit codes: 0 success;
1 the answer is no (``check`` found something broken); 2 a mistake in the request, reported in one message without a
traceback; 130 interrupted; 141 the reader of a pipe went away.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from .._version import __version__

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with these arguments (by default the process's own) and return the exit code.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    monoidreduce ...
    0
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without × shows a question mark instead of crashing
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments == ["--version"]:  # known without the command line's own packages
        print(f"monoidreduce {__version__}")
        return 0
    for name in ("click", "rich"):
        try:
            importlib.import_module(name)
        except ImportError:
            message = f'the command line needs {name}. Install it: pip install "monoidreduce[cli]"'
            print(f"monoidreduce: error: {message}", file=sys.stderr)
            return 2
    return importlib.import_module(".app", __name__).run(arguments)
