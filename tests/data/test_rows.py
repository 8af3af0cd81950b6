"""New rows through a finished store: byte for byte what `prepare` wrote for them, for every recipe that ships."""

import gzip
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import NAMES, SECRET, ads, column, made, raw, recipe, vocabulary, write

from adumbra import schema
from adumbra.data import source
from adumbra.data.generate import generate
from adumbra.data.rows import Encoding, names
from adumbra.data.store import ARRAYS, TOKENS, Store
from adumbra.errors import InputError
from adumbra.schema import Split

IN_ORDER = Split(kind="chronological", by="row", train=0.5, validation=0.25, test=0.25)
WORLDS = {
    "criteo-display": ("ctr", {}),
    "criteo-display-dnn": ("ctr", {}),
    "criteo-display-labels": ("ctr", {}),
    "criteo-search": ("cvr", {}),
    "criteo-attribution": ("attribution", {"criteo": True}),
    "generated-attribution": ("attribution", {}),
    "generated-convs": ("convs", {}),
}
FEATURES = ("public", "sensitive", "numbers_public", "numbers_sensitive")


def encoded(store, *inputs, **options):
    """All arrays of the inputs, encoded as the store's log was, and the numbers of their rows."""
    blocks = list(Encoding.of(store).blocks([str(path) for path in inputs], **options))
    arrays = {name: np.concatenate([block.split.arrays[name] for block in blocks]) for name in blocks[0].split.arrays}
    return arrays, np.concatenate([block.numbers for block in blocks])


