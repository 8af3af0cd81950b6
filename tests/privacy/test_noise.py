import copy
import os
import pickle
from functools import partial

import mpmath
import numpy as np
import pytest
from scipy import stats

from adumbra.privacy import noise as module
from adumbra.privacy.noise import MAX_SIGMA, Noise, SecretBits, cumulative_digits, insecure_repeatable

RED = 1e-7  # a correct sampler gets here once in ten million runs


def exact_pmf(sigma, reach):
    """P(x) for |x| ≤ reach, from mpmath alone."""
    dual = mpmath.nsum(lambda k: mpmath.exp(-2 * (mpmath.pi * sigma * k) ** 2), [-mpmath.inf, mpmath.inf])
    total = mpmath.sqrt(2 * mpmath.pi) * sigma * dual
    return {x: mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * sigma**2)) / total for x in range(-reach, reach + 1)}


def p_value(draws, sigma):
    """Chi-square of the draws against the exact law; bins expected fewer than 20 times make up the two ends."""
    pmf = exact_pmf(sigma, 6 * sigma)
    reach = max(x for x, p in pmf.items() if p * len(draws) >= 20)
    inside = np.array([float(pmf[x]) for x in range(-reach, reach + 1)])
    end = (1 - inside.sum()) / 2
    clipped = np.clip(draws, -reach - 1, reach + 1) + reach + 1
    observed = np.bincount(clipped, minlength=2 * reach + 3)
    return stats.chisquare(observed, len(draws) * np.concatenate([[end], inside, [end]])).pvalue


@pytest.mark.parametrize("sigma", [1, 3, 65])
def test_discrete_gaussian_follows_the_exact_law(sigma):
    draws = Noise().discrete_gaussian(sigma, 1_000_000)
    assert p_value(draws, sigma) > RED
    assert abs(draws.mean()) < 6 * sigma / 1000
    assert abs(draws.var() / sigma**2 - 1) < 0.01  # at sigma = 1 the variance is 1 - 2e-7: below what shows


def test_one_wrong_step_of_sigma_is_seen():
    assert p_value(Noise().discrete_gaussian(66, 1_000_000), 65) < RED


def few_digits(sigma, n_digits=7, n=40_000):
    """As `discrete_gaussian`, but so few digits decide at first that ties are common."""
    cumulative = partial(cumulative_digits, sigma)
    digits = SecretBits().words(n) >> np.uint64(64 - n_digits)
    magnitude = module.invert(np.array(cumulative(n_digits), np.uint64), digits, n_digits, SecretBits(), cumulative)
    return np.where(SecretBits().words(n) & np.uint64(1), magnitude, -magnitude)


def test_ties_are_resolved_exactly(monkeypatch):
    assert p_value(few_digits(3), 3) > RED
    monkeypatch.setattr(module, "_invert_tie", lambda d, n, _bits, cumulative: cumulative(n).index(d) + 1)
    assert p_value(few_digits(3), 3) < RED  # a tie taken as decided


@pytest.mark.parametrize("n_digits", [63, 127])
@pytest.mark.parametrize("sigma", [1, 65, 4096])
def test_table_holds_the_true_digits(sigma, n_digits):
    digits = cumulative_digits(sigma, n_digits)
    with mpmath.workdps(80):
        pmf = exact_pmf(sigma, 300)
        for m in {0, 1, 2, 7, min(300, len(digits) - 1)}:
            assert digits[m] == int(mpmath.fsum(pmf[x] for x in range(-m, m + 1)) * 2**n_digits)
    assert digits[-1] == 2**n_digits - 1


def test_sigma_out_of_range_is_refused():
    for sigma in (0, -1, MAX_SIGMA + 1, 2.5):
        with pytest.raises(ValueError, match="whole number"):
            Noise().discrete_gaussian(sigma, 1)
    assert Noise().discrete_gaussian(3, 0).tolist() == []


def test_no_two_sources_share_words():
    one, other = SecretBits(), SecretBits()
    words = np.concatenate([one.words(100_001), other.words(99_999), one.words(len(module._ZEROS) // 8 + 3)])
    assert len(np.unique(words)) == len(words)
    ones = np.unpackbits(words.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 6 * 0.5 / (64 * len(words)) ** 0.5


def test_a_forked_child_draws_its_own_noise():
    bits = SecretBits()
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, bits.words(4).tobytes())
        os._exit(0)
    os.wait()
    assert os.read(read, 32) != bits.words(4).tobytes()


def test_secret_bits_cannot_be_stored():
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            attempt(Noise()._bits)
        with pytest.raises(TypeError):
            pickle.dumps(Noise())


def test_repeatable_noise_says_what_it_is():
    draws = [insecure_repeatable(7).discrete_gaussian(65, 1000).tolist() for _ in range(2)]
    assert draws[0] == draws[1] != insecure_repeatable(8).discrete_gaussian(65, 1000).tolist()
    assert insecure_repeatable(7).source == "insecure-repeatable"
    assert Noise().source == "operating-system"
