"""The command line: one JSON object or one line, exit statuses, and imports that help does not need."""

import json
import os
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import NAMES, SECRET, VOCABULARY, ads, as_toml, command, raw, write

from adumbra.privacy.ledger import Ledger


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: command(monkeypatch, capsys, *words)


@pytest.fixture
def log(tmp_path):
    """A log whose protected cells hold what must never be quoted, and its recipe."""
    rows = [[SECRET if place in (0, 4, 5, 6) else value for place, value in enumerate(row)] for row in ads(60)]
    (tmp_path / "recipe.toml").write_text(as_toml(raw()))
    return write(tmp_path / "log.tsv", rows)


def refused(run, *words):
    """The one line on standard error of a command that is given what is wrong."""
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert err.startswith("adumbra: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert SECRET not in err
    return err


def test_from_a_log_to_its_account(run, log, tmp_path):
    (tmp_path / "recipe.toml").write_text(as_toml(raw(**VOCABULARY)))
    status, out, err = run("prepare", "recipe.toml", log, "--out", "store")
    assert (status, out, err) == (0, "", "store: train 48, test 12 rows\n")
    status, out, err = run("inspect", "store", "--json")
    said = json.loads(out)
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert said["splits"] == {"train": 48, "test": 12}
    assert set(said) >= {"splits", "columns", "towers", "ledger"}
    assert {column["name"] for column in said["columns"]} == {
        *NAMES[1:-1],
        "time.hour",
        "time.weekday",
        "label",
        "user",
    } | {column["name"] for column in said["columns"] if column["name"] == "time"}
    assert SECRET not in out
    status, out, _ = run("account", "store", "--json")
    account = json.loads(out)
    ledger = Ledger.open(tmp_path / "store/ledger.jsonl")
    assert status == 0
    assert (account["epsilon"], account["delta"]) == ledger.total()
    assert account == said["ledger"]
    assert [charge["epsilon"] for charge in account["charges"]] == [charge.epsilon for charge in ledger.charges]
    assert {"epsilon", "delta", "adjacency", "unit", "accountant", "charges"} <= set(account)
    for words in (("inspect", "store"), ("account", "store")):
        status, out, err = run(*words)
        assert (status, err) == (0, "")
        assert f"{account['epsilon']:.4f}" in out
        assert SECRET not in out


def test_purge(run, log, tmp_path):
    (tmp_path / "recipe.toml").write_text(as_toml(raw(**VOCABULARY)))
    run("prepare", "recipe.toml", log, "--out", "store")
    before = json.loads(run("account", "store", "--json")[1])
    assert run("purge", "store")[0] == 0
    assert sorted(os.listdir(tmp_path / "store")) == ["ledger.jsonl", "purged.json", "store.json"]
    assert json.loads(run("inspect", "store", "--json")[1])["purged"]
    assert "purged" in run("inspect", "store")[1]
    assert json.loads(run("account", "store", "--json")[1]) == before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda r: r["columns"][1].update(role=""), "no role was chosen"),
        (lambda r: r["columns"].append(r["columns"][1]), "column 'site' is declared twice"),
        (lambda r: r["columns"].pop(), "line 1: 9 fields, expected 8"),
        (lambda r: r["columns"].append({"name": "more", "role": "public", "type": "category"}), "expected 10"),
        (lambda r: r.update(filter="interest == 'x'"), "public columns and keys only"),
        (lambda r: r["public"].update(treshold=3), "did you mean 'threshold'"),
        (lambda r: r.update(schema_version=2), "schema_version is 2"),
        (lambda r: r["source"].update(header=True), "the recipe declares a header"),
        (lambda r: r["source"].update(format="parquet"), "not readable as parquet"),
        (lambda r: r["label"].update(rule="clicked +"), "is not an expression"),
        (lambda r: r.update(public=None), "public"),
    ],
)
def test_a_recipe_that_does_not_fit(run, log, tmp_path, change, expected):
    recipe = raw()
    change(recipe)
    (tmp_path / "recipe.toml").write_text(as_toml({k: v for k, v in recipe.items() if v is not None}))
    assert expected in refused(run, "prepare", "recipe.toml", log, "--out", "store")
    assert not list(tmp_path.glob("store*"))


