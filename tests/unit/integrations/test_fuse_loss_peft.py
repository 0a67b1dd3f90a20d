"""``fuse_loss`` around PEFT: LoRA on and beside the head, trained copies of it, adapters in every state."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import monoidreduce as mr  # noqa: E402
from benchmarks.measure import peak_growth  # noqa: E402
from monoidreduce.integrations.transformers import causal_lm_loss, fuse_loss, token_logprobs, unfuse_loss  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

SMALL = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
LORA = dict(task_type="CAUSAL_LM", r=4, lora_alpha=6, init_lora_weights=False)
HEAD = dict(target_modules=["q_proj", "lm_head"])


def make(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | changes))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15)
    return model.to(dtype)


def adapt(model, **options):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA | options)).train()


def batch(seed=2):
    ids = torch.randint(2, 97, (2, 11), generator=torch.Generator().manual_seed(seed))
    return dict(input_ids=ids, labels=ids.masked_fill(torch.arange(11) < 3, -100))


def step(model):
    model.zero_grad()
    torch.manual_seed(5)  # the same dropout
    out = model(**batch())
    out.loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(ours, theirs, least=2):
    (found, grads), (expected, wanted) = step(ours), step(theirs)
    assert found.logits is None and expected.logits is not None
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert grads.keys() == wanted.keys() and len(grads) >= least
    for n, g in wanted.items():
        torch.testing.assert_close(grads[n], g, atol=2e-5, rtol=1e-3, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "options",
    [
        dict(target_modules=["q_proj", "v_proj"]),
        HEAD | dict(lora_dropout=0.3),
        HEAD | dict(use_rslora=True, lora_bias=True),
        dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ],
    ids=["beside", "head", "bias", "saved"],
)
def test_before_and_after_get_peft_model(when, options):
    tied = "modules_to_save" not in options and "lora_bias" not in options
    plain = adapt(make(tie_word_embeddings=tied), **options)
    base = make(tie_word_embeddings=tied)
    ours = adapt(fuse_loss(base), **options) if when == "before" else fuse_loss(adapt(base, **options))
    ours.load_state_dict(plain.state_dict())
    assert_same_step(ours, plain)
    if when == "after":
        assert isinstance(ours, peft.PeftModel)
        assert unfuse_loss(ours)(**batch()).logits is not None


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wrapper_that_remembers_the_forward_of_its_model(when):
    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_layers=1, adapter_len=3)
    plain, base = peft.get_peft_model(make(), config).train(), make()
    base = fuse_loss(base) if when == "before" else base
    ours = peft.get_peft_model(base, config).train()
    fuse_loss(ours).load_state_dict(plain.state_dict())
    assert_same_step(ours, plain)
    assert unfuse_loss(ours)(**batch()).logits is not None
    assert fuse_loss(ours)(**batch()).logits is None


def test_adapters_in_every_state():
    plain = adapt(make(), **HEAD)
    plain.add_adapter("other", peft.LoraConfig(**LORA | HEAD | dict(r=7)))
    plain.add_adapter("elsewhere", peft.LoraConfig(**LORA | dict(target_modules=["q_proj"])))
    ours = fuse_loss(copy.deepcopy(plain))
    for active in (["other"], ["default", "other"], ["elsewhere"]):
        for model in (ours, plain):
            model.base_model.set_adapter(active)
        assert_same_step(ours, plain)
    losses = []
    for model in (ours, plain):
        with model.disable_adapter():
            losses.append(model(**batch()).loss)
    torch.testing.assert_close(losses[0], losses[1])
    for model in (ours, plain):
        model.base_model.set_adapter(["default"])
        model.merge_adapter()
        losses.append(model(**batch()).loss)
        with model.disable_adapter():  # PEFT takes the merged weights out again
            losses.append(model(**batch()).loss)
    torch.testing.assert_close(losses[2:4], losses[4:])
    assert abs(losses[2] - losses[0]) > 0.01, "the adapter changes too little to be noticed"


ONE_TOKEN_MORE = dict(embed_tokens=[3, 7, 50], lm_head=[3, 8])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "tied, config",
    [
        (True, peft.LoraConfig(**LORA | dict(target_modules=["q_proj"], trainable_token_indices=[3, 7, 50]))),
        (False, peft.LoraConfig(**LORA | dict(target_modules=["q_proj"], trainable_token_indices=ONE_TOKEN_MORE))),
        (True, peft.TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[7, 3])),
    ],
    ids=["tied", "untied", "alone"],
)
def test_tokens_that_are_trained(when, tied, config):
    """Their weights stand in the head's, for tied heads in the embedding's too; used, disabled and merged."""
    plain, base = (peft.get_peft_model(make(tie_word_embeddings=tied), config).train(), make(tie_word_embeddings=tied))
    for name, p in plain.named_parameters():
        if "trainable_tokens" in name:
            torch.nn.init.normal_(p, std=3.0)
    fused = fuse_loss(base) if when == "before" else base
    ours = peft.get_peft_model(fused, config).train()
    ours = ours if when == "before" else fuse_loss(ours)
    ours.load_state_dict(plain.state_dict())
    assert_same_step(ours, plain, least=1)
    found = []
    for model in (ours, plain):
        with model.disable_adapter():
            found.append(model(**batch()).loss)
        model.merge_adapter()
        found.append(model(**batch()).loss)
        with model.disable_adapter():  # PEFT takes the merged weights out again
            found.append(model(**batch()).loss)
    torch.testing.assert_close(found[:3], found[3:])
    assert abs(found[1] - found[0]) > 0.01, "the tokens change too little to be noticed"


def test_losses_and_log_probabilities_of_a_wrapped_head():
    model = adapt(make(), **HEAD)
    expected = model(**batch())
    torch.testing.assert_close(causal_lm_loss(model, batch()), expected.loss)
    ids = batch()["input_ids"]
    found = token_logprobs(model, {"input_ids": ids}, ids)
    torch.testing.assert_close(found, expected.logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0])


def test_a_head_of_16_bits_with_adapters_of_32():
    """PEFT keeps adapters in float32 beside 16-bit weights."""
    plain = adapt(make(torch.bfloat16), **HEAD)
    ours, exact = fuse_loss(copy.deepcopy(plain)), copy.deepcopy(plain).double()
    (found, grads), (expected, wanted), (true, truth) = step(ours), step(plain), step(exact)
    assert (found.loss - true.loss).abs() <= 2 * (expected.loss - true.loss).abs() + 1e-3
    for n in (n for n in truth if "lm_head" in n):
        assert grads[n].dtype == torch.float32
        errors = [(g[n].double() - truth[n]).norm() / truth[n].norm() for g in (grads, wanted)]
        assert errors[0] <= 2 * errors[1], (n, errors)


def test_neither_logits_nor_a_merged_weight_are_built():
    """A head of 3 MB over 512 tokens: logits are 24 MB, a merged or concatenated weight and its gradient 3 MB each."""
    peaks = {}
    for which in ("ours", "plain"):
        model = adapt(make(vocab_size=12_000, hidden_size=64, max_position_embeddings=512), target_modules=["lm_head"])
        if which == "ours":
            fuse_loss(model, check=False)
        ids = torch.randint(2, 12_000, (1, 512))
        with mr.budget("4MB"):
            model(ids[:, :8], labels=ids[:, :8]).loss.backward()
            peaks[which] = peak_growth(lambda m=model, i=ids: m(i, labels=i).loss.backward())
    assert peaks["ours"] < 0.3 * peaks["plain"], peaks


@pytest.mark.parametrize(
    "config, message",
    [
        (
            lambda: peft.LoraConfig(**LORA | HEAD, use_dora=True),
            "adapter 'default' of the head of LlamaForCausalLM .*Dora",
        ),
        (
            lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=["lm_head"], feedforward_modules=[]),
            r"head of LlamaForCausalLM is peft\.tuners\.ia3\.layer\.Linear.* modules_to_save",
        ),
    ],
    ids=["dora", "ia3"],
)
def test_other_adapters_on_the_head_are_refused(config, message):
    model = peft.get_peft_model(make(), config())
    with pytest.raises(mr.ArgumentError, match=message):
        fuse_loss(model)
    before = peft.get_peft_model(fuse_loss(make()), config()).train()  # known only when it is called
    with pytest.raises(mr.ArgumentError, match=message):
        before(**batch())
    assert before.eval()(**batch()).logits is not None
