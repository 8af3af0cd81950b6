"""train, evaluate, predict, account, inspect and check, as a shell sees them: what is right, and what is refused."""

import csv
import json

import numpy as np
import pytest
import runs
import torch
from dp_accounting import dp_event
from support import ads, as_toml, command, write
from torch import nn

from adumbra.data.store import Store
from adumbra.errors import InputError
from adumbra.evaluation.evaluate import infer
from adumbra.models import MLP
from adumbra.training import records
from adumbra.training.plan import make
from adumbra.training.run import Run

METHODS = ("none", "dp-sgd", "label-dp", "hybrid")
DELTA = 1 / 1200


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setattr(records, "BLOCKS", 3)
    return lambda *words: command(monkeypatch, capsys, *words)


@pytest.fixture
def trained(run):
    """Writes a configuration and trains it."""

    def train(store, out, *more, **sections):
        file = out.with_suffix(".toml")
        file.write_text(as_toml(runs.settings(store, **sections)))
        return run("train", file, "--out", out, *more)

    return train


def refused(result, *words):
    status, out, err = result
    assert (status, out) == (2, ""), err
    assert err.count("\n") == 1, err
    assert err.startswith("adumbra: ")
    assert "Traceback" not in err
    for word in words:
        assert word in err, err


def as_json(result):
    status, out, err = result
    assert status == 0, err
    return json.loads(out)


def events(charges):
    """Independent of our accountant: events from what a run's charges say."""
    for charge in charges:
        about = charge["parameters"]
        if charge["mechanism"] == "randomized-response":
            yield runs.randomized_response(about["epsilon"], about["classes"])
        else:
            yield runs.dp_sgd(about["sampling_probability"], about["noise_multiplier"], about["steps"])


@pytest.mark.parametrize("method", METHODS)
def test_from_training_to_predictions(run, trained, tmp_path, method):
    store, out = runs.store(tmp_path), tmp_path / "run"
    status, said, err = trained(store, out, method={"kind": method})
    assert (status, said) == (0, ""), err
    assert {file.name for file in out.iterdir()} >= {"config.toml", "statement.json", "statement.md", "ledger.jsonl"}
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in (out / "model").iterdir())
    assert out.stat().st_mode & 0o777 == 0o700

    account = as_json(run("account", out, "--json"))
    assert account.keys() >= {"epsilon", "delta", "adjacency", "unit", "accountant", "charges"}
    assert (account["adjacency"], account["unit"], account["accountant"]) == ("replace-sensitive", "impression", "pld")
    assert all(charge.keys() >= {"mechanism", "epsilon", "delta"} for charge in account["charges"])
    if method == "none":
        assert account["epsilon"] is None
        assert account["charges"] == []
    elif method == "label-dp":
        assert (account["epsilon"], account["delta"]) == (3.0, 0.0)
    else:
        expected = runs.direct(*events(account["charges"]), delta=account["delta"])
        assert account["epsilon"] == pytest.approx(expected, rel=1e-6)
        assert account["epsilon"] <= 3.0
        assert account["delta"] == DELTA
        steps = account["charges"][-1]["parameters"]
        assert (steps["sampling_probability"], steps["steps"]) == (0.1, 12)
    mechanisms = {"none": [], "dp-sgd": ["dp-sgd"], "label-dp": ["randomized-response"]}
    expected = mechanisms.get(method, ["randomized-response", "dp-sgd"])
    assert [charge["mechanism"] for charge in account["charges"]] == expected

    of_store = as_json(run("account", store, "--json"))
    assert of_store["epsilon"] == pytest.approx(account["epsilon"] or 0.0, rel=1e-9)
    assert as_json(run("inspect", out, "--json"))["ledger"] == account
    assert run("inspect", out)[0] == run("account", out)[0] == run("account", store)[0] == 0

    found = as_json(run("evaluate", out, "--json"))
    keys = {"rows", "auc", "auc_loss", "log_loss", "normalized_entropy", "calibration"}
    assert found.keys() >= keys
    assert found["rows"] == 300
    assert found["auc_loss"] == pytest.approx(1 - found["auc"])
    assert "slices" in as_json(run("evaluate", out, "--by", "site", "--json"))

    rows = ads(runs.ROWS)
    status, _, err = run("predict", out, write(tmp_path / "test.tsv", rows[1200:]), "--out", tmp_path / "p.csv")
    assert status == 0, err
    with (tmp_path / "p.csv").open() as file:
        predicted = np.array([float(row["prediction"]) for row in csv.DictReader(file)])
    logits = np.concatenate([part for _, part in infer(Run.open(out).model(), Store.open(store).split("test"))])
    np.testing.assert_allclose(predicted, 1 / (1 + np.exp(-logits.astype(np.float64))), rtol=1e-5)


