"""`kill -9` at random points of `adumbra train`, and a full disk: what the ledgers hold is never less than what was
spent, resumed runs never spend more than was planned, and the statement tells what was lost."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import runs
import torch
from support import as_toml

from adumbra.data.store import Store
from adumbra.errors import WorkError
from adumbra.privacy.ledger import Ledger
from adumbra.training import build
from adumbra.training.run import LEDGER, Run, fit

DRIVER = """
import os, resource, signal, sys, threading, traceback
from pathlib import Path
import torch
torch.set_num_threads(1)
import torch._dynamo
from adumbra import cli, config
from adumbra.data.store import Store
from adumbra.privacy.randomizers import RandomizedResponse
from adumbra.training import phases, records, run

records.BLOCKS = 5
spent, *warm = sys.argv[1:]


def log(line):
    with open(spent, "ab", buffering=0) as file:
        file.write(line)


descend, release = phases.Private._descend, RandomizedResponse.release
phases.Private._descend = lambda self, rows: (log(b"step %d\\n" % self.step), descend(self, rows))[1]
RandomizedResponse.release = lambda self, *a: (log(b"labels\\n"), release(self, *a))[1]
for path in map(Path, warm):  # calibrated once, for all children
    run.plan(config.load(path), Store.open(config.load(path).data.store)).claim

for line in sys.stdin:
    limit, size, *words = line.rstrip("\\n").split("\\t")
    count, limit, size = 0, int(limit), int(size)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        sys.stderr = os.fdopen(write, "w", buffering=1)
        sys.argv = ["adumbra", *words]
        if size:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

        def call(*_):
            global count
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)

        threading.setprofile(call)
        sys.setprofile(call)
        status = 0
        try:
            cli.main()
        except SystemExit as done:
            status = done.code or 0
        except BaseException:
            status = 99
            traceback.print_exc()
        sys.setprofile(None)
        print("calls", count, file=sys.stderr)
        os._exit(status)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    status = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    print(repr((status, text)), flush=True)
"""
"""Runs command lines, each in a forked process (so that nothing is imported or calibrated twice) that kills itself at
the given call of a function; every step and draw is on disk in `spent` before it is made."""


class Trainer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = runs.store(folder)
        self.config = folder / "adumbra.toml"
        phases = {"dp_phase": {"epochs": 1}, "label_phase": {"epochs": 2, "batch_size": 400}}
        self.config.write_text(as_toml(runs.settings(folder / "copy", **phases)))
        self.store.rename(folder / "original")
        self.fresh()
        (folder / "driver.py").write_text(DRIVER)
        words = [sys.executable, folder / "driver.py", folder / "spent", self.config]
        self.process = subprocess.Popen(
            list(map(str, words)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def fresh(self) -> None:
        subprocess.run(["rm", "-rf", self.folder / "copy", self.folder / "run"], check=True)
        subprocess.run(["cp", "-a", self.folder / "original", self.folder / "copy"], check=True)
        (self.folder / "spent").write_text("")

    def train(self, limit: int = 0, *more: str, size: int = 0) -> tuple[int, str]:
        words = [str(limit), str(size), "train", str(self.config), "--out", str(self.folder / "run"), "--resume", *more]
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\t".join(words) + "\n")
        status, said = eval(self.process.stdout.readline())
        return status, said

    def spent(self) -> tuple[list[int], int]:
        lines = (self.folder / "spent").read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line != "labels"], lines.count("labels")

    def check_ledgers(self) -> tuple[int, float]:
        """Every step that began, and the draw of labels, was charged on the store's ledger."""
        steps, draws = self.spent()
        charges = Store.open(self.folder / "copy").ledger.charges
        charged = sum(c.parameters["steps"] for c in charges if c.mechanism == "dp-sgd")
        labels = sum(c.mechanism == "randomized-response" for c in charges)
        assert all(step < charged for step in steps)
        assert len(steps) == len(set(steps)) <= charged, "a step was made twice"
        assert labels == min(draws, 1) or (labels == 1 and draws == 0)
        last = self.folder / "run/checkpoints/last.pt"
        if last.exists():
            torch.load(last, weights_only=True)
        return charged, sum(c.epsilon for c in charges)

    def survive(self, points) -> int:
        """Killed at each of the points in turn, resumed in between, until it ends; how many kills there were."""
        self.fresh()
        kills = 0
        for point in points:
            status, said = self.train(point)
            self.check_ledgers()
            if status == 0:
                break
            assert status == -signal.SIGKILL, said
            kills += 1
        else:
            status, said = self.train()
        assert status == 0, said
        charged, epsilon = self.check_ledgers()
        statement = Run.open(self.folder / "run").statement
        store, own = Store.open(self.folder / "copy").ledger, Ledger.open(self.folder / "run" / LEDGER)
        steps, _ = self.spent()
        assert [c.id for c in store.charges] == [c.id for c in own.charges]
        assert charged == statement.planned_steps == 10
        assert statement.steps + statement.lost_steps == 10
        assert statement.steps <= len(steps)
        assert epsilon <= statement.epsilon * (1 + 1e-9)
        assert store.total() == statement.store_total
        text = (self.folder / "run/statement.md").read_text()
        assert (f"{statement.lost_steps} steps were lost in a crash" in text) == bool(statement.lost_steps)
        assert json.loads((self.folder / "run/statement.json").read_text())["lost_steps"] == statement.lost_steps
        return kills


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    made = Trainer(tmp_path_factory.mktemp("crash"))
    try:
        yield made
    finally:
        assert made.process.stdin is not None
        made.process.stdin.close()
        made.process.wait(30)


