"""A model over a split of a store: contiguous slices of memory-mapped arrays, read while the model computes."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from adumbra.data.store import Split
from adumbra.errors import InputError
from adumbra.evaluation.metrics import Kind, Tally, reliability, summary
from adumbra.evaluation.slices import Slicing
from adumbra.models.towers import Batch

BATCH = 8192
_CHUNK = 1 << 17
"""Rows that are tallied at a time."""

Model = Callable[[Batch], Tensor]
"""Gives a logit a row: a model, or its `truncated`."""
T = TypeVar("T")


class Progress(Protocol):
    def __call__(self, stage: str, done: int, total: int, rows: int) -> None: ...


@dataclass(frozen=True)
class Evaluation:
    """A model's metrics on one split, and on the slices of it that were asked for, the largest first."""

    tally: Tally
    slicing: Slicing | None = None
    slices: list[tuple[str, Tally]] = field(default_factory=list)

    def as_json(self, bins: int = 0) -> dict[str, Any]:
        """What `evaluate --json` prints; with `bins`, the reliability curve too."""
        said: dict[str, Any] = dict(summary(self.tally))
        if bins:
            said["reliability"] = reliability(self.tally, bins)
        if self.slicing is not None:
            said["slices"] = self.slicing.as_json(self.slices)
        return said


def evaluate(
    model: Model,
    split: Split,
    kind: Kind = "binary",
    *,
    batch_size: int = BATCH,
    device: str | torch.device | None = None,
    slicing: Slicing | None = None,
    unprotected: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """The metrics of a model on a held-out split.

    They are exact, so the rows that they are of get no protection: a split that trains is refused unless
    `unprotected` says that this is known (privacy.md, rule 3).
    """
    if split.name == "train" and not unprotected:
        raise InputError("metrics on the training rows are not private; evaluate validation or test rows")
    tally, parts = Tally.empty(kind), slicing.begin(split, kind) if slicing is not None else None
    for first, logits in infer(model, split, batch_size=batch_size, device=device):
        labels = split["label"][first : first + len(logits)]
        tally += Tally.of(logits, labels, kind)
        if parts is not None:
            parts.add(first, logits, labels)
        if progress is not None:
            progress("evaluating", first + len(logits), len(split), first + len(logits))
    return Evaluation(tally, slicing, parts.tallies() if parts is not None else [])


def infer(
    model: Model, split: Split, *, batch_size: int = BATCH, device: str | torch.device | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """The logits (float32) of a split's rows in their order, many batches at a time, each with its first row. Batches
    go to `device`, or else to where the model's parameters are."""
    if batch_size < 1:
        raise InputError(f"a batch of {batch_size} rows: it has at least one")
    target = _device_of(model) if device is None else torch.device(device)
    starts = range(0, len(split), batch_size)
    batches = ahead(batch_of(split, start, min(start + batch_size, len(split)), target) for start in starts)
    held, first, rows = [], 0, 0
    with evaluating(model):
        for batch in batches:
            held.append(_logits(model, batch))
            rows += len(batch.public)
            if rows - first >= _CHUNK or rows == len(split):
                yield first, torch.cat(held).cpu().numpy()
                held, first = [], rows


def batch_of(arrays: Split | Mapping[str, np.ndarray], start: int, stop: int, device: torch.device) -> Batch:
    """Rows `start` to `stop` of a split."""

    def part(name: str) -> Tensor:
        return torch.from_numpy(np.array(arrays[name][start:stop])).to(device)  # copied: the map is read-only

    return Batch(part("public"), part("sensitive"), part("numbers_public"), part("numbers_sensitive"))


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made in a thread of its own while the one before is used."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


@torch.inference_mode()
def _logits(model: Model, batch: Batch) -> Tensor:
    logits = model(batch)
    if logits.shape != (len(batch.public),):
        raise InputError(f"the model's output has shape {tuple(logits.shape)}: a logit a row is {len(batch.public)}")
    return logits.float()


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """A module in its evaluation mode (no dropout), and back."""
    module = _module_of(model)
    training = module is not None and module.training
    try:
        if module is not None:
            module.eval()
        yield
    finally:
        if module is not None:
            module.train(training)


def _module_of(model: Model) -> nn.Module | None:
    """The module itself, or the one whose method (`truncated`) was given."""
    owner = getattr(model, "__self__", model)
    return owner if isinstance(owner, nn.Module) else None


def _device_of(model: Model) -> torch.device:
    module = _module_of(model)
    parameter = next(module.parameters(), None) if module is not None else None
    return torch.device("cpu") if parameter is None else parameter.device
