"""What a run will do and what it costs, as one frozen object: sampler, noise and accountant cannot disagree."""

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from adumbra.config import Config
from adumbra.errors import InputError
from adumbra.privacy import accounting, calibration
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.ledger import Charge
from adumbra.privacy.noise import SecretBits
from adumbra.privacy.randomizers import RandomizedResponse
from adumbra.privacy.sampling import Draw, Poisson, Sampling, ShuffledEpochs


@dataclass(frozen=True)
class DpSgd:
    """A DP-SGD phase: whose gradients a step sums, clipped to what, with how much noise, divided by what.

    A group is one example, or a microbatch: `microbatch` rows in a row of the log, a partition that is fixed and
    public. Groups are sampled whole, and what is clipped is the average of a group (privacy.md, rule 11).
    """

    sampling: Sampling
    steps: int
    clip_norm: float
    noise_multiplier: float
    microbatch: int

    @property
    def divisor(self) -> float:
        """The expected number of groups in a step: a constant (rule 13)."""
        return self.sampling.expected_batch

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.clip_norm

    def sampler(self) -> Draw:
        """Draws a step's groups. Keyed anew with every call, so also after a resume (rule 4)."""
        return self.sampling.sampler()

    def rows(self, groups: Tensor) -> Tensor:
        """The rows of some groups, group by group."""
        if self.microbatch == 1:
            return groups
        return (groups[:, None] * self.microbatch + torch.arange(self.microbatch)).flatten()


@dataclass(frozen=True, eq=False)
class Plan:
    """A whole run: what counting spent before, the labels' randomiser, the DP-SGD phase; at most (ε, δ) in all."""

    epsilon: float
    delta: float
    adjacency: Adjacency
    unit: Unit
    units: int
    accountant: str
    counts: tuple[Charge, ...]
    labels: RandomizedResponse | None
    dp_sgd: DpSgd | None

    @property
    def private(self) -> bool:
        return self.labels is not None or self.dp_sgd is not None

    def charge_for_labels(self, bits: SecretBits | None = None, run: str | None = None) -> Charge:
        """Before the labels are randomised; once for a store, whoever trains on them."""
        assert self.labels is not None
        note = "labels, randomised once"
        return self.labels.charge(bits or SecretBits(), adjacency=self.adjacency, unit=self.unit, run=run, note=note)

    def charge_for_steps(self, done: int, steps: int, run: str, labels: bool) -> Charge:
        """For the next steps of the DP-SGD phase: by how much they raise what this run was charged for together.

        So the charges of a run add up to their joint (ε, δ), and the ledger's sum over its lines is right. `labels`:
        whether this run was charged for its randomised labels; if an earlier one was, its steps are charged alone.
        """
        raised = self._charged(done + steps, labels) - self._charged(done, labels)
        note = f"steps {done + 1} to {done + steps}, jointly with what the run spent before"
        return self._steps(steps, max(0.0, raised), self.delta if done == 0 else 0.0, note, run)

    def _charged(self, steps: int, labels: bool) -> float:
        """What stands on the ledger after this many steps: never less than the labels were charged before them."""
        return max(self._own_epsilon(steps, labels), self._own_epsilon(0, labels))

    @cache  # noqa: B019 (a plan lives as long as its run)
    def _own_epsilon(self, steps: int, labels: bool) -> float:
        """What the randomised labels (if they are this run's) and this many steps cost together, counts left aside.

        Part of the steps costs at most what the coarse grid gives, and at most what all of them do.
        """
        with_labels = self._label_charges() if labels else []
        if self.dp_sgd is None or steps == 0:
            return sum(charge.epsilon for charge in with_labels)
        charges = [*with_labels, self._steps(steps)]
        if steps == self.dp_sgd.steps or self.accountant == accounting.RDP:
            return self._joint(charges)
        rough = [accounting.pld_of(charge, self.adjacency, accounting.COARSE) for charge in charges]
        return min(accounting.epsilon(rough, self.delta), self._own_epsilon(self.dp_sgd.steps, labels))

    def _label_charges(self) -> list[Charge]:
        return [] if self.labels is None else [self.charge_for_labels()]

    def _steps(
        self, steps: int, epsilon: float = 0.0, delta: float = 0.0, note: str = "", run: str | None = None
    ) -> Charge:
        assert self.dp_sgd is not None
        parameters = self.dp_sgd.sampling.charge_parameters(self.dp_sgd.noise_multiplier, steps)
        return Charge("dp-sgd", epsilon, delta, self.adjacency, self.unit, self.accountant, parameters, note, run)

    def _joint(self, charges: list[Charge]) -> float:
        return accounting.joint_epsilon(charges, self.delta, self.adjacency, self.unit, self.accountant)

    @cached_property
    def charges(self) -> tuple[Charge, ...]:
        """Every mechanism of the run once, each with what it costs alone: what `account` and the statement list."""
        charges = [*self.counts, *self._label_charges()]
        if self.dp_sgd is not None:
            steps = self.dp_sgd.steps
            charges.append(self._steps(steps, self._joint([self._steps(steps)]), self.delta, "all steps"))
        return tuple(charges)

    @cached_property
    def claim(self) -> tuple[float, float]:
        """The (ε, δ) of counts, labels and all steps together; randomised labels alone need no δ."""
        if not self.private:
            return math.inf, 0.0
        if self.dp_sgd is None and not self.counts:
            return self._own_epsilon(0, True), 0.0
        return self._joint(list(self.charges)), self.delta

    @property
    def own(self) -> tuple[float, float]:
        """What this run adds to the store's ledger."""
        steps = 0 if self.dp_sgd is None else self.dp_sgd.steps
        return self._charged(steps, True), self.delta if steps else 0.0


