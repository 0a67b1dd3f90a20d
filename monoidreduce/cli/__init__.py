"""The command line: ``monoidreduce COMMAND``. A subcommand is a module here and a row of the table in ``app.py``.

This file is the door: it needs nothing but the standard library, so that it can say what to install. Exit codes: 0
done; 1 the answer is no (``check`` found something broken); 2 a mistake in the request, told in one message without a
traceback; 130 interrupted; 141 the reader of a pipe went away.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

__all__ = ["main"]

_NEEDED = ("click", "rich")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with these arguments (the process's own by default) and return the exit code.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    monoidreduce ...
    0
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without × gets a question mark, not a crash
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            print(
                f'monoidreduce: error: the command line needs {name}. Install it: pip install "monoidreduce[cli]"',
                file=sys.stderr,
            )
            return 2
    return importlib.import_module(".app", __name__).run(sys.argv[1:] if argv is None else list(argv))
