"""A recipe: every column of a raw log with its role, what is derived from it, and how it is encoded.

There is no default role. A column nobody declared is an error that names it, never public.
"""

from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from adumbra import expressions, toml
from adumbra.errors import InputError
from adumbra.toml import Tree

VERSION = 1
"""The version of the recipe format; a recipe of another version is refused."""

Role = Literal["public", "sensitive", "label", "user", "publisher", "advertiser", "time"]
Tower = Literal["public", "sensitive"]
Type = Literal["category", "integer", "real", "timestamp", "list"]
Derivation = Literal["token", "bucket", "log2", "hour", "weekday", "log", "number", "drop"]

ROLES: tuple[str, ...] = ("public", "sensitive", "label", "user", "publisher", "advertiser", "time")
TOWERS: tuple[Tower, Tower] = ("public", "sensitive")
KEYS = ("user", "publisher", "advertiser", "time")
PUBLIC_ROLES = frozenset({"public", *KEYS})
"""What filters, splits and skips may read: they decide which rows exist, and that is public (privacy.md, rule 2)."""
NUMBERS = frozenset({"log", "number"})
"""Derivations that give a number; the others give tokens."""

_ALLOWED: dict[str, frozenset[str]] = {
    "category": frozenset({"token", "drop"}),
    "integer": frozenset({"token", "bucket", "log2", "log", "number", "drop"}),
    "real": frozenset({"bucket", "log2", "log", "number", "drop"}),
    "timestamp": frozenset({"hour", "weekday", "number", "drop"}),
    "list": frozenset({"token", "drop"}),
}
_DEFAULT: dict[str, tuple[Derivation, ...]] = {
    "category": ("token",),
    "integer": ("token",),
    "real": ("number",),
    "timestamp": ("hour", "weekday"),
    "list": ("token",),
}


def _a_role(value: object) -> object:
    if value in ("", None):
        raise ValueError(f"no role was chosen; decide: {', '.join(ROLES)}")
    if value not in ROLES:
        raise ValueError(f"'{value}' is not a role{toml.nearest(str(value), ROLES)}")
    return value


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class Source(Tree):
    """How the raw log is written."""

    format: Literal["csv", "tsv", "space", "parquet"]
    header: bool = False
    """Whether each text file begins with the columns' names."""
    quote: Literal["", '"'] = ""
    """The quote character, where values may be quoted."""
    trim: bool = False
    """Strip blanks around each value."""
    missing: tuple[str, ...] = ("",)
    """The texts that stand for a missing value; the empty text always does."""

    @property
    def delimiter(self) -> str:
        return {"csv": ",", "tsv": "\t", "space": " ", "parquet": ""}[self.format]


class Bounds(Tree):
    """Declared or estimated bounds of a number: clipped to them, then scaled to [-1, 1]."""

    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        return self


class Log(Tree):
    """What `log` does: log(max(x, minimum) + shift); a missing value becomes `missing`."""

    shift: float = 1.0
    minimum: float = 0.0
    missing: float = 0.0

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if not self.minimum + self.shift > 0:
            raise ValueError("minimum + shift must be above 0")
        return self


