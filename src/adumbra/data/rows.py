"""New rows encoded as a finished store's were: the arrays that `prepare` would have written for them."""

# pyright: reportAttributeAccessIssue=false
import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from adumbra import expressions
from adumbra.data import source
from adumbra.data.encode import PAD, Encoded, Encoder, has_table
from adumbra.data.fields import Strings
from adumbra.data.source import Reader, Rows
from adumbra.data.store import TOKENS, Split, Store
from adumbra.data.tokens import TokenTable
from adumbra.data.vocabulary import Layout, NumberColumn, TokenColumn
from adumbra.errors import InputError
from adumbra.schema import KEYS, TOWERS, Column, Recipe, Source

MISSING, UNKNOWN = "(missing)", "(unknown)"
_COMPRESSED = (".gz", ".zst", ".bz2")
_LABEL = {"binary": np.uint8, "count": np.int32, "real": np.float32}


@dataclass(frozen=True)
class NewRows:
    """Some rows of an input, encoded."""

    split: Split
    numbers: np.ndarray
    """Which rows of the input they are, counted from 1 over all its files: the recipe's filter may leave some out."""
    kept: dict[str, pa.Array]
    """The columns that were asked for, as text; an empty value is null."""
    position: int
    """How many bytes of the input have been read."""
    total: int


