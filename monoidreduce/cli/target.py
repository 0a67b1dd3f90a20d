"""``FILE.py:NAME``: the user's file is run once, as Python runs it, and the thing is taken from it by name.

Whatever is wrong with the file or the name is the user's to mend, so each is one message, with the line where it
happened. ``package.module:NAME`` works too.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.autograd import Function

from ..algebra import Monoid
from ..errors import MonoidReduceError
from ..op import Op
from .command import CommandError

_HINT = "Give FILE.py:NAME, such as layers.py:attention"


@dataclass(frozen=True)
class Target:
    """What was asked for, and the module that it stands in."""

    name: str
    thing: Any
    module: ModuleType
    file: str

    @property
    def is_monoid(self) -> bool:
        return _is_monoid(self.thing)

    @property
    def call(self) -> Callable[..., Any]:
        """The thing as a function of its arguments: a ``torch.autograd.Function`` is called through ``apply``."""
        is_function = isinstance(self.thing, type) and issubclass(self.thing, Function)
        return self.thing.apply if is_function else self.thing

    def companion(self, asked: str | None, suffix: str) -> Callable[..., Any] | None:
        """A function that stands beside it: the one that was asked for, else ``NAME_suffix`` if it is there."""
        found = getattr(self.module, asked or f"{self.name}_{suffix}", None)
        if asked and not callable(found):
            raise CommandError(f"{self.file} has no function {asked}, which --{suffix} names")
        return found if callable(found) else None


def load(spec: str) -> Target:
    """The thing that ``spec`` names."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name or "/" in name or "\\" in name:
        known = _names(_module(spec)) if spec.endswith(".py") else []
        raise CommandError(f"{spec} names no layer. {_HINT}" + (f". The file has: {', '.join(known)}" if known else ""))
    module = _module(where)
    try:
        thing = getattr(module, name)
    except AttributeError:
        known = _names(module)
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("__")], n=1)
        said = f"Did you mean {near[0]}?" if near else f"It has: {', '.join(known) or 'no op and no monoid'}"
        raise CommandError(f"{where} has no {name}. {said}") from None
    if not (_is_layer(thing) or _is_monoid(thing) or callable(thing)):
        raise CommandError(
            f"{spec} is {_described(thing)}. Name an op (a function under @mr.op), a monoid (a subclass of mr.Monoid) "
            "or another layer that can be called"
        )
    return Target(name, thing, module, where)


@contextlib.contextmanager
def users_code(file: str) -> Iterator[None]:
    """An error that comes out of the user's own lines is theirs: one message, with the line; any other is ours."""
    try:
        yield
    except (CommandError, MonoidReduceError, KeyboardInterrupt):
        raise
    except BaseException as error:
        line = _line(error, file)
        if line is not None:
            raise CommandError(f"{file}, line {line}: {described(error)}") from None
        elsewhere = _last_frame_of_user(error)
        if elsewhere is None:
            raise
        raise CommandError(f"{elsewhere}: {described(error)}") from None


def check_takes(function: Callable[..., Any], args: Sequence[Any], option: str) -> None:
    """Whether a user's function can be called with so many arguments; else one message says what it is to take."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(function, "__name__", str(function))
        raise CommandError(f"{name}, which {option} names, is called with {len(args)} arguments: {error}") from None


def described(error: BaseException) -> str:
    """An error in one line: its first, and its type where that says more.

    >>> described(KeyError("q")), described(ZeroDivisionError("division by zero"))
    ("KeyError: 'q'", 'ZeroDivisionError: division by zero')
    """
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def _line(error: BaseException, file: str) -> int | None:
    path = _resolved(file)
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if _resolved(f.filename) == path]
    return lines[-1] if lines else None


def _last_frame_of_user(error: BaseException) -> str | None:
    """Where an error came out of a file that is neither ours nor installed: one that the target imports."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = [Path(__file__).parents[1], *(Path(p).resolve() for p in folders)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = _resolved(frame.filename)
        if path.is_file() and not any(path.is_relative_to(p) for p in installed):
            return f"{frame.filename}, line {frame.lineno}"
    return None


def _resolved(file: str) -> Path:
    return Path(file).resolve()


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        return _installed(where)
    path = Path(where)
    try:
        there, folder = path.is_file(), path.is_dir()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise CommandError(f"there is no file {where[:80]!r}: {_reason(error)}. {_HINT}") from None
    if not there:
        raise CommandError(f"the file {where} {'is a folder' if folder else 'does not exist'}. {_HINT}")
    spec = importlib.util.spec_from_file_location(f"_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise CommandError(f"{where} cannot be read as Python. {_HINT}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pickle, dataclasses and inspect look
    sys.path.insert(0, str(path.parent.resolve()))  # as ``python FILE.py`` has it
    try:
        with users_code(where):
            spec.loader.exec_module(module)
    except SyntaxError as error:  # in the file itself: no line of it ever ran
        if error.lineno is None:  # bytes that are no text
            raise CommandError(f"{where} cannot be read as Python: {error.msg}") from None
        raise CommandError(
            f"{error.filename}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}"
        ) from None
    except (OSError, ValueError) as error:  # no right to read it, or a wrong encoding
        raise CommandError(f"{where} cannot be read: {described(error)}") from None
    except MonoidReduceError as error:
        raise CommandError(f"{where}, line {_line(error, where)}: {error}") from None
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(path.parent.resolve()))
    return module


def _installed(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        is_path = "/" in name or "\\" in name or name.startswith(".")
        more = " (a file's path ends in .py)" if is_path else ""
        raise CommandError(f"{name[:200]!r} is neither a .py file nor an importable module{more}. {_HINT}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CommandError(f"{name} is neither a .py file nor an importable module ({error}). {_HINT}") from None
    except MonoidReduceError as error:
        raise CommandError(f"{name} cannot be imported: {error}") from None
    except (Exception, SystemExit) as error:  # its own lines failed
        where = _last_frame_of_user(error)
        raise CommandError(f"{name} cannot be imported: {f'{where}: ' if where else ''}{described(error)}") from None


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _names(module: ModuleType) -> list[str]:
    """The ops and monoids that a module defines itself."""
    own = {n: v for n, v in vars(module).items() if not n.startswith("_")}
    return [n for n, v in own.items() if _is_layer(v) or (_is_monoid(v) and v.__module__ == module.__name__)]


def _is_monoid(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, Monoid)


def _is_layer(thing: Any) -> bool:
    return isinstance(thing, Op | nn.Module) or (
        isinstance(thing, type) and issubclass(thing, Function) and thing is not Function
    )


def _described(thing: Any) -> str:
    kind = type(thing).__name__
    return f"a {kind}" if kind[0] not in "aeiou" else f"an {kind}"
