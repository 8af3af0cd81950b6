"""From a configuration to a model, and from a model to files and back."""

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
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

KINDS = ("fm", "mlp", "dnn", "ffn", "logistic")


def build(model: configuration.Model, layout: Layout, seed: int) -> TwoTowers:
    """A new model; the seed governs its initial weights."""
    sizes = {name: value for name, value in (("dim", model.dim), ("hidden", model.hidden)) if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        match model.kind:
            case "fm":
                sizes.pop("hidden", None)
                made = FactorizationMachine(**sizes, sigma_init=model.sigma_init, embedding_decay=model.embedding_decay)
            case "mlp":
                made = MLP(**sizes)
            case "dnn":
                made = DNN(hidden=(sizes.get("hidden", 598),) * 4)
            case "ffn":
                made = FFN(dim=sizes.get("dim", 8))
            case "logistic":
                made = Logistic()
            case dotted:
                made = _imported(dotted)
        return made.build(layout)


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
    except (OSError, ValueError, KeyError, RuntimeError) as error:
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
