"""The fast forms of functions, in the interpreter, on all numbers of bfloat16 and float16."""

import pytest

from monoidreduce.program.primitives import PRIMITIVES
from tests.support import fast_functions

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_fast_forms_are_exact_to_a_quarter_of_the_rounding_of_16_bits():
    found = fast_functions.run("quick", "cpu")
    wrong = [text for name, got in found.items() if (text := fast_functions.check(name, got))]
    assert not wrong


def test_every_function_that_takes_more_than_plain_arithmetic_has_a_fast_form():
    named = {name for name, p in PRIMITIVES.items() if p.cost}
    assert {name for name in named if not PRIMITIVES[name].fast} == {"uniform"}  # Philox is integers
    assert {*fast_functions.EXACT, *fast_functions.OF_TWO, *fast_functions.UNMEASURED} == named - {"uniform"}
