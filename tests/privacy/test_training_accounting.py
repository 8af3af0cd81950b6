"""DP-SGD in its three samplings: against dp-accounting called directly, and against integrals without it."""

import math
from functools import cache

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from adumbra.errors import InputError
from adumbra.privacy import accounting
from adumbra.privacy.accounting import dp_sgd_pld, epsilon, joint_epsilon, pld_of
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.calibration import calibrate, least_noise, noise_multiplier, truncated
from adumbra.privacy.ledger import Charge
from adumbra.privacy.noise import SecretBits
from adumbra.privacy.randomizers import RandomizedResponse
from adumbra.privacy.sampling import Poisson, ShuffledEpochs, TruncatedPoisson

REPLACE, ZERO, ADD = Adjacency.REPLACE_SENSITIVE, Adjacency.ZERO_OUT, Adjacency.ADD_OR_REMOVE
N, BATCH, STEPS = 32_000_000, 16_384, 97_656
PAPER = Poisson(N, BATCH / N)


def direct(adjacency, *events, delta):
    accountant = PLDAccountant(adjacency.relation())
    for event in events:
        accountant.compose(event)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize("adjacency", [REPLACE, ZERO, ADD])
def test_poisson_and_truncated_poisson_equal_dp_accounting(adjacency):
    poisson = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.5))
    expected = direct(adjacency, dp_event.SelfComposedDpEvent(poisson, 500), delta=1e-6)
    ours = Poisson(10_000, 0.01).privacy_loss(adjacency, 1.5, 500)
    assert epsilon([ours], 1e-6) == pytest.approx(expected, rel=1e-9)
    cut = dp_event.TruncatedSubsampledGaussianDpEvent(10_000, 0.01, 140, 1.5)
    expected = direct(adjacency, dp_event.SelfComposedDpEvent(cut, 500), delta=1e-6)
    ours = TruncatedPoisson(10_000, 0.01, 140).privacy_loss(adjacency, 1.5, 500)
    assert epsilon([ours], 1e-6) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("adjacency", [REPLACE, ZERO])
@pytest.mark.parametrize(("units", "batch", "steps", "times"), [(1000, 100, 50, 5), (1000, 300, 8, 3), (7, 7, 4, 4)])
def test_shuffled_epochs_are_as_many_gaussians(adjacency, units, batch, steps, times):
    expected = direct(adjacency, dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(4.0), times), delta=1e-6)
    assert epsilon([ShuffledEpochs(units, batch).privacy_loss(adjacency, 4.0, steps)], 1e-6) == pytest.approx(expected)
    with pytest.raises(InputError, match="Poisson"):
        ShuffledEpochs(units, batch).privacy_loss(ADD, 4.0, steps)


def test_a_full_batch_is_the_gaussian_mechanism():
    expected = direct(ADD, dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(9.0), 30), delta=1e-6)
    assert epsilon([Poisson(5, 1.0).privacy_loss(ADD, 9.0, 30)], 1e-6) == pytest.approx(expected)


@cache
def step_densities(q, sigma, adjacency):
    """The two densities of one step on a fine grid, for the worst sign of the pair; nothing of dp-accounting."""
    x = np.linspace(-1 - 12 * sigma, 1 + 12 * sigma, 6001)
    here = q * stats.norm.pdf(x, 1, sigma) + (1 - q) * stats.norm.pdf(x, 0, sigma)
    shift = -1 if adjacency is REPLACE else 0
    there = q * stats.norm.pdf(x, shift, sigma) + (1 - q) * stats.norm.pdf(x, 0, sigma)
    return x, here, there


def divergence(p, q, eps, cell):
    return np.maximum(p - math.exp(eps) * q, 0).sum() * cell


@pytest.mark.parametrize("adjacency", [REPLACE, ADD])
@pytest.mark.parametrize(("q", "sigma"), [(0.3, 1.0), (0.05, 0.6), (0.9, 2.0)])
@pytest.mark.parametrize("steps", [1, 2])
def test_divergence_by_brute_force(adjacency, q, sigma, steps):
    x, here, there = step_densities(q, sigma, adjacency)
    if steps == 2:
        x, here, there = x[::4], here[::4], there[::4]
    cell = (x[1] - x[0]) ** steps
    pairs = [(here, there), (there, here)]
    if steps == 2:
        pairs = [(np.multiply.outer(p, p), np.multiply.outer(r, r)) for p, r in pairs]
    claimed = dp_sgd_pld(adjacency, noise_multiplier=sigma, sampling_probability=q, steps=steps)
    for eps in (0.0, 0.3, 1.0):
        truth = max(divergence(p, r, eps, cell) for p, r in pairs)
        assert truth * (1 - 1e-4) - 1e-9 <= claimed.get_delta_for_epsilon(eps) <= truth * 1.005 + 1e-6


