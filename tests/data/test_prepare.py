"""`prepare` against an encoder that does the same row by row, in plain Python."""

import itertools
import math
import random
from collections import Counter
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import NAMES, VOCABULARY, ads, column, contents, ids, made, raw, recipe, refusal, vocabulary, write
from test_fields import hashed

from adumbra.data import fields, source
from adumbra.data import prepare as module
from adumbra.errors import InputError
from adumbra.schema import LOG2_TOKENS

pytestmark = pytest.mark.filterwarnings("error")

EVERYTHING = {
    "columns": [
        {"name": "sale", "role": "label", "type": "integer"},
        {"name": "amount", "role": "label", "type": "real"},
        {"name": "site", "role": "public", "type": "category"},
        {"name": "visits", "role": "public", "type": "integer"},
        {"name": "age", "role": "public", "type": "integer", "as": ["bucket", "log2"], "edges": [0, 18, 40]},
        {"name": "tags", "role": "public", "type": "list", "length": 3, "separator": ";"},
        {"name": "cost", "role": "public", "type": "real", "as": ["log", "number"], "bounds": "counted"},
        {"name": "kind", "role": "public", "type": "category", "values": ["new", "old", "none"]},
        {"name": "interest", "role": "sensitive", "type": "category"},
        {"name": "recency", "role": "sensitive", "type": "real", "as": "number", "bounds": {"low": -2, "high": 8}},
        {"name": "user", "role": "user", "type": "category"},
        {"name": "time", "role": "time", "type": "timestamp", "feature": "public"},
        {"name": "weight", "role": "public", "type": "real", "as": "drop"},
    ],
    "label": {"rule": "sale * (amount > 2)", "default": 1},
    "filter": "visits < 9 and site != 'dropped.com'",
    "source": {"format": "tsv", "missing": ["-1", "?"]},
    "public": {"kind": "vocabulary", "threshold": 3},
}
RULES = {
    "row": {"kind": "chronological", "train": 0.7, "validation": 0.1, "test": 0.2},
    "time": {"kind": "chronological", "by": "time", "train": 0.5, "validation": 0.2, "test": 0.3},
    "random": {"kind": "random", "train": 0.6, "validation": 0.1, "test": 0.3},
    "user": {"kind": "random", "by": "user", "train": 0.5, "test": 0.5},
}


