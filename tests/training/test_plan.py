"""A run's plan against dp-accounting called directly: what is drawn, what is accounted and what is charged agree."""

import math
from functools import cache

import numpy as np
import pytest
import runs
import torch
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant

from adumbra.errors import InputError
from adumbra.privacy import calibration
from adumbra.privacy.accounting import INTERVAL
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.ledger import Charge, total
from adumbra.privacy.sampling import ShuffledEpochs, TruncatedPoisson
from adumbra.training.plan import make

UNITS, BATCH, EPSILON, DELTA = 10_000, 200, 2.0, 1e-5
PROBABILITY, STEPS = BATCH / UNITS, 150
SIGMA, COLUMNS = 60, 2
COUNTS = Charge(
    "discrete-gaussian-counts",
    0.3,
    1e-6,
    Adjacency.REPLACE_SENSITIVE,
    Unit.IMPRESSION,
    "pld",
    {"sigma": SIGMA, "columns": COLUMNS, "delta_threshold": 1e-7},
    run="prepare",
)
METHODS = {
    "hybrid": {"kind": "hybrid", "split": 0.25},
    "dp-sgd": {"kind": "dp-sgd"},
    "label-dp": {"kind": "label-dp"},
    "k=0": {"kind": "hybrid", "split": 0},
    "k=1": {"kind": "hybrid", "split": 1},
}


def configured(method="hybrid", **sections):
    sections["privacy"] = {"epsilon": EPSILON, "delta": DELTA, **sections.get("privacy", {})}
    sections["dp_phase"] = {"batch_size": BATCH, "epochs": 3, **sections.get("dp_phase", {})}
    return runs.config("unused", method=METHODS[method], **sections)


@cache
def planned(method="hybrid", counts=False, classes=2):
    return make(configured(method), UNITS, classes, (COUNTS,) if counts else ())


def counts_pld():
    """Two columns, each with two bins shifted by one under replacement, and what the threshold leaves open."""
    shift = pld.from_discrete_gaussian_mechanism(SIGMA, value_discretization_interval=INTERVAL, use_connect_dots=True)
    threshold = pld.from_privacy_parameters(pld.common.DifferentialPrivacyParameters(0, 1e-7), INTERVAL)
    return shift.self_compose(2 * COLUMNS).compose(threshold)


def step_pld(sigma, steps, probability=PROBABILITY):
    one = pld.from_gaussian_mechanism(
        sigma,
        sampling_prob=probability,
        value_discretization_interval=INTERVAL,
        use_connect_dots=True,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    )
    return one.self_compose(steps)


def labels_pld(epsilon, classes=2):
    lie = classes / (math.exp(epsilon) + classes - 1)
    relation = NeighboringRelation.REPLACE_ONE
    return pld.from_randomized_response(
        lie, classes, value_discretization_interval=INTERVAL, neighboring_relation=relation
    )


def test_dp_sgd_equals_dp_accounting():
    plan = planned("dp-sgd")
    sigma = plan.dp_sgd.noise_multiplier
    assert plan.claim[1] == DELTA
    assert plan.claim[0] == pytest.approx(runs.direct(runs.dp_sgd(PROBABILITY, sigma, STEPS), delta=DELTA), rel=1e-9)
    less = runs.direct(runs.dp_sgd(PROBABILITY, sigma - 2e-4, STEPS), delta=DELTA)
    assert plan.claim[0] <= EPSILON < less


@pytest.mark.parametrize("classes", [2, 5])
def test_hybrid_equals_dp_accounting(classes):
    plan = planned("hybrid", classes=classes)
    assert plan.labels.epsilon == 0.25 * EPSILON
    events = [runs.randomized_response(0.25 * EPSILON, classes)]
    events.append(runs.dp_sgd(PROBABILITY, plan.dp_sgd.noise_multiplier, STEPS))
    assert plan.claim[0] == pytest.approx(runs.direct(*events, delta=DELTA), rel=1e-9)
    events[1] = runs.dp_sgd(PROBABILITY, plan.dp_sgd.noise_multiplier - 2e-4, STEPS)
    assert plan.claim[0] <= EPSILON < runs.direct(*events, delta=DELTA)


