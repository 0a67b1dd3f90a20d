"""The examples do what they claim, in small: each is run once, with sizes of its own, and draws its figure."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from matplotlib.image import imread

from examples import clip, distill, gpt, invented, ray_neighbours, tabular, transport
from examples.shared import peak_mb
from tests.support import ROOT


def drawn(out: Path, name: str) -> bool:
    """Whether the figure is there and shows something: more than one colour."""
    image = imread(out / f"{name}.png")
    return image.shape[0] > 200 and image.shape[1] > 400 and float(image.std()) > 0.01


def test_gpt_has_the_same_curve_in_less_memory(tmp_path):
    r = gpt.main(steps=15, batch=2, context=192, width=32, heads=4, layers=1, length=3, out=tmp_path)
    torch.testing.assert_close(torch.tensor(r.ours), torch.tensor(r.naive), rtol=0, atol=1e-4)
    assert r.ours[-1] < 0.9 * r.ours[0]
    assert r.ours_mb < r.naive_mb
    assert r.written.startswith("Shall I compare") and len(r.written.encode()) >= len("Shall I compare") + 3
    assert drawn(tmp_path, "gpt")


def test_the_text_is_plain():
    text = gpt.TEXT.read_bytes()
    assert len(text) > 15_000 and text.isascii() and b"\r" not in text
    assert all(len(sonnet.splitlines()) == 14 for sonnet in text.decode().strip().split("\n\n"))


def test_clip_trains_on_a_batch_that_plain_torch_cannot_hold(tmp_path):
    r = clip.main(batch=2048, smallest=512, steps=3, budget=32.0, out=tmp_path)
    assert r.sizes == [512, 1024, 2048]
    assert r.ours_mb[-1] <= r.budget_mb < r.naive_mb[-1]
    assert 0 < r.naive_batch < 2048
    assert r.losses[-1] < r.losses[0] - 0.5 and r.found_after > r.found_before
    assert drawn(tmp_path, "clip")


def test_the_contrastive_losses_are_the_same(seed):
    x, y, scale = (t.requires_grad_() for t in (torch.randn(59, 8), torch.randn(59, 8), torch.tensor(7.0)))
    losses = clip.naive_loss(x, y, scale), clip.our_loss(x, y, scale)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, (x, y, scale)) for loss in losses), rtol=1e-4, atol=1e-6)


def test_a_distilled_student_comes_nearer_to_its_teacher(tmp_path):
    r = distill.main(classes=2048, batch=300, steps=13, out=tmp_path)
    assert r.from_teacher[0] == r.from_labels[0]
    assert r.from_teacher[-1] < r.from_labels[-1] < r.from_labels[0] * 1.05
    assert r.from_teacher[-1] < 0.9 * r.from_teacher[0]
    assert r.ours_mb < r.naive_mb
    assert drawn(tmp_path, "distill")


def test_the_divergences_are_the_same(seed):
    heads = torch.randn(59, 8), torch.randn(111, 8), torch.randn(59, 5), torch.randn(111, 5)
    torch.testing.assert_close(distill.naive_kl(*heads), distill.ops.linear_kl(*heads))


def test_transport_keeps_the_masses(tmp_path):
    r = transport.main(points=150, eps=0.1, iterations=200, out=tmp_path)
    assert r.row_error < 1e-4 and r.col_error < 1e-4
    assert r.moved.shape == r.points.shape == (150, 2)
    way = (r.moved - r.points).square().sum(-1).mean().item()
    assert 0 < way < r.cost  # going to the mean of one's destinations is shorter than going to them
    assert drawn(tmp_path, "transport")


def test_tabular_losses_find_the_coefficients(tmp_path):
    results = tabular.main(rows=700, columns=4, steps=8, out=tmp_path)
    for r in results.values():
        assert r.losses[-1] < 0.95 * r.losses[0]
        assert F.cosine_similarity(r.found, r.true, dim=0) > 0.98
        assert r.in_order > 0.75
        assert r.ours_mb < r.naive_mb
        assert r.gradient_error < 1e-5
    assert drawn(tmp_path, "tabular")


def test_concordance_counts_comparable_pairs():
    score, worth = torch.tensor([3.0, 2.0, 1.0, 0.0]), torch.tensor([4.0, 1.0, 2.0, 2.0])
    known = torch.tensor([True, True, False, True])
    right, pairs = tabular.concordance(score, worth, known, score, worth)
    assert (right.tolist(), pairs.tolist()) == ([3, 0, 0, 0], [3, 0, 0, 1])


def test_the_invented_attention_beats_the_plain_one(tmp_path):
    r = invented.main(steps=35, batch=16, length=32, out=tmp_path)
    assert r.ours.losses[-1] < 0.2 * r.ours.losses[0]
    assert all(right > 0.9 for right in r.ours.right.values())
    assert r.ours.right[128] > r.plain.right[128] + 0.2  # on streams of the length trained on, both do well
    assert (r.strengths > 0).all()
    assert drawn(tmp_path, "invented")


def test_the_invented_attention_is_what_it_says(seed):
    q, k, v, power, rate = *(torch.randn(2, 3, 17, 4) for _ in range(3)), torch.rand(3), torch.rand(3)
    distance = torch.arange(17)[:, None] - torch.arange(17)
    penalty = power[:, None, None] * distance.abs().log1p() + rate[:, None, None] * distance
    s = (q @ k.mT - penalty).masked_fill(distance <= 0, -torch.inf)
    expected = s[..., 1:, :].softmax(-1) @ v
    found = invented.forgetting_attention(q, k, v, power, rate)
    torch.testing.assert_close(found[..., 1:, :], expected)
    assert torch.equal(found[..., 0, :], torch.zeros(2, 3, 4))  # nothing came before


def test_a_stream_asks_for_the_last_value(seed):
    keys, values, asked = invented.stream(3, 40)
    for b in range(3):
        for t in range(40):
            before = (keys[b, :t] == keys[b, t]).nonzero()
            assert asked[b, t] == (values[b, before[-1, 0]] if len(before) else -100)


@pytest.mark.slow
def test_jobs_on_ray_find_neighbours_copies_and_densities():
    pytest.importorskip("ray")
    r = ray_neighbours.main(points=600, features=8, files=3, k=4, workers=1)
    assert r.neighbours.shape == (600, 4) and torch.equal(~r.kept, r.copies)
    made = r.copies.nonzero()[:, 0]
    assert torch.equal(r.neighbours[made, 0], made - 9)
    assert r.log_density.shape == (600,) and bool((r.log_density > 0).all())  # each point is at distance 0 of itself


def test_peak_memory_is_counted():
    w = torch.zeros(1000, requires_grad=True)
    assert peak_mb(lambda: (w * 2).sum(), [w]) == pytest.approx(0.004, abs=0.0041)
    assert peak_mb(lambda: (w[:, None] * w).sum(), [w]) >= 4.0


def test_an_example_is_a_command(tmp_path):
    arguments = ["--points", "40", "--iterations", "5", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "examples.transport", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "marginals off by" in done.stdout and drawn(tmp_path, "transport")
