"""Kernels made wrong on purpose, by a change to their text: what a tuner must never choose."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from monoidreduce.engines.triton import KernelPlan
from tests.support import internals

CHANGES: dict[str, Callable[[str], str]] = {
    "forgets the ragged end": lambda text: text.replace("tl.cdiv(folded_size, FOLDED)", "(folded_size // FOLDED)"),
    "leaves a row out": lambda text: text.replace("kept_in = kept_at < kept_size", "kept_in = kept_at < kept_size - 1"),
    "writes no vectors": lambda text: "\n".join(
        line for line in text.split("\n") if not line.lstrip().startswith("tl.store(out1")
    ),
    "keeps old weights": lambda text: text.replace("soft0_mean0 *= soft0_shrink[:, None]", "pass"),
    "begins with what is there": lambda text: text.replace(
        "soft0_total = tl.zeros([KEPT], tl.float32)",
        "soft0_total = tl.load(out0 + kept_lane, mask=kept_in, other=0.0).to(tl.float32) * 0.0",
    ),
}

# also where a guess stands in for the maximum, as in kernels of bfloat16: there nothing is weighed anew in whole tiles
GUESSED = ("forgets the ragged end", "writes no vectors", "leaves a row out")


@contextlib.contextmanager
def wrong(plan: KernelPlan, change: str) -> Iterator[list[str]]:
    """Inside the block, kernels with this plan's tile are wrong; the list counts how often one was launched.

    Launches that were made before are not met inside, nor wrong ones after it."""
    made: list[str] = []

    def execute(launch, call):
        if (call.plan.block_kept, call.plan.block_folded) == (plan.block_kept, plan.block_folded):
            text = CHANGES[change](call.kernel.text)
            assert text != call.kernel.text, f"nothing to change: {change}"
            made.append(text)
            call = replace(call, kernel=replace(call.kernel, text=text))
        return launch(call)

    with pytest.MonkeyPatch.context() as patch:
        internals.replace_launch(patch, execute)
        internals.forget_launches(patch)
        yield made
