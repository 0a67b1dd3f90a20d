"""How much memory the host has left, by what the system says of it."""

import pytest

from monoidreduce.plan import budget
from tests.support import internals

GB = 2**30


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Writes what a system of 16 GB says, in kilobytes; returns the folder."""
    yield lambda available, groups="": _write_host(tmp_path, monkeypatch, available, groups)
    monkeypatch.undo()
    budget._find_groups.cache_clear()


def _write_host(folder, monkeypatch, available, groups):
    (folder / "meminfo").write_text(
        f"MemTotal: {16 * GB // 1024} kB\nMemFree: 1000 kB\nMemAvailable: {int(available * GB) // 1024} kB\n"
    )
    (folder / "cgroup").write_text(groups)
    internals.pretend_host(monkeypatch, folder)
    return folder


def _write_group(folder, names, limit, used, cached):
    folder.mkdir(parents=True)
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{'total_' if 'limit' in names[0] else ''}inactive_file {cached}\n")


def test_memory_that_holds_copies_of_files_is_available(host):
    host(available=14)
    assert budget.available_bytes() == 14 * GB


def test_answers_come_in_eighths_of_all_memory(host):
    host(available=13.9)
    assert budget.available_bytes() == 12 * GB
    host(available=12.1)
    assert budget.available_bytes() == 12 * GB


def test_the_last_eighth_is_told_as_it_is(host):
    host(available=0.5)
    assert budget.available_bytes() == GB // 2


def test_a_container_has_what_its_limit_leaves(host):
    folder = host(available=14, groups="0::/pod\n")
    _write_group(folder / "groups" / "pod", ("memory.max", "memory.current"), 8 * GB, 5 * GB, GB)
    assert budget.available_bytes() == 4 * GB


def test_a_group_whose_path_is_the_host_s_is_the_root_inside_the_container(host):
    folder = host(available=14, groups="4:memory:/docker/0123\n1:cpu:/\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    _write_group(folder / "groups" / "memory", names, 4 * GB, 3 * GB, 0)
    assert budget.available_bytes() == GB


@pytest.mark.parametrize("limit", ["max", 2**63 - 4096])
def test_a_group_without_a_limit_says_nothing(host, limit):
    folder = host(available=14, groups="0::/\n")
    _write_group(folder / "groups", ("memory.max", "memory.current"), limit, 5 * GB, GB)
    assert budget.available_bytes() == 14 * GB


def test_a_system_that_does_not_say_is_taken_to_have_a_quarter_left(host):
    folder = host(available=14)
    (folder / "meminfo").unlink()
    left, total = budget._ask_system()
    assert left == total // 4 > 0


def test_this_machine_says_something():
    left, total = budget._ask_system()
    assert 0 < left <= total
    assert 0 < budget.available_bytes() <= left
