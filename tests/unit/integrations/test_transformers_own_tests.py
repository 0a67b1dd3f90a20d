"""transformers' own tests of its models, with our attention where they would have had SDPA.

They are not part of transformers' package: ``MONOIDREDUCE_TRANSFORMERS_TESTS`` names a checkout of its repository, of
the version that is installed. Each model's tests run in a process of their own; what fails there is run once more
without our attention, and only what then passes counts.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("MONOIDREDUCE_TRANSFORMERS_TESTS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHECKOUT, reason="MONOIDREDUCE_TRANSFORMERS_TESTS does not name a checkout of transformers' repository"
    ),
]
MODELS = [
    "llama", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "gpt_oss", "mixtral", "gpt2", "bert", "modernbert", "bart",
    "whisper", "t5", "t5gemma", "vit", "siglip", "clip",
]  # fmt: skip
BEHAVIOURS = [
    "test_eager_matches_sdpa_inference", "test_batching_equivalence", "test_training_gradient_checkpointing",
    "test_sdpa_padding_matches_padding_free_with_position_ids", "test_left_padding_compatibility",
    "test_greedy_generate", "test_beam_search_generate", "test_assisted_decoding_matches_greedy_search",
    "test_prompt_lookup_decoding_matches_greedy_search", "test_generate_continue_from_past_key_values",
    "test_generate_with_static_cache", "test_custom_4d_attention_mask", "test_generate_from_inputs_embeds_",
    "test_inputs_embeds_matches_input_ids", "test_save_load", "test_torch_compile_for_training",
]  # fmt: skip
WEIGHTS_ASKED_FOR = "(dict_output or output_attentions)"  # these look at attention weights, which are never built
REPOSITORY = Path(__file__).parents[3]


def outcomes(model, selected, plugins, report):
    """The tests that passed and those that failed, by name."""
    found = dict(os.environ, HF_HUB_OFFLINE="1")
    paths = [CHECKOUT, str(REPOSITORY / "tests" / "support"), str(REPOSITORY), found.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugins, f"--junitxml={report}"]
    files = sorted(
        str(p.relative_to(CHECKOUT)) for p in Path(CHECKOUT, "tests/models", model).glob("test_modeling_*.py")
    )
    run = subprocess.run([*command, *files, "-k", selected], cwd=CHECKOUT, env=found, capture_output=True, text=True)
    assert report.exists(), run.stdout[-3000:] + run.stderr[-3000:]
    passed, failed = set(), {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, kinds = f"{case.get('classname')}.{case.get('name')}", {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed[name] = next(c.get("message", "") for c in case if c.tag in ("failure", "error"))
        elif "skipped" not in kinds:
            passed.add(name)
    return passed, failed


@pytest.mark.parametrize("model", MODELS)
def test_what_transformers_tests_of_a_model(model, tmp_path, capsys):
    selected = f"ModelTest and not {WEIGHTS_ASKED_FOR} and ({' or '.join(BEHAVIOURS)})"
    passed, failed = outcomes(model, selected, ["-p", "transformers_own_tests_plugin"], tmp_path / "ours.xml")
    if failed:
        again = " or ".join(sorted({name.rpartition(".")[2] for name in failed}))
        _, theirs = outcomes(model, f"ModelTest and ({again})", [], tmp_path / "theirs.xml")
        failed = {name: why for name, why in failed.items() if name not in theirs}
    with capsys.disabled():
        print(f" {model}: {len(passed)} passed, {len(failed)} failed with ours alone", end="")
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    assert len(passed) >= 10
