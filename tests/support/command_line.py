"""The command line as a test calls it, and pages as a test reads them."""

import contextlib
import io
import re
from html.parser import HTMLParser

from monoidreduce.cli import main

VOID = {"meta", "br", "line", "path", "rect", "circle"}  # elements without an end, or drawn as <x/>


def call(*arguments: str) -> tuple[int, str, str]:
    """The exit code, and what was written to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def progress_of(err: str) -> list[str]:
    """The steps that stderr names: every line is one, after its seconds and its number, which counts from 1."""
    found = [re.fullmatch(r" *\d+ s  (\d+)/\d+ (.+)", line) for line in err.splitlines()]
    assert all(found) and [int(line[1]) for line in found] == list(range(1, len(found) + 1)), err
    return [line[2] for line in found]


class Page(HTMLParser):
    """Reads a page: its elements, its text and every attribute; an unbalanced element fails."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.elements, self.attributes, self.words = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.words += data


def assert_self_contained(text: str) -> Page:
    """A page that is well formed, needs nothing from anywhere, and knows dark and narrow."""
    page = Page(text)
    assert "http://" not in text and "https://" not in text
    assert not {"script", "link", "img", "iframe", "object"} & set(page.elements)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset") or name.startswith("on")]
    assert "url(" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text and "max-width:" in text
    assert ("name", "viewport") in page.attributes and ("lang", "en") in page.attributes
    assert page.elements.count("svg") == [name for name, _ in page.attributes].count("aria-label")
    assert page.elements.count("h1") == 1
    return page
