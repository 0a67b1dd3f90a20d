"""TRL's trainers with our vocabulary head: SFT, DPO and GRPO of a tiny model, each with one more line.

    python -m examples.train_trl                  # all three, a few steps each, on a CPU
    python -m examples.train_trl --kind dpo --steps 20 --vocabulary 4000 --width 64

The line is ``fuse(trainer)``. Everything above it is what a TRL script has anyway: here a tokenizer made on the spot, a
small Llama with random weights, and a few sentences.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from monoidreduce.integrations.trl import fuse

SENTENCE = "every row meets every column and the matrix of all pairs is never built so memory stays small"
WORDS = sorted(set(SENTENCE.split()))
KINDS = ("sft", "dpo", "grpo")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a word."""
    words = {word: place for place, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_model(folder: str, vocabulary: int = 64, width: int = 16, **options) -> LlamaForCausalLM:
    """A Llama of one layer with random weights, saved in a folder: from there trainers load their reference model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def sentences(count: int, length: int, seed: int) -> list[str]:
    """Random sentences of our words."""
    places = torch.randint(len(WORDS), (count, length), generator=torch.Generator().manual_seed(seed))
    return [" ".join(WORDS[k] for k in row) for row in places.tolist()]


def prefer_short_words(completions: list[str], **_) -> list[float]:
    """A reward for GRPO: shorter words are better."""
    return [-sum(map(len, text.split())) / max(1, len(text.split())) for text in completions]


def make_trainer(kind: str, model, folder: str, steps: int = 3, **options):
    """A trainer of TRL as anybody would make it."""
    common = dict(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, bf16=False, seed=0,
    )  # fmt: skip
    prompts, answers = sentences(8, 3, 1), [f" {s}" for s in sentences(8, 6, 2)]
    if kind == "sft":
        data = Dataset.from_dict({"text": [p + a for p, a in zip(prompts, answers, strict=True)]})
        return SFTTrainer(
            model, args=SFTConfig(**common, **options), train_dataset=data, processing_class=make_tokenizer()
        )
    if kind == "dpo":
        data = Dataset.from_dict(
            {"prompt": prompts, "chosen": answers, "rejected": [f" {s}" for s in sentences(8, 5, 3)]}
        )
        return DPOTrainer(
            model, args=DPOConfig(**common, **options), train_dataset=data, processing_class=make_tokenizer()
        )
    config = GRPOConfig(**common, num_generations=2, max_completion_length=6, beta=0.1, **options)
    return GRPOTrainer(
        model, reward_funcs=prefer_short_words, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=make_tokenizer(),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, list[dict]]:
    """Train; return what each trainer logged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="all")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    given = parser.parse_args(argv)
    logs = {}
    for kind in KINDS if given.kind == "all" else (given.kind,):
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(f"{folder}/model", given.vocabulary, given.width)
            trainer = make_trainer(kind, model, folder, given.steps)
            fuse(trainer)  # the one line
            trainer.train()
            logs[kind] = trainer.state.log_history
            shown = "reward" if kind == "grpo" else "loss"  # GRPO's loss begins at 0
            print(f"{kind}: {shown} {logs[kind][0][shown]:.4f} -> {logs[kind][-2][shown]:.4f}")
    return logs


if __name__ == "__main__":
    main()