def test_label_dp_costs_what_the_labels_cost():
    plan = planned("label-dp")
    assert plan.claim == (EPSILON, 0.0)
    assert plan.labels.epsilon == EPSILON
    assert plan.dp_sgd is None


@pytest.mark.parametrize("method", ["hybrid", "dp-sgd", "label-dp"])
def test_counts_are_a_part_of_the_total(method):
    plan = planned(method, counts=True)
    left = EPSILON - COUNTS.epsilon
    plds = [counts_pld()]
    if method != "dp-sgd":
        share = 0.25 if method == "hybrid" else 1.0
        assert plan.labels.epsilon == pytest.approx(share * left)
        plds.append(labels_pld(share * left))
    if method != "label-dp":
        plds.append(step_pld(plan.dp_sgd.noise_multiplier, STEPS))
        if method == "dp-sgd":
            assert plan.dp_sgd.noise_multiplier > planned(method).dp_sgd.noise_multiplier
    composed = plds[0]
    for one in plds[1:]:
        composed = composed.compose(one)
    assert plan.claim[0] == pytest.approx(composed.get_epsilon_for_delta(DELTA), rel=1e-6)
    assert plan.claim[0] <= EPSILON
    assert plan.charges[0].mechanism == "discrete-gaussian-counts"


def test_the_extreme_splits_are_the_plain_methods():
    assert planned("k=0").dp_sgd == planned("dp-sgd").dp_sgd
    assert planned("k=0").labels is None
    assert planned("k=1").labels == planned("label-dp").labels
    assert planned("k=1").dp_sgd is None
    assert planned("k=0").claim == planned("dp-sgd").claim
    assert planned("k=1").claim == planned("label-dp").claim


def blocks(plan, cuts, labels):
    done, charges = 0, [plan.charge_for_labels(run="r")] if labels else []
    for steps in cuts:
        charges.append(plan.charge_for_steps(done, steps, "r", labels))
        done += steps
    return charges


@pytest.mark.parametrize("cuts", [(150,), (1, 149), (8,) * 18 + (6,), (100, 1, 49)])
@pytest.mark.parametrize("method", ["hybrid", "dp-sgd"])
def test_a_runs_charges_sum_to_its_joint_claim(method, cuts):
    plan = planned(method)
    charges = blocks(plan, cuts, labels=method == "hybrid")
    epsilon, delta = total(charges)
    assert delta == DELTA
    assert epsilon == pytest.approx(plan.claim[0], rel=1e-9)
    assert epsilon <= plan.own[0] * (1 + 1e-12)
    assert sum(c.parameters["steps"] for c in charges if c.mechanism == "dp-sgd") == STEPS


@pytest.mark.parametrize("counts", [False, True])
def test_what_is_on_the_ledger_covers_every_prefix(counts):
    """After each block the sum of what was charged is at least what the steps so far cost together."""
    plan = planned("hybrid", counts)
    charges = blocks(plan, (30, 60, 60), labels=True)
    for done in (1, 2, 3, 4):
        steps = sum(c.parameters["steps"] for c in charges[:done] if c.mechanism == "dp-sgd")
        spent, _ = total(charges[:done])
        events = [runs.randomized_response(plan.labels.epsilon)]
        if steps:
            events.append(runs.dp_sgd(PROBABILITY, plan.dp_sgd.noise_multiplier, steps))
        assert spent >= runs.direct(*events, delta=DELTA) - 1e-4  # the grid of the reference


def test_charges_never_exceed_the_plan_where_labels_take_nearly_everything():
    """The first steps then cost less, at their delta, than the labels alone: that must not be charged a second time."""
    config = configured(privacy={"delta": 1e-2}, dp_phase={"epochs": 1})
    plan = make(config.model_copy(update={"method": config.method.model_copy(update={"split": 0.9})}), UNITS, 2)
    labels = runs.randomized_response(plan.labels.epsilon)
    assert runs.direct(labels, runs.dp_sgd(PROBABILITY, plan.dp_sgd.noise_multiplier, 1), delta=1e-2) < 0.9 * EPSILON
    spent, _ = total(blocks(plan, (1, 1, 48), labels=True))
    assert spent <= EPSILON * (1 + 1e-9)
    assert spent == pytest.approx(plan.own[0], rel=1e-9)


