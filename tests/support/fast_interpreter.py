"""Triton's interpreter, quicker: what it does again at every call is done once, and the numbers stay the same.

Most of its time goes into a few things. Every call of a device function puts the interpreter's words in place of the
language's anew; every sum and product of whole numbers is computed a second time to see whether it overflowed, for an
assertion that is made in debug mode alone; a table of types is built wherever it is read; the shapes of tensors are
wrapped and counted again for each tensor; every operation derives the type and shape of its result from those of
its operands, however often it met their like; bfloat16 is taken apart into signs, exponents and significands. A version
of Triton that does these things otherwise is left as it is.
"""

import ast
import functools
import inspect
import linecache
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
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
    if hasattr(interpreter, "_convert_float"):
        patch.setattr(interpreter, "_convert_float", _by_shifts(interpreter._convert_float))
    if _parameters(tl.block_type) == ["element_ty", "shape"] and _parameters(tl.tensor) == ["handle", "type"]:
        _count_shapes_once(patch)
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "interpreter_semantic"):
        _type_operations_once(patch, builder)
    if hasattr(getattr(interpreter, "FunctionRewriter", None), "ast_transformer"):
        _translate_a_text_once(patch)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor"):
        _translate_once_a_launch(patch)
    if {"generic_reduce", "unravel", "to_tensor"} <= set(dir(getattr(interpreter, "ReduceOps", None))):
        _reduce_in_pairs(patch)


def _by_name(look_up):
    """A function of a type, remembered by the type's name (types of blocks have no hash)."""
    known = {}

    @functools.wraps(look_up)
    def found(kind):
        if kind.name not in known:
            known[kind.name] = look_up(kind)
        return known[kind.name]

    return found


def _by_shifts(convert):
    """A conversion of floats; float32 and bfloat16, which are cut off or filled up, have their bits shifted. Denormal
    numbers, of which the interpreter has a view of its own, do not."""

    @functools.wraps(convert)
    def converted(given, source, target, rounding):
        names = (source.name, target.name)
        if rounding is None and names in (("fp32", "bf16"), ("bf16", "fp32")):
            down = names[0] == "fp32"
            bits = np.ascontiguousarray(given).view(np.uint32 if down else np.uint16)
            size = bits & (0x7FFFFFFF if down else 0x7FFF)
            if not np.any((size < (0x800000 if down else 0x80)) & (size != 0)):
                return (bits >> 16).astype(np.uint16) if down else bits.astype(np.uint32) << 16
        return convert(given, source, target, rounding)

    return converted


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


def _reduce_in_pairs(patch: pytest.MonkeyPatch) -> None:
    """A function of two elements combines neighbours, all pairs at once, then their results, as on a GPU; not one
    element of one row after the other. It is associative, or would be wrong there."""
    ordinary = interpreter.ReduceOps.generic_reduce

    @functools.wraps(ordinary)
    def generic_reduce(self, input):
        given, axis = self.unravel(input, self.axis)
        arrays = [np.moveaxis(t.handle.data, axis, 0) for t in given]
        if len(arrays[0]) & (len(arrays[0]) - 1) or (self.axis is None and len(given) > 1):
            return ordinary(self, input)
        while len(arrays[0]) > 1:
            halves = [self.to_tensor(x[k::2], t.dtype) for k in (0, 1) for x, t in zip(arrays, given, strict=True)]
            made = self.combine_fn.fn(*halves)
            made = made if isinstance(made, tuple) else (made,)
            arrays = [m.handle.data.astype(x.dtype) for m, x in zip(made, arrays, strict=True)]
        results = [x[0] for x in arrays]
        if self.keep_dims:
            whole = (1,) * input[0].handle.data.ndim
            results = [x.reshape(whole) if self.axis is None else np.expand_dims(x, axis) for x in results]
        return [self.to_tensor(x, t.dtype) for x, t in zip(results, given, strict=True)]

    patch.setattr(interpreter.ReduceOps, "generic_reduce", generic_reduce)


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

    words: dict[Any, list[str]] = {}  # the built-in ones of each package and class

    def patch_builtin(pkg, builder, scope):
        if pkg not in words:
            words[pkg] = [name for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]
        for name in words[pkg]:
            if tl.core.is_builtin(member := getattr(pkg, name)):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    if hasattr(interpreter, "_LangPatchScope"):
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
    patch.setattr(interpreter, "_patch_lang", once)
    patch.setattr(interpreter.GridExecutor, "__call__", launched)


