"""Count the code: ``make size``, or ``python -m docs.size``, prints a table by package.

A *code line* has at least one token that is neither a comment nor part of a docstring. ``--write``
puts the table into docs/contributing.md, between ``<!-- size -->`` and ``<!-- end size -->``. The site is always built
with fresh numbers.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "contributing.md"
BLOCK = re.compile(r"(<!-- size -->\n).*?(<!-- end size -->)", re.S)
PACKAGE = "monoidreduce"
BESIDE = ("tests", "benchmarks", "examples", "docs")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Size(NamedTuple):
    """Files, lines and code lines of one folder, and the lines of its longest file."""

    files: int = 0
    lines: int = 0
    code: int = 0
    longest: int = 0

    def __add__(self, other: Size) -> Size:  # type: ignore[override]
        total = self.files + other.files, self.lines + other.lines, self.code + other.code
        return Size(*total, max(self.longest, other.longest))


def measure_file(path: Path) -> Size:
    """The size of one Python file."""
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    return Size(1, lines, len(code_lines(text)), lines)


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code: no blank lines, comments or docstrings."""
    hidden = docstring_lines(text)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return found - hidden


def docstring_lines(text: str) -> set[int]:
    """The numbers of the lines of all docstrings."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def measure_folders(root: Path) -> Iterator[tuple[str, Size]]:
    """Every folder of Python files below ``root``, itself included, with the files that lie directly in it."""
    for folder in sorted({path.parent for path in root.rglob("*.py")}):
        total = Size()
        for path in folder.glob("*.py"):
            total += measure_file(path)
        yield f"{folder.relative_to(root.parent).as_posix()}/", total


def measure_tree(root: Path) -> Size:
    """All Python files below ``root`` together."""
    total = Size()
    for _, size in measure_folders(root):
        total += size
    return total


def table(root: Path | None = None) -> str:
    """The table, in Markdown: each folder of the package, its total, and what lies beside it."""
    root = ROOT if root is None else root
    rows = [*measure_folders(root / PACKAGE), (f"**{PACKAGE}**, all", measure_tree(root / PACKAGE))]
    rows += [(f"{name}/, all", measure_tree(root / name)) for name in BESIDE if (root / name).is_dir()]
    lines = ["| package | files | lines | code lines | longest file |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {s.files} | {s.lines:,} | {s.code:,} | {s.longest} |" for name, s in rows]
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """A page's text with a fresh table, where it has a place for one."""
    return BLOCK.sub(lambda match: f"{match[1]}{table()}{match[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    if parser.parse_args().write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(table(), end="")


if __name__ == "__main__":
    main()
