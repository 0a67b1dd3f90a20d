"""What a kernel computes, told by its Python source with all names of its own taken out."""

import ast
import functools
import hashlib
import inspect
import textwrap
import types
from typing import Any

import torch

SOURCES: dict[str, str] = {}  # of every kernel that was named, and of those that it calls


@functools.cache
def source_of(function: types.FunctionType) -> str:
    """The normalised source of a kernel: its local names are counted, the kernels that it calls are named by the hash
    of theirs, other globals are replaced by their values; comments, annotations and docstrings are gone."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (definition,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    definition = _Renamed(function, definition).visit(definition)
    return ast.unparse(ast.fix_missing_locations(definition))


def identity(function: types.FunctionType) -> str:
    """A short hash of the normalised source."""
    source = source_of(function)
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    SOURCES[name] = source
    return name


def python_function(value: Any) -> types.FunctionType | None:
    """The Python function of a kernel, or of a function that kernels call; None for anything else."""
    inner = getattr(value, "fn", None)
    while inner is not None and not isinstance(inner, types.FunctionType):
        inner = getattr(inner, "fn", None)
    return inner


def described(value: Any) -> Any:
    """A launch's argument: a tensor by type, shape and strides, a number by its value."""
    function = python_function(value)
    if function is not None:
        return f"kernel {identity(function)}"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}/{list(value.stride())}"
    if hasattr(value, "block_shape"):
        shape = f"{list(map(int, value.shape))}/{list(map(int, value.strides))}"
        return f"descriptor of {described(value.base)} as {shape} by {list(value.block_shape)}"
    if isinstance(value, list | tuple):
        return [described(v) for v in value]
    return str(value) if value is None or isinstance(value, bool | int | float | str) else _outer(value)


class _Renamed(ast.NodeTransformer):
    def __init__(self, function: types.FunctionType, definition: ast.FunctionDef):
        self.globals = function.__globals__
        arguments = definition.args
        own = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        stored = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        self.local = {a.arg for a in own} | stored
        self.names: dict[str, str] = {}

    def _name(self, name: str) -> str:
        return self.names.setdefault(name, f"v{len(self.names)}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.decorator_list, node.returns = "kernel", [], None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        constant = node.annotation is not None and "constexpr" in ast.unparse(node.annotation)
        return ast.arg(self._name(node.arg), ast.Name("constexpr") if constant else None)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.local:
            return ast.Name(self._name(node.id), node.ctx)
        if node.id in self.globals:
            return ast.Name(_outer(self.globals[node.id]), node.ctx)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        annotation = node.annotation  # tl.constexpr: of the language
        node = self.generic_visit(node)
        node.annotation = annotation
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = self.globals.get(node.func.id) if isinstance(node.func, ast.Name) else None
        function = python_function(called)
        if function is not None:
            places = {name: f"argument{k}" for k, name in enumerate(inspect.signature(function).parameters)}
            for keyword in node.keywords:
                keyword.arg = places.get(keyword.arg or "", keyword.arg)
        return self.generic_visit(node)


def _outer(value: Any) -> str:
    """A global of a kernel's module."""
    function = python_function(value)
    if function is not None:
        return f"kernel_{identity(function)}"
    if isinstance(value, types.ModuleType):
        return value.__name__.replace(".", "_")
    value = getattr(value, "value", value)  # a constexpr
    if isinstance(value, bool | int | float | str | type(None)):
        return repr(value)
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}".replace(".", "_")
    return str(value)