class Encoding(Tree):
    """How tokens become rows of an embedding table."""

    kind: Literal["vocabulary", "hash"]
    table: Literal["tower", "column"] = "tower"
    """One table for the whole tower, where its columns share the row of unknown values, or a table a column."""
    threshold: int = Field(1, ge=1)
    """vocabulary: a value seen less often shares the out-of-vocabulary row."""
    bins: int | None = Field(None, ge=1, le=2**31 - 16)
    """hash: how many bins."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "hash" and self.bins is None:
            raise ValueError("hash needs bins")
        if self.kind == "vocabulary" and self.bins is not None:
            raise ValueError("bins belongs to hash; a vocabulary takes threshold")
        return self


class Column(Tree):
    """One column of the raw log."""

    name: str = Field(min_length=1)
    role: Annotated[Role, BeforeValidator(_a_role)]
    type: Type
    feature: Tower | None = None
    """The tower that sees a key; public and sensitive columns belong to their own."""
    derive: Annotated[tuple[Derivation, ...] | None, BeforeValidator(_as_tuple)] = Field(None, alias="as")
    """What the model sees of it; `drop` for nothing."""
    values: tuple[str, ...] | None = None
    """A declared domain: the vocabulary is exactly these values, and nothing is counted."""
    edges: tuple[float, ...] | None = None
    """bucket: a value's token is the number of edges that it reaches."""
    bounds: Bounds | Literal["counted"] | None = None
    """log, number: declared bounds, or ones that are counted (sensitive columns: privately)."""
    log: Log | None = None
    """log: instead of the recipe's."""
    separator: str = "|"
    """list: between the values."""
    length: int | None = Field(None, ge=1, le=4096)
    """list: how many values are kept; what is beyond is cut and counted."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        allowed = _ALLOWED[self.type]
        for derivation in self.derive or ():
            if derivation not in allowed:
                known = ", ".join(sorted(allowed))
                raise ValueError(f"column '{self.name}': '{derivation}' does not suit type {self.type} ({known})")
        if self.derive is not None and (len(set(self.derive)) != len(self.derive) or not self.derive):
            raise ValueError(f"column '{self.name}': as is empty or says something twice")
        if "drop" in self.derivations and len(self.derivations) > 1:
            raise ValueError(f"column '{self.name}': drop excludes other derivations")
        if self.role == "label" and (self.feature or self.derive not in (None, ("drop",))):
            raise ValueError(f"column '{self.name}': a label is no feature")
        if self.role in TOWERS and self.feature is not None:
            raise ValueError(f"column '{self.name}': feature is for keys; its role says the tower already")
        if self.type == "list" and self.length is None:
            raise ValueError(f"column '{self.name}': a list needs length, the most values that are kept")
        if self.type == "list" and (self.role in (*KEYS, "label") or len(self.separator) != 1):
            raise ValueError(f"column '{self.name}': a list is a feature with a separator of one character")
        if "bucket" in self.derivations and (
            not self.edges or any(b <= a for a, b in zip(self.edges, self.edges[1:], strict=False))
        ):
            raise ValueError(f"column '{self.name}': bucket needs edges, in rising order")
        if self.role == "time" and self.type not in ("timestamp", "integer"):
            raise ValueError(f"column '{self.name}': time is of type timestamp or integer")
        if self.values is not None and (len(set(self.values)) != len(self.values) or "token" not in self.derivations):
            raise ValueError(f"column '{self.name}': values are the distinct tokens of a column that is seen as token")
        return self

    @property
    def tower(self) -> Tower | None:
        """The tower whose features it gives, if any."""
        if self.derivations == ("drop",):
            return None
        return self.role if self.role in TOWERS else self.feature  # pyright: ignore[reportReturnType]

    @property
    def derivations(self) -> tuple[Derivation, ...]:
        if self.derive is not None:
            return self.derive
        return _DEFAULT[self.type] if self.role in TOWERS or self.feature else ("drop",)

    @property
    def protected(self) -> bool:
        return self.role not in PUBLIC_ROLES


class Label(Tree):
    """What is predicted: an expression over any columns, protected."""

    rule: str
    kind: Literal["binary", "count", "real"] = "binary"
    default: float = 0.0
    """The label where the rule's value is missing or outside the domain."""

    @field_validator("rule")
    @classmethod
    def _parses(cls, value: str) -> str:
        expressions.parse(value)
        return value

    @model_validator(mode="after")
    def _a_label(self) -> Self:
        allowed = {"binary": self.default in (0, 1), "count": 0 <= self.default < 2**24 and self.default % 1 == 0}
        if not allowed.get(self.kind, True):
            raise ValueError(f"default is {self.default:g}, which no {self.kind} label is")
        return self


