"""Tensor descriptors taken apart once for each address, as a launcher of Triton's takes them apart at every launch."""

from types import SimpleNamespace

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, Rendering, use_plan
from monoidreduce.engines.triton.launch import descriptors, driver

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BEFORE = (7, 1, 1, "stream", "function")


class Descriptor:
    def __init__(self, base, shape, strides):
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, [16, 64]


def wrapped(launcher, places, encoded):
    """A launcher as Triton 3.6 makes it: descriptors by their places, parts in the order of the arguments."""

    def inner(*args):
        final = list(args[: len(BEFORE)])
        for k, arg in enumerate(args[len(BEFORE) :]):
            if k in places:
                encoded.append(arg.base.data_ptr())
                final += [f"map of {arg.base.data_ptr()}", *arg.shape, *arg.strides]
            else:
                final.append(arg)
        return launcher(*final)

    return inner


COMPILED = ("{} " * 17).format  # a function that is not Python's own
ARGUMENTS = [None, Descriptor(None, [5, 512], [512, 1]), Descriptor(None, [5, 512], [512, 1]), None]


def test_what_a_compiled_function_is_given():
    encoded = []
    launch = wrapped(COMPILED, {1, 2}, encoded)
    start, found = descriptors.bypass_encoding(launch, BEFORE, ARGUMENTS)
    assert start is COMPILED and sorted(found) == [1, 2]
    at = lambda k, address: descriptors.make_descriptor_at(ARGUMENTS[k], address)
    for first, second in ((64, 128), (128, 64), (64, 64)):
        wanted = launch(*BEFORE, "out", at(1, first), at(2, second), 3)
        assert start(*BEFORE, "out", *found[1][first], *found[2][second], 3) == wanted
    assert found[1][64] == ("map of 64", 5, 512, 512, 1) and all(
        type(v) is not descriptors._Marked for v in found[1][64]
    )
    encoded.clear()
    assert found[1][64] and found[2][128] and not encoded, "encoded once for each address"


def test_so_many_addresses_are_kept(monkeypatch):
    monkeypatch.setattr(descriptors, "_MOST_ADDRESSES", 3)
    found = descriptors.EncodedByAddress(lambda address: (address,))
    assert [found[k] for k in (1, 2, 3, 4, 1)] == [(1,), (2,), (3,), (4,), (1,)] and len(found) <= 3


def test_launchers_of_another_make_are_given_descriptors():
    plain = lambda *given: None
    broken = wrapped(COMPILED, {1, 2}, None)
    for launch, arguments in ((plain, ARGUMENTS), (COMPILED, ARGUMENTS), (broken, ARGUMENTS), (broken, [None, None])):
        assert descriptors.bypass_encoding(launch, BEFORE, arguments) is None
    relauncher = SimpleNamespace(start=plain, grid=(1, 1, 1), inserted=())
    assert driver.Relauncher.open_descriptors(relauncher, ARGUMENTS) == (plain, {})


@mr.op
def best(x: mr.Row["d"], w: mr.Col["d"]):
    return mr.argmax(x @ w), mr.max(x @ w)


@mr.op
def loss(x: mr.Row["d"], w: mr.Col["d"], label: mr.Row):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == label, s, 0.0))


@mr.op
def draw(x: mr.Row["d"], w: mr.Col["d"], seed: int):
    return mr.sample(x @ w, seed)


def vectors(rows, cols, seed, batch=()):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(*batch, n, 264, generator=gen).half() / 4 for n in (rows, cols)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_wide_folds_are_launches_of_descriptors(by_address, batch, parts, monkeypatch):
    """By addresses: nothing of an earlier call's tensors is read."""
    made = []
    monkeypatch.setattr(
        descriptors,
        "replace_base",
        lambda template, v, real=descriptors.replace_base: made.append(v) or real(template, v),
    )
    with (
        mr.use(engine="triton"),
        use_plan({"cols": KernelPlan(16, 32, 4, 1, parts, rendering=Rendering.DESCRIPTORS)}),
        torch.no_grad(),
    ):
        for seed in range(3):
            x, w = vectors(9, 66, seed, batch)
            at, most = best(x, w)
            s = x.float() @ w.float().mT
            torch.testing.assert_close(s.gather(-1, at[..., None])[..., 0], s.amax(-1), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(most, s.amax(-1), rtol=1e-3, atol=1e-3)
            label = torch.arange(9).expand(*batch, 9).contiguous()
            wanted = torch.nn.functional.cross_entropy(s.flatten(0, -2), label.flatten(), reduction="none")
            torch.testing.assert_close(loss(x, w, label).flatten(), wanted, rtol=1e-3, atol=2e-3)
    assert by_address.count("fold_over_cols") == 6 and any(isinstance(v, descriptors.Address) for v in made)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_samples_are_launches(by_address, batch):
    """The numbers of batch elements are the same in every call, and held."""
    for seed in range(3):
        x, w = vectors(9, 66, seed, batch)
        with torch.no_grad():
            with (
                mr.use(engine="triton"),
                use_plan({"cols": KernelPlan(16, 32, 4, 1, 3, rendering=Rendering.DESCRIPTORS)}),
            ):
                found = draw(x, w, seed)
            with mr.use(engine="eager"):
                wanted = draw(x.float(), w.float(), seed)
        assert (found == wanted).float().mean() > 0.9, "the same noise, logits rounded otherwise"
    assert by_address == ["fold_over_cols"] * 3
