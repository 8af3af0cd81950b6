"""Charges before, checkpoints after, and what a crash between any two of them leaves."""

import pytest
import runs
import torch

from adumbra.data.store import Store
from adumbra.errors import InputError, WorkError
from adumbra.privacy.ledger import Ledger
from adumbra.privacy.randomizers import RandomizedResponse
from adumbra.training import build, checkpoint, records
from adumbra.training.phases import Ordinary, Private
from adumbra.training.records import Records
from adumbra.training.run import LEDGER, Run, fit, plan


class Crash(Exception):
    """What stands for a kill: nothing after it runs."""


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    monkeypatch.setattr(records, "BLOCKS", 4)


@pytest.fixture
def store(tmp_path):
    return runs.store(tmp_path)


def crash_at(monkeypatch, owner, name, call, *, after=False):
    """The given call of a function raises Crash instead of running, or after it ran."""
    whole, calls = getattr(owner, name), []

    def crashing(*args, **kwargs):
        calls.append(name)
        if len(calls) == call and not after:
            raise Crash
        result = whole(*args, **kwargs)
        if len(calls) == call:
            raise Crash
        return result

    monkeypatch.setattr(owner, name, crashing)


def resumed(monkeypatch, store, out, *crashes, **sections):
    """A run that crashes, each time otherwise, and is resumed until it ends."""
    config = runs.config(store, **sections)
    for crash in crashes:
        with monkeypatch.context() as patch:
            patch.setattr(records, "BLOCKS", 4)
            crash_at(patch, *crash[:3], after=len(crash) > 3)
            with pytest.raises(Crash):
                fit(config, out, resume=True)
    return fit(config, out, resume=True)


def steps_charged(ledger):
    return sum(c.parameters["steps"] for c in ledger.charges if c.mechanism == "dp-sgd")


def released(run):
    return build.load(run.path / "model")[0].state_dict()


def agree(store, out, run):
    """The store's ledger and the run's own hold the same, which is the planned budget and no more."""
    of_store, own = Store.open(store).ledger, Ledger.open(out / LEDGER)
    assert [c.id for c in of_store.charges] == [c.id for c in own.charges]
    assert of_store.total()[0] <= run.statement.epsilon * (1 + 1e-9)
    assert of_store.total()[1] == run.statement.delta
    assert steps_charged(own) == run.statement.planned_steps
    assert run.statement.steps + run.statement.lost_steps == run.statement.planned_steps
    return run.statement.lost_steps


def test_an_undisturbed_run(monkeypatch, store, tmp_path):
    run = resumed(monkeypatch, store, tmp_path / "run")
    assert agree(store, tmp_path / "run", run) == 0
    ledger = Store.open(store).ledger
    assert [c.mechanism for c in ledger.charges] == ["randomized-response"] + ["dp-sgd"] * 4
    assert {c.run for c in ledger.charges} == {c.run for c in Ledger.open(tmp_path / "run" / LEDGER).charges}
    assert ledger.total()[0] == pytest.approx(run.statement.epsilon, rel=1e-9)


CRASHES = {
    "before anything was charged": ([(Records, "charge", 1)], 0),
    "before the draw of labels": ([(RandomizedResponse, "release", 1)], 0),
    "after the draw of labels, before it is kept": ([(RandomizedResponse, "release", 1, "after")], 0),
    "in the label phase": ([(Ordinary, "_step", 3)], 0),
    "between the phases": ([(Records, "through_private", 1)], 0),
    "at the first step": ([(Private, "_descend", 1)], 3),
    "in the middle of a block": ([(Private, "_descend", 5)], 3),
    "at the last step": ([(Private, "_descend", 12)], 3),
    "at a checkpoint of the second phase": ([(checkpoint, "save", 4)], 3),
    "after the last checkpoint": ([(checkpoint, "save", 6, "after")], 0),
    "while the statement is written": ([("adumbra.training.run", "_statement", 1)], 0),
    "again and again": ([(Private, "_descend", 1), (Private, "_descend", 2), (Ordinary, "_step", 1)], 0),
    "in every block": ([(Private, "_descend", 2)] * 4, 12),
}


