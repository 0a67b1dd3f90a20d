"""Every row of the tables of equivalents is run: ours, plain torch, and the other library where it can be."""

import importlib.util
import re
import sys
import types
import warnings

import pytest
import torch

from tests.support.doc_pages import DOCS, run

PAGE = DOCS / "moving.md"
NEEDS = {  # section: what must be importable, and whether its kernels need a GPU
    "FlexAttention": ("torch.nn.attention.flex_attention", False),
    "torch": ("torch", False),
    "Liger": ("liger_kernel", True),
    "Cut Cross-Entropy": ("cut_cross_entropy", True),
    "KeOps": ("pykeops", False),
    "scikit-learn and scipy": ("sklearn", False),
    "faiss": ("faiss", False),
    "GeomLoss": ("geomloss", False),
    "Varlen attention": ("flash_attn", True),
    "Graphs": ("torch_geometric", False),
    "cuEquivariance": ("cuequivariance_torch", True),
    "Late interaction": ("pylate", False),
}


def rows() -> list[tuple[str, str, str, str]]:
    """(section, there, here, plain torch) of every row."""
    found = []
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        cells = re.findall(r"^\| `(.+?)` \| `(.+?)` \| `(.+?)` \|$", section, re.MULTILINE)
        found += [(section.splitlines()[0], *row) for row in cells]
    return found


ROWS = rows()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def names():
    """What the page's blocks define; as a module too, since a compiler looks globals up by their module's name."""
    with DEVICE:
        found = run(PAGE)
    module = types.ModuleType(str(found["__name__"]))
    vars(module).update(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        yield found


def test_every_section_has_its_table():
    text = PAGE.read_text(encoding="utf-8")
    assert [section for section in NEEDS if sum(row[0] == section for row in ROWS) < 4] == []
    assert len(ROWS) == len(re.findall(r"^\| `", text, re.MULTILINE)), "a row that the test cannot read"


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r[0]}: {r[2]}")
def test_both_mean_the_same(row, names):
    _, _, here, plain = row
    with DEVICE:
        torch.testing.assert_close(eval(here, names), eval(plain, names), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r[0]}: {r[1]}")
def test_so_does_the_other_library(row, names):
    section, there, _, plain = row
    module, needs_gpu = NEEDS[section]
    if importlib.util.find_spec(module.split(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    if needs_gpu and not torch.cuda.is_available():
        pytest.skip(f"{module} needs a CUDA device")
    with DEVICE, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FlexAttention says that it is slow without a compiler
        theirs, expected = torch.as_tensor(eval(there, names)), eval(plain, names)
        torch.testing.assert_close(theirs.to(expected), expected, rtol=1e-4, atol=1e-5)