def make(config: Config, units: int, classes: int, counts: tuple[Charge, ...] = ()) -> Plan:
    """The plan of a configuration over `units` protected units; noise is calibrated so that all fits into (ε, δ)."""
    privacy, method = config.privacy, config.method
    adjacency, unit = Adjacency(privacy.adjacency), Unit(privacy.unit)
    delta = 1 / units if privacy.delta == "1/n" else float(privacy.delta)
    accounting.check_accountant(privacy.accountant, adjacency)
    if unit is not Unit.IMPRESSION:
        raise InputError(f"privacy.unit = '{unit}' is not offered yet; use 'impression'")
    share = {"hybrid": method.split, "dp-sgd": 0.0, "label-dp": 1.0, "none": 0.0}[method.kind]
    left = privacy.epsilon - sum(charge.epsilon for charge in counts)
    labels = dp_sgd = None
    if method.kind != "none":
        if left <= 0:
            raise InputError(
                f"privacy.epsilon = {privacy.epsilon:g} is the total, and counting this store's values spent"
                f" {privacy.epsilon - left:.3g} of it"
            )
        if share > 0:
            if adjacency is Adjacency.ADD_OR_REMOVE:
                raise InputError(
                    "randomised labels have no guarantee under add-or-remove: their number tells who is there; use"
                    " replace-sensitive, or method.kind = 'dp-sgd'"
                )
            if adjacency is Adjacency.REPLACE_EXAMPLE:
                raise InputError(
                    "the label phase reads public features as they are, and replace-example protects them too; use"
                    " replace-sensitive, or method.kind = 'dp-sgd'"
                )
            labels = RandomizedResponse(share * left, classes)
        if share < 1:
            others = list(counts)
            if labels is not None:
                others.append(labels.charge(SecretBits(), adjacency=adjacency, unit=unit))
            dp_sgd = _dp_sgd(config, units, delta, adjacency, others)
    if labels is None and dp_sgd is None:
        counts = ()
    plan = Plan(privacy.epsilon, delta, adjacency, unit, units, privacy.accountant, counts, labels, dp_sgd)
    if counts and dp_sgd is None and plan.claim[0] > privacy.epsilon * (1 + 1e-9):
        raise InputError(
            f"privacy.epsilon = {privacy.epsilon:g} is out of reach at delta {delta:.3g}: counting this store's values"
            f" and the labels cost {plan.claim[0]:.4g} there"
        )
    return plan


def _dp_sgd(config: Config, units: int, delta: float, adjacency: Adjacency, others: list[Charge]) -> DpSgd:
    phase = config.dp_phase
    if phase.batch_size > units:
        raise InputError(f"dp_phase.batch_size = {phase.batch_size} is larger than the {units} training rows")
    if phase.batch_size % phase.microbatch:
        raise InputError(f"dp_phase.batch_size = {phase.batch_size} is no multiple of microbatch = {phase.microbatch}")
    groups, batch = units // phase.microbatch, phase.batch_size // phase.microbatch
    steps = max(1, round(phase.epochs * groups / batch))
    epsilon, accountant = config.privacy.epsilon, config.privacy.accountant
    if phase.sampling == "truncated-poisson":
        sampling, sigma = calibration.truncated(
            groups, batch / groups, steps, epsilon, delta, adjacency=adjacency, others=others
        )
    else:
        shuffled = phase.sampling == "shuffle"
        sampling = ShuffledEpochs(groups, batch, config.seed) if shuffled else Poisson(groups, batch / groups)
        sigma = calibration.noise_multiplier(
            sampling, steps, epsilon, delta, adjacency=adjacency, accountant=accountant, others=others
        )
    return DpSgd(sampling, steps, phase.clip_norm, sigma, phase.microbatch)
