"""Load what ``FILE.py:NAME`` or ``package.module:NAME`` names, and report errors of the user's code in one message.

The file is run once, as Python runs it. A mistake in the file, the name or the user's code becomes a
:class:`CommandError` that says on which line it happened.
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
    """The object that was named, and the module that it stands in."""

    name: str
    thing: Any
    module: ModuleType
    file: str

    @property
    def is_monoid(self) -> bool:
        return _is_monoid(self.thing)

    @property
    def call(self) -> Callable[..., Any]:
        """The object as a function of its arguments: a ``torch.autograd.Function`` is called through ``apply``."""
        is_function = isinstance(self.thing, type) and issubclass(self.thing, Function)
        return self.thing.apply if is_function else self.thing

    def find_companion(self, name: str | None, suffix: str) -> Callable[..., Any] | None:
        """The function ``name`` of the same file or, without a name, ``NAME_suffix`` if the file has it."""
        found = getattr(self.module, name or f"{self.name}_{suffix}", None)
        if name and not callable(found):
            raise CommandError(f"{self.file} has no function {name}, which --{suffix} names")
        return found if callable(found) else None


def load(spec: str) -> Target:
    """The layer or monoid that ``spec`` names."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name or "/" in name or "\\" in name:
        known = _list_names(_load_module(spec)) if spec.endswith(".py") else []
        raise CommandError(f"{spec} names no layer. {_HINT}" + (f". The file has: {', '.join(known)}" if known else ""))
    module = _load_module(where)
    try:
        thing = getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("__")], n=1)
        advice = f"It has: {', '.join(_list_names(module)) or 'no op and no monoid'}"
        advice = f"Did you mean {near[0]}?" if near else advice
        raise CommandError(f"{where} has no {name}. {advice}") from None
    if not (_is_layer(thing) or _is_monoid(thing) or callable(thing)):
        kind = type(thing).__name__
        raise CommandError(
            f"{spec} is {'an' if kind[0] in 'aeiou' else 'a'} {kind}. Name an op (a function under @mr.op), a monoid "
            "(a subclass of mr.Monoid) or another layer that can be called"
        )
    return Target(name, thing, module, where)


def check_argument_count(function: Callable[..., Any], args: Sequence[Any], option: str) -> None:
    """Raise a CommandError if a user's function cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(function, "__name__", str(function))
        raise CommandError(f"{name}, which {option} names, is called with {len(args)} arguments: {error}") from None


# Errors of the user's code ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def report_user_errors(file: str) -> Iterator[None]:
    """Turn an error raised by the user's own lines into one message with the line; let any other error through."""
    try:
        yield
    except (CommandError, MonoidReduceError, KeyboardInterrupt):
        raise
    except BaseException as error:
        line = _find_line(error, file)
        place = _find_users_line(error) if line is None else f"{file}, line {line}"
        if place is None:
            raise
        raise CommandError(f"{place}: {describe_error(error)}") from None


def describe_error(error: BaseException) -> str:
    """The type of an error and the first line of its message.

    >>> describe_error(KeyError("q")), describe_error(ZeroDivisionError("division by zero"))
    ("KeyError: 'q'", 'ZeroDivisionError: division by zero')
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _find_line(error: BaseException, file: str) -> int | None:
    """The innermost line of this file in the error's traceback."""
    path = Path(file).resolve()
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path]
    return lines[-1] if lines else None


def _find_users_line(error: BaseException) -> str | None:
    """The innermost line of a file that is neither this package's nor installed: one that the target imports."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = [Path(__file__).parents[1], *(Path(p).resolve() for p in folders)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_file() and not any(path.is_relative_to(p) for p in installed):
            return f"{frame.filename}, line {frame.lineno}"
    return None


# Modules ----------------------------------------------------------------------------------------------------------


def _load_module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        return _import_module(where)
    path = Path(where)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError) as error:  # a name that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise CommandError(f"there is no file {where[:80]!r}: {reason}. {_HINT}") from None
    if not is_file:
        raise CommandError(f"the file {where} {'is a folder' if is_folder else 'does not exist'}. {_HINT}")
    spec = importlib.util.spec_from_file_location(f"_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise CommandError(f"{where} cannot be read as Python. {_HINT}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pickle, dataclasses and inspect look it up
    sys.path.insert(0, str(path.parent.resolve()))  # as ``python FILE.py`` does
    try:
        with report_user_errors(where):
            spec.loader.exec_module(module)
    except SyntaxError as error:  # in the file itself, so that none of its lines ran
        if error.lineno is None:  # bytes that are not text
            raise CommandError(f"{where} cannot be read as Python: {error.msg}") from None
        line = (error.text or "").strip()
        raise CommandError(f"{error.filename}, line {error.lineno}: {error.msg}: {line}") from None
    except (OSError, ValueError) as error:  # no permission to read it, or a wrong encoding
        raise CommandError(f"{where} cannot be read: {describe_error(error)}") from None
    except MonoidReduceError as error:
        raise CommandError(f"{where}, line {_find_line(error, where)}: {error}") from None
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(path.parent.resolve()))
    return module


def _import_module(name: str) -> ModuleType:
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
    except (Exception, SystemExit) as error:  # raised by the module's own lines
        place = _find_users_line(error)
        reason = f"{place}: {describe_error(error)}" if place else describe_error(error)
        raise CommandError(f"{name} cannot be imported: {reason}") from None


def _list_names(module: ModuleType) -> list[str]:
    """The ops, layers and monoids that a module defines."""
    public = {n: v for n, v in vars(module).items() if not n.startswith("_")}
    return [n for n, v in public.items() if _is_layer(v) or (_is_monoid(v) and v.__module__ == module.__name__)]


def _is_monoid(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, Monoid)


def _is_layer(thing: Any) -> bool:
    is_function = isinstance(thing, type) and issubclass(thing, Function) and thing is not Function
    return is_function or isinstance(thing, Op | nn.Module)
