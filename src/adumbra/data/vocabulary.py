"""Which values get a row of their own, and where: counts of the training rows, exact for public columns, private for
sensitive ones; thresholds; and the layout of each tower's table."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from adumbra.data import fields
from adumbra.data.encode import ABSENT, MAGNITUDES, PAD, Encoder, magnitude_bounds, magnitudes
from adumbra.data.fields import Strings
from adumbra.data.spool import Entry, Spool
from adumbra.privacy.counts import PrivateCounts
from adumbra.privacy.ledger import Ledger
from adumbra.privacy.noise import Noise
from adumbra.schema import TOWERS, Feature, Recipe, Tower

_BATCH = 1 << 20
"""Rows that are counted at a time."""

Train = Iterable[tuple[Entry, np.ndarray | None]]
"""The blocks with training rows, and which of a block's rows they are where not all."""


@dataclass(frozen=True)
class TokenColumn:
    """Where a token feature stands in its tower's ids and table, as the store describes it."""

    name: str
    column: str
    role: str
    type: str
    derivation: str
    tower: Tower
    encoding: str
    """vocabulary, domain (declared or closed) or hash."""
    start: int
    """Its first position in a row of ids."""
    length: int
    offset: int
    """Its first row in the tower's table."""
    rows: int
    """How many rows of the table are its own (of its bins, where they are shared)."""
    threshold: int | None = None
    effective_threshold: int | None = None
    """The threshold in force, where privacy asks for more than the recipe does."""


@dataclass(frozen=True)
class NumberColumn:
    """A number feature: clipped to its bounds and scaled to [-1, 1], where it has any."""

    name: str
    column: str
    role: str
    type: str
    derivation: str
    tower: Tower
    place: int
    bounds: tuple[float, float] | None = None

    def scaled(self, values: np.ndarray) -> np.ndarray:
        """A missing value is 0: the middle of the bounds, or what `log` wrote before."""
        if self.bounds is not None:
            low, high = self.bounds
            values = (np.clip(values.astype(np.float64), low, high) - low) / (high - low) * 2 - 1
        return np.nan_to_num(values, nan=0.0)


@dataclass(frozen=True)
class Values:
    """The values of one feature that have a row each, in the order of the rows."""

    text: Strings
    hashes: np.ndarray
    first_row: int
    counts: np.ndarray
    """Exact, or as they were noised; zeros where the domain was declared and nothing was counted."""


@dataclass(frozen=True)
class Layout:
    """The encoding of a whole log: its features, the size of each tower's table, and what has a row."""

    tokens: list[TokenColumn]
    numbers: list[NumberColumn]
    table_rows: dict[Tower, int]
    luts: list[np.ndarray | None]
    """For each token feature, from provisional ids to rows of the table; None where bins are hashed."""
    values: dict[str, Values]

    def rows(self, place: int, ids: np.ndarray) -> np.ndarray:
        """Rows of the tower's table for a feature's provisional ids."""
        lut = self.luts[place]
        if lut is not None:
            return lut.take(ids)
        return np.where(ids == PAD, PAD, ids.astype(np.int32) + np.int32(self.tokens[place].offset - 2))


@dataclass(frozen=True)
class Counted:
    """Counts of the training rows by provisional id, exact (public features) or noised."""

    tokens: list[np.ndarray | None]
    bounds: list[tuple[float, float] | None]
    thresholds: list[int | None]


def count(recipe: Recipe, spool: Spool, train: Train) -> tuple[list, list]:
    """Exact counts over the training rows: of each token feature that needs them, and of each number's magnitude."""
    encoder = spool.encoder
    wanted = [recipe.needs_vocabulary(feature) for feature in encoder.tokens]
    tokens = [
        np.zeros(table.size + 1, np.int64) if need and table is not None else None
        for need, table in zip(wanted, encoder.tables, strict=True)
    ]
    sizes = [np.zeros(MAGNITUDES, np.int64) if feature.needs_bounds else None for feature in encoder.numbers]
    extremes = [[np.inf, -np.inf] for _ in encoder.numbers]
    for arrays in _batches(spool, train):
        for place, counts in enumerate(tokens):
            if counts is not None:
                counts += np.bincount(once_a_row(arrays[place]), minlength=len(counts))
        for place, counts in enumerate(sizes):
            if counts is not None:
                values = arrays[len(tokens) + place]
                counts += np.bincount(magnitudes(values), minlength=MAGNITUDES)
                known = values[~np.isnan(values)]
                low, high = extremes[place]
                extremes[place] = [min(low, known.min(initial=np.inf)), max(high, known.max(initial=-np.inf))]
    return tokens, [(counts, *extreme) for counts, extreme in zip(sizes, extremes, strict=True)]


