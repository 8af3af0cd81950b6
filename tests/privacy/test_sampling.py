import math
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from adumbra.errors import InputError
from adumbra.privacy import sampling as module
from adumbra.privacy.noise import SecretBits, insecure_repeatable
from adumbra.privacy.sampling import Poisson, ShuffledEpochs, TruncatedPoisson

RED = 1e-7


def inclusion(description, draws):
    """[draw, unit]: who took part."""
    draw = description.sampler()
    taken = np.zeros((draws, description.units), bool)
    for step in range(draws):
        units = draw(step)
        assert units.dtype == np.int64
        assert np.all(np.diff(units) > 0)
        taken[step, units] = True
    return taken


def frequencies_p(taken, probability):
    """Chi-square of each unit's count against draws · probability, summed over independent units."""
    draws, units = taken.shape
    z = (taken.sum(axis=0) - draws * probability) / math.sqrt(draws * probability * (1 - probability))
    return stats.chi2.sf(np.sum(z**2), units)


def sizes_p(sizes, units, probability):
    law = stats.binom(units, probability)
    edges = np.unique(law.ppf(np.linspace(0, 1, 12)[1:-1]))
    expected = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]]))
    return stats.chisquare(
        np.bincount(np.searchsorted(edges, sizes), minlength=len(expected)), expected * len(sizes)
    ).pvalue