@pytest.mark.parametrize(("crashes", "lost"), CRASHES.values(), ids=CRASHES)
def test_a_crash_costs_the_steps_that_it_took_and_no_more(monkeypatch, store, tmp_path, crashes, lost):
    if crashes[-1][0] is Ordinary and len(crashes) > 1:
        crashes, lost = crashes[:2], 6
    crashes = [(__import__(c[0], fromlist=["x"]), *c[1:]) if isinstance(c[0], str) else c for c in crashes]
    run = resumed(monkeypatch, store, tmp_path / "run", *crashes)
    assert agree(store, tmp_path / "run", run) == lost
    if lost:
        assert f"{lost} steps were lost in a crash" in (tmp_path / "run/statement.md").read_text()
    labels = [c for c in Store.open(store).ledger.charges if c.mechanism == "randomized-response"]
    assert len(labels) == 1
    assert len(list((store / "released").glob("*.npy"))) == 1


@pytest.mark.parametrize("call", [1, 3])
def test_a_crash_between_the_two_ledgers(monkeypatch, store, tmp_path, call):
    """The store was charged and the run does not know yet: it must not charge the same again, nor train for nothing."""
    append, calls = Ledger.append, []

    def appending(self, charge):
        if self.path.parent == tmp_path / "run":
            calls.append(1)
            if len(calls) == call:
                raise Crash
        append(self, charge)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "append", appending)
        with pytest.raises(Crash):
            fit(runs.config(store), tmp_path / "run")
    run = fit(runs.config(store), tmp_path / "run", resume=True)
    assert agree(store, tmp_path / "run", run) == (0 if call == 1 else 3)


def test_a_budget_of_exactly_the_plan_lasts_through_crashes(monkeypatch, store, tmp_path):
    epsilon, delta = plan(runs.config(store), Store.open(store)).own
    Store.open(store).ledger.set_budget(epsilon, delta)
    run = resumed(monkeypatch, store, tmp_path / "run", (RandomizedResponse, "release", 1), (Private, "_descend", 5))
    assert agree(store, tmp_path / "run", run) == 3
    with pytest.raises(InputError, match="does not fit the budget"):
        fit(runs.config(store, method={"kind": "dp-sgd"}), tmp_path / "another")
    assert not (tmp_path / "another").exists()


def test_a_resumed_label_phase_ends_as_an_undisturbed_one(monkeypatch, store, tmp_path):
    sections = {"method": {"kind": "label-dp"}, "label_phase": {"epochs": 4}}
    whole = resumed(monkeypatch, store, tmp_path / "whole", **sections)
    cut = resumed(monkeypatch, store, tmp_path / "cut", (Ordinary, "_step", 14), **sections)
    expected, found = released(whole), released(cut)
    assert all(expected[name].equal(found[name]) for name in expected)
    assert len(Store.open(store).ledger.charges) == 1


def test_the_second_phase_starts_from_the_first(monkeypatch, store, tmp_path):
    """Warm start: what DP-SGD begins with is what a label-DP run of the same labels ends with, h as it was made."""
    begun, through = [], Records.through_private

    def watched(self, phase, plan):
        begun.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
        through(self, phase, plan)

    monkeypatch.setattr(Records, "through_private", watched)
    fit(runs.config(store), tmp_path / "hybrid")
    alone = fit(runs.config(store, method={"kind": "label-dp"}, privacy={"epsilon": 0.75}), tmp_path / "labels")
    assert len(Store.open(store).ledger.charges) == 5  # the labels of .75 once
    for name, tensor in released(alone).items():
        assert begun[0][name].equal(tensor), name


