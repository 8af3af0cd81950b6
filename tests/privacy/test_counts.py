"""The claim of private counts against the law of what really leaves.

Every hockey-stick divergence here is a sum over outcomes of products of probabilities; dp-accounting has no part in it.
"""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation

from adumbra.errors import InputError
from adumbra.privacy import accounting
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.counts import PrivateCounts
from adumbra.privacy.noise import Noise

REPLACE = Adjacency.REPLACE_SENSITIVE
ADD = Adjacency.ADD_OR_REMOVE


def gaussian(sigma, shift, reach):
    x = np.arange(-reach, reach + 1)
    wide = np.arange(-20 * sigma, 20 * sigma + 1)
    return np.exp(-0.5 * ((x - shift) / sigma) ** 2) / np.exp(-0.5 * (wide / sigma) ** 2).sum()


def joint(*laws):
    law = np.ones(1)
    for one in laws:
        law = np.multiply.outer(law, one).ravel()
    return law


def hockey_stick(p, q, epsilon):
    return np.maximum(p - math.exp(epsilon) * q, 0).sum()


def fixed_bins(sigma, columns, adjacency):
    """The joint law of the bins that a unit leaves and enters, before and after it does."""
    leaves, stays = gaussian(sigma, 1, 9 * sigma), gaussian(sigma, 0, 9 * sigma)
    before, after = [leaves] * columns, [stays] * columns
    if adjacency.replaces:
        before, after = before + [stays] * columns, after + [leaves] * columns
    return joint(*before), joint(*after)


@pytest.mark.parametrize(
    ("columns", "sigma", "adjacency"),
    [(1, 1, REPLACE), (1, 3, REPLACE), (2, 1, REPLACE), (1, 2, ADD), (2, 3, ADD), (2, 2, Adjacency.ZERO_OUT)],
)
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
def test_pld_dominates_fixed_bins_and_is_tight(columns, sigma, adjacency, epsilon):
    counts = PrivateCounts(columns, sigma, 1e-6)
    truth = hockey_stick(*fixed_bins(sigma, columns, adjacency), epsilon)
    claimed = counts.privacy_loss(adjacency).get_delta_for_epsilon(epsilon)
    assert truth * (1 - 1e-9) <= claimed <= truth * 1.01 + 1e-9


def discovered(counts):
    """Law of what leaves of one column where every value has a second holder but the one unit's own.

    Outcomes: the noisy count of the shared bin, or nothing; times the noisy count of the bin that only this log has,
    or nothing. The neighbour's own bin is another, so all they share there is 'nothing'.
    """
    reach, tau = 15 * counts.sigma, counts.tau

    def released(count):
        law = gaussian(counts.sigma, count, reach)
        noisy = np.arange(-reach, reach + 1)
        return np.concatenate([law[noisy >= tau], [1 - law[noisy >= tau].sum()]])

    own = released(1)
    here = np.concatenate([own[:-1], 0 * own[:-1], own[-1:]])
    there = np.concatenate([0 * own[:-1], own[:-1], own[-1:]])
    return joint(released(5), here), joint(released(5), there)


@pytest.mark.parametrize(("sigma", "delta_threshold"), [(1, 1e-2), (2, 1e-3), (3, 0.1)])
def test_discovery_leaks_at_most_delta_threshold(sigma, delta_threshold):
    counts = PrivateCounts(1, sigma, 2 * delta_threshold, "discovered", delta_threshold)
    leak = hockey_stick(*discovered(counts), 50.0)
    assert leak <= delta_threshold
    lower_tau = 1 - np.cumsum(gaussian(sigma, 1, 15 * sigma))[counts.tau - 2 + 15 * sigma]
    assert lower_tau > delta_threshold  # the smallest tau that will do
    for epsilon in (0.0, 0.5, 2.0):
        assert hockey_stick(*discovered(counts), epsilon) <= counts.privacy_loss().get_delta_for_epsilon(epsilon)


class Scaled(Noise):
    """A fault: noise that is too small."""

    def __init__(self, scale):
        super().__init__()
        self._scale = scale

    def discrete_gaussian(self, sigma, size):
        return np.rint(super().discrete_gaussian(sigma, size) * self._scale).astype(np.int64)


class Forgetful(PrivateCounts):
    """A fault: no threshold."""

    @property
    def tau(self):
        return -(10**9)


RUNS = 300_000
COUNTS = PrivateCounts(1, 3, 0.05)
DISCOVERED = PrivateCounts(1, 2, 0.06, "discovered", 0.02)


def excess_fixed(counts, noise):
    """How far what `release` gives goes beyond the claim, in standard deviations; as an attacker would test it."""
    epsilon = 0.1  # below the loss of 1/9 that shows without noise
    claimed = counts.privacy_loss().get_delta_for_epsilon(epsilon)

    def guesses(first, second):
        loss = (counts.release(np.full(RUNS, first), noise) - counts.release(np.full(RUNS, second), noise)) / 9
        return np.mean(loss > epsilon)

    gap = guesses(8, 7) - math.exp(epsilon) * guesses(7, 8) - claimed
    return gap / ((1 + math.exp(2 * epsilon)) / RUNS / 4) ** 0.5


def excess_discovered(counts, noise):
    leaks = np.mean(counts.release(np.ones(RUNS, np.int64), noise) != 0)
    return (leaks - counts.delta_threshold) / (counts.delta_threshold / RUNS) ** 0.5


def test_what_leaves_keeps_the_claim():
    assert -6 < excess_fixed(COUNTS, Noise()) < 6  # and uses it up, so that a fault has nowhere to hide
    assert excess_discovered(DISCOVERED, Noise()) < 6


@pytest.mark.parametrize("scale", [0, 0.5, 0.9])
def test_too_little_noise_is_seen(scale):
    assert excess_fixed(COUNTS, Scaled(scale)) > 6


def test_a_forgotten_threshold_is_seen():
    assert excess_discovered(Forgetful(1, 2, 0.06, "discovered", 0.02), Noise()) > 6


def test_release_keeps_empty_candidates_and_refuses_what_nobody_holds():
    empty = np.zeros(10_000, np.int64)
    assert len(np.unique(COUNTS.release(empty, Noise()))) > 10
    assert COUNTS.threshold(16) == 16
    with pytest.raises(ValueError, match="holds someone"):
        DISCOVERED.release(np.array([3, 0]), Noise())
    assert DISCOVERED.threshold(2) == DISCOVERED.tau > 2
    assert DISCOVERED.threshold(1000) == 1000


@pytest.mark.parametrize("candidates", ["hashed", "discovered"])
@pytest.mark.parametrize("adjacency", [REPLACE, ADD])
@pytest.mark.parametrize(("columns", "epsilon"), [(1, 2.0), (19, 0.3)])
def test_calibration_spends_no_more_than_asked_and_little_less(columns, epsilon, adjacency, candidates):
    counts = PrivateCounts.calibrate(columns, epsilon, 1e-8, candidates, adjacency=adjacency)
    less = PrivateCounts(columns, counts.sigma - 1, 1e-8, candidates, counts.delta_threshold, adjacency)
    assert (counts.columns, counts.delta, counts.adjacency) == (columns, 1e-8, adjacency)
    assert counts.epsilon <= epsilon < less.epsilon
    assert counts.epsilon_vocabulary_known <= counts.epsilon <= 1.05 * counts.epsilon_vocabulary_known
    charge = counts.charge(Noise(), run="r")
    assert charge.parameters["noise"] == "operating-system"
    assert charge.epsilon == accounting.epsilon([accounting.pld_of(charge)], 1e-8)


@pytest.mark.parametrize("columns", [1, 19])
def test_large_noise_agrees_with_the_continuous_gaussian(columns):
    sigma = 300
    accountant = PLDAccountant(NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp_event.GaussianDpEvent(2 * sigma / math.sqrt(2 * columns)))
    assert PrivateCounts(columns, sigma, 1e-8).epsilon == pytest.approx(accountant.get_epsilon(1e-8), rel=2e-3)
    half = PrivateCounts(columns, sigma, 1e-8, adjacency=ADD)
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_event.GaussianDpEvent(sigma / math.sqrt(columns)))
    assert half.epsilon == pytest.approx(accountant.get_epsilon(1e-8), rel=2e-3)


def test_nonsense_is_refused():
    for wrong in (
        {"epsilon": 0},
        {"epsilon": math.nan},
        {"epsilon": 1e-5},
        {"delta": 0},
        {"delta": 1e-20},
        {"columns": 0},
        {"candidates": "guessed"},
        {"candidates": "discovered", "threshold_share": 1.0},
    ):
        with pytest.raises(InputError):
            PrivateCounts.calibrate(**{"columns": 2, "epsilon": 1.0, "delta": 1e-6, **wrong})


def test_one_run_composes_jointly_and_a_finer_unit_backs_no_coarser_claim():
    counts = PrivateCounts.calibrate(3, 0.5, 1e-8, "discovered")
    charges = [counts.charge(Noise()), counts.charge(Noise())]
    one = accounting.joint_epsilon(charges[:1], 1e-6, REPLACE, Unit.IMPRESSION)
    assert one < accounting.joint_epsilon(charges, 1e-6, REPLACE, Unit.IMPRESSION) < 2 * one
    with pytest.raises(InputError, match="backs no claim"):
        accounting.joint_epsilon(charges, 1e-6, REPLACE, Unit.USER)
