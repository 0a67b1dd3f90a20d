"""The fast forms of functions with the GPU's approximate instructions, on all numbers of bfloat16 and float16."""

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support import fast_functions


@pytest.mark.parametrize("form", ["quick", "native"])
def test_fast_forms_are_exact_to_a_quarter_of_the_rounding_of_16_bits(form):
    found = fast_functions.run(form, "cuda")
    assert not [text for name, got in found.items() if (text := fast_functions.check(name, got))]