def test_the_doubled_sensitivity_counts_once_and_not_twice():
    """Faults: the add-or-remove pair under replacement, and noise halved on top of the replacement pair."""
    x, here, there = step_densities(0.3, 1.0, REPLACE)
    truth = divergence(here, there, 0.3, x[1] - x[0])
    forgotten = dp_sgd_pld(ADD, noise_multiplier=1.0, sampling_probability=0.3, steps=1).get_delta_for_epsilon(0.3)
    twice = dp_sgd_pld(REPLACE, noise_multiplier=0.5, sampling_probability=0.3, steps=1).get_delta_for_epsilon(0.3)
    assert forgotten < 0.7 * truth < 1.4 * truth < twice


ARGUMENTS = st.fixed_dictionaries(
    {
        "noise_multiplier": st.floats(1.2, 3.0),
        "sampling_probability": st.floats(1e-3, 0.1),
        "steps": st.integers(1, 100),
    }
)


@settings(max_examples=5, deadline=None)
@given(ARGUMENTS, st.sampled_from([REPLACE, ADD]), st.floats(1.05, 2.0))
def test_epsilon_is_monotone_in_each_argument(arguments, adjacency, factor):
    def at(**changes):
        return epsilon([dp_sgd_pld(adjacency, **{**arguments, **changes})], 1e-6)

    base, slack = at(), 1e-3
    assert at(noise_multiplier=arguments["noise_multiplier"] * factor) <= base + slack
    assert at(sampling_probability=min(1.0, arguments["sampling_probability"] * factor)) >= base - slack
    assert at(steps=arguments["steps"] + 50) >= base - slack
    assert epsilon([dp_sgd_pld(REPLACE, **arguments)], 1e-6) >= epsilon([dp_sgd_pld(ADD, **arguments)], 1e-6) - slack
    assert epsilon([dp_sgd_pld(adjacency, **arguments)], 1e-7) >= base - slack


@pytest.mark.parametrize(
    ("maximum", "published", "within"), [(17_200, 7.995, 2e-3), (17_000, 11.6, 0.06), (16_384, 117, 1)]
)
def test_truncated_poisson_at_the_published_maximum_batches(maximum, published, within):
    pld = TruncatedPoisson(N, BATCH / N, maximum).privacy_loss(REPLACE, 0.542, STEPS, accounting.COARSE)
    coarse_only = 0.026 if maximum == 17_200 else 0.0  # what the coarse grid, used for speed, adds at ε = 8
    assert epsilon([pld], 1 / N) - coarse_only == pytest.approx(published, abs=within)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("maximum", "published", "within"), [(17_200, 7.995, 1e-3), (17_000, 11.6, 0.05), (16_384, 117, 0.5)]
)
def test_truncated_poisson_at_the_published_maximum_batches_on_the_fine_grid(maximum, published, within):
    pld = TruncatedPoisson(N, BATCH / N, maximum).privacy_loss(REPLACE, 0.542, STEPS)
    assert epsilon([pld], 1 / N) == pytest.approx(published, abs=within)


def test_truncation_is_calibrated_to_hardly_cost_noise():
    sampling, sigma = truncated(100_000, 0.01, 2000, 2.0, 1e-5)
    plain = noise_multiplier(Poisson(100_000, 0.01), 2000, 2.0, 1e-5)
    assert plain <= sigma <= plain * 1.005
    assert epsilon([sampling.privacy_loss(REPLACE, sigma, 2000)], 1e-5) <= 2.0
    assert 1000 < sampling.maximum < 1300
    smaller = TruncatedPoisson(100_000, 0.01, int(sampling.maximum * 0.9))
    assert epsilon([smaller.privacy_loss(REPLACE, sigma, 2000)], 1e-5) > 2.1


