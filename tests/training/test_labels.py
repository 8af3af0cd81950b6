"""Randomised labels: unbiased, charged before they are drawn, drawn once, kept, and reused."""

import math
import stat

import numpy as np
import pytest
import runs
import torch

from adumbra.data.store import Store
from adumbra.errors import InputError, WorkError
from adumbra.privacy.noise import SecretBits, insecure_repeatable
from adumbra.privacy.randomizers import RandomizedResponse
from adumbra.training import labels
from adumbra.training.losses import LOSSES, binary_cross_entropy
from adumbra.training.run import fit

OUTPUTS = torch.linspace(-6, 6, 25, dtype=torch.float64)


def binary_loss(logit, label):
    """Written anew: −log of the probability that is given to the label."""
    return -torch.log(torch.sigmoid(logit if label == 1 else -logit))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("label", [0, 1])
def test_the_debiased_loss_is_that_of_000_and_has_the_true_expectation(epsilon, label):
    """000 §4 with p the probability that a label is flipped, 1 / (1 + e^ε), by enumeration of both answers:

    [L(ŷ) (1 − p) − L(1 − ŷ) p] / (1 − 2p)
    """
    p = 1 / (1 + math.exp(epsilon))
    estimates = labels.estimate(np.array([0, 1]), RandomizedResponse(epsilon), debiased=True).double()
    expectation = torch.zeros_like(OUTPUTS)
    for answer in (0, 1):
        written = (binary_loss(OUTPUTS, answer) * (1 - p) - binary_loss(OUTPUTS, 1 - answer) * p) / (1 - 2 * p)
        ours = binary_cross_entropy(OUTPUTS, estimates[answer].expand_as(OUTPUTS))
        torch.testing.assert_close(ours, written, rtol=1e-5, atol=1e-5)
        expectation += (1 - p if answer == label else p) * ours
    torch.testing.assert_close(expectation, binary_loss(OUTPUTS, label), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("classes", [3, 8])
def test_the_k_ary_estimate_is_unbiased_for_every_loss(loss, classes):
    epsilon = 0.8
    keep = math.exp(epsilon) / (math.exp(epsilon) + classes - 1)
    lie = (1 - keep) / (classes - 1)
    estimates = labels.estimate(np.arange(classes), RandomizedResponse(epsilon, classes), debiased=True).double()
    outputs = OUTPUTS / 3
    for label in range(classes):
        expectation = sum(
            (keep if answer == label else lie) * LOSSES[loss](outputs, estimates[answer].expand_as(outputs))
            for answer in range(classes)
        )
        true = LOSSES[loss](outputs, torch.tensor(float(label)).double().expand_as(outputs))
        torch.testing.assert_close(expectation, true, rtol=1e-4, atol=1e-4)


def test_the_plain_loss_takes_the_answers_as_they_are():
    answers = np.array([0, 2, 1], np.uint8)
    assert labels.estimate(answers, RandomizedResponse(1.0, 3), debiased=False).tolist() == [0, 2, 1]


def released(folder, charge, *, epsilon=1.0, classes=2, values=None, bits=None):
    values = np.ones(400, np.uint8) if values is None else values
    return labels.released(
        folder, values, RandomizedResponse(epsilon, classes), "impression", bits or SecretBits(), charge
    )


def test_charged_before_drawn_kept_and_reused(tmp_path, monkeypatch):
    events, release = [], RandomizedResponse.release
    monkeypatch.setattr(RandomizedResponse, "release", lambda *a: (events.append("drawn"), release(*a))[1])

    def charge():
        events.append("charged")

    folder = tmp_path / "released"
    first = released(folder, charge)
    assert events == ["charged", "drawn"]
    assert released(folder, charge).tolist() == first.tolist()
    assert events == ["charged", "drawn"]
    assert 0 < first.sum() < 400
    released(folder, charge, epsilon=1.5)
    released(folder, charge, classes=3)
    assert events == ["charged", "drawn"] * 3
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_is_not_charged_is_not_drawn(tmp_path, monkeypatch):
    def refused():
        raise InputError("the budget does not hold it")

    monkeypatch.setattr(RandomizedResponse, "release", None)
    with pytest.raises(InputError, match="budget"):
        released(tmp_path / "released", refused)
    assert not (tmp_path / "released").exists()


def test_what_a_seed_drew_is_never_taken_for_what_is_secret(tmp_path):
    charged = []
    seeded = released(tmp_path, lambda: charged.append(1), bits=insecure_repeatable(0).bits)
    secret = released(tmp_path, lambda: charged.append(2))
    assert charged == [1, 2]
    assert seeded.tolist() != secret.tolist()


def test_larger_counts_are_taken_as_the_declared_most(tmp_path):
    answers = released(tmp_path, list, epsilon=50.0, classes=4, values=np.array([0, 3, 17, 2], np.int32))
    assert answers.tolist() == [0, 3, 3, 2]


def test_answers_about_other_rows_and_damaged_ones_are_refused(tmp_path):
    released(tmp_path, list)
    with pytest.raises(InputError, match="about 400 rows, not 3"):
        released(tmp_path, list, values=np.ones(3, np.uint8))
    file = next(tmp_path.iterdir())
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(InputError, match="damaged"):
        released(tmp_path, list)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "released").write_text("a file")
    with pytest.raises(WorkError, match="cannot be written"):
        released(tmp_path / "released", list)


