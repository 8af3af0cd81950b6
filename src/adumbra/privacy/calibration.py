"""How much noise a budget asks for, given everything else that it pays for."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import cast

from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import optimize, stats

from adumbra.errors import InputError
from adumbra.privacy import accounting
from adumbra.privacy.accounting import ACCOUNTANT, COARSE, INTERVAL, RDP
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.ledger import Charge
from adumbra.privacy.sampling import Poisson, Sampling, TruncatedPoisson

GRID = 10_000  # noise multipliers are whole multiples of 1e-4
_LEAST, _MOST = 0.1, 1e4  # PLDs of less noise do not fit into memory


def calibrate(
    plds: Callable[[float], Iterable[PrivacyLossDistribution]],
    target: float,
    delta: float,
    *,
    coarse: Callable[[float], Iterable[PrivacyLossDistribution]] | None = None,
) -> float:
    """The least noise multiplier, to 1e-4, at which `plds` of it stay within (target, delta).

    `coarse` gives the same PLDs on the grid `accounting.COARSE`: the search then begins where it ends on that grid,
    and asks `plds`, which may take a second each time, two or three times.
    """

    def fine_epsilon(sigma: float) -> float:
        return accounting.epsilon(plds(sigma), delta)

    def coarse_epsilon(sigma: float) -> float:
        return accounting.epsilon(coarse(sigma) if coarse else plds(sigma), delta)

    return least_noise(fine_epsilon, target, delta, coarse_epsilon if coarse else None)


def least_noise(
    epsilon: Callable[[float], float],
    target: float,
    delta: float,
    coarse: Callable[[float], float] | None = None,
) -> float:
    """The least multiple of 1e-4 at which `epsilon`, which falls as noise grows, is at most `target`."""
    if not (math.isfinite(target) and target > 0):
        raise InputError(f"epsilon is a positive number, not {target:g}")
    excess = _excess(epsilon, target)
    try:
        rough = _excess(coarse, target) if coarse else excess
        start = _root(rough, target, delta)
    except _OutOfReach:
        if coarse is None:
            raise
        rough = excess  # the coarse grid overstates every ε: the fine one decides
        start = _root(rough, target, delta)
    higher = start * (1 + 1e-3)
    return _on_grid(excess, start, (rough(higher) - rough(start)) / math.log(higher / start))


class _OutOfReach(InputError):
    pass


def _excess(epsilon: Callable[[float], float], target: float) -> Callable[[float], float]:
    """log(epsilon / target): nearly a straight line in log σ."""
    return cache(lambda sigma: math.log(max(epsilon(sigma), 1e-9) / target))


def _root(excess: Callable[[float], float], target: float, delta: float) -> float:
    """The σ where `excess` is zero, or just below it: a bracket that grows from 1, then Brent's method."""
    low = high = 1.0
    while excess(high) > 0:
        low, high = high, 2 * high
        if high > _MOST:
            raise _OutOfReach(
                f"epsilon {target:g} at delta {delta:g} is out of reach of any noise: all else costs too much"
            )
    while excess(low) <= 0:
        low, high = low / 1.4, low
        if low < _LEAST:
            raise InputError(f"epsilon {target:g} at delta {delta:g} is so large that hardly any noise is needed")
    while not math.isfinite(excess(low)) and high / low > 1 + 1e-5:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    if not math.isfinite(excess(low)):
        return high
    return math.exp(
        cast(float, optimize.brentq(lambda x: excess(math.exp(x)), math.log(low), math.log(high), xtol=1e-5))
    )


def _on_grid(excess: Callable[[float], float], start: float, slope: float) -> float:
    """The least multiple of 1e-4 that keeps `excess` from being positive, looking where a straight line points.

    What is answered has been evaluated. The multiple below it has been, too, or the line says that it spends too much.
    """
    low, high = round(_LEAST * GRID), round(_MOST * GRID)  # spends too much, or is out of reach; holds
    here, seen = round(start * GRID), None
    while high - low > 1:
        value = excess(here / GRID)
        low, high = (here, high) if value > 0 else (low, here)
        if seen is not None and math.isfinite(value) and value != seen[1]:
            slope = (value - seen[1]) / math.log(here / seen[0])
        seen = (here, value) if math.isfinite(value) else None
        line = math.isfinite(value) and math.isfinite(slope) and slope < -1e-6
        there = math.ceil(here * math.exp(-value / slope) - 1e-6) if line else (low + high) // 2
        if there == high:
            break
        here = min(max(there, low + 1), high - 1)
    return high / GRID


def noise_multiplier(
    sampling: Sampling,
    steps: int,
    epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.REPLACE_SENSITIVE,
    accountant: str = ACCOUNTANT,
    others: Sequence[Charge] = (),
) -> float:
    """The least noise with which `steps` of DP-SGD and `others` (labels, counts) spend at most (epsilon, delta).

    All of them compose jointly (rule 21). Under `rdp`, which holds only under add-or-remove, the same by Rényi DP.
    """
    accounting.check_accountant(accountant, adjacency)
    if not steps >= 1:
        raise InputError(f"steps are at least 1, not {steps}")
    if accountant == RDP:

        def by_rdp(sigma: float) -> float:
            one = sampling.charge_parameters(sigma, steps)
            charge = Charge("dp-sgd", 0.0, 0.0, adjacency, Unit.IMPRESSION, RDP, one)
            return accounting.rdp_epsilon([*others, charge], delta)

        return least_noise(by_rdp, epsilon, delta)

    def on(interval: float) -> Callable[[float], list[PrivacyLossDistribution]]:
        rest = accounting.compose([accounting.pld_of(c, adjacency, interval) for c in others]) if others else None

        def plds(sigma: float) -> list[PrivacyLossDistribution]:
            dp_sgd = sampling.privacy_loss(adjacency, sigma, steps, interval)
            return [dp_sgd] if rest is None else [dp_sgd, rest]

        return plds

    return calibrate(on(INTERVAL), epsilon, delta, coarse=on(COARSE))


def truncated(
    units: int,
    probability: float,
    steps: int,
    epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.REPLACE_SENSITIVE,
    others: Sequence[Charge] = (),
    tolerance: float = 0.02,
) -> tuple[TruncatedPoisson, float]:
    """Truncated Poisson with the smallest maximum batch that costs hardly more noise, and its noise multiplier.

    What truncation may add to δ over all steps is at most P(a step is cut and holds the unit), summed: `maximum` is
    the least batch for which this is below `tolerance` · delta. The noise is then calibrated with truncation, so the
    claim never rests on that bound. Smaller batches become expensive at once (rule 10).
    """

    def leak(maximum: int) -> float:
        # P(the unit is in the batch and the batch was cut) = maximum/units · P(more than maximum are drawn)
        return steps * maximum / units * float(stats.binom.sf(maximum, units, probability))

    low, high = max(1, math.floor(units * probability)), units  # at `units` nothing is ever cut
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if leak(middle) > tolerance * delta else (low, middle)
    sampling = TruncatedPoisson(units, probability, high)
    plain = noise_multiplier(Poisson(units, probability), steps, epsilon, delta, adjacency=adjacency, others=others)
    rest = [accounting.pld_of(c, adjacency) for c in others]

    def with_truncation(sigma: float) -> float:
        return accounting.epsilon([sampling.privacy_loss(adjacency, sigma, steps), *rest], delta)

    return sampling, _on_grid(_excess(with_truncation, epsilon), plain, -3.0)
