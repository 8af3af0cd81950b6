"""Every metric against its definition, brute force; and parts that add up to the whole."""

# pyright: reportArgumentType=false, reportOptionalOperand=false, reportOperatorIssue=false
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from adumbra.errors import InputError, WorkError
from adumbra.evaluation.histogram import Histogram, ordered
from adumbra.evaluation.metrics import (
    Tally,
    auc,
    auc_loss,
    calibration,
    losses,
    mean_loss,
    normalized_entropy,
    predictions,
    rank_auc,
    relative_auc_loss,
    reliability,
    summary,
)

SOME = [-50.0, -3.5, -3.4999998, -1e-30, -0.0, 0.0, 1e-45, 0.1, 2.0, 50.0]
LOGITS = st.one_of(st.sampled_from(SOME), st.floats(-(2.0**100), 2.0**100, width=32))
ROWS = st.lists(st.tuples(LOGITS, st.integers(0, 1)), max_size=60)


def pairs_auc(logits, labels):
    """Over every pair of a positive and a zero."""
    wins = [(p > z) + (p == z) / 2 for p, y in zip(logits, labels, strict=True) if y > 0
            for z, x in zip(logits, labels, strict=True) if x == 0]  # fmt: skip
    return sum(wins) / len(wins) if wins else None


def apart(rows):
    return np.array([f for f, _ in rows], np.float64), np.array([y for _, y in rows], np.float64)


def drawn(n, mean=-3.0, spread=1.2, seed=0):
    r = np.random.default_rng(seed)
    logits = (mean + spread * r.normal(size=n)).astype(np.float32)
    return logits, (r.random(n) < predictions(logits, "binary")).astype(np.uint8)


@given(ROWS)
def test_auc_is_the_share_of_pairs_in_order_with_ties_at_half(rows):
    logits, labels = apart(rows)
    expected = pairs_auc(logits, labels)
    for found in (auc(Tally.of(logits, labels)), rank_auc(logits, labels)):
        assert found is None if expected is None else found == pytest.approx(expected, abs=1e-12)


def test_auc_equals_mann_whitney():
    logits, labels = drawn(5000)
    logits = np.round(logits, 1)  # many ties
    u = stats.mannwhitneyu(logits[labels == 1], logits[labels == 0]).statistic
    expected = u / (labels.sum() * (1 - labels.astype(float)).sum())
    assert auc(Tally.of(logits, labels)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("mean", "spread"),
    [(-3, 1.2), (-6.5, 0.8), (-3, 1e-3), (0, 1e-6), (0, 40), (-2, 1e4)],
    ids=["ordinary", "rate of .2 %", "close together", "about zero", "wide", "wild"],
)
def test_auc_by_histogram_is_exact_to_a_millionth(mean, spread):
    logits, labels = drawn(600_000, mean, spread)
    whole = Tally.of(logits, labels)
    assert len(whole.histogram.keys) <= whole.histogram.limit
    assert auc(whole) == pytest.approx(rank_auc(logits, labels), abs=1e-6)


@given(ROWS, st.lists(st.integers(0, 60), max_size=6), st.integers(1, 20), st.randoms())
def test_tallies_of_parts_add_up_to_that_of_the_whole_in_any_order(rows, cuts, limit, random):
    logits, labels = apart(rows)
    whole = Tally.of(logits, labels, limit=limit)
    order = random.sample(range(len(rows)), len(rows))
    parts = [Tally.of(logits[p], labels[p], limit=limit) for p in np.split(np.array(order, int), sorted(cuts))]
    random.shuffle(parts)
    total = Tally.empty(limit=limit)
    for part in parts:
        total = total + part
    assert total.histogram.shift == whole.histogram.shift
    assert np.array_equal(total.histogram.keys, whole.histogram.keys)
    assert np.array_equal(total.histogram.sums[:3], whole.histogram.sums[:3])  # of integers: exact
    assert np.allclose(total.histogram.sums[3], whole.histogram.sums[3], rtol=1e-12, atol=0)
    assert total.loss == pytest.approx(whole.loss, rel=1e-12)
    left, right = parts[0] + total, total + parts[0]
    assert np.array_equal(left.histogram.keys, right.histogram.keys)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_keys_are_in_the_order_of_the_logits(values):
    logits = np.array(values, np.float32)
    keys = ordered(logits)
    assert np.array_equal(keys[:, None] < keys, logits[:, None] < logits)
    assert np.array_equal(keys[:, None] == keys, logits[:, None] == logits)


