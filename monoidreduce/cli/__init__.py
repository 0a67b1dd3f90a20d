"""The command line: ``monoidreduce COMMAND``. A command is a function under ``@command`` and a row of ``app.COMMANDS``.

This file imports only the standard library, so that it can say what to install. Exit codes: 0 success; 1 the answer is
no (``check`` found something broken); 2 a mistake in the request, reported in one message without a traceback; 130
interrupted; 141 the reader of a pipe went away.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

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
    for name in ("click", "rich"):
        try:
            importlib.import_module(name)
        except ImportError:
            message = f'the command line needs {name}. Install it: pip install "monoidreduce[cli]"'
            print(f"monoidreduce: error: {message}", file=sys.stderr)
            return 2
    return importlib.import_module(".app", __name__).run(sys.argv[1:] if argv is None else list(argv))
