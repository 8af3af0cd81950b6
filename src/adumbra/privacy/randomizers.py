"""What happens to a label before training may see it.

A randomiser releases one random answer about each label; training then sees nothing but answers. Labels are drawn once
for one (epsilon, unit, randomiser), kept, and reused: another draw is another release (privacy.md rule 6).
"""

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Any, ClassVar, Protocol

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray

from adumbra.errors import InputError
from adumbra.privacy import accounting
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.ledger import Charge
from adumbra.privacy.noise import SecretBits

MIN_EPSILON = 1e-6


class Randomizer(Protocol):
    """What the label phase needs of a randomiser; whatever keeps this may stand beside `RandomizedResponse`.

    Labels are 0, …, `classes` - 1, answers 0, …, `answers` - 1.
    """

    mechanism: ClassVar[str]
    """The name of its charges, under which `accounting` knows its PLD."""

    @property
    def epsilon(self) -> float: ...
    @property
    def classes(self) -> int: ...
    @property
    def answers(self) -> int: ...
    @property
    def probabilities(self) -> NDArray[np.float64]:
        """P(answer | label), as [label, answer]."""
        ...

    @property
    def debias(self) -> NDArray[np.float64]:
        """[answer, label] weights: `probabilities @ debias` is the identity.

        So Σ_y debias[answer, y] L(y) has expectation L(label), for every loss L (000, section 4).
        """
        ...

    def release(self, labels: NDArray[Any], bits: SecretBits) -> NDArray[np.int64]: ...
    def privacy_loss(self, adjacency: Adjacency) -> PrivacyLossDistribution: ...
    def charge(
        self, bits: SecretBits, *, adjacency: Adjacency, unit: Unit, run: str | None = None, note: str = ""
    ) -> Charge: ...


@dataclass(frozen=True)
class RandomizedResponse:
    """K-ary randomised response: the truth with probability e^ε / (e^ε + K - 1), else one of the others, uniformly.

    Binary, it is Definition 4 of 000. Protected: each label, as (epsilon, 0), however the answers are used. The caller
    ensures that

    - a label is answered once; `times` answers about one unit's labels are charged as that many;
    - `bits` are secret and, with the labels, never leave;
    - the number and order of labels are public: refused under add-or-remove (rule 19).

    In what is really drawn the truth is rounded down by less than 2^-64 and the others are equally likely, exactly:
    the ratio of any two probabilities never exceeds e^ε.
    """

    epsilon: float
    classes: int = 2
    mechanism: ClassVar[str] = "randomized-response"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise InputError(f"randomised response needs a positive epsilon, not {self.epsilon:g}")
        if self.epsilon < MIN_EPSILON:
            raise InputError(
                f"epsilon {self.epsilon:g} is too small for randomised response: the debiased loss would weigh answers "
                f"by more than {1 / MIN_EPSILON:g}; at least {MIN_EPSILON:g} is needed"
            )
        if self.epsilon > 700:
            raise InputError(
                f"epsilon {self.epsilon:g} is so large that randomised response hides nothing: at most 700"
            )
        if not 2 <= self.classes <= 2**16:
            raise InputError(f"randomised response needs from 2 to {2**16} classes, not {self.classes}")

    @property
    def answers(self) -> int:
        return self.classes

    @property
    def keep_threshold(self) -> int:
        """⌊2^64 e^ε / (e^ε + K - 1)⌋: a word below it keeps the label."""
        with localcontext(prec=400):
            odds = Decimal(self.epsilon).exp()
            return min(int(2**64 * odds / (odds + self.classes - 1)), 2**64 - 1)

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """P(answer | label), as [label, answer]."""
        lie = 1 / (math.exp(self.epsilon) + self.classes - 1)
        channel = np.full((self.classes, self.classes), lie)
        np.fill_diagonal(channel, 1 / (1 + (self.classes - 1) * math.exp(-self.epsilon)))
        return channel

    @property
    def debias(self) -> NDArray[np.float64]:
        """[answer, label] weights: the channel's inverse, in closed form."""
        gain = math.expm1(self.epsilon)
        inverse = np.full((self.classes, self.classes), -1 / gain)
        np.fill_diagonal(inverse, 1 + (self.classes - 1) / gain)
        return inverse

    def release(self, labels: NDArray[Any], bits: SecretBits) -> NDArray[np.int64]:
        """One answer about each label. Before the first of them is drawn, `charge` is on disk."""
        labels = np.asarray(labels)
        if labels.ndim != 1:
            raise ValueError("labels are one row")
        with np.errstate(invalid="ignore"):  # what is no number is refused below
            answers = labels.astype(np.int64)
        if len(labels) and not (np.all(answers == labels) and answers.min() >= 0 and answers.max() < self.classes):
            raise ValueError(f"a label is not one of the classes 0 to {self.classes - 1}")
        lies = bits.words(len(labels)) >= np.uint64(self.keep_threshold)
        # A lie is drawn for everyone, so that neither time nor the stream's position tells how many lie.
        other = 1 + (bits.below(self.classes - 1, len(labels)) if self.classes > 2 else 0)
        return np.where(lies, (answers + other) % self.classes, answers)

    def privacy_loss(self, adjacency: Adjacency) -> PrivacyLossDistribution:
        """A PLD that dominates one answer."""
        return accounting.randomized_response_pld(adjacency, epsilon=self.epsilon, classes=self.classes)

    def charge(
        self,
        bits: SecretBits,
        *,
        adjacency: Adjacency,
        unit: Unit,
        times: int = 1,
        run: str | None = None,
        note: str = "",
    ) -> Charge:
        """What `times` answers about labels of one `unit` cost: to be on disk before the first `release`."""
        if adjacency is Adjacency.ADD_OR_REMOVE:
            self.privacy_loss(adjacency)  # refuses, and says why
        if times < 1:
            raise InputError(f"answers are given at least once, not {times} times")
        return Charge(
            mechanism=self.mechanism,
            epsilon=times * self.epsilon,
            delta=0.0,
            adjacency=adjacency,
            unit=unit,
            accountant=accounting.ACCOUNTANT,
            parameters={"epsilon": self.epsilon, "classes": self.classes, "times": times, "noise": bits.source},
            note=note,
            run=run,
        )