def _translate_a_text_once(patch: pytest.MonkeyPatch) -> None:
    """Functions of one text, which kernels copy from each other, are translated once; none is read by its tokens."""
    rewriter, known = interpreter.FunctionRewriter, {}
    ordinary = rewriter.rewrite_ast

    @functools.wraps(ordinary)
    def rewrite_ast(self):
        found = self.fn.__code__
        linecache.checkcache(found.co_filename)
        lines = linecache.getlines(found.co_filename)[found.co_firstlineno - 1 :]
        start = next((k for k, line in enumerate(lines) if line.startswith("def ")), None)
        if start is None or any(line[:1] not in "@# \n" for line in lines[:start]):
            return ordinary(self)
        ends = (k for k in range(start + 1, len(lines)) if lines[k][:1] not in " )]}#\n")
        text = "".join(lines[start : next(ends, None)])
        self.filename, self.def_file_lineno = found.co_filename, found.co_firstlineno + start
        try:
            if text not in known:
                tree = self.ast_transformer.visit(ast.parse("\n" * (self.def_file_lineno - 1) + text))
                known[text] = ast.fix_missing_locations(tree)
            return self._compile_and_exec(known[text])
        except (SyntaxError, KeyError):
            return ordinary(self)

    patch.setattr(rewriter, "rewrite_ast", rewrite_ast)


# Operations of two tensors, or of a tensor and a number, by the types that they have met before.

_NUMBERS = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "int32": np.int32, "int64": np.int64}
_NUMBERS |= {"uint32": np.uint32, "uint64": np.uint64, "int1": np.bool_}
_FLOATS, _WIDE, _INTEGERS = ("fp16", "fp32", "fp64"), ("fp32", "fp64"), ("int32", "int64", "uint32", "uint64")
_ALL, _BITS = (*_FLOATS, *_INTEGERS), ("int1", *_INTEGERS)
_OPERATIONS: dict[str, tuple[Callable, tuple[str, ...]]] = {  # the function, and the types it is quick for
    "add": (np.add, _ALL), "sub": (np.subtract, _ALL), "mul": (np.multiply, _ALL), "truediv": (np.divide, _WIDE),
    "lt": (np.less, _ALL), "le": (np.less_equal, _ALL), "gt": (np.greater, _ALL), "ge": (np.greater_equal, _ALL),
    "eq": (np.equal, _ALL), "ne": (np.not_equal, _ALL), "and": (np.bitwise_and, _BITS), "or": (np.bitwise_or, _BITS),
}  # fmt: skip
_COMPARES, _JOINS = {"lt", "le", "gt", "ge", "eq", "ne"}, {"and", "or"}


@dataclass(frozen=True)
class _Typed:
    """What an operation makes of two types: the array that a number becomes, the result's type and shape."""

    number: Any  # NumPy's type of the operands; of a pointer, the width of what it points to
    element: Any  # Triton's type of the operands
    result: Any
    shape: tuple[int, ...] | None  # None: a scalar
    signed: bool
    pointer: bool = False
    widened: bool = False  # one operand is int32, the other int64


