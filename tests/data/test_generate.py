"""Generated logs: the same bytes everywhere, the raw forms of the real logs, and the truth they promise."""

import hashlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import polars as pl
import pytest

from adumbra import schema
from adumbra.data.generate import CHUNK, columns, generate, recipe
from adumbra.data.prepare import prepare
from adumbra.errors import InputError, WorkError

SMALL = CHUNK + 5_000  # two chunks
DIGESTS = {
    "ctr": "f9d17f921bee0212c4713d2d5bf02f9817c33e7ab1a4a3ad1b1151390fc0aff2",
    "cvr": "21871680514b77bcc1a1c52a36b3a39367461ef0bd2689a79ca7582c9be40b9f",
    "attribution": "ca06b58f94ddbfced6ee3806dd35f81eff6a45e8d83f6b554890625a938523f4",
    "convs": "dd8c8ee30d73fae14136c438208dee1fdca9ac354e2bdcbc31102f612b61a57e",
}


def digest(folder):
    """Of every byte of the log, of its truth and of what is said about it."""
    names = ("log.tsv", "truth.npy", "generated.json")
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()


def read(folder, preset, **knobs):
    """The log as text, a missing value as the empty string, and its truth."""
    names = [column.name for column in columns(preset, **knobs)]
    header = preset in ("attribution", "convs")
    log = pl.read_csv(folder / "log.tsv", separator="\t", has_header=header, infer_schema=False)
    if header:
        assert log.columns == names
    log.columns = names
    return log.fill_null(""), np.load(folder / "truth.npy")


def auc(score, positive):
    rank = np.empty(len(score))
    rank[np.argsort(score, kind="stable")] = np.arange(len(score))
    ones = positive.sum()
    return (rank[positive].sum() - ones * (ones - 1) / 2) / (ones * (len(score) - ones))


def check_calibrated(truth, label):
    """Mean truth is mean label, over all rows and in each tenth by truth, within five standard errors."""
    for part in [np.arange(len(truth)), *np.array_split(np.argsort(truth, kind="stable"), 10)]:
        error = np.sqrt(max(label[part].var(), truth[part].mean() * 0.5) / len(part))
        assert abs(label[part].mean() - truth[part].mean()) < 5 * error


