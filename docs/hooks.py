"""What the site does beyond its theme. mkdocs calls the ``on_`` functions.

- Pages may link to any file of the repository. A link such as ``[op.py](../monoidreduce/op.py)`` works where the
  repository is read as files; on the site the file becomes a page under ``source/``. Only linked files are shown.
- The changelog is a page.
- Pages that were moved leave a page with a link at their old address.
- The table of sizes in the contributing page is computed when the site is built.
- A pipe inside code in a table is written ``\\|``, as GitHub needs it; Markdown here would show the backslash.
- Search puts pages for users before internals. What people type must find the page that answers (search.py): a build
  whose index does not is an error.
"""

import json
import re
from pathlib import Path

import search  # docs/search.py and docs/size.py: mkdocs puts the folder of its hooks on the path
import size
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
MOVED = {"rooms.md": ("architecture.md", "Architecture")}  # old address: new address and title
OUTSIDE = re.compile(r"\]\(((?:\.\./)+)([\w./-]+)(#[\w-]*)?\)")  # a relative link that climbs
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".txt": "text", ".json": "json", "": "text"}


def on_files(files: Files, config) -> Files:
    """Add the changelog, old addresses, and a page for each file outside docs/ that a page links to."""
    files.append(File.generated(config, "changelog.md", content=_changelog()))
    for old, (new, title) in MOVED.items():
        files.append(File.generated(config, old, content=_moved(new, title)))
    linked = {target for file in files.documentation_pages() for _, target in outside(file)}
    for target in sorted(linked):
        files.append(File.generated(config, shown_at(target), content=_source(target)))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Point links that leave docs/ at the pages made for them, fill the table of sizes, and mend pipes in tables."""
    markdown = unescape_pipes(size.filled(markdown))
    boost = next((b for start, b in search.BOOSTS.items() if page.file.src_uri.startswith(start)), None)
    if boost is not None:
        page.meta.setdefault("search", {}).setdefault("boost", boost)
    depth = page.file.src_uri.count("/")

    def point(match: re.Match) -> str:
        if match[1].count("../") != depth + 1:
            return match[0]
        return f"]({'../' * depth}{shown_at(match[2])})"

    return OUTSIDE.sub(point, markdown)


def unescape_pipes(markdown: str) -> str:
    r"""The text with ``\|`` inside code in the rows of tables as a plain pipe.

    >>> unescape_pipes("| `a \| None` | b \| c |")
    '| `a | None` | b \\| c |'
    """
    in_code = lambda match: match[0].replace(r"\|", "|")
    rows = (re.sub(r"`[^`]+`", in_code, r) if r.startswith("|") else r for r in markdown.split("\n"))
    return "\n".join(rows)


def on_post_build(config) -> None:
    """Look in the search index for what people type."""
    index = json.loads(Path(config["site_dir"], "search", "search_index.json").read_text(encoding="utf-8"))
    lost = [
        f"{words!r} does not find {page}"
        for words, page in search.SEARCHES.items()
        if not search.finds(index, words, page)
    ]
    if lost:
        raise PluginError(f"the search index: {'; '.join(lost)}")


def outside(file: File) -> list[tuple[str, str]]:
    """The links of a page that leave docs/: as written, and from the root of the repository."""
    depth = file.src_uri.count("/") + 1
    found = OUTSIDE.finditer(file.content_string)
    return [(m[0], m[2]) for m in found if m[1].count("../") == depth]


def shown_at(target: str) -> str:
    """Where the page of a file or folder of the repository is."""
    return f"source/{target.rstrip('/').replace('.', '_')}.md"


def _moved(new: str, title: str) -> str:
    refresh = f'<meta http-equiv="refresh" content="0; url={new.removesuffix(".md")}.html">'
    front = f"---\ntitle: {title}\nsearch:\n  exclude: true\n---\n\n"
    return f"{front}# This page has moved\n\n{refresh}\n\nIt is now [{title}]({new}).\n"


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