@pytest.mark.parametrize("public_tower", ["frozen", "fine-tuned"])
def test_the_public_tower(monkeypatch, store, tmp_path, public_tower):
    begun, through = [], Records.through_private

    def watched(self, phase, plan):
        begun.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
        through(self, phase, plan)

    monkeypatch.setattr(Records, "through_private", watched)
    run = fit(runs.config(store, method={"public_tower": public_tower}), tmp_path / "run")
    after = released(run)
    changed = {name.split(".")[0] for name in after if not after[name].equal(begun[0][name])}
    assert changed == ({"h", "common"} if public_tower == "frozen" else {"g", "h", "common"})


# Checkpoints


def test_a_checkpoint_holds_no_key_and_no_sample(store, tmp_path):
    fit(runs.config(store), tmp_path / "run")
    kept = torch.load(tmp_path / "run/checkpoints/last.pt", weights_only=True)
    assert kept.keys() == {"version", "run", "phase", "lost", "model", "state"}
    assert kept["state"].keys() == {"step", "optimizer"}
    assert (tmp_path / "run/checkpoints/last.pt").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def unfinished(monkeypatch, store, tmp_path):
    with monkeypatch.context() as patch:
        crash_at(patch, Private, "_descend", 5)
        with pytest.raises(Crash):
            fit(runs.config(store), tmp_path / "run")
    return tmp_path / "run"


def refused(config, out, words, *, error=InputError):
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with pytest.raises(error) as caught:
        fit(config, out, resume=True)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


def test_checkpoints_of_others_are_refused(unfinished, store):
    last = unfinished / "checkpoints/last.pt"
    good = torch.load(last, weights_only=True)
    for changes, words in (
        ({"run": "another"}, "belongs to another run"),
        ({"version": 99}, "a checkpoint of version"),
    ):
        torch.save({**good, **changes}, last)
        refused(runs.config(store), unfinished, words)
    last.write_bytes(last.read_bytes()[:500])
    refused(runs.config(store), unfinished, "damaged")


def test_another_configuration_or_store_is_refused(unfinished, store, tmp_path):
    refused(runs.config(store, seed=1), unfinished, "another configuration or store")
    other = runs.store(tmp_path, "stand-in", "other")
    refused(runs.config(other), unfinished, "another configuration or store")
    other.rename(tmp_path / "moved")
    store.rename(tmp_path / "kept")
    (tmp_path / "moved").rename(store)
    refused(runs.config(store), unfinished, "another configuration or store")


def test_an_unfinished_run_says_so(unfinished, store):
    with pytest.raises(InputError, match="unfinished; continue with `adumbra train … --resume`"):
        Run.open(unfinished)
    with pytest.raises(InputError, match="exists already"):
        fit(runs.config(store), unfinished)


@pytest.mark.parametrize("left", ["nothing", "a configuration", "a ledger"])
def test_a_run_that_was_killed_before_it_had_an_identity(store, tmp_path, left):
    out = tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    if left != "nothing":
        (out / "config.toml").write_text("half a line")
    if left == "a ledger":
        Ledger.create(out / LEDGER)
    agree(store, out, fit(runs.config(store), out, resume=True))


def test_a_folder_of_something_else_is_left_alone(store, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    refused(runs.config(store), tmp_path / "mine", "not a run that can be resumed")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        fit(runs.config(store), tmp_path / "file")
    (tmp_path / "mine/run.json").write_text("[]")
    refused(runs.config(store), tmp_path / "mine", "not a run that can be resumed")


def test_parameters_that_become_nan_spend_what_was_spent(store, tmp_path):
    config = runs.config(
        store, dp_phase={"learning_rate": 3e38, "optimizer": "momentum", "momentum": 0.99, "epochs": 20}
    )
    with pytest.raises(WorkError, match="infinite or NaN"):
        fit(config, tmp_path / "run")
    of_store, own = Store.open(store).ledger, Ledger.open(tmp_path / "run" / LEDGER)
    assert [c.id for c in of_store.charges] == [c.id for c in own.charges]
    assert 0 < steps_charged(own) <= 200
    assert not (tmp_path / "run/statement.json").exists()
