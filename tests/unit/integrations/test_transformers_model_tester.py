"""transformers' own test class of a model, ``ModelTesterMixin``, on tiny models: with our attention in SDPA's place,
and with our loss.

The class is that of the installed version (``tests/support/transformers_test_classes.py``). Left out are its checks of
attention weights, which are never built, and those that have nothing to do with attention or loss. What it says of
generation is not part of the source distribution; ``test_transformers_models.py`` tests that.
"""

import unittest

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("parameterized")

from monoidreduce.integrations import transformers_attention  # noqa: E402
from monoidreduce.integrations.transformers import NAME, fuse_loss, register  # noqa: E402
from tests.support.tiny_transformers import ALL, IMAGES, SEQUENCE_TO_SEQUENCE, padded, tokens  # noqa: E402
from tests.support.transformers_own_tests_plugin import choose_ours  # noqa: E402
from tests.support.transformers_test_classes import is_downloaded, load_model_tester  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not is_downloaded(), reason="transformers' test class was not downloaded: run `make setup`"),
    pytest.mark.filterwarnings("ignore"),
]

DECODERS = [
    "llama", "qwen3", "mistral", "mixtral", "gemma2", "gemma3", "phi3", "llama4", "deepseek", "gpt2", "opt",
    "gpt_neox", "gpt_oss",
]  # fmt: skip
OTHERS = ["bart", "t5gemma", "whisper", "bert", "modernbert", "vit", "siglip", "clip"]
HEADED = {"bert": "BertForMaskedLM", "modernbert": "ModernBertForMaskedLM", "vit": "ViTForImageClassification"}
CHECKS = [
    "test_eager_matches_sdpa_inference_09_fp32_pad_left",
    "test_eager_matches_sdpa_inference_13_fp32_pad_right",
    "test_eager_matches_sdpa_inference_15_fp32_pad_right_no_attn_mask",
    "test_eager_matches_sdpa_inference_01_fp16_pad_left",
    "test_eager_matches_sdpa_inference_17_bf16_pad_left",
    "test_batching_equivalence",
    "test_determinism",
    "test_hidden_states_output",
    "test_inputs_embeds_matches_input_ids",
    "test_save_load",
    "test_resize_tokens_embeddings",
    "test_resize_embeddings_untied",
    "test_training",
    "test_training_gradient_checkpointing_use_reentrant_false",
    "test_training_gradient_checkpointing_use_reentrant_true",
    "test_enable_input_require_grads_with_gradient_checkpointing",
]
FAILS_WITHOUT_OURS = {  # with attention of its own as well: its own tests leave these out
    ("t5gemma", "test_hidden_states_output"),
    ("t5gemma", "test_inputs_embeds_matches_input_ids"),
}
WITH_OUR_LOSS = [
    "test_training",
    "test_training_gradient_checkpointing_use_reentrant_false",
    "test_training_gradient_checkpointing_use_reentrant_true",
    "test_causal_lm_loss_honors_shift_labels",
    "test_resize_tokens_embeddings",
]


class TinyModel:
    """What transformers' class wants to know of a model: its configuration, its inputs and their sizes."""

    batch_size, hidden_size, num_hidden_layers = 3, 32, 2
    image_size, patch_size, num_masks, mask_length = 12, 4, 2, 9

    def __init__(self, name):
        self.name = name
        self.class_name, self.config_name, self.options = ALL[name]
        self.is_training = name not in ("whisper", "siglip", "clip")  # of these it makes no labels
        self.seq_length = self.encoder_seq_length = self.decoder_seq_length = 17
        if name in IMAGES:
            self.seq_length = self.encoder_seq_length = 9 if name == "siglip" else 10
        elif name == "whisper":
            self.encoder_seq_length = 10

    def get_config(self):
        dropped = {"attention_dropout": 0.0, "dropout": 0.0, "activation_dropout": 0.0}
        options = self.options | (dropped if self.name in SEQUENCE_TO_SEQUENCE else {})
        config = getattr(transformers, self.config_name)(**options)
        config._attn_implementation = NAME
        return config

    def prepare_config_and_inputs_for_common(self):
        generator = torch.Generator().manual_seed(5)
        if self.name in IMAGES:
            return self.get_config(), {"pixel_values": torch.rand(3, 3, 12, 12, generator=generator)}
        ids, seen = padded(tokens(), left=False)
        if self.name == "whisper":
            given = {"input_features": torch.rand(3, 4, 20, generator=generator), "decoder_input_ids": tokens()}
        else:
            given = {"input_ids": ids, "attention_mask": seen}
            if self.name in SEQUENCE_TO_SEQUENCE:
                given |= {"decoder_input_ids": tokens(seed=2), "decoder_attention_mask": torch.ones_like(seen)}
        return self.get_config(), given

    def model_classes(self):
        """The bare model and the one with a head."""
        own = getattr(transformers, self.class_name)
        bare = transformers.MODEL_MAPPING.get(type(self.get_config()), own)
        headed = getattr(transformers, HEADED.get(self.name, self.class_name))
        return tuple(dict.fromkeys((bare, own, headed)))


@pytest.fixture(scope="module")
def mixin(request):
    return load_model_tester(request.config)


def run(mixin, name, check):
    """One check of transformers' class on one model; it may skip itself."""
    tester = TinyModel(name)
    members = dict(
        model_tester=tester,
        all_model_classes=tester.model_classes(),
        is_encoder_decoder=name in SEQUENCE_TO_SEQUENCE,
        test_resize_embeddings=name not in IMAGES and name != "whisper",
        test_all_params_have_gradient=name
        not in ("mixtral", "llama4", "deepseek", "gpt_oss", "clip", "siglip", "t5gemma"),
    )
    type(f"{tester.class_name}Test", (mixin, unittest.TestCase), members)(check).debug()


@pytest.fixture
def ours(name, monkeypatch):
    """Our attention in SDPA's place, and how often it was called."""
    register()
    calls = []
    attend = transformers_attention.attention_forward
    monkeypatch.setattr(transformers.PreTrainedModel, "get_correct_attn_implementation", choose_ours)
    monkeypatch.setitem(
        transformers.AttentionInterface._global_mapping, NAME, lambda *a, **k: calls.append(0) or attend(*a, **k)
    )
    for model_class in TinyModel(name).model_classes():  # some say that SDPA lacks what they need; ours has it
        for base in model_class.__mro__:
            if "_supports_sdpa" in vars(base):
                monkeypatch.setattr(base, "_supports_sdpa", True)
    return calls


@pytest.mark.sampled(12)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", DECODERS + OTHERS)
def test_with_our_attention(name, check, ours, mixin):
    if (name, check) in FAILS_WITHOUT_OURS:
        pytest.skip("fails without our attention too")
    run(mixin, name, check)
    assert ours, "our attention was not called"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("check", WITH_OUR_LOSS)
@pytest.mark.parametrize("name", DECODERS)
def test_with_our_loss(name, check, ours, mixin, monkeypatch):
    fused, begin = [], transformers.PreTrainedModel.post_init

    def fuse(model):
        begin(model)
        if type(model).__name__ == ALL[name][0]:
            fused.append(fuse_loss(model, check=False, when="training" if check.startswith("test_train") else "always"))

    monkeypatch.setattr(transformers.PreTrainedModel, "post_init", fuse)
    run(mixin, name, check)
    assert ours and fused
