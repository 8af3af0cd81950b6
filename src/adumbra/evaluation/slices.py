"""A split cut by the values of one public column, each slice with metrics of its own."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adumbra.data.store import TOKENS, Split, Store
from adumbra.errors import InputError
from adumbra.evaluation.metrics import Kind, Tally, summary

MINIMUM, MOST = 1000, 100
OTHER = "(other)"
_LIMIT = 1 << 12
"""Groups of a slice's histogram: there are many slices, and AUC needs fewer groups the fewer rows there are."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Slicing:
    """By which column, and which slices have enough rows to be shown; the rows of the others are one slice, `OTHER`."""

    column: str
    place: int
    """Its position in a row of public ids."""
    minimum: int = MINIMUM
    most: int = MOST
    names: dict[int, str] = field(default_factory=dict, repr=False)
    """The values' texts by id, where the store's vocabulary knows them."""

    @staticmethod
    def of(store: Store, column: str, minimum: int = MINIMUM, most: int = MOST) -> "Slicing":
        """By a feature of the public tower. A sensitive column cuts nothing: who has which value is protected."""
        if minimum < 1 or most < 1:
            raise InputError(f"slices of at least {minimum} rows, at most {most} of them: both must be 1 or more")
        feature = _feature(store, column)
        return Slicing(feature["name"], feature["start"], minimum, most, _names(store, feature["name"]))

    def begin(self, split: Split, kind: Kind) -> "Slices":
        """Counts the slices first, so that no more are tallied than will be shown."""
        ids = split["public"][:, self.place]
        top = max((int(ids[at : at + _CHUNK].max()) for at in range(0, len(ids), _CHUNK)), default=0)
        counts = np.zeros(top + 1, np.int64)
        for at in range(0, len(ids), _CHUNK):
            counts += np.bincount(ids[at : at + _CHUNK], minlength=top + 1)
        largest = np.argsort(-counts, kind="stable")[: self.most]
        shown = largest[counts[largest] >= self.minimum]
        code = np.full(top + 1, len(shown), np.int64)
        code[shown] = np.arange(len(shown))
        empty = Tally.empty(kind, _LIMIT)
        return Slices(ids, code, [self.name(int(value)) for value in shown], [empty] * (len(shown) + 1), kind)

    def name(self, value: int) -> str:
        return self.names.get(value, f"(id {value})")

    def as_json(self, slices: list[tuple[str, Tally]]) -> dict[str, Any]:
        """A slice of too few rows says only how many they are."""
        values = [
            {"value": name} | (summary(tally) if tally.rows >= self.minimum else {"rows": tally.rows})
            for name, tally in slices
        ]
        return {"column": self.column, "minimum_rows": self.minimum, "values": values}


@dataclass
class Slices:
    """The tallies of a split's slices while it is read."""

    ids: np.ndarray
    code: np.ndarray
    names: list[str]
    parts: list[Tally]
    kind: Kind

    def add(self, first: int, logits: np.ndarray, labels: np.ndarray) -> None:
        code = self.code[self.ids[first : first + len(logits)]]
        order = np.argsort(code, kind="stable")
        ends = np.cumsum(np.bincount(code, minlength=len(self.parts)))
        for place, rows in enumerate(np.split(order, ends[:-1])):
            if len(rows):
                self.parts[place] += Tally.of(logits[rows], labels[rows], self.kind, _LIMIT)

    def tallies(self) -> list[tuple[str, Tally]]:
        """Each with its value's name, the largest first, then all the other rows if there are any."""
        named = zip([*self.names, OTHER], self.parts, strict=True)
        return [(name, tally) for name, tally in named if tally.rows]


def _feature(store: Store, column: str) -> dict[str, Any]:
    """The description of the public feature of that name, or the line that says why there is none."""
    tokens = store.description["tokens"]
    public = [feature for feature in tokens if feature["tower"] == "public" and feature["length"] == 1]
    by_name = {feature["name"]: feature for feature in public}
    of_column = [feature for feature in public if feature["column"] == column]
    if column in by_name or len(of_column) == 1:
        return by_name[column] if column in by_name else of_column[0]
    if of_column:
        names = ", ".join(feature["name"] for feature in of_column)
        raise InputError(f"slices by '{column}': it gives several features; choose one of {names}")
    roles = {entry["name"]: entry["role"] for entry in store.description["recipe"]["columns"]}
    roles |= {feature["name"]: feature["role"] for feature in tokens}
    sensitive = {feature["column"] for feature in tokens if feature["tower"] == "sensitive"}
    if column not in roles:
        raise InputError(f"slices by '{column}': the store has no such column; choose one of {', '.join(by_name)}")
    if roles[column] in ("sensitive", "label") or column in sensitive:
        raise InputError(f"slices by '{column}': the column is protected; choose a public one ({', '.join(by_name)})")
    raise InputError(
        f"slices by '{column}': a list, a number or no feature of the model; choose one of {', '.join(by_name)}"
    )


def _names(store: Store, feature: str) -> dict[int, str]:
    if not (store.path / TOKENS).exists():
        return {}
    try:
        from adumbra.data.rows import names
    except ImportError:  # a machine that only trains may have no pyarrow
        return {}
    return names(store, feature)