def once_a_row(ids: np.ndarray) -> np.ndarray:
    """Ids to be counted: a value that a list repeats counts once, padding never (privacy.md, rule 20)."""
    if ids.ndim == 1:
        return ids.astype(np.int64)  # bincount is slow on anything else
    ids = np.sort(ids, axis=1)
    fresh = np.ones(ids.shape, bool)
    fresh[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return ids[fresh & (ids != PAD)].astype(np.int64)


def _batches(spool: Spool, train: Train) -> Iterator[list[np.ndarray]]:
    """The arrays of the training rows, many blocks at a time."""
    held: list[list[np.ndarray]] = []
    rows = 0
    for entry, mask in train:
        arrays = [array if mask is None else array[mask] for array in spool.read(entry)]
        held.append(arrays)
        rows += len(arrays[-1])
        if rows >= _BATCH:
            yield [np.concatenate(parts) for parts in zip(*held, strict=True)]
            held, rows = [], 0
    if held:
        yield [np.concatenate(parts) for parts in zip(*held, strict=True)]


def private_counts(recipe: Recipe) -> PrivateCounts | None:
    """The mechanism that counts sensitive values, if any are counted."""
    if not recipe.counted:
        return None
    assert recipe.counts is not None
    columns = sum(feature.width for feature in recipe.counted)
    return _calibrated(columns, recipe.counts.epsilon, recipe.counts.delta)


@lru_cache(maxsize=8)
def _calibrated(columns: int, epsilon: float, delta: float) -> PrivateCounts:
    return PrivateCounts.calibrate(columns, epsilon, delta, "discovered")


def release(recipe: Recipe, spool: Spool, train: Train, ledger: Ledger) -> Counted:
    """All counts as encodings may use them. Those of sensitive columns are charged, then drawn once and kept: a later
    `--resume` finds them in the spool."""
    mechanism = private_counts(recipe)
    kept = spool.folder / "released.npz"
    tokens, numbers = count(recipe, spool, train)
    if mechanism is None:
        drawn = None
    elif kept.exists():
        drawn = dict(np.load(kept))
    else:
        noise = Noise()
        if recipe.stand_in is None:
            note = f"values of {mechanism.columns} sensitive columns"
            ledger.append(mechanism.charge(noise, run="prepare", note=note))
        drawn = _draw(spool.encoder, mechanism, noise, tokens, numbers)
        _keep(kept, drawn)
    counted, bounds, thresholds = [], [], []
    for place, feature in enumerate(spool.encoder.tokens):
        private = drawn is not None and f"token-{place}" in drawn
        counted.append(drawn[f"token-{place}"] if private else tokens[place])  # pyright: ignore[reportOptionalSubscript]
        encoding = recipe.encoding(feature.tower)
        asked = encoding.threshold if encoding is not None and recipe.needs_vocabulary(feature) else None
        thresholds.append(mechanism.threshold(asked) if private and asked and mechanism else asked)
    for place, feature in enumerate(spool.encoder.numbers):
        bounds.append(_bounds(feature, numbers[place], drawn, place))
    return Counted(counted, bounds, thresholds)


def _draw(
    encoder: Encoder, mechanism: PrivateCounts, noise: Noise, tokens: list, numbers: list
) -> dict[str, np.ndarray]:
    drawn = {}
    for place, feature in enumerate(encoder.tokens):
        if feature.tower == "sensitive" and tokens[place] is not None:
            drawn[f"token-{place}"] = _noised(mechanism, tokens[place], noise)
    for place, feature in enumerate(encoder.numbers):
        if feature.tower == "sensitive" and feature.needs_bounds:
            drawn[f"number-{place}"] = _noised(mechanism, numbers[place][0], noise)
    return drawn


def _noised(mechanism: PrivateCounts, counts: np.ndarray, noise: Noise) -> np.ndarray:
    held = np.flatnonzero(counts)
    noised = np.zeros_like(counts)
    noised[held] = mechanism.release(counts[held], noise)
    return noised


def _keep(path: Path, drawn: dict[str, np.ndarray]) -> None:
    """A draw that may be looked at is never drawn again: on disk before anything is made of it."""
    draft = path.with_suffix(".draft.npz")
    np.savez(draft, **drawn)  # pyright: ignore[reportArgumentType]
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.rename(path)


def _bounds(
    feature: Feature, counted: tuple, drawn: dict[str, np.ndarray] | None, place: int
) -> tuple[float, float] | None:
    """A number's bounds: declared, exact (public) or those of the magnitudes whose noised counts were released."""
    declared = feature.column.bounds
    if declared is None:
        return None
    if declared != "counted":
        return declared.low, declared.high
    _, low, high = counted
    if feature.tower == "sensitive":
        assert drawn is not None
        held = [magnitude_bounds(int(size) - 2) for size in np.flatnonzero(drawn[f"number-{place}"]) if size > ABSENT]
        low, high = min((b[0] for b in held), default=0.0), max((b[1] for b in held), default=1.0)
    return (float(low), float(high)) if low < high else (float(low) - 1, float(low) + 1) if np.isfinite(low) else (0, 1)


class _Table:
    """A tower's table while rows are given out. Row 0 pads a list and contributes nothing."""

    def __init__(self) -> None:
        self.rows = 1
        self.shared: int | None = None

    def take(self, rows: int) -> int:
        self.rows += rows
        return self.rows - rows

    def take_once(self, rows: int) -> int:
        """Rows that the whole tower shares: its bins, or the one row of its unknown values (000, App. A)."""
        if self.shared is None:
            self.shared = self.take(rows)
        return self.shared


def lay_out(recipe: Recipe, spool: Spool, counted: Counted) -> Layout:
    """Gives every value its row: for each feature in turn unknown, missing, then its values by falling count."""
    tables = {tower: _Table() for tower in TOWERS}
    starts: dict[Tower, int] = dict.fromkeys(TOWERS, 0)
    columns: list[TokenColumn] = []
    luts: list[np.ndarray | None] = []
    values: dict[str, Values] = {}
    for place, feature in enumerate(spool.encoder.tokens):
        table, encoding = tables[feature.tower], recipe.encoding(feature.tower)
        assert encoding is not None
        threshold = None
        take = table.take_once if encoding.table == "tower" else table.take
        if encoding.kind == "hash":
            assert encoding.bins is not None
            kind, rows = "hash", encoding.bins
            offset = take(rows)
            luts.append(None)
        else:
            offset = table.rows
            unknown = take(1) if feature.derivation == "token" else None
            offset = table.rows if encoding.table == "tower" else offset
            missing = table.take(1)
            kept = _kept(spool, counted, place)
            first = table.take(len(kept.hashes))
            rows = table.rows - offset
            luts.append(_lut(spool, place, kept, unknown, missing, first))
            values[feature.name] = Values(kept.text, kept.hashes, first, kept.counts)
            kind = "vocabulary" if recipe.needs_vocabulary(feature) else "domain"
            threshold = encoding.threshold if kind == "vocabulary" else None
        columns.append(
            TokenColumn(
                **_described(feature),
                encoding=kind,
                start=starts[feature.tower],
                length=feature.width,
                offset=offset,
                rows=rows,
                threshold=threshold,
                effective_threshold=counted.thresholds[place],
            )
        )
        starts[feature.tower] += feature.width
    return Layout(columns, _numbers(spool.encoder, counted), {t: tables[t].rows for t in TOWERS}, luts, values)


def _described(feature: Feature) -> dict[str, Any]:
    column = feature.column
    return {
        "name": feature.name,
        "column": column.name,
        "role": column.role,
        "type": column.type,
        "derivation": feature.derivation,
        "tower": feature.tower,
    }


def _numbers(encoder: Encoder, counted: Counted) -> list[NumberColumn]:
    places: dict[Tower, int] = dict.fromkeys(TOWERS, 0)
    columns = []
    for feature, bounds in zip(encoder.numbers, counted.bounds, strict=True):
        columns.append(NumberColumn(**_described(feature), place=places[feature.tower], bounds=bounds))
        places[feature.tower] += 1
    return columns


def _kept(spool: Spool, counted: Counted, place: int) -> Values:
    """The values that get a row: of a closed or declared domain all, of a vocabulary those at its threshold."""
    feature = spool.encoder.tokens[place]
    counts, threshold = counted.tokens[place], counted.thresholds[place]
    if counts is None or threshold is None:
        text = Strings.of(feature.domain or ())
        hashes = text.hashes(spool.encoder.seeds[feature.name])
        return Values(text, hashes, 0, np.zeros(len(hashes), np.int64))
    ids = np.flatnonzero(counts >= threshold)
    ids = ids[ids > ABSENT]
    hashes, lengths, text = spool.tokens(place, len(counts) - 2)
    ids = ids[np.lexsort((hashes[ids - 2], -counts[ids]))]
    buffer = np.concatenate([text, np.zeros(fields.PADDING, np.uint8)])
    strings = Strings(buffer, np.cumsum(lengths) - lengths, lengths).take(ids - 2)
    return Values(strings, hashes[ids - 2], 0, counts[ids])


def _lut(spool: Spool, place: int, kept: Values, unknown: int | None, missing: int, first: int) -> np.ndarray:
    table = spool.encoder.tables[place]
    rows = first + np.arange(len(kept.hashes))
    if table is None:
        return np.concatenate([[PAD, missing], rows]).astype(np.int32)
    lut = np.full(table.size + 1, unknown, np.int32)
    lut[PAD], lut[ABSENT] = PAD, missing
    ids = table.find(kept.hashes)  # a declared value that no row holds has no provisional id
    lut[ids[ids > 0]] = rows[ids > 0]
    return lut