def test_a_plan_is_told_before_anything_runs(run, tmp_path):
    store = runs.store(tmp_path)
    file = tmp_path / "adumbra.toml"
    file.write_text(as_toml(runs.settings(store)))
    checked = as_json(run("check", file, "--json"))
    planned = as_json(run("account", file, "--json"))
    assert checked["epsilon"] == planned["epsilon"] == pytest.approx(3.0, abs=1e-3)
    assert checked["noise_multiplier"] == planned["charges"][-1]["parameters"]["noise_multiplier"]
    assert checked["steps"] == 12
    assert checked["label_epsilon"] == 0.75
    assert checked["warnings"] == []
    changed = as_json(run("check", file, "--set", "privacy.epsilon=1.5", "--set", "method.kind=dp-sgd", "--json"))
    assert changed["epsilon"] == pytest.approx(1.5, abs=1e-3)
    assert changed["label_epsilon"] == 0
    assert as_json(run("account", store, "--json"))["charges"] == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["adumbra.toml", "store"]


def test_shuffled_epochs_and_set(run, trained, tmp_path):
    store = runs.store(tmp_path)
    changes = ("--set", "method.kind=dp-sgd", "--set", 'dp_phase.sampling="shuffle"', "--set", "dp_phase.epochs=2")
    status, _, err = trained(store, tmp_path / "run", *changes)
    assert status == 0, err
    account = as_json(run("account", tmp_path / "run", "--json"))
    sigma = account["charges"][0]["parameters"]["noise_multiplier"]
    two = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(sigma), 2)
    assert account["epsilon"] == pytest.approx(runs.direct(two, delta=DELTA), rel=1e-6)
    assert Run.open(tmp_path / "run").config.dp_phase.sampling == "shuffle"


def test_counts_are_a_part_of_what_a_run_claims(run, trained, tmp_path):
    store = runs.store(tmp_path, "counted")
    counted = as_json(run("account", store, "--json"))
    status, _, err = trained(store, tmp_path / "run")
    assert status == 0, err
    account = as_json(run("account", tmp_path / "run", "--json"))
    mechanisms = [charge["mechanism"] for charge in account["charges"]]
    assert mechanisms == ["discrete-gaussian-counts", "randomized-response", "dp-sgd"]
    assert account["charges"][0]["epsilon"] == counted["epsilon"]
    assert account["charges"][1]["epsilon"] == pytest.approx(0.25 * (3.0 - counted["epsilon"]))
    assert account["epsilon"] <= 3.0
    assert account["delta"] == DELTA


def test_a_delta_above_one_over_n_is_told(run, trained, tmp_path):
    store = runs.store(tmp_path)
    status, _, err = trained(store, tmp_path / "run", privacy={"delta": 0.01})
    assert status == 0
    assert "above 1/n" in err
    assert "above 1/n" in (tmp_path / "run/statement.md").read_text()
    assert as_json(run("inspect", tmp_path / "run", "--json"))["warnings"]
    assert as_json(run("check", tmp_path / "run.toml", "--json"))["warnings"]


def test_held_out_metrics_on_the_way(trained, tmp_path):
    status, _, err = trained(runs.store(tmp_path), tmp_path / "run", "--metrics", "test")
    assert status == 0
    assert err.count("test: {") == 2 + 3  # an epoch, a block


# One run after another