def test_reused_labels_are_charged_once_and_the_stores_sum_is_true():
    """Two runs on one draw of labels: the sum over the store covers the composition of everything that was released."""
    plan = planned("hybrid")
    first, second = blocks(plan, (75, 75), labels=True), blocks(plan, (75, 75), labels=False)
    sigma = plan.dp_sgd.noise_multiplier
    alone = runs.direct(runs.dp_sgd(PROBABILITY, sigma, STEPS), delta=DELTA)
    assert total(second) == (pytest.approx(alone, rel=1e-9), DELTA)
    epsilon, delta = total([*first, *second])
    everything = labels_pld(0.25 * EPSILON).compose(step_pld(sigma, 2 * STEPS))
    assert everything.get_delta_for_epsilon(epsilon) <= delta
    assert epsilon >= everything.get_epsilon_for_delta(delta)
    assert epsilon < 2 * plan.claim[0]


@pytest.mark.parametrize("size", [1, 4])
def test_microbatches_are_groups_of_a_fixed_partition(size):
    plan = make(configured("dp-sgd", dp_phase={"microbatch": size, "epochs": 3}), UNITS + 3, 2)
    dp_sgd = plan.dp_sgd
    assert dp_sgd.sampling.units == (UNITS + 3) // size
    assert dp_sgd.sampling.probability == BATCH / size / dp_sgd.sampling.units
    assert dp_sgd.divisor == pytest.approx(BATCH / size)
    assert dp_sgd.noise_std == dp_sgd.noise_multiplier * dp_sgd.clip_norm
    event = runs.dp_sgd(dp_sgd.sampling.probability, dp_sgd.noise_multiplier, dp_sgd.steps)
    assert plan.claim[0] == pytest.approx(runs.direct(event, delta=DELTA), rel=1e-9)
    groups = torch.tensor([0, 2, dp_sgd.sampling.units - 1])
    rows = dp_sgd.rows(groups).reshape(-1, size)
    assert (rows // size).equal(groups[:, None].expand(-1, size))
    assert rows.max() < UNITS + 3


def test_truncated_poisson_equals_dp_accounting(monkeypatch):
    """With the maximum batch and the noise that calibration gave (which has its own tests, and takes its time)."""
    asked = []

    def calibrated(units, probability, steps, *budget, **others):
        asked.append((units, probability, steps, *budget, others["others"]))
        return TruncatedPoisson(units, probability, 45), 1.5

    monkeypatch.setattr(calibration, "truncated", calibrated)
    phase = {"sampling": "truncated-poisson", "epochs": 0.2, "batch_size": 20}
    plan = make(configured("dp-sgd", dp_phase=phase), 1000, 2)
    assert asked == [(1000, 0.02, 10, EPSILON, DELTA, [])]
    event = dp_event.SelfComposedDpEvent(dp_event.TruncatedSubsampledGaussianDpEvent(1000, 0.02, 45, 1.5), 10)
    assert plan.claim[0] == pytest.approx(runs.direct(event, delta=DELTA), rel=1e-9)
    assert plan.dp_sgd.divisor == pytest.approx(20)
    draw = plan.dp_sgd.sampler()
    assert max(len(draw(step)) for step in range(300)) <= 45


def test_shuffled_epochs_are_accounted_without_amplification():
    plan = make(configured("dp-sgd", dp_phase={"sampling": "shuffle"}), UNITS, 2)
    assert isinstance(plan.dp_sgd.sampling, ShuffledEpochs)
    three = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(plan.dp_sgd.noise_multiplier), 3)
    assert plan.claim[0] == pytest.approx(runs.direct(three, delta=DELTA), rel=1e-6)
    assert plan.dp_sgd.noise_multiplier > 3 * planned("dp-sgd").dp_sgd.noise_multiplier
    draw, seen = plan.dp_sgd.sampler(), np.zeros(UNITS, int)
    for step in range(plan.dp_sgd.steps):
        np.add.at(seen, draw(step), 1)
    assert seen.max() <= 3


