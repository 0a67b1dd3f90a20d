"""TRL's trainers with our vocabulary head: the same losses, gradients, weights and logged metrics as with TRL's own."""

import copy
import math
import types
import warnings

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl")
import trl.trainer.utils as trl_utils
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)
from trl import KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer

import monoidreduce as mr
from examples import train_trl
from examples.train_trl import make_model, make_tokenizer, make_trainer, prefer_short_words, sentences
from monoidreduce.integrations.transformers import fuse_loss
from monoidreduce.integrations.trl import fuse, unfuse

SMALL = dict(
    vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
)  # fmt: skip
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
TIMES = ("runtime", "_per_second", "step_time", "total_flos", "mfu")


def forbidden(*_):
    raise AssertionError("TRL's own head ran")


def logged(trainer):
    """All that a trainer logged, but times."""
    return [{k: v for k, v in line.items() if not k.endswith(TIMES)} for line in trainer.state.log_history]


KINDS = {
    "sft": dict(gradient_accumulation_steps=2),
    "dpo": dict(use_weighting=True, ld_alpha=0.5, label_smoothing=0.1),
    "grpo": dict(temperature=0.7, entropy_coef=0.01, top_entropy_quantile=0.5, num_iterations=2),
}


def other_trainer(kind, model, folder):
    """Trainers that no example shows, over the same sentences."""
    common = dict(
        output_dir=folder, max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, bf16=False, seed=0,
    )  # fmt: skip
    prompts, texts = sentences(8, 3, 1), [f" {s}" for s in sentences(8, 6, 2)]
    if kind == "kto":
        data = Dataset.from_dict({"prompt": prompts, "completion": texts, "label": [True, False] * 4})
        return KTOTrainer(model, args=KTOConfig(**common), train_dataset=data, processing_class=make_tokenizer())
    config = RLOOConfig(**common, num_generations=2, max_completion_length=6)
    data = Dataset.from_dict({"prompt": prompts})
    return RLOOTrainer(
        model, reward_funcs=prefer_short_words, args=config, train_dataset=data, processing_class=make_tokenizer()
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kto", "rloo"])
def test_other_trainers_log_and_learn_the_same(kind, tmp_path, monkeypatch):
    compare(lambda: other_trainer(kind, make_model(tmp_path / "model"), str(tmp_path)), monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_logs_and_learns_the_same(kind, tmp_path, monkeypatch):
    make = lambda: make_trainer(kind, make_model(tmp_path / "model"), str(tmp_path), steps=3, **KINDS[kind])
    compare(make, monkeypatch)


def compare(make, monkeypatch):
    """Train twice, with TRL's head and with ours: the same weights, and the same lines in the log."""
    found = []
    for fused in (False, True):
        trainer = make()
        if fused:
            assert fuse(trainer) is trainer
            monkeypatch.setattr(trl_utils._ChunkedLogProbFunction, "apply", forbidden)
        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
        found.append((logged(trainer), [p.detach() for p in trainer.model.parameters()]))
    (own_log, own), (our_log, ours) = found
    assert [set(line) for line in our_log] == [set(line) for line in own_log]
    for line, other in zip(our_log, own_log, strict=True):
        for name in line:
            assert math.isclose(line[name], other[name], rel_tol=2e-4, abs_tol=2e-5), name
    assert_close(ours, own, atol=2e-5, rtol=1e-4)


def test_the_example_trains_with_the_one_line(monkeypatch, capsys):
    monkeypatch.setattr(trl_utils._ChunkedLogProbFunction, "apply", forbidden)
    logs = train_trl.main(["--kind", "sft", "--steps", "2"])
    assert list(logs) == ["sft"] and logs["sft"][0]["loss"] > 0 and "sft: loss" in capsys.readouterr().out


# One call of a model, against TRL's own head --------------------------------------------------------------------------


def gemma(**options):  # soft caps
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0, **options))


def granite(**options):  # a scale
    return GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=3.0, **options))


def phi(**options):  # a bias
    return PhiForCausalLM(PhiConfig(**SMALL, **options))


def mixtral(**options):  # router losses
    return MixtralForCausalLM(
        MixtralConfig(**SMALL, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.3, **options)
    )


def prepared(model, **settings):
    """A model as TRL's trainers prepare it, and what stands for its trainer."""
    trl_utils.add_fused_lm_head(model, **{"outputs": OUTPUTS, **settings})
    return types.SimpleNamespace(model=model)


def score(model, tokens, labels, **given):
    """The outputs of one call and the gradients of a mix of them."""
    model.zero_grad()
    out = model(input_ids=tokens, labels=labels, fused_lm_head=True, **given)
    entropy = 0 if out.entropy is None else out.entropy.sin().sum()
    (out.log_probs.cos().sum() + entropy + out.loss).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {k: v.detach() for k, v in out.items()}, grads


