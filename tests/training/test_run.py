"""Whole runs from Python: every kind of label, sampling and noise, and the reference against plain PyTorch."""

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from support import ads, write
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from adumbra import schema, toml
from adumbra.config import Config
from adumbra.data.prepare import prepare
from adumbra.data.store import Store
from adumbra.errors import InputError
from adumbra.evaluation.metrics import Tally, summary
from adumbra.privacy.noise import INSECURE_REPEATABLE
from adumbra.training import build, inputs, records
from adumbra.training.run import Run, fit

CENSUS = Path(__file__).parents[3] / "shared/data/census-income-kdd"


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    monkeypatch.setattr(records, "BLOCKS", 2)


SECTIONS = {
    "microbatches": {"method": {"kind": "dp-sgd"}, "dp_phase": {"microbatch": 4}},
    "physical batches": {"method": {"kind": "dp-sgd"}, "dp_phase": {"physical_batch": 50}},
    "shuffled epochs": {"dp_phase": {"sampling": "shuffle"}},
    "zero-out": {"privacy": {"adjacency": "zero-out"}},
    "by RDP": {"privacy": {"adjacency": "add-or-remove", "accountant": "rdp"}, "method": {"kind": "dp-sgd"}},
    "other optimizers": {"label_phase": {"optimizer": "yogi"}, "dp_phase": {"optimizer": "momentum", "warmup": 0.2}},
    "the plain loss": {"label_phase": {"loss": "plain"}, "method": {"public_tower": "frozen"}},
    "squared loss": {"loss": "squared", "method": {"kind": "dp-sgd"}},
}


@pytest.mark.parametrize("sections", SECTIONS.values(), ids=SECTIONS)
def test_a_statement_bears_to_be_accounted_again(tmp_path, sections):
    store = runs.store(tmp_path)
    run = fit(runs.config(store, **sections), tmp_path / "run")
    statement = Run.open(tmp_path / "run").statement
    statement.check()
    assert statement == run.statement
    assert statement.protects
    assert statement.epsilon <= 3.0
    assert (statement.units, statement.planned_steps, statement.lost_steps) == (1200, 12, 0)
    assert Store.open(store).ledger.total()[0] == pytest.approx(statement.epsilon, rel=1e-9)
    assert 0 < run.evaluate().as_json()["auc"] < 1


@pytest.mark.parametrize("method", ["hybrid", "label-dp", "dp-sgd"])
def test_counts_as_labels(tmp_path, method):
    store = runs.store(tmp_path, "count")
    sections = {"method": {"kind": method}, "label_phase": {"max_label": 4}}
    run = fit(runs.config(store, **sections), tmp_path / "run")
    charges = {charge.mechanism: charge for charge in run.statement.charges}
    if method != "dp-sgd":
        assert charges["randomized-response"].parameters["classes"] == 5
        with pytest.raises(InputError, match="max_label"):
            fit(runs.config(store, method={"kind": method}), tmp_path / "other")
        assert not (tmp_path / "other").exists()
    assert run.evaluate().as_json()["rows"] == 300


def test_real_labels(tmp_path):
    store = runs.store(tmp_path, "real")
    assert fit(runs.config(store, method={"kind": "dp-sgd"}), tmp_path / "run").evaluate().as_json()["rows"] == 300
    with pytest.raises(InputError, match="cannot be randomised"):
        fit(runs.config(store), tmp_path / "other")


def test_noise_from_a_seed_is_repeated_by_its_name(tmp_path):
    store = runs.store(tmp_path)
    run = fit(runs.config(store, privacy={"noise": INSECURE_REPEATABLE}), tmp_path / "run")
    assert not run.statement.protects
    assert INSECURE_REPEATABLE in run.statement.claim
    assert INSECURE_REPEATABLE in (tmp_path / "run/statement.md").read_text()


def test_a_seed_governs_no_noise(tmp_path):
    """The same seed twice: the same initial weights, other noise and samples."""
    store = runs.store(tmp_path)
    config = runs.config(store, method={"kind": "dp-sgd"})
    one, other = (build.load(fit(config, tmp_path / name).path / "model")[0].state_dict() for name in "ab")
    assert all(not one[name].equal(other[name]) for name in one)


def test_a_run_outlives_its_store(tmp_path):
    store = runs.store(tmp_path)
    run = fit(runs.config(store, method={"kind": "label-dp"}), tmp_path / "run")
    shutil.rmtree(store)
    log = write(tmp_path / "new.tsv", ads(20))
    assert Run.open(tmp_path / "run").predict([log], tmp_path / "p.parquet") == 20
    with pytest.raises(InputError, match="not a store"):
        run.evaluate()


@pytest.mark.parametrize("name", ["model.json", "weights.safetensors"])
def test_a_damaged_model_is_one_line(tmp_path, name):
    run = fit(runs.config(runs.store(tmp_path), method={"kind": "none"}), tmp_path / "run")
    file = run.path / "model" / name
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(InputError, match="no released model, or a damaged one"):
        run.model()
    file.unlink()
    with pytest.raises(InputError, match="no released model, or a damaged one"):
        run.model()


