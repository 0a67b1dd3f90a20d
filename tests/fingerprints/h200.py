"""What calls compile and launch on an H200 that is not there: the paths, plans and kernels of that GPU.

Nothing is computed. Unlike the compile tests this sees every kernel of a call, also those that no program writes, and
what a replayed call launches. Sizes are those of a GPU where that changes the path: a head of a vocabulary, attention
of many pairs.
"""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from monoidreduce import ops

from . import hooks
from .calls import Call, run_call
from .identity import described
from .ptx import prepare, text_of, without_assembler

TIMES = ("cold", "warm", "third")


def _zeros(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Callable[[], tuple]:
    return lambda: tuple(torch.zeros(s, dtype=dtype).requires_grad_() for s in shapes)


def _labelled(rows: int, classes: int, d: int) -> Callable[[], tuple]:
    return lambda: (*_zeros((rows, d), (classes, d))(), torch.arange(rows) % classes)


def _attention(**options: Any) -> Callable:
    return lambda q, k, v: ops.attention(q, k, v, **options)


_QKV64, _QKV128 = ((1, 4, 1024, 64),) * 3, ((1, 4, 1024, 128),) * 3
CALLS: dict[str, Call] = {
    "attention 64": (ops.attention, _zeros(*_QKV64)),
    "attention 128": (ops.attention, _zeros(*_QKV128)),
    "causal attention 128": (_attention(causal=True), _zeros(*_QKV128)),
    "soft cap attention 128": (_attention(softcap=30.0), _zeros(*_QKV128)),
    "dropout attention 64": (_attention(dropout_p=0.1, seed=3), _zeros(*_QKV64)),
    "alibi attention 128": (
        lambda q, k, v: ops.attention(q, k, v, causal=True, alibi_slopes=torch.ones(4)),
        _zeros(*_QKV128),
    ),
    "grouped attention 128": (
        _attention(enable_gqa=True, causal=True),
        _zeros((1, 4, 1024, 128), (1, 2, 1024, 128), (1, 2, 1024, 128)),
    ),
    "decoding": (
        lambda q, k, v: ops.attention_decode(q, k, v, torch.tensor([900, 300])),
        lambda: tuple(t.detach() for t in _zeros((2, 4, 1, 128), (2, 4, 1024, 128), (2, 4, 1024, 128))()),
    ),
    "cross-entropy head": (ops.linear_cross_entropy, _labelled(1024, 32000, 1024)),
    "cross-entropy head, soft cap": (
        lambda x, w, t: ops.linear_cross_entropy(x, w, t, softcap=30.0),
        _labelled(1024, 32000, 1024),
    ),
    "cross-entropy 128": (ops.linear_cross_entropy, _labelled(1024, 4096, 128)),
    "log-probabilities": (ops.linear_logprobs, _labelled(1024, 32000, 1024)),
    "distillation": (ops.linear_kl, _zeros((512, 768), (32000, 768), (512, 1024), (32000, 1024))),
    "mlp 128": (ops.mlp, _zeros((1024, 128), (1024, 128), (1024, 128))),
    "gated mlp 128": (ops.gated_mlp, _zeros((1024, 128), (1024, 128), (1024, 128), (1024, 128))),
    "wide mlp": (ops.mlp, _zeros((1024, 1024), (4096, 1024), (4096, 1024))),
    "kernel sum": (ops.kernel_sum, _zeros((4096, 3), (4096, 3), (4096, 1), dtype=torch.float32)),
    "kernel sum 64": (ops.kernel_sum, _zeros((4096, 64), (4096, 64), (4096, 1), dtype=torch.float32)),
    "neighbours": (lambda x, y: ops.knn(x, y, 8), _zeros((1024, 64), (8192, 64), dtype=torch.float32)),
    "sampling": (lambda x, w: ops.linear_sample(x, w, 7), _zeros((256, 2304), (32000, 2304))),
    "top k": (lambda x, w: ops.linear_topk(x, w, 32), _zeros((256, 1024), (32000, 1024))),
    "contrastive": (lambda x, y: ops.contrastive_loss(x, y, temperature=0.1), _zeros((2048, 768), (2048, 768))),
}


def jobs() -> Iterator[tuple[str, Callable[[], dict[str, str]]]]:
    """A job for each of the calls."""
    prepare()
    for name, call in CALLS.items():
        yield name, lambda name=name, call=call: _texts(name, call)


class _Compiled:
    """A kernel that was compiled as far as PTX: named by the order in which kernels were met."""

    packed_metadata = function = None
    metadata = SimpleNamespace(shared=0)

    def __init__(self, name: str, record: Callable[..., None]):
        self.name, self.record = name, record

    @property
    def run(self) -> Callable[..., None]:
        """Called by Triton: grid, stream and what it is launched with."""
        return lambda x, y, z, stream, function, packed, metadata, enter, leave, *given: self.record(
            self.name, (x, y, z), given
        )

    def launch_metadata(self, *given: Any) -> None:
        return None


def _given(value: Any) -> str:
    """An argument: where it may be an address, only that it is one."""
    address = isinstance(value, int) and not isinstance(value, bool) and value >= 2**40
    return "address" if address else str(described(value))


def _texts(name: str, call: Call) -> dict[str, str]:
    from triton.compiler import compile as real

    texts: dict[str, str] = {}
    lines: list[str] = []
    names: dict[str, str] = {}

    def record(kernel: str, grid: Sequence[int], given: Sequence[Any]) -> None:
        lines.append(f"{kernel} grid {tuple(grid)} " + " | ".join(map(_given, given)))

    def compile(src: Any, target: Any = None, options: Any = None, **named: Any) -> _Compiled:
        text = text_of(real(src, target=target, options=options, **named))
        kernel = names.setdefault(text, f"kernel {len(names)}")
        texts[f"h200/{name}/{kernel}"] = text
        lines.append(f"compiles {kernel}")
        return _Compiled(kernel, record)

    def again(compiled: Any, grid: tuple[int, ...], constants: Any, device: Any) -> Callable[..., None] | None:
        if compiled is None:
            return None
        return lambda *given: record(f"{compiled.name} again", grid, given)

    with without_assembler(), hooks.absent_h200(compile, again):
        for time in TIMES:
            lines.clear()
            run_call(call, lambda phase: lines.append(f"{phase}:"))
            texts[f"h200/{name}/{time}"] = "\n".join(lines) + "\n"
    return texts