@pytest.fixture
def tokens():
    return torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("make", [gemma, granite, phi, mixtral], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_scores_and_gradients_are_those_of_trls_head(make, dtype, tokens):
    torch.manual_seed(0)
    model = make().to(dtype)
    trainer = prepared(model, temperature=0.8)
    labels = torch.where(torch.rand(tokens.shape) < 0.3, -100, tokens)
    given = {"attention_mask": torch.ones_like(tokens), "num_items_in_batch": torch.tensor(7)}
    expected, wanted = score(model, tokens, labels, **given)
    fuse(trainer)
    found, grads = score(model, tokens, labels, **given)
    assert found.keys() == expected.keys() and grads.keys() == wanted.keys()
    near = dict(atol=2e-5, rtol=2e-4) if dtype is torch.float32 else dict(atol=0.05, rtol=0.05)
    for name in found:
        if name != "is_top1" or dtype is torch.float32:  # in 16 bits TRL rounds logits, and ties differ
            assert_close(found[name], expected[name], **near)
    for name in grads:
        scale = wanted[name].abs().max().float().clamp(min=1e-3)
        assert_close(grads[name].float() / scale, wanted[name].float() / scale, **near)


def test_shifted_labels_no_labels_and_plain_calls(tokens):
    model = phi()
    trainer = prepared(model)
    shifted = torch.where(tokens % 3 == 0, -100, tokens)
    plain = model(input_ids=tokens, labels=tokens)
    expected, _ = score(model, tokens, None, shift_labels=shifted)
    fuse(trainer)
    found, _ = score(model, tokens, None, shift_labels=shifted)
    assert_close(found, expected, atol=1e-5, rtol=1e-4)
    again = model(input_ids=tokens, labels=tokens)  # without the flag, the model's own forward
    assert_close((again.logits, again.loss), (plain.logits, plain.loss))
    none, grads = score(model, tokens, torch.full_like(tokens, -100))
    assert none["loss"] == 0 and all(not g.any() for g in grads.values())
    with mr.budget("1 MB"):
        assert_close(score(model, tokens, None, shift_labels=shifted)[0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow  # a compiler's first call takes 15 s
def test_fused_models_compile(tokens):
    model = phi()
    fuse(prepared(model))
    expected = model(input_ids=tokens, labels=tokens, fused_lm_head=True)
    compiled = torch.compile(model, backend="aot_eager")
    found = compiled(input_ids=tokens, labels=tokens, fused_lm_head=True)
    assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=1e-4)
    assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-4)


def test_heads_in_float32_over_a_body_of_16_bits(tokens):
    torch.manual_seed(0)
    model = phi().bfloat16()
    model.lm_head.float()
    trainer = prepared(model, cast_lm_head_to_fp32=True)
    expected, wanted = score(model, tokens, tokens)
    fuse(trainer)
    found, grads = score(model, tokens, tokens)
    assert found["log_probs"].dtype == torch.float32
    assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert_close(grads["lm_head.weight"], wanted["lm_head.weight"], atol=1e-5, rtol=1e-3)


def test_fusing_twice_and_undoing_it(tokens):
    model = phi()
    trainer = prepared(model)
    own = model.forward
    fuse(fuse(trainer))
    assert model.forward is not own
    assert unfuse(trainer) is trainer and model.forward is own
    unfuse(trainer)


@pytest.mark.parametrize("first", ["fuse_loss", "fuse"])
def test_beside_fuse_loss(first, tokens):
    """The trainer's scores are its head's, and a plain call with labels builds no logits."""
    torch.manual_seed(0)
    model = phi().train()
    expected, wanted = score(prepared(copy.deepcopy(model)).model, tokens, tokens)
    if first == "fuse_loss":
        fuse(prepared(fuse_loss(model)))
    else:
        fuse(prepared(model))
        fuse_loss(model)
    found, grads = score(model, tokens, tokens)
    assert_close((found, grads), (expected, wanted), atol=1e-5, rtol=1e-4)
    plain = model(input_ids=tokens, labels=tokens)
    assert plain.logits is None
    assert_close(plain.loss, expected["loss"])


def test_adapters_in_the_body_are_trained(tokens):
    torch.manual_seed(0)
    model = phi()
    trl_utils.add_fused_lm_head(model, outputs=OUTPUTS)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    expected, wanted = score(wrapped, tokens, tokens)
    fuse(types.SimpleNamespace(model=wrapped, ref_model=None))
    found, grads = score(wrapped, tokens, tokens)
    assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert_close(grads, wanted, atol=1e-5, rtol=1e-4)
    assert all("lora" in name for name in grads)


def test_an_adapter_on_the_head_is_trained(tokens):
    """TRL's own head reads the weight below the adapter; ours is the model's own forward."""
    torch.manual_seed(0)
    model = phi()
    trl_utils.add_fused_lm_head(model, outputs=OUTPUTS)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    fuse(types.SimpleNamespace(model=wrapped))
    found = wrapped(input_ids=tokens, labels=tokens, fused_lm_head=True)
    logits = wrapped(input_ids=tokens).logits[:, :-1]
    expected = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
    assert_close(found.log_probs, expected, atol=1e-5, rtol=1e-4)
    adapters = [p for name, p in wrapped.named_parameters() if "lora" in name]
    ours, own = (torch.autograd.grad(y.sin().sum(), adapters) for y in (found.log_probs, expected))
    assert_close(ours, own, atol=1e-5, rtol=1e-4)


def test_what_is_no_such_trainer_is_refused():
    with pytest.raises(mr.ArgumentError, match=r"PhiForCausalLM of SimpleNamespace has no fused head as TRL 1\.16"):
        fuse(types.SimpleNamespace(model=phi()))
    with pytest.raises(mr.ArgumentError, match="asks its head for perplexity"):
        fuse(prepared(phi(), outputs=("log_probs", "perplexity")))
    with pytest.raises(mr.ArgumentError, match=r"given a PhiForCausalLM, which is no trainer.*transformers\.fuse_loss"):
        fuse(phi())
