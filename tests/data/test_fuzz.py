"""Whatever the recipe and whatever the log: a store, or one line that says what is wrong."""

import bz2
import copy
import gzip
import io
import tempfile
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ADS, NAMES, SECRET, VOCABULARY, ads, as_toml, raw, recipe

from adumbra import describe, schema, toml
from adumbra.data import source
from adumbra.data.prepare import BadRows, prepare
from adumbra.errors import InputError

pytestmark = pytest.mark.filterwarnings("error")
ROWS = [[SECRET if place in (4, 6) else value for place, value in enumerate(row)] for row in ads(24)]
LINES = ["\t".join(row) for row in ROWS]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(source, "BLOCK", 700)


def check_line(error, clean=True):
    assert "\n" not in str(error)
    assert SECRET not in str(error)
    assert clean, "something was left behind"


def store_or_line(log, files):
    """`files` holds names and bytes."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in files]
        for path, data in zip(paths, files.values(), strict=True):
            path.write_bytes(data)
        out = Path(folder) / "store"
        try:
            store = prepare(log, [str(path) for path in paths], out, bad_rows=BadRows(True, 0.2))
        except InputError as error:
            left = sorted(path.name for path in Path(folder).iterdir())
            check_line(error, left == sorted(files))
            return False
        assert describe.store_text(describe.store(store.verify()))
        for split in store.splits:
            assert all(len(array) == store.splits[split] for array in store.split(split).arrays.values())
            for tower in schema.TOWERS:
                ids = store.split(split)[tower]
                assert not ids.size or 0 <= ids.min() <= ids.max() < store.description["table_rows"][tower]
        return True


ODD = st.one_of(
    st.sampled_from(
        [None, "", "public", "sensitive", "label", "user", "drop", "token", "log", "number", "bucket", "log2"]
    ),
    st.sampled_from(
        ["hash", "vocabulary", "tower", "column", "counted", "random", "chronological", "files", "row", "time"]
    ),
    st.sampled_from(
        ["integer", "real", "category", "list", "timestamp", "parquet", "csv", "space", '"', "\t", "\n", "|"]
    ),
    st.sampled_from(
        ["visits > 2", "site == 'a.com'", "clicked", "visits / 0", "not price", "visits and time", "*", "log*"]
    ),
    st.sampled_from([0, 1, -1, 2, 3, 7, 0.5, 1e-9, 1e9, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), True]),
    st.sampled_from(
        [[], {}, [1, 2, 3], ["hour", "weekday"], ["a", "b"], {"low": 0, "high": 1}, {"kind": "hash", "bins": 5}]
    ),
    st.text(max_size=6),
)
BASES = [
    raw(),
    raw(**VOCABULARY),
    raw(filter="visits > 1", split={"kind": "random", "by": "user", "validation": 0.2, "train": 0.5, "test": 0.3}),
    raw(column={"visits": {"as": ["bucket", "log2"], "edges": [1, 3]}, "recency": {"bounds": "counted"}}, **VOCABULARY),
    raw(public={"kind": "hash", "bins": 9, "table": "column"}, label={"rule": "visits", "kind": "count", "default": 3}),
    *(tomllib.loads(schema.text(name)) for name in schema.shipped()),
]
SECTIONS = ["source", "label", "split", "public", "sensitive", "counts", "log", "expect"]


def places(tree):
    """Every dictionary or list in a tree."""
    inner = list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [tree, *(place for entry in inner for place in places(entry))] if isinstance(tree, dict | list) else []


@st.composite
def mutated_recipes(draw):
    tree = copy.deepcopy(draw(st.sampled_from(BASES[:5] + BASES)))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(tree)))
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        known = (
            list(schema.Column.model_fields) + ["as"] + [k for name in SECTIONS for k in ADS.get(name, {})] + SECTIONS
        )
        key = draw(st.sampled_from(keys + known if isinstance(place, dict) else keys)) if keys else None
        match draw(st.sampled_from(["change", "change", "delete", "double"])):
            case "change" if isinstance(place, dict):
                place[key or draw(st.sampled_from(known))] = copy.deepcopy(draw(ODD))
            case "change" if keys:
                place[key] = copy.deepcopy(draw(ODD))
            case "delete" if keys and (isinstance(place, list) or key in place):
                del place[key]
            case "double" if isinstance(place, list) and keys:
                place.append(copy.deepcopy(place[key]))
    return tree


def a_recipe_or_a_line(tree):
    try:
        log = toml.parse(tree, schema.Recipe, "recipe.toml")
    except InputError as error:
        check_line(error)
        return False
    width, form = len(log.columns), log.source.format
    if form == "parquet":
        return store_or_line(log, {"log.parquet": parquet(ROWS)})
    rows = [(row * 5)[:width] for row in ROWS]
    lines = [log.source.delimiter.join(row) for row in rows]
    if log.source.header:
        lines.insert(0, log.source.delimiter.join(column.name for column in log.columns))
    return store_or_line(log, {"log.tsv": "\n".join(lines).encode()})


def parquet(rows):
    out = io.BytesIO()
    pq.write_table(pa.table(dict(zip(NAMES, map(list, zip(*rows, strict=True)), strict=True))), out)
    return out.getvalue()


LOGS = {
    "tsv": (recipe(), "\n".join(LINES).encode()),
    "private": (recipe(**VOCABULARY), "\n".join(LINES).encode()),
    "csv": (
        recipe(source={"format": "csv", "quote": '"', "header": True, "trim": True}),
        "\n".join([",".join(NAMES), *(",".join(f'"{value}"' for value in row) for row in ROWS)]).encode(),
    ),
    "space": (recipe(source={"format": "space"}), "\n".join(" ".join(row) for row in ROWS).encode()),
    "parquet": (recipe(source={"format": "parquet"}), parquet(ROWS)),
}
WRAP = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True) if data else b"(",
}
PIECES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"\n", b"\r\n", b"\t", b",", b'"', b'""', b" ", b"\r", b"\0", b"\xff", b"\xef\xbb\xbf", b"|", b"-"]
    ),
    st.sampled_from([LINES[0].encode(), b"\n" * 50, b'"' * 7, b"9" * 400, b"1e999", "ü€😀".encode(), b"x" * 3000]),
)


@st.composite
def mutated_bytes(draw, data):
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + draw(st.sampled_from([0, 1, 9, 10**6])))))
        data = data[:start] + draw(PIECES) + data[end:]
    return data


@st.composite
def mutated_logs(draw):
    form = draw(st.sampled_from(sorted(LOGS)))
    kind = draw(st.sampled_from(["", "", "", *WRAP]))
    log, data = LOGS[form]
    if draw(st.booleans()) or not kind:
        data = WRAP[kind](draw(mutated_bytes(data)))
    else:
        data = draw(mutated_bytes(WRAP[kind](data)))
    return log, {f"log{kind}": data}


COUNTS = [200, pytest.param(2500, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
def test_random_recipes(count):
    stores = []

    @settings(max_examples=count)
    @given(mutated_recipes())
    def run(tree):
        stores.append(a_recipe_or_a_line(tree))

    run()
    assert sum(stores) > count // 20


@pytest.mark.parametrize("count", COUNTS)
def test_random_text_of_recipes(count, tmp_path):
    path = tmp_path / "recipe.toml"
    text = as_toml(ADS).encode()

    @settings(max_examples=count)
    @given(mutated_bytes(text))
    def run(data):
        path.write_bytes(data)
        try:
            schema.load(path)
        except InputError as error:
            assert "\n" not in str(error)  # noqa: PT017

    run()


@pytest.mark.parametrize("count", COUNTS)
def test_random_logs(count):
    stores = []

    @settings(max_examples=count)
    @given(mutated_logs())
    def run(log):
        stores.append(store_or_line(*log))

    run()
    assert sum(stores) > count // 20