def log(rows, seed):
    r = random.Random(seed)

    def often(value, share=0.1, missing=("", "-1", "?")):
        return r.choice(missing) if r.random() < share else value

    def row(number):
        stamp = 1_600_000_000 + 4000 * r.randrange(number // 5 + 1)
        return [
            often(r.choice("01"), missing=("", "-1", "yes", "2")),
            often(f"{r.uniform(0, 6):.2f}", missing=("", "much", "nan")),
            often(r.choice(["a.com", "b.com", "ü.de", "dropped.com", f"tail{r.randrange(90)}"])),
            often(str(min(r.randrange(12), r.randrange(12)))),
            often(str(r.choice([-40, -2, 0, 1, 2, 17, 18, 39, 40, 41, 1000, 2**50]))),
            often(
                ";".join(
                    r.choice(["x", "y", "z", "x", "rare" + str(r.randrange(60)), "", "?"])
                    for _ in range(r.randrange(1, 6))
                )
            ),
            often(f"{r.choice([0, 1, 2.5, 1e-3, 7e4]) * r.random():.5g}"),
            often(r.choice(["new", "old", "other"])),
            often(r.choice(["sport", "cars", "a secret that is longer than sixteen bytes"])),
            often(str(r.uniform(-5, 12)), missing=("", "?", "never", "1e999")),
            often(f"u{r.randrange(40)}"),
            str(stamp) if r.random() < 0.9 else datetime.fromtimestamp(stamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            often("1.5"),
        ]

    return [row(number) for number in range(rows)]


class Reference:
    """Everything `prepare` promises about one log, from the recipe's raw TOML and rows of text."""

    def __init__(self, raw, rows):
        self.raw, self.key = raw, raw["hash_key"]
        self.names = [entry["name"] for entry in raw["columns"]]
        self.gaps = {"", *raw["source"]["missing"]}
        self.rows = [dict(zip(self.names, row, strict=True)) for row in rows]
        self.rows = [row for row in self.rows if self.visits(row) < 9 and row["site"] != "dropped.com"]
        self.split = self.splits(raw["split"])

    def number(self, text):
        try:
            value = math.nan if text in self.gaps else float(text)
        except ValueError:
            return math.nan
        return value if math.isfinite(value) else math.nan

    def visits(self, row):
        return self.number(row["visits"])

    def seconds(self, row):
        text = row["time"]
        return int(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()) if "T" in text else int(text)

    def label(self, row):
        sale, amount = self.number(row["sale"]), self.number(row["amount"])
        value = sale * (amount > 2)
        return value if value in (0, 1) else 1

    def user(self, row):
        seed = int(fields.seed(self.key, "user"))
        return 1 if row["user"] in self.gaps else hashed(row["user"], seed)

    def splits(self, rule):
        shares = [rule["train"], rule["train"] + rule.get("validation", 0)]
        count = len(self.rows)
        if rule["kind"] == "random":
            units = [self.user(row) for row in self.rows] if rule.get("by") == "user" else range(count)
            seed = int(fields.seed(self.key, "split"))
            drawn = [(hashed_word(unit, seed) >> 11) / 2**53 for unit in units]
            return [sum(value >= share for share in shares) for value in drawn]
        cuts = [math.floor(share * count + 1e-6) for share in shares]
        if rule.get("by") == "time":
            order = [self.seconds(row) for row in self.rows]
            ranked = [*sorted(order), math.inf]
            cuts = [ranked[cut] for cut in cuts]
        else:
            order = range(count)
        return [sum(value >= cut for cut in cuts) for value in order]

    def tokens(self, feature, row):
        """The values of one feature: '' is missing."""
        name, _, derived = feature.partition(".")
        text = row[name]
        if name == "tags":
            return [
                value if value not in self.gaps else "" for value in ([""] if text in self.gaps else text.split(";"))
            ][:3]
        if derived == "bucket":
            value = self.number(text)
            return ["" if math.isnan(value) else str(sum(value >= edge for edge in (0, 18, 40)))]
        if derived == "log2":
            value = self.number(text)
            if math.isnan(value) or value <= 0:
                return ["" if math.isnan(value) else "zero" if value == 0 else "negative"]
            return [str(int(math.log2(value)))]
        if derived == "hour":
            return [str(datetime.fromtimestamp(self.seconds(row), UTC).hour)]
        if derived == "weekday":
            return [str(datetime.fromtimestamp(self.seconds(row), UTC).weekday())]
        return ["" if text in self.gaps or (name == "visits" and math.isnan(self.number(text))) else text]

    def counts(self, feature):
        counts = Counter()
        for row, split in zip(self.rows, self.split, strict=True):
            if split == 0:
                counts.update(set(self.tokens(feature, row)))
        return counts


def hashed_word(word, seed):
    return hashed_bytes(word.to_bytes(8, "little"), seed)


def hashed_bytes(data, state):
    mask = 2**64 - 1
    state = (state ^ int.from_bytes(data, "little")) * 0x9E3779B97F4A7C15 & mask
    state = (state ^ state >> 32) * 0xBF58476D1CE4E5B9 & mask
    return state ^ state >> 29


CLOSED = {
    "age.bucket": tuple("0123"),
    "age.log2": LOG2_TOKENS,
    "time.hour": tuple(map(str, range(24))),
    "time.weekday": tuple("0123456"),
    "kind": ("new", "old", "none"),
}
TOKENS = ("site", "visits", "age.bucket", "age.log2", "tags", "kind", "time.hour", "time.weekday")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(source, "BLOCK", 3000)
    monkeypatch.setattr(source, "PARQUET_ROWS", 50)


def split_rows(reference, split):
    return [
        row for row, code in zip(reference.rows, reference.split, strict=True) if code == module.SPLITS.index(split)
    ]


@pytest.mark.parametrize("table", ["tower", "column"])
@pytest.mark.parametrize(("rule", "seed"), list(zip(RULES, itertools.count(), strict=False)))
def test_vocabularies_are_those_of_the_reference(tmp_path, table, rule, seed):
    text = raw(**EVERYTHING, split=RULES[rule])
    text["public"]["table"] = table
    rows = log(500, seed)
    reference = Reference(text, rows)
    store = made(recipe(text), write(tmp_path / "log", rows), tmp_path / "store", threads=3)
    check_rows(reference, store)
    known = vocabulary(tmp_path / "store")
    taken = {0}
    for feature in TOKENS:
        counts = reference.counts(feature)
        about, values = column(store, feature), known.get(feature, {})
        if feature in CLOSED:
            assert list(values) == list(CLOSED[feature])
        else:
            assert {v: c for v, (_, c) in values.items()} == {v: c for v, c in counts.items() if v and c >= 3}
            assert [c for _, c in values.values()] == sorted((c for _, c in values.values()), reverse=True)
        table_rows = [row for row, _ in values.values()]
        assert table_rows == list(range(table_rows[0], table_rows[0] + len(values)))
        missing = table_rows[0] - 1
        unknown = 1 if table == "tower" else missing - 1
        if (table == "column" and feature not in CLOSED) or (feature == "kind" and table == "column"):
            assert about["offset"] == unknown
            assert about["rows"] == len(values) + 2
        else:
            assert (about["offset"], about["rows"]) == (missing, len(values) + 1)
        own = {missing, *table_rows} | ({unknown} if about["offset"] == unknown else set())
        assert not own & taken
        taken |= own
        for split in store.splits:
            expected = []
            for row in split_rows(reference, split):
                found = [
                    missing if v == "" else values[v][0] if v in values else unknown
                    for v in reference.tokens(feature, row)
                ]
                expected.append(found + [0] * (about["length"] - len(found)))
            assert ids(store, feature, split).tolist() == expected
    assert store.description["table_rows"]["public"] == max(taken) + 1
    assert taken | {1} == set(range(max(taken) + 1))


def check_rows(reference, store):
    """Splits, labels, keys and numbers."""
    assert sum(store.splits.values()) == len(reference.rows)
    costs = [
        float(np.float32(reference.number(row["cost"])))
        for row in split_rows(reference, "train")
        if row["cost"] not in reference.gaps
    ]
    low, high = min(costs), max(costs)
    assert store.description["public_list_values_cut"] == sum(
        max(0, len(row["tags"].split(";")) - 3) for row in reference.rows if row["tags"] not in reference.gaps
    )
    for split in store.splits:
        rows, held = split_rows(reference, split), store.split(split)
        assert held["label"].tolist() == [reference.label(row) for row in rows]
        assert held["user"].view(np.uint64).tolist() == [reference.user(row) for row in rows]
        assert held["time"].tolist() == [reference.seconds(row) for row in rows]
        numbers = held["numbers_public"]
        for row, (logarithm, scaled) in zip(rows, numbers.tolist(), strict=True):
            cost = reference.number(row["cost"])
            known = math.log(max(cost, 0) + 1) if not math.isnan(cost) else 0.0
            assert scaled == pytest.approx(
                0 if math.isnan(cost) else 2 * (min(max(cost, low), high) - low) / (high - low) - 1, abs=1e-5
            )
            bounds = next(entry["bounds"] for entry in store.description["numbers"] if entry["name"] == "cost.log")
            if not math.isnan(cost):
                assert logarithm == pytest.approx(
                    2 * (min(max(known, bounds[0]), bounds[1]) - bounds[0]) / (bounds[1] - bounds[0]) - 1, abs=1e-5
                )
        for row, (recency,) in zip(rows, held["numbers_sensitive"].tolist(), strict=True):
            value = reference.number(row["recency"])
            assert recency == pytest.approx(
                0 if math.isnan(value) else 2 * (min(max(value, -2), 8) + 2) / 10 - 1, abs=1e-6
            )


@pytest.mark.parametrize("table", ["tower", "column"])
def test_hashing_is_that_of_the_reference(tmp_path, table):
    text = raw(**EVERYTHING | {"public": {"kind": "hash", "bins": 50, "table": table}}, split=RULES["random"])
    rows = log(300, 9)
    reference = Reference(text, rows)
    store = made(recipe(text), write(tmp_path / "log", rows), tmp_path / "store")
    towers = {"public": TOKENS, "sensitive": ("interest",)}
    for tower, features in towers.items():
        bins = 50 if tower == "public" else 64
        for place, feature in enumerate(features):
            about, seed = column(store, feature), int(fields.seed("test", feature))
            assert about["offset"] == 1 + (place * bins if table == "column" else 0)
            for split in store.splits:
                expected = []
                for row in split_rows(reference, split):
                    found = [hashed(v or "\0missing", seed) for v in reference.tokens(feature, row)]
                    found = [about["offset"] + ((h >> 32) * bins >> 32) for h in found]
                    expected.append(found + [0] * (about["length"] - len(found)))
                assert ids(store, feature, split).tolist() == expected
        several = len(features) if table == "column" and tower == "public" else 1
        assert store.description["table_rows"][tower] == 1 + bins * several


def test_only_training_rows_are_counted(tmp_path):
    rows = ads(100)
    for number, row in enumerate(rows):
        row[1] = "late.com" if number >= 80 else row[1]
    store = made(recipe(), write(tmp_path / "log", rows), tmp_path / "store")
    assert "late.com" not in vocabulary(tmp_path / "store")["site"]
    assert set(ids(store, "site", "test").ravel()) == {1}


def test_a_user_trains_or_tests_but_not_both(tmp_path):
    store = made(recipe(split={"kind": "random", "by": "user"}), write(tmp_path / "log", ads(600)), tmp_path / "store")
    train, test = (set(store.split(name)["user"].tolist()) for name in ("train", "test"))
    assert train
    assert test
    assert not train & test


def test_rows_of_one_time_stay_together(tmp_path):
    rows = ads(200)
    random.Random(1).shuffle(rows)
    store = made(recipe(split={"by": "time"}), write(tmp_path / "log", rows), tmp_path / "store")
    train, test = (store.split(name)["time"] for name in ("train", "test"))
    assert train.max() < test.min()
    assert 157 <= len(train) <= 160


def test_files_are_split_by_their_names_and_validation_is_cut_from_training(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    write(folder / "train-1.tsv", ads(300, 1))
    write(folder / "train-2.tsv", ads(300, 2))
    write(folder / "test.tsv", ads(100, 3))
    rule = {"kind": "files", "train": "train*", "test": "test*", "validation": 0.25}
    store = made(recipe(split=rule), str(folder), tmp_path / "store")
    assert store.splits["test"] == 100
    assert store.splits["train"] + store.splits["validation"] == 600
    assert 110 < store.splits["validation"] < 190
    write(folder / "other.tsv", ads(10))
    assert "other.tsv: matches neither" in refusal(recipe(split=rule), str(folder), tmp_path / "again")


def test_threads_and_blocks_do_not_show(tmp_path, monkeypatch):
    path = write(tmp_path / "log", ads(400))
    expected = contents(made(recipe(), path, tmp_path / "first").path)
    for number, (block, threads) in enumerate(((500, 1), (1200, 4), (1 << 20, 2))):
        monkeypatch.setattr(source, "BLOCK", block)
        assert contents(made(recipe(), path, tmp_path / str(number), threads=threads).path) == expected


@pytest.mark.parametrize("value", ["1e300", "-1e300", "3e38", "-9223372036854775809", "1e-300", "0"])
@pytest.mark.parametrize("bounds", ["counted", {"low": -1e300, "high": 1e300}, {"low": 0, "high": 1e-300}, None])
def test_extreme_numbers_stay_finite(tmp_path, value, bounds):
    rows = ads(40)
    rows[3][3] = value
    rows[5][5] = "-999999999999999999"
    shape = {"as": "number"} | ({"bounds": bounds} if bounds else {})
    log = recipe(column={"price": shape, "recency": shape | {"type": "real"}}, counts=VOCABULARY["counts"])
    store = made(log, write(tmp_path / "log", rows), tmp_path / "store")
    for name in ("numbers_public", "numbers_sensitive"):
        array = store.split("train")[name]
        assert np.isfinite(array).all()
        assert bounds is None or np.abs(array).max() <= 1


PROTECTED = [0, 4, 5, 6]
CELLS = st.one_of(
    st.sampled_from(
        ["", "1", "2", "nan", "1e999", "-1", "99999999999999999999", "x|y", "|", "||||||", '"', "'", "0x10"]
    ),
    st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\t\n\0"), max_size=12),
)
CHANGES = st.lists(st.tuples(st.integers(0, 49), st.sampled_from(PROTECTED), CELLS), min_size=1, max_size=30)


def rows_and_public_arrays(log, rows, folder, **options):
    store = made(log, write(folder / "log", rows), folder / "store", **options)
    names = ("public", "numbers_public", "user", "time")
    files = {f"{s}/{n}": (store.path / s / f"{n}.npy").read_bytes() for s in store.splits for n in names}
    known = {f: v for f, v in vocabulary(store.path).items() if column(store, f)["tower"] == "public"}
    about = store.description
    return (
        files,
        known,
        store.splits,
        about["table_rows"]["public"],
        about["public_list_values_cut"],
        about["bad_rows_skipped"],
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("private", [False, True])
def test_no_protected_value_decides_about_rows_or_public_columns(rule, private, tmp_path_factory):
    """privacy.md, rule 2: whatever stands in protected cells, the same rows exist and nothing public changes."""
    log = recipe(split=RULES[rule], filter="visits < 30 or site == 'a.com'", **(VOCABULARY if private else {}))
    rows = ads(50, 4)
    before = rows_and_public_arrays(log, rows, tmp_path_factory.mktemp("before"), skip=True, most=1)

    @settings(max_examples=8 if private else 25)
    @given(CHANGES)
    def unmoved(changes):
        changed = [list(row) for row in rows]
        for number, place, value in changes:
            changed[number][place] = value
        after = rows_and_public_arrays(log, changed, tmp_path_factory.mktemp("after"), skip=True, most=1)
        assert after == before

    unmoved()


def test_malformed_values_of_public_columns_are_bad_rows(tmp_path):
    rows = ads(60)
    rows[40][2] = "many"
    path = write(tmp_path / "log", rows)
    assert "line 41: column 'visits' holds no integer" in refusal(recipe(), path, tmp_path / "store")
    store = made(recipe(), path, tmp_path / "store", skip=True, most=0.1)
    assert sum(store.splits.values()) == 59
    assert store.description["bad_rows_skipped"] == 1
    assert "1 of 60 rows are bad" in refusal(recipe(), path, tmp_path / "other", skip=True, most=0.01)


def test_a_log_without_training_rows(tmp_path):
    path = write(tmp_path / "log", ads(20))
    assert "no row trains" in refusal(recipe(filter="visits > 1000"), path, tmp_path / "store")


def test_resuming_a_finished_store_of_another_recipe(tmp_path):
    path = write(tmp_path / "log", ads(20))
    made(recipe(), path, tmp_path / "store")
    assert made(recipe(), path, tmp_path / "store", resume=True).splits == {"train": 16, "test": 4}
    with pytest.raises(InputError, match="another recipe"):
        made(recipe(public={"threshold": 5}), path, tmp_path / "store", resume=True)


def test_files_are_private(tmp_path):
    made(recipe(**VOCABULARY), write(tmp_path / "log", ads(50)), tmp_path / "deep/er/store")
    for file in (tmp_path / "deep").rglob("*"):
        assert file.stat().st_mode & 0o777 == (0o700 if file.is_dir() else 0o600), file


def test_every_column_of_the_log_was_declared():
    assert NAMES == ["clicked", "site", "visits", "price", "interest", "recency", "segments", "user", "time"]