def pairs_p(taken, probability):
    """Chi-square of how often neighbours (of one block or two), and units far apart, take part together."""
    draws, units = taken.shape
    z = []
    for distance in (1, 2, 7, units // 2):
        both = np.sum(taken[:, distance:] & taken[:, :-distance])
        mean = draws * (units - distance) * probability**2
        # Pairs that share a unit are dependent: their covariance is q³ - q⁴, each unit being in two pairs.
        shared = 2 * max(units - 2 * distance, 0)
        variance = draws * (
            (units - distance) * (probability**2 - probability**4) + shared * (probability**3 - probability**4)
        )
        z.append((both - mean) / math.sqrt(variance))
    return stats.chi2.sf(np.sum(np.square(z)), len(z))


CASES = [(1000, 0.01), (300, 0.2), (4097, 0.004), (50, 0.9), (64, 1 / 16), (3, 0.5)]


@pytest.mark.parametrize(("units", "probability"), CASES)
def test_poisson_has_the_probability_that_is_accounted(units, probability):
    description = Poisson(units, probability)
    taken = inclusion(description, 6000)
    parameters = description.charge_parameters(1.0, 1)
    assert frequencies_p(taken, parameters["sampling_probability"]) > RED
    assert abs(taken.sum() - 6000 * units * probability) < 6 * math.sqrt(6000 * units * probability)
    if units > 14:
        assert sizes_p(taken.sum(axis=1), units, probability) > RED
        assert pairs_p(taken, probability) > RED
    steps = taken[1:] & taken[:-1]  # and steps know nothing of one another
    spread = math.sqrt(steps.size * probability**2 * (1 + 2 * probability))
    assert abs(steps.sum() - steps.size * probability**2) < 6 * spread


def test_faults_are_seen():
    fixed = np.zeros((6000, 1000), bool)  # a batch of always ten: right in the mean, wrong in law
    fixed[np.arange(6000)[:, None], np.argsort(np.random.default_rng(0).random((6000, 1000)))[:, :10]] = True
    assert frequencies_p(fixed, 0.01) > RED > sizes_p(fixed.sum(axis=1), 1000, 0.01)
    blocks = np.repeat(inclusion(Poisson(500, 0.01), 6000), 2, axis=1)  # neighbours go together
    assert pairs_p(blocks, 0.01) < RED
    assert frequencies_p(inclusion(Poisson(1000, 0.011), 6000), 0.01) < RED


def test_few_digits_and_ties_change_nothing():
    """With 4 digits nearly every block is decided by a tie."""
    bits = SecretBits()
    cumulative = lambda n: module._binomial_digits(64, 0.03, n)  # noqa: E731
    digits = bits.words(20_000) >> np.uint64(60)
    counts = module.invert(np.array(cumulative(4), np.uint64), digits, 4, bits, cumulative)
    law = stats.binom(64, 0.03)
    observed = np.bincount(np.minimum(counts, 8), minlength=9)
    expected = len(counts) * np.append(law.pmf(range(8)), law.sf(7))
    assert stats.chisquare(observed, expected).pvalue > RED


@pytest.mark.parametrize(("size", "probability"), [(1, 0.3), (64, 0.05), (8192, 5e-4), (8192, 1e-9)])
def test_table_is_the_binomial_law(size, probability):
    digits = np.array([int(d) for d in module._binomial_digits(size, probability, 64)], float) / 2**64
    assert digits == pytest.approx(stats.binom.cdf(range(len(digits)), size, probability), abs=1e-12)
    assert module._binomial_digits(size, probability, 64)[-1] == 2**64 - 1


def test_subsets_of_a_crowded_block_are_uniform():
    """Five of eight, by redrawing: each of the 56 subsets equally often."""
    blocks = np.repeat(np.arange(20_000), 5)
    drawn = module._subsets(blocks, 8, SecretBits())
    assert len(np.unique(drawn)) == len(drawn)
    masks = np.bitwise_or.reduce(1 << (drawn.reshape(-1, 5) % 8), axis=1)
    _, observed = np.unique(masks, return_counts=True)
    assert len(observed) == 56
    assert stats.chisquare(observed).pvalue > RED


def test_large_batches_at_the_papers_size_are_quick_and_right():
    description = Poisson(32_000_000, 16_384 / 32_000_000)
    draw = description.sampler()
    batches = [draw(step) for step in range(100)]
    assert all(batch[0] >= 0 and batch[-1] < description.units for batch in batches)
    total = sum(len(batch) for batch in batches)
    assert abs(total - 100 * description.expected_batch) < 6 * math.sqrt(100 * description.expected_batch)
    where = np.bincount(np.concatenate(batches) * 50 // description.units, minlength=50)
    assert stats.chisquare(where).pvalue > RED
    low_bits = np.bincount(np.concatenate(batches) % 64, minlength=64)
    assert stats.chisquare(low_bits).pvalue > RED


def test_everybody_and_nearly_everybody():
    assert Poisson(10, 1.0).sampler()(0).tolist() == list(range(10))
    draw = Poisson(10, 1e-12).sampler()
    assert [len(draw(step)) for step in range(100)] == [0] * 100
    assert len(Poisson(1, 0.5).sampler()(0)) in (0, 1)


def repeats(make):
    """Whether a sampler that is made again, as at a resume, draws what was drawn before."""
    first, second = make(), make()
    return any(np.array_equal(first(step), second(other)) for step in range(5) for other in range(5))


@pytest.mark.parametrize("description", [Poisson(100_000, 0.01), TruncatedPoisson(100_000, 0.01, 1000)])
def test_a_sampler_that_is_made_again_draws_anew(description):
    assert not repeats(description.sampler)
    assert repeats(lambda: description.sampler(insecure_repeatable(1).bits))  # a fault: keyed by a seed
    with pytest.raises((TypeError, pickle.PicklingError, AttributeError)):
        pickle.dumps(description.sampler())


def test_a_forked_child_draws_anew():
    draw = Poisson(100_000, 0.001).sampler()
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, draw(0)[:20].tobytes())
        os._exit(0)
    os.wait()
    assert os.read(read, 160) != draw(0)[:20].tobytes()


def test_truncated_poisson_follows_its_law():
    description = TruncatedPoisson(400, 0.05, 22)
    taken = inclusion(description, 8000)
    sizes = taken.sum(axis=1)
    assert sizes.max() == 22
    law = stats.binom(400, 0.05)
    observed = np.bincount(np.clip(sizes, 12, 22) - 12, minlength=11)
    expected = np.concatenate([[law.cdf(12)], law.pmf(range(13, 22)), [law.sf(21)]])
    assert stats.chisquare(observed, expected * 8000).pvalue > RED
    cut = taken[sizes == 22]  # every unit is as likely to be kept, also where all that were drawn are not
    assert stats.chisquare(cut.sum(axis=0) + 0.0).pvalue > RED
    marginal = (law.expect(lambda k: np.minimum(k, 22))) / 400
    assert frequencies_p(taken, marginal) > RED


def test_cutting_the_end_off_is_seen():
    draw = Poisson(400, 0.05).sampler()
    taken = np.zeros((4000, 400), bool)
    for step in range(4000):
        taken[step, draw(step)[:22]] = True  # a fault: sorted units, so the last ones are cut
    assert stats.chisquare(taken[taken.sum(axis=1) == 22].sum(axis=0)).pvalue < RED


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32))
def test_shuffled_epochs_hold_every_unit_once(units, batch_size, seed):
    batch_size = min(batch_size, units)
    description = ShuffledEpochs(units, batch_size, seed)
    draw = description.sampler()
    for epoch in range(2):
        first = epoch * description.steps_per_epoch
        batches = [draw(first + step) for step in range(description.steps_per_epoch)]
        assert sorted(np.concatenate(batches).tolist()) == list(range(units))
        assert [len(b) for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert all(np.array_equal(draw(s), description.sampler()(s)) for s in (0, 1))  # a seed may govern it


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 200))
def test_nobody_takes_part_more_often_than_is_accounted(units, batch_size, steps):
    description = ShuffledEpochs(units, min(batch_size, units))
    draw = description.sampler()
    often = np.bincount(np.concatenate([draw(step) for step in range(steps)]), minlength=units).max()
    assert often <= module.accounting.participations(steps, description.batch_size, units)


def test_shuffled_epochs_differ():
    draw = ShuffledEpochs(1000, 100).sampler()
    assert not np.array_equal(draw(0), draw(10))
    assert not np.array_equal(draw(0), ShuffledEpochs(1000, 100, seed=1).sampler()(0))


def test_nonsense_is_refused():
    for make in (
        lambda: Poisson(0, 0.1),
        lambda: Poisson(10, 0.0),
        lambda: Poisson(10, 1.1),
        lambda: Poisson(10, math.nan),
        lambda: TruncatedPoisson(10, 0.1, 0),
        lambda: TruncatedPoisson(10, 0.1, 11),
        lambda: ShuffledEpochs(10, 11),
        lambda: ShuffledEpochs(10, 0),
    ):
        with pytest.raises(InputError):
            make()
