"""Privacy-loss distributions in, epsilon out. dp-accounting does the arithmetic; here is what may be asked of it.

Every mechanism has one function that gives a privacy-loss distribution (PLD) which dominates it under an adjacency,
from the parameters that its charge records. Inside a run they compose jointly; across runs `ledger.total` adds
(privacy.md rule 21). All PLDs live on one grid, so that any of them compose; on a grid every figure is an upper bound.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from dp_accounting import dp_event
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import RdpAccountant

from adumbra.errors import InputError
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.ledger import Charge

INTERVAL = 1e-4
COARSE = 1e-3  # ten times faster; for where a calibration begins to look, never for what it answers
MIN_DELTA = 1e-12  # below it, the rounding of convolutions is no longer negligible
ACCOUNTANT = "pld"
RDP = "rdp"


def compose(plds: Iterable[PrivacyLossDistribution]) -> PrivacyLossDistribution:
    composed: PrivacyLossDistribution | None = None
    for one in plds:
        composed = one if composed is None else composed.compose(one)
    return pld.identity(INTERVAL) if composed is None else composed


def epsilon(plds: Iterable[PrivacyLossDistribution], delta: float) -> float:
    """The ε at `delta` of all of them together: infinite where no ε is enough."""
    if not MIN_DELTA <= delta < 1:
        raise InputError(f"delta is from {MIN_DELTA:g} to below 1, not {delta:g}")
    return float(compose(plds).get_epsilon_for_delta(delta))


def counts_pld(
    adjacency: Adjacency, *, sigma: int, columns: int, delta_threshold: float = 0.0, interval: float = INTERVAL
) -> PrivacyLossDistribution:
    """Histograms of `columns` columns, each bin with its own discrete Gaussian noise.

    A unit is in one bin of each column: one that comes or goes shifts `columns` bins by one, one that is replaced
    shifts twice as many (privacy.md rule 20). Shifts of different bins are independent mechanisms of sensitivity one.
    """
    shifts = columns * (2 if adjacency.replaces else 1)
    unit_shift = pld.from_discrete_gaussian_mechanism(
        sigma, value_discretization_interval=interval, use_connect_dots=True
    )
    return compose([unit_shift.self_compose(shifts), approximate_pld(0.0, delta_threshold, interval)])


def approximate_pld(epsilon: float, delta: float = 0.0, interval: float = INTERVAL) -> PrivacyLossDistribution:
    """Anything that is (epsilon, delta)-private, of which no more is known (rule 17)."""
    return pld.from_privacy_parameters(common.DifferentialPrivacyParameters(epsilon, delta), interval)


def randomized_response_pld(
    adjacency: Adjacency, *, epsilon: float, classes: int = 2, times: int = 1, interval: float = INTERVAL
) -> PrivacyLossDistribution:
    """`times` independent answers about one label, each by `classes`-ary randomised response at `epsilon`.

    Zero-out pays the full epsilon as well: a lower figure assumes a null label drawn uniformly (rule 19).
    """
    if adjacency is Adjacency.ADD_OR_REMOVE:
        raise InputError("randomised labels have no guarantee under add-or-remove: their number tells who is there")
    one = pld.from_randomized_response(
        classes / (math.exp(epsilon) + classes - 1),  # not the probability of a flip (rule 18)
        classes,
        value_discretization_interval=interval,
        neighboring_relation=Adjacency.REPLACE_EXAMPLE.relation(),
    )
    return one.self_compose(times)


def dp_sgd_pld(
    adjacency: Adjacency,
    *,
    noise_multiplier: float,
    steps: int,
    sampling: str = "poisson",
    sampling_probability: float = math.nan,
    units: int = 0,
    maximum_batch: int = 0,
    batch_size: int = 0,
    interval: float = INTERVAL,
) -> PrivacyLossDistribution:
    """DP-SGD; `noise_multiplier` is relative to the clip norm, and so to the most that one unit (or group) adds.

    - `poisson`, secret, needs `sampling_probability`: under replacement a step's pair is q N(C) + (1-q) N(0) against
      q N(-C) + (1-q) N(0). dp-accounting's REPLACE_ONE holds both signs: don't double the noise again (rule 7).
    - `truncated-poisson`, secret, needs `units` and `maximum_batch` too: a larger sample is cut uniformly (rule 10).
    - `shuffle` needs `units` and `batch_size`: a unit is in at most ceil(steps · batch_size / units) batches, each a
      Gaussian mechanism without amplification. Who comes or goes changes everybody's batches: refused (rule 9).

    For fixed public groups that are clipped as one, `units` and the probability are those of groups (rule 11).
    """
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise InputError(f"noise_multiplier is a positive number, not {noise_multiplier:g}")
    if sampling == "shuffle":
        if adjacency is Adjacency.ADD_OR_REMOVE:
            raise InputError(f"shuffled batches have no guarantee under {adjacency}: use Poisson sampling")
        if not 1 <= batch_size <= units:
            raise InputError(f"a shuffled batch holds from 1 to {units} units, not {batch_size}")
        return _steps_pld(adjacency, noise_multiplier, 1.0, participations(steps, batch_size, units), None, interval)
    if not 0 < sampling_probability <= 1:
        raise InputError(f"sampling_probability is above 0 and at most 1, not {sampling_probability:g}")
    if sampling == "poisson":
        return _steps_pld(adjacency, noise_multiplier, sampling_probability, steps, None, interval)
    if sampling != "truncated-poisson":
        raise InputError(f"sampling is one of {', '.join(_SAMPLING)}, not {sampling!r}")
    if not 1 <= maximum_batch <= units:
        raise InputError(f"maximum_batch is from 1 to the {units} units, not {maximum_batch}")
    return _steps_pld(adjacency, noise_multiplier, sampling_probability, steps, (units, maximum_batch), interval)


def participations(steps: int, batch_size: int, units: int) -> int:
    """In how many batches a unit is at most, when each epoch shuffles all units and cuts them into batches."""
    return -(-steps * batch_size // units)


@lru_cache(maxsize=16)  # a charge, its statement and its verification ask for the same one; 6 MB at the papers' sizes
def _steps_pld(
    adjacency: Adjacency,
    sigma: float,
    probability: float,
    steps: int,
    truncation: tuple[int, int] | None,
    interval: float,
) -> PrivacyLossDistribution:
    if steps < 1:
        return pld.identity(interval)
    if truncation is not None:
        units, maximum = truncation
        step = pld.from_truncated_subsampled_gaussian_mechanism(
            units, probability, maximum, sigma, interval, neighboring_relation=adjacency.relation()
        )
        return step.self_compose(steps)
    if probability == 1:
        sigma, steps = sigma / math.sqrt(steps), 1  # k Gaussian mechanisms are one
    step = pld.from_gaussian_mechanism(
        sigma,
        sampling_prob=probability,
        value_discretization_interval=interval,
        use_connect_dots=True,
        neighboring_relation=adjacency.relation(),
    )
    return step.self_compose(steps)


_SAMPLING = {
    "poisson": ("noise_multiplier", "sampling_probability", "steps"),
    "truncated-poisson": ("noise_multiplier", "sampling_probability", "steps", "units", "maximum_batch"),
    "shuffle": ("noise_multiplier", "steps", "units", "batch_size"),
}
_PLDS: dict[str, tuple[Callable[..., PrivacyLossDistribution], tuple[str, ...]]] = {
    "discrete-gaussian-counts": (counts_pld, ("sigma", "columns", "delta_threshold")),
    "randomized-response": (randomized_response_pld, ("epsilon", "classes", "times")),
    **{f"dp-sgd, {sampling}": (partial(dp_sgd_pld, sampling=sampling), names) for sampling, names in _SAMPLING.items()},
}


def _needed(charge: Charge) -> tuple[Callable[..., PrivacyLossDistribution], dict[str, Any]]:
    """What makes the PLD of `charge`, and the parameters that it takes."""
    mechanism = charge.mechanism
    if mechanism == "dp-sgd":
        mechanism += f", {charge.parameters.get('sampling', 'poisson')}"
    if mechanism not in _PLDS:
        raise InputError(f"charge {charge.id}: unknown mechanism {mechanism!r}")
    make, names = _PLDS[mechanism]
    missing = [name for name in names if name not in charge.parameters]
    if missing:
        raise InputError(f"charge {charge.id}: {charge.mechanism} lacks the parameters {', '.join(missing)}")
    return make, {name: charge.parameters[name] for name in names}


def pld_of(charge: Charge, adjacency: Adjacency | None = None, interval: float = INTERVAL) -> PrivacyLossDistribution:
    """The PLD of what `charge` paid for, from its parameters, under its own adjacency or another."""
    if charge.accountant != ACCOUNTANT:
        raise InputError(f"charge {charge.id} was accounted by {charge.accountant!r}, which has no PLD")
    make, parameters = _needed(charge)
    return make(adjacency or charge.adjacency, **parameters, interval=interval)


def joint_epsilon(
    charges: Iterable[Charge], delta: float, adjacency: Adjacency, unit: Unit, accountant: str = ACCOUNTANT
) -> float:
    """The ε at `delta` of all charges of one run, for a claim about `unit` under `adjacency`."""
    charges = _merged(charges)
    check_accountant(accountant, adjacency)
    for charge in charges:
        if not charge.unit.covers(unit):
            raise InputError(f"{charge.mechanism} was charged for one {charge.unit}: this backs no claim about {unit}")
    if accountant == RDP:
        return rdp_epsilon(charges, delta)
    return epsilon([pld_of(charge, adjacency) for charge in charges], delta)


def _merged(charges: Iterable[Charge]) -> list[Charge]:
    """Blocks of steps of one DP-SGD as one charge: faster, and for shuffled epochs the law itself.

    A unit is in one batch an epoch, however many blocks the epoch is charged in; a run that resumes goes on with the
    step after those that were charged, lost ones included.
    """
    merged: dict[str, Charge] = {}
    for charge in charges:
        if charge.mechanism != "dp-sgd" or "steps" not in charge.parameters:
            merged[charge.id] = charge
            continue
        law = {name: value for name, value in charge.parameters.items() if name != "steps"}
        key = repr((sorted(law.items()), charge.adjacency, charge.unit, charge.accountant, charge.run))
        steps = charge.parameters["steps"] + (merged[key].parameters["steps"] if key in merged else 0)
        merged[key] = replace(charge, parameters={**law, "steps": steps})
    return list(merged.values())


def check_accountant(accountant: str, adjacency: Adjacency) -> None:
    """RDP only under add-or-remove: elsewhere dp-accounting's ignores the doubled sensitivity (rule 8)."""
    if accountant != ACCOUNTANT and not (accountant == RDP and adjacency is Adjacency.ADD_OR_REMOVE):
        raise InputError(f"no accountant {accountant!r} under {adjacency}: use {ACCOUNTANT!r}")


