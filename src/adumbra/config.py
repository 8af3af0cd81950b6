"""One run's configuration: one TOML file, one typed tree. Unknown keys are refused."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from adumbra import toml
from adumbra.toml import Tree

Optimizer = Literal["sgd", "momentum", "adam", "adamw", "yogi", "adagrad", "rmsprop"]
Schedule = Literal["cosine", "constant"]


class Data(Tree):
    store: Path
    """The store that `adumbra prepare` made."""


class Model(Tree):
    kind: str = "fm"
    """fm, mlp, dnn, ffn, logistic, or the dotted path to a module of yours."""
    dim: int | None = Field(default=None, ge=1)
    """fm, mlp (32 by default), ffn (8): the width of an embedding."""
    hidden: int | tuple[int, ...] | None = None
    """mlp (598 by default), dnn (4 × 598), ffn (128, 64): the width of the layers."""
    sigma_init: float | None = Field(default=None, gt=0)
    """fm (0.01 by default): the standard deviation of initial weights."""
    embedding_decay: float | None = Field(default=None, ge=0)
    """fm (0 by default): the weight μ of the embeddings' squares; depends on no example, so it costs no privacy."""

    @field_validator("hidden")
    @classmethod
    def _widths(cls, value: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
        if value is not None and (not value or min(value if isinstance(value, tuple) else (value,)) < 1):
            raise ValueError("hidden layers are at least 1 wide")
        return value


class Privacy(Tree):
    epsilon: float = Field(gt=0)
    """The total, counts included."""
    delta: float | Literal["1/n"] = "1/n"
    """A number, or one over the number of protected units."""
    adjacency: Literal["replace-sensitive", "replace-example", "zero-out", "add-or-remove"] = "replace-sensitive"
    unit: Literal["impression", "user", "user-publisher", "user-advertiser"] = "impression"
    accountant: Literal["pld", "rdp"] = "pld"
    noise: Literal["operating-system", "insecure-repeatable"] = "operating-system"

    @field_validator("adjacency", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        if value in ("public-features", "dp-with-public-features"):
            raise ValueError(
                "DP with public features protects which example holds which public value; randomised labels, released"
                " one an example and in order, would tell. Use replace-sensitive, or replace-example with dp-sgd"
            )
        return value

    @field_validator("delta")
    @classmethod
    def _a_probability(cls, value: float | str) -> float | str:
        if not isinstance(value, str) and not 0 < value < 1:
            raise ValueError(f"delta is '1/n' or a number between 0 and 1, not {value:g}")
        return value


class Method(Tree):
    kind: Literal["hybrid", "dp-sgd", "label-dp", "none"] = "hybrid"
    split: float = Field(default=0.25, ge=0, le=1)
    """hybrid: the share of epsilon that the label phase gets."""
    public_tower: Literal["fine-tuned", "frozen"] = "fine-tuned"


class Phase(Tree):
    epochs: float = Field(gt=0)
    batch_size: int = Field(default=16384, ge=1)
    optimizer: Optimizer = "adam"
    learning_rate: float = Field(default=3e-4, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    schedule: Schedule = "cosine"
    warmup: float = Field(default=0.0, ge=0, lt=1)
    """The share of steps over which the rate rises from zero."""
    weight_decay: float = Field(default=0.0, ge=0)


class LabelPhase(Phase):
    epochs: float = Field(default=10, gt=0)
    loss: Literal["debiased", "plain"] = "debiased"
    """debiased: unbiased for the true label (000, section 4)."""
    max_label: int | None = Field(default=None, ge=1, le=65535)
    """Counts: the declared most; larger counts are randomised as that many."""


class DpPhase(Phase):
    epochs: float = Field(default=50, gt=0)
    sampling: Literal["poisson", "truncated-poisson", "shuffle"] = "poisson"
    clip_norm: float = Field(default=20.0, gt=0)
    microbatch: int = Field(default=1, ge=1)
    """Examples whose average gradient is clipped together."""
    physical_batch: int | None = Field(default=None, ge=1)
    """The most examples held in memory at once; the result does not depend on it."""


class Start(Tree):
    run: Path
    """A released run whose model this one starts from; its statement composes the two."""
    disjoint: bool = False
    """No unit is in both stores: then each pays for its own run only."""


class Config(Tree):
    data: Data
    start: Start | None = None
    model: Model = Model()
    privacy: Privacy
    method: Method = Method()
    label_phase: LabelPhase = LabelPhase()
    dp_phase: DpPhase = DpPhase()
    loss: Literal["binary-cross-entropy", "poisson", "squared"] | None = None
    """By default the one that suits the label's kind."""
    seed: int = 0
    """Governs initial weights and the label phase's order; never noise or sampling."""


def load(path: Path, changes: tuple[str, ...] = ()) -> Config:
    """A configuration from its file, with `--set section.key=value` changes."""
    raw = toml.read(path)
    for change in changes:
        toml.change(raw, change)
    return toml.parse(raw, Config, str(path))
