"""transformers' own tests with our attention: models get it where they would have had SDPA.

A pytest plugin, loaded with ``-p`` by ``tests/unit/integrations/test_transformers_own_tests.py`` in a process whose
tests are those of a checkout of transformers. Models that are made without a choice, or with "sdpa", are given ours
where they can be served; "eager" stays what it is, so that transformers' comparisons of the two become comparisons with
ours.
"""

from transformers import PreTrainedModel

from monoidreduce.integrations.transformers import NAME, register
from monoidreduce.integrations.transformers_dispatch import Dispatch, dispatch

choose = PreTrainedModel.get_correct_attn_implementation


def choose_ours(self, requested_attention, *args, **kwargs):
    if requested_attention in (None, "sdpa") and self._supports_sdpa and dispatch(type(self)) is Dispatch.SERVED:
        requested_attention = NAME
    return choose(self, requested_attention, *args, **kwargs)


def pytest_configure():
    register()
    PreTrainedModel.get_correct_attn_implementation = choose_ours
