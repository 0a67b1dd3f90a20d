"""The drop-in for Megatron-core's vocabulary-parallel cross-entropy, against its own function."""

import pytest


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_and_gradients_are_megatrons(peers, ranks):
    for found in peers.run("tests.support.megatron_tasks:beside_megatron", 4, ranks):
        assert set(found.values()) == {"same"}, found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_gpt_model_learns_the_same(peers, ranks):
    for found in peers.run("tests.support.megatron_tasks:gpt_models", 4, ranks):
        assert set(found.values()) == {"same"}, found
