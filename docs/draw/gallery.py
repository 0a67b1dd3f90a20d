"""The gallery: runs ``examples/gallery.ipynb`` and makes its page from it.

``python -m docs.draw.gallery`` executes the notebook in a kernel of its own, keeps its pictures in docs/images/gallery
and writes docs/gallery.md: the notebook's words and code, and each picture after the cell that draws it. The notebook
is committed without outputs; the pictures are small.
"""

import argparse
import os
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "gallery.ipynb"
PAGE = ROOT / "docs" / "gallery.md"
IMAGES = ROOT / "docs" / "images" / "gallery"
SHOWN = re.compile(r'^show\(figure, "(\w+)"\)$', re.MULTILINE)  # what draws, and under which name


def execute(folder: Path) -> nbformat.NotebookNode:
    """Run every cell; a failing one raises. The pictures are left in ``folder``."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "GALLERY_OUT": str(folder), "PYTHONPATH": str(ROOT)}
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}})
    return client.execute(env=environment)


def cells() -> list[nbformat.NotebookNode]:
    return nbformat.read(NOTEBOOK, as_version=4).cells


def page() -> str:
    """The page, from the notebook's cells alone."""
    parts = []
    for cell in cells():
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        parts += [f"![{name}](images/gallery/{name}.png)" for name in SHOWN.findall(cell.source)]
    parts.append("The notebook is [examples/gallery.ipynb](../examples/gallery.ipynb); the tests run it.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=IMAGES, help="where the pictures go")
    folder = parser.parse_args().out
    execute(folder)
    if folder == IMAGES:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
