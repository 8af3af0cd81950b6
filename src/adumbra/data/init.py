"""A recipe to edit from the head of a raw log: names and types filled in, every role left blank.

A blank role is refused everywhere, so the recipe cannot be used before a person has decided what is protected.
"""

import json
import re
from importlib import resources
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from adumbra.data import source
from adumbra.errors import InputError
from adumbra.schema import VERSION

_HEAD = 1 << 20
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2})?Z?)?")


def write(out: Path, store: str, recipe: str) -> None:
    """The folder `out` with `recipe.toml` and a commented `adumbra.toml`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists already; choose another --out")
    template = (resources.files("adumbra") / "templates" / "adumbra.toml").read_text()
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "recipe.toml").write_text(recipe)
        (out / "adumbra.toml").write_text(template.replace("STORE", store))
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from None


def recipe_from(log: Path) -> str:
    """The text of a recipe for a log like this one."""
    if not log.is_file():
        raise InputError(f"{log}: no such file")
    if log.suffix == ".parquet":
        header, form, columns, extra = False, "parquet", _parquet_columns(log), ""
    else:
        header, form, columns, blanks = _text_columns(log)
        extra = "quote = '\"' # values may be quoted\n" if form == "csv" else ""
        extra += "trim = true # blanks around values are no part of them\n" if blanks else ""
    lines = [f'  {{ name = {json.dumps(name)}, role = "", type = {kind} }},' for name, kind in columns]
    return _RECIPE.format(
        log=log.name,
        version=VERSION,
        name=json.dumps(re.sub(r"\W+", "-", log.name.split(".")[0]).strip("-") or "log"),
        columns="\n".join(lines),
        format=form,
        header="true" if header else "false",
        extra=extra,
    )


def _parquet_columns(log: Path) -> list[tuple[str, str]]:
    try:
        schema = pq.read_schema(log)
    except (OSError, pa.ArrowException):
        raise InputError(f"{log}: not readable as parquet: truncated or damaged") from None
    return [(field.name, _arrow_type(field.type)) for field in schema]


def _arrow_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return '"list", length = 8, separator = "|"'
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return '"timestamp"'
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return '"integer"'
    return '"real"' if pa.types.is_floating(kind) else '"category"'


def _text_columns(log: Path) -> tuple[bool, str, list[tuple[str, str]], bool]:
    """Whether there is a header, the format, names with types, and whether blanks surround values."""
    lines = [line for line in source.head(log, _HEAD).splitlines() if line]
    if not lines:
        raise InputError(f"{log}: the file is empty")
    counts = {form: lines[0].count(delimiter) for form, delimiter in (("tsv", "\t"), ("csv", ","), ("space", " "))}
    form = max(counts, key=lambda name: (counts[name] > 0 and _steady(lines, name), counts[name]))
    delimiter = {"tsv": "\t", "csv": ",", "space": " "}[form]
    rows = [[value.strip().strip('"') for value in line.split(delimiter)] for line in lines]
    rows = [row for row in rows if len(row) == len(rows[0])]
    first, rest = rows[0], rows[1:] or rows
    types = [_type([row[place] for row in rest]) for place in range(len(first))]
    words = all(name and not _REAL.fullmatch(name) for name in first) and len(set(first)) == len(first)
    header = words and len(rows) > 1 and any(kind != '"category"' for kind in types)
    names = first if header else [f"column-{place}" for place in range(1, len(first) + 1)]
    if not header:
        types = [_type([row[place] for row in rows]) for place in range(len(first))]
    blanks = form != "space" and lines[-1].count(delimiter + " ") > len(first) // 2
    return header, form, list(zip(names, types, strict=True)), blanks


def _steady(lines: list[str], form: str) -> bool:
    delimiter = {"tsv": "\t", "csv": ",", "space": " "}[form]
    return sum(line.count(delimiter) == lines[0].count(delimiter) for line in lines) > 0.9 * len(lines)


def _type(values: list[str]) -> str:
    values = [value for value in values if value]
    if values and all(_INTEGER.fullmatch(value) for value in values):
        stamp = all(1e9 < int(value) < 2.2e9 for value in values)
        return '"timestamp"' if stamp else '"integer"'
    if values and all(_REAL.fullmatch(value) for value in values):
        return '"real"'
    if values and all(_DATE.fullmatch(value) for value in values):
        return '"timestamp"'
    if sum("|" in value for value in values) > 0.2 * len(values):
        return '"list", length = 8, separator = "|"'
    return '"category"'


_RECIPE = """# A recipe for {log}. Decide every role; a blank one is refused:
#   public      the attacker knows it           user, publisher, advertiser, time
#   sensitive   protected                                   keys: who and when, public facts that
#   label       what is predicted; protected                privacy units and splits are made of
# What a model sees of a column: as = "token" | "bucket" | "log2" | "log" | "number" | "hour" | "weekday" | "drop"

schema_version = {version}
name = {name}
columns = [
{columns}
]

[source]
format = "{format}"
header = {header}
{extra}missing = [""]

[label]
rule = "" # an expression over the columns: "clicked", "conversions > 0", "income == '50000+.'"

[split] # chronological (by = "row" or "time"), random (by = "row" or a key), or files
kind = "chronological"
train = 0.8
validation = 0.1
test = 0.1

[public]
kind = "vocabulary" # or: kind = "hash", bins = 100_000
threshold = 16

[sensitive] # hashing looks at nothing; a vocabulary counts, privately, and needs [counts] with epsilon and delta
kind = "hash"
bins = 50_000

[log] # as = "log" is log(max(x, minimum) + shift); a missing value becomes `missing`
minimum = 0.0
shift = 1.0
missing = 0.0
"""
