"""The losses of ``examples/rl.py`` against TRL's own definitions and trainers: values and gradients."""

import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # it warns of its own definitions
from trl.experimental.gkd import GKDTrainer
from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from examples import rl
from examples.train_trl import make_model, make_trainer
from monoidreduce import ops

NEAR = dict(atol=1e-5, rtol=1e-4)


@pytest.fixture
def batch():
    """Hidden states of student and teacher, their heads, tokens, ids and a mask."""
    torch.manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, requires_grad=True)
    return dict(
        x=normal(3, 7, 12), w=normal(41, 12), teacher_x=torch.randn(3, 7, 9), teacher_w=torch.randn(41, 9),
        tokens=torch.randint(41, (3, 7)), ids=torch.randint(41, (3, 7, 4)), mask=torch.rand(3, 7) < 0.7,
    )  # fmt: skip


def check(ours, theirs, *inputs):
    """Equal values and equal gradients of all inputs."""
    assert_close(ours, theirs, **NEAR)
    assert_close(
        torch.autograd.grad(ours.sum(), inputs, retain_graph=True), torch.autograd.grad(theirs.sum(), inputs), **NEAR
    )


def test_log_probabilities_and_entropies_are_trls(batch):
    x, w, tokens, ids, mask = (batch[k] for k in ("x", "w", "tokens", "ids", "mask"))
    found = ops.linear_logprobs(x, w, tokens, ids=ids, mask=mask, temperature=0.7, return_entropy=True)
    logits = x @ w.T
    check(found.log_prob, selective_log_softmax(logits, tokens, temperature=0.7, row_mask=mask), x, w)
    logits = x @ w.T
    check(found.ids_log_probs, selective_log_softmax(logits / 0.7, ids) * mask.unsqueeze(-1), x, w)
    check(found.entropy, entropy_from_logits(x @ w.T / 0.7) * mask, x, w)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_distillation_is_that_of_gkd_and_of_the_chunked_kernel(beta, batch):
    x, w, tx, tw, mask = (batch[k] for k in ("x", "w", "teacher_x", "teacher_w", "mask"))
    ours = rl.distillation_loss(x, w, tx, tw, mask, beta=beta, temperature=1.3)
    labels = torch.where(mask, 1, -100)
    theirs = GKDTrainer.generalized_jsd_loss(x @ w.T, tx @ tw.T, labels, beta, 1.3, num_items_in_batch=mask.sum())
    rows = (x[mask], w, None, tx[mask], tw, None)
    check(ours, ChunkedDivergenceFunction.apply(*rows, float(beta), 1.3)[0].mean(), x, w)
    ours = rl.distillation_loss(x, w, tx, tw, mask, beta=beta, temperature=1.3)
    check(ours, theirs, x, w)


@pytest.mark.parametrize("reverse", [False, True])
def test_top_k_teachers_are_trls(reverse, batch):
    x, w, mask = (batch[k] for k in ("x", "w", "mask"))
    teacher = torch.log_softmax(batch["teacher_x"] @ batch["teacher_w"].T, -1)
    best, ids = teacher.topk(5)
    student = torch.log_softmax(x @ w.T, -1).gather(-1, ids)
    theirs = compute_divergence(add_tail_bucket(student), add_tail_bucket(best), float(reverse))[mask].mean()
    check(rl.top_k_distillation_loss(x, w, ids, best, mask, reverse), theirs, x, w)


def test_ppo_is_plain_torchs(batch):
    x, w, tokens, mask = (batch[k] for k in ("x", "w", "tokens", "mask"))
    advantages, old, values, returns = torch.randn(4, 3, 7)
    ours = rl.ppo_loss(x, w, tokens, mask, advantages, old - 3, values, returns)
    log_probs = selective_log_softmax(x @ w.T, tokens)
    ratio = (log_probs - (old - 3)).exp()
    policy = torch.max(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)[mask].mean()
    value, entropy = F.mse_loss(values[mask], returns[mask]), entropy_from_logits(x @ w.T)[mask].mean()
    check(ours, policy + 0.25 * value - 0.01 * entropy, x, w)


# Against whole trainers -----------------------------------------------------------------------------------------------


@pytest.fixture
def completions():
    """Prompts of 4 tokens and completions of 6, some of them shorter."""
    torch.manual_seed(1)
    mask = (torch.arange(6) < torch.tensor([[6], [4], [5], [2]])).long()
    return torch.randint(3, 20, (4, 4)), torch.randint(3, 20, (4, 6)), mask


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


def test_grpo_is_the_trainers(completions, tmp_path):
    prompts, tokens, mask = completions
    model = make_model(tmp_path / "model")
    trainer = make_trainer("grpo", model, str(tmp_path), loss_type="grpo", temperature=0.8)
    model.eval()  # one batch, nothing accumulated
    advantages, old = torch.randn(4), torch.randn(4, 6) / 10 - 4
    reference = torch.randn(4, 6) / 10 - 4
    inputs = dict(
        prompt_ids=prompts, prompt_mask=torch.ones_like(prompts), completion_ids=tokens, completion_mask=mask,
        advantages=advantages, old_per_token_logps=old, ref_per_token_logps=reference, num_items_in_batch=mask.sum(),
    )  # fmt: skip
    theirs = trainer._compute_loss(model, inputs)
    whole, seen = torch.cat([prompts, tokens], 1), torch.cat([torch.ones_like(prompts), mask], 1)
    hidden = model.model(whole, attention_mask=seen).last_hidden_state[:, 3:-1]
    given = (hidden, model.lm_head.weight, tokens, mask.bool(), advantages, old, reference)
    ours = rl.grpo_loss(*given, beta=0.1, temperature=0.8)
    assert_close(ours, theirs, **NEAR)
    assert_close(gradients(ours, model), gradients(theirs, model), **NEAR)


def test_dpo_is_the_trainers(completions, tmp_path):
    prompts, tokens, mask = completions
    model = make_model(tmp_path / "model")
    trainer = make_trainer("dpo", model, str(tmp_path))
    trainer.ref_model.eval()
    with torch.no_grad():  # a policy that has moved away from its reference
        model.lm_head.weight += torch.randn_like(model.lm_head.weight) / 10
    whole, seen = torch.cat([prompts, tokens], 1), torch.cat([torch.ones_like(prompts), mask], 1)
    counted = torch.cat([torch.zeros_like(prompts), mask], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = dict(input_ids=whole, attention_mask=seen, completion_mask=counted)
        theirs = trainer._compute_loss(model, inputs, return_outputs=False)
    state = lambda m: (m.model(whole, attention_mask=seen).last_hidden_state[:, 3:-1], m.lm_head.weight)
    with torch.no_grad():
        reference = ops.linear_logprobs(*state(trainer.ref_model), tokens, mask=mask.bool()).sum(-1)
    ours = rl.dpo_loss(*state(model), tokens, mask.bool(), reference)
    assert_close(ours, theirs, **NEAR)
    assert_close(gradients(ours, model), gradients(theirs, model), **NEAR)


def test_a_policy_learns_by_each_loss():
    found = rl.main(steps=3)
    assert found["GRPO, reward"][-1] > found["GRPO, reward"][0]
    assert all(values[-1] < values[0] for name, values in found.items() if name != "GRPO, reward")
