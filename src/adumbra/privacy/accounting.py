"""Privacy-loss distributions in, epsilon out. dp-accounting does the arithmetic; here is what may be asked of it.

Every mechanism has one function that gives a privacy-loss distribution (PLD) which dominates it under an adjacency,
from the parameters that its charge records. Inside a run they compose jointly; across runs `ledger.total` adds
(privacy.md rule 21). All PLDs live on one grid, so that any of them compose; on a grid every figure is an upper bound.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import cast

from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import optimize

from adumbra.errors import InputError
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.ledger import Charge

INTERVAL = 1e-4
MIN_DELTA = 1e-12  # below it, the rounding of convolutions is no longer negligible
ACCOUNTANT = "pld"


def compose(plds: Iterable[PrivacyLossDistribution]) -> PrivacyLossDistribution:
    composed = pld.identity(INTERVAL)
    for one in plds:
        composed = composed.compose(one)
    return composed


def epsilon(plds: Iterable[PrivacyLossDistribution], delta: float) -> float:
    """The ε at `delta` of all of them together: infinite where no ε is enough."""
    if not MIN_DELTA <= delta < 1:
        raise InputError(f"delta is from {MIN_DELTA:g} to below 1, not {delta:g}")
    return float(compose(plds).get_epsilon_for_delta(delta))


def counts_pld(
    adjacency: Adjacency, *, sigma: int, columns: int, delta_threshold: float = 0.0
) -> PrivacyLossDistribution:
    """Histograms of `columns` columns, each bin with its own discrete Gaussian noise.

    A unit is in one bin of each column: one that comes or goes shifts `columns` bins by one, one that is replaced
    shifts twice as many (privacy.md rule 20). Shifts of different bins are independent mechanisms of sensitivity one.
    """
    shifts = columns * (2 if adjacency.replaces else 1)
    unit_shift = pld.from_discrete_gaussian_mechanism(
        sigma, value_discretization_interval=INTERVAL, use_connect_dots=True
    )
    return compose([unit_shift.self_compose(shifts), approximate_pld(0.0, delta_threshold)])


def approximate_pld(epsilon: float, delta: float = 0.0) -> PrivacyLossDistribution:
    """Anything that is (epsilon, delta)-private, of which no more is known (rule 17)."""
    return pld.from_privacy_parameters(common.DifferentialPrivacyParameters(epsilon, delta), INTERVAL)


def randomized_response_pld(
    adjacency: Adjacency, *, epsilon: float, classes: int = 2, times: int = 1
) -> PrivacyLossDistribution:
    """`times` independent answers about one label, each by `classes`-ary randomised response at `epsilon`.

    Zero-out pays the full epsilon as well: a lower figure assumes a null label drawn uniformly (rule 19).
    """
    if adjacency is Adjacency.ADD_OR_REMOVE:
        raise InputError("randomised labels have no guarantee under add-or-remove: their number tells who is there")
    one = pld.from_randomized_response(
        classes / (math.exp(epsilon) + classes - 1),  # not the probability of a flip (rule 18)
        classes,
        value_discretization_interval=INTERVAL,
        neighboring_relation=Adjacency.REPLACE_EXAMPLE.relation(),
    )
    return one.self_compose(times)


def dp_sgd_pld(
    adjacency: Adjacency, *, noise_multiplier: float, sampling_probability: float, steps: int
) -> PrivacyLossDistribution:
    """DP-SGD with secret Poisson sampling; `noise_multiplier` is relative to the clip norm.

    Under replacement a step's pair is q N(C) + (1-q) N(0) against q N(-C) + (1-q) N(0): dp-accounting's REPLACE_ONE
    holds both signs, so the noise is not to be doubled a second time (rule 7).
    """
    step = pld.from_gaussian_mechanism(
        noise_multiplier,
        sampling_prob=sampling_probability,
        value_discretization_interval=INTERVAL,
        use_connect_dots=True,
        neighboring_relation=adjacency.relation(),
    )
    return step.self_compose(steps)


def calibrate(plds: Callable[[float], Iterable[PrivacyLossDistribution]], target: float, delta: float) -> float:
    """The least noise multiplier, to 1e-4, at which `plds` of it stay within (target, delta)."""
    if not target > 0:
        raise InputError(f"epsilon is a positive number, not {target:g}")

    @cache  # an evaluation takes up to a second
    def excess(log_sigma: float) -> float:
        return math.log(max(epsilon(plds(math.exp(log_sigma)), delta), 1e-9) / target)

    factor = math.log(2)
    high = 0.0
    while excess(high) > 0:
        high += factor
        if high > math.log(1e4):
            raise InputError(f"no noise brings epsilon down to {target:g} at delta {delta:g}")
    low = high - factor
    while excess(low) <= 0:
        low, high = low - factor, low
        if low < math.log(0.1):  # PLDs of less noise do not fit into memory
            raise InputError(f"epsilon {target:g} at delta {delta:g} is so large that hardly any noise is needed")
    root = cast(float, optimize.brentq(excess, low, high, xtol=1e-5))
    steps = math.ceil(math.exp(root) * 10_000)
    while excess(math.log(steps / 10_000)) > 0:
        steps += 1
    return steps / 10_000


_PLDS: dict[str, tuple[Callable[..., PrivacyLossDistribution], tuple[str, ...]]] = {
    "discrete-gaussian-counts": (counts_pld, ("sigma", "columns", "delta_threshold")),
    "randomized-response": (randomized_response_pld, ("epsilon", "classes", "times")),
    "dp-sgd": (dp_sgd_pld, ("noise_multiplier", "sampling_probability", "steps")),
}


def pld_of(charge: Charge, adjacency: Adjacency | None = None) -> PrivacyLossDistribution:
    """The PLD of what `charge` paid for, from its parameters, under its own adjacency or another."""
    if charge.accountant != ACCOUNTANT:
        raise InputError(f"charge {charge.id} was accounted by {charge.accountant!r}, which has no PLD")
    if charge.mechanism not in _PLDS:
        raise InputError(f"charge {charge.id}: unknown mechanism {charge.mechanism!r}")
    make, names = _PLDS[charge.mechanism]
    missing = [name for name in names if name not in charge.parameters]
    if missing:
        raise InputError(f"charge {charge.id}: {charge.mechanism} lacks the parameters {', '.join(missing)}")
    return make(adjacency or charge.adjacency, **{name: charge.parameters[name] for name in names})


def joint_epsilon(charges: Iterable[Charge], delta: float, adjacency: Adjacency, unit: Unit) -> float:
    """The ε at `delta` of all charges of one run, for a claim about `unit` under `adjacency`."""
    charges = list(charges)
    for charge in charges:
        if not charge.unit.covers(unit):
            raise InputError(f"{charge.mechanism} was charged for one {charge.unit}: this backs no claim about {unit}")
    return epsilon([pld_of(charge, adjacency) for charge in charges], delta)


def check_accountant(accountant: str, adjacency: Adjacency) -> None:
    """RDP only under add-or-remove: elsewhere dp-accounting's ignores the doubled sensitivity (rule 8)."""
    if accountant != ACCOUNTANT and not (accountant == "rdp" and adjacency is Adjacency.ADD_OR_REMOVE):
        raise InputError(f"no accountant {accountant!r} under {adjacency}: use {ACCOUNTANT!r}")