def test_from_a_run_in_sequence_and_in_parallel(run, trained, tmp_path):
    first, second = runs.store(tmp_path, name="first"), runs.store(tmp_path, name="second")
    assert trained(first, tmp_path / "a")[0] == 0
    dp_sgd = {"method": {"kind": "dp-sgd"}, "privacy": {"epsilon": 2.0}}
    assert trained(second, tmp_path / "b", "--from", tmp_path / "a", **dp_sgd)[0] == 0
    assert trained(second, tmp_path / "c", "--from", tmp_path / "a", "--disjoint", **dp_sgd)[0] == 0
    a, b, c = (as_json(run("account", tmp_path / name, "--json")) for name in "abc")
    alone = as_json(run("account", tmp_path / "b.toml", "--json"))
    assert b["epsilon"] == pytest.approx(a["epsilon"] + alone["epsilon"], rel=1e-9)
    assert b["delta"] == pytest.approx(2 * DELTA)
    assert [charge["mechanism"] for charge in b["charges"]] == ["randomized-response", "dp-sgd", "dp-sgd"]
    assert c["epsilon"] == pytest.approx(max(a["epsilon"], alone["epsilon"]), rel=1e-9)
    assert c["delta"] == DELTA
    assert "in sequence" in (tmp_path / "b/statement.md").read_text()
    assert "in parallel" in (tmp_path / "c/statement.md").read_text()


def test_from_a_model_of_a_stand_in_costs_nothing_more(run, trained, tmp_path):
    """Trained without privacy on a log that needs none: the usual way to warm up."""
    stand_in, store = runs.store(tmp_path, "stand-in", "stand-in"), runs.store(tmp_path)
    assert trained(stand_in, tmp_path / "public", method={"kind": "none"})[0] == 0
    assert trained(store, tmp_path / "run", "--from", tmp_path / "public")[0] == 0
    account = as_json(run("account", tmp_path / "run", "--json"))
    assert account["epsilon"] == pytest.approx(3.0, abs=1e-3)
    assert account["stand_in"] is None
    assert "stand-in" in (tmp_path / "run/statement.md").read_text()


def test_from_a_run_without_privacy_claims_nothing(run, trained, tmp_path):
    store = runs.store(tmp_path)
    assert trained(store, tmp_path / "none", method={"kind": "none"})[0] == 0
    assert trained(store, tmp_path / "run", "--from", tmp_path / "none", method={"kind": "label-dp"})[0] == 0
    assert as_json(run("account", tmp_path / "run", "--json"))["epsilon"] is None
    assert "Nothing is protected" in (tmp_path / "run/statement.md").read_text()


def test_from_what_does_not_compose_is_refused(trained, tmp_path):
    store = runs.store(tmp_path)
    before = {"privacy": {"adjacency": "add-or-remove"}, "method": {"kind": "dp-sgd"}}
    assert trained(store, tmp_path / "a", **before)[0] == 0
    refused(trained(store, tmp_path / "b", "--from", tmp_path / "a"), "add-or-remove", "do not compose")
    refused(trained(store, tmp_path / "b", "--from", tmp_path / "nowhere"), "nowhere: not a run")
    other = {**before, "model": {"dim": 5}}
    refused(trained(store, tmp_path / "b", "--from", tmp_path / "a", **other), "another form")
    assert not (tmp_path / "b").exists()


def test_a_budget_is_refused_before_a_run_starts(run, trained, tmp_path):
    store = runs.store(tmp_path)
    assert run("account", store, "--budget", "1,1e-6")[0] == 0
    refused(trained(store, tmp_path / "run"), "does not fit the budget of 1")
    refused(run("check", tmp_path / "run.toml"), "does not fit the budget of 1")
    assert not (tmp_path / "run").exists()
    assert as_json(run("account", store, "--json"))["charges"] == []
    assert trained(store, tmp_path / "none", method={"kind": "none"})[0] == 0


