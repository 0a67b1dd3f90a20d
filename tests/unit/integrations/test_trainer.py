"""Hugging Face's Trainer and PEFT with our attention and our loss: the scripts of ``examples/``, in small."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from examples import train_peft, train_trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

SMALL = dict(batch=2, context=24, width=32, layers=1)


def test_the_trainer_takes_the_same_steps_and_evaluates_with_logits(monkeypatch):
    ours = train_trainer.main(steps=3, **SMALL)
    make = train_trainer.make_model
    with monkeypatch.context() as patch:
        patch.setattr(train_trainer, "fuse_loss", lambda model: model)
        patch.setattr(train_trainer, "make_model", lambda *sizes: make(*sizes, attention="eager"))
        plain = train_trainer.main(steps=3, **SMALL)
    assert plain.losses == pytest.approx(ours.losses, abs=2e-4) and len(ours.losses) == 3
    for key in ("eval_loss", "eval_accuracy"):
        assert ours.evaluation[key] == pytest.approx(plain.evaluation[key], abs=1e-3)
    for a, b in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-2)


def test_a_run_that_is_stopped_and_resumed_is_the_same_run(tmp_path):
    """Bit for bit: weights at the end, and every loss after the stop."""
    whole = train_trainer.main(steps=4, **SMALL, out=str(tmp_path / "whole"))
    resumed = train_trainer.main(
        steps=4, **SMALL, out=str(tmp_path / "resumed"), resume=str(tmp_path / "whole" / "checkpoint-2")
    )
    assert resumed.losses == whole.losses
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_adapters_learn_in_less_memory():
    found = train_peft.main(steps=4, batch=4, context=64, width=32, layers=1, rank=4)
    assert found.losses[-1] < found.losses[0] and found.trained < 0.15
    assert found.ours_mb < found.own_mb
