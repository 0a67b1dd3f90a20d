"""How long a file may be."""

from pathlib import Path

from tests.support import ROOT

MOST_LINES = 1000


def too_long(package: Path) -> list[str]:
    """Every file that is too long, one line each."""
    lengths = {path.relative_to(package.parent): len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    return [
        f"{path}: {n} lines, more than {MOST_LINES}: split it by idea"
        for path, n in sorted(lengths.items())
        if n > MOST_LINES
    ]


def test_no_file_of_the_package_is_too_long():
    assert too_long(ROOT / "monoidreduce") == []


def test_a_file_that_is_too_long_is_found(tmp_path):
    (tmp_path / "plan").mkdir()
    for name, lines in (("whole.py", MOST_LINES), ("long.py", MOST_LINES + 1)):
        (tmp_path / "plan" / name).write_text("x = 1\n" * lines)
    (found,) = too_long(tmp_path)
    assert found.endswith("plan/long.py: 1001 lines, more than 1000: split it by idea")
