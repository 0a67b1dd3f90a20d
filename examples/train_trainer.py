"""Hugging Face's Trainer with our attention and our loss: two lines, and the rest of the script is as ever.

A small Llama learns Shakespeare's sonnets byte by byte, with gradient accumulation and checkpointing. While it trains,
its logits are never built; evaluation has them, for `compute_metrics`. Needs the `transformers` extra and accelerate.
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import EvalPrediction, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from examples.shared import command
from monoidreduce.integrations.transformers import fuse_loss, register

TEXT = Path(__file__).parent / "data" / "sonnets.txt"


class Result(NamedTuple):
    """The losses that the Trainer logged, its last evaluation, and the trained model."""

    losses: list[float]
    evaluation: dict[str, float]
    model: PreTrainedModel


def windows(context: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The sonnets in stretches of ``context`` bytes, to train on and to evaluate on: any dataset of the Trainer's."""
    text = torch.tensor(list(TEXT.read_bytes()))
    rows = [{"input_ids": t, "labels": t} for t in text[: len(text) // context * context].view(-1, context)]
    return rows[:-8], rows[-8:]


def make_model(width: int, layers: int, context: int, attention: str = "monoidreduce") -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=attention)


def most_likely(logits: Tensor, labels: Tensor) -> Tensor:
    """All that the metric needs of the logits: the Trainer keeps this, not them."""
    return logits.argmax(-1)


def accuracy(p: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((p.predictions[:, :-1] == p.label_ids[:, 1:]).mean())}


def main(
    steps: int = 60,
    batch: int = 4,
    context: int = 128,
    width: int = 64,
    layers: int = 2,
    resume: str = "",
    out: str = "",
) -> Result:
    torch.manual_seed(0)
    register()  # line one, once: attn_implementation="monoidreduce" is now a choice
    model = make_model(width, layers, context)
    fuse_loss(model)  # line two: the loss is computed without logits while training

    train, evaluation = windows(context)
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = dict(
            output_dir=out or folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            learning_rate=3e-3,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=steps,
            save_strategy="steps" if out else "no",
            save_steps=max(1, steps // 2),
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = Trainer(
            model,
            TrainingArguments(**arguments),
            train_dataset=train,
            eval_dataset=evaluation,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=most_likely,
        )
        trainer.train(resume_from_checkpoint=resume or None)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    (evaluated,) = [row for row in trainer.state.log_history if "eval_accuracy" in row][-1:]
    result = Result(losses, evaluated, model)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; accuracy {result.evaluation['eval_accuracy']:.3f}")
    return result


if __name__ == "__main__":
    command(main)