# Bad input


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"privacy": {"epsilon": 0}}, ["privacy.epsilon", "greater than 0"]),
        ({"privacy": {"epsilon": -2}}, ["privacy.epsilon"]),
        ({"method": {"split": 1.5}}, ["method.split"]),
        ({"method": {"split": -0.5}}, ["method.split"]),
        ({"method": {"kind": "hybird"}}, ["method.kind", "hybrid"]),
        ({"privacy": {"epsilon": 9e5}, "method": {"kind": "dp-sgd"}}, ["epsilon 900000", "hardly any noise"]),
        ({"privacy": {"delta": 1e-13}}, ["delta"]),
        ({"privacy": {"accountant": "rdp"}}, ["no accountant 'rdp' under replace-sensitive"]),
        ({"privacy": {"adjacency": "add-or-remove"}}, ["no guarantee under add-or-remove"]),
        ({"privacy": {"adjacency": "replace-example"}}, ["'replace-example' protects public features too"]),
        ({"privacy": {"adjacency": "public-features"}}, ["which example holds which public value"]),
        ({"dp_phase": {"optimizer": "adamm"}}, ["dp_phase.optimizer", "adam"]),
        ({"dp_phase": {"optimizer": "yogi", "weight_decay": 0.1}}, ["yogi has no weight decay"]),
        ({"label_phase": {"optimizer": "yogi", "weight_decay": 0.1}}, ["yogi has no weight decay"]),
        ({"dp_phase": {"learning_rate": 1e300}}, ["learning_rate"]),
        ({"dp_phase": {"batch_size": 1201}}, ["1201 is larger than the 1200 training rows"]),
        ({"dp_phase": {"batch_sizes": 3}}, ["did you mean 'batch_size'"]),
        ({"model": {"kind": "dnn", "dim": None}}, ["'dnn'"]),
        ({"model": {"kind": "fmm"}}, ["model.kind = 'fmm'", "fm, mlp"]),
        ({"model": {"kind": "nowhere.model"}}, ["nowhere"]),
        ({"data": {"store": "no-such-store"}}, ["not a store"]),
        ({"start": {"run": "no-such-run"}}, ["no-such-run: not a run"]),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_spent(run, tmp_path, sections, words):
    store = runs.store(tmp_path)
    if "model" in sections:
        sections["model"] = {name: value for name, value in sections["model"].items() if value is not None}
    raw = runs.settings(store, **sections)
    if raw["model"]["kind"] != "fm":
        raw["model"].pop("dim")
    (tmp_path / "run.toml").write_text(as_toml(raw))
    refused(run("train", tmp_path / "run.toml", "--out", tmp_path / "run"), *words)
    assert not (tmp_path / "run").exists()
    assert as_json(run("account", store, "--json"))["charges"] == []


def test_options_that_are_wrong_are_refused_before_anything_is_spent(run, trained, tmp_path):
    store = runs.store(tmp_path)
    out = tmp_path / "run"
    refused(trained(store, out, "--metrics", "train"), "--metrics train", "test")
    refused(trained(store, out, "--metrics", "tset"), "--metrics tset")
    refused(trained(store, out, "--device", "nowhere"), "device 'nowhere'")
    if not torch.cuda.is_available():
        refused(trained(store, out, "--device", "cuda"), "device 'cuda'")
    refused(trained(store, out, "--set", "nothing"), "--set nothing")
    refused(run("train", tmp_path / "absent.toml", "--out", out), "no such file")
    assert not out.exists()
    assert as_json(run("account", store, "--json"))["charges"] == []


def test_a_dnn_needs_tables_of_its_own(trained, tmp_path):
    store = runs.store(tmp_path)
    raw = runs.settings(store)
    raw["model"] = {"kind": "dnn"}
    refused(trained(store, tmp_path / "run", model={"kind": "dnn"}), "table = 'column'")


