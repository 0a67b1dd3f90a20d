"""Search in pages that are opened from disk: the stand-in for a Web Worker, in a real browser where there is one."""

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
