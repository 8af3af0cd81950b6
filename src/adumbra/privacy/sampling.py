"""Which units a step sees, and what that is worth.

A description is frozen and public; its `sampler()` draws. Secret samplers are keyed by the operating system when they
are made, never by a seed, and cannot be stored: so a run that resumes draws anew (privacy.md rule 4). Amplification
holds only while nobody learns who took part, and that includes the realised batch size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, ClassVar, Protocol

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray

from adumbra.errors import InputError
from adumbra.privacy import accounting
from adumbra.privacy.adjacency import Adjacency
from adumbra.privacy.noise import SecretBits, invert

Draw = Callable[[int], NDArray[np.int64]]
"""From a step's number (from 0) to the sorted, distinct numbers of the units that it sees."""


class Sampling(Protocol):
    """What a plan needs of a way to sample: the law that is drawn and the law that is accounted, in one object."""

    name: ClassVar[str]
    secret: ClassVar[bool]

    @property
    def units(self) -> int: ...
    @property
    def expected_batch(self) -> float:
        """The constant by which a step's sum is divided (rule 13)."""
        ...

    def sampler(self, bits: SecretBits | None = None) -> Draw: ...
    def charge_parameters(self, noise_multiplier: float, steps: int) -> dict[str, Any]: ...
    def privacy_loss(
        self, adjacency: Adjacency, noise_multiplier: float, steps: int, interval: float = accounting.INTERVAL
    ) -> PrivacyLossDistribution: ...


class _Accounted:
    """The privacy loss from the very parameters that the charge records."""

    def charge_parameters(self, noise_multiplier: float, steps: int) -> dict[str, Any]:
        raise NotImplementedError

    def privacy_loss(
        self, adjacency: Adjacency, noise_multiplier: float, steps: int, interval: float = accounting.INTERVAL
    ) -> PrivacyLossDistribution:
        """A PLD that dominates `steps` of DP-SGD that sample so."""
        parameters = self.charge_parameters(noise_multiplier, steps)
        return accounting.dp_sgd_pld(adjacency, **parameters, interval=interval)


@dataclass(frozen=True)
class Poisson(_Accounted):
    """Every unit takes part in every step with `probability`, independently of all others and of other steps.

    Exact, not approximate: no floating point decides who takes part. For groups that are clipped as one, a unit is a
    group, of a partition that is fixed and public (rule 11).
    """

    units: int
    probability: float
    name: ClassVar[str] = "poisson"
    secret: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_units(self.units)
        if not 0 < self.probability <= 1:
            raise InputError(
                f"the expected batch is from above 0 to all {self.units} units, not {self.expected_batch:g}"
            )

    @property
    def expected_batch(self) -> float:
        return self.units * self.probability

    def charge_parameters(self, noise_multiplier: float, steps: int) -> dict[str, Any]:
        return {
            "sampling": self.name,
            "sampling_probability": self.probability,
            "noise_multiplier": noise_multiplier,
            "steps": steps,
            "units": self.units,
        }

    def sampler(self, bits: SecretBits | None = None) -> Draw:
        bits = bits or SecretBits()
        return lambda _step: _poisson(self.units, self.probability, bits)


@dataclass(frozen=True)
class TruncatedPoisson(_Accounted):
    """As `Poisson`; of more than `maximum` units, `maximum` are kept, every subset of that size equally likely."""

    units: int
    probability: float
    maximum: int
    name: ClassVar[str] = "truncated-poisson"
    secret: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Poisson(self.units, self.probability)
        if not 1 <= self.maximum <= self.units:
            raise InputError(f"the maximum batch is from 1 to all {self.units} units, not {self.maximum}")

    @property
    def expected_batch(self) -> float:
        return self.units * self.probability

    def charge_parameters(self, noise_multiplier: float, steps: int) -> dict[str, Any]:
        poisson = Poisson(self.units, self.probability).charge_parameters(noise_multiplier, steps)
        return {**poisson, "sampling": self.name, "maximum_batch": self.maximum}

    def sampler(self, bits: SecretBits | None = None) -> Draw:
        bits = bits or SecretBits()

        def draw(_step: int) -> NDArray[np.int64]:
            drawn = _poisson(self.units, self.probability, bits)
            return drawn if len(drawn) <= self.maximum else np.sort(_subset(drawn, self.maximum, bits))

        return draw


