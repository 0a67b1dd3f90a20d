"""What people type into the site's search, and where they should arrive. ``hooks.py`` checks every build by this."""

import re

# How much a page counts in search, by the beginning of its path: pages for users come before internals.
BOOSTS = {"layers.md": 4.0, "moving.md": 1.5, "internals/": 0.3, "changelog.md": 0.2, "benchmarks.md": 0.5}
SEARCHES = {  # what people type, and the page where they find it
    "flash attention": "layers.html#attention",
    "sliding window": "layers.html#attention",
    "fused cross entropy": "layers.html#vocabulary-heads",
    "knn": "layers.html#neighbours",
    "nearest neighbours": "layers.html#neighbours",
    "sinkhorn": "layers.html#kernels-and-transport",
    "optimal transport": "layers.html#kernels-and-transport",
    "clip loss": "layers.html#contrastive-losses",
    "huggingface": "torch.html#hugging-face-transformers",
    "liger": "moving.html#liger",
    "keops": "moving.html#keops",
    "memory budget": "planning.html#budgets-and-running-out-of-memory",
}


def finds(index: dict, words: str, page: str) -> bool:
    """Whether a section of the site has all these words, in its title or text."""
    found = [entry for entry in index["docs"] if entry["location"] == page]
    text = " ".join(f"{entry['title']} {entry['text']}" for entry in found).lower()
    return all(re.search(rf"\b{re.escape(word)}", re.sub(r"[-_]", " ", text)) for word in words.lower().split())
