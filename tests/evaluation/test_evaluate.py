"""A model over a split: every row once, in order, whatever the batches; and slices that add up."""

# pyright: reportArgumentType=false, reportOptionalOperand=false, reportOperatorIssue=false
import json

import numpy as np
import pytest
import torch
from support import ads, column, made, raw, recipe, write
from torch import nn

from adumbra.data.store import Split
from adumbra.errors import InputError, WorkError
from adumbra.evaluation import evaluate as module
from adumbra.evaluation.evaluate import ahead, evaluate, infer
from adumbra.evaluation.metrics import Tally, predictions, summary
from adumbra.evaluation.slices import Slicing
from adumbra.models import FactorizationMachine
from adumbra.training.inputs import layout


class Scorer(nn.Module):
    """The logit is the first public number; it notes how it is called."""

    def __init__(self):
        super().__init__()
        self.sizes, self.modes = [], []

    def forward(self, batch):
        self.sizes.append(len(batch.public))
        self.modes.append((self.training, torch.is_inference_mode_enabled()))
        assert batch.public.dtype == torch.int32
        assert batch.numbers_sensitive.shape == (len(batch.public), 0)
        return batch.numbers_public[:, 0]


@pytest.fixture
def split():
    r = np.random.default_rng(0)
    logits = r.normal(-1, 1, (1000, 1)).astype(np.float32)
    label = (r.random(1000) < predictions(logits[:, 0], "binary")).astype(np.uint8)
    arrays = {"public": np.repeat([1, 2, 3, 4], [600, 300, 80, 20])[:, None].astype(np.int32)}
    return Split("test", 1000, arrays | {"numbers_public": logits, "label": label})


