"""Causal attention in which the tokens of a block see each other, against a dense form in float64."""

import torch

import monoidreduce as mr
from monoidreduce.ops.attention import attention_in_blocks


def check_blocks(engine: str, rows: int = 37, cols: int = 45) -> None:
    """Two sequences: blocks across tiles and side by side, a window, documents, a cache that is not full, two heads."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.tensor([cols, cols - 6])
    places = lengths[:, None] - rows + torch.arange(rows)
    blocks = torch.full((2, cols), -1)
    blocks[0, 5:30], blocks[0, 30:33], blocks[1, 12:20] = 0, 1, 7
    documents = (torch.arange(cols) >= 10).long().expand(2, -1)
    of_rows = blocks.gather(1, places)
    of_rows = torch.where(of_rows < 0, -2, of_rows)
    pair = (documents.gather(1, places), documents)
    made = [torch.randn(2, heads, n, 8, generator=draw) for heads, n in ((2, rows), (1, cols), (1, cols))]
    ours = [t.requires_grad_() for t in made]
    options = dict(causal="lower_right", window=(20, None), documents=pair, lengths=lengths, enable_gqa=True)
    with mr.use(engine=engine):
        found = attention_in_blocks(*ours, blocks=(of_rows, blocks), **options)
        gradients = torch.autograd.grad(found.square().sum(), ours)

    q, k, v = exact = [t.detach().double().requires_grad_() for t in made]
    j = torch.arange(cols)
    i = places[:, :, None]
    seen = (j <= i) | (of_rows[:, :, None] == blocks[:, None])
    seen &= (j >= i - 20) & (j < lengths[:, None, None]) & (pair[0][:, :, None] == documents[:, None])
    scores = (q @ k.mT / 8**0.5).masked_fill(~seen[:, None], -torch.inf)
    expected = scores.softmax(-1) @ v
    assert (j > i)[seen].any() and not seen.all()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    torch.testing.assert_close([g.double() for g in gradients], list(wanted), atol=1e-5, rtol=1e-4)
