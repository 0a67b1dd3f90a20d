"""Runs the commands that a page shows and puts what they print under them: ``python docs/transcripts.py [PAGE...]``.

In a page, a python block after ``<!-- file: NAME.py -->`` is a file of the reader's; a ``console`` block holds
commands, each after ``$``, with their output. Commands run in an empty folder with those files, one after the other,
as a reader types them. An exit code other than 0 is shown as ``[exit code 1]``; ``<!-- seconds -->…<!-- end -->`` is
filled with what they took together.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = ("cli.md", "first-layer.md")
WIDTH = 100
_FILE = re.compile(r"<!-- file: (\S+) -->\s*```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_EXIT = re.compile(r"^\[exit code (\d+)\]$", re.MULTILINE)
_SECONDS = re.compile(r"(<!-- seconds -->).*?(<!-- end -->)", re.DOTALL)
_PROGRESS = re.compile(r" *\d+ s  (\d+/\d+ |importing torch$)")  # lines that a page does not show


@dataclass(frozen=True)
class Shown:
    """A command of a page and what the page says that it prints.

    ``files`` are those that stand before it, ``before`` the commands of its block that come first.
    """

    command: str
    output: str
    code: int
    files: dict[str, str]
    before: tuple[str, ...]


def files(text: str) -> dict[str, str]:
    """The reader's files, by name; a later version of one replaces the earlier."""
    return {match.group(1): match.group(2) for match in _FILE.finditer(text)}


def shown(text: str) -> Iterator[Shown]:
    """Every command of a page, in order."""
    for block in _BLOCK.finditer(text):
        commands = _commands(block.group(1))
        for at, (command, output) in enumerate(commands):
            code = _EXIT.search(output)
            before = tuple(c for c, _ in commands[:at])
            yield Shown(command, output, int(code.group(1)) if code else 0, files(text[: block.start()]), before)


def _commands(block: str) -> list[tuple[str, str]]:
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def filled(text: str) -> str:
    """The page with everything run anew."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:

        def block(match: re.Match[str]) -> str:
            for name, source in files(text[: match.start()]).items():
                Path(folder, name).write_text(source, encoding="utf-8")
            parts = [f"$ {command}\n{_run(command, folder)}" for command, _ in _commands(match.group(1))]
            return "```console\n" + "\n".join(parts) + "```"

        done = _BLOCK.sub(block, text)
    took = f"{time.perf_counter() - start:.0f} s"
    return _SECONDS.sub(rf"\g<1>{took}\g<2>", done)


def _run(command: str, folder: str) -> str:
    shim = Path(folder, ".bin", "monoidreduce")
    shim.parent.mkdir(exist_ok=True)
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m monoidreduce "$@"\n')
    shim.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(DOCS.parent),
        "COLUMNS": str(WIDTH),
        "MONOIDREDUCE_CACHE": str(Path(folder, ".cache")),
    }
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    shown = [line for line in done.stdout.splitlines() if not _PROGRESS.match(line)]
    lines = [line.rstrip().replace(folder, "~/layers") for line in shown]
    code = [f"[exit code {done.returncode}]"] if done.returncode else []
    return "\n".join([*lines, *code]).rstrip() + "\n"


def main() -> None:
    for name in sys.argv[1:] or PAGES:
        page = DOCS / Path(name).name
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"filled {page}")


if __name__ == "__main__":
    main()
