"""`kill -9` at random points of `prepare`, and full disks: after `--resume` the same bytes as of an undisturbed run."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from support import VOCABULARY, ads, as_toml, contents, made, raw, recipe, vocabulary, write

from adumbra.data import source
from adumbra.data.store import Store

DRIVER = """
import os, signal, sys, threading
from adumbra import cli
from adumbra.data import prepare, source, vocabulary

source.BLOCK = 4000
limit, sys.argv = int(sys.argv[1]), ["adumbra", *sys.argv[2:]]
count = 0


def step(*_):
    global count
    count += 1
    if count == limit:
        os.kill(os.getpid(), signal.SIGKILL)


threading.setprofile(step)
sys.setprofile(step)
try:
    cli.main()
finally:
    sys.setprofile(None)
    print(count)
"""
"""The command line with small blocks, which kills itself at the given call of a function, and else says how many
there were."""


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    write(folder / "log.tsv", ads(1200))
    (folder / "hashed.toml").write_text(as_toml(raw()))
    (folder / "private.toml").write_text(as_toml(raw(**VOCABULARY)))
    (folder / "driver.py").write_text(DRIVER)
    return folder


def prepare(log, name, out, *more, limit=0, size=None):
    """The status, standard output and standard error of a run in a process of its own."""

    def limited():
        if size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    words = [sys.executable, log / "driver.py", limit, "prepare", log / f"{name}.toml", log / "log.tsv", "--out", out]
    done = subprocess.run([*map(str, words), *more], capture_output=True, text=True, preexec_fn=limited, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module", params=["hashed", "private"])
def undisturbed(request, log):
    status, steps, _ = prepare(log, request.param, log / f"{request.param}-store")
    assert status == 0
    return request.param, int(steps), contents(log / f"{request.param}-store", private=request.param == "hashed")


def survives(log, undisturbed, out, points):
    """Kills a run at each of the points in turn, resuming it in between, until it ends."""
    name, _, expected = undisturbed
    kills, drawn = 0, None
    for point in points:
        status, _, err = prepare(log, name, out, "--resume", limit=point)
        if status == 0:
            break
        assert status == -signal.SIGKILL, err
        kills += 1
        assert not out.exists() or (out / "store.json").exists()
        kept = out.with_name(f"{out.name}.partial") / "spool/released.npz"
        if kept.exists():
            counts = dict(np.load(kept))
            assert drawn is None or all((counts[key] == drawn[key]).all() for key in counts)
            drawn = counts
    else:
        if not out.exists() and out.with_name(f"{out.name}.partial").exists():
            status, _, err = prepare(log, name, out)
            assert status == 2
            assert "--resume" in err
        status, _, err = prepare(log, name, out, "--resume")
    assert status == 0, err
    assert contents(out, private=name == "hashed") == expected
    store = Store.open(out).verify()
    assert not out.with_name(f"{out.name}.partial").exists()
    assert len(store.ledger.charges) in ([0] if name == "hashed" else range(1, kills + 2))
    if drawn is not None:
        released = sorted(count for array in drawn.values() for count in array[2:].tolist() if count)
        known = vocabulary(out)
        assert sorted(c for n in ("interest", "segments") for _, c in known.get(n, {}).values()) == released


def points(steps, count, seed):
    r = random.Random(seed)
    return [r.randrange(1, steps + 1) for _ in range(count)]


def test_killed_a_few_times(log, undisturbed, tmp_path):
    steps = undisturbed[1]
    late = [steps * 97 // 100]  # between the draw and the end
    survives(log, undisturbed, tmp_path / "store", [steps // 3, *late, *points(steps, 2, os.urandom(8))])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_killed_at_many_points(log, undisturbed, tmp_path, part):
    for number, point in enumerate(points(undisturbed[1], 5, os.urandom(8))):
        survives(log, undisturbed, tmp_path / f"{part}-{number}", [point])


def test_a_torn_journal(tmp_path, monkeypatch):
    """Whatever beginning of the journal is on disk, with tokens and blocks beyond it."""
    monkeypatch.setattr(source, "BLOCK", 4000)
    path, out = write(tmp_path / "log", ads(300)), tmp_path / "store"
    expected = contents(made(recipe(), path, tmp_path / "whole").path)

    def interrupted(out, **options):
        with monkeypatch.context() as patch:
            patch.setattr("adumbra.data.prepare._write_arrays", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                made(recipe(), path, out, **options)

    interrupted(out)
    whole = (tmp_path / "store.partial/spool/journal.jsonl").read_bytes()
    for size in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1, len(whole)):
        again = tmp_path / str(size)
        shutil.copytree(tmp_path / "store.partial", again.with_name(f"{size}.partial"))
        (tmp_path / f"{size}.partial/spool/journal.jsonl").write_bytes(whole[:size])
        interrupted(again, resume=True)
        assert contents(made(recipe(), path, again, resume=True).path) == expected


@pytest.mark.parametrize("size", [3000, 15_000])
def test_a_full_disk(log, undisturbed, tmp_path, size):
    name, _, expected = undisturbed
    status, _, err = prepare(log, name, tmp_path / "store", size=size)
    assert status == 2
    assert err.count("\n") == 1
    assert "the disk is full; free some space and go on with --resume" in err
    assert not (tmp_path / "store").exists()
    assert prepare(log, name, tmp_path / "store", "--resume")[0] == 0
    assert contents(tmp_path / "store", private=name == "hashed") == expected
