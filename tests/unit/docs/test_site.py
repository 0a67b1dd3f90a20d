"""The documentation: pictures are what their scripts make, names and files that pages mention exist, nothing public is
left out of the reference. That the site builds, without a warning, is for ``make docs``."""

import doctest
import inspect
import json
import os
import re
import subprocess
import sys

import griffe
import pytest
import torch
from matplotlib.image import imread

import monoidreduce as mr
from docs import search, size
from docs.docstrings import as_markdown
from docs.draw import architecture, curves, domains, gallery, schedules
from docs.draw.pictures import IMAGES, PICTURES
from monoidreduce import laws
from tests.support import ROOT
from tests.support.doc_pages import DOCS, run

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
SHADOWING = ("all", "any", "max", "min", "sum")  # public, but not for a star import
ROOMS = {"errors": mr.errors} | {n: getattr(mr, n) for n in mr.__all__ if inspect.ismodule(getattr(mr, n))}


def public() -> list[str]:
    """Every name a user may type, below the package, as the reference spells it."""
    found = [n for n in mr.__all__ if n not in {*ROOMS, *mr.errors.__all__, "__version__"}] + list(SHADOWING)
    for room, module in ROOMS.items():
        found += [f"{room}.{name}" for name in module.__all__]
    doors = ("register", "fuse_loss", "unfuse_loss", "causal_lm_loss", "token_logprobs", "PagedKeyValueCache")
    found += [f"integrations.transformers.{name}" for name in doors]
    found += [f"integrations.ray.{name}" for name in ("Progress", "Result", "estimate", "run")]
    losses = ("vocab_parallel_cross_entropy", "linear_vocab_parallel_cross_entropy")
    found += [f"integrations.megatron.{name}" for name in ("fuse_loss", *losses)]
    return [*found, "integrations.trl.fuse", "integrations.trl.unfuse"]


PUBLIC = public()


@pytest.fixture(scope="module")
def package():
    return griffe.load("monoidreduce", search_paths=[ROOT], resolve_aliases=True)


# Names


def found(package, name):
    """A name's object in the source; where a file has the name of its function, the function."""
    obj = package[name]
    return obj[name.split(".")[-1]] if obj.is_module else obj


def test_the_reference_has_every_public_name_and_no_other():
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    shown = re.findall(r"^::: monoidreduce\.(\S+)$", pages, re.MULTILINE)
    shown = [re.sub(r"(\w+)\.\1$", r"\1", name) for name in shown]  # the function op of the file op.py
    assert len(shown) == len(set(shown))
    missing, unknown = sorted(set(PUBLIC) - set(shown)), sorted(set(shown) - set(PUBLIC))
    assert not missing, f"add `::: monoidreduce.NAME` to a page of docs/reference for {missing}"
    assert not unknown, f"the reference shows what is not public: {unknown}"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring_with_an_example(name, package):
    text = found(package, name).docstring
    assert text is not None and ">>>" in text.value, f"{name} has no {'example' if text else 'docstring'}"


def test_public_methods_have_docstrings(package):
    silent = [
        f"{name}.{method.name}"
        for name in PUBLIC
        if found(package, name).is_class
        for method in found(package, name).members.values()
        if method.is_function and not method.name.startswith("_") and method.docstring is None
    ]
    own = {"combine", "pullback", "remove", "fold_tile", "embed", "legal", "approx", "forward", "extra_repr"}
    assert [m for m in silent if m.split(".")[-1] not in own] == [], "say what they do"


VALUES = ["row_index", "col_index", "num_rows", "num_cols", "laws.LAWS"]
VALUES += ["ops.cross_entropy", "ops.entropy", "ops.sample"]  # older names


@pytest.mark.parametrize("name", VALUES)
def test_examples_of_values_run(name, package):
    """Those of functions and classes are collected by pytest; a value's docstring only readers of the source see."""
    test = doctest.DocTestParser().get_doctest(found(package, name).docstring.value, dict(vars(laws)), name, None, 0)
    assert test.examples and doctest.DocTestRunner().run(test).failed == 0


def test_the_package_is_typed():
    assert (ROOT / "monoidreduce" / "py.typed").is_file()
    assert "py.typed" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_examples_become_code_blocks():
    text = "One line.\n\n>>> 1\n1\n>>> 2\n2\n\nSee :func:`~torch.add`."
    assert as_markdown(text) == "One line.\n\n```pycon\n>>> 1\n1\n>>> 2\n2\n```\n\nSee `torch.add`."


# Files


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if not t.startswith("http")]
    assert [t for t in targets if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_named_in_code_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:monoidreduce|tests|benchmarks|docs|examples)/[\w/.-]+\.\w+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


# Pictures


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_its_script_draws(name):
    drawn = (IMAGES / f"idea-{name}.svg").read_text(encoding="utf-8")
    assert str(PICTURES[name]()) == drawn, "run: python -m docs.draw.pictures"
    assert f"idea-{name}.svg" in (DOCS / "idea.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", architecture.PICTURES)
def test_a_picture_of_the_architecture_is_what_its_script_draws(name):
    drawn = (IMAGES / f"architecture-{name}.svg").read_text(encoding="utf-8")
    assert str(architecture.PICTURES[name]()) == drawn, "run: python -m docs.draw.architecture"
    assert f"architecture-{name}.svg" in (DOCS / "architecture.md").read_text(encoding="utf-8")


