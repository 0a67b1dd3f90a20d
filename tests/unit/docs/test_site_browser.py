"""The site in a real browser, where there is one: pages opened from disk, their widths, and search."""

import os
import subprocess
import sys

import pytest
import yaml

from tests.support import ROOT
from tests.support.browser import CHROMIUM, open_browser
from tests.support.doc_pages import DOCS

PAGE = """<!doctype html><html><head><script src="iframe-worker.js"></script></head><body><script>
const worker = new Worker("worker.js"), heard = [];
worker.addEventListener("message", (event) => heard.push(event.data));
worker.onmessage = (event) => heard.push("again " + event.data);
worker.postMessage(20);  // before the script is there
</script></body></html>"""
WORKER = "addEventListener('message', async (e) => { await importScripts('more.js'); postMessage(more(e.data)) })"


def test_the_site_names_no_script_of_another_host():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    scripts = [*settings["extra"]["polyfills"], *settings["extra_css"], *settings.get("extra_javascript", [])]
    assert "iframe-worker.js" in scripts and all((DOCS / name).is_file() for name in scripts)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_worker_answers_in_a_page_from_disk(tmp_path):
    for name, text in {"page.html": PAGE, "worker.js": WORKER, "more.js": "self.more = (n) => n + 1"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "iframe-worker.js").write_text((DOCS / "iframe-worker.js").read_text(encoding="utf-8"))
    with open_browser() as browser:
        page = browser.new_page()
        page.goto((tmp_path / "page.html").as_uri())
        page.wait_for_function("heard.length == 2")
        assert page.evaluate("heard") == [21, "again 21"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site, built as ``make docs`` builds it."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return folder


def watch(page) -> list[str]:
    """All that a page will say to the console, and every address that it will ask for beyond the disk."""
    said: list[str] = []
    page.on("console", lambda message: said.append(f"{page.url}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: request.url.startswith("file:") or said.append(request.url))
    return said


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_no_page_is_wider_than_its_window(site):
    others = {"404.html", "rooms.html"}  # a server's page, and one that sends readers on
    pages = [p for p in sorted(site.rglob("*.html")) if "source" not in p.parts and p.name not in others]
    assert len(pages) > 50
    with open_browser() as browser:
        for width in (390, 820, 1440):
            page = browser.new_page(viewport={"width": width, "height": 900})
            said = watch(page)
            for path in pages:
                page.goto(path.as_uri())
                assert page.evaluate("document.documentElement.scrollWidth") <= width, path
                assert page.evaluate("[...document.images].every(i => i.naturalWidth)"), path
            assert said == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_search_finds_what_people_type(site):
    wanted = {"flash attention": "layers", "fused cross entropy": "cross-entropy", "sinkhorn": "sinkhorn", "knn": "knn"}
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        said = watch(page)
        for words, part in wanted.items():
            page.goto((site / "index.html").as_uri())
            page.click("input.md-search__input")
            page.keyboard.type(words)
            first = page.wait_for_selector(".md-search-result__item", timeout=60_000)
            links = first.evaluate("e => [...e.querySelectorAll('a')].map(a => a.getAttribute('href').toLowerCase())")
            assert any(part in link for link in links), f"{words} finds {links}"
        assert said == []
