"""A store that was changed, truncated or purged says so; one that is unfinished is never taken for finished."""

import json
import os
import shutil

import numpy as np
import pytest
from support import VOCABULARY, ads, made, recipe, write

from adumbra import describe
from adumbra.data.purge import purge
from adumbra.data.store import Store, unfinished
from adumbra.errors import InputError
from adumbra.privacy.ledger import Ledger


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    return made(recipe(**VOCABULARY), write(folder / "log", ads(120)), folder / "store").path


def inspect(path):
    return describe.store(Store.open(path).verify())


def names(store):
    return sorted(str(file.relative_to(store)) for file in store.rglob("*") if file.is_file())


def test_its_files(store):
    assert names(store) == sorted(
        ["ledger.jsonl", "store.json", "vocabulary/tokens.parquet"]
        + [
            f"{split}/{name}.npy"
            for split in ("train", "test")
            for name in ("public", "sensitive", "numbers_public", "numbers_sensitive", "label", "user", "time")
        ]
    )
    held = Store.open(store).split("train")
    assert (held["public"].dtype, held["numbers_public"].dtype, held["label"].dtype) == (np.int32, np.float32, np.uint8)
    assert held["user"].dtype == held["time"].dtype == np.int64
    with pytest.raises(InputError, match="no split 'dev'"):
        Store.open(store).split("dev")


def test_every_changed_or_truncated_file_is_found(store, tmp_path):
    for name in names(store):
        original = (store / name).read_bytes()
        places = {0, 7, len(original) // 3, len(original) // 2, len(original) - 2, len(original) - 1}
        damaged = [original[:p] + bytes([original[p] ^ 1]) + original[p + 1 :] for p in sorted(places)]
        for number, data in enumerate([*damaged, original[: len(original) // 2], original + b"x", b"", None]):
            copy = tmp_path / f"{name.replace('/', '-')}-{number}"
            shutil.copytree(store, copy)
            (copy / name).unlink() if data is None else (copy / name).write_bytes(data)
            if name == "ledger.jsonl" and data == original + b"x":
                assert inspect(copy)["ledger"]["charges"]  # what a crash leaves at its end is repaired
                continue
            with pytest.raises(InputError) as caught:
                inspect(copy)
            assert "\n" not in str(caught.value)
            shutil.rmtree(copy)


def test_a_ledger_whose_last_lines_were_cut_off_whole(store, tmp_path):
    shutil.copytree(store, tmp_path / "copy")
    ledger = tmp_path / "copy/ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().splitlines(True)[0])
    with pytest.raises(InputError, match="missing"):
        inspect(tmp_path / "copy")


@pytest.mark.parametrize("text", ["{}", "[]", "null", "7", '"x"', '{"version": 1}', '{"version": 9}', "", "[" * 9000])
def test_a_description_that_is_none(store, tmp_path, text):
    shutil.copytree(store, tmp_path / "copy")
    (tmp_path / "copy/store.json").write_text(text)
    with pytest.raises(InputError):
        inspect(tmp_path / "copy")


def test_what_is_no_store(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "none", tmp_path / "file", tmp_path / "file/under", "/", "."):
        with pytest.raises(InputError, match="not a store"):
            Store.open(path)


def test_an_unfinished_store_is_no_store(tmp_path):
    path, partial = tmp_path / "store", tmp_path / "store.partial"
    shutil.copytree(made(recipe(), write(tmp_path / "log", ads(40)), tmp_path / "other").path, partial / "store")
    (partial / "inputs.json").write_text("{}")
    with pytest.raises(InputError, match="unfinished"):
        Store.open(path)
    with pytest.raises(InputError, match="unfinished store; continue with --resume"):
        made(recipe(), str(tmp_path / "log"), path)
    with pytest.raises(InputError, match="another recipe, files or --bad-rows"):
        made(recipe(), str(tmp_path / "log"), path, resume=True)


def test_purge_leaves_ledger_and_receipt(store, tmp_path):
    path = tmp_path / "store"
    shutil.copytree(store, path)
    (tmp_path / "store.partial").mkdir()
    (tmp_path / "store.partial/inputs.json").write_text("{}")
    (tmp_path / "store.partial/spool").mkdir()
    before = describe.account(Store.open(path))
    receipt = None
    for _ in range(2):
        purge(path)
        assert sorted(os.listdir(path)) == ["ledger.jsonl", "purged.json", "store.json"]
        receipt = receipt or (path / "purged.json").read_text()
    assert (path / "purged.json").read_text() == receipt
    assert "train/label.npy" in json.loads(receipt)["files"]
    assert not (tmp_path / "store.partial").exists()
    said = inspect(path)
    assert said["purged"]
    assert describe.store_text(said)
    assert describe.account(Store.open(path)) == before
    with pytest.raises(InputError, match="purged"):
        Store.open(path).split("train")


def test_purge_of_an_unfinished_store_keeps_what_it_spent(tmp_path, monkeypatch):
    path = write(tmp_path / "log", ads(40))
    with monkeypatch.context() as patch:
        patch.setattr("adumbra.data.prepare._write_arrays", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        for name, log in (("paid", recipe(**VOCABULARY)), ("free", recipe())):
            with pytest.raises(KeyboardInterrupt):
                made(log, path, tmp_path / name)
    assert "stays in" in purge(tmp_path / "paid")
    assert len(Ledger.open(tmp_path / "paid.partial.ledger.jsonl").charges) == 1
    assert "nothing" in purge(tmp_path / "free.partial")
    assert not unfinished(tmp_path / "paid").exists()
    assert not unfinished(tmp_path / "free").exists()


def test_purge_of_what_is_no_store(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/mine.txt").write_text("mine")
    for path in (tmp_path / "folder", tmp_path / "none"):
        with pytest.raises(InputError, match="not a store"):
            purge(path)
    assert (tmp_path / "folder/mine.txt").read_text() == "mine"
