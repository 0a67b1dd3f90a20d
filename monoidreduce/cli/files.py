"""Files that a command writes: the folder is tried before the work, so that nobody measures for a minute in vain."""

from __future__ import annotations

import os
from pathlib import Path

from .command import CommandError


def folder(path: Path) -> Path:
    """The folder, made if it was not there; an error if nothing can be written into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CommandError(f"--out {path} is a file. Give a folder") from None
    except OSError as error:
        raise CommandError(f"cannot make the folder {path}: {error.strerror}. Give another one with --out") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise CommandError(f"cannot write into the folder {path}. Give another one with --out")
    return path


def write(path: Path, content: str | bytes) -> Path:
    """Write a whole file."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}. Give another folder with --out") from None
    return path
