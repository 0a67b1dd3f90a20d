"""Triton's interpreter, quicker: what it does again at every call is done once, and the numbers stay the same.

Three quarters of its time go into four things. Every call of a device function puts the interpreter's words in place of
the language's anew; every sum and product of whole numbers is computed a second time to see whether it overflowed, for
an assertion that is made in debug mode alone; a table of types is built wherever it is read; and the shapes of tensors
are wrapped and counted again for each tensor. A version of Triton that does these things otherwise is left as it is.
"""

import functools
import inspect
from dataclasses import replace

import pytest
import triton.language as tl
from triton.runtime import interpreter


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Change Triton's interpreter, until the patch is undone."""
    builder = getattr(interpreter, "interpreter_builder", None)
    if hasattr(getattr(builder, "options", None), "sanitize_overflow"):
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=builder.options.debug))
    if hasattr(interpreter, "_get_np_dtype"):
        patch.setattr(interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype))
    if _parameters(tl.block_type) == ["element_ty", "shape"] and _parameters(tl.tensor) == ["handle", "type"]:
        _count_shapes_once(patch)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor"):
        _translate_once_a_launch(patch)


def _by_name(look_up):
    """A function of a type, remembered by the type's name (types of blocks have no hash)."""
    known = {}

    @functools.wraps(look_up)
    def found(kind):
        if kind.name not in known:
            known[kind.name] = look_up(kind)
        return known[kind.name]

    return found


def _parameters(kind):
    return list(inspect.signature(kind).parameters)


def _count_shapes_once(patch: pytest.MonkeyPatch) -> None:
    """Types and tensors whose like was made before get its attributes, but for what they are given."""
    new_type, new_tensor, types, tensors = tl.block_type.__init__, tl.tensor.__init__, {}, {}

    @functools.wraps(new_type)
    def block_type(self, element_ty, shape):
        like = (element_ty.name, *map(int, shape))
        if like in types:
            vars(self).update(types[like], element_ty=element_ty)
        else:
            new_type(self, element_ty, shape)
            types[like] = dict(vars(self))

    @functools.wraps(new_tensor)
    def tensor(self, handle, type):
        if type.name in tensors:
            vars(self).update(tensors[type.name], handle=handle, type=type)
        else:
            new_tensor(self, handle, type)
            tensors[type.name] = {name: value for name, value in vars(self).items() if name != "handle"}

    patch.setattr(tl.block_type, "__init__", block_type)
    patch.setattr(tl.tensor, "__init__", tensor)


def _translate_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    """Device functions of one module find the language as the first of them left it, until the launch ends."""
    translate, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()  # the namespaces of modules in which the language is now the interpreter's

    @functools.wraps(translate)
    def once(fn):
        if id(fn.__globals__) in done:
            return None  # only the kernel's own, the first of a launch, is restored
        done.add(id(fn.__globals__))
        return translate(fn)

    @functools.wraps(launch)
    def launched(self, *args, **kwargs):
        done.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            done.clear()

    patch.setattr(interpreter, "_patch_lang", once)
    patch.setattr(interpreter.GridExecutor, "__call__", launched)