@dataclass(frozen=True)
class ShuffledEpochs(_Accounted):
    """Each epoch puts all units into a new order and cuts it into batches; the last one of an epoch may be smaller.

    A batch never crosses two epochs, so no unit is in it twice. Claims no amplification, so the order needs no
    secrecy: a seed governs it, and a step's batch depends on nothing but the seed and the step's number.
    """

    units: int
    batch_size: int
    seed: int = 0
    name: ClassVar[str] = "shuffle"
    secret: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_units(self.units)
        if not 1 <= self.batch_size <= self.units:
            raise InputError(f"a shuffled batch holds from 1 to all {self.units} units, not {self.batch_size}")

    @property
    def expected_batch(self) -> float:
        return float(self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.units // self.batch_size)

    def charge_parameters(self, noise_multiplier: float, steps: int) -> dict[str, Any]:
        return {
            "sampling": self.name,
            "batch_size": self.batch_size,
            "noise_multiplier": noise_multiplier,
            "steps": steps,
            "units": self.units,
        }

    def sampler(self, bits: SecretBits | None = None) -> Draw:  # noqa: ARG002
        """`bits` are not used: this order is no secret."""
        order = lru_cache(maxsize=1)(self._order)  # one epoch at a time

        def draw(step: int) -> NDArray[np.int64]:
            epoch, batch = divmod(step, self.steps_per_epoch)
            part = order(epoch)[batch * self.batch_size : (batch + 1) * self.batch_size]
            return np.sort(part).astype(np.int64)

        return draw

    def _order(self, epoch: int) -> NDArray[np.integer]:
        order = np.arange(self.units, dtype=np.int32 if self.units < 2**31 else np.int64)
        np.random.default_rng((self.seed, epoch)).shuffle(order)
        return order


def _check_units(units: int) -> None:
    if not units >= 1:
        raise InputError(f"sampling needs at least one unit, not {units}")


# Poisson sampling by blocks of equally many units: how many of a block take part is Binomial, and which ones is a
# uniform subset of that size. Together that is independent draws for every unit, at a cost that goes with the batch.

_DIGITS = 64


def _poisson(units: int, probability: float, bits: SecretBits) -> NDArray[np.int64]:
    if probability == 1:
        return np.arange(units)
    size = _block_size(probability)
    blocks = -(-units // size)  # the last may reach beyond the units: whoever is drawn there does not exist
    cumulative = partial(_binomial_digits, size, probability)
    table = np.array(cumulative(_DIGITS), np.uint64)
    counts = invert(table, bits.words(blocks), _DIGITS, bits, cumulative)
    drawn = _subsets(np.repeat(np.arange(blocks), counts), size, bits)
    return drawn[: np.searchsorted(drawn, units)]


def _block_size(probability: float) -> int:
    """A power of two with about four units drawn a block; so few of many that drawing one twice is rare."""
    if probability > 1 / 16:
        return 1
    return 1 << min(13, int(math.log2(4 / probability)))


def _subsets(blocks: NDArray[np.int64], size: int, bits: SecretBits) -> NDArray[np.int64]:
    """Sorted units, distinct, one for every entry of the sorted `blocks`: a uniform subset of each block.

    Positions are drawn with replacement, and all of a block again if two of its are equal: what is left is uniform
    on the ordered tuples of distinct positions.
    """
    if size == 1:
        return blocks
    shift = np.uint64(64 - (size.bit_length() - 1))
    drawn = np.empty(len(blocks), np.int64)
    again = np.arange(len(blocks))
    while len(again):
        positions = (bits.words(len(again)) >> shift).astype(np.int64)
        drawn[again] = blocks[again] * size + positions
        order = np.sort(drawn[again])
        twice = np.unique(order[1:][order[1:] == order[:-1]] // size)
        again = again[np.isin(blocks[again], twice)]
    drawn.sort()
    return drawn


@lru_cache(maxsize=16)
def _binomial_digits(size: int, probability: float, n_digits: int) -> list[int]:
    """The first binary digits of P(Binomial(size, probability) ≤ m), for m = 0, 1, … until all are ones.

    `probability` is the fraction that the float is, so all of this is exact.
    """
    q = Fraction(probability)
    yes, no = q.numerator, q.denominator - q.numerator
    point = size * (q.denominator.bit_length() - 1)  # the denominator is a power of two
    ones = (1 << n_digits) - 1
    term = total = no**size
    digits = [min((total << n_digits) >> point, ones)]
    for m in range(size):
        if digits[-1] == ones:
            break
        term = term * (size - m) * yes // ((m + 1) * no)  # exact: it is a whole number
        total += term
        digits.append(min((total << n_digits) >> point, ones))
    return digits


def _subset(values: NDArray[np.int64], size: int, bits: SecretBits) -> NDArray[np.int64]:
    """A uniform subset: those with the smallest of as many distinct random words."""
    while True:
        words = bits.words(len(values))
        order = np.argsort(words)
        if np.all(np.diff(words[order]) != 0):  # distinct words are in every order equally often
            return values[order[:size]]
