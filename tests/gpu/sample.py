"""A sample of kernels, small and ragged, forward and backward: what a checker of memory accesses is run on.

``compute-sanitizer --tool memcheck python -m tests.gpu.sample`` (or racecheck); ``test_sanitizer.py`` does it.
"""

import torch

from monoidreduce import ops


def layers(dtype):
    """Calls whose kernels differ in kind: conditions, few features, many features, lists, draws, splits."""
    make = lambda *shape: torch.randn(*shape, device="cuda").to(dtype).requires_grad_()
    q, k, v = (make(2, 133, 64) for _ in range(3))
    yield lambda: ops.attention(q, k, v, causal=True), (q, k, v)
    yield lambda: ops.attention(q, k[:, :77], v[:, :77], window=20, dropout_p=0.1, seed=1), (q, k, v)
    one = make(1, 1, 64)
    yield lambda: ops.attention(one, k[:1], v[:1]), (one, k, v)
    x, p, d = make(59, 32), make(111, 32), make(111, 48)
    yield lambda: ops.mlp(x, p, d), (x, p, d)
    target = torch.randint(0, 111, (59,), device="cuda")
    yield lambda: ops.linear_cross_entropy(x, p, target), (x, p)
    wide, head = make(65, 600), make(129, 600)
    yield lambda: ops.linear_cross_entropy(wide, head, torch.randint(0, 129, (65,), device="cuda")), (wide, head)
    a, b = make(100, 3), make(57, 3)
    yield lambda: ops.knn(a, b, 5).values, (a, b)
    yield lambda: ops.kernel_sum(a, b, make(57, 1), bandwidth=0.7), (a, b)


def main():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for call, given in layers(dtype):
            out = call()
            torch.autograd.grad(out.float().square().sum(), [t for t in given if t.requires_grad], allow_unused=True)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
