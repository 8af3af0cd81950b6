"""Rows of text in, arrays of ids and numbers out: what a recipe derives from one block of a log."""

from dataclasses import dataclass, field

# pyright: reportAttributeAccessIssue=false
import numpy as np
import pyarrow.compute as pc

from adumbra import expressions
from adumbra.data import fields
from adumbra.data.fields import MISSING, Strings
from adumbra.data.source import Rows
from adumbra.data.tokens import TokenTable
from adumbra.errors import InputError
from adumbra.schema import KEYS, LOG2_TOKENS, Column, Feature, Label, Recipe

PAD, ABSENT = 0, 1
"""Provisional ids of every feature: padding of a list, and a missing value. Tokens follow from 2 on; where a table does
not grow, unknown tokens all get the id behind its last."""
MAGNITUDES = 3 + 2 * 128
"""Bins in which numbers are counted for their bounds: PAD and ABSENT, zero, and each power of two with either sign."""

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Encoded:
    """One block's rows: provisional ids a token feature, a number a number feature, the keys and the label."""

    ids: list[np.ndarray]
    numbers: list[np.ndarray]
    keys: dict[str, np.ndarray]
    label: np.ndarray
    skipped: int
    cut: int
    """How many values of public lists were beyond the declared length; of sensitive ones nobody counts."""


@dataclass(frozen=True)
class Encoder:
    """A recipe ready to be applied: the features and, for those with a vocabulary, their tables of tokens."""

    recipe: Recipe
    tables: list[TokenTable | None]
    grow: bool = True
    """Whether unknown tokens enter the tables (a log that is being prepared) or stay unknown (new rows)."""
    seeds: dict[str, np.uint64] = field(default_factory=dict)

    @staticmethod
    def of(recipe: Recipe, tables: list[TokenTable | None] | None = None) -> "Encoder":
        """For a new log, or with the `tables` of a store for rows like those of its log."""
        tokens = [feature for feature in recipe.features if feature.is_token]
        names = [feature.name for feature in tokens] + [column.name for column in recipe.columns]
        seeds = {name: fields.seed(recipe.hash_key, name) for name in names}
        new = [TokenTable() if has_table(recipe, feature) else None for feature in tokens]
        return Encoder(recipe, tables or new, tables is None, seeds)

    @property
    def tokens(self) -> list[Feature]:
        return [feature for feature in self.recipe.features if feature.is_token]

    @property
    def numbers(self) -> list[Feature]:
        return [feature for feature in self.recipe.features if not feature.is_token]

    def encode(self, rows: Rows, skip_bad: bool, where: str, labelled: bool = True) -> Encoded:
        """A block's rows that the filter keeps. A malformed public value makes a row bad; a malformed protected one is
        missing (privacy.md, rule 2)."""
        columns = _Columns(self, rows)
        bad = columns.bad()
        if bad.any():
            if not skip_bad:
                row = int(np.flatnonzero(bad)[0])
                column = columns.culprit(row)
                raise InputError(f"{where} {rows.lines[row]}: column '{column.name}' holds no {column.type}")
            rows = rows.take(np.flatnonzero(~bad), rows.skipped + int(bad.sum()))
            columns = _Columns(self, rows)
        if self.recipe.filter is not None:
            keep = columns.evaluate(self.recipe.filter)
            kept = np.flatnonzero((keep != 0) & ~np.isnan(keep))
            if len(kept) < len(rows):
                rows = rows.take(kept, rows.skipped)
                columns = _Columns(self, rows)
        ids, cut = [], 0
        for feature, table in zip(self.tokens, self.tables, strict=True):
            if feature.column.type == "list":
                value, beyond = columns.list_ids(feature, table)
                cut += beyond if feature.tower == "public" else 0
            else:
                value = columns.ids(feature, table)
            ids.append(value)
        return Encoded(
            ids=ids,
            numbers=[columns.derived_number(feature) for feature in self.numbers],
            keys={role: columns.key(column) for role in KEYS if (column := self.recipe.key(role)) is not None},
            label=columns.label() if labelled else np.zeros(0, np.float32),
            skipped=rows.skipped,
            cut=cut,
        )


def has_table(recipe: Recipe, feature: Feature) -> bool:
    """Whether a feature's tokens are found in a table: vocabularies of raw values."""
    encoding = recipe.encoding(feature.tower)
    return feature.derivation == "token" and encoding is not None and encoding.kind == "vocabulary"


