"""The recipes of the page on clouds of points, beside their dense twins and GeomLoss."""

import math

import pytest
import torch

from tests.support.doc_pages import DOCS, run


@pytest.fixture(scope="module")
def page():
    return run(DOCS / "points.md")


def gaussian(x, y, bandwidth):
    return torch.exp(-(x[:, None] - y).square().sum(-1) / (2 * bandwidth**2))


def draw(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_kernel_ridge_is_the_dense_one(page):
    x, y, new = draw(70, 2).requires_grad_(), draw(70, 3, seed=1), draw(9, 2, seed=2)
    bandwidth = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    own = page["predict"](x, page["kernel_ridge"](x, y, bandwidth, 0.05), new, bandwidth)
    weights = torch.linalg.solve(gaussian(x, x, bandwidth) + 0.05 * torch.eye(70), y)
    dense = gaussian(new, x, bandwidth) @ weights
    torch.testing.assert_close(own, dense)
    for a, b in zip(*(torch.autograd.grad(f.square().sum(), (x, bandwidth)) for f in (own, dense)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_the_gaussian_process_has_the_dense_likelihood_and_gradient(page):
    process, x, y = page["GaussianProcess"](), draw(50, 2), draw(50, seed=1)
    own = process.loss(x, y, probes=200)
    scale, height, noise = process.logs.exp()
    K = height * gaussian(x, x, scale) + noise * torch.eye(50)
    dense = -torch.distributions.MultivariateNormal(torch.zeros(50).double(), K).log_prob(y) / 50
    assert abs(own - dense) < 0.02
    (by_own,), (by_dense,) = (torch.autograd.grad(f, process.parameters()) for f in (own, dense))
    torch.testing.assert_close(by_own, by_dense, rtol=0.1, atol=0.02)
    weights = torch.linalg.solve(K, y)
    torch.testing.assert_close(process.mean(x, y, x[:5]), height * gaussian(x[:5], x, scale) @ weights)


def dense_divergence(x, y, eps, iterations=400):
    """Sinkhorn's iterations on matrices of costs, in plain torch."""

    def transport(x, y):
        cost = (x[:, None] - y).square().sum(-1) / 2
        f, g, log_a, log_b = x.new_zeros(len(x)), y.new_zeros(len(y)), -math.log(len(x)), -math.log(len(y))
        for _ in range(iterations):
            f = -eps * torch.logsumexp(log_b + (g - cost) / eps, 1)
            g = -eps * torch.logsumexp(log_a + (f[:, None] - cost) / eps, 0)
        return f.mean() + g.mean()

    return transport(x, y) - (transport(x, x) + transport(y, y)) / 2


def test_the_divergence_is_that_of_a_dense_loop_and_of_geomloss(page):
    geomloss = pytest.importorskip("geomloss")
    x, y = draw(40, 2).requires_grad_(), draw(50, 2, seed=1) + 0.3
    own = page["sinkhorn_divergence"](x, y, blur=0.3)
    dense = dense_divergence(x, y, 0.09)
    theirs = geomloss.SamplesLoss("sinkhorn", p=2, blur=0.3, scaling=0.99, backend="tensorized")(x, y)
    torch.testing.assert_close(own, dense, rtol=1e-7, atol=0)
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=0)
    (by_own,), (by_dense,), (by_theirs,) = (torch.autograd.grad(f, x) for f in (own, dense, theirs))
    torch.testing.assert_close(by_own, by_dense, rtol=1e-5, atol=1e-8)
    assert (by_own - by_theirs).norm() < 2e-3 * by_theirs.norm()