def test_outputs_that_cannot_be(run, log, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("x")
    for out, expected in (
        ("there", "exists already"),
        (".", "exists already"),
        ("/", "exists already"),
        ("file", "exists already"),
        ("file/store", "cannot be written"),
        ("file/deep/store", "cannot be written"),
        ("/proc/store", "cannot be written"),
        ("x" * 300, "cannot be written"),
    ):
        assert expected in refused(run, "prepare", "recipe.toml", log, "--out", out)
    assert sorted(os.listdir(tmp_path)) == ["file", "log.tsv", "recipe.toml", "there"]


def test_arguments_that_are_wrong(run, log):
    assert "did you mean 'criteo-search'" in refused(run, "prepare", "criteo-serch", log, "--out", "s")
    assert "no such file" in refused(run, "prepare", "recipe.toml", "none.tsv", "--out", "s")
    assert "--bad-rows" in refused(run, "prepare", "recipe.toml", log, "--out", "s", "--bad-rows", "ignore")
    assert "--max-bad" in refused(run, "prepare", "recipe.toml", log, "--out", "s", "--max-bad", "nan")
    assert "not a store" in refused(run, "inspect", "none")
    assert "not a store" in refused(run, "account", "none")
    assert "not a store" in refused(run, "purge", "none")
    assert "no such file" in refused(run, "check", "none.toml")
    assert "init: give" in refused(run, "init")
    assert "did you mean" in refused(run, "init", "criteo-displai")
    for words in (
        (),
        ("prepar",),
        ("prepare",),
        ("inspect", "--jsn", "x"),
        ("prepare", "r", log, "--out", "s", "--threads", "0"),
    ):
        status, _, err = run(*words)
        assert status == 2
        assert "Traceback" not in err


def test_an_unfinished_store(run, log, tmp_path):
    (tmp_path / "store.partial").mkdir()
    assert "no unfinished store" in refused(run, "prepare", "recipe.toml", log, "--out", "store", "--resume")
    (tmp_path / "store.partial" / "inputs.json").write_text("{}")
    assert "--resume" in refused(run, "prepare", "recipe.toml", log, "--out", "store")
    assert "--resume" in refused(run, "inspect", "store")
    shutil.rmtree(tmp_path / "store.partial")
    assert run("prepare", "recipe.toml", log, "--out", "store", "--resume")[0] == 0
    assert run("prepare", "recipe.toml", log, "--out", "store", "--resume")[0] == 0


def test_check(run, log, tmp_path):
    status, out, _ = run("check", "recipe.toml", "--json")
    assert status == 0
    assert json.loads(out)["features"] == {"public": 5, "sensitive": 3}
    assert "nothing was run" in run("check", "recipe.toml")[1]
    run("prepare", "recipe.toml", log, "--out", "store")
    run("init", "criteo-display", "--out", "started")
    config = (tmp_path / "started/adumbra.toml").read_text().replace("stores/criteo-display", "store")
    (tmp_path / "adumbra.toml").write_text(config)
    assert "batch_size" in refused(run, "check", "adumbra.toml")
    sizes = ("--set", "label_phase.batch_size=8", "--set", "dp_phase.batch_size=8")
    status, out, _ = run("check", "adumbra.toml", *sizes, "--json")
    assert (status, json.loads(out)["delta"]) == (0, 1 / 48)
    assert "did you mean 'epochs'" in refused(run, "check", "adumbra.toml", *sizes, "--set", "dp_phase.epoch=1")
    assert "privacy.epsilon" in refused(run, "check", "adumbra.toml", *sizes, "--set", "privacy.epsilon=inf")
    assert "--set" in refused(run, "check", "recipe.toml", "--set", "name=x")


@pytest.mark.parametrize("form", ["tsv", "csv", "csv.gz", "space", "parquet", "bare"])
def test_init_from_a_log_is_refused_until_roles_are_decided(run, tmp_path, form):
    rows = [row for row in ads(80) if all(row)]
    path = tmp_path / f"log.{form}"
    if form == "parquet":
        pq.write_table(pa.table(dict(zip(NAMES, map(list, zip(*rows, strict=True)), strict=True))), path)
    else:
        delimiter = {"tsv": "\t", "bare": "\t", "space": " "}.get(form, ",")
        write(path, rows, delimiter, header=None if form == "bare" else NAMES)
        if form == "csv.gz":
            with pa.CompressedOutputStream(str(tmp_path / "packed"), "gzip") as stream:
                stream.write(path.read_bytes())
            (tmp_path / "packed").rename(path)
    status, _, err = run("init", "--from", path, "--out", "mine")
    assert status == 0, err
    text = (tmp_path / "mine/recipe.toml").read_text()
    assert sorted(os.listdir(tmp_path / "mine")) == ["adumbra.toml", "recipe.toml"]
    for words in (("check", "mine/recipe.toml"), ("prepare", "mine/recipe.toml", path, "--out", "store")):
        assert "no role was chosen" in refused(run, *words)
    lines, roles = text.split("\n"), iter(["label", *["public"] * 3, *["sensitive"] * 3, "user", "time"])
    lines = [line.replace('role = ""', f'role = "{next(roles)}"') if 'role = ""' in line else line for line in lines]
    label = "column-1" if form == "bare" else "clicked"
    rule = "column_1" if form == "bare" else "clicked"
    text = "\n".join(lines).replace(f'"{label}"', f'"{rule}"').replace('rule = ""', f'rule = "{rule}"')
    (tmp_path / "mine/recipe.toml").write_text(text)
    if form == "parquet":  # every column is text there, times too
        text = text.replace(
            '{ name = "time", role = "time", type = "category" }', '{ name = "time", role = "time", type = "integer" }'
        )
        (tmp_path / "mine/recipe.toml").write_text(text)
    status, out, err = run("prepare", "mine/recipe.toml", path, "--out", "store")
    assert (status, out) == (0, ""), err
    splits = json.loads(run("inspect", "store", "--json")[1])["splits"]
    assert sum(splits.values()) == len(rows)
    assert "exists already" in refused(run, "init", "--from", path, "--out", "mine")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe\0", b"\n\n", b"PAR1"])
@pytest.mark.parametrize("name", ["log.tsv", "log.gz", "log.parquet"])
def test_init_from_what_is_no_log(run, tmp_path, name, data):
    if (name, data) == ("log.tsv", b"PAR1"):
        return
    (tmp_path / name).write_bytes(data)
    refused(run, "init", "--from", name, "--out", "mine")
    assert not (tmp_path / "mine").exists()


def modules(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    return set(done.stderr.split())


def test_what_is_imported_when():
    said = "import sys; print(*sys.modules, file=sys.stderr)"
    assert not modules(f"import adumbra; {said}") & {"torch", "polars", "pyarrow", "pydantic", "numpy", "typer"}
    for words in ([], ["prepare"], ["inspect"]):
        help_ = f"import sys; sys.argv = {['adumbra', *words, '--help']}\nfrom adumbra import cli\n"
        loaded = modules(f"{help_}try: cli.main()\nfinally: print(*sys.modules, file=sys.stderr)")
        assert "typer" in loaded
        assert not loaded & {"torch", "polars", "pyarrow", "numpy", "dp_accounting"}


def test_a_process_of_its_own(log, tmp_path):
    """The exit status and streams as a shell sees them."""
    words = [sys.executable, "-m", "adumbra.cli", "prepare", tmp_path / "recipe.toml"]
    good = subprocess.run([*words, log, "--out", tmp_path / "store"], capture_output=True, text=True)
    assert (good.returncode, good.stdout) == (0, "")
    bad = subprocess.run([*words, log, "--out", tmp_path / "store"], capture_output=True, text=True)
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
