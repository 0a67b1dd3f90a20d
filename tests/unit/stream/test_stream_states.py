"""States of streams: merged in any order and grouping, saved and resumed to the bit, never counting a column twice."""

import io
import itertools

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.stream import checksum


def make_search():
    @mr.op
    def search(x: mr.Row["d"], y: mr.Col["d"], label: mr.Row):
        s = x @ y
        top = mr.topk(s, 3)
        kept = mr.sum(mr.dropout(s, 0.3, 7))
        labelled = mr.sum(torch.where(mr.col_index == label, s, 0.0))
        return top.values, top.indices, mr.argmin(s), mr.sample(s, 5), kept, labelled, mr.mean(s), mr.logsumexp(s)

    return search


def problem(cols=80):
    gen = torch.Generator().manual_seed(3)
    x, y = torch.randn(5, 4, generator=gen), torch.randn(cols, 4, generator=gen)
    return x, y, torch.tensor([0, 21, 45, 59, 79])


def part(op, rows, y, start, stop):
    fold = op.stream(*rows).starting(start)
    fold.update(y[start:stop])
    return fold


def saved(fold):
    buffer = io.BytesIO()
    torch.save(fold.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def restored(op, rows, fold):
    return op.stream(*rows).load_state_dict(saved(fold))


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


PIECES = [(0, 20), (20, 33), (33, 40), (40, 80)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
@pytest.mark.parametrize("save", [False, True], ids=["live", "restored"])
def test_merging_in_any_order_is_the_whole(order, save):
    search, (x, y, label) = make_search(), problem()
    parts = [part(search, (x, label), y, *PIECES[k]) for k in order]
    if save:
        parts = [restored(search, (x, label), p) for p in parts]
    total = search.stream(x, label)
    for p in parts:
        total.merge(p)
    assert total.ranges == ((0, 80),) and (total.start, total.stop) == (0, 80)
    assert_same(total.result(), search(x, y, label))


def test_merging_in_any_grouping_is_the_whole():
    search, (x, y, label) = make_search(), problem()
    a, b, c, d = (part(search, (x, label), y, *piece) for piece in PIECES)
    assert_same(d.merge(b).merge(a.merge(c)).result(), search(x, y, label))


def test_columns_after_a_gap_are_numbered_after_the_last_and_a_gap_can_be_filled():
    search, (x, y, label) = make_search(), problem()
    fold = part(search, (x, label), y, 0, 20).merge(part(search, (x, label), y, 40, 60))
    assert fold.ranges == ((0, 20), (40, 60)) and fold.stop == 60
    fold.update(y[60:])
    assert fold.ranges == ((0, 20), (40, 80))
    gap = fold.result()
    present = torch.cat([torch.arange(20), torch.arange(40, 80)])
    top = (x @ y[present].T).topk(3)
    torch.testing.assert_close(gap[0], top.values)
    assert torch.equal(gap[1], present[top.indices])
    torch.testing.assert_close(gap[6], (x @ y[present].T).mean(1))
    fold.merge(part(search, (x, label), y, 20, 30))
    fold.starting(30).update(y[30:40])
    assert fold.ranges == ((0, 80),)
    assert_same(fold.result(), search(x, y, label))


def test_a_column_is_never_folded_twice():
    @mr.op
    def total(x: mr.Row["d"], y: mr.Col["d"]):  # asks for no index: only the ranges tell
        return mr.sum(x @ y)

    x, y, _ = problem()
    fold = part(total, (x,), y, 0, 20).merge(part(total, (x,), y, 40, 60))
    before = fold.result()
    for start, stop, shared in ((0, 20, "0 to 20"), (19, 25, "19 to 20"), (30, 41, "40 to 41"), (45, 50, "45 to 50")):
        with pytest.raises(mr.StreamError, match=f"0 to 20, 40 to 60 and {start} to {stop} share numbers {shared}"):
            fold.merge(part(total, (x,), y, start, stop))
        with pytest.raises(mr.StreamError, match="share numbers"):
            fold.starting(start).update(y[start:stop])
    with pytest.raises(mr.StreamError, match="share numbers"):
        fold.merge(fold)
    assert fold.ranges == ((0, 20), (40, 60)) and torch.equal(fold.result(), before)


def test_a_loaded_stream_answers_at_once_and_goes_on_to_the_bit():
    search, (x, y, label) = make_search(), problem()
    straight = search.stream(x, label)
    for at in range(0, 80, 16):
        straight.update(y[at : at + 16])
        resumed = make_search().stream(x, label).load_state_dict(saved(straight))
        assert resumed.ranges == straight.ranges
        for a, b in zip(resumed.result(), straight.result(), strict=True):
            assert torch.equal(a, b)
        for rest in range(at + 16, 80, 16):
            resumed.update(y[rest : rest + 16])
    last = resumed.result()
    for a, b in zip(last, straight.result(), strict=True):
        assert torch.equal(a, b)


def test_a_stream_with_gaps_is_saved_with_them():
    search, (x, y, label) = make_search(), problem()
    fold = part(search, (x, label), y, 0, 20).merge(part(search, (x, label), y, 40, 60))
    again = restored(search, (x, label), fold)
    assert again.ranges == ((0, 20), (40, 60)) and again.stop == 60
    with pytest.raises(mr.StreamError, match="40 to 60"):
        again.merge(part(search, (x, label), y, 50, 55))
    again.merge(part(search, (x, label), y, 20, 40))
    again.update(y[60:])
    assert_same(again.result(), search(x, y, label))


def test_a_stream_without_columns_is_saved_and_resumed():
    search, (x, y, label) = make_search(), problem()
    fold = restored(search, (x, label), search.stream(x, label).starting(40))
    fold.update(y[40:])
    assert fold.ranges == ((40, 80),)
    with pytest.raises(mr.StreamError, match="no columns"):
        restored(search, (x, label), search.stream(x, label)).result()


def test_optional_columns_and_pairs_are_resumed():
    @mr.op
    def scores(x: mr.Row["d"], y: mr.Col["d"], v: mr.Col["e"], seen: mr.Pair, bias: mr.Col | None = None):
        return mr.softmax_mean(torch.where(seen, x @ y, -torch.inf), v)

    gen = torch.Generator().manual_seed(1)
    x, y, v = (torch.randn(2, n, d, generator=gen) for n, d in ((3, 4), (9, 4), (9, 2)))
    seen = torch.rand(3, 9, generator=gen) > 0.3
    fold = scores.stream(x)
    fold.update(y[:, :5], v[:, :5], seen[:, :5])
    again = scores.stream(x).load_state_dict(saved(fold))
    assert torch.equal(again.result(), fold.result())
    again.update(y[:, 5:], v[:, 5:], seen[:, 5:])
    torch.testing.assert_close(again.result(), scores(x, y, v, seen))


def test_other_rows_are_refused():
    @mr.op
    def scaled(x: mr.Row["d"], y: mr.Col["d"], scale: float):
        return mr.sum(torch.tanh(x @ y * scale))

    x, y, _ = problem()
    fold = scaled.stream(x, scale=2)
    fold.update(y)
    state = saved(fold)
    torch.testing.assert_close(scaled.stream(x.clone(), scale=2.0).load_state_dict(state).result(), scaled(x, y, 2.0))
    moved = x.clone()
    moved[3, 1] += 1e-6
    for rows, scale, name in ((moved, 2.0, "x"), (x.flip(0), 2.0, "x"), (x, 2.5, "scale"), (moved, 3.0, "scale, x")):
        with pytest.raises(mr.StreamError, match=f"other values of {name}"):
            scaled.stream(rows, scale=scale).load_state_dict(state)
        with pytest.raises(mr.StreamError, match=f"other values of {name}"):
            other = scaled.stream(rows, scale=scale).starting(80)
            other.update(y)
            fold.merge(other)
    assert torch.equal(fold.result(), scaled.stream(x, scale=2.0).load_state_dict(state).result())


def test_what_does_not_belong_together_is_refused_and_changes_nothing():
    search, (x, y, label) = make_search(), problem()

    @mr.op
    def other(x: mr.Row["d"], y: mr.Col["d"], label: mr.Row):
        return mr.sum(x @ y * label)

    fold = part(search, (x, label), y, 0, 20)
    fresh = other.stream(x, label)
    with pytest.raises(mr.StreamError, match="do not fit"):
        fresh.merge(fold)
    with pytest.raises(mr.StreamError, match="do not fit"):
        fresh.load_state_dict(saved(fold))
    fresh.update(y)
    torch.testing.assert_close(fresh.result(), other(x, y, label))
    incomplete = {k: v for k, v in saved(fold).items() if k != "ranges"}
    with pytest.raises(mr.StreamError, match="lacks ranges"):
        search.stream(x, label).load_state_dict(incomplete)
    for at in (-1, 2.5, True, "0"):
        with pytest.raises(mr.ArgumentError, match="whole number"):
            search.stream(x, label).starting(at)
    with pytest.raises(mr.ArgumentError, match="merge was given"):
        fold.merge(y)


DAMAGE = {
    "ranges of three": lambda s: s.update(ranges=[[0, 5, 6]]),
    "ranges that are words": lambda s: s.update(ranges=[["a", "b"]]),
    "ranges backwards": lambda s: s.update(ranges=[[20, 0]]),
    "no states": lambda s: s.update(states=None),
    "no columns": lambda s: s.update(columns=None),
    "before the first": lambda s: s.update(stop=-1),
    "a state less": lambda s: s["states"].pop(),
    "a field less": lambda s: s["states"][0].pop(),
    "a list": lambda s: s["states"].__setitem__(0, [[1.0]]),
    "fewer rows": lambda s: s["states"].__setitem__(0, [t[..., :2] for t in s["states"][0]]),
    "another type": lambda s: s["states"].__setitem__(0, [t.half() for t in s["states"][0]]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_state_is_refused(damage):
    search, (x, y, label) = make_search(), problem()
    state = saved(part(search, (x, label), y, 0, 20))
    damage(state)
    with pytest.raises(mr.StreamError, match="the state is damaged"):
        search.stream(x, label).load_state_dict(state)


# Sources that change between two readings ----------------------------------------------------------------------


class Changing:
    """A source whose later readings are ``later``; ``at``: from which reading on."""

    def __init__(self, first, later, at=1):
        self.first, self.later, self.at, self.readings = first, later, at, 0

    def __iter__(self):
        self.readings += 1
        return iter(self.later if self.readings > self.at else self.first)


def make_two_passes():
    @mr.op
    def spread(x: mr.Row["d"], y: mr.Col["d"]):
        s = x @ y
        z = mr.logsumexp(s)
        return mr.sum(torch.exp(s - z) * s)

    return spread


def make_sum():
    @mr.op
    def total(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.sum(torch.tanh(x @ y))

    return total


def changed(y):
    """What a second reading may give instead of ``y`` in chunks of 30, and what the error says of it."""
    chunks = list(y.split(30))
    other = [c.clone() for c in chunks]
    other[1][3, 2] += 1e-4
    swapped = [c.clone() for c in chunks]
    swapped[2] = swapped[2].flip(0)
    return chunks, {
        "shorter": (chunks[:2], "gave 80 columns in 3 chunks .* 60 columns in 2 chunks"),
        "nothing": ([], "gave 80 columns .* 0 columns in 0 chunks"),
        "longer": ([*chunks, chunks[0]], r"now chunk 3 \(from column 80\) as well"),
        "shorter chunk": ([chunks[0][:-1], *chunks[1:]], "chunk 0 .* it had 30 columns, and has 29"),
        "other values": (other, r"chunk 1 \(columns 30 to 60\) .* values differ"),
        "another order": (swapped, r"chunk 2 \(columns 60 to 80\) .* values differ"),
        "another type": ([c.long() for c in chunks], "do not fit"),
    }


@pytest.mark.parametrize("how", list(changed(torch.zeros(80, 4))[1]))
@pytest.mark.parametrize("reads", ["gradient", "two passes"])
def test_a_source_that_changes_is_refused(how, reads):
    x, y, _ = problem()
    chunks, ways = changed(y)
    later, message = ways[how]
    source = Changing(chunks, later)
    with pytest.raises(mr.StreamError, match=message) as raised:
        if reads == "gradient":
            x.requires_grad_()
            make_sum().stream(x).over(source).sum().backward()
        else:
            make_two_passes().stream(x).over(source)
    assert "do not fit" in str(raised.value) or "Changing" in str(raised.value)
    assert x.grad is None


def test_a_changed_chunk_gets_no_gradient_of_another():
    x, y, _ = problem()
    chunks, ways = changed(y)
    given = []
    found = (
        make_sum().stream(x).over(Changing(chunks, ways["other values"][0]), gradients=lambda at, g: given.append(at))
    )
    with pytest.raises(mr.StreamError, match="chunk 1"):
        found.sum().backward()
    assert given == [0]


def test_the_length_is_compared_even_without_checksums():
    x, y, _ = problem()
    chunks, ways = changed(y)
    for how in ("shorter", "nothing", "longer", "shorter chunk"):
        with pytest.raises(mr.StreamError, match="gave 80 columns"):
            make_two_passes().stream(x).over(Changing(chunks, ways[how][0]), verify=False)
    make_two_passes().stream(x).over(Changing(chunks, ways["other values"][0]), verify=False)
    other = make_two_passes().stream(x).over(Changing(chunks, list(y.split(17))), verify=False)  # other cuts, same sum
    torch.testing.assert_close(other, make_two_passes()(x, y))


def test_every_backward_is_compared_and_equal_ones_pass():
    x, y, _ = problem()
    x.requires_grad_()
    chunks, ways = changed(y)
    found = make_sum().stream(x).over(Changing(chunks, ways["other values"][0], at=2)).sum()
    found.backward(retain_graph=True)
    torch.testing.assert_close(x.grad, torch.autograd.grad(make_sum()(x, y).sum(), x)[0])
    with pytest.raises(mr.StreamError, match="chunk 1"):
        found.backward()


def test_a_source_that_is_read_once_is_not_summed(monkeypatch):
    from monoidreduce.engines import stream

    def never(t):
        raise AssertionError("a checksum nobody needs")

    monkeypatch.setattr(stream, "checksum", never)
    x, y, _ = problem()
    torch.testing.assert_close(make_sum().stream(x).over(mr.chunks(y, size=30)), make_sum()(x, y))


def test_checksums_are_of_the_bits_wherever_they_lie():
    gen = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool):
        for n in (0, 1, 7, 1023, 5001):
            t = (torch.rand(n, generator=gen) * 3).floor().to(dtype)
            room = torch.zeros(n + 3, dtype=dtype)
            room[3:] = t  # not aligned to eight bytes
            assert checksum(t) == checksum(room[3:]) == checksum(t.view(1, -1).mT)
            if n > 1000:
                assert len({int(checksum(v)) for v in (t, t.flip(0), torch.cat([t[1:], t[:1]]), t[:-1])}) == 4
