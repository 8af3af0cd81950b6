"""Predictions: what the model says of each row, whatever the files, and nothing half-written."""

# pyright: reportArgumentType=false, reportOptionalOperand=false, reportOperatorIssue=false
import csv

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support import ads, made, recipe, write

from adumbra.data import source
from adumbra.data.rows import Encoding
from adumbra.errors import InputError, WorkError
from adumbra.evaluation.evaluate import infer
from adumbra.evaluation.metrics import predictions
from adumbra.evaluation.predict import predict
from adumbra.models import FactorizationMachine
from adumbra.training.inputs import layout


def world(folder, **changes):
    """A store, its encoding, a model with random weights, and the log as new rows."""
    store = made(recipe(**changes), write(folder / "log.tsv", ads(400)), folder / "store")
    torch.manual_seed(0)
    return store, Encoding.of(store), FactorizationMachine(4, sigma_init=0.3).build(layout(store))


def expected(store, model, kind="binary"):
    """The predictions for the store's own rows, from its arrays."""
    parts = [logits for name in store.splits for _, logits in infer(model, store.split(name))]
    return predictions(np.concatenate(parts), kind)


def test_predictions_are_those_of_the_store_s_rows(tmp_path, monkeypatch):
    store, encoding, model = world(tmp_path)
    monkeypatch.setattr(source, "BLOCK", 4096)
    told = []
    out = tmp_path / "p.csv"
    rows = predict(
        model, encoding, [str(tmp_path / "log.tsv")], out, keep=("user",), batch_size=7,
        progress=lambda *said: told.append(said),
    )  # fmt: skip
    assert rows == 400
    with out.open(newline="") as file:
        header, *found = csv.reader(file)
    assert header == ["row", "user", "prediction"]
    assert [int(row[0]) for row in found] == list(range(1, 401))
    assert [row[1] for row in found] == [row[7] for row in ads(400)]
    assert np.allclose([float(row[2]) for row in found], expected(store, model), rtol=1e-5)
    assert len(told) > 3
    assert told[-1][1] == told[-1][2] == (tmp_path / "log.tsv").stat().st_size
    predict(model, encoding, [str(tmp_path / "log.tsv")], tmp_path / "p.parquet", keep=("user",))
    table = pq.read_table(tmp_path / "p.parquet")
    assert table.column_names == header
    assert table["user"].to_pylist() == [row[1] or None for row in found]
    assert np.allclose(table["prediction"], [float(row[2]) for row in found], rtol=1e-5)
    predict(model, encoding, [str(tmp_path / "log.tsv")], tmp_path / "p.tsv")
    assert (tmp_path / "p.tsv").read_text().startswith("row\tprediction\n1\t")
    assert not list(tmp_path.glob(".*"))


def test_counts_get_a_mean_and_real_labels_a_value(tmp_path):
    for kind in ("count", "real"):
        (tmp_path / kind).mkdir()
        store, encoding, model = world(tmp_path / kind, label={"rule": "clicked", "kind": kind})
        predict(model, encoding, [str(tmp_path / kind / "log.tsv")], tmp_path / f"{kind}.parquet")
        found = pq.read_table(tmp_path / f"{kind}.parquet")["prediction"]
        assert np.allclose(found, expected(store, model, kind), rtol=1e-5)


def test_a_row_that_the_filter_leaves_out_gets_no_prediction(tmp_path):
    store, encoding, model = world(tmp_path, filter="visits < 3")
    rows = predict(model, encoding, [str(tmp_path / "log.tsv")], tmp_path / "p.parquet")
    table = pq.read_table(tmp_path / "p.parquet")
    kept = [n for n, row in enumerate(ads(400), 1) if row[2] and int(row[2]) < 3]
    assert table["row"].to_pylist() == kept
    assert rows == len(kept)
    assert np.allclose(table["prediction"], expected(store, model), rtol=1e-5)


def test_the_truncated_model_predicts_too(tmp_path):
    _, encoding, model = world(tmp_path)
    predict(model.truncated, encoding, [str(tmp_path / "log.tsv")], tmp_path / "p.parquet")
    predict(model, encoding, [str(tmp_path / "log.tsv")], tmp_path / "q.parquet")
    found, whole = (pq.read_table(tmp_path / f"{name}.parquet")["prediction"].to_numpy() for name in "pq")
    assert not np.allclose(found, whole)


def test_what_goes_wrong_is_one_line_and_leaves_nothing(tmp_path):
    _, encoding, model = world(tmp_path)
    log, out = str(tmp_path / "log.tsv"), tmp_path / "p.csv"
    before = set(tmp_path.iterdir())

    def refused(error, match, model=model, inputs=log, out=out, **options):
        with pytest.raises(error, match=match) as caught:
            predict(model, encoding, [inputs], out, **options)
        assert "\n" not in str(caught.value)
        assert set(tmp_path.iterdir()) == before

    refused(InputError, "end the name in one of them", out=tmp_path / "p.json")
    refused(InputError, "no such file", inputs=str(tmp_path / "none.tsv"))
    refused(InputError, "cannot be written", out=tmp_path / "none" / "p.csv")
    refused(InputError, "cannot be written", out=tmp_path / "none" / "p.parquet")
    refused(InputError, "'row' cannot be kept", keep=("row",))
    refused(InputError, "no column 'uid' to keep", keep=("uid",))
    refused(WorkError, "row 1: .* diverged", model=lambda batch: torch.full((len(batch.public),), float("nan")))
    bad = ads(300)
    bad[250][2] = "many"
    inputs = write(tmp_path / "bad.tsv", bad)
    before = set(tmp_path.iterdir())
    refused(InputError, "bad.tsv, line 251", inputs=inputs)
    out.write_text("mine")
    before = set(tmp_path.iterdir())
    refused(InputError, "exists already")
    assert out.read_text() == "mine"
