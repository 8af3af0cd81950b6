"""The life of a run: from a configuration to a released model with its statement, through any number of crashes."""

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from adumbra import config as configuration
from adumbra import toml
from adumbra.config import Config
from adumbra.data.store import Store
from adumbra.errors import InputError, WorkError
from adumbra.evaluation.evaluate import Evaluation, evaluate
from adumbra.evaluation.slices import Slicing
from adumbra.models import TwoTowers
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.ledger import Ledger
from adumbra.privacy.noise import Noise, insecure_repeatable
from adumbra.privacy.statement import Statement
from adumbra.training import build, inputs, labels
from adumbra.training.hybrid import train
from adumbra.training.inputs import Rows
from adumbra.training.layers import check_supported
from adumbra.training.losses import LOSSES, SUITS
from adumbra.training.phases import optimizer_for
from adumbra.training.plan import Plan, make
from adumbra.training.records import Progress, Records

CONFIG, STATE, LEDGER, MODEL = "config.toml", "run.json", "ledger.jsonl", "model"
ENCODING, TOKENS = "encoding.json", "tokens.parquet"
"""What encodes new rows goes with the model: the store may be purged."""
CONTRACT = ("truncated", "public_parameters", "sensitive_parameters", "common_parameters", "tables", "embedding_decay")
"""What training asks of a model of somebody's own."""


@dataclass(frozen=True)
class Run:
    """A finished run's folder."""

    path: Path

    @staticmethod
    def open(path: str | Path) -> "Run":
        path = Path(path)
        if not (path / "statement.json").is_file():
            if (path / STATE).exists():
                raise InputError(f"{path}: the run is unfinished; continue with `adumbra train … --resume`")
            raise InputError(f"{path}: not a run")
        return Run(path)

    @cached_property
    def config(self) -> Config:
        return configuration.load(self.path / CONFIG)

    @cached_property
    def statement(self) -> Statement:
        """What the run claims."""
        path = self.path / "statement.json"
        try:
            return Statement.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, AttributeError):
            raise InputError(f"{path}: damaged") from None

    def store(self) -> Store:
        return Store.open(self.config.data.store)

    def model(self) -> Callable[[Any], Tensor]:
        """The released model: a logit for each row of a batch."""
        model, truncated = build.load(self.path / MODEL)
        return model.truncated if truncated else model

    def evaluate(self, split: str = "test", *, by: str | None = None, **options: Any) -> Evaluation:
        """Metrics on held-out rows of the run's store, which they give no protection; `by` a public column too."""
        store = self.store()
        if options.get("device") is not None:
            options["device"] = _device(options["device"])
        slicing = None if by is None else Slicing.of(store, by)
        kind = store.description["label"]["kind"]
        return evaluate(self.model(), store.split(split), kind, slicing=slicing, **options)

    def predict(self, inputs: list[str], out: str | Path, **options: Any) -> int:
        """Predictions for new rows, in a csv or parquet file; how many."""
        from adumbra.data.rows import Encoding
        from adumbra.evaluation.predict import predict

        description = json.loads((self.path / MODEL / ENCODING).read_text())
        encoding = Encoding.read(description, self.path / MODEL / TOKENS)
        return predict(self.model(), encoding, inputs, Path(out), **options)


def plan(config: Config, store: Store) -> Plan:
    """What a configuration would do on a store, and what it would cost; reads no row."""
    kind = store.description["label"]["kind"]
    randomised = config.method.kind == "label-dp" or (config.method.kind == "hybrid" and config.method.split > 0)
    classes = labels.classes_for(kind, config.label_phase.max_label) if randomised else 2
    counts = () if store.stand_in else tuple(c for c in store.ledger.charges if c.run == "prepare")
    if config.privacy.adjacency == "replace-example" and config.method.kind != "none" and not store.stand_in:
        _check_nothing_was_counted_exactly(store)
    return make(config, store.splits["train"], classes, counts)


def _check_nothing_was_counted_exactly(store: Store) -> None:
    for feature in store.description["tokens"] + store.description["numbers"]:
        column = next(c for c in store.description["recipe"]["columns"] if c["name"] == feature["column"])
        counted = feature.get("encoding") == "vocabulary" or column.get("bounds") == "counted"
        if feature["tower"] == "public" and counted:
            raise InputError(
                f"privacy.adjacency = 'replace-example' protects public features too, but values of '{feature['name']}'"
                " were counted exactly: declare such columns sensitive, or hash them"
            )


