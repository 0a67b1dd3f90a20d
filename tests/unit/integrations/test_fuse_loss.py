"""``fuse_loss`` in real runs: tiny models of real classes, in training mode, against their own forward.

PEFT's heads are in ``test_fuse_loss_peft.py``, trainers in ``test_trainer.py``.
"""

import copy
import pickle
import types

import pytest
import torch

transformers = pytest.importorskip("transformers")

import monoidreduce as mr  # noqa: E402
from monoidreduce.integrations.transformers import (  # noqa: E402
    NAME,
    causal_lm_loss,
    fuse_loss,
    register,
    token_logprobs,
    unfuse_loss,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

TOKENS = dict(vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=None)
SMALL = TOKENS | dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64,
)  # fmt: skip
EXPERTS = SMALL | dict(num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.3)
VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)
BART = TOKENS | dict(
    d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, decoder_start_token_id=1,
    forced_eos_token_id=None, dropout=0.0,
)  # fmt: skip
LLAMA4 = SMALL | dict(
    head_dim=8, intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=32,
    moe_layers=[1],
)  # fmt: skip
LLAMA4_VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
    pixel_shuffle_ratio=1.0, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16,
)  # fmt: skip

# What stands between a head and a loss, or beside it
MODELS = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", EXPERTS | dict(num_local_experts=4)),  # router losses
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        EXPERTS | dict(num_experts=4, moe_intermediate_size=16, head_dim=8),
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", SMALL | dict(logit_scale=0.25)),  # a scale; tied embeddings
    "gemma3": (  # softcap
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        SMALL | dict(head_dim=8, sliding_window=4, final_logit_softcapping=2.0),
    ),
    "llava": (  # images; a head above a model of two models
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        dict(
            text_config=dict(model_type="llama") | SMALL,
            vision_config=dict(model_type="clip_vision_model") | VISION,
            image_token_index=96,
        ),
    ),
    "llama4": (  # the head belongs to an inner language model
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        dict(
            text_config=LLAMA4,
            vision_config=LLAMA4_VISION,
            image_token_index=96,
            boi_token_index=94,
            eoi_token_index=95,
        ),
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),  # a bias that is added after the head
    "whisper": (  # a decoder that listens: the trial has no sounds
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        BART | dict(num_mel_bins=4, max_source_positions=10, max_target_positions=64),
    ),
    "bert": (  # a head inside of a head, with a bias; labels are not shifted
        "BertForMaskedLM",
        "BertConfig",
        SMALL | dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    ),
}


