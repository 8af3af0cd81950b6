"""The worlds that `adumbra generate` draws its logs from, one file each; `truth` and `lines` are what they share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .lines import Cell
from .truth import BINARY, Draws, Link

Role = Literal["public", "sensitive", "label", "outcome", "user", "publisher", "advertiser", "time"]
Type = Literal["category", "integer", "real", "timestamp", "list"]


@dataclass(frozen=True)
class Column:
    """A column of the raw log. `outcome` columns are known only after the label: no feature may come from them."""

    name: str
    role: Role
    type: Type


@dataclass(frozen=True)
class Knobs:
    """What a user may turn. Rate, AUC and share have a preset's own values."""

    positive_rate: float
    """Share of positive labels; for `convs` the mean count."""
    bayes_auc: float
    """AUC of the true probability: how strong the signal is. For `convs`, of the mean against count > 0."""
    sensitive_share: float
    """Share of the variance of the true logit that comes from parts in which a sensitive feature takes part."""
    cardinality: float = 1.0
    """Multiplies the number of values of every category."""
    drift: float = 1.0
    """How much the meaning of values moves from the first row to the last; 0 for none."""
    missing: float = 1.0
    """Multiplies the chance that a value is missing."""
    criteo: bool = False
    """`attribution` only: exactly the 22 columns of the real file, none of which is a sensitive feature."""

    def values(self, values: int) -> int:
        """How many values a column has that has `values` by default."""
        return min(max(2, round(values * self.cardinality)), 2**32 - 1)


@dataclass(frozen=True)
class Rows:
    """Some rows before their labels are drawn."""

    public: np.ndarray
    sensitive: np.ndarray
    eligible: np.ndarray | None
    """Rows that can have a label other than 0 at all; None for all."""
    cells: Callable[[np.ndarray], list[Cell]]
    """The text of the rows, given their labels."""


@dataclass(frozen=True)
class World:
    """Columns, and a function that draws rows: (draws, index of each row in the log, its length, knobs) -> Rows."""

    name: str
    columns: Callable[[Knobs], list[Column]]
    draw: Callable[[Draws, np.ndarray, int, Knobs], Rows]
    knobs: Knobs
    link: Link = BINARY
    header: bool = False