def fit(
    config: Config,
    out: str | Path,
    *,
    resume: bool = False,
    device: str = "cpu",
    metrics: str | None = None,
    progress: Progress = lambda *_: None,
    note: Callable[[str], None] = lambda _: None,
) -> Run:
    """Trains what `config` says and releases it in the folder `out`.

    What leaves is the model, its statement and metrics on held-out rows. Everything computed from protected training
    rows is charged first, in the store's ledger and in the run's own. `metrics` names a held-out split whose AUC is
    shown at each checkpoint.
    """
    out = Path(out)
    config = config.model_copy(update={"data": configuration.Data(store=config.data.store.absolute())})
    store = Store.open(config.data.store)
    inputs.check_suits(config.model.kind, store)
    planned = plan(config, store)
    rows = Rows.of(store.split("train"), _device(device))
    layout = inputs.layout(store)
    model = build.build(config.model, layout, config.seed).to(device)
    _check(config, store, planned, model, metrics)
    if config.start is not None:
        build.start_from(config.start.run / MODEL, model)
    if planned.private and planned.delta > 1 / planned.units * (1 + 1e-9):
        note(f"warning: delta {planned.delta:.3g} is above 1/n = {1 / planned.units:.3g}: see the statement")
    state = _begin(out, config, store, planned, resume)
    if (out / "statement.json").exists():
        return Run.open(out)
    noise = insecure_repeatable(config.seed) if config.privacy.noise == "insecure-repeatable" else Noise()
    own = Ledger.open(out / LEDGER)
    protected = planned.private and not store.stand_in
    ledgers = (store.ledger, own) if protected else (own,)
    kind = store.description["label"]["kind"]
    truncated = planned.labels is not None and planned.dp_sgd is None

    def look(_: str) -> None:
        if metrics is not None:
            model.eval()
            found = evaluate(model.truncated if truncated else model, store.split(metrics), kind, device=device)
            note(f"{metrics}: {found.as_json()}")

    records = Records(out, state["id"], model, ledgers, progress, look, config.dp_phase.batch_size)

    def label_estimate() -> Tensor:
        assert planned.labels is not None
        # A stand-in protects nothing: each run draws its own labels, so that seeds differ.
        folder = out / "released" if store.stand_in else store.path / "released"
        train_labels = np.asarray(store.split("train")["label"])
        charge = planned.charge_for_labels(noise.bits, state["id"])
        answers = labels.released(
            folder, train_labels, planned.labels, planned.unit, noise.bits, lambda: records.charge_for_labels(charge)
        )
        return labels.estimate(answers, planned.labels, config.label_phase.loss == "debiased")

    loss = LOSSES[config.loss or SUITS[kind]]
    with _alone(out):
        train(planned, model, rows, loss, config, records, label_estimate, noise)
        try:
            source = noise.source_on(rows.device.type)
            return _release(out, config, store, planned, model, layout, truncated, records, source)
        except (OSError, SafetensorError) as error:
            raise _unwritten(out, error) from None


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device '{name}' is not here: {str(error).splitlines()[0]}") from None


def _check(config: Config, store: Store, planned: Plan, model: TwoTowers, metrics: str | None) -> None:
    """What can be refused is refused before a folder is made or anything is charged."""
    if missing := [name for name in CONTRACT if not hasattr(model, name)]:
        raise InputError(f"model.kind = '{config.model.kind}': a {type(model).__name__} has no '{missing[0]}'")
    if metrics is not None and (metrics == "train" or metrics not in store.splits):
        held_out = ", ".join(name for name in store.splits if name != "train")
        raise InputError(f"--metrics {metrics}: not a held-out split of this store (there are: {held_out})")
    if planned.labels is not None or not planned.private:
        optimizer_for(model, config.label_phase)
    if planned.dp_sgd is not None:
        check_supported(model)
        optimizer_for(model, config.dp_phase)
    if config.start is not None:
        before = Run.open(config.start.run).statement
        covers = {planned.adjacency, Adjacency.REPLACE_EXAMPLE} if planned.adjacency.replaces else {planned.adjacency}
        if planned.private and before.adjacency not in covers and not before.stand_in:
            raise InputError(
                f"{config.start.run}: was trained under {before.adjacency}, which says nothing under"
                f" {planned.adjacency}: the two do not compose"
            )


def _unwritten(out: Path, error: OSError | SafetensorError) -> WorkError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else "the disk may be full"
    return WorkError(f"{out}: cannot be written ({reason}); free some space and go on with --resume")


