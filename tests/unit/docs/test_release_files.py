"""What a release needs beside the code: one version everywhere, forms for issues that can be read, no stale results."""

import re

import pytest
import yaml

import monoidreduce as mr
from benchmarks.readme import RESULTS, newest
from tests.support import ROOT
from tests.support.doc_pages import DOCS

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_changelog_and_the_citation_name_the_version_and_its_date():
    (version, date), *_ = re.findall(r"^## \[(\d[\d.]*)\] - (\d{4}-\d\d-\d\d)$", read("CHANGELOG.md"), re.MULTILINE)
    citation = yaml.safe_load(read("CITATION.cff"))
    assert (version, version, date) == (mr.__version__, citation["version"], str(citation["date-released"]))
    assert citation["cff-version"] == "1.2.0" and citation["authors"] and citation["title"] and citation["license"]


@pytest.mark.parametrize("form", FORMS, ids=lambda p: p.name)
def test_a_form_for_issues_is_valid(form):
    data = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.name == "config.yml":
        assert set(data) == {"blank_issues_enabled"}
        return
    assert {"name", "description", "body"} <= set(data)
    fields = [entry for entry in data["body"] if entry["type"] != "markdown"]
    assert fields and len({entry["id"] for entry in fields}) == len(fields)
    assert all(entry["attributes"]["label"] for entry in fields)


def test_every_result_is_the_newest_of_its_kind_or_linked_by_a_page():
    pages = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "README.md", *DOCS.rglob("*.md")))
    for path in RESULTS.glob("*.json"):
        kind = re.fullmatch(r"(.*)-\d{8}-\d{4}", path.stem)[1]
        shown = newest(kind) == path and re.search(rf"<!-- results: ({kind}|front|headline)\b", pages)
        assert shown or f"{path.stem}." in pages, f"{path.name} is stale, or no page shows it"
