"""What a fresh installation must do, on its own: run by ``check.py`` outside the repository, with the wheel only.

Imports nothing of the tests. ``--triton`` says that Triton must be there, ``--no-triton`` that it must not.
"""

import importlib.util
import subprocess
import sys
import warnings
from importlib.metadata import requires, version
from pathlib import Path

import torch

import monoidreduce as mr
from monoidreduce import Col, Row, nn, ops


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"], window: int):
    near = (mr.row_index - mr.col_index).abs() <= window
    return mr.softmax_mean(torch.where(near, q @ k, -torch.inf), v)


def layers() -> None:
    """Values and gradients of an op, a ready-made layer and a module, against plain torch."""
    q, k, v = (torch.randn(33, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    far = (torch.arange(33)[:, None] - torch.arange(33)).abs() > 5
    dense = torch.softmax((q @ k.T).masked_fill(far, -torch.inf), -1) @ v
    ours = attention(q, k, v, 5)
    torch.testing.assert_close(ours, dense)
    torch.testing.assert_close(
        torch.autograd.grad(ours.square().sum(), (q, k, v)), torch.autograd.grad(dense.square().sum(), (q, k, v))
    )
    x, w, t = torch.randn(20, 8), torch.randn(50, 8), torch.randint(0, 50, (20,))
    torch.testing.assert_close(ops.linear_cross_entropy(x, w, t), torch.nn.functional.cross_entropy(x @ w.T, t))
    assert nn.MLP(8, 64)(x).shape == (20, 8)
    mr.laws.check(mr.monoids.LogWSum)


def mistakes() -> None:
    try:
        attention(torch.zeros(3, 4), torch.zeros(5, 2), torch.zeros(5, 2), 1)
    except mr.ShapeError as error:
        assert "features" in str(error)
    else:
        raise AssertionError("a wrong shape was taken")


def package(wanted: bool) -> None:
    """What was installed: from a wheel, typed, with its command, with or without Triton."""
    here = Path(mr.__file__)
    assert "site-packages" in here.parts, here
    assert (here.parent / "py.typed").is_file()
    assert not importlib.util.find_spec("tests") and not importlib.util.find_spec("benchmarks")
    assert version("monoidreduce") == mr.__version__
    assert (importlib.util.find_spec("triton") is not None) == wanted
    needs = {r.split(">")[0].strip() for r in requires("monoidreduce") or () if "extra ==" not in r}
    assert needs == {"torch", "numpy"}, needs
    said = subprocess.run([sys.executable, "-m", "monoidreduce", "--version"], capture_output=True, text=True)
    assert said.stdout.strip() == f"monoidreduce {mr.__version__}", said
    said = subprocess.run([sys.executable, "-m", "monoidreduce", "demo"], capture_output=True, text=True)
    assert 'pip install "monoidreduce[cli]"' in said.stderr, said  # the command line is an extra


def triton_engine() -> None:
    """A kernel is generated, and run by Triton's interpreter."""
    args = [torch.randn(20, 16) for _ in range(3)]
    with mr.use(engine="triton", strict=True):
        torch.testing.assert_close(attention(*args, 5), _eager(args), rtol=1e-4, atol=1e-4)


def no_triton() -> None:
    """Asked for kernels, the eager engine runs, with a warning that says why; ``strict`` makes it an error."""
    args = [torch.randn(20, 16) for _ in range(3)]
    with warnings.catch_warnings(record=True) as told, mr.use(engine="triton"):
        warnings.simplefilter("always")
        torch.testing.assert_close(attention(*args, 5), _eager(args))
    assert [str(w.message) for w in told if w.category is mr.FallbackWarning and "not installed" in str(w.message)]
    try:
        with mr.use(engine="triton", strict=True):
            attention(*args, 5)
    except mr.EngineError as error:
        assert "Triton is not installed" in str(error)
    else:
        raise AssertionError("the Triton engine ran without Triton")


def _eager(args: list) -> torch.Tensor:
    with mr.use(engine="eager"):
        return attention(*args, 5)


if __name__ == "__main__":
    wanted = "--triton" in sys.argv
    layers()
    mistakes()
    package(wanted)
    (triton_engine if wanted else no_triton)()
    print(f"monoidreduce {mr.__version__} works, {'with' if wanted else 'without'} Triton")
