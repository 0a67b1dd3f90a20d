"""What the site does beyond its theme: pages may link to any file of the repository, and the changelog is a page.

A link such as ``[op.py](../monoidreduce/op.py)`` works where the repository is read as files; on the site the file
becomes a page under ``source/``. Only files that some page names are shown. mkdocs calls the ``on_`` functions.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(((?:\.\./)+)([\w./-]+)(#[\w-]*)?\)")  # a relative link that climbs
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".txt": "text", ".json": "json", "": "text"}


def on_files(files: Files, config) -> Files:
    """Add the changelog, and a page for each file outside docs/ that a page links to."""
    files.append(File.generated(config, "changelog.md", content=_changelog()))
    linked = {target for file in files.documentation_pages() for _, target in outside(file)}
    for target in sorted(linked):
        files.append(File.generated(config, shown_at(target), content=_source(target)))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Point links that leave docs/ at the pages made for them."""
    depth = page.file.src_uri.count("/")

    def moved(match: re.Match) -> str:
        if match[1].count("../") != depth + 1:
            return match[0]
        return f"]({'../' * depth}{shown_at(match[2])})"

    return OUTSIDE.sub(moved, markdown)


def outside(file: File) -> list[tuple[str, str]]:
    """The links of a page that leave docs/: as written, and from the root of the repository."""
    depth = file.src_uri.count("/") + 1
    found = OUTSIDE.finditer(file.content_string)
    return [(m[0], m[2]) for m in found if m[1].count("../") == depth]


def shown_at(target: str) -> str:
    """Where the page of a file or folder of the repository is."""
    return f"source/{target.rstrip('/').replace('.', '_')}.md"


def _source(target: str) -> str:
    path = ROOT / target
    front = f"---\ntitle: {target}\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n"
    if path.is_dir():
        names = sorted(p.name + "/" * p.is_dir() for p in path.iterdir() if not p.name.startswith(("_", ".")))
        return f"{front}# `{target}`\n\n" + "\n".join(f"- `{name}`" for name in names)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return f"{front}# `{target}`\n\n{text}"
    language = LANGUAGES.get(path.suffix, "text")
    return f"{front}# `{target}`\n\n````{language}\n{text}\n````\n"


def _changelog() -> str:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return text.replace("](docs/", "](")
