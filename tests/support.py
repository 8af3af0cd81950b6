"""A small ad log with a recipe that uses every kind of column, and what tests do with logs and stores."""

import copy
import json
import random
import sys
import tomllib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from adumbra import cli, schema, toml
from adumbra.data.prepare import BadRows, prepare
from adumbra.errors import InputError

SECRET = "SECRETVALUE"
"""Stands in protected cells; no message may hold it."""

ADS = tomllib.loads(
    """
schema_version = 1
name = "ads"
hash_key = "test"
columns = [
  { name = "clicked", role = "label", type = "integer" },
  { name = "site", role = "public", type = "category" },
  { name = "visits", role = "public", type = "integer" },
  { name = "price", role = "public", type = "real", as = "number", bounds = { low = 0, high = 10 } },
  { name = "interest", role = "sensitive", type = "category" },
  { name = "recency", role = "sensitive", type = "integer", as = "log" },
  { name = "segments", role = "sensitive", type = "list", length = 3 },
  { name = "user", role = "user", type = "category" },
  { name = "time", role = "time", type = "timestamp", feature = "public" },
]
[source]
format = "tsv"
[label]
rule = "clicked"
[split]
kind = "chronological"
[public]
kind = "vocabulary"
threshold = 2
[sensitive]
kind = "hash"
bins = 64
"""
)
NAMES = [column["name"] for column in ADS["columns"]]
VOCABULARY = {"sensitive": {"kind": "vocabulary", "threshold": 1}, "counts": {"epsilon": 1.0, "delta": 1e-6}}
"""What makes the sensitive tower of ADS one that is counted, privately."""


def raw(base=ADS, *, column=None, **sections):
    """A recipe's raw TOML with changes: `column={"site": {…}}` and whole sections; None removes."""
    out = copy.deepcopy(base)
    for entry in out["columns"]:
        entry.update((column or {}).get(entry["name"], {}))
    for name, value in sections.items():
        if value is None:
            out.pop(name, None)
        elif isinstance(value, dict) and isinstance(out.get(name), dict) and "kind" not in value:
            out[name].update(value)
        else:
            out[name] = value
    return out


def recipe(base=ADS, **changes):
    return toml.parse(raw(base, **changes), schema.Recipe, "recipe.toml")


def as_toml(value, top=True):
    """TOML text of a raw recipe."""
    if top:
        return "".join(f"{key} = {as_toml(entry, False)}\n" for key, entry in value.items())
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{json.dumps(k, ensure_ascii=False)} = {as_toml(v, False)}" for k, v in value.items())
            + " }"
        )
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(entry, False) for entry in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def ads(rows, seed=0):
    """Rows of ADS, as text; a twentieth of the values is missing, times rise with ties."""
    r = random.Random(seed)
    out = []
    for row in range(rows):
        values = [
            str(int(r.random() < 0.3)),
            r.choice(
                ["a.com", "b.com", "größe.de", "a-site-with-a-long-name.example", f"rare-{r.randrange(rows)}.net"]
            ),
            str(min(int(r.expovariate(0.3)), 40)),
            f"{r.uniform(-1, 12):.3f}",
            r.choice(["sport", "music", "cars", "finance"]),
            str(int(r.expovariate(0.01)) - 1),
            "|".join(r.choice(["x", "y", "z", "w"]) for _ in range(r.randrange(1, 6))),
            f"u{r.randrange(max(1, rows // 4))}",
            str(1_700_000_000 + 600 * (row // 3)),
        ]
        out.append(["" if r.random() < 0.05 and place != 8 else value for place, value in enumerate(values)])
    return out


def write(path, rows, delimiter="\t", header=None, end="\n"):
    """A log of these rows; its path as text."""
    lines = [delimiter.join(row) for row in ([header] if header else []) + rows]
    path.write_bytes("".join(line + end for line in lines).encode())
    return str(path)


def made(recipe, source, out, *, skip=False, most=0.001, **options):
    return prepare(
        recipe, [source] if isinstance(source, str) else source, out, bad_rows=BadRows(skip, most), **options
    )


def refusal(recipe, source, out, **options):
    """The one line with which `prepare` refuses, leaving nothing behind."""
    with pytest.raises(InputError) as caught:
        made(recipe, source, out, **options)
    message = str(caught.value)
    assert SECRET not in message
    assert "\n" not in message
    assert not Path(out).exists()
    assert not Path(f"{out}.partial").exists()
    return message


def contents(store, private=True):
    """Every file of a store by name, as bytes; of `store.json` what does not depend on the ledger or on how the log was
    written. `private=False` leaves out what depends on the draw of sensitive counts."""
    files = {}
    for file in sorted(Path(store).rglob("*")):
        name = str(file.relative_to(store))
        if file.is_file() and name not in ("ledger.jsonl", "store.json"):
            files[name] = file.read_bytes()
    about = json.loads((Path(store) / "store.json").read_text())
    for key in ("digest", "ledger_head", "source", "recipe", "name"):
        about.pop(key)
    if not private:
        files = {name: data for name, data in files.items() if "sensitive.npy" not in name and "tokens" not in name}
        about = {key: about[key] for key in ("splits", "keys", "bad_rows_skipped", "label")}
    return files | {"store.json": json.dumps(about).encode()}


def vocabulary(store):
    """{feature: {token: (row, count)}} of a store."""
    table = pq.read_table(Path(store) / "vocabulary/tokens.parquet").to_pydict()
    out = {}
    for feature, token, row, count in zip(*(table[n] for n in ("feature", "token", "row", "count")), strict=True):
        assert token not in out.setdefault(feature, {})
        out[feature][token] = row, count
    return out


def column(store, name):
    """A token feature's entry in `store.json`."""
    return next(entry for entry in store.description["tokens"] if entry["name"] == name)


def ids(store, name, split="train"):
    """A token feature's rows of the table, for each row of a split."""
    about = column(store, name)
    return np.asarray(store.split(split)[about["tower"]][:, about["start"] : about["start"] + about["length"]])


def command(monkeypatch, capsys, *words):
    """Exit status, standard output and standard error of the command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["adumbra", *map(str, words)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return caught.value.code or 0, out, err
