"""What a command gives back: its answer, its error, its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class CommandError(Exception):
    """A request that cannot be carried out; the message says what to do instead. Shown without a traceback."""


@dataclass(frozen=True)
class Answer:
    """The result of a command: ``data`` for ``--json``, or ``show(console)`` for the terminal, and the exit code.

    The code is 0, or 1 if the answer to the question asked is no.
    """

    data: Mapping[str, Any]
    show: Callable[[Any], None]
    code: int = 0


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


# Files ------------------------------------------------------------------------------------------------------------


class OutputFolder:
    """The folder that --out names. Make this before any long measurement: it fails if nothing can be written there."""

    def __init__(self, path: Path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise CommandError(f"--out {path} is a file. Give a folder") from None
        except OSError as error:
            raise CommandError(
                f"cannot make the folder {path}: {error.strerror}. Give another one with --out"
            ) from None
        if not os.access(path, os.W_OK | os.X_OK):
            raise CommandError(f"cannot write into the folder {path}. Give another one with --out")
        self.path = path

    def write(self, contents: Mapping[str, str | bytes]) -> list[Path]:
        """Write each file and return the paths."""
        paths = [self.path / name for name in contents]
        for path, content in zip(paths, contents.values(), strict=True):
            try:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
            except OSError as error:
                raise CommandError(f"cannot write {path}: {error.strerror}. Give another folder with --out") from None
        return paths