@given(st.lists(LOGITS, min_size=1, max_size=200), st.integers(1, 40))
def test_no_fewer_bits_are_kept_than_fit(values, limit):
    logits = np.array(values, np.float32)
    histogram = Histogram.of(logits, [np.ones(len(logits))], limit)
    keys = np.unique(ordered(logits))
    distinct = [len(np.unique(keys >> shift)) for shift in range(32)]
    assert histogram.shift == next((s for s, n in enumerate(distinct) if n <= limit), 31)
    assert histogram.sums.sum() == len(logits)
    assert len(histogram.keys) <= max(limit, 2)  # the signs are always told apart


def test_log_loss_is_right_in_the_tails():
    # log(1 + exp(-f)) with the label 1, log(1 + exp(f)) with 0
    logits = np.array([50.0, -50, 50, -50, 800, -800, 0])
    labels = np.array([1, 0, 0, 1, 0, 0, 1])
    expected = [math.exp(-50), math.exp(-50), 50, 50, 800, 0, math.log(2)]
    assert losses(logits, labels, "binary") == pytest.approx(expected, rel=1e-14, abs=1e-300)
    assert predictions(np.array([-50.0]), "binary")[0] == pytest.approx(math.exp(-50), rel=1e-14)
    tally = Tally.of(logits, labels)
    assert mean_loss(tally) == pytest.approx(np.mean(expected), rel=1e-14)


def test_log_loss_is_the_mean_of_minus_the_logarithms():
    logits, labels = drawn(4000)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = -np.mean(np.where(labels == 1, np.log(p), np.log1p(-p)))
    said = summary(Tally.of(logits, labels))
    assert said["log_loss"] == pytest.approx(expected, rel=1e-12)
    rate = labels.mean()
    entropy = stats.entropy([rate, 1 - rate])
    assert said["normalized_entropy"] == pytest.approx(expected / entropy, rel=1e-12)
    assert said["calibration"] == pytest.approx(p.mean() / rate, rel=1e-12)
    assert said["auc_loss"] == 1 - said["auc"]


@pytest.mark.parametrize("rate", [0.5, 0.002])
def test_the_best_constant_has_auc_half_normalized_entropy_one_and_is_calibrated(rate):
    labels = np.arange(10_000) < 10_000 * rate
    tally = Tally.of(np.full(10_000, math.log(rate / (1 - rate))), labels)
    assert auc(tally) == 0.5
    assert normalized_entropy(tally) == pytest.approx(1, rel=1e-12)
    assert calibration(tally) == pytest.approx(1, rel=1e-12)


def test_counts_have_the_poisson_log_loss_of_002():
    r = np.random.default_rng(1)
    f, y = r.normal(-1, 0.7, 3000), r.poisson(0.5, 3000)
    said = summary(Tally.of(f, y, "count"))
    assert said["poisson_log_loss"] == pytest.approx(np.mean(np.exp(f) - y * f), rel=1e-12)
    # the negative log-likelihood but for log(y!), which no model changes
    likelihood = stats.poisson.logpmf(y, np.exp(f)).mean()
    assert said["poisson_log_loss"] == pytest.approx(-likelihood - np.mean([math.lgamma(v + 1) for v in y]), rel=1e-9)
    assert said["calibration"] == pytest.approx(np.exp(f).mean() / y.mean(), rel=1e-12)
    assert said["auc"] == pytest.approx(rank_auc(f.astype(np.float32), y > 0), abs=1e-12)
    assert said["log_loss"] is None
    assert said["normalized_entropy"] is None


def test_real_labels_have_a_squared_error_and_no_auc():
    f, y = np.array([1.0, 2.0, 3.0]), np.array([1.5, 2.0, 1.0])
    said = summary(Tally.of(f, y, "real"))
    assert said["squared_error"] == pytest.approx((0.25 + 0 + 4) / 3)
    assert said["calibration"] == pytest.approx(6 / 4.5)
    assert said["auc"] is None


