"""LoRA by PEFT, on the head too, with our attention and our loss: two lines.

A small Llama is trained on the first half of Shakespeare's sonnets, frozen, and adapted to the second by low-rank terms
in attention and in its head. The head's term is a second product beside the frozen weight: neither logits nor a merged
weight are built. Needs the `transformers` extra and peft.
"""

from typing import NamedTuple

import peft
import torch
from torch import Tensor

from examples.shared import command, peak_mb
from examples.train_trainer import TEXT, make_model
from monoidreduce.integrations.transformers import fuse_loss, register


class Result(NamedTuple):
    """The losses while adapting, the share of weights that were trained, one step's memory without and with us."""

    losses: list[float]
    trained: float
    own_mb: float
    ours_mb: float


def draw_batches(text: Tensor, steps: int, batch: int, context: int) -> list[Tensor]:
    starts = torch.randint(len(text) - context, (steps, batch, 1))
    return list(text[starts + torch.arange(context)])


def train(model: torch.nn.Module, batches: list[Tensor]) -> list[float]:
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(weights, lr=3e-3), []
    for tokens in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(
    steps: int = 60, batch: int = 4, context: int = 128, width: int = 64, layers: int = 2, rank: int = 8
) -> Result:
    torch.manual_seed(0)
    text = torch.tensor(list(TEXT.read_bytes()))
    first, second = text.chunk(2)
    register()
    model = make_model(width, layers, context)
    fuse_loss(model)  # before get_peft_model, or after it
    train(model, draw_batches(first, steps, batch, context))

    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_dropout=0.05, target_modules=["q_proj", "v_proj", "lm_head"]
    )
    adapted = peft.get_peft_model(model, config)
    batches = draw_batches(second, steps, batch, context)
    losses = train(adapted, batches)

    weights = [p for p in adapted.parameters() if p.requires_grad]
    one_step = lambda: adapted(input_ids=batches[0], labels=batches[0]).loss
    ours_mb = peak_mb(one_step, weights)
    model.set_attn_implementation("eager")
    own_mb = peak_mb(lambda: adapted.eval()(input_ids=batches[0], labels=batches[0]).loss, weights)  # builds logits
    trained = sum(p.numel() for p in weights) / sum(p.numel() for p in adapted.parameters())
    print(f"{trained:.1%} of the weights trained; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"peak memory of a step: transformers' own {own_mb:.1f} MB, ours {ours_mb:.1f} MB")
    return Result(losses, trained, own_mb, ours_mb)


if __name__ == "__main__":
    command(main)
