"""Docstrings as the site reads them: examples become code blocks, and names given as in Sphinx become code.

An extension of griffe, which reads the package's source for the reference without importing it.
"""

import re

import griffe

EXAMPLE = re.compile(r"(?:^ *>>> .*(?:\n(?! *$).+)*\n?)+", re.MULTILINE)  # from a prompt to the next empty line
ROLE = re.compile(r":(?:func|class|meth|mod):`~?([\w.]+)`")


def as_markdown(text: str) -> str:
    """A docstring with its examples fenced."""
    text = EXAMPLE.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", text)
    return ROLE.sub(r"`\1`", text)


class Docstrings(griffe.Extension):
    """Applied to every object that is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
