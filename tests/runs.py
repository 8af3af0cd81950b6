"""Tiny stores, quick runs, and dp-accounting called directly: for tests of training."""

import atexit
import math
import shutil
import tempfile
from functools import cache
from pathlib import Path

from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from support import VOCABULARY, ads, as_toml, made, raw, recipe, write

from adumbra import toml
from adumbra.config import Config

KINDS = {
    "protected": {},
    "stand-in": {"stand_in": "generated"},
    "counted": VOCABULARY,
    "count": {"label": {"rule": "clicked", "kind": "count"}},
    "real": {"label": {"rule": "clicked", "kind": "real"}},
}
ROWS = 1500
"""Of which 1,200 train: enough for the label phase's guard."""


@cache
def _prepared(kind: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="adumbra-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "recipe.toml").write_text(as_toml(raw(**KINDS[kind])))
    log = write(folder / "log.tsv", ads(ROWS))
    made(recipe(**KINDS[kind]), log, folder / "store")
    return folder


def store(folder: Path, kind: str = "protected", name: str = "store") -> Path:
    """A fresh copy of a small store."""
    shutil.copytree(_prepared(kind) / "store", folder / name)
    return folder / name


def settings(store: Path, **sections) -> dict:
    """A quick run's raw configuration; sections are added to those that stand here."""
    out = {
        "data": {"store": str(store)},
        "model": {"kind": "fm", "dim": 3},
        "privacy": {"epsilon": 3.0},
        "method": {"kind": "hybrid", "split": 0.25},
        "label_phase": {"epochs": 2, "batch_size": 200, "learning_rate": 0.01},
        "dp_phase": {"epochs": 1.2, "batch_size": 120, "learning_rate": 0.01, "clip_norm": 1.0},
    }
    for name, value in sections.items():
        out[name] = {**out.get(name, {}), **value} if isinstance(value, dict) else value
    return out


def config(store: Path, **sections) -> Config:
    return toml.parse(settings(store, **sections), Config, "test")


def direct(*events, delta: float, relation=NeighboringRelation.REPLACE_ONE) -> float:
    """Epsilon from dp-accounting alone."""
    accountant = PLDAccountant(relation)
    for event in events:
        accountant.compose(event)
    return float(accountant.get_epsilon(delta))


def dp_sgd(probability: float, sigma: float, steps: int):
    step = dp_event.PoissonSampledDpEvent(probability, dp_event.GaussianDpEvent(sigma))
    return dp_event.SelfComposedDpEvent(step, steps)


def randomized_response(epsilon: float, classes: int = 2):
    """Its parameter is neither the probability to keep nor that to flip (privacy.md, rule 18)."""
    return dp_event.RandomizedResponseDpEvent(classes / (math.exp(epsilon) + classes - 1), classes)
