"""The claim in words and in JSON: who is protected, by how much, against what, and what is not covered."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from adumbra.errors import InputError
from adumbra.privacy import accounting
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.ledger import Charge, total
from adumbra.privacy.noise import INSECURE_REPEATABLE

VERSION = 1

_CHANGES = {
    Adjacency.REPLACE_SENSITIVE: "If one {unit}'s sensitive features and label had been others",
    Adjacency.REPLACE_EXAMPLE: "If one {unit}'s features and label, public features included, had been others",
    Adjacency.ZERO_OUT: "If one {unit} had been empty and contributed nothing",
    Adjacency.ADD_OR_REMOVE: "If one {unit} had not been in the log, or one more had been",
}
_UNITS = {
    Unit.IMPRESSION: "impression",
    Unit.USER: "user",
    Unit.USER_PUBLISHER: "user with one publisher",
    Unit.USER_ADVERTISER: "user with one advertiser",
}
_SAMPLING = {
    "poisson": "secret Poisson sampling: every {unit} takes part in a step independently of all others",
    "truncated-poisson": "secret Poisson sampling, cut uniformly to a maximum batch that is accounted",
    "shuffle": "shuffled epochs, accounted without amplification",
}


@dataclass(frozen=True)
class Statement:
    """What one run claims. `epsilon` is that of the planned budget, whether or not the run ended early (rule 22).

    Made by `of`, which accounts for the charges; `check` does so again and refuses a claim that they do not bear.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    unit: Unit
    units: int
    """How many units the log holds: the n of δ = 1/n; public."""
    method: str
    charges: tuple[Charge, ...]
    noise: str
    """The name of the source of noise and of secret sampling."""
    accountant: str = accounting.ACCOUNTANT
    store_total: tuple[float, float] | None = None
    """(Σε, Σδ) over all runs on this store, this one included, as its ledger holds them."""
    stand_in: bool = False
    """The log is declared generated or public: nothing is charged, and nothing is protected."""
    planned_steps: int = 0
    steps: int = 0
    lost_steps: int = 0
    """Paid for but lost in a crash; the run ended that many steps earlier."""
    ended_early: bool = False
    shown: tuple[str, ...] = ()
    """What was shown of training rows without noise, because it was asked for by name."""
    notes: tuple[str, ...] = ()
    version: int = field(default=VERSION)

    def __post_init__(self) -> None:
        object.__setattr__(self, "adjacency", Adjacency(self.adjacency))
        object.__setattr__(self, "unit", Unit(self.unit))
        for name in ("charges", "shown", "notes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.version != VERSION:
            raise InputError(f"a statement of version {self.version} is not known here: this is version {VERSION}")
        if not self.epsilon >= 0 or not 0 <= self.delta < 1 or self.units < 1:
            raise InputError("a statement needs epsilon ≥ 0, 0 ≤ delta < 1 and at least one unit")

    @classmethod
    def of(
        cls, charges: Iterable[Charge], *, delta: float, adjacency: Adjacency, unit: Unit, **others: Any
    ) -> "Statement":
        """The statement of a run that was charged `charges`, composed jointly.

        `planned` is the ε that the whole run was to spend: a run that ends early states it all the same (rule 22).
        """
        charges = tuple(charges)
        accountant, planned = others.pop("accountant", accounting.ACCOUNTANT), others.pop("planned", 0.0)
        private = others.get("method") != "none"
        epsilon = accounting.joint_epsilon(charges, delta, adjacency, unit, accountant) if private else math.inf
        return cls(max(epsilon, planned), delta, adjacency, unit, charges=charges, accountant=accountant, **others)

    def check(self) -> None:
        """Account again: refuse if the charges cost more than is claimed."""
        if not math.isfinite(self.epsilon):
            return
        cost = accounting.joint_epsilon(self.charges, self.delta, self.adjacency, self.unit, self.accountant)
        if cost > self.epsilon * (1 + 1e-6):
            raise InputError(f"the statement claims epsilon {self.epsilon:g}, but its charges cost {cost:g}")

    @property
    def protects(self) -> bool:
        return math.isfinite(self.epsilon) and not self.stand_in and self.noise != INSECURE_REPEATABLE

    @property
    def sampling(self) -> tuple[str, ...]:
        names = (c.parameters.get("sampling", "poisson") for c in self.charges if c.mechanism == "dp-sgd")
        return tuple(dict.fromkeys(names))

    @property
    def claim(self) -> str:
        """The first thing that a reader sees."""
        unit = _UNITS[self.unit]
        if self.stand_in:
            return "Nothing is protected: the log is declared a stand-in (generated or public)."
        if not math.isfinite(self.epsilon):
            return "Nothing is protected: this model was trained without privacy."
        if self.noise == INSECURE_REPEATABLE:
            return f"Nothing is protected: the noise is {INSECURE_REPEATABLE}, for tests only."
        change = _CHANGES[self.adjacency].format(unit=unit)
        times = math.exp(self.epsilon) if self.epsilon < 700 else math.inf
        return (
            f"{change}, whatever anyone concludes from what this run releases would have been at most "
            f"e^{self.epsilon:.4g} ≈ {times:.3g} times more or less likely, apart from a probability of at most "
            f"{self.delta:.3g}."
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        found: list[str] = []
        if self.noise == INSECURE_REPEATABLE:
            found.append(
                f"The noise is {INSECURE_REPEATABLE}: whoever knows the seed can take it away. Nothing is protected."
            )
        if self.delta > 1 / self.units * (1 + 1e-9):
            found.append(
                f"delta {self.delta:.3g} is above 1/n = {1 / self.units:.3g}: at this delta a run may publish "
                f"somebody's data outright and still keep its claim."
            )
        if self.store_total is not None and self.store_total[0] > self.epsilon * (1 + 1e-9):
            found.append(
                f"All runs on this store together spend epsilon {self.store_total[0]:.4g}, delta "
                f"{self.store_total[1]:.3g}: that, not this run's figure, holds against somebody who sees them all."
            )
        found += [f"Shown without noise, and not covered: {name}." for name in self.shown]
        return tuple(found)

    @property
    def covered(self) -> tuple[str, ...]:
        if not self.protects:
            return ()
        unit = _UNITS[self.unit]
        found = [
            f"The released model, and anything computed from it, for every {unit} among the training rows.",
            "Every step's sum of clipped gradients, against somebody who sees all intermediate models.",
        ]
        mechanisms = {c.mechanism for c in self.charges}
        if "randomized-response" in mechanisms:
            found.append("The randomised labels, which are drawn once and may be published.")
        if "discrete-gaussian-counts" in mechanisms:
            found.append("The vocabulary of sensitive columns, which is made of noisy counts.")
        return tuple(found)

    @property
    def not_covered(self) -> tuple[str, ...]:
        found = [
            "Held-out rows: metrics that are published of them give them no protection.",
            f"The configuration, if it was chosen by looking at other runs on this log that are not charged here; "
            f"the number of units, {self.units}, which is taken as known.",
            "Floating point: the mathematics is of real numbers, and the last bits of a sum are not.",
            "Who took part in a step, the realised batch sizes, checkpoints and the store: they never leave.",
        ]
        if self.adjacency is Adjacency.REPLACE_SENSITIVE:
            found.insert(1, "Public features and keys: whoever attacks is taken to know them.")
        if self.unit is Unit.IMPRESSION:
            found.insert(
                1, "Somebody with many impressions: each of them is protected, all of them together are less so."
            )
        return tuple(found)

    @property
    def course(self) -> tuple[str, ...]:
        """What happened on the way, and that it does not lower the claim."""
        found: list[str] = []
        if self.planned_steps:
            found.append(f"{self.steps} of {self.planned_steps} planned steps of DP-SGD stand in the model.")
        if self.lost_steps:
            found.append(
                f"{self.lost_steps} steps were lost in a crash; they count as spent, and the run ended earlier."
            )
        if self.ended_early:
            found.append(
                "The run ended early. The claim is that of the planned budget: an end may have been chosen by looking."
            )
        return (*found, *self.notes)

    def to_json(self) -> dict[str, Any]:
        finite = math.isfinite(self.epsilon)
        return {
            "version": self.version,
            "claim": self.claim,
            "protects": self.protects,
            "epsilon": self.epsilon if finite else None,
            "delta": self.delta,
            "adjacency": self.adjacency.value,
            "adjacency_sentence": self.adjacency.sentence,
            "unit": self.unit.value,
            "units": self.units,
            "method": self.method,
            "accountant": self.accountant,
            "charges": [charge.to_json() for charge in self.charges],
            "sampling": list(self.sampling),
            "noise": self.noise,
            "stand_in": self.stand_in,
            "store_total": self.store_total and {"epsilon": self.store_total[0], "delta": self.store_total[1]},
            "planned_steps": self.planned_steps,
            "steps": self.steps,
            "lost_steps": self.lost_steps,
            "ended_early": self.ended_early,
            "shown": list(self.shown),
            "warnings": list(self.warnings),
            "covered": list(self.covered),
            "not_covered": list(self.not_covered),
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Statement":
        """What was written; words that follow from the rest are made again and not taken from it."""
        derived = ("claim", "protects", "adjacency_sentence", "sampling", "warnings", "covered", "not_covered")
        own = {name: value for name, value in values.items() if name not in derived}
        try:
            own["epsilon"] = math.inf if own["epsilon"] is None else own["epsilon"]
            own["charges"] = [Charge.from_json(charge) for charge in own["charges"]]
            if own["store_total"] is not None:
                own["store_total"] = own["store_total"]["epsilon"], own["store_total"]["delta"]
            return cls(**own)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"not a statement: {error}") from None

    def to_markdown(self) -> str:
        spent, spent_delta = total(self.charges)
        epsilon = f"{self.epsilon:.6g}" if math.isfinite(self.epsilon) else "infinite"
        sampling = [_SAMPLING.get(name, name).format(unit=_UNITS[self.unit]) for name in self.sampling]
        lines = [
            "# What this run protects",
            "",
            self.claim,
            "",
            *(f"**{warning}**\n" for warning in self.warnings),
            "| | |",
            "|---|---|",
            f"| epsilon | {epsilon} |",
            f"| delta | {self.delta:.6g} |",
            f"| adjacency | {self.adjacency}: {self.adjacency.sentence} |",
            f"| unit | {_UNITS[self.unit]}; the log holds {self.units} |",
            f"| method | {self.method} |",
            f"| accountant | {self.accountant}; mechanisms of one run compose jointly |",
            f"| sampling | {'; '.join(sampling) or 'none'} |",
            f"| noise and secret sampling | {self.noise} |",
        ]
        if self.store_total is not None:
            all_epsilon, all_delta = self.store_total
            lines.append(f"| all runs on this store | epsilon {all_epsilon:.6g}, delta {all_delta:.6g} (they add) |")
        lines += ["", "## What was charged", "", "| mechanism | epsilon | delta | parameters |", "|---|---|---|---|"]
        lines += [
            f"| {c.mechanism} | {c.epsilon:.6g} | {c.delta:.6g} | `{json.dumps(c.parameters)}` |" for c in self.charges
        ]
        if self.charges:
            lines += ["", f"Sum of the charges: epsilon {spent:.6g}, delta {spent_delta:.6g}."]
        for title, sentences in (
            ("How it went", self.course),
            ("Covered", self.covered),
            ("Not covered", self.not_covered),
        ):
            if sentences:
                lines += ["", f"## {title}", "", *(f"- {sentence}" for sentence in sentences)]
        return "\n".join(lines) + f"\n\nStatement, version {self.version}.\n"

    def __str__(self) -> str:
        return " ".join((self.claim, *self.warnings))
