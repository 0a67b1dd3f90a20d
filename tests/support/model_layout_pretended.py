"""Attention in a model's layout on a GPU that is not there (``benchmarks/pretend.py``): what torch does besides the
launches, and the bytes that a backward allocates, as JSON. Run by ``tests/interpret/test_model_layout.py``."""

import json
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.pretend import h200
from monoidreduce.engines.triton import prepared_folds
from tests.support.model_layout_cases import Model, attend

_VIEWS = ("view", "transpose", "unsqueeze", "squeeze", "detach", "as_strided", "expand", "split", "alias", "slice")


class Watch(TorchDispatchMode):
    """The operators that do more than look at memory, and what they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here, and torch's guard against it would import Dynamo, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0].strip("_")
        if not name.startswith(_VIEWS) and name != "unsafe_view":
            self.names.append(name)
            self.bytes += found.untyped_storage().nbytes() if name.startswith("empty") else 0
        return found


def main() -> None:
    wide = Model(2, 16, 8, 4096, 128)
    for model, engine in ((Model(4, 16, 8, 4096, 16), "triton"), (wide, "triton"), (wide, "auto")):
        shapes = [(model.batch, model.length, n * model.width) for n in (*model.counts, model.heads)]
        *given, y = (torch.zeros(s, dtype=torch.bfloat16).requires_grad_() for s in shapes)
        prepared_folds().clear()
        with h200():
            for _ in range(4):  # the second call is recorded; the third one's backward is written
                with Watch() as forward:
                    layer = attend(engine, causal=True)(*model.split(given))
                    flat = layer.transpose(1, 2).reshape(y.shape)
                with Watch() as backward:
                    found = torch.autograd.grad(flat, given, y.detach())
        assert all(g.is_contiguous() for g in found)
        made = {"strides": layer.stride(), "wanted": model.split(given)[0].stride()}
        made |= {"operators": [*forward.names, *backward.names], "bytes": backward.bytes}
        # rows' sums in float32, where one kernel makes those of rows and columns
        sums = sum(2 * given[0].nbytes for f in prepared_folds().values() for one in f.launches if one.combines)
        print(json.dumps(made | {"gradients": sum(g.nbytes for g in found), "sums": sums}))


if __name__ == "__main__":
    main()