def _type_operations_once(patch: pytest.MonkeyPatch, builder: Any) -> None:
    """Operators of tensors look up what they once derived."""
    put = interpreter._patch_attr
    known: dict[str, dict[tuple, _Typed | None]] = defaultdict(dict)

    @functools.wraps(put)
    def patch_attr(obj, name, member, builder, scope):
        put(obj, name, member, builder, scope)
        word = name.strip("_")
        reflected = word not in _OPERATIONS and word[1:] in _OPERATIONS and word[0] == "r"
        word = word[1:] if reflected else word
        if obj is tl.tensor and word in _OPERATIONS and name.startswith("__"):
            scope.set_attr(obj, name, _quick(getattr(obj, name), word, reflected, known[name]))

    if not builder.options.sanitize_overflow:
        patch.setattr(interpreter, "_patch_attr", patch_attr)
    broadcast, alike = interpreter.interpreter_semantic.broadcast_impl_value, {}

    @functools.wraps(broadcast)
    def broadcast_impl_value(lhs, rhs):
        key = lhs.type.name, rhs.type.name
        if key not in alike:
            alike[key] = len({tuple(map(int, t.shape)) if t.is_block() else None for t in (lhs.type, rhs.type)}) == 1
        return (lhs, rhs) if alike[key] else broadcast(lhs, rhs)

    patch.setattr(interpreter.interpreter_semantic, "broadcast_impl_value", broadcast_impl_value)


def _quick(ordinary: Callable, word: str, reflected: bool, known: dict) -> Callable:
    operation, _ = _OPERATIONS[word]
    new_handle, tensor, constexpr = interpreter.TensorHandle, tl.tensor, tl.constexpr

    def operator(self, other, **given):
        mine = self.handle
        if both := isinstance(other, tensor):
            key = (self.type.name, other.type.name)
        else:
            number = other.value if isinstance(other, constexpr) else other
            key = (self.type.name, type(number))
        try:
            typed = known[key]
        except KeyError:
            typed = known[key] = _derive(word, reflected, self.type, other.type if both else type(number))
        if typed is None:
            return ordinary(self, other, **given)
        if both:
            theirs, of_theirs = other.handle.data, other.handle.dtype
        elif type(number) is int and not (-(2**31) if typed.signed else 0) <= number < 2**31:
            return ordinary(self, other, **given)
        else:
            theirs, of_theirs = np.array([number], np.int32 if typed.pointer else typed.number), typed.element
        if typed.pointer:
            data, kind = mine.data + typed.number * theirs.astype(np.uint64), mine.dtype
        elif typed.widened:
            two = (theirs, mine.data) if reflected else (mine.data, theirs)
            data, kind = operation(*(x.astype(np.int64) for x in two)), typed.element
        elif mine.data.dtype != typed.number or theirs.dtype != typed.number:
            return ordinary(self, other, **given)
        elif reflected:
            data, kind = operation(theirs, mine.data), of_theirs.scalar
        else:
            data, kind = operation(mine.data, theirs), mine.dtype.scalar
        if typed.shape is not None and data.shape != typed.shape:
            return ordinary(self, other, **given)
        return tensor(new_handle(data, kind), typed.result)

    return operator


def _derive(word: str, reflected: bool, mine: Any, theirs: Any) -> _Typed | None:
    """What an operation makes of a tensor's type and of another's, or of a kind of number; None where Triton says."""
    element, kinds = mine.scalar, _OPERATIONS[word][1]
    blocks = [tuple(map(int, t.shape)) for t in (mine, theirs) if not isinstance(t, type) and t.is_block()]
    try:
        shape = np.broadcast_shapes(*blocks) if blocks else None
    except ValueError:
        return None
    if element.is_ptr():
        offset = theirs is int or (not isinstance(theirs, type) and theirs.scalar.name in ("int32", "int64"))
        if word != "add" or reflected or not offset:
            return None
        width = max(1, element.element_ty.primitive_bitwidth // 8)
        result = element if shape is None else tl.block_type(element, list(shape))
        return _Typed(width, element, result, shape, signed=True, pointer=True)
    widened = not isinstance(theirs, type) and {element.name, theirs.scalar.name} == {"int32", "int64"}
    if element.name not in kinds or (widened and word in _JOINS):
        return None
    if widened:
        element = tl.int64
    elif isinstance(theirs, type):
        fits = theirs is int or (theirs is float and element.name in _FLOATS)
        if not fits or word in _JOINS:
            return None
    elif theirs.scalar.name != element.name:
        return None
    made = tl.int1 if word in _COMPARES else element
    result = made if shape is None else tl.block_type(made, list(shape))
    number = np.dtype(_NUMBERS[element.name])
    return _Typed(number, element, result, shape, not element.name.startswith("u"), widened=widened)