def whole(store):
    """All arrays of a store whose splits follow each other in the log."""
    parts = [store.split(name).arrays for name in store.splits]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_same(found, expected, only=ARRAYS):
    assert {name for name in found if name in only} == {name for name in expected if name in only}
    for name in only:
        if name in expected:
            assert found[name].dtype == expected[name].dtype
            assert found[name].shape == expected[name].shape
            assert found[name].tobytes() == expected[name].tobytes(), name


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """One small log for each world, made when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("logs"), {}

    def log(preset, knobs):
        name = preset + "-".join(knobs)
        if name not in made:
            generate(preset, 3000, folder / name, **knobs)
            made[name] = folder / name / "log.tsv"
        return made[name]

    return log


@pytest.mark.parametrize("name", WORLDS)
def test_a_log_again_is_what_prepare_wrote_for_every_recipe_that_ships(name, logs, tmp_path, monkeypatch):
    log = logs(*WORLDS[name])
    held = schema.load(name).model_copy(update={"split": IN_ORDER, "stand_in": "generated", "expect": None})
    store = made(held, str(log), tmp_path / "store")
    monkeypatch.setattr(source, "BLOCK", 1 << 17)  # several blocks
    found, numbers = encoded(store, log, labelled=True)
    assert_same(found, whole(store))
    assert len(numbers) == sum(store.splits.values())
    if held.filter is None:
        assert numbers.tolist() == list(range(1, len(numbers) + 1))


def test_census_income_again(tmp_path):
    held = schema.load("census-income")
    r, bucketed = random.Random(3), {"wage_per_hour", "capital_gains", "capital_losses", "dividends_from_stocks"}

    def value(column):
        if column.name in bucketed:
            return str(r.choice([0, 0, 1, 450, 99999]))
        return str(r.randrange(40)) if column.type in ("integer", "real") else f" {r.choice(['A b', 'C', '?'])} "

    rows = [[value(c) for c in held.columns[:-1]] + [r.choice([" - 50000.", " 50000+."])] for _ in range(900)]
    train = write(tmp_path / "train.csv", rows[:600], ",")
    test = write(tmp_path / "test.csv", rows[600:], ",")
    store = made(held, [train, test], tmp_path / "store")
    assert_same(encoded(store, train, labelled=True)[0], dict(store.split("train").arrays))
    unlabelled = write(tmp_path / "new.csv", [row[:-1] for row in rows[600:]], ",")
    assert_same(encoded(store, unlabelled)[0], dict(store.split("test").arrays), FEATURES)


ENCODINGS = {
    "hash": {"kind": "hash", "bins": 50},
    "hash a column": {"kind": "hash", "bins": 50, "table": "column"},
    "vocabulary": {"kind": "vocabulary", "threshold": 20},
    "vocabulary a column": {"kind": "vocabulary", "threshold": 20, "table": "column"},
}
PAIRS = [("hash", "vocabulary"), ("hash a column", "vocabulary a column"), ("vocabulary", "hash"),
         ("vocabulary a column", "hash a column")]  # fmt: skip
VARIANTS = {
    "declared": {
        "site": {"values": ["a.com", "never.com"]},
        "interest": {"values": ["cars", "boats"]},
        "price": {"bounds": "counted"},
    },
    "derived": {
        "visits": {"as": ["bucket", "log2", "token", "log"], "edges": [1, 3, 9]},
        "recency": {"as": "log2"},
        "user": {"feature": "public"},
        "time": {"feature": "sensitive", "as": ["number", "hour"]},
    },
    "closed domains first": {"site": {"role": "sensitive"}, "visits": {"as": "bucket", "edges": [2.0]}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("public", "sensitive"), PAIRS)
def test_every_encoding_again(public, sensitive, variant, tmp_path):
    held = recipe(
        raw(column=VARIANTS[variant]),
        public=ENCODINGS[public],
        sensitive=ENCODINGS[sensitive],
        counts={"epsilon": 8.0, "delta": 1e-3},
        filter="visits < 30 or user == 'u7'",
        split={"kind": "chronological", "train": 0.5, "validation": 0.25, "test": 0.25},
    )
    rows = ads(900)
    for row in rows[::50]:
        row[5] = SECRET  # a malformed sensitive integer is missing
    log = write(tmp_path / "log.tsv", rows)
    store = made(held, log, tmp_path / "store")
    found, numbers = encoded(store, log, labelled=True)
    assert_same(found, whole(store))
    kept = [n for n, row in enumerate(rows, 1) if row[7] == "u7" or (row[2] and int(row[2]) < 30)]
    assert numbers.tolist() == kept
    assert len(kept) < len(rows)


def test_an_unseen_value_is_unknown_and_a_missing_one_missing(tmp_path):
    held = recipe(public={"threshold": 20})
    rows = ads(400)
    store = made(held, write(tmp_path / "log.tsv", rows), tmp_path / "store")
    known = vocabulary(store.path)["site"]
    site, visits = column(store, "site"), column(store, "visits")
    new = [[*row] for row in rows[:5]]
    new[0][1], new[1][1], new[2][1], new[3][1] = "a.com", "new.com", "", "rare-1.net"
    new[0][2], new[1][2] = "123456", ""
    ids = encoded(store, write(tmp_path / "new.tsv", new))[0]["public"]
    unknown = site["offset"] - 1
    assert ids[:4, site["start"]].tolist() == [known["a.com"][0], unknown, site["offset"], unknown]
    assert ids[:2, visits["start"]].tolist() == [unknown, visits["offset"]]
    texts = names(store, "site")
    assert [texts[i] for i in ids[:3, site["start"]]] == ["a.com", "(unknown)", "(missing)"]
    assert names(store, "interest") == {}  # hashed


def test_encoding_leaves_the_store_and_its_tables_as_they_were(tmp_path):
    log = write(tmp_path / "log.tsv", ads(200))
    store = made(recipe(), log, tmp_path / "store")
    encoding = Encoding.of(store)
    sizes = [table.size for table in encoding.encoder.tables if table is not None]
    new = write(tmp_path / "new.tsv", ads(300, seed=9))
    first = [block.split["public"].tobytes() for block in encoding.blocks([new])]
    assert first == [block.split["public"].tobytes() for block in encoding.blocks([new])]
    assert sizes == [table.size for table in encoding.encoder.tables if table is not None]
    Store.open(tmp_path / "store").verify()


@pytest.fixture
def store(tmp_path):
    held = recipe(filter="visits < 30", split={"train": 0.5, "test": 0.5})
    return made(held, write(tmp_path / "log.tsv", ads(500)), tmp_path / "store")


def without(rows, *columns):
    places = [place for place, name in enumerate(NAMES) if name not in columns]
    return [[row[place] for place in places] for row in rows], [NAMES[place] for place in places]


def test_the_label_and_columns_that_no_model_sees_may_be_absent(store, tmp_path):
    rows = ads(200, seed=4)
    expected, expected_numbers = encoded(store, write(tmp_path / "all.tsv", rows))
    assert "label" not in expected
    values, _ = without(rows, "clicked")
    found, numbers = encoded(store, write(tmp_path / "unlabelled.tsv", values))
    assert_same(found, expected)
    assert np.array_equal(numbers, expected_numbers)
    values, header = without(rows, "clicked", "user")
    found, numbers = encoded(store, write(tmp_path / "named.tsv", values, header=header))
    assert_same(found, expected, FEATURES)
    assert set(found) == set(expected) - {"user"}
    assert np.array_equal(numbers, expected_numbers)


def mixed(rows, header, seed=0):
    """The columns in another order, with one that nobody declared."""
    rows, header = [[*row, f"id-{n}"] for n, row in enumerate(rows)], [*header, "request"]
    order = random.Random(seed).sample(range(len(header)), len(header))
    return [[row[place] for place in order] for row in rows], [header[place] for place in order]


@pytest.mark.parametrize("form", ["tsv", "csv", "quoted csv", "tsv.gz", "parquet", "typed parquet"])
def test_other_forms_of_the_same_rows_are_matched_by_name(store, tmp_path, form):
    rows = ads(200, seed=4)
    expected, expected_numbers = encoded(store, write(tmp_path / "all.tsv", rows))
    values, header = mixed(*without(rows, "clicked"))
    path = tmp_path / ("new." + form.split()[-1])
    if form == "tsv":
        write(path, values, header=header)
    elif form == "csv":
        write(path, values, ",", header, end="\r\n")
    elif form == "quoted csv":
        write(path, [[f'"{value}"' for value in row] for row in values], ",", [f'"{name}"' for name in header])
    elif form == "tsv.gz":
        path.write_bytes(gzip.compress(Path(write(tmp_path / "x", values, header=header)).read_bytes()))
    else:
        table = pa.table([pa.array([row[n] or None for row in values]) for n in range(len(header))], header)
        if form == "typed parquet":
            for name in ("visits", "recency", "time"):
                place = table.schema.get_field_index(name)
                table = table.set_column(place, name, table[name].cast(pa.int64()))
        pq.write_table(table, path)
    found, numbers = encoded(store, path)
    assert_same(found, expected)
    assert np.array_equal(numbers, expected_numbers)


def test_rows_are_numbered_over_files_and_kept_columns_go_with_them(store, tmp_path):
    rows = ads(90, seed=5)
    files = [write(tmp_path / f"{n}.tsv", rows[n : n + 30]) for n in (0, 30, 60)]
    blocks = list(Encoding.of(store).blocks(files, keep=("user", "site")))
    kept = [n for n, row in enumerate(rows, 1) if row[2] and int(row[2]) < 30]
    assert np.concatenate([block.numbers for block in blocks]).tolist() == kept
    users = [user for block in blocks for user in block.kept["user"].to_pylist()]
    assert users == [rows[n - 1][7] or None for n in kept]
    assert blocks[-1].position == blocks[-1].total == sum((tmp_path / f"{n}.tsv").stat().st_size for n in (0, 30, 60))


def test_what_is_wrong_with_an_input_is_one_line(store, tmp_path):
    rows = ads(20)

    def refused(path, match, **options):
        with pytest.raises(InputError, match=match) as caught:
            list(Encoding.of(store).blocks([str(path)], **options))
        assert "\n" not in str(caught.value)
        assert SECRET not in str(caught.value)

    values, header = without(rows, "interest")
    refused(write(tmp_path / "a.tsv", values, header=header), "column 'interest' of the recipe is missing")
    values, header = without(rows, "visits", "clicked", "user")
    refused(write(tmp_path / "b.tsv", values), "6 fields, expected 9, or 8 without the label's columns")
    unlabelled, header = without(rows, "clicked")
    refused(write(tmp_path / "c.tsv", unlabelled), "8 fields, expected 9; or add a header", labelled=True)
    refused(write(tmp_path / "d.tsv", unlabelled, header=header), "'clicked' of the recipe is missing", labelled=True)
    refused(write(tmp_path / "e.tsv", rows), "no column 'request' to keep", keep=("request",))
    refused(write(tmp_path / "f.tsv", rows, header=[*NAMES[:-2], "site", "time"]), "two columns are named 'site'")
    rows[7][2] = "many"
    refused(write(tmp_path / "g.tsv", rows), "g.tsv, line 8: column 'visits' holds no integer")
    rows[7] = [SECRET] * 4
    refused(write(tmp_path / "h.tsv", rows), "line 8: 4 fields, expected 9")
    (tmp_path / "i.parquet").write_bytes(b"PAR1 and then nothing")
    refused(tmp_path / "i.parquet", "truncated or damaged")
    (tmp_path / "j.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    refused(tmp_path / "j.parquet.gz", "decompress it first")
    refused(tmp_path / "none.tsv", "no such file")


def test_a_store_without_its_values_cannot_encode(store):
    (store.path / TOKENS).write_bytes(b"PAR1")
    with pytest.raises(InputError, match="damaged"):
        Encoding.of(store)
    (store.path / TOKENS).unlink()
    with pytest.raises(InputError, match="cannot be encoded"):
        Encoding.of(store)


def test_a_copy_of_description_and_values_is_enough(store, tmp_path):
    log = write(tmp_path / "new.tsv", ads(50, seed=2))
    copy = (store.path / TOKENS).rename(tmp_path / "values.parquet")
    found = [block.split["public"] for block in Encoding.read(store.description, copy).blocks([log])]
    assert len(np.concatenate(found)) > 0