def test_what_exists_is_never_overwritten(run, trained, tmp_path):
    store, out = runs.store(tmp_path), tmp_path / "run"
    method = {"method": {"kind": "label-dp"}}
    assert trained(store, out, **method)[0] == 0
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    refused(trained(store, out, **method), "exists already", "--resume")
    refused(trained(store, out, "--resume", seed=5, **method), "another configuration or store")
    assert trained(store, out, "--resume", **method)[0] == 0  # finished: nothing is left to do
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    refused(run("evaluate", out, "--split", "train"), "not private")
    refused(run("evaluate", tmp_path / "nothing"), "not a run")
    refused(run("evaluate", out, "--by", "interest"), "interest")
    refused(run("evaluate", out, "--device", "nowhere"), "device 'nowhere'")
    refused(run("predict", out, tmp_path / "absent.tsv", "--out", tmp_path / "p.csv"), "absent.tsv")
    refused(run("account", out, "--budget", "1,1e-6"))
    (out / "statement.json").write_text("{")
    refused(run("account", out), "statement.json")


# Models of one's own


class Mixed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(inner.width)
        self.width = inner.width

    def forward(self, ids, numbers):
        return self.norm(self.inner(ids, numbers))


def own(layout):
    return MLP(dim=2, hidden=4).build(layout)


def with_batch_norm(layout):
    made = own(layout)
    made.h = Mixed(made.h)
    return made


def no_towers(_layout):
    return nn.Linear(2, 1)


def test_a_model_of_ones_own(run, tmp_path):
    store = runs.store(tmp_path)
    model = {"model": {"kind": f"{__name__}.own"}}
    raw = runs.settings(store, **model)
    raw["model"].pop("dim")
    (tmp_path / "run.toml").write_text(as_toml(raw))
    status, _, err = run("train", tmp_path / "run.toml", "--out", tmp_path / "run")
    assert status == 0, err
    assert 0 < as_json(run("evaluate", tmp_path / "run", "--json"))["auc"] < 1


@pytest.mark.parametrize(
    ("name", "words"), [("with_batch_norm", ["'h.norm'", "BatchNorm1d", "LayerNorm"]), ("no_towers", ["truncated"])]
)
def test_a_model_that_cannot_be_trained_is_refused_before_its_labels_are_paid_for(run, tmp_path, name, words):
    store = runs.store(tmp_path)
    raw = runs.settings(store)
    raw["model"] = {"kind": f"{__name__}.{name}"}
    (tmp_path / "run.toml").write_text(as_toml(raw))
    refused(run("train", tmp_path / "run.toml", "--out", tmp_path / "run"), *words)
    assert not (tmp_path / "run").exists()
    assert as_json(run("account", store, "--json"))["charges"] == []


def test_parameters_that_become_nan_are_a_failure_under_way(run, trained, tmp_path):
    store = runs.store(tmp_path)
    status, out, err = trained(store, tmp_path / "run", label_phase={"learning_rate": 1e38, "optimizer": "sgd"})
    assert (status, out) == (1, "")
    assert "Traceback" not in err
    assert "label_phase.learning_rate" in err.splitlines()[-1]
    refused(run("evaluate", tmp_path / "run"), "unfinished")
    assert as_json(run("account", store, "--json"))["epsilon"] == 0.75


def test_the_label_phase_is_refused_where_public_features_are_protected(tmp_path):
    def planned(kind):
        given = runs.config(runs.store(tmp_path, name=kind), method={"kind": kind})
        privacy = given.privacy.model_copy(update={"adjacency": "replace-example"})
        return make(given.model_copy(update={"privacy": privacy}), 1200, 2)

    assert planned("dp-sgd").adjacency == "replace-example"
    for kind in ("hybrid", "label-dp"):
        with pytest.raises(InputError, match="reads public features as they are"):
            planned(kind)


def test_purge_of_a_run_leaves_ledger_and_statement(run, trained, tmp_path):
    out = tmp_path / "run"
    assert trained(runs.store(tmp_path), out)[0] == 0
    charges = [charge["id"] for charge in as_json(run("account", out, "--json"))["charges"]]
    assert run("purge", out)[0] == 0
    assert not (out / "model").exists()
    assert not (out / "checkpoints").exists()
    assert [charge["id"] for charge in as_json(run("account", out, "--json"))["charges"]] == charges
    refused(run("evaluate", out), "no released model")
