"""The benchmark of vocabulary heads measures what it says: every contender on a CPU gives float64's numbers."""

import pytest

from benchmarks import heads

SIZES = heads.Sizes(tokens=24, features=8, classes=40, ids=3, rank=2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("work", heads.WORKS, ids=lambda work: work.name)
def test_contenders_agree(work, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK", 10)  # the last chunk is shorter
    rows = []
    heads.measure(work, SIZES, heads.draw(SIZES, cuda=False), cuda=False, show=rows.append)
    assert [row["who"] for row in rows] == ["ours", "torch", "torch in chunks"]
    for row in rows:
        assert "problem" not in row and len(row["errors"]) == len(work.asked) + len(work.trained)
        assert max(row["errors"]) < 1e-5 and row["ms"] > 0, row
    assert "| ours |" in heads.markdown({"environment": {"date": "today"}, "rows": rows})
