"""The pages in a real browser: Chromium, headless, wherever one is installed; light and dark, narrow and wide.

What needs no browser (well formed, self-contained, a viewport, dark colours) is tested on every machine by
``test_cli.py`` and ``test_cli_bench.py``.
"""

from itertools import pairwise
from pathlib import Path

import pytest

from monoidreduce.cli import demo
from tests.support.browser import CHROMIUM, open_browser
from tests.support.command_line import call

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

COMMANDS = {
    "index.html": ["demo", "--quick"],
    "bench.html": ["bench", "attention", "--size", "24x40", "--size", "48x80", "--seconds", "0", "--peer", "naive"],
    "profile.html": ["profile", "mlp", "--rows", "60", "--cols", "90"],
}
WIDTHS = (320, 390, 1280)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every kind of page, written by its command. The demo leaves nothing out, however busy the machine is."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "SECONDS", float("inf"))
        for arguments in COMMANDS.values():
            assert call(*arguments, "--out", str(folder))[0] == 0
    return folder


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


def opened(browser, path: Path, scheme: str, width: int):
    """A page, everything that it said to the console, and every address that it asked for."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    return page, said, asked


def luminance(color: str) -> float:
    parts = [float(p) for p in color[color.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


COLOURS = """() => [...document.querySelectorAll('h1, h2, p, td, th, dt, dd, small, figcaption, summary, code, .gain')]
  .filter(e => e.textContent.trim() && e.getClientRects().length).map(e => {
    let box = e; while (getComputedStyle(box).backgroundColor === 'rgba(0, 0, 0, 0)') box = box.parentElement;
    return [getComputedStyle(e).color, getComputedStyle(box).backgroundColor, e.textContent.slice(0, 40)] })"""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_loads_with_no_error_and_asks_for_nothing(browser, folder, name):
    page, said, asked = opened(browser, folder / name, "light", 1280)
    assert said == [] and asked == [(folder / name).as_uri()]
    assert page.title().startswith("MonoidReduce: ")
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_fits_its_window_and_its_charts_are_there(browser, folder, name, width):
    page, _, _ = opened(browser, folder / name, "light", width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.querySelectorAll('pre')].every(p => p.scrollWidth <= p.clientWidth)")  # not cut
    boxes = page.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().toJSON())")
    assert len(boxes) == (5 if name == "index.html" else 2)
    for box in boxes:
        assert box["width"] > 0.6 * min(width, 480) and box["height"] > 100 and box["right"] <= width
    drawn = page.evaluate("[...document.querySelectorAll('svg path')].filter(p => p.getTotalLength() > 0).length")
    assert drawn >= 4
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_word_can_be_read_in_light_and_dark(browser, folder, name, scheme):
    page, _, _ = opened(browser, folder / name, scheme, 1280)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) < 0.05) == (scheme == "dark")
    found = page.evaluate(COLOURS)
    assert len(found) > 10
    poor = [(words, round(contrast(ink, behind), 2)) for ink, behind, *words in found if contrast(ink, behind) < 4.5]
    assert not poor, "the contrast that WCAG AA asks for is 4.5"
    page.close()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_makes_sense_without_seeing_it(browser, folder, name):
    page, _, _ = opened(browser, folder / name, "light", 1280)
    assert page.evaluate("document.documentElement.lang") == "en"
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in pairwise(levels))
    assert page.evaluate("[...document.querySelectorAll('svg')].every(s => s.getAttribute('aria-label'))")
    assert page.evaluate("[...document.querySelectorAll('table')].every(t => t.querySelector('th[scope=col]'))")
    page.close()