def test_the_truncated_model_is_released_where_only_labels_were_paid_for(tmp_path):
    run = fit(runs.config(runs.store(tmp_path), method={"kind": "label-dp"}), tmp_path / "run")
    model, truncated = build.load(run.path / "model")
    assert truncated
    batch = inputs.Rows.of(run.store().split("test")).batch
    assert run.model()(batch).equal(model.truncated(batch))
    assert not run.model()(batch).equal(model(batch))


# The reference without privacy, against the same models written in plain PyTorch

WIDTH, HIDDEN, BATCH, EPOCHS, RATE = 8, 64, 1024, 2, 2e-3


class Plain(nn.Module):
    """Both towers' columns in tables of their own; nothing of ours."""

    def __init__(self, sizes, public, kind):
        super().__init__()
        self.kind, self.public = kind, public
        width = 1 + WIDTH if kind == "fm" else WIDTH
        widths = [int(2 * size**0.25) if kind == "dnn" else width for size in sizes]
        self.tables = nn.ModuleList(nn.Embedding(size, wide) for size, wide in zip(sizes, widths, strict=True))
        for table in self.tables:
            if kind == "fm":
                nn.init.normal_(table.weight, std=0.01)
            else:
                nn.init.uniform_(table.weight, -0.05, 0.05)
        self.bias = nn.Parameter(torch.zeros(()))
        if kind == "dnn":
            self.layers = self.perceptron([sum(widths), *[HIDDEN] * 4, 1])
        if kind == "mlp":
            self.first = self.perceptron([sum(widths[:public]), HIDDEN])
            self.layers = self.perceptron([HIDDEN + sum(widths[public:]), HIDDEN, HIDDEN, 1])

    def perceptron(self, widths):
        layers = []
        for i, o in pairwise(widths):
            layers += [nn.Linear(i, o), nn.ReLU()]
            nn.init.xavier_uniform_(layers[-2].weight)
            nn.init.zeros_(layers[-2].bias)
        return nn.Sequential(*(layers if widths[-1] > 1 else layers[:-1]))

    def forward(self, ids):
        values = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        if self.kind == "fm":
            values = torch.stack(values, 1)
            linear, factors = values[:, :, 0].sum(1), values[:, :, 1:]
            pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
            return self.bias + linear + pairs
        if self.kind == "dnn":
            return self.layers(torch.cat(values, 1)).squeeze(1)
        public = self.first(torch.cat(values[: self.public], 1))
        return self.layers(torch.cat([public, *values[self.public :]], 1)).squeeze(1)


def plain_ids(split):
    """Every column's ids from zero, whatever the tables' offsets are."""
    return torch.from_numpy(np.concatenate([split["public"], split["sensitive"]], 1).astype(np.int64))


def plain_auc(store, kind):
    torch.manual_seed(1)
    train, test = (plain_ids(store.split(name)) for name in ("train", "test"))
    label = torch.from_numpy(np.asarray(store.split("train")["label"])).float()
    least = torch.minimum(train.min(0).values, test.min(0).values)
    train, test = train - least, test - least
    sizes = [column["rows"] for column in store.description["tokens"] if column["tower"] == "public"]
    public = len(sizes)
    sizes += [column["rows"] for column in store.description["tokens"] if column["tower"] == "sensitive"]
    sizes = [max(size, int(most) + 1) for size, most in zip(sizes, torch.cat([train, test]).max(0).values, strict=True)]
    model = Plain(sizes, public, kind)
    steps = EPOCHS * -(-len(train) // BATCH)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(train)).split(BATCH):
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(train[rows]), label[rows]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        logits = torch.cat([model(part) for part in test.split(8192)]).numpy()
    return summary(Tally.of(logits, np.asarray(store.split("test")["label"]), "binary"))["auc"]


@pytest.mark.slow
@pytest.mark.skipif(not CENSUS.exists(), reason="Census-Income is not here")
@pytest.mark.parametrize("kind", ["fm", "mlp", "dnn"])
def test_without_privacy_census_income_reaches_what_plain_pytorch_does(tmp_path, kind):
    recipe = schema.load("census-income")
    if kind == "dnn":
        towers = {tower: getattr(recipe, tower).model_copy(update={"table": "column"}) for tower in schema.TOWERS}
        recipe = recipe.model_copy(update=towers)
    store = prepare(recipe, [str(CENSUS)], tmp_path / "store")
    phase = {"epochs": EPOCHS, "batch_size": BATCH, "optimizer": "adam", "learning_rate": RATE}
    model = {"fm": {"kind": "fm", "dim": WIDTH}, "mlp": {"kind": "mlp", "dim": WIDTH, "hidden": HIDDEN}}
    raw = {
        "data": {"store": str(store.path)},
        "model": model.get(kind, {"kind": "dnn", "hidden": HIDDEN}),
        "privacy": {"epsilon": 1.0},
        "method": {"kind": "none"},
        "label_phase": phase,
    }
    run = fit(toml.parse(raw, Config, "test"), tmp_path / "run")
    assert run.evaluate().as_json()["auc"] == pytest.approx(plain_auc(store, kind), abs=0.002)
