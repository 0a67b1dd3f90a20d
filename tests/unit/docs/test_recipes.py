"""The recipes of the documentation against the plain torch that stands below each of them on the page."""

import re
from collections.abc import Callable

import pytest
import torch

import monoidreduce as mr
from tests.support.allocations import usage
from tests.support.comparison import assert_equal, assert_error_rule, cast, run, use_small_tiles
from tests.support.doc_pages import DOCS
from tests.support.doc_pages import run as run_page
from tests.support.layers.base import Draw

PAGE = DOCS / "recipes.md"
NAMES = re.findall(r"^@mr\.op\ndef (\w+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def _clusters(d: Draw) -> tuple:
    return d.rows(3), d.cols(3) + 1


# recipe: its inputs. The page has the rest.
INPUTS: dict[str, Callable[[Draw], tuple]] = {
    "attention": lambda d: (*d.qkv(), 0.3),
    "local_attention": lambda d: (*d.qkv(), 9),
    "alibi": lambda d: (d.normal(2, d.M, 5), d.normal(2, d.N, 5), d.normal(2, d.N, 3), d.uniform(2)),
    "sigmoid_attention": lambda d: (*d.qkv(), d.cols()),
    "best_attention": lambda d: d.qkv(),
    "graph_attention": lambda d: (*d.qkv(), d.integers(d.M, d.N).bool()),
    "cross_entropy": lambda d: (d.rows(5), d.targets(), d.cols(5)),
    "smoothed": lambda d: (d.rows(5), d.targets(), d.cols(5), 0.1, 1e-2),
    "distill": lambda d: (d.rows(5), d.cols(5), d.rows(3), d.cols(3)),
    "entropy": lambda d: (d.rows(5), d.cols(5)),
    "swiglu": lambda d: (d.rows(5), d.cols(5), d.cols(5), d.cols(3)),
    "clip": lambda d: (d.rows(5), d.normal(d.M, 5), 1.7),
    "supcon": lambda d: (d.rows(5), d.integers(d.M, high=7), d.cols(5), d.integers(d.N, high=7)),
    "log_density": lambda d: (d.rows(3), d.cols(3), 0.6),
    "regress": lambda d: (d.rows(3), d.cols(3), d.cols(2), 0.6),
    "kmeans_step": _clusters,
    "sinkhorn_half": lambda d: (d.rows(3), d.cols(3), d.cols(), d.cols(), 0.5),
    "potential": lambda d: (d.rows(3), d.cols(3), d.uniform(d.N), 0.1),
    "ranking": lambda d: (d.rows(), d.integers(d.M, high=5), d.cols(), d.integers(d.N, high=5)),
    "attention_view": lambda d: (d.rows(5), d.cols(5), 0.3),
    "indexer_loss": lambda d: (d.rows(3), d.cols(3), d.rows(5), d.cols(5)),
    "indexer": lambda d: (d.normal(d.M, 3, 5), d.uniform(d.M, 3), d.cols(5)),
    "any_query": lambda d: (d.normal(d.M, 3, 5), d.cols(5), d.cols(2)),
    "relative_attention": lambda d: (*d.qkv(), d.normal(d.M + d.N - 1)),
    "swin_attention": lambda d: (*d.qkv(), d.integers(d.M, high=49), d.integers(d.N, high=49), d.normal(169), 7),
    "graphormer": lambda d: (*d.qkv(), d.integers(d.M, d.N, high=6), d.normal(6)),
    "nearest_say": lambda d: (d.rows(3), d.cols(3), d.cols()),
    "attention_to_best": lambda d: (*d.qkv(), 9),
    "cox": lambda d: (d.rows(), d.uniform(d.M), d.integers(d.M).bool(), d.cols(), d.uniform(d.N)),
}


@pytest.fixture(scope="module")
def page():
    return run_page(PAGE)


def drawn(name: str, rows: int, cols: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple:
    return INPUTS[name](Draw(rows, cols, torch.Generator().manual_seed(seed), dtype))


def test_each_is_numbered_and_run():
    numbers = re.findall(r"^### (\d+)\.", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(NAMES) == set(INPUTS) and list(map(int, numbers)) == list(range(1, len(NAMES) + 1))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_its_plain_form(name, page, seed, monkeypatch):
    use_small_tiles(monkeypatch)
    for rows, cols in ((59, 111), (1, 9)):
        args = drawn(name, rows, cols, seed)
        assert_equal(run(page[name], args), run(page[f"dense_{name}"], args))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_as_exact_as_its_plain_form(name, page, seed):
    trials = []
    for k in range(3):
        args = drawn(name, 59, 111, seed + k, torch.float32)
        dense = page[f"dense_{name}"]
        trials.append((run(page[name], args), run(dense, args), run(dense, cast(args, torch.float64))))
    assert_error_rule(trials)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_never_builds_the_matrix(name, page, seed):
    rows = cols = 1200
    args = drawn(name, rows, cols, seed, torch.float32)
    with mr.budget("8MB"), mr.use(engine="eager"):
        used = usage(page[name], args)
    assert used.largest < rows * cols * 4 / 4, used.culprit  # a quarter of the matrix; the tiles are smaller
