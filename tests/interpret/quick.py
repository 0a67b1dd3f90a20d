"""Triton's interpreter, quicker: what it does again at every call is done once, and the numbers stay the same.

Near half of its time goes into three things. Every call of a device function puts the interpreter's words in place of
the language's anew; every sum and product of whole numbers is computed a second time to see whether it overflowed, for
an assertion that is made in debug mode alone; and a table of types is built wherever it is read. A version of Triton
that does these things otherwise is left as it is.
"""

import functools
from dataclasses import replace

from triton.runtime import interpreter


def quicken() -> None:
    """Change Triton's interpreter, for the rest of the process."""
    builder = getattr(interpreter, "interpreter_builder", None)
    if hasattr(getattr(builder, "options", None), "sanitize_overflow"):
        builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor"):
        _patch_once_a_launch()


def _by_name(look_up):
    """A function of a type, remembered by the type's name (types of blocks have no hash)."""
    known = {}

    @functools.wraps(look_up)
    def found(kind):
        if kind.name not in known:
            known[kind.name] = look_up(kind)
        return known[kind.name]

    return found


def _patch_once_a_launch() -> None:
    """Device functions of one module find the language as the first of them left it, until the launch ends."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()  # the namespaces of modules in which the language is now the interpreter's

    @functools.wraps(patch)
    def once(fn):
        if id(fn.__globals__) in done:
            return None  # only the kernel's own, the first of a launch, is restored
        done.add(id(fn.__globals__))
        return patch(fn)

    @functools.wraps(launch)
    def launched(self, *args, **kwargs):
        done.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            done.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched
