import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from adumbra.errors import InputError
from adumbra.privacy import accounting
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.noise import Noise, SecretBits, insecure_repeatable
from adumbra.privacy.randomizers import RandomizedResponse

REPLACE, ADD = Adjacency.REPLACE_SENSITIVE, Adjacency.ADD_OR_REMOVE
RED = 1e-7
CASES = [(0.1, 2), (1.0, 2), (8.0, 2), (2.0, 5), (0.5, 100)]


@pytest.mark.parametrize(("epsilon", "classes"), CASES)
def test_the_channel_has_the_ratio_and_no_more(epsilon, classes):
    channel = RandomizedResponse(epsilon, classes).probabilities
    assert channel.sum(axis=1) == pytest.approx(np.ones(classes), abs=1e-12)
    ratios = [channel[a, o] / channel[b, o] for o in range(classes) for a in range(classes) for b in range(classes)]
    assert max(ratios) == pytest.approx(math.exp(epsilon), rel=1e-12)
    if classes == 2:  # Definition 4 of 000
        assert channel[0, 0] == pytest.approx(math.exp(epsilon) / (1 + math.exp(epsilon)), rel=1e-15)


@given(st.floats(1e-6, 60.0), st.integers(2, 1000))
def test_what_is_drawn_never_exceeds_the_ratio(epsilon, classes):
    """In whole numbers: keep = t / 2^64, and every lie has (1 - keep) / (K - 1), exactly."""
    keep = Fraction(RandomizedResponse(epsilon, classes).keep_threshold, 2**64)
    with mpmath.workdps(60):
        odds = mpmath.exp(mpmath.mpf(epsilon))
        ratio = mpmath.mpf(keep.numerator) / keep.denominator / (mpmath.mpf(1) - mpmath.mpf(keep.numerator) / 2**64)
        assert ratio * (classes - 1) <= odds
        assert 0 <= odds / (odds + classes - 1) - mpmath.mpf(keep.numerator) / keep.denominator < mpmath.mpf(2) ** -64


@pytest.mark.parametrize(("epsilon", "classes"), [*CASES, (1e-6, 2), (1e-6, 50), (40.0, 3)])
def test_debiasing_undoes_the_channel(epsilon, classes):
    randomizer = RandomizedResponse(epsilon, classes)
    assert randomizer.probabilities @ randomizer.debias == pytest.approx(np.eye(classes), abs=1e-9)
    assert randomizer.debias @ randomizer.probabilities == pytest.approx(np.eye(classes), abs=1e-9)


def test_the_binary_debiased_loss_is_that_of_the_paper():
    keep = 1 / (1 + math.exp(-1.5))
    losses = np.array([0.3, 2.0])
    for answer in (0, 1):
        paper = (losses[1 - answer] - keep * losses.sum()) / (1 - 2 * keep)
        assert RandomizedResponse(1.5).debias[answer] @ losses == pytest.approx(paper)


def p_value(randomizer, label, n=1_000_000):
    answers = randomizer.release(np.full(n, label, np.int8), SecretBits())
    observed = np.bincount(answers, minlength=randomizer.classes)
    return stats.chisquare(observed, n * RandomizedResponse(1.0, randomizer.classes).probabilities[label]).pvalue


@pytest.mark.parametrize(("classes", "label"), [(2, 0), (2, 1), (7, 0), (7, 6)])
def test_answers_follow_the_channel(classes, label):
    assert p_value(RandomizedResponse(1.0, classes), label) > RED
    assert p_value(RandomizedResponse(1.03, classes), label) < RED  # a fault of 3 % of epsilon is seen


def test_answers_about_different_labels_are_independent():
    labels = np.arange(1_000_000) % 3
    lied = RandomizedResponse(1.0, 3).release(labels, SecretBits()) != labels
    table = np.array([[np.sum(a & b) for b in (lied[1::2], ~lied[1::2])] for a in (lied[::2], ~lied[::2])])
    assert stats.chi2_contingency(table).pvalue > RED


def test_a_redraw_is_another_draw():
    labels = np.zeros(1000, np.int64)
    bits = SecretBits()
    draws = [RandomizedResponse(1.0).release(labels, b).tolist() for b in (bits, bits, SecretBits())]
    assert draws[0] != draws[1] != draws[2] != draws[0]
    same = [RandomizedResponse(1.0).release(labels, insecure_repeatable(3).bits).tolist() for _ in range(2)]
    assert same[0] == same[1]


def test_charges():
    charge = RandomizedResponse(0.5, 3).charge(Noise().bits, adjacency=REPLACE, unit=Unit.IMPRESSION, times=4, run="r")
    assert (charge.epsilon, charge.delta, charge.run) == (2.0, 0.0, "r")
    assert charge.parameters == {"epsilon": 0.5, "classes": 3, "times": 4, "noise": "operating-system"}
    assert accounting.epsilon([accounting.pld_of(charge)], 1e-9) == pytest.approx(2.0, abs=1e-3)  # not .5 (rule 18)
    zero_out = RandomizedResponse(0.5).privacy_loss(Adjacency.ZERO_OUT)
    assert accounting.epsilon([zero_out], 1e-9) == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(InputError, match="add-or-remove"):
        RandomizedResponse(0.5).charge(SecretBits(), adjacency=ADD, unit=Unit.IMPRESSION)


def test_nonsense_is_refused():
    for epsilon, classes in [(0, 2), (-1, 2), (math.nan, 2), (math.inf, 2), (1e-7, 2), (1e3, 2), (1.0, 1)]:
        with pytest.raises(InputError) as caught:
            RandomizedResponse(epsilon, classes)
        assert "\n" not in str(caught.value)
    for labels in ([0, 2], [-1], [0.5], [math.nan], [[0]]):
        with pytest.raises(ValueError, match="label") as refused:
            RandomizedResponse(1.0).release(np.array(labels), SecretBits())
        assert not any(digit in str(refused.value) for digit in ("2", "-1", "0.5"))  # no protected value is quoted
    assert RandomizedResponse(1.0).release(np.array([]), SecretBits()).tolist() == []
