"""The Python face: a store, a method with its budget, a model; a run comes back."""

import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adumbra import schema as schemas
from adumbra.config import Config
from adumbra.data.store import Store
from adumbra.models import DNN, FFN, MLP, FactorizationMachine, Logistic
from adumbra.schema import Recipe
from adumbra.training import run as runs
from adumbra.training.build import KINDS
from adumbra.training.run import Run

Model = FactorizationMachine | MLP | DNN | FFN | Logistic


class Schema(Recipe):
    """A recipe: every column of a raw log with its role."""

    @classmethod
    def from_toml(cls, name_or_path: str | Path) -> "Schema":
        """From a file, or one of those that ship by its name."""
        return cls.model_validate(schemas.load(name_or_path).model_dump(by_alias=True))


@dataclass(frozen=True)
class Method:
    """A budget and how it is spent. `label_phase`, `dp_phase` and `privacy` take the keys of the configuration."""

    epsilon: float
    delta: float | str = "1/n"
    privacy: dict[str, Any] = field(default_factory=dict, kw_only=True)
    label_phase: dict[str, Any] = field(default_factory=dict, kw_only=True)
    dp_phase: dict[str, Any] = field(default_factory=dict, kw_only=True)

    def method(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class Hybrid(Method):
    """Label DP on the truncated model, then DP-SGD on the whole one; `split` of epsilon goes to the labels."""

    split: float = field(default=0.25, kw_only=True)
    public_tower: str = field(default="fine-tuned", kw_only=True)

    def method(self) -> dict[str, Any]:
        return {"kind": "hybrid", "split": self.split, "public_tower": self.public_tower}


@dataclass(frozen=True)
class DPSGD(Method):
    """DP-SGD on all features."""

    def method(self) -> dict[str, Any]:
        return {"kind": "dp-sgd"}


@dataclass(frozen=True)
class LabelDP(Method):
    """Randomised response on the label; public features only."""

    def method(self) -> dict[str, Any]:
        return {"kind": "label-dp"}


@dataclass(frozen=True)
class NonPrivate(Method):
    """The reference without privacy."""

    epsilon: float = 1.0

    def method(self) -> dict[str, Any]:
        return {"kind": "none"}


def prepare(schema: Recipe | str, source: str | Path | list[str], out: str | Path, **options: Any) -> Store:
    """Makes a store of a raw log: see `adumbra prepare`."""
    from adumbra.data.prepare import prepare as make

    recipe = schema if isinstance(schema, Recipe) else schemas.load(schema)
    paths = [str(path) for path in source] if isinstance(source, list) else [str(source)]
    return make(recipe, paths, out, **options)


def fit(
    data: Store,
    method: Method,
    model: Model | str | None = None,
    *,
    out: str | Path | None = None,
    seed: int = 0,
    **options: Any,
) -> Run:
    """Trains `model` on a store by `method` and releases it in the folder `out`, by default a new one beside the store.

    `model` is one of ours, or the dotted path of a function that makes a module of yours from a layout. `options` are
    those of `adumbra.training.run.fit`: resume, device, metrics, progress.
    """
    config = Config.model_validate(
        {
            "data": {"store": str(data.path)},
            "model": _model(model or FactorizationMachine()),
            "privacy": {"epsilon": method.epsilon, "delta": method.delta, **method.privacy},
            "method": method.method(),
            "label_phase": method.label_phase,
            "dp_phase": method.dp_phase,
            "seed": seed,
        }
    )
    return runs.fit(config, out or data.path.with_name(f"{data.path.name}-run-{uuid.uuid4().hex[:8]}"), **options)


def _model(model: Model | str) -> dict[str, Any]:
    if isinstance(model, str):
        return {"kind": model}
    kind = next(name for name, described in KINDS.items() if type(model) is described)
    return {"kind": kind, **asdict(model)}
