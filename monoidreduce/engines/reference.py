"""The engine ``reference``: builds every pair, differentiates with autograd, and refuses to grow past a limit.

It runs the program as traced, before any rewriting, so that normal form, passes, symbolic gradients and tiles are all
checked against something that has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ReferenceLimitError
from ..program.expression import Expr, topological
from .common.evaluate import Evaluator, Sizes, spread_edges


def run(outputs: tuple[Expr, ...], inputs: Mapping[str, Any], sizes: Sizes, limit: int | None) -> list[Any]:
    """Evaluate the outputs of a traced program densely (in the evaluator's layout)."""
    pairs = torch.Size(sizes.batch).numel() * sizes.rows * sizes.cols
    widths = [sizes.of(str(e.feature)) for e in topological(outputs) if e.is_pair and e.feature is not None]
    widths += [sizes.of(str(e.args[0].feature)) for e in topological(outputs) if e.op == "sqdist"]
    elements = pairs * max([1, *widths])
    if limit is not None and elements > limit:
        raise ReferenceLimitError(elements=elements, limit=limit)
    evaluate = Evaluator(sizes, spread_edges(outputs, inputs, sizes.rows, sizes.cols))
    return [evaluate(e) for e in outputs]