def test_loss_curves_are_drawn_from_the_newest_results_and_agree():
    assert str(curves.curves()) == curves.PICTURE.read_text(encoding="utf-8"), "run: python -m docs.draw.curves"
    assert curves.PICTURE.name in (DOCS / "training.md").read_text(encoding="utf-8")
    for kind, found in curves.newest()["types"].items():
        base, seed, ours = (found["curves"][name] for name in ("torch", "torch, another seed", "ours"))
        assert len(base) == len(ours) == 200 and base[-1] < base[0] - 2, "the model did not learn: nothing is compared"
        apart = [max(abs(a - b) for a, b in zip(base, other, strict=True)) for other in (ours, seed)]
        assert apart[0] < apart[1] / 2, kind


@pytest.mark.parametrize("name", domains.PICTURES)
def test_a_picture_of_a_domain_is_what_its_script_draws(name):
    drawn = (IMAGES / f"domain-{name}.svg").read_text(encoding="utf-8")
    assert str(domains.PICTURES[name]()) == drawn, "run: python -m docs.draw.domains"


@pytest.mark.parametrize("name", schedules.PICTURES)
def test_a_picture_of_a_schedule_is_what_its_script_draws(name):
    drawn = (IMAGES / f"schedule-{name}.svg").read_text(encoding="utf-8")
    assert str(schedules.PICTURES[name]()) == drawn, "run: python -m docs.draw.schedules"
    assert "prefers-color-scheme: dark" in drawn
    assert f"schedule-{name}.svg" in (DOCS / "internals" / "schedules.md").read_text(encoding="utf-8")


def test_the_gallery_page_is_the_notebook():
    assert gallery.page() == gallery.PAGE.read_text(encoding="utf-8"), "run: python -m docs.draw.gallery"
    cells = json.loads(gallery.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [c for c in cells if c.get("outputs") or c.get("execution_count")], "commit it without outputs"


def assert_ten_layers(folder):
    names = gallery.SHOWN.findall("\n".join(c.source for c in gallery.cells()))
    assert len(names) == len(set(names)) == 10
    assert {p.stem for p in gallery.IMAGES.glob("*.png")} == set(names)
    for name in names:
        for image in (imread(folder / f"{name}.png"), imread(gallery.IMAGES / f"{name}.png")):
            assert image.shape[0] > 200 and image.shape[1] > 200 and float(image.std()) > 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # NumPy says so of torch's tensors in figures
def test_the_gallery_draws_ten_layers(tmp_path, monkeypatch):
    monkeypatch.setenv("GALLERY_OUT", str(tmp_path))
    run(gallery.PAGE)  # the cells of the notebook, by the test before
    assert_ten_layers(tmp_path)


@pytest.mark.slow  # starts a kernel
def test_the_notebook_runs_and_draws_ten_layers(tmp_path):
    command = [sys.executable, "-m", "docs.draw.gallery", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_ten_layers(tmp_path)


# Search


def test_a_search_that_finds_nothing_is_noticed():
    entry = {"location": "layers.html#attention", "title": "Attention", "text": "Also called <em>flash-attention</em>."}
    assert search.finds({"docs": [entry]}, "Flash attention", "layers.html#attention")
    assert not search.finds({"docs": [entry]}, "flash attention", "layers.html")
    assert not search.finds({"docs": [entry]}, "sinkhorn", "layers.html#attention")


@pytest.mark.parametrize(("words", "page"), search.SEARCHES.items())
def test_what_people_type_is_written_where_they_should_arrive(words, page):
    """In the source of the page; that the built index has it too is checked by every build of the site."""
    text = (DOCS / page.partition(".html")[0]).with_suffix(".md").read_text(encoding="utf-8")
    assert all(word in re.sub(r"[-_]", " ", text.lower()) for word in words.split())


# Size


def test_code_lines_leave_out_blank_lines_comments_and_docstrings():
    text = '"""Two\nlines."""\n\n# why\nx = """a\nb"""  # said\n\n\ndef f():\n    """One line."""\n    return x\n'
    assert size.code_lines(text) == {5, 6, 9, 11}


def test_the_table_of_sizes_has_every_package(tmp_path, monkeypatch):
    (tmp_path / "monoidreduce" / "plan").mkdir(parents=True)
    (tmp_path / "monoidreduce" / "a.py").write_text("x = 1\n\n")
    (tmp_path / "monoidreduce" / "plan" / "b.py").write_text("# only words\ny = 2\nz = 3\n")
    lines = size.table(tmp_path).splitlines()
    assert lines[2:] == [
        "| monoidreduce/ | 1 | 2 | 1 | 2 |",
        "| monoidreduce/plan/ | 1 | 3 | 2 | 3 |",
        "| **monoidreduce**, all | 2 | 5 | 3 | 3 |",
    ]
    assert [name for name, _ in size.measure_folders(size.ROOT / "docs")]
    monkeypatch.setattr(size, "ROOT", tmp_path)
    assert "| monoidreduce/plan/ |" in size.filled("<!-- size -->\n<!-- end size -->")