def rdp_epsilon(charges: Iterable[Charge], delta: float) -> float:
    """The ε at `delta` of all charges together by Rényi DP, under add-or-remove: to compare with the papers."""
    accountant = RdpAccountant(neighboring_relation=Adjacency.ADD_OR_REMOVE.relation())
    for charge in charges:
        make, parameters = _needed(charge)
        if make is counts_pld:
            # Rényi divergences of discrete Gaussians are at most those of continuous ones (Canonne et al. 2020).
            event = dp_event.GaussianDpEvent(parameters["sigma"] / math.sqrt(parameters["columns"]))
            delta -= parameters["delta_threshold"]
        elif make is _PLDS["dp-sgd, poisson"][0]:
            step = dp_event.GaussianDpEvent(parameters["noise_multiplier"])
            sampled = dp_event.PoissonSampledDpEvent(parameters["sampling_probability"], step)
            event = dp_event.SelfComposedDpEvent(sampled, parameters["steps"])
        else:
            raise InputError(f"{charge.mechanism} is not accounted by RDP: use {ACCOUNTANT!r}")
        accountant.compose(event)
    if not MIN_DELTA <= delta < 1:
        raise InputError(f"delta is from {MIN_DELTA:g} to below 1, not {delta:g}")
    return float(accountant.get_epsilon(delta))
