"""The recipes that ship on logs in their exact raw form."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from support import made, refusal, vocabulary, write

from adumbra import describe, schema
from adumbra.data.prepare import prepare

SHARED = Path(__file__).resolve().parents[3] / "shared/data"
"""Real logs, where the machine has them."""
DAY = 86_400


def word(r, many):
    return f"{r.randrange(many):032X}"


def search_rows(rows, seed=0):
    """The 23 tab-separated columns of CriteoSearchData, where -1 is missing."""
    r = random.Random(seed)
    out = []
    for number in range(rows):
        sale = r.random() < 0.1
        values = [
            str(int(sale)),
            f"{r.uniform(5, 90):.2f}" if sale else "-1",
            str(r.randrange(10**6)) if sale else "-1",
        ]
        values += [str(1_596_439_471 + 1800 * number), str(r.choice([-1, 0, 1, 7, 300])), f"{r.uniform(0, 99):.2f}"]
        values += [word(r, 5) if r.random() < 0.8 else "-1" for _ in range(13)]
        values += [word(r, 400), " ".join(word(r, 9) for _ in range(r.randrange(1, 6))), word(r, 20), word(r, rows)]
        out.append(values)
    return out


def test_criteo_search(tmp_path):
    rows = search_rows(300)
    assert {len(row) for row in rows} == {23}
    store = made(schema.load("criteo-search"), write(tmp_path / "CriteoSearchData.tsv", rows), tmp_path / "store")
    said = describe.store(store)
    assert sum(said["splits"].values()) == 300
    assert 0.7 < said["splits"]["train"] / 300 < 0.9
    towers = said["towers"]
    assert towers["sensitive"] == {"columns": ["device_type", "audience_id", "user_id"], "table_rows": 50_001}
    assert len(towers["public"]["columns"]) == 17
    assert towers["public"]["table_rows"] == 100_001
    held = [store.split(name) for name in ("train", "test")]
    assert sum(int(split["label"].sum()) for split in held) == sum(row[0] == "1" for row in rows)
    assert [split["public"].shape[1] for split in held] == [17, 17]
    assert said["ledger"]["charges"] == []


def attribution_rows():
    """A case for each way in which a click may or may not have the label, a hundred thousand seconds into the log; and
    what its label is."""
    cases = []
    for attribution, pos, late, click in itertools.product(
        "01", ("0", "1", "2", "-1"), (1, 30 * DAY, 30 * DAY + 1), "01"
    ):
        stamp = 100_000 + len(cases)
        row = [str(stamp), f"u{len(cases) % 9}", "73325", "1", str(stamp + late), "7", attribution, click, pos, "3"]
        row += ["0.0001", "0.38", "423", *(str(100 + c) for c in range(9))]
        cases.append((row, int(attribution == "1" and pos == "2" and late <= 30 * DAY)))
    nothing = ["5", "u1", "5", "0", "-1", "-1", "0", "1", "-1", "-1", "0.00001", "0.3", "-1", *"123456789"]
    return [*cases, (nothing, 0)]


def test_criteo_attribution(tmp_path):
    cases = attribution_rows()
    assert {len(row) for row, _ in cases} == {22}
    names = [column.name for column in schema.load("criteo-attribution").columns]
    path = write(tmp_path / "criteo_attribution_dataset.tsv", [row for row, _ in cases], header=names)
    warnings = []
    store = prepare(schema.load("criteo-attribution"), [path], tmp_path / "store", warn=warnings)
    clicks = {int(row[0]): label for row, label in cases if row[7] == "1"}
    found = {}
    for name in store.splits:
        split = store.split(name)
        found |= dict(zip(split["time"].tolist(), split["label"].tolist(), strict=True))
    assert found == clicks
    assert sum(found.values()) == 2
    assert warnings == [
        f"a complete criteo-attribution log gives 5,947,563 rows (6.74 % positive); this one gives {len(clicks)}"
    ]
    said = describe.store(store)
    assert said["towers"]["public"]["columns"] == ["campaign", "cost", *(f"cat{n}" for n in range(1, 10))]
    keys = [column["name"] for column in said["columns"] if column["encoding"] == "key"]
    assert keys == ["timestamp", "uid"]
    costs = np.concatenate([store.split(name)["numbers_public"].ravel() for name in store.splits])
    assert sorted(set(costs.tolist())) == pytest.approx(np.log([2e-5, 1.1e-4]), rel=1e-5)


def test_criteo_attribution_without_its_header(tmp_path):
    path = write(tmp_path / "log.tsv", [row for row, _ in attribution_rows()])
    assert "declares a header" in refusal(schema.load("criteo-attribution"), path, tmp_path / "store")


@pytest.mark.skipif(not (SHARED / "census-income-kdd").exists(), reason="the census is not on this machine")
def test_census_income(tmp_path):
    store = made(schema.load("census-income"), str(SHARED / "census-income-kdd"), tmp_path / "store")
    said = describe.store(store)
    assert said["splits"] == {"train": 199_523, "test": 99_762}
    assert [len(said["towers"][tower]["columns"]) for tower in schema.TOWERS] == [20, 20]
    assert int(store.split("train")["label"].sum()) == 12_382
    assert int(store.split("test")["label"].sum()) == 6_186
    assert "instance_weight" not in {column["name"] for column in said["columns"]}
    assert set(vocabulary(store.path)["member_of_a_labor_union"]) == {"Not in universe", "No", "Yes"}
    assert said["ledger"]["charges"] == []


@pytest.mark.skipif(not (SHARED / "criteo-display-8k").exists(), reason="the Criteo rows are not on this machine")
@pytest.mark.parametrize("name", ["criteo-display", "criteo-display-dnn", "criteo-display-labels"])
def test_criteo_display(tmp_path, name):
    folder = SHARED / "criteo-display-8k"
    files = [str(folder / f"{part}.tsv") for part in ("train", "dev", "test")]
    store = made(schema.load(name), files, tmp_path / "store")
    said = describe.store(store)
    assert said["splits"] == {"train": 6400, "validation": 800, "test": 800}
    sizes = [len(said["towers"][tower]["columns"]) for tower in schema.TOWERS]
    assert sizes == {"criteo-display": [20, 19], "criteo-display-dnn": [0, 39], "criteo-display-labels": [39, 0]}[name]
    charges = said["ledger"]["charges"]
    assert len(charges) == (name != "criteo-display-labels")
    assert all(0.45 < charge["epsilon"] <= 0.5 for charge in charges)
    first = [line.split("\t") for line in Path(files[0]).read_text().splitlines()[:6400]]
    assert store.split("train")["label"].tolist() == [int(row[0]) for row in first]
    if name == "criteo-display":
        counts = vocabulary(store.path)["categorical-feature-15"]
        values = [row[15] for row in first]
        assert {v: c for v, (_, c) in counts.items()} == {
            v: values.count(v) for v in set(values) if values.count(v) > 15
        }