@pytest.fixture(scope="module")
def calls(trainer):
    """How many calls of a function an undisturbed run makes."""
    trainer.fresh()
    status, said = trainer.train()
    assert status == 0, said
    return int(said.split()[-1])


def test_killed_a_few_times(trainer, calls):
    generator = random.Random(os.urandom(8))
    late = [calls * share // 100 for share in (97, 80, 55)]
    assert trainer.survive([late[0]]) == 1
    assert trainer.survive([late[1], calls // 3, generator.randrange(1, calls)]) >= 1
    assert trainer.survive([late[2], generator.randrange(1, calls)]) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_killed_at_many_points(trainer, calls, part):  # noqa: ARG001
    generator, kills = random.Random(os.urandom(8)), 0
    while kills < 12:
        kills += trainer.survive([generator.randrange(1, calls) for _ in range(generator.randrange(1, 4))])


def test_a_full_disk_at_a_checkpoint(trainer):
    """Of the second phase: the labels and some steps are spent, and the run goes on when there is space."""
    trainer.fresh()
    wide = ("--set", "model.dim=200", "--set", "method.kind=dp-sgd")
    status, said = trainer.train(0, *wide, size=100_000)
    assert status == 1, said
    assert "Traceback" not in said
    said = [line for line in said.splitlines() if line.startswith("adumbra: ")]
    assert len(said) == 1
    assert "cannot be written" in said[0]
    assert "go on with --resume" in said[0]
    assert not list((trainer.folder / "run/checkpoints").iterdir())
    status, said = trainer.train(0, *wide)
    assert status == 0, said
    charged, epsilon = trainer.check_ledgers()
    statement = Run.open(trainer.folder / "run").statement
    assert (charged, statement.lost_steps, statement.steps) == (10, 2, 8)
    assert epsilon <= statement.epsilon * (1 + 1e-9)


def test_a_full_disk_at_the_release(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    store = runs.store(tmp_path)
    config = runs.config(store, method={"kind": "label-dp"})
    with monkeypatch.context() as patch:
        patch.setattr(build, "save_file", full)
        with pytest.raises(WorkError, match=r"No space left on device.*--resume"):
            fit(config, tmp_path / "run")
    run = fit(config, tmp_path / "run", resume=True)
    assert run.statement.epsilon == Store.open(store).ledger.total()[0] == 3.0