def make(name="llama", seed=0, **changes):
    """A model in training mode, with random weights of a size that makes its logits differ."""
    found = MODELS.get(name, ("LlamaForCausalLM", "LlamaConfig", SMALL))
    model = getattr(transformers, found[0])(getattr(transformers, found[1])(**found[2] | changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.15, generator=generator)
    return model.train()


def tokens(batch=2, length=13, seed=1):
    return torch.randint(2, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def labels(seed=1):
    found = tokens(seed=seed)
    found[0, :4] = -100
    return found


def batch(name="llama"):
    inputs = dict(input_ids=tokens(), labels=labels())
    if name == "whisper":
        return dict(input_features=torch.ones(2, 4, 20).cumsum(2).sin(), labels=labels())
    if name == "llava":
        inputs["input_ids"][:, 2:6] = 96  # an image of four patches in each sequence
        inputs["pixel_values"] = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return inputs


def step(model, **inputs):
    """The outputs of one step, and the gradients."""
    model.zero_grad()
    outputs = model(**inputs)
    outputs[0].backward()
    return outputs, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(ours, theirs, **inputs):
    found, expected = step(ours, **inputs), step(theirs, **inputs)
    torch.testing.assert_close(found[0][0], expected[0][0], atol=1e-5, rtol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for n, g in expected[1].items():
        torch.testing.assert_close(found[1][n], g, atol=2e-5, rtol=1e-3, msg=lambda m, n=n: f"{n}: {m}")
    return found[0], expected[0]


# Architectures


@pytest.mark.parametrize("name", MODELS)
def test_a_model_keeps_all_that_is_not_its_logits(name):
    plain = make(name)
    fused = fuse_loss(copy.deepcopy(plain))
    found, expected = assert_same_step(fused, plain, **batch(name))
    assert type(found) is type(expected) and found.logits is None and expected.logits is not None
    assert [k for k in found if k != "logits"] == [k for k in expected if k != "logits"]
    if "aux_loss" in expected:  # the router's loss is in the loss, and beside it
        torch.testing.assert_close(found.aux_loss, expected.aux_loss)
        without = make(name, output_router_logits=False)(**batch(name)).loss
        assert expected.loss - without > 0.1, "the router's loss is too small to be noticed"


def test_labels_losses_and_outputs_as_the_model_has_them():
    plain, ids = make(), tokens()
    fused = fuse_loss(copy.deepcopy(plain))
    shifted = torch.nn.functional.pad(labels(), (0, 1), value=-100)[:, 1:].contiguous()
    for options in (
        dict(num_items_in_batch=7),
        dict(num_items_in_batch=torch.tensor(40)),
        dict(shift_labels=shifted),
        dict(return_dict=False, use_cache=False),
        dict(output_hidden_states=True),
        dict(ignore_index=5),
        dict(logits_to_keep=13),
    ):
        given = ids.clone().where(labels() != -100, 5) if "ignore_index" in options else labels()
        found, expected = assert_same_step(fused, plain, input_ids=ids, labels=given, **options)
        assert len(found) == len(expected) - (not isinstance(found, tuple))
    torch.testing.assert_close(fused(ids, shift_labels=shifted).loss, plain(ids, labels=labels()).loss)
    torch.testing.assert_close(fused(ids, None, None, None, None, labels()).loss, plain(ids, labels=labels()).loss)
    kept = dict(labels=labels()[:, -6:], logits_to_keep=6)
    torch.testing.assert_close(fused(ids, **kept).loss, plain(ids, **kept).loss)


def test_whoever_needs_logits_gets_them():
    model = fuse_loss(make())
    expected = torch.softmax(model(tokens()).logits, -1)  # no labels
    assert model(tokens(), labels=labels()).logits is None
    assert model.eval()(tokens(), labels=labels()).logits.shape == expected.shape  # evaluation
    fuse_loss(model, when="always")
    assert model(tokens(), labels=labels()).logits is None
    assert model.train()(tokens()).logits is not None
    unfuse_loss(model)
    assert model(tokens(), labels=labels()).logits is not None and "forward" not in vars(model)
    assert unfuse_loss(model) is model


def test_a_loss_function_of_the_user_and_of_a_subclass():
    class Louder(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            return out if out.loss is None else type(out)(loss=out.loss * 2, logits=out.logits)

    def smoothed(logits, labels, vocab_size, **kwargs):
        shifted = logits.float()[..., :-1, :].contiguous().view(-1, vocab_size)
        return torch.nn.functional.cross_entropy(shifted, labels[..., 1:].reshape(-1), label_smoothing=0.2)

    plain = Louder(transformers.LlamaConfig(**SMALL))
    plain.loss_function = smoothed
    assert_same_step(fuse_loss(copy.deepcopy(plain)), plain, **batch())


def test_all_that_a_description_remembers():
    """What models write between a head and a loss, in every spelling."""

    class Busy(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            scale, bias = self.model.norm.weight[3].abs(), self.model.embed_tokens.weight[:, 0]
            hidden = self.model(input_ids).last_hidden_state
            logits = self.lm_head(hidden) + bias[None]
            logits = torch.div(logits, 3.0) * scale
            logits.mul_(0.5)  # in place, without a new name
            logits = 2 * torch.tanh(logits.to(torch.float32))
            logits /= 0.5
            assert logits.shape == (*input_ids.shape, 97) and logits.size(-1) == 97 and logits.dim() == logits.ndim == 3
            assert (
                not hasattr(logits, "no_such_thing") and len(logits) == 2 and logits.numel() == 97 * input_ids.numel()
            )
            kept = input_ids[:, :-1] > 40
            one = torch.nn.CrossEntropyLoss()(logits[..., :-1, :][kept], labels[:, 1:][kept])
            two = torch.nn.functional.cross_entropy(logits[:, 2:, :].transpose(1, 2), labels[:, 2:], reduction="none")
            three = torch.nn.functional.cross_entropy(logits[1:].flatten(0, 1), labels[1].flatten())
            weights = bias.detach().abs()
            four = torch.nn.functional.cross_entropy(logits[0].reshape(-1, 97), labels[0], weight=weights)
            loss = one + two.mean() + three + four
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    torch.manual_seed(0)
    plain = Busy(transformers.LlamaConfig(**SMALL)).train()
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.15)
    assert_same_step(fuse_loss(copy.deepcopy(plain)), plain, **batch())


# Torch's tools


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_and_accumulation_from_the_first_call(reentrant):
    models = [make(), fuse_loss(make(), check=False)]
    grads = []
    for model in models:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        for seed in (1, 2):
            count = torch.tensor(40)  # of both batches, as the Trainer counts
            model(
                tokens(seed=seed), labels=tokens(seed=seed), num_items_in_batch=count, use_cache=False
            ).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads, atol=2e-5, rtol=1e-3)


def test_autocast():
    plain = make()
    fused = fuse_loss(copy.deepcopy(plain))
    exact = plain(**batch()).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = plain(**batch()).loss, fused(**batch()).loss
    assert found.dtype == expected.dtype == torch.float32
    assert (found - exact).abs() < 2 * (expected - exact).abs() + 0.01


def test_copied_pickled_and_saved(tmp_path):
    model = fuse_loss(make())
    expected = model(**batch()).loss
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    model.save_pretrained(tmp_path)
    copies.append(fuse_loss(transformers.LlamaForCausalLM.from_pretrained(tmp_path)).train())
    with torch.no_grad():
        model.lm_head.weight.zero_()
    for twin in copies:
        out = twin(**batch())
        torch.testing.assert_close(out.loss, expected)
        assert out.logits is None
    replica = copies[0]._replicate_for_data_parallel()  # what nn.DataParallel does for each device
    assert replica.forward.__self__ is replica
    assert list(copies[0].state_dict()) == list(make().state_dict())


def test_a_forward_that_accelerate_wrapped(monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # what a trainer of another test left
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    early, late = fuse_loss(make()), make()
    early, late = accelerator.prepare(early), fuse_loss(accelerator.prepare(late))
    expected = make()(**batch()).loss
    for model in (early, late):
        out = model(**batch())
        assert out.logits is None and abs(out.loss - expected) < 0.05
    for model in (early, late):
        unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert unwrapped(**batch()).logits is None
    torch.testing.assert_close(early(**batch()).loss, expected)
    for model in (early, late):
        assert unfuse_loss(model)(**batch()).logits is not None
        assert fuse_loss(model)(**batch()).logits is None


def test_another_thread_that_runs_the_same_model_gets_its_logits():
    import threading

    model, seen = fuse_loss(make()), []
    inner = model.model.forward

    def forward(*args, **kwargs):  # in the middle of a fused call
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: seen.append(model(tokens()).logits))
            thread.start()
            thread.join()
        return inner(*args, **kwargs)

    model.model.forward = forward
    assert model(**batch()).logits is None
    assert torch.is_tensor(seen[0])


def test_losses_without_fusing():
    for name in ("mixtral", "llama4"):
        model = make(name)
        expected = model(**batch())
        torch.testing.assert_close(causal_lm_loss(model, batch()), expected.loss)
        torch.testing.assert_close(causal_lm_loss(fuse_loss(model), batch()), expected.loss)
        found = token_logprobs(model, {"input_ids": tokens()}, tokens())
        torch.testing.assert_close(found, expected.logits.log_softmax(-1).gather(-1, tokens()[..., None])[..., 0])
    with pytest.raises(
        mr.ArgumentError, match="inputs of Llama4ForConditionalGeneration have no labels, only input_ids"
    ):
        causal_lm_loss(model, {"input_ids": tokens()})


# Refusals: the model's class, and what to do


class Sorted(transformers.LlamaForCausalLM):
    """Does to its logits what no description has."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return types.SimpleNamespace(loss=logits.sort(-1).values.sum(), logits=logits)


class Masked(Sorted):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits[..., 3] = -1e9
        return types.SimpleNamespace(loss=logits.sum(), logits=logits)


class Bypassing(Sorted):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.model(input_ids).last_hidden_state @ self.lm_head.weight.T
        return transformers.modeling_outputs.CausalLMOutput(loss=logits.sum(), logits=logits)


class Joined(Sorted):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return types.SimpleNamespace(loss=torch.cat([logits, logits]).sum(), logits=logits)


class Silent(Sorted):
    """Wants labels of two kinds, as BertForPreTraining does."""

    def forward(self, input_ids=None, labels=None, *, next_sentence_label=None, **kwargs):
        return transformers.modeling_outputs.CausalLMOutput(loss=None)


class Demanding(Sorted):
    def forward(self, input_ids=None, labels=None, *, image=None, **kwargs):
        raise ValueError("where is the image?")


@pytest.mark.parametrize(
    "kind, message",
    [
        (Sorted, r"Sorted applies tensor\.sort to its logits.* unfuse_loss\(model\)"),
        (Masked, r"Masked applies an assignment to its logits"),
        (Joined, r"Joined applies torch\.cat to its logits"),
        (Bypassing, r"Bypassing does not call its head 'lm_head'"),
        (Silent, r"Silent could not be tried with input_ids and labels alone: .*no loss.* check=False\)"),
        (Demanding, r"Demanding could not be tried .*where is the image\?.* or its loss_function .*check=False\)"),
    ],
)
def test_what_cannot_be_fused_is_refused_by_name(kind, message):
    with pytest.raises(mr.ArgumentError, match=message):
        fuse_loss(kind(transformers.LlamaConfig(**SMALL)))


def test_heads_that_are_refused():
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = make()
    model.lm_head = Scaled(32, 97)
    with pytest.raises(mr.ArgumentError, match=r"head of LlamaForCausalLM is a .*Scaled, not a plain nn\.Linear"):
        fuse_loss(model)
    with pytest.raises(mr.ArgumentError, match="LlamaModel has no head of a language model"):
        fuse_loss(transformers.LlamaModel(transformers.LlamaConfig(**SMALL)))
    with pytest.raises(
        mr.ArgumentError, match=r"torch\.nn\.modules\.linear\.Linear was given.* ops\.linear_cross_entropy"
    ):
        fuse_loss(torch.nn.Linear(3, 4))
    with pytest.raises(mr.ArgumentError, match="when was given 'sometimes'"):
        fuse_loss(make(), when="sometimes")
    with pytest.raises(mr.ArgumentError, match=r"LlamaForCausalLM is compiled already.* Call fuse_loss\(model\) first"):
        fuse_loss(torch.compile(make(), backend="eager"))
    with pytest.raises(mr.errors.DTypeError, match=r"LlamaForCausalLM was given labels of type float32.*labels\.long"):
        fuse_loss(make()).train()(tokens(), labels=tokens().float())
    model = make()
    model.lm_head.register_forward_hook(lambda module, given, out: out * 2)
    with pytest.raises(mr.ArgumentError, match="head of LlamaForCausalLM has hooks"):
        fuse_loss(model)
    model = make()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(97, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(mr.ArgumentError, match=r"has weights of type int8.* Leave the head unquantised"):
        fuse_loss(model)


def test_what_was_given_in_the_place_of_a_model_is_named():
    for given, message in (
        ("a-name", r"str was given, which is no model.* Load it first: AutoModelForCausalLM\.from_pretrained\(name\)"),
        (transformers.LlamaForCausalLM, r"the class LlamaForCausalLM was given.* Load it first"),
        (types.SimpleNamespace(model=make()), r"SimpleNamespace was given.* fuse_loss\(trainer\.model\)"),
    ):
        with pytest.raises(mr.ArgumentError, match=message):
            fuse_loss(given)
    for call in (lambda b: causal_lm_loss(make(), b), lambda b: token_logprobs(make(), b, tokens())):
        with pytest.raises(mr.ArgumentError, match=r"inputs of LlamaForCausalLM were given as a Tensor.* by name"):
            call(tokens())


def test_a_model_that_gets_its_weights_later():
    """On the meta device: only without the trial."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    with pytest.raises(mr.ArgumentError, match=r"head of LlamaForCausalLM is on the meta device.* check=False"):
        fuse_loss(model)
    fuse_loss(model, check=False)
    with pytest.raises(mr.ArgumentError, match="head of LlamaForCausalLM is on the meta device"):
        model.train()(**{k: v.to("meta") for k, v in batch().items()})
    plain = make()
    model.load_state_dict(plain.state_dict(), assign=True)
    model.model.rotary_emb = plain.model.rotary_emb  # its buffers are in no file
    assert_same_step(model, plain, **batch())


def test_a_model_that_is_sharded_already_is_fused_first():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = torch.distributed.fsdp.fully_shard(make(), mesh=mesh)
        with pytest.raises(mr.ArgumentError, match=r"sharded by fully_shard already.* Call fuse_loss\(model\) first"):
            fuse_loss(model)
        fuse_loss(model, check=False)
    finally:
        torch.distributed.destroy_process_group()


def partition(weight):
    """As DeepSpeed ZeRO-3 leaves a parameter whose module is not being called."""
    weight.ds_id, weight.ds_shape = 7, weight.shape
    weight.data = weight.new_empty(0)


def test_weights_that_zero_3_partitioned_are_refused():
    """Before the model is fused, and after; in modules of ours too."""
    refused = pytest.raises(mr.ArgumentError, match=r"head of LlamaForCausalLM is partitioned by DeepSpeed.* FSDP2")
    model, fused = make(), fuse_loss(make().train())
    for each in (model, fused):
        partition(each.lm_head.weight)
    for check in (True, False):
        with refused:
            fuse_loss(model, check=check)
    for call in (lambda: fused(**batch()), lambda: causal_lm_loss(model, batch())):
        with refused:
            call()
    head = mr.nn.LinearCrossEntropyLoss(8, 20)
    partition(head.linear.weight)
    with pytest.raises(mr.ArgumentError, match=r"weight is a parameter that DeepSpeed .*set_z3_leaf_modules"):
        head(torch.randn(3, 8), torch.arange(3))


def test_attention_weights_are_not_returned_from_a_fused_model_either():
    register()
    model = make()
    model.set_attn_implementation(NAME)
    with pytest.raises(mr.ArgumentError, match=r'weights, which are never built.* attn_implementation="eager"'):
        fuse_loss(model)(**batch(), output_attentions=True)


def test_a_trial_leaves_every_mode_as_it_was():
    model = make()
    model.model.layers[0].eval()  # frozen by the user
    before = [m.training for m in model.modules()]
    fuse_loss(model)
    assert [m.training for m in model.modules()] == before