class Split(Tree):
    """Which rows train: a rule over public columns and keys alone."""

    kind: Literal["chronological", "random", "files"]
    by: str = "row"
    """chronological: `row` (file order) or `time`; random: `row` or a key, whose units then stay together."""
    train: float | str = 0.8
    validation: float = Field(0.0, ge=0, lt=1)
    test: float | str = 0.2

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.kind == "files":
            if not (isinstance(self.train, str) and isinstance(self.test, str)):
                raise ValueError("files: train and test are patterns of file names")
            return self
        if isinstance(self.train, str) or isinstance(self.test, str):
            raise ValueError(f"{self.kind}: train and test are fractions")
        if self.train <= 0 or self.test < 0 or abs(self.train + self.validation + self.test - 1) > 1e-9:
            raise ValueError("train + validation + test must be 1, with train above 0")
        allowed = ("row", "time") if self.kind == "chronological" else ("row", *KEYS)
        if self.by not in allowed:
            raise ValueError(f"{self.kind}: by is one of {', '.join(allowed)}")
        return self


class Counts(Tree):
    """What counting sensitive values may spend, out of the run's total budget."""

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    candidates: Literal["discovered"] = "discovered"
    """discovered: a value leaves only if its noised count passes a threshold that hides any single row."""


class Expect(Tree):
    """What a complete copy of a published log holds; a warning says so where the number of rows differs."""

    rows: int
    note: str


class Recipe(Tree):
    """One TOML file: a raw log's columns, roles, derivations, label, split and encodings."""

    schema_version: int
    name: str = Field(min_length=1)
    title: str = ""
    stand_in: Literal["generated", "public"] | None = None
    """Nothing in this log needs protection: nothing is charged, and the statement says so."""
    source: Source
    columns: tuple[Column, ...] = Field(min_length=1)
    filter: str | None = None
    """Which rows exist, read from public columns and keys alone."""
    label: Label
    split: Split
    public: Encoding | None = None
    sensitive: Encoding | None = None
    log: Log = Log()
    counts: Counts | None = None
    hash_key: str = "adumbra"
    """The key of every hash; the same key gives the same bins on every machine."""
    expect: Expect | None = None

    @model_validator(mode="before")
    @classmethod
    def _version(cls, raw: object) -> object:
        if isinstance(raw, dict) and raw.get("schema_version", VERSION) != VERSION:
            found = raw["schema_version"]
            raise ValueError(f"schema_version is {found!r}; this adumbra reads version {VERSION}")
        return raw

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        seen: set[str] = set()
        for column in self.columns:
            if column.name in seen:
                raise ValueError(f"column '{column.name}' is declared twice")
            seen.add(column.name)
        keys = [column.role for column in self.columns if column.role in KEYS]
        if len(set(keys)) != len(keys):
            raise ValueError(f"two columns have the role {max(keys, key=keys.count)}; a key is one column")
        self._check_expression("label.rule", self.label.rule, public=False)
        if self.filter is not None:
            self._check_expression("filter", self.filter, public=True)
        if self.split.by not in ("row", *keys):
            raise ValueError(f"split.by is '{self.split.by}', but no column has that role")
        for tower in TOWERS:
            if self.encoding(tower) is None and any(f.is_token for f in self.features if f.tower == tower):
                raise ValueError(
                    f"the {tower} columns need an encoding: a section [{tower}] with kind, threshold or bins"
                )
        if self.counts is None and self.counted:
            names = ", ".join(feature.name for feature in self.counted[:3])
            raise ValueError(
                f"sensitive values must be counted privately ({names}, …): add [counts] with epsilon and delta,"
                " or declare values or bounds, or use kind = 'hash'"
            )
        names = [feature.name for feature in self.features]
        if len(set(names)) != len(names):
            raise ValueError(f"two features have the name '{max(names, key=names.count)}'")
        if not names:
            raise ValueError("no column is a feature")
        for tower in TOWERS:
            encoding = self.encoding(tower)
            if encoding is not None and encoding.table == "column" and encoding.bins is not None:
                tables = sum(feature.is_token for feature in self.features if feature.tower == tower)
                if tables * encoding.bins > 2**31 - 16:
                    raise ValueError(f"{tower}.bins: {tables} tables of {encoding.bins} rows are too many")
        return self

    def _check_expression(self, place: str, source: str, public: bool) -> None:
        try:
            expression = expressions.parse(source)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        known = {column.name: column for column in self.columns}
        for name in sorted(expression.columns):
            if name not in known:
                raise ValueError(f"{place} reads '{name}', which no column is named{toml.nearest(name, known)}")
            if known[name].type == "list":
                raise ValueError(f"{place} reads '{name}', a list")
            if public and known[name].protected:
                raise ValueError(
                    f"{place} reads '{name}', a {known[name].role} column: which rows exist is public, so it may read"
                    " public columns and keys only"
                )

    def encoding(self, tower: Tower) -> Encoding | None:
        return self.public if tower == "public" else self.sensitive

    @cached_property
    def features(self) -> tuple["Feature", ...]:
        """Every feature, in the order of the columns."""
        return tuple(
            Feature(column, derivation)
            for column in self.columns
            if column.tower is not None
            for derivation in column.derivations
        )

    @cached_property
    def counted(self) -> tuple["Feature", ...]:
        """The sensitive features whose values must be counted, privately."""
        return tuple(
            feature
            for feature in self.features
            if feature.tower == "sensitive" and (feature.needs_bounds or self.needs_vocabulary(feature))
        )

    def needs_vocabulary(self, feature: "Feature") -> bool:
        encoding = self.encoding(feature.tower)
        return feature.is_token and feature.domain is None and encoding is not None and encoding.kind == "vocabulary"

    def key(self, role: str) -> Column | None:
        """The column that has this key's role, if any."""
        return next((column for column in self.columns if column.role == role), None)


