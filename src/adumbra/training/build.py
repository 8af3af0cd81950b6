"""From a configuration to a model, and from a model to files and back."""

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from adumbra import config as configuration
from adumbra.errors import InputError
from adumbra.models import (
    DNN,
    FFN,
    MLP,
    FactorizationMachine,
    Field,
    Layout,
    Logistic,
    TowerLayout,
    TwoTowers,
)

KINDS = {"fm": FactorizationMachine, "mlp": MLP, "dnn": DNN, "ffn": FFN, "logistic": Logistic}


def build(model: configuration.Model, layout: Layout, seed: int) -> TwoTowers:
    """A new model; the seed governs its initial weights."""
    made = _imported(model.kind) if model.kind not in KINDS else KINDS[model.kind](**_settings(model))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return made.build(layout)


def _settings(model: configuration.Model) -> dict[str, Any]:
    """What the configuration sets of a model's own fields. One width stands for every hidden layer."""
    kind = KINDS[model.kind]
    given = {f.name: value for f in fields(kind) if (value := getattr(model, f.name)) is not None}
    other = [
        name
        for name in ("dim", "hidden", "sigma_init", "embedding_decay")
        if name not in {f.name for f in fields(kind)}
    ]
    if unused := [name for name in other if getattr(model, name) is not None]:
        raise InputError(f"model.{unused[0]} is not a setting of '{model.kind}'")
    layers = getattr(kind(), "hidden", None)
    if isinstance(layers, tuple) and isinstance(given.get("hidden"), int):
        given["hidden"] = (given["hidden"],) * len(layers)
    if isinstance(layers, int) and isinstance(given.get("hidden"), tuple):
        raise InputError(f"model.hidden of '{model.kind}' is one width")
    return given


class _Own:
    """A model of somebody's own: a function or class that takes the layout."""

    def __init__(self, make: Callable[[Layout], TwoTowers]) -> None:
        self.build = make


def _imported(dotted: str) -> _Own:
    module, _, name = dotted.rpartition(".")
    if not module:
        raise InputError(f"model.kind = '{dotted}': one of {', '.join(KINDS)}, or a dotted path to a module of yours")
    try:
        return _Own(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise InputError(f"model.kind = '{dotted}': {error}") from None


def save(folder: Path, model: TwoTowers, about: configuration.Model, layout: Layout, truncated: bool) -> None:
    """The released weights, and what makes a module of them again."""
    folder.mkdir(mode=0o700, exist_ok=True)
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "weights.safetensors")
    text = {"model": about.model_dump(), "layout": asdict(layout), "truncated": truncated}
    (folder / "model.json").write_text(json.dumps(text, indent=1) + "\n")
    for file in folder.iterdir():
        os.chmod(file, 0o600)


def load(folder: Path) -> tuple[TwoTowers, bool]:
    """A released model, and whether it is to be read without its sensitive tower."""
    try:
        about = json.loads((folder / "model.json").read_text())
        layout = _layout(about["layout"])
        model = build(configuration.Model(**about["model"]), layout, seed=0)
        model.load_state_dict(load_file(folder / "weights.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{folder}: no released model, or a damaged one ({type(error).__name__})") from None
    return model.eval(), about["truncated"]


def start_from(folder: Path, model: TwoTowers) -> None:
    """Takes a released model's weights over into one of the same form."""
    released, _ = load(folder)
    try:
        model.load_state_dict(released.state_dict())
    except RuntimeError:
        raise InputError(
            f"{folder}: its model has another form than this run's; the same model.kind, and a store with the same"
            " encodings, are needed"
        ) from None


def _layout(raw: dict[str, Any]) -> Layout:
    towers = {}
    for name, tower in raw.items():
        fields = tuple(Field(**field) for field in tower["fields"])
        towers[name] = TowerLayout(fields, tower["numbers"])
    return Layout(**towers)
