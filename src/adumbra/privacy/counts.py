"""Private counts of the values of sensitive columns: what a vocabulary may be made of."""

import bisect
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from dp_accounting import gaussian_mechanism
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray

from adumbra.errors import InputError
from adumbra.privacy import accounting
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.ledger import Charge
from adumbra.privacy.noise import MAX_SIGMA, Noise

Candidates = Literal["declared", "hashed", "discovered"]


@dataclass(frozen=True)
class PrivateCounts:
    """Histograms of sensitive columns with discrete Gaussian noise of parameter `sigma` on every candidate bin.

    Protected: which values the columns of one unit hold, as (epsilon, delta) at `delta` under `adjacency`, jointly
    over one `release` of every column. The caller ensures that

    - a unit adds at most one to at most `columns` bins altogether: one bin a column (a missing value is a value of
      its own), so a column of lists counts as its maximum length, ids that repeat within a unit are dropped, and a
      unit of several rows is capped before it is counted;
    - each column is released once, with secret noise;
    - candidates are fixed without looking at the log (`declared`, `hashed`: every bin gets noise, the empty ones as
      well), or are exactly the bins that hold someone (`discovered`), and then bins that `release` sets to zero
      leave no trace.

    Why a discovered bin may leave. Take neighbouring logs. The bins that hold someone in both are the same bins: what
    leaves of them is the Gaussian mechanism on a fixed set. A bin in only one of the logs holds a single unit there,
    so with noise Z it leaves with probability P(1 + Z ≥ tau), and a log has at most `columns` of those; `tau` makes
    the sum at most `delta_threshold`. What leaves of them, mostly nothing, is therefore (0, delta_threshold)-private
    and independent of the rest, and the two compose.
    """

    columns: int
    sigma: int
    delta: float
    candidates: Candidates = "declared"
    delta_threshold: float = 0.0
    adjacency: Adjacency = Adjacency.REPLACE_SENSITIVE
    unit: Unit = Unit.IMPRESSION

    def __post_init__(self) -> None:
        if self.columns < 1 or not 1 <= self.sigma <= MAX_SIGMA:
            raise InputError(f"counts need at least one column and a sigma from 1 to {MAX_SIGMA}")
        if self.candidates not in get_args(Candidates):
            raise InputError(f"counts.candidates is one of {', '.join(get_args(Candidates))}, not {self.candidates!r}")
        if not accounting.MIN_DELTA <= self.delta < 1:
            raise InputError(f"counts.delta is from {accounting.MIN_DELTA:g} to below 1, not {self.delta:g}")
        spends = 1e-15 <= self.delta_threshold < self.delta
        if not (spends if self.candidates == "discovered" else self.delta_threshold == 0):
            raise InputError("discovered candidates, and no others, spend a part of counts.delta on the threshold")

    @classmethod
    def calibrate(
        cls,
        columns: int,
        epsilon: float,
        delta: float,
        candidates: Candidates = "declared",
        *,
        threshold_share: float = 0.5,
        adjacency: Adjacency = Adjacency.REPLACE_SENSITIVE,
        unit: Unit = Unit.IMPRESSION,
    ) -> "PrivateCounts":
        """The least noise with which all columns together spend at most (epsilon, delta).

        `threshold_share` of delta pays for the discovery of candidates, where they are discovered.
        """
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise InputError(f"counts.epsilon is a positive number, not {epsilon:g}")
        delta_threshold = delta * threshold_share if candidates == "discovered" else 0.0

        def with_sigma(sigma: int) -> PrivateCounts:
            return cls(columns, sigma, delta, candidates, delta_threshold, adjacency, unit)

        with_sigma(1)  # refuses wrong values before they reach the search
        # The continuous Gaussian needs nearly the same noise, except where sigma is small, or so large that the grid
        # of the PLD is coarse beside it.
        shifts = columns * (2 if adjacency.replaces else 1)
        guess = math.sqrt(shifts) * gaussian_mechanism.get_sigma_gaussian(epsilon, delta - delta_threshold)
        top = min(MAX_SIGMA, 2 * math.ceil(guess))
        low = 1 if guess < 10 else int(0.9 * guess)
        sigma = bisect.bisect_left(
            range(top + 1), True, lo=min(low, top), key=lambda s: with_sigma(s).epsilon <= epsilon
        )
        if sigma > top:
            raise InputError(f"counts.epsilon = {epsilon:g} is too small for {columns} columns: no noise suffices")
        return with_sigma(sigma)

    @property
    def tau(self) -> int:
        """The noisy count below which a discovered bin never leaves."""
        if self.candidates != "discovered":
            raise ValueError("only discovered candidates have a release threshold")
        return _release_threshold(self.sigma, self.columns, self.delta_threshold)

    def threshold(self, asked: int) -> int:
        """The threshold that is in force when `asked` is wanted."""
        return max(asked, self.tau) if self.candidates == "discovered" else asked

    def release(self, counts: NDArray[np.integer], noise: Noise) -> NDArray[np.int64]:
        """The noisy counts of one column's candidate bins. A discovered bin below `tau` comes back as zero."""
        counts = np.asarray(counts, np.int64)
        noisy = counts + noise.discrete_gaussian(self.sigma, len(counts))
        if self.candidates == "discovered":
            if np.any(counts < 1):
                raise ValueError("a discovered candidate is a bin that holds someone")
            noisy[noisy < self.tau] = 0
        return noisy

    def privacy_loss(self, adjacency: Adjacency | None = None) -> PrivacyLossDistribution:
        """A PLD that dominates the release of all columns."""
        return accounting.counts_pld(
            adjacency or self.adjacency,
            sigma=self.sigma,
            columns=self.columns,
            delta_threshold=self.delta_threshold,
        )

    @property
    def epsilon(self) -> float:
        return accounting.epsilon([self.privacy_loss()], self.delta)

    @property
    def epsilon_vocabulary_known(self) -> float:
        """What the paper's convention reports: the vocabulary is known, only its counts are private (000, App. A)."""
        noise_alone = accounting.counts_pld(self.adjacency, sigma=self.sigma, columns=self.columns)
        return accounting.epsilon([noise_alone], self.delta)

    def charge(self, noise: Noise, *, run: str | None = None, note: str = "") -> Charge:
        """What releasing every column with `noise` costs: to be on disk before the first `release`."""
        return Charge(
            mechanism="discrete-gaussian-counts",
            epsilon=self.epsilon,
            delta=self.delta,
            adjacency=self.adjacency,
            unit=self.unit,
            accountant=accounting.ACCOUNTANT,
            parameters={
                "columns": self.columns,
                "sigma": self.sigma,
                "candidates": self.candidates,
                "delta_threshold": self.delta_threshold,
                "noise": noise.source,
            },
            note=note,
            run=run,
        )


@lru_cache(maxsize=64)
def _release_threshold(sigma: int, bins: int, delta: float) -> int:
    """The smallest tau with bins · P(1 + Z ≥ tau) ≤ delta, for discrete Gaussian Z.

    P(Z ≥ m) = Σ_{x≥m} exp(-x²/2σ²) / Σ_x exp(-x²/2σ²), and the denominator is above √(2π)·σ (Poisson summation: all
    terms of the dual sum are positive). Terms beyond 40σ are below e^-800: the last factor covers them and rounding.
    """
    x = np.arange(40 * sigma, -1, -1)
    tails = np.cumsum(np.exp(-0.5 * (x / sigma) ** 2)) / (math.sqrt(2 * math.pi) * sigma) * (1 + 1e-9)
    least = int(x[np.searchsorted(bins * tails, delta, side="right") - 1])  # P(Z ≥ least) is small enough
    return least + 1
