"""A mypy plugin: the body of an op is checked, and calling the op gives what its body returns.

For mypy's settings, ``plugins = ["monoidreduce.integrations.mypy_plugin"]``. Without it scripts pass as well, but mypy
takes the letter of ``Row["f"]`` for the name of a type, so ``@mr.op`` tells it to leave the function alone, and calls
give ``Any``.
"""

from __future__ import annotations

from mypy.nodes import (
    Block,
    ClassDef,
    Decorator,
    Expression,
    ForStmt,
    FuncDef,
    IfStmt,
    MemberExpr,
    MypyFile,
    NameExpr,
    Statement,
    TryStmt,
    WithStmt,
)
from mypy.plugin import Plugin
from mypy.types import CallableType, Type, UnboundType, UnionType

_DECLARED = {"Batch", "Col", "Pair", "Row", "Table"}


class DeclarationsPlugin(Plugin):
    """Takes the letters out of the declarations of ops before mypy looks for types of these names: ``Row["f"]`` is then
    a ``Row``, which is a tensor to type checkers."""

    def get_additional_deps(self, file: MypyFile) -> list[tuple[int, str, int]]:
        if file.fullname == "monoidreduce.op":
            _unhide_op(file)
        for statement in file.defs:  # called for every file that was parsed, before names are looked up
            _visit(statement)
        return []


def _unhide_op(file: MypyFile) -> None:
    """Put ``op`` itself in the place of the statement that hides it from mypy."""
    for place, statement in enumerate(file.defs):
        if not isinstance(statement, IfStmt) or statement.else_body is None:
            continue
        asked = statement.expr[0]
        if isinstance(asked, NameExpr) and asked.name == "MYPY":
            file.defs[place : place + 1] = statement.else_body.body
            return


def _visit(statement: Statement) -> None:
    """Drop the letters of every op in a statement, also of those in its blocks."""
    if isinstance(statement, Decorator):
        declared = statement.func.unanalyzed_type
        if any(map(_is_op, statement.original_decorators)) and isinstance(declared, CallableType):
            for argument in declared.arg_types:
                _drop_letters(argument)
        statement = statement.func
    blocks: list[Block | None] = []
    if isinstance(statement, FuncDef):
        blocks = [statement.body]
    elif isinstance(statement, ClassDef):
        blocks = [statement.defs]
    elif isinstance(statement, IfStmt):
        blocks = [*statement.body, statement.else_body]
    elif isinstance(statement, (TryStmt, WithStmt, ForStmt)):
        blocks = [statement.body]
    for block in blocks:
        for inner in block.body if block is not None else ():
            _visit(inner)


def _is_op(decorator: Expression) -> bool:
    return isinstance(decorator, (NameExpr, MemberExpr)) and decorator.name == "op"


def _drop_letters(declared: Type) -> None:
    if isinstance(declared, UnionType):
        for item in declared.items:
            _drop_letters(item)
    elif isinstance(declared, UnboundType) and declared.name.rpartition(".")[2] in _DECLARED:
        declared.args = ()


def plugin(version: str) -> type[Plugin]:
    """What mypy calls to find the plugin."""
    return DeclarationsPlugin