def test_calibration_agrees_with_the_rules_and_is_not_slow(monkeypatch):
    evaluations = []
    fine = dp_sgd_pld
    monkeypatch.setattr(accounting, "dp_sgd_pld", lambda *a, **k: (evaluations.append(k["interval"]), fine(*a, **k))[1])
    for target, sigma in [(8, 0.5419), (4, 0.6575)]:
        assert noise_multiplier(PAPER, STEPS, target, 1 / N) == pytest.approx(sigma, abs=1e-4)
    assert evaluations.count(accounting.INTERVAL) <= 8  # each takes up to a second


def test_joint_calibration_uses_what_composition_gains():
    label = RandomizedResponse(0.25).charge(SecretBits(), adjacency=REPLACE, unit=Unit.IMPRESSION)
    counts = Charge(
        "discrete-gaussian-counts",
        0.1,
        1e-9,
        REPLACE,
        Unit.IMPRESSION,
        "pld",
        {"sigma": 200, "columns": 3, "delta_threshold": 0},
    )
    sampling = Poisson(100_000, 0.005)
    joint = noise_multiplier(sampling, 1000, 1.0, 1e-5, others=[label, counts])
    alone = noise_multiplier(sampling, 1000, 1.0, 1e-5)
    basic = noise_multiplier(sampling, 1000, 0.65, 1e-5)
    assert alone < joint < basic
    rest = [pld_of(label), pld_of(counts)]
    at, below = (epsilon([sampling.privacy_loss(REPLACE, s, 1000), *rest], 1e-5) for s in (joint, joint - 2e-4))
    assert at <= 1.0 < below


@settings(max_examples=3, deadline=None)
@given(st.floats(0.3, 2.0), st.integers(20, 400), st.floats(0.02, 0.2))
def test_calibration_answers_what_it_evaluated_and_no_more_than_needed(target, steps, probability):
    def plds(sigma):
        return [dp_sgd_pld(REPLACE, noise_multiplier=sigma, sampling_probability=probability, steps=steps)]

    sigma = calibrate(plds, target, 1e-6)
    assert epsilon(plds(sigma), 1e-6) <= target
    assert round(sigma * 10_000) == pytest.approx(sigma * 10_000, abs=1e-9)
    assert epsilon(plds(max(sigma - 2e-4, 0.1)), 1e-6) > target


@pytest.mark.parametrize("jump", [1.0, 1.2345, 3.3])
def test_calibration_finds_its_way_with_a_guess_that_misleads(jump):
    """A coarse grid may be wrong, and a fine one may have a cliff above which no ε is finite."""
    assert least_noise(lambda s: 5 / s, 2.0, 1e-6, lambda s: 5 * jump / s) == 2.5
    cliff = least_noise(lambda s: 5 / s if s > 2.7 else math.inf, 2.0, 1e-6, lambda s: 5 * jump / s)
    assert cliff == 2.7001
    assert least_noise(lambda s: 5 / s, 2.0, 1e-6, lambda _s: math.inf) == 2.5


def test_an_infeasible_calibration_is_one_line():
    label = RandomizedResponse(2.0).charge(SecretBits(), adjacency=REPLACE, unit=Unit.IMPRESSION)
    for target, others in [(1.9, [label]), (-1.0, []), (math.nan, [])]:
        with pytest.raises(InputError) as caught:
            noise_multiplier(Poisson(1000, 0.1), 10, target, 1e-5, others=others)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="hardly any noise"):
        least_noise(lambda sigma: 1 / sigma, 1e6, 1e-6)
    with pytest.raises(InputError, match="steps"):
        noise_multiplier(PAPER, 0, 8.0, 1e-6)


@pytest.mark.parametrize("target", [0.5, 1, 3, 5, 10, 30, 50])
def test_pld_asks_for_less_noise_than_rdp_at_every_epsilon(target):
    """002, Figure 4a."""
    sampling, steps = Poisson(1_000_000, 65_536 / 36_000_000), 20_000
    by_rdp = noise_multiplier(sampling, steps, target, 1e-6, adjacency=ADD, accountant="rdp")
    # That σ, and even a little less of it, spends less than `target` by PLD: so the σ of PLD is smaller.
    assert epsilon([sampling.privacy_loss(ADD, by_rdp - 1e-3, steps)], 1e-6) < target


