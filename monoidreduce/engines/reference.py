"""The engine ``reference``: builds every pair, differentiates with autograd, and refuses to grow past a limit.

It runs the program as traced, before any rewriting, so that normal form, passes, symbolic gradients and tiles are all
checked against something that has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ReferenceLimitError
from ..program.declarations import COL_SEQUENCE, ROW_SEQUENCE
from ..program.expression import Expr, topological
from ..program.primitives import PRIMITIVES
from .common.evaluate import Evaluator, Sizes, spread_edges


def run(outputs: tuple[Expr, ...], inputs: Mapping[str, Any], sizes: Sizes, limit: int | None) -> list[Any]:
    """Evaluate the outputs of a traced program densely (in the evaluator's layout)."""
    pairs = torch.Size(sizes.batch).numel() * sizes.rows * sizes.cols
    widths = [sizes.of(str(e.feature)) for e in topological(outputs) if e.is_pair and e.feature is not None]
    widths += [sizes.of(str(e.args[0].feature)) for e in topological(outputs) if e.op == "sqdist"]
    elements = pairs * max([1, *widths])
    if limit is not None and elements > limit:
        raise ReferenceLimitError(elements=elements, limit=limit)
    evaluate: Evaluator = Evaluator(sizes, spread_edges(outputs, inputs, sizes.rows, sizes.cols))
    if (exists := _find_condition(outputs)) is not None:
        evaluate = _ListedEvaluator(sizes, evaluate.inputs, exists=evaluate(exists))
    return [evaluate(e) for e in outputs]


def _find_condition(outputs: tuple[Expr, ...]) -> Expr | None:
    """Which pairs a domain has: a node that lists them, or a row's sequence equal to a column's."""
    sequences = {ROW_SEQUENCE, COL_SEQUENCE}
    for e in topological(outputs):
        if e.op == "listed" or (e.op == "eq" and {a.attrs[0] for a in e.args if a.op == "input"} == sequences):
            return e
    return None


@dataclass
class _ListedEvaluator(Evaluator):
    """Pairs that a domain does not have pass no gradient: a mask alone would pass 0 times what is infinite of them."""

    exists: Any = None

    def _node(self, e: Expr) -> Any:
        value = super()._node(e)
        return self._guard(value, e.feature) if e.is_pair and e.op not in PRIMITIVES and e.op != "result" else value

    def _primitive(self, e: Expr, args: list[Any]) -> Any:
        if e.is_pair:
            args = [a if x.is_pair else self._guard(a, x.feature) for a, x in zip(args, e.args, strict=True)]
        return super()._primitive(e, args)

    def _guard(self, value: Any, feature: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.requires_grad):
            return value
        exists = self.exists if feature is None else self.exists.unsqueeze(-1)
        return torch.where(exists, value, value.detach())
