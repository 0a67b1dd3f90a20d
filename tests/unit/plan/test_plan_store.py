"""The cache on disk under every fault we could think of: no crash, no wrong plan, one warning at most."""

import json
import os
import random
import stat
import subprocess
import sys
import time
import warnings

import pytest

import monoidreduce as mr
from monoidreduce.engines.triton.launch import driver
from monoidreduce.plan import disk, schedule, settings
from tests.support import ROOT, internals

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs fork and limits")
WRITER = ROOT / "tests" / "support" / "plan_store_writer.py"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache of the test's own, in a process that has complained of nothing yet."""
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path / "cache"))
    internals.forget_cache_warnings(monkeypatch)
    schedule.forget()
    yield tmp_path / "cache"
    schedule.forget()


def record(number=0, value=64, **changed):
    key = {"program": f"p{number}", "shape": "1024", "types": "float32", "device": "cpu", "budget": ""} | changed
    return schedule.Record(schedule.Key(**key), {"schedule": "flash", "tiles": [value, value]}, {"ms": 1.5})


def file_of(folder, kept):
    return folder / "plans" / f"{kept.key.digest}.json"


def told(function, *args):
    """What a call returns, and the warnings it gave."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        return function(*args), [w.category for w in found]


def read_again(key):
    schedule.forget()
    return schedule.recall(key)


def child(*arguments):
    said = subprocess.run([sys.executable, str(WRITER), *map(str, arguments)], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout.splitlines()[-1])


# What it is for


def test_a_plan_is_found_again_in_the_next_process(folder):
    kept = record()
    assert schedule.recall(kept.key) is None
    assert schedule.remember(kept)
    assert schedule.recall(kept.key) == kept == read_again(kept.key)


@pytest.mark.parametrize("part", ["program", "shape", "types", "device", "budget", "versions"])
def test_every_part_of_the_key_counts(folder, part):
    schedule.remember(record())
    assert read_again(record(**{part: "another"}).key) is None


def test_a_new_plan_replaces_the_old_and_says_so(folder):
    before = settings.plan_generation()
    schedule.remember(record(value=1))
    schedule.remember(record(value=2))
    assert read_again(record().key).plan["tiles"] == [2, 2]
    assert len(list((folder / "plans").iterdir())) == 1 and settings.plan_generation() >= before + 2


def test_folder_and_files_are_private(folder):
    schedule.remember(record())
    assert stat.S_IMODE((folder / "plans").stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(folder, record()).stat().st_mode) == 0o600


def test_lengths_of_one_bucket_share_a_plan():
    assert [schedule.bucket(n) for n in (0, 1, 2, 3, 4096, 4097)] == [1, 1, 2, 4, 4096, 8192]


# Faults


@POSIX
def test_200_writers_killed_at_random_moments(tmp_path):
    assert child("killed", tmp_path, 200, 1) == {"kills": 200, "plans": 4, "failures": 0, "warnings": []}


@POSIX
def test_8_writers_at_once(tmp_path):
    assert child("crowd", tmp_path, 8, 2) == {"writers": 8, "failures": 0, "plans": 4, "warnings": []}


@POSIX
def test_a_full_disk(tmp_path):
    found = child("full", tmp_path, 512, 3)
    assert len(found.pop("warnings")) == 1
    # the new plan serves this process, the old file is as it was, and nothing half-written lies about
    assert found == {"written": False, "here": 399, "kept": True, "files": 1}


@POSIX
def test_a_read_only_disk(tmp_path):
    tmp_path.chmod(0o555)
    try:
        found = child("refused", tmp_path / "cache", 0, 4)
    finally:
        tmp_path.chmod(0o755)
    assert len(found.pop("warnings")) == 1
    assert found == {"written": False, "here": True, "found": False}


def test_truncated_at_every_byte(folder):
    kept = record()
    schedule.remember(kept)
    path, whole = file_of(folder, kept), file_of(folder, kept).read_bytes()

    def cut_everywhere():
        found = []
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            found.append(read_again(kept.key))
        return found

    found, warned = told(cut_everywhere)
    assert found == [None] * len(whole) and warned == [mr.CacheWarning]
    assert schedule.remember(kept) and read_again(kept.key) == kept  # and it mends itself


def test_a_bit_changed_in_every_byte(folder):
    kept = record()
    schedule.remember(kept)
    path, whole = file_of(folder, kept), file_of(folder, kept).read_bytes()

    def change_everywhere():
        found = []
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
            found.append(read_again(kept.key))
        return found

    found, warned = told(change_everywhere)
    assert found == [None] * len(whole) and warned == [mr.CacheWarning]


GARBAGE = {
    "nothing": b"",
    "noise": random.Random(0).randbytes(4096),
    "a number": b"17",
    "deep": b"[" * 100_000,
    "not finite": json.dumps(record().to_json()).replace("1.5", "NaN").encode(),
    "another format": json.dumps(record().to_json() | {"format": 2}).encode(),
    "no sum": json.dumps({k: v for k, v in record().to_json().items() if k != "sum"}).encode(),
    "a key of numbers": json.dumps(record().to_json() | {"key": dict.fromkeys(record().to_json()["key"], 1)}).encode(),
    "another plan's record": json.dumps(record(number=5).to_json()).encode(),
    "huge": b" " * (disk.LARGEST + 1),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_no_plan(folder, name):
    kept = record()
    schedule.remember(kept)
    file_of(folder, kept).write_bytes(GARBAGE[name])
    found, warned = told(read_again, kept.key)
    assert found is None and len(warned) <= 1


def test_a_deep_plan_is_no_plan(folder):
    nested: list = []
    for _ in range(20):
        nested = [nested]
    body = schedule.Record(record().key, {"tiles": nested}).to_json()
    assert schedule.Record.from_json(json.loads(json.dumps(body))) is None


def make_foreign(path, monkeypatch):
    """Another user's, really so where we may give files away."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)