def _begin(out: Path, config: Config, store: Store, planned: Plan, resume: bool) -> dict[str, Any]:
    """The run's folder and identity; refuses what the budget of the store does not hold before anything starts."""
    digest = {"store": store.description["digest"], "config": config.model_dump(mode="json")}
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; choose another --out")
    if out.exists() and any(out.iterdir()) and not (resume and _hardly_begun(out)):
        if not resume:
            raise InputError(f"{out}: exists already; choose another --out, or continue it with --resume")
        try:
            state = json.loads((out / STATE).read_text())
            begun_with = state["inputs"]
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{out}: not a run that can be resumed") from None
        if begun_with != json.loads(json.dumps(digest)):
            raise InputError(f"{out}: was begun with another configuration or store; --resume needs the same ones")
        return state
    if planned.private and not store.stand_in:
        store.ledger.check_budget(*planned.own)
    try:
        (out / "checkpoints").mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from None
    state = {"id": uuid.uuid4().hex, "inputs": digest}
    try:
        os.chmod(out, 0o700)
        (out / CONFIG).write_text(toml.dump(config.model_dump(mode="json", exclude_none=True)))
        (out / LEDGER).unlink(missing_ok=True)
        Ledger.create(out / LEDGER)
        draft = out / (STATE + ".draft")
        draft.write_text(json.dumps(state))
        draft.rename(out / STATE)
    except OSError as error:
        raise _unwritten(out, error) from None
    return state


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Two processes that resume one run would both spend what is left of it."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{out}: another process is training this run") from None
        yield


def _hardly_begun(out: Path) -> bool:
    """Whether a crash took the run before it had an identity, and so before anything could be charged."""
    first = {"checkpoints", CONFIG, LEDGER, STATE + ".draft"}
    names = {file.name for file in out.iterdir() if not file.name.startswith(f".{LEDGER}.")}
    return names <= first and not any((out / "checkpoints").glob("*"))


def _release(
    out: Path,
    config: Config,
    store: Store,
    planned: Plan,
    model: TwoTowers,
    layout: Any,
    truncated: bool,
    records: Records,
    noise: str,
) -> Run:
    build.save(out / MODEL, model, config.model, layout, truncated)
    _keep_encoding(out / MODEL, store)
    statement = _statement(config, store, planned, records.lost, noise)
    (out / "statement.md").write_text(statement.to_markdown())
    draft = out / "statement.json.draft"
    draft.write_text(json.dumps(statement.to_json(), indent=1) + "\n")
    draft.rename(out / "statement.json")
    return Run(out)


def _statement(config: Config, store: Store, planned: Plan, lost: int, noise: str) -> Statement:
    steps = 0 if planned.dp_sgd is None else planned.dp_sgd.steps
    epsilon, delta = planned.claim
    own = Statement(
        epsilon,
        delta,
        planned.adjacency,
        planned.unit,
        planned.units,
        config.method.kind,
        planned.charges,
        noise,
        planned.accountant,
        store_total=store.ledger.total() if planned.private and not store.stand_in else None,
        stand_in=store.stand_in is not None,
        planned_steps=steps,
        steps=steps - lost,
        lost_steps=lost,
    )
    return own if config.start is None else _after(own, Run.open(config.start.run).statement, config.start.disjoint)


def _after(own: Statement, before: Statement, disjoint: bool) -> Statement:
    """The claim of a run that starts from a released model: both runs in sequence, or, where no impression is in both
    stores, in parallel."""
    parallel = disjoint and own.unit is Unit.IMPRESSION is before.unit
    words = "in parallel: the stores were declared disjoint" if parallel else "in sequence"
    if before.stand_in:
        note = "Started from a model of a stand-in log (generated or public), which needed no protection."
        return replace(own, notes=(*before.notes, note))
    note = (
        f"Started from a run with epsilon {before.epsilon:.6g}, delta {before.delta:.3g} (this one alone: epsilon"
        f" {own.epsilon:.6g}, delta {own.delta:.3g}); the two are composed {words}."
    )
    if parallel:
        larger = max(own, before, key=lambda claim: claim.epsilon)
        return replace(
            own,
            epsilon=larger.epsilon,
            delta=max(own.delta, before.delta),
            charges=larger.charges,
            notes=(*before.notes, note),
        )
    return replace(
        own,
        epsilon=own.epsilon + before.epsilon,
        delta=own.delta + before.delta,
        charges=(*before.charges, *own.charges),
        stand_in=own.stand_in and before.stand_in,
        notes=(*before.notes, note),
    )


def _keep_encoding(folder: Path, store: Store) -> None:
    shutil.copyfile(store.path / "vocabulary" / "tokens.parquet", folder / TOKENS)
    about = {name: store.description[name] for name in ("recipe", "tokens", "numbers", "table_rows")}
    (folder / ENCODING).write_text(json.dumps(about) + "\n")
    for name in (TOKENS, ENCODING):
        os.chmod(folder / name, 0o600)
