"""Plain tensors beside DTensors, replicated ones beside sharded ones, meshes of two dimensions and parts of them."""

import pytest

TASKS = "tests.support.mixed_tensor_tasks:"


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_mix_with_one_meaning_is_the_call_of_one_process(pool, ranks):
    """Values; and gradients, each of the kind and the placement of its argument."""
    for answers in pool.run(TASKS + "mixes", 8, ranks)[:ranks]:
        assert set(answers.values()) == {"same"}, answers


def test_classes_stay_where_they_lie(pool):
    """Neither the weight nor logits are sent or held, only rows and their gradients."""
    for found in pool.run(TASKS + "bytes_of_mixes", 4, 4096, 64):
        assert found["largest"] <= found["shard"], found
        assert found["sent"] < 6 * found["rows"], found  # 1.5 times for their gradient; per row three numbers, headers


def test_heads_in_torchs_tensor_parallelism(pool):
    for world in (2, 4):
        for answers in pool.run(TASKS + "parallel_heads", world):
            assert set(answers.values()) == {"same"}, answers


@pytest.mark.slow
def test_mixes_inside_torch_compile(pool):
    assert pool.run(TASKS + "compiled_mixes", 2) == ["same"] * 2


OTHERWISE = {"a label on all": "LabelError", "features": "ShapeError", "zigzag": "ArgumentError"}


@pytest.mark.parametrize("world", [2, 4])
def test_what_has_no_single_meaning_is_one_error_on_every_rank(pool, world):
    answers = pool.run(TASKS + "mixed_faults", world)
    for found in answers:
        for fault, (kind, text, works) in found.items():
            assert kind == OTHERWISE.get(fault, "ShardError"), (fault, kind, text)
            assert works, f"after {fault} the group no longer works"
    texts = answers[0]["own rows"][1], answers[0]["a DTensor on one"][1]
    assert "x is a plain tensor that differs" in texts[0] and "mr.shard(rows=" in texts[0]
    assert f"rank {world - 1} has target as a DTensor" in texts[1]