def test_rdp_equals_dp_accounting_and_lives_under_add_or_remove_alone():
    sampling = Poisson(10_000, 0.01)
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    step = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.1))
    accountant.compose(dp_event.SelfComposedDpEvent(step, 700))
    accountant.compose(dp_event.GaussianDpEvent(50 / math.sqrt(3)))
    steps = Charge("dp-sgd", 1.0, 1e-6, ADD, Unit.IMPRESSION, "rdp", sampling.charge_parameters(1.1, 700))
    counts = {"sigma": 50, "columns": 3, "delta_threshold": 1e-7}
    charges = [steps, Charge("discrete-gaussian-counts", 1.0, 1e-7, ADD, Unit.IMPRESSION, "pld", counts)]
    ours = joint_epsilon(charges, 1e-6, ADD, Unit.IMPRESSION, "rdp")
    assert ours == pytest.approx(accountant.get_epsilon(9e-7), rel=1e-9)
    for adjacency in set(Adjacency) - {ADD}:
        with pytest.raises(InputError, match="no accountant"):
            noise_multiplier(sampling, 10, 1.0, 1e-6, adjacency=adjacency, accountant="rdp")
    for refused in (TruncatedPoisson(100, 0.1, 30), ShuffledEpochs(100, 10)):
        with pytest.raises(InputError, match="not accounted by RDP"):
            noise_multiplier(refused, 10, 1.0, 1e-6, adjacency=ADD, accountant="rdp")


@pytest.mark.parametrize("sampling", [Poisson(2000, 0.02), TruncatedPoisson(2000, 0.02, 70), ShuffledEpochs(2000, 40)])
def test_blocks_of_steps_cost_what_they_cost_as_one_and_can_be_accounted_again(sampling):
    def steps(count):
        parameters = sampling.charge_parameters(5.0, count)
        return Charge("dp-sgd", 0.0, 0.0, REPLACE, Unit.IMPRESSION, "pld", parameters, run="r")

    label = RandomizedResponse(0.5).charge(SecretBits(), adjacency=REPLACE, unit=Unit.IMPRESSION, run="r")
    whole = steps(100)
    joint = joint_epsilon([label, whole], 1e-5, REPLACE, Unit.IMPRESSION)
    blocks = [label, *(steps(count) for count in (10, 30, 60))]
    assert joint_epsilon(blocks, 1e-5, REPLACE, Unit.IMPRESSION) == pytest.approx(joint)
    again = Charge.from_json(whole.to_json())
    assert epsilon([pld_of(again)], 1e-5) == epsilon([sampling.privacy_loss(REPLACE, 5.0, 100)], 1e-5)
    assert {"sampling", "noise_multiplier", "steps", "units"} <= set(again.parameters)


def test_a_lacking_or_wrong_parameter_is_refused():
    def charge(**parameters):
        return Charge("dp-sgd", 1.0, 1e-8, REPLACE, Unit.IMPRESSION, "pld", parameters)

    base = {"noise_multiplier": 1.0, "sampling_probability": 0.1, "steps": 3}
    for wrong, why in [
        (charge(**base, sampling="truncated-poisson"), "lacks the parameters units, maximum_batch"),
        (charge(**base, sampling="shuffle"), "lacks the parameters units, batch_size"),
        (charge(**base, sampling="guessed"), "unknown mechanism"),
        (charge(**{**base, "sampling_probability": 1.5}), "sampling_probability"),
        (charge(**{**base, "noise_multiplier": 0}), "noise_multiplier"),
    ]:
        with pytest.raises(InputError, match=why):
            pld_of(wrong)


def test_groups_that_are_clipped_as_one_keep_the_noise_where_a_grouped_sample_would_not():
    """Rule 11. The pair of a fixed public group is that of a unit; a member that joins a cut sample shifts by 2C."""
    groups = Poisson(N // 4, BATCH / N)
    assert groups.privacy_loss(REPLACE, 0.7, 50).get_delta_for_epsilon(1.0) == Poisson(N, BATCH / N).privacy_loss(
        REPLACE, 0.7, 50
    ).get_delta_for_epsilon(1.0)
    honest = epsilon([Poisson(N, BATCH / N).privacy_loss(REPLACE, 0.5419, STEPS, accounting.COARSE)], 1 / N)
    cut = epsilon([Poisson(N, BATCH / N).privacy_loss(REPLACE, 0.5419 / 2, STEPS, accounting.COARSE)], 1 / N)
    assert honest == pytest.approx(8, abs=0.05)
    assert cut > 100
