"""Causal attention in which the tokens of a block see each other, by kernels."""

from tests.support.block_attention_cases import check_blocks


def test_blocks_by_kernels():
    check_blocks("triton")