def test_another_users_file_is_not_read(folder, monkeypatch):
    kept = record()
    schedule.remember(kept)
    make_foreign(file_of(folder, kept), monkeypatch)
    assert told(read_again, kept.key) == (None, [mr.CacheWarning])


def test_another_users_folder_is_not_used(folder, monkeypatch):
    kept = record()
    schedule.remember(kept)
    make_foreign(folder / "plans", monkeypatch)
    assert told(read_again, kept.key) == (None, [mr.CacheWarning])
    assert told(schedule.remember, kept) == (False, [])  # told already


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666], ids=oct)
def test_a_file_that_others_may_write_is_not_read(folder, mode):
    kept = record()
    schedule.remember(kept)
    file_of(folder, kept).chmod(mode)
    assert told(read_again, kept.key) == (None, [mr.CacheWarning])


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_plain_file_is_not_read(folder, kind):
    kept = record()
    schedule.remember(kept)
    path = file_of(folder, kept)
    elsewhere = folder / "elsewhere.json"
    path.rename(elsewhere)
    {"link": lambda: path.symlink_to(elsewhere), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}[kind]()
    assert told(read_again, kept.key) == (None, [mr.CacheWarning])


def test_a_folder_that_is_a_link_is_not_used(folder, tmp_path):
    (tmp_path / "other").mkdir()
    folder.mkdir()
    (folder / "plans").symlink_to(tmp_path / "other")
    assert told(schedule.remember, record()) == (False, [mr.CacheWarning])
    assert not list((tmp_path / "other").iterdir())


def test_a_file_in_the_folders_place(folder):
    folder.write_text("")
    assert told(schedule.remember, record()) == (False, [mr.CacheWarning])
    assert schedule.recall(record().key) == record()  # this process has it


def test_a_folder_open_to_others_is_closed(folder):
    schedule.remember(record())
    (folder / "plans").chmod(0o777)
    schedule.forget()
    assert schedule.recall(record().key) == record()
    assert stat.S_IMODE((folder / "plans").stat().st_mode) == 0o700


def test_what_killed_writers_left_is_swept_later(folder):
    schedule.remember(record())
    old, new = (folder / "plans" / f"{disk.PREFIX}{name}" for name in ("old", "new"))
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (time.time() - 7200,) * 2)
    disk._remove_stale.cache_clear()
    schedule.forget()
    schedule.recall(record().key)
    assert not old.exists() and new.exists()


def test_kernels_take_the_same_road(folder, monkeypatch, tmp_path):
    folder.mkdir()
    (folder / "kernels").write_text("in the way")
    spare = tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr(disk, "temporary_folder", lambda: spare)
    path, warned = told(driver.write_text, "x = 1\n")
    assert path.parent == spare and path.read_text() == "x = 1\n" and warned == [mr.CacheWarning]


# mr.cache


def test_clear_leaves_an_empty_cache(folder):
    for number in range(3):
        schedule.remember(record(number))
    driver.write_text("x = 2\n")
    assert mr.cache.path() == folder and len(mr.cache.plans()) == 3
    assert mr.cache.clear(kernels=False) == 3 and mr.cache.plans() == [] and schedule.recall(record(1).key) is None
    assert mr.cache.clear() == 1 and mr.cache.clear() == 0


def test_clear_removes_only_what_is_ours(folder):
    schedule.remember(record())
    (folder / "plans" / "notes.txt").write_text("mine")
    assert mr.cache.clear() == 1
    assert (folder / "plans" / "notes.txt").exists()


def test_export_and_import(folder, tmp_path, monkeypatch):
    for number in range(3):
        schedule.remember(record(number, value=number + 1))
    assert mr.cache.export(tmp_path / "plans.json") == 3
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path / "new"))
    schedule.forget()
    assert schedule.recall(record(2).key) is None
    assert mr.cache.import_(tmp_path / "plans.json") == 3
    assert schedule.recall(record(2).key).plan["tiles"] == [3, 3] and len(mr.cache.plans()) == 3


def exported(change):
    body = {"format": schedule.FORMAT, "plans": [record(n).to_json() for n in range(3)]}
    change(body)
    return json.dumps(body).encode()


WRONG = {
    "noise": b"\x00\xff",
    "a list": b"[]",
    "no plans": b'{"format": 1}',
    "another format": exported(lambda b: b.update(format=9)),
    "a damaged plan": exported(lambda b: b["plans"][1]["plan"].update(tiles=[7])),
    "a foreign plan": exported(lambda b: b["plans"].append({"rm": "-rf"})),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_whole(folder, tmp_path, name):
    (tmp_path / "plans.json").write_bytes(WRONG[name])
    with pytest.raises(mr.CacheError, match=r"plans\.json"):
        mr.cache.import_(tmp_path / "plans.json")
    assert mr.cache.plans() == []


def test_files_that_cannot_be_read_or_written(folder, tmp_path):
    with pytest.raises(mr.CacheError, match=r"missing\.json"):
        mr.cache.import_(tmp_path / "missing.json")
    with pytest.raises(mr.CacheError, match="cannot be written"):
        mr.cache.export(tmp_path / "no" / "folder.json")