class _Columns:
    """The columns of one block, each read at most once in each way."""

    def __init__(self, encoder: Encoder, rows: Rows) -> None:
        self.encoder = encoder
        self.recipe = encoder.recipe
        self.rows = rows
        self.places = {column.name: place for place, column in enumerate(self.recipe.columns)}
        self._missing: dict[str, np.ndarray] = {}
        self._number: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._malformed: dict[str, np.ndarray] = {}
        self._found: dict[str, np.ndarray] = {}
        self._hash: dict[tuple[str, str], np.ndarray] = {}

    def strings(self, name: str) -> Strings:
        return self.rows.columns[self.places[name]]

    def missing(self, name: str) -> np.ndarray:
        if name not in self._missing:
            self._missing[name] = self.strings(name).missing(self.recipe.source.missing)
        return self._missing[name]

    def number(self, name: str) -> np.ndarray:
        return self._read(name)[0]

    def _read(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        if name not in self._number:
            kind = self.recipe.columns[self.places[name]].type
            if kind == "timestamp":
                self._number[name] = fields.seconds(self.strings(name), self.missing(name))
            else:
                self._number[name] = fields.numbers(self.strings(name), self.missing(name), whole=kind == "integer")
        return self._number[name]

    def evaluate(self, source: str) -> np.ndarray:
        value = expressions.parse(source).evaluate(self.number, lambda name, text: self.strings(name).equal(text))
        return np.broadcast_to(value, len(self.rows))

    def malformed(self, column: Column) -> np.ndarray:
        """Which values of an integer, real or timestamp column are none. A token that a table knows was looked at
        before it entered."""
        if column.name not in self._malformed:
            table = self._table(column)
            if table is None:
                self._malformed[column.name] = self._read(column.name)[1]
            else:
                found = self._found[column.name] = table.find(self._hashes(column.name, column.name))
                rows = np.flatnonzero(found == 0)
                strings = self.strings(column.name).take(rows)
                malformed = np.zeros(len(self.rows), bool)
                malformed[rows] = fields.numbers(strings, self.missing(column.name)[rows], whole=True)[1]
                self._malformed[column.name] = malformed
        return self._malformed[column.name]

    def _table(self, column: Column) -> TokenTable | None:
        if column.derivations != ("token",):
            return None
        pairs = zip(self.encoder.tokens, self.encoder.tables, strict=True)
        return next((table for feature, table in pairs if feature.column is column), None)

    def bad(self) -> np.ndarray:
        """Which rows have a malformed value in a public column or key that is used."""
        bad = np.zeros(len(self.rows), bool)
        for column in self._checked():
            bad |= self.malformed(column)
        return bad

    def _checked(self) -> list[Column]:
        read = expressions.parse(self.recipe.filter).numbers if self.recipe.filter else frozenset()
        return [
            column
            for column in self.recipe.columns
            if not column.protected
            and column.type in ("integer", "real", "timestamp")
            and (column.tower is not None or column.role == "time" or column.name in read)
        ]

    def culprit(self, row: int) -> Column:
        return next(column for column in self._checked() if self.malformed(column)[row])

    def _hashes(self, name: str, seed: str) -> np.ndarray:
        if (name, seed) not in self._hash:
            hashes = self._hash[name, seed] = self.strings(name).hashes(self.encoder.seeds[seed])
            hashes[self.missing(name)] = MISSING
        return self._hash[name, seed]

    def ids(self, feature: Feature, table: TokenTable | None) -> np.ndarray:
        """Provisional ids: from the feature's table, of its closed domain, or (hashing) the bin + 2."""
        column, name = feature.column, feature.column.name
        if feature.derivation != "token":
            ids = self._domain_ids(feature)
            return self._domain_bins(feature)[ids] if self._bins(feature) else ids
        hashes = self._hashes(name, feature.name)
        if column.type == "integer":
            malformed = self.malformed(column)
            hashes[malformed] = MISSING
            if name in self._found:
                self._found[name][malformed] = ABSENT
        return self._lookup(feature, table, hashes, self.strings(name), self._found.get(name))

    def _lookup(
        self,
        feature: Feature,
        table: TokenTable | None,
        hashes: np.ndarray,
        strings: Strings,
        found: np.ndarray | None = None,
    ) -> np.ndarray:
        if table is None:
            return fields.bins(hashes, self.encoder.seeds[feature.name], self._bins(feature)) + 2
        found = table.find(hashes) if found is None else found
        if self.encoder.grow:
            return table.add_unknown(found, hashes, strings)
        found[found == 0] = table.size + 1
        return found

    def _bins(self, feature: Feature) -> int:
        encoding = self.recipe.encoding(feature.tower)
        assert encoding is not None
        return encoding.bins or 0

    def _domain_ids(self, feature: Feature) -> np.ndarray:
        """2 + the place of the value in the feature's closed domain."""
        values = self.number(feature.column.name)
        known = ~np.isnan(values)
        places = np.full(len(values), ABSENT - 2, dtype=np.int32)
        value = values[known]
        match feature.derivation:
            case "hour":
                places[known] = (value // 3600) % 24
            case "weekday":
                places[known] = (value // 86400 + 3) % 7  # the epoch began on a Thursday; Monday is 0
            case "bucket":
                places[known] = np.searchsorted(np.array(feature.column.edges), value, side="right")
            case "log2":
                exponent = np.minimum(np.frexp(np.maximum(value, 0.5))[1] - 1, len(LOG2_TOKENS) - 4)
                places[known] = np.where(value < 0, 0, np.where(value == 0, 1, np.where(value < 1, 2, exponent + 3)))
        return places + 2

    def _domain_bins(self, feature: Feature) -> np.ndarray:
        """The hash bin + 2 of each value of a closed domain, behind those of padding and of a missing value."""
        own = self.encoder.seeds[feature.name]
        hashes = np.concatenate([[MISSING, MISSING], Strings.of(feature.domain or ()).hashes(own)])
        return fields.bins(hashes, own, self._bins(feature)) + 2

    def list_ids(self, feature: Feature, table: TokenTable | None) -> tuple[np.ndarray, int]:
        """Ids of a list's values, one after another, padded; an empty list holds the missing value alone."""
        column = feature.column
        missing = self.missing(column.name)
        length = feature.width
        lists = pc.split_pattern(self.strings(column.name).to_arrow(), column.separator)
        offsets = lists.offsets.to_numpy().astype(np.int64)
        values = Strings.from_arrow(lists.values)
        row = np.repeat(np.arange(len(missing)), np.diff(offsets))
        place = np.arange(len(row)) - offsets[row]
        kept = np.flatnonzero((place < length) & ~missing[row])
        strings = values.take(kept)
        hashes = strings.hashes(self.encoder.seeds[feature.name])
        hashes[strings.missing(self.recipe.source.missing)] = MISSING
        ids = np.full((len(missing), length), PAD, dtype=np.int32)
        ids[row[kept], place[kept]] = self._lookup(feature, table, hashes, strings)
        absent = np.full(1, MISSING)
        ids[missing, 0] = self._lookup(feature, table, absent, Strings.of([""]))[0]
        return ids, int(np.count_nonzero((place >= length) & ~missing[row]))

    def derived_number(self, feature: Feature) -> np.ndarray:
        """log(max(x, minimum) + shift), or the value itself; NaN where missing, until bounds and defaults are known."""
        values = self.number(feature.column.name)
        if feature.derivation == "log":
            log = feature.column.log or self.recipe.log
            known = np.log(np.maximum(values, log.minimum) + log.shift)
            values = np.where(np.isnan(values), log.missing, known)
        return np.clip(values, -_LARGEST, _LARGEST).astype(np.float32)

    def key(self, column: Column) -> np.ndarray:
        """A time in seconds; any other key as its hash, which is all that grouping needs."""
        if column.role == "time":
            return np.where(np.isnan(values := self.number(column.name)), 0, values).astype(np.int64)
        return self._hashes(column.name, column.name).view(np.int64)

    def label(self) -> np.ndarray:
        """The rule's value; the declared default where it is missing or outside the domain."""
        return in_domain(self.evaluate(self.recipe.label.rule), self.recipe.label)


def in_domain(values: np.ndarray, label: Label) -> np.ndarray:
    match label.kind:
        case "binary":
            good = (values == 0) | (values == 1)
        case "count":
            good = (values >= 0) & (values < 2**24) & (values == np.floor(values))
        case "real":
            good = np.abs(values) <= _LARGEST
    return np.where(good, values, label.default).astype(np.float32)


def magnitudes(values: np.ndarray) -> np.ndarray:
    """The bin of each number's size and sign, as a provisional id: missing is ABSENT, zero 2, then powers of two."""
    exponent = np.clip(np.frexp(np.where(np.isnan(values), 0, values))[1], -63, 64) + 63
    place = np.where(values == 0, 0, np.where(values > 0, 1 + exponent, 129 + exponent))
    return np.where(np.isnan(values), ABSENT, place + 2).astype(np.int32)


def magnitude_bounds(place: int) -> tuple[float, float]:
    """The least and greatest number of a magnitude's bin."""
    if place == 0:
        return 0.0, 0.0
    exponent = (place - 1) % 128 - 63
    low, high = 2.0 ** (exponent - 1), 2.0**exponent
    return (low, high) if place <= 128 else (-high, -low)