def test_what_is_not_defined_is_none_and_json_stands_it():
    assert summary(Tally.empty()) == {
        "rows": 0, "auc": None, "auc_loss": None, "log_loss": None, "normalized_entropy": None, "calibration": None,
        "mean_prediction": None, "mean_label": None,
    }  # fmt: skip
    zeros, ones = Tally.of([0.5, 1.0], [0, 0]), Tally.of([0.5, 1.0], [1, 1])
    for tally in (zeros, ones):
        assert auc(tally) is auc_loss(tally) is normalized_entropy(tally) is None
        assert mean_loss(tally) is not None
    assert calibration(zeros) is None
    assert calibration(ones) is not None
    assert auc(zeros + ones) == 0.5
    assert summary(Tally.of([800.0], [1], "count"))["poisson_log_loss"] is None  # infinite
    assert json.loads(json.dumps(summary(zeros), allow_nan=False))["rows"] == 2
    assert reliability(Tally.empty()) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_one_line(bad):
    with pytest.raises(WorkError, match="NaN or infinite for 1 of 2 rows") as caught:
        Tally.of([0.0, bad], [0, 1])
    assert "\n" not in str(caught.value)
    with pytest.raises(WorkError, match="NaN"):
        rank_auc([0.0, float("nan")], [0, 1])


@pytest.mark.parametrize(
    ("labels", "kind"),
    [([0, 2], "binary"), ([0, -1], "count"), ([0, 0.5], "count"), ([0, np.inf], "count"), ([0, np.nan], "real")],
)
def test_labels_of_another_kind_are_refused(labels, kind):
    with pytest.raises(InputError, match=f"labels of kind {kind}"):
        Tally.of([0.0, 0.0], labels, kind)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(InputError, match="one of each"):
        Tally.of([0.0, 0.0], [1])
    with pytest.raises(InputError, match="not 'probit'"):
        Tally.of([0.0], [1], "probit")
    with pytest.raises(InputError, match="do not add up"):
        _ = Tally.of([0.0], [1]) + Tally.of([0.0], [1], "count")


def test_tensors_are_taken_as_they_are():
    logits, labels = drawn(100)
    assert summary(Tally.of(torch.from_numpy(logits), torch.from_numpy(labels))) == summary(Tally.of(logits, labels))


def test_reliability_has_equal_parts_with_their_own_means():
    logits, labels = drawn(20_000)
    parts = reliability(Tally.of(logits, labels), bins=20)
    assert [part["rows"] for part in parts] == [1000] * 20
    order = np.argsort(logits, kind="stable")
    for part, rows in zip(parts, np.split(order, 20), strict=True):
        assert part["prediction"] == pytest.approx(predictions(logits[rows], "binary").mean(), rel=1e-9)
        assert part["label"] == pytest.approx(labels[rows].mean(), abs=1.1e-3)  # rows of one logit may change places
    tied = reliability(Tally.of(np.zeros(100), np.arange(100) < 30), bins=10)
    assert tied == [{"rows": 100, "prediction": 0.5, "label": 0.3}]


def test_relative_auc_loss_is_that_of_000():
    assert relative_auc_loss(0.79, 0.8) == pytest.approx(0.05)
    assert relative_auc_loss(0.8, 0.8) == 0
    assert relative_auc_loss(None, 0.8) is relative_auc_loss(0.8, None) is relative_auc_loss(0.8, 1) is None


def blocked(code, *modules):
    """Runs code where these modules cannot be imported."""
    block = f"import sys; sys.modules.update(dict.fromkeys({modules}))\n"
    subprocess.run([sys.executable, "-c", block + code], check=True)


def test_metrics_need_numpy_alone():
    blocked("import adumbra.evaluation.metrics", "torch", "pyarrow", "polars", "pydantic")


def test_evaluation_on_a_machine_that_only_trains_needs_no_pyarrow():
    blocked("import adumbra.evaluation.evaluate, adumbra.evaluation.slices", "pyarrow", "polars")
