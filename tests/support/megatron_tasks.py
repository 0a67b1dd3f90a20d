"""Megatron-core's vocabulary-parallel cross-entropy beside ours, on ranks of which some are tensor-parallel."""

import contextlib
import types
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.language_module import language_module
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch import Tensor

import monoidreduce as mr
from monoidreduce.integrations.megatron import (
    fuse_loss,
    linear_vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy,
)

SEQUENCE, BATCH, HIDDEN, VOCABULARY, PADDED = 8, 3, 5, 22, 24


def _numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(6)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=gen, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=gen, dtype=torch.float64)
    target = torch.randint(0, VOCABULARY, (SEQUENCE, BATCH), generator=gen)
    mask = (torch.rand(SEQUENCE, BATCH, generator=gen) > 0.3).double()
    return hidden.to(dtype), weight.to(dtype), target, mask.float()


def _masked(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum() / mask.sum()


def _theirs(hidden: Tensor, weight: Tensor, target: Tensor, mask: Tensor, smoothing: float) -> tuple[Tensor, ...]:
    """Megatron's output layer and loss, with gradients. (Its gathering of a sequence asks for a GPU.)"""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    rows = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    logits = rows @ weight.T
    logits.retain_grad()
    loss = tensor_parallel.vocab_parallel_cross_entropy(logits * 1, target, smoothing)  # it changes what it is given
    _masked(loss, mask).backward()
    return loss.detach(), hidden.grad, weight.grad, logits.detach(), logits.grad


def _near(name: str, pairs: list[tuple[Tensor, Tensor]], wide: float) -> str:
    for k, (a, b) in enumerate(pairs):
        if a.shape != b.shape or a.dtype != b.dtype or not torch.allclose(a, b, rtol=wide, atol=wide):
            return f"{name} {k}: {a.shape} {a.dtype} {b.shape} {b.dtype} {(a - b).abs().max()}"
    return "same"


def beside_megatron(group: Any, ranks: int) -> dict[str, str]:
    """Values and gradients of our two functions and of Megatron's own, with so many tensor-parallel ranks."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    try:
        return {str(dtype): _compare(dtype) for dtype in (torch.float32, torch.bfloat16)} | {"faults": _fault()}
    finally:
        parallel_state.destroy_model_parallel()


def _compare(dtype: torch.dtype) -> str:
    hidden, weight, target, mask = _numbers(dtype)
    ranks, rank = (f() for f in (_ranks, parallel_state.get_tensor_model_parallel_rank))
    shard, part = weight.chunk(ranks)[rank], hidden.chunk(ranks)[rank]
    wide = 1e-5 if dtype is torch.float32 else 2e-2  # Megatron's logits are rounded to 16 bits
    for smoothing in (0.0, 0.1) if ranks == 1 else (0.0,):  # on several, theirs differs between the ranks
        loss, dx, dw, logits, dlogits = _theirs(hidden, shard, target, mask, smoothing)
        ours = logits.clone().requires_grad_()
        found = vocab_parallel_cross_entropy(ours, target, smoothing)
        _masked(found, mask).backward()
        answers = [_near("logits", [(found, loss), (ours.grad, dlogits)], 1e-5 if wide < 1e-3 else 1e-2)]
        for sequence_parallel in (False, True):
            mine, own = (part if sequence_parallel else hidden).clone().requires_grad_(), shard.clone().requires_grad_()
            found = linear_vocab_parallel_cross_entropy(
                mine, own, target, smoothing, sequence_parallel=sequence_parallel
            )
            _masked(found, mask).backward()
            expected = dx.chunk(ranks)[rank] if sequence_parallel else dx
            answers.append(
                _near(f"hidden {sequence_parallel}", [(found, loss), (mine.grad, expected), (own.grad, dw)], wide)
            )
        for answer in answers:
            if answer != "same":
                return answer
    return "same" if dtype is not torch.float32 else _smoothed(hidden, weight, target, mask, ranks, rank)


def _ranks() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


def _smoothed(hidden: Tensor, weight: Tensor, target: Tensor, mask: Tensor, ranks: int, rank: int) -> str:
    """Smoothing and a padded vocabulary, on any number of ranks: Megatron's definition on the whole vocabulary, and
    tokens that are ignored by their label."""
    smoothing = 0.1 * VOCABULARY / (VOCABULARY - 1)
    target = torch.where(mask > 0, target, -100)
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        (x @ w[:VOCABULARY].T).flatten(0, 1), target.flatten(), label_smoothing=smoothing
    )
    expected.backward()
    for sequence_parallel in (False, True):
        mine = (hidden.chunk(ranks)[rank] if sequence_parallel else hidden).clone().requires_grad_()
        own = weight.chunk(ranks)[rank].clone().requires_grad_()
        options = dict(sequence_parallel=sequence_parallel, vocab_size=VOCABULARY)
        found = _masked(linear_vocab_parallel_cross_entropy(mine, own, target, 0.1, **options), mask)
        found.backward()
        dx = x.grad.chunk(ranks)[rank] if sequence_parallel else x.grad
        answer = _near("smoothed", [(found, expected), (mine.grad, dx), (own.grad, w.grad.chunk(ranks)[rank])], 1e-5)
        if answer != "same":
            return answer
    return "same"


def _fault() -> str:
    """A wrong shape on one rank is an error on all of them, and the group still works."""
    hidden, weight, target, _ = _numbers(torch.float32)
    ranks, rank = _ranks(), parallel_state.get_tensor_model_parallel_rank()
    own, last = weight.chunk(ranks)[rank], rank == ranks - 1
    try:
        linear_vocab_parallel_cross_entropy(hidden[:-1] if last else hidden, own, target)
    except mr.MonoidReduceError as error:
        kind = type(error).__name__
        if kind != ("ShapeError" if last else "ShardError"):
            return f"{kind}: {error}"
    else:
        return "no error"
    return "same" if linear_vocab_parallel_cross_entropy(hidden, own, target).isfinite().all() else "not finite"


def gpt_models(group: Any, ranks: int) -> dict[str, str]:
    """Losses and gradients of Megatron's GPTModel, with its own loss, with ours of its logits, and fused."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    try:
        nowhere = types.SimpleNamespace(fork=contextlib.nullcontext)
        with (  # its attention allocates on a GPU, and draws from a GPU's generator
            mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
            mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", lambda: nowhere),
        ):
            return {
                f"tied {tied}, padded {vocabulary}": _gpt_model(tied, vocabulary)
                for tied, vocabulary in ((False, PADDED), (True, PADDED), (False, VOCABULARY))
            } | {"refused": _refused()}
    finally:
        parallel_state.destroy_model_parallel()


def _make_gpt(tied: bool, **options: Any) -> GPTModel:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, tensor_model_parallel_size=_ranks(), **options,
    )  # fmt: skip
    torch.manual_seed(3)
    return GPTModel(config, get_gpt_layer_local_spec(), PADDED, SEQUENCE, share_embeddings_and_output_weights=tied)