def test_rdp_under_add_or_remove_asks_for_more_noise():
    add = {"adjacency": "add-or-remove"}
    by_pld = make(configured("dp-sgd", privacy=add), UNITS, 2)
    by_rdp = make(configured("dp-sgd", privacy={**add, "accountant": "rdp"}), UNITS, 2)
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(runs.dp_sgd(PROBABILITY, by_rdp.dp_sgd.noise_multiplier, STEPS))
    assert by_rdp.claim[0] == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)
    assert by_pld.dp_sgd.noise_multiplier < by_rdp.dp_sgd.noise_multiplier
    assert total(blocks(by_rdp, (50, 100), labels=False))[0] == pytest.approx(by_rdp.claim[0], rel=1e-9)


def test_delta_is_one_over_the_units():
    assert make(configured("label-dp", privacy={"delta": "1/n"}), 777, 2).delta == 1 / 777


def test_without_privacy_nothing_is_claimed():
    config = configured("dp-sgd")
    plan = make(config.model_copy(update={"method": config.method.model_copy(update={"kind": "none"})}), UNITS, 2)
    assert plan.claim == (math.inf, 0.0)
    assert not plan.private
    assert plan.charges == ()


BAD = [
    ("hybrid", {"privacy": {"adjacency": "add-or-remove"}}, "randomised labels have no guarantee under add-or-remove"),
    ("label-dp", {"privacy": {"adjacency": "add-or-remove"}}, "no guarantee under add-or-remove"),
    ("dp-sgd", {"privacy": {"accountant": "rdp"}}, "no accountant 'rdp' under replace-sensitive"),
    ("dp-sgd", {"dp_phase": {"batch_size": UNITS + 1}}, "10001 is larger than the 10000 training rows"),
    ("dp-sgd", {"dp_phase": {"microbatch": 3}}, "200 is no multiple of microbatch = 3"),
    (
        "dp-sgd",
        {"privacy": {"adjacency": "add-or-remove"}, "dp_phase": {"sampling": "shuffle"}},
        "shuffled batches have no guarantee under add-or-remove",
    ),
    ("dp-sgd", {"privacy": {"epsilon": 1e5}}, "hardly any noise is needed"),
    ("dp-sgd", {"privacy": {"delta": 1e-13}}, "delta is from 1e-12"),
    ("label-dp", {"privacy": {"epsilon": 1e-7}}, "too small for randomised response"),
    ("dp-sgd", {"privacy": {"unit": "user"}}, "privacy.unit = 'user'"),
]


@pytest.mark.parametrize(("method", "sections", "words"), BAD)
def test_what_cannot_be_planned_is_one_line(method, sections, words):
    with pytest.raises(InputError) as caught:
        make(configured(method, **sections), UNITS, 2)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["hybrid", "label-dp", "dp-sgd"])
def test_counts_that_leave_nothing_are_refused(method):
    with pytest.raises(InputError, match=r"counting this store's values spent 0\.3"):
        make(configured(method, privacy={"epsilon": 0.3}), UNITS, 2, (COUNTS,))


def test_counts_that_delta_does_not_hold_are_refused():
    """At a delta below the counts' own, no epsilon (or a larger one) covers them: never claimed in silence."""
    for method in ("label-dp", "hybrid"):
        with pytest.raises(InputError, match="out of reach"):
            make(configured(method, privacy={"delta": 1e-8}), UNITS, 2, (COUNTS,))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"privacy": {"epsilon": 0}}, "privacy.epsilon"),
        ({"privacy": {"epsilon": -1}}, "privacy.epsilon"),
        ({"privacy": {"epsilon": math.inf}}, "privacy.epsilon"),
        ({"privacy": {"delta": 0}}, "delta is '1/n' or a number between 0 and 1"),
        ({"privacy": {"delta": 1.5}}, "between 0 and 1"),
        ({"privacy": {"delta": "2/n"}}, "privacy.delta"),
        ({"method": {"split": 1.1}}, "method.split"),
        ({"method": {"split": -0.1}}, "method.split"),
        ({"dp_phase": {"optimizer": "adamm"}}, "adam"),
        ({"dp_phase": {"clip_norm": 0}}, "dp_phase.clip_norm"),
        ({"dp_phase": {"epochs": 0}}, "dp_phase.epochs"),
        ({"dp_phase": {"batchsize": 3}}, "did you mean 'batch_size'"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_a_wrong_configuration_is_one_line(section, words):
    with pytest.raises(InputError) as caught:
        runs.config("unused", **section)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