@pytest.mark.parametrize("batch_size", [1, 7, 1000, 5000])
@pytest.mark.parametrize("chunk", [1, 64, 1 << 20])
def test_every_row_counts_once_whatever_the_batches(split, batch_size, chunk, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    model = Scorer()
    said = evaluate(model, split, batch_size=batch_size).as_json()
    expected = summary(Tally.of(split["numbers_public"][:, 0], split["label"]))
    assert {key: pytest.approx(value, rel=1e-12) for key, value in expected.items()} == said
    assert sum(model.sizes) == 1000
    assert max(model.sizes) <= batch_size
    logits = np.concatenate([part for _, part in infer(model, split, batch_size=batch_size)])
    assert np.array_equal(logits, split["numbers_public"][:, 0])


def test_the_model_is_in_evaluation_mode_while_it_is_evaluated_and_no_longer(split):
    model = Scorer().train()
    seen = []
    for _ in infer(model, split, batch_size=500):
        seen.append(torch.is_inference_mode_enabled())
    assert set(model.modes) == {(False, True)}
    assert seen == [False]  # the mode does not leak to who reads the logits
    assert model.training
    model.eval()
    evaluate(model, split)
    assert not model.training


def test_training_rows_are_refused_unless_asked_for_by_name(split):
    training = Split("train", len(split), split.arrays)
    with pytest.raises(InputError, match="not private"):
        evaluate(Scorer(), training)
    assert evaluate(Scorer(), training, unprotected=True).tally.rows == 1000


def test_progress_ends_at_the_last_row(split):
    told = []
    evaluate(Scorer(), split, progress=lambda *said: told.append(said))
    assert told == [("evaluating", 1000, 1000, 1000)]


def test_a_model_of_another_shape_or_that_diverged_is_one_line(split):
    with pytest.raises(InputError, match=r"shape \(1000, 1\)"):
        evaluate(lambda batch: batch.numbers_public, split)
    with pytest.raises(WorkError, match="NaN or infinite for 1,000 of 1,000"):
        evaluate(lambda batch: batch.numbers_public[:, 0] * float("nan"), split)
    with pytest.raises(InputError, match="at least one"):
        evaluate(Scorer(), split, batch_size=0)


def test_an_empty_split_has_metrics_that_say_so():
    split = Split("test", 0, {"public": np.zeros((0, 1), np.int32), "label": np.zeros(0, np.uint8)})
    assert evaluate(lambda batch: batch.public[:, 0].float(), split).as_json()["rows"] == 0


def test_items_ahead_are_the_same_items_and_the_same_errors():
    assert list(ahead(iter(range(5)))) == list(range(5))

    def failing():
        yield 1
        raise InputError("no more")

    items = ahead(failing())
    assert next(items) == 1
    with pytest.raises(InputError, match="no more"):
        next(items)


def test_slices_add_up_and_small_ones_are_merged(split):
    by = Slicing("site", 0, minimum=50, most=2, names={1: "a.com"})
    evaluation = evaluate(Scorer(), split, batch_size=64, slicing=by)
    ids, logits, label = split["public"][:, 0], split["numbers_public"][:, 0], split["label"]
    parts = {"a.com": ids == 1, "(id 2)": ids == 2, "(other)": ids >= 3}
    assert [name for name, _ in evaluation.slices] == list(parts)
    for name, tally in evaluation.slices:
        expected = summary(Tally.of(logits[parts[name]], label[parts[name]]))
        assert summary(tally) == pytest.approx(expected, rel=1e-12)
    said = json.loads(json.dumps(evaluation.as_json(bins=5)))
    assert [value["rows"] for value in said["slices"]["values"]] == [600, 300, 100]
    assert said["slices"]["column"] == "site"
    assert len(said["reliability"]) == 5


def test_a_remainder_of_too_few_rows_says_only_how_many(split):
    said = evaluate(Scorer(), split, slicing=Slicing("site", 0, minimum=50)).as_json()["slices"]["values"]
    assert said[-1] == {"value": "(other)", "rows": 20}


@pytest.mark.parametrize("table", ["tower", "column"])
def test_slices_carry_the_names_of_the_vocabulary(tmp_path, table):
    rows = ads(800)
    held = recipe(public={"kind": "vocabulary", "threshold": 20, "table": table}, split={"train": 0.5, "test": 0.5})
    store = made(held, write(tmp_path / "log.tsv", rows), tmp_path / "store")
    model = FactorizationMachine(4).build(layout(store))
    for name, place in (("site", 1), ("visits", 2)):
        kept = {row[place] for row in rows[:400] if sum(r[place] == row[place] for r in rows[:400]) >= 20} - {""}
        expected: dict[str, int] = {}
        for row in rows[400:]:
            value = row[place] if row[place] in kept else "(missing)" if not row[place] else "(unknown)"
            expected[value] = expected.get(value, 0) + 1
        test = store.split("test")
        evaluation = evaluate(model, test, slicing=Slicing.of(store, name, minimum=1))
        assert {value: tally.rows for value, tally in evaluation.slices} == expected
    hours = evaluate(model, test, slicing=Slicing.of(store, "time.hour", minimum=1)).slices
    expected_hours = [str(int(row[8]) // 3600 % 24) for row in rows[400:]]
    assert {value: tally.rows for value, tally in hours} == {h: expected_hours.count(h) for h in set(expected_hours)}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("interest", "protected"),
        ("segments", "protected"),
        ("clicked", "protected"),
        ("recency", "protected"),
        ("price", "a number"),
        ("user", "no feature"),
        ("time", "several features; choose one of time.hour, time.weekday"),
        ("sit", "no such column; choose one of site"),
    ],
)
def test_slices_by_what_is_no_public_feature_are_refused_in_one_line(tmp_path, name, why):
    store = made(recipe(), write(tmp_path / "log.tsv", ads(50)), tmp_path / "store")
    with pytest.raises(InputError, match=why) as caught:
        Slicing.of(store, name)
    assert "\n" not in str(caught.value)
    assert column(store, "site")["start"] == Slicing.of(store, "site").place
    with pytest.raises(InputError, match="1 or more"):
        Slicing.of(store, "site", minimum=0)


def test_a_key_that_the_sensitive_tower_sees_cuts_no_slices(tmp_path):
    held = recipe(raw(column={"user": {"feature": "sensitive"}}))
    store = made(held, write(tmp_path / "log.tsv", ads(50)), tmp_path / "store")
    with pytest.raises(InputError, match="protected"):
        Slicing.of(store, "user")