@pytest.fixture(scope="module")
def ctr(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ctr") / "log"
    about = generate("ctr", 200_000, folder)
    return about, *read(folder, "ctr")


@pytest.fixture(scope="module")
def journeys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attribution") / "log"
    about = generate("attribution", 200_000, folder)
    log, truth = read(folder, "attribution")
    numbers = [c.name for c in columns("attribution") if c.name not in ("segments", "cost", "cpo")]
    return about, log.with_columns(pl.col(numbers).cast(pl.Int64)), truth


@pytest.mark.parametrize("preset", DIGESTS)
def test_same_bytes_as_ever_with_any_number_of_threads(tmp_path, preset):
    for threads in (1, 2):
        generate(preset, SMALL, tmp_path / str(threads), seed=7, threads=threads)
        assert digest(tmp_path / str(threads)) == DIGESTS[preset]


def test_same_bytes_on_a_lesser_processor(tmp_path):
    found = np._core._multiarray_umath.__cpu_features__  # pyright: ignore
    dispatched = np._core._multiarray_umath.__cpu_dispatch__  # pyright: ignore
    off = " ".join(name for name in dispatched if found[name])
    if not off:
        pytest.skip("numpy has nothing to turn off here")
    code = (
        "import sys; from pathlib import Path; from adumbra.data.generate import generate\n"
        f"for preset in {list(DIGESTS)}: generate(preset, {SMALL}, Path(sys.argv[1]) / preset, seed=7)"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, env=os.environ | {"NPY_DISABLE_CPU_FEATURES": off}
    )
    assert {preset: digest(tmp_path / preset) for preset in DIGESTS} == DIGESTS


def test_ctr_keeps_its_promises(ctr):
    about, log, truth = ctr
    label = log["label"].cast(int).to_numpy()
    assert about["label_rate"] == pytest.approx(label.mean(), abs=1e-6)
    assert abs(label.mean() - 0.25) < 0.005
    assert 0.805 < about["bayes_auc"] < 0.815
    assert about["bayes_auc"] == pytest.approx(auc(truth, label > 0), abs=1e-4)
    check_calibrated(truth, label)


def test_ctr_has_the_form_of_the_display_log(ctr):
    _, log, _ = ctr
    roles = [column.role for column in columns("ctr")]
    assert roles == ["label"] + ["public", "sensitive"] * 19 + ["public"]
    assert log.columns == ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    for name in log.columns[1:14]:
        whole = r"^(-[123]|\d+)?$" if name == "I2" else r"^\d*$"
        assert log[name].str.contains(whole).all()
    for name in log.columns[14:]:
        assert log[name].str.contains("^([0-9a-f]{8})?$").all()
    assert {"-1", "-2", "-3"} < set(log["I2"].unique())
    missing = {name: (log[name] == "").mean() for name in ("I1", "I2", "I12", "C1", "C3", "C22", "C26")}
    expected = {"I1": 0.451, "I2": 0.0, "I12": 0.774, "C1": 0.0, "C3": 0.033, "C22": 0.819, "C26": 0.453}
    assert missing == pytest.approx(expected, abs=0.01)


def test_sensitive_features_add_to_what_the_public_ones_tell(ctr):
    """One pass of a hashed logistic regression: the public columns alone reach .70, all of them .75."""
    _, log, _ = ctr
    label = log["label"].cast(int).to_numpy()
    train, rng = 160_000, np.random.default_rng(0)

    def reached(roles):
        ids = []
        for column in columns("ctr"):
            if column.role in roles:
                text = log[column.name]
                if column.type == "integer":
                    value = text.cast(float, strict=False).fill_null(-9).to_numpy()
                    text = pl.Series(np.where(value <= 2, value, 10 + np.floor(4 * np.log(np.maximum(value, 1)))))
                ids.append((text.hash(len(ids)) % (1 << 18)).to_numpy())
        ids = np.stack(ids, axis=1).astype(np.int64)
        weight, squares = np.zeros(1 << 18), np.ones(1 << 18)
        for rows in np.array_split(rng.permutation(train), train // 500):
            error = 1 / (1 + np.exp(1.1 - weight[ids[rows]].sum(1))) - label[rows]
            used, where = np.unique(ids[rows], return_inverse=True)
            gradient = np.bincount(where.ravel(), np.repeat(error, ids.shape[1]))
            squares[used] += gradient**2
            weight[used] -= 0.1 * gradient / np.sqrt(squares[used])
        return auc(weight[ids[train:]].sum(1), label[train:] > 0)

    public, both = reached({"public"}), reached({"public", "sensitive"})
    assert public > 0.70
    assert both > max(0.75, public + 0.03)


def test_cvr_has_the_form_of_the_search_log(tmp_path):
    about = generate("cvr", 100_000, tmp_path / "log")
    log, truth = read(tmp_path / "log", "cvr")
    sale = log["Sale"].cast(int).to_numpy()
    assert abs(sale.mean() - 0.108) < 0.004
    assert abs(about["bayes_auc"] - 0.79) < 0.01
    check_calibrated(truth, sale)
    assert [c.name for c in columns("cvr") if c.role == "sensitive"] == ["device_type", "audience_id", "user_id"]
    assert log.width == 23
    word = "[0-9A-F]{32}"
    for column in columns("cvr"):
        if column.type == "category":
            form = f"{word}( {word})*" if column.name == "product_title" else word
            assert log[column.name].str.contains(f"^(-1|{form})$").all(), column.name
    for name in ("SalesAmountInEuro", "time_delay_for_conversion"):
        assert ((log[name] == "-1").to_numpy() == (sale == 0)).all()
    assert log["SalesAmountInEuro"].str.contains(r"^(-1|\d+\.\d\d)$").all()
    assert log["click_timestamp"].cast(int).is_sorted()


def test_attribution_labels(journeys):
    about, log, truth = journeys
    clicks = (log["click"] == 1).to_numpy()
    in_time = log["conversion_timestamp"] - log["timestamp"] <= 30 * 86_400
    last = (log["click_pos"] == log["click_nb"] - 1) & (log["click"] == 1)
    label = ((log["attribution"] == 1) & last & in_time).to_numpy()
    assert about["labelled_rows"] == clicks.sum()
    assert not truth[~clicks].any()
    assert abs(label[clicks].mean() - 0.067) < 0.005
    assert abs(about["bayes_auc"] - auc(truth[clicks], label[clicks])) < 1e-4
    check_calibrated(truth[clicks], label[clicks])
    for part in (log["attribution"] == 1, last & (log["conversion"] == 1), in_time):  # no part of the rule is idle
        assert (part.to_numpy() & clicks & ~label).sum() > 100


def test_attribution_tells_one_story_a_journey(journeys):
    _, log, _ = journeys
    assert log["timestamp"].is_sorted()
    assert log.filter(pl.col("click") == 1)["uid"].value_counts()["count"].quantile(0.9) >= 3
    clicks = log.filter((pl.col("conversion") == 1) & (pl.col("click") == 1))
    stories = clicks.group_by("conversion_id", maintain_order=True).agg(
        pl.col("uid", "campaign", "conversion_timestamp", "click_nb", "attribution").n_unique().name.suffix("_n"),
        (pl.col("click_nb").first() == pl.len()).alias("complete"),
        (pl.col("click_pos") == pl.int_range(pl.len())).all().alias("in order"),
    )
    assert stories["complete"].all()
    assert stories["in order"].all()
    assert (stories.select(pl.selectors.ends_with("_n")).max_horizontal() == 1).all()
    assert (clicks["conversion_timestamp"] >= clicks["timestamp"]).all()
    rest = log.filter(pl.col("conversion") == 0)
    assert (rest.select("conversion_timestamp", "conversion_id", "click_pos", "click_nb").max_horizontal() == -1).all()
    campaigns = log.group_by("campaign").agg(pl.col("advertiser").n_unique())
    assert campaigns["advertiser"].max() == 1
    lists = log["segments"].str.split("|").list
    assert lists.len().max() == 12
    assert (lists.n_unique() == lists.len()).all()
    assert log["segments"].str.contains(r"^(\d+(\|\d+)*)?$").all()


def test_attribution_as_criteo_wrote_it(tmp_path):
    generate("attribution", 1000, tmp_path / "log", criteo=True)
    log, _ = read(tmp_path / "log", "attribution", criteo=True)
    names = "timestamp uid campaign conversion conversion_timestamp conversion_id attribution click click_pos click_nb"
    names += " cost cpo time_since_last_click cat1 cat2 cat3 cat4 cat5 cat6 cat7 cat8 cat9"
    assert log.columns == names.split()


def test_convs_are_counts_with_the_planted_mean(tmp_path):
    generate("convs", 100_000, tmp_path / "log")
    log, truth = read(tmp_path / "log", "convs")
    count = log["conversions"].cast(int).to_numpy()
    check_calibrated(truth, count)
    assert abs(count.mean() - 0.15) < 0.01
    assert count.max() >= 4
    assert count.var() > 1.1 * count.mean()
    assert ((log["value"].cast(float) > 0).to_numpy() == (count > 0)).mean() > 0.999


@pytest.mark.parametrize(
    ("knobs", "rate", "bayes"),
    [
        ({"positive_rate": 0.02}, 0.02, 0.81),
        ({"bayes_auc": 0.7}, 0.25, 0.70),
        ({"sensitive_share": 0.0, "drift": 0.0, "missing": 0.0}, 0.25, 0.81),
        ({"cardinality": 0.001, "missing": 20.0, "drift": 5.0}, 0.25, 0.81),
    ],
)
def test_knobs_move_what_they_name(tmp_path, knobs, rate, bayes):
    about = generate("ctr", 60_000, tmp_path / "log", **knobs)
    assert about["label_rate"] == pytest.approx(rate, abs=0.008)
    assert about["bayes_auc"] == pytest.approx(bayes, abs=0.012)
    assert json.loads((tmp_path / "log" / "generated.json").read_text()) == about


def test_nothing_half_written_is_left(tmp_path):
    def fail(_):
        raise OSError(28, "No space left on device")

    with pytest.raises(WorkError, match="No space left"):
        generate("ctr", 10, tmp_path / "log", progress=fail)
    assert not any(tmp_path.iterdir())
    (tmp_path / "log").mkdir()
    seen = []
    generate("ctr", SMALL, tmp_path / "log", progress=seen.append)
    assert seen == [CHUNK, SMALL]
    assert (tmp_path / "log" / "recipe.toml").read_text() == recipe("ctr")
    with pytest.raises(InputError, match="not an empty folder"):
        generate("ctr", 10, tmp_path / "log")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "ctrr"}, "choose one of ctr, cvr, attribution, convs"),
        ({"rows": 0}, "at least one"),
        ({"seed": -1}, "between 0 and 2"),
        ({"threads": 0}, "at least 1"),
        ({"speed": 3}, "there is no knob 'speed'"),
        ({"bayes_auc": 0.3}, "between 0.55 and 0.95"),
        ({"drift": float("nan")}, "between 0.0 and 10.0"),
        ({"criteo": True}, "belongs to the preset attribution"),
    ],
)
def test_what_cannot_be_generated_is_refused(tmp_path, arguments, message):
    with pytest.raises(InputError, match=re.escape(message)):
        generate(**({"preset": "ctr", "rows": 10, "out": tmp_path / "log"} | arguments))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("preset", ["ctr", "cvr", "attribution", "criteo", "convs"])
def test_every_log_comes_with_a_recipe_that_reads_it(tmp_path, preset):
    preset, criteo = ("attribution", True) if preset == "criteo" else (preset, False)
    generate(preset, 3000, tmp_path / "log", **({"criteo": True} if criteo else {}))
    declared = schema.load(tmp_path / "log" / "recipe.toml")
    assert declared.stand_in == "generated"
    if declared.source.header:
        assert [c.name for c in declared.columns] == [c.name for c in columns(preset, criteo=criteo)]
    store = prepare(declared, [str(tmp_path / "log" / "log.tsv")], tmp_path / "store")
    assert sum(store.splits.values()) == 3000 if preset in ("ctr", "cvr", "convs") else sum(store.splits.values()) > 800
    assert store.ledger.charges == []