@pytest.mark.parametrize(("kind", "most", "classes"), [("binary", None, 2), ("count", 5, 6)])
def test_how_many_values_a_label_takes(kind, most, classes):
    assert labels.classes_for(kind, most) == classes


@pytest.mark.parametrize(("kind", "words"), [("count", "label_phase.max_label"), ("real", "dp-sgd")])
def test_labels_that_cannot_be_randomised_are_refused(kind, words):
    with pytest.raises(InputError, match=words):
        labels.classes_for(kind, None)


# In the life of runs

LABEL_DP = {"method": {"kind": "label-dp"}}


def charges(store):
    return Store.open(store).ledger.charges


def test_runs_on_one_store_share_one_draw(tmp_path, monkeypatch):
    drawn, release = [], RandomizedResponse.release
    monkeypatch.setattr(RandomizedResponse, "release", lambda *a: (drawn.append(1), release(*a))[1])
    store = runs.store(tmp_path)
    first = fit(runs.config(store, **LABEL_DP), tmp_path / "first")
    second = fit(runs.config(store, **LABEL_DP, seed=1), tmp_path / "second")
    assert len(drawn) == 1
    (charge,) = charges(store)
    assert (charge.mechanism, charge.epsilon, charge.delta) == ("randomized-response", 3.0, 0.0)
    assert first.statement.epsilon == second.statement.epsilon == 3.0
    assert second.statement.store_total == (3.0, 0.0)
    fit(runs.config(store, **LABEL_DP, privacy={"epsilon": 1.0}), tmp_path / "third")
    assert len(drawn) == 2
    assert [c.epsilon for c in charges(store)] == [3.0, 1.0]


def test_a_stand_in_is_not_charged_and_each_run_draws_its_own(tmp_path):
    store = runs.store(tmp_path, "stand-in")
    kept = []
    for name in ("first", "second"):
        run = fit(runs.config(store, **LABEL_DP), tmp_path / name)
        assert run.statement.stand_in
        assert not run.statement.protects
        assert "Nothing is protected" in run.statement.claim
        (file,) = (tmp_path / name / "released").iterdir()
        kept.append(np.load(file).tolist())
    assert kept[0] != kept[1]
    assert charges(store) == []
    assert not (store / "released").exists()


def test_labels_of_a_seed_do_not_serve_a_run_that_claims_secrecy(tmp_path):
    store = runs.store(tmp_path)
    fit(runs.config(store, **LABEL_DP, privacy={"noise": "insecure-repeatable"}), tmp_path / "seeded")
    run = fit(runs.config(store, **LABEL_DP), tmp_path / "secret")
    assert run.statement.protects
    assert len(charges(store)) == 2
    assert len(list((store / "released").iterdir())) == 2
