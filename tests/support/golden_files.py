"""Texts of kernels kept as files: change them knowingly.

A test compares a kernel's text with its file and fails where either is missing. To write the files anew, run the tests
once with ``MONOIDREDUCE_WRITE_GOLDEN=1`` (each test that writes fails, so that no run passes by writing), and look at
the difference.
"""

import os

import pytest

from tests.support import ROOT

FOLDER = ROOT / "tests" / "interpret" / "golden"


def compare(name: str, text: str) -> None:
    path = FOLDER / f"{name}.py.txt"
    if os.environ.get("MONOIDREDUCE_WRITE_GOLDEN"):
        path.write_text(text)
        pytest.fail(f"{path.name} was written; look at what changed, then run again without the variable")
    assert path.is_file(), f"{path} is missing: see {__name__}"
    assert text == path.read_text()