@dataclass(frozen=True)
class Encoding:
    """A store's recipe with its values and their rows: turns new rows into ids and numbers. It grows by nothing: a
    value that has no row gets that of unknown values."""

    encoder: Encoder
    layout: Layout

    @staticmethod
    def of(store: Store) -> "Encoding":
        return Encoding.read(store.description, store.path / TOKENS)

    @staticmethod
    def read(description: dict[str, Any], tokens: Path) -> "Encoding":
        """From the description of a store and its values, wherever a copy of them lies."""
        recipe = Recipe.model_validate(description["recipe"])
        values = _values(tokens, ["hash", "row"])
        columns = [TokenColumn(**column) for column in description["tokens"]]
        bounded = [NumberColumn(**column) for column in description["numbers"]]
        tables: list[TokenTable | None] = []
        luts: list[np.ndarray | None] = []
        features = [feature for feature in recipe.features if feature.is_token]
        for feature, column in zip(features, columns, strict=True):
            if column.encoding == "hash":
                tables.append(None)
                luts.append(None)
                continue
            of_feature = values.get(feature.name)
            rows = np.zeros(0, np.int32) if of_feature is None else of_feature["row"].to_numpy()
            unknown, missing = special_rows(recipe, columns, column)
            table = None
            if has_table(recipe, feature):
                hashes = np.zeros(0, np.uint64) if of_feature is None else of_feature["hash"].to_numpy()
                table = TokenTable().restore(hashes)
            tables.append(table)
            last = [] if unknown is None else [unknown]
            luts.append(np.concatenate([[PAD, missing], rows, last]).astype(np.int32))
        layout = Layout(columns, bounded, description["table_rows"], luts, {})
        return Encoding(Encoder.of(recipe, tables), layout)

    @property
    def recipe(self) -> Recipe:
        return self.encoder.recipe

    def arrays(self, encoded: Encoded) -> dict[str, np.ndarray]:
        """A block's arrays as a store has them."""
        arrays: dict[str, np.ndarray] = {}
        for tower in TOWERS:
            ids = [self._rows(place, encoded) for place, c in enumerate(self.layout.tokens) if c.tower == tower]
            if ids:
                arrays[tower] = np.concatenate(ids, axis=1)
            numbers = [self._scaled(place, encoded) for place, c in enumerate(self.layout.numbers) if c.tower == tower]
            if numbers:
                arrays[f"numbers_{tower}"] = np.stack(numbers, axis=1)
        return arrays

    def _rows(self, place: int, encoded: Encoded) -> np.ndarray:
        rows = self.layout.rows(place, encoded.ids[place])
        return rows.reshape(len(rows), self.layout.tokens[place].length).astype(np.int32, copy=False)

    def _scaled(self, place: int, encoded: Encoded) -> np.ndarray:
        return self.layout.numbers[place].scaled(encoded.numbers[place]).astype(np.float32, copy=False)

    def blocks(self, inputs: list[str], *, keep: tuple[str, ...] = (), labelled: bool = False) -> Iterator[NewRows]:
        """The rows of files (text or parquet) that the recipe's filter keeps, block by block, in constant memory.

        Columns are matched by name where there is a header. The label's and those that no model sees may be absent (a
        file without a header has all the recipe's columns, or all but the label's); columns that the recipe does not
        declare are passed over. `keep` names columns to hand through as they stand. With `labelled` the label is read.
        """
        files = source.expand(inputs, self.recipe)
        total, done, first = sum(file.stat().st_size for file in files), 0, 1
        for file in files:
            form = input_form(self.recipe, file, labelled)
            reader = Reader(form, [file])
            names = [column.name for column in form.columns]
            for name in keep:
                if name not in names:
                    raise InputError(f"{file}: has no column '{name}' to keep")
            for block in reader.blocks():
                rows = reader.cut(block, skip_bad=False)
                kept, arrays = self._encode(rows, dict(zip(names, rows.columns, strict=True)), file, labelled)
                text = {name: _present(rows.columns[names.index(name)].take(kept)) for name in keep}
                yield NewRows(Split("new", len(kept), arrays), first + kept, text, done + block.position, total)
                first += len(rows)
            done += file.stat().st_size

    def _encode(
        self, rows: Rows, found: dict[str, Strings], file: Path, labelled: bool
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Which rows the filter keeps, and their arrays."""
        absent = Strings.of([""]).take(np.zeros(len(rows), np.int64))
        columns = [found.get(column.name, absent) for column in self.recipe.columns]
        watched = _Watched(columns, rows.lines, rows.skipped)
        encoded = self.encoder.encode(watched, False, f"{file}, line", labelled)
        arrays = self.arrays(encoded)
        for role in KEYS:
            if (key := self.recipe.key(role)) is not None and key.name in found:
                arrays[role] = encoded.keys[role]
        if labelled:
            arrays["label"] = encoded.label.astype(_LABEL[self.recipe.label.kind])
        kept = np.searchsorted(rows.lines, watched.left[-1]) if watched.left else np.arange(len(rows))
        return kept, arrays


def _present(strings: Strings) -> pa.Array:
    text = strings.to_arrow()
    return pc.if_else(pc.equal(text, ""), None, text)


@dataclass(frozen=True)
class _Watched(Rows):
    """Rows that note the lines of those that are left, whenever some are taken."""

    left: list[np.ndarray] = field(default_factory=list)

    def take(self, kept: np.ndarray, skipped: int) -> Rows:
        rows = super().take(kept, skipped)
        self.left.append(rows.lines)
        return _Watched(rows.columns, rows.lines, rows.skipped, self.left)


def special_rows(recipe: Recipe, columns: list[TokenColumn], column: TokenColumn) -> tuple[int | None, int]:
    """The rows of a feature's unknown values (a closed domain has none) and of the missing one, as `lay_out` gave them
    out."""
    encoding = recipe.encoding(column.tower)
    assert encoding is not None
    if encoding.table == "column":
        return (column.offset, column.offset + 1) if column.derivation == "token" else (None, column.offset)
    tokens = [c.offset for c in columns if c.tower == column.tower and c.derivation == "token"]
    return min(tokens) - 1 if column.derivation == "token" else None, column.offset


def names(store: Store, feature: str) -> dict[int, str]:
    """The values of a feature by their rows; nothing where values are hashed."""
    columns = [TokenColumn(**column) for column in store.description["tokens"]]
    column = next(column for column in columns if column.name == feature)
    if column.encoding == "hash":
        return {}
    recipe = Recipe.model_validate(store.description["recipe"])
    values = _values(store.path / TOKENS, ["token", "row"]).get(feature)
    texts = {} if values is None else dict(zip(values["row"].to_pylist(), values["token"].to_pylist(), strict=True))
    unknown, missing = special_rows(recipe, columns, column)
    return texts | {missing: MISSING} | ({} if unknown is None else {unknown: UNKNOWN})


def _values(tokens: Path, columns: list[str]) -> dict[str, pa.Table]:
    """The values that have rows, by feature, in the order of the rows."""
    if not tokens.exists():
        raise InputError(f"{tokens}: missing: new rows cannot be encoded without the store's values")
    try:
        with pq.ParquetFile(tokens) as file:
            table = file.read(["feature", *columns])
    except (OSError, pa.ArrowException):
        raise InputError(f"{tokens}: damaged; prepare the store again") from None
    found: dict[str, pa.Table] = {}
    if not table.num_rows:
        return found
    feature = table["feature"].combine_chunks()
    codes, places = feature.indices.to_numpy(), feature.dictionary.to_pylist()
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(codes)], strict=True):
        found[places[codes[start]]] = table.slice(start, end - start).drop_columns("feature")
    return found


def input_form(recipe: Recipe, file: Path, labelled: bool = False) -> Recipe:
    """The recipe as it reads this file: its format, and its columns in their order."""
    own, suffix = recipe.source, _suffix(file)
    if suffix == ".parquet" or (own.format == "parquet" and suffix not in (".csv", ".tsv")):
        if file.suffix in _COMPRESSED:
            raise InputError(f"{file}: parquet that is compressed as a whole; decompress it first")
        try:
            found = pq.read_schema(file).names
        except (OSError, pa.ArrowException):
            raise InputError(f"{file}: not readable as parquet: truncated or damaged") from None
        return _named(recipe, file, found, own.model_copy(update={"format": "parquet"}), labelled)
    line = next((line for line in source.head(file, 1 << 20).split("\n") if line.strip()), "").rstrip("\r")
    formats = [own] if own.format != "parquet" else []
    if suffix in (".csv", ".tsv") and suffix[1:] != own.format:
        formats.append(own.model_copy(update={"format": suffix[1:], "quote": '"', "header": True}))
    for written in formats:
        found = _fields(line, written)
        if _is_header(recipe, found, written.header and written is own):
            return _named(recipe, file, found, written.model_copy(update={"header": True}), labelled)
    if own.header or own.format == "parquet":
        raise InputError(f"{file}: the first line names none of the recipe's columns; add a header")
    return _by_width(recipe, file, len(_fields(line, own)), labelled)


def _suffix(file: Path) -> str:
    """How the file is written, behind how it is compressed."""
    return Path(file.stem).suffix if file.suffix in _COMPRESSED else file.suffix


def _fields(line: str, written: Source) -> list[str]:
    if written.quote:
        fields = next(csv.reader([line], delimiter=written.delimiter, quotechar=written.quote), [])
    else:
        fields = line.split(written.delimiter)
    return [name.strip().strip(written.quote or '"') for name in fields]


def _is_header(recipe: Recipe, found: list[str], declared: bool) -> bool:
    needed = {column.name for column in recipe.columns if _needed(recipe, column, False)}
    known = sum(column.name in found for column in recipe.columns)
    return known > 0 and (declared or needed <= set(found) or known >= max(2, len(needed) // 2))


def _needed(recipe: Recipe, column: Column, labelled: bool) -> bool:
    """Whether encoding reads the column: for a feature, the filter or the label."""
    read = expressions.parse(recipe.filter).columns if recipe.filter else frozenset()
    rule = expressions.parse(recipe.label.rule).columns if labelled else frozenset()
    return column.tower is not None or column.name in read or column.name in rule


def _named(recipe: Recipe, file: Path, found: list[str], written: Source, labelled: bool) -> Recipe:
    for column in recipe.columns:
        if column.name not in found and _needed(recipe, column, labelled):
            raise InputError(f"{file}: column '{column.name}' of the recipe is missing")
    known = {column.name: column for column in recipe.columns}
    columns = tuple(
        known.get(name) or Column.model_construct(name=name, role="public", type="category") for name in found
    )
    return recipe.model_copy(update={"columns": columns, "source": written})


def _by_width(recipe: Recipe, file: Path, width: int, labelled: bool) -> Recipe:
    features = tuple(column for column in recipe.columns if column.role != "label")
    if width == len(recipe.columns):
        return recipe
    if width == len(features) and not labelled:
        return recipe.model_copy(update={"columns": features})
    without = "" if labelled else f", or {len(features)} without the label's columns"
    raise InputError(f"{file}: {width} fields, expected {len(recipe.columns)}{without}; or add a header")