def _step(model: GPTModel, labels: Tensor, mask: Tensor) -> list[Tensor]:
    places = torch.arange(SEQUENCE).expand(BATCH, -1)
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    loss = model(labels.roll(1, 1), places, hidden, labels=labels)
    _masked(loss, mask).backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def _gpt_model(tied: bool, vocabulary: int) -> str:
    _, _, target, mask = _numbers(torch.float32)
    labels, mask = target.T.contiguous(), mask.T.contiguous()
    plain, fused = _make_gpt(tied), fuse_loss(_make_gpt(tied), vocab_size=vocabulary)
    if vocabulary != PADDED:  # Megatron counts padding as classes: its own model can leave them out by a bias alone
        expected = _step(_without_padding(plain), labels, mask)
    else:
        expected = _step(plain, labels, mask)
    answers = {"fused": _step(fused, labels, mask)}
    if vocabulary == PADDED:
        ours = types.SimpleNamespace(vocab_parallel_cross_entropy=vocab_parallel_cross_entropy)
        with mock.patch.object(language_module, "tensor_parallel", ours):
            answers["logits"] = _step(_make_gpt(tied), labels, mask)
    for name, found in answers.items():
        answer = _near(name, list(zip(found, expected, strict=True)), 1e-5)
        if answer != "same":
            return answer
    places, hidden = torch.arange(SEQUENCE).expand(BATCH, -1), torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    logits = [model(labels, places, hidden) for model in (fused, _make_gpt(tied))]
    return _near("logits without labels", [tuple(logits)], 1e-5)


def _without_padding(model: GPTModel) -> GPTModel:
    """The logits of classes that are padding, minus infinity."""
    first = parallel_state.get_tensor_model_parallel_rank() * PADDED // _ranks()
    padding = torch.arange(first, first + PADDED // _ranks()) >= VOCABULARY
    own = model.output_layer.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return own(*args, **kwargs)[0].masked_fill(padding, -1e30), None

    model.output_layer.forward = forward
    return model


def _refused() -> str:
    gathering = _make_gpt(False)
    gathering.output_layer.gather_output = True
    for model, words in ((torch.nn.Linear(3, 4), "given Linear"), (gathering, "of GPTModel gathers")):
        try:
            fuse_loss(model)
        except mr.ArgumentError as error:
            if words not in str(error):
                return str(error)
        else:
            return f"{words}: no error"
    return "same"