class Feature:
    """One thing a model sees: a column and what is derived from it."""

    def __init__(self, column: Column, derivation: Derivation) -> None:
        self.column = column
        self.derivation = derivation
        several = len(column.derivations) > 1
        self.name = f"{column.name}.{derivation}" if several else column.name
        assert column.tower is not None
        self.tower: Tower = column.tower

    @property
    def is_token(self) -> bool:
        return self.derivation not in NUMBERS

    @property
    def width(self) -> int:
        """How many ids an example holds of it."""
        return (self.column.length or 1) if self.column.type == "list" else 1

    @property
    def domain(self) -> tuple[str, ...] | None:
        """Its tokens where they are known without looking at the log."""
        match self.derivation:
            case "hour":
                return tuple(map(str, range(24)))
            case "weekday":
                return tuple(map(str, range(7)))
            case "bucket":
                return tuple(map(str, range(len(self.column.edges or ()) + 1)))
            case "log2":
                return LOG2_TOKENS
            case _:
                return self.column.values

    @property
    def needs_bounds(self) -> bool:
        return not self.is_token and self.column.bounds == "counted"


LOG2_TOKENS = ("negative", "zero", "below one", *map(str, range(64)))
"""log2 as a token: the integer part of log2(x), with tokens of their own for what has none."""


def shipped() -> list[str]:
    """The names of the recipes that come with adumbra."""
    folder = resources.files("adumbra.data") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(name_or_path: str | Path) -> Recipe:
    """A recipe from a file, or one of those that ship by its name."""
    path = Path(name_or_path)
    if str(name_or_path) in shipped():
        path = _shipped_path(str(name_or_path))
    elif not path.exists():
        hint = toml.nearest(str(name_or_path), shipped())
        raise InputError(f"recipe '{name_or_path}': no such file, and none of that name ships{hint}")
    return toml.parse(toml.read(path), Recipe, str(name_or_path))


def text(name: str) -> str:
    """The text of a recipe that ships."""
    if name not in shipped():
        raise InputError(f"no recipe '{name}' ships{toml.nearest(name, shipped())}")
    return _shipped_path(name).read_text()


def _shipped_path(name: str) -> Path:
    return Path(str(resources.files("adumbra.data") / "recipes" / f"{name}.toml"))
