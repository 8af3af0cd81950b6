"""The randomised labels of a store: charged, drawn once, kept beside it, reused by every run (privacy.md, rule 6)."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adumbra.errors import InputError, WorkError
from adumbra.privacy.noise import OPERATING_SYSTEM, SecretBits
from adumbra.privacy.randomizers import RandomizedResponse


def classes_for(kind: str, most: int | None) -> int:
    """How many values a label can take, as the label phase sees it."""
    if kind == "binary":
        return 2
    if kind == "count" and most is not None:
        return most + 1
    if kind == "count":
        raise InputError("counts need label_phase.max_label, a declared most: larger counts are taken as that many")
    raise InputError("a real-valued label cannot be randomised here; use method.kind = 'dp-sgd'")


def released(
    folder: Path,
    labels: np.ndarray,
    randomizer: RandomizedResponse,
    unit: str,
    bits: SecretBits,
    charge: Callable[[], None],
) -> np.ndarray:
    """The answers of `randomizer` about a store's training labels: those in `folder`, or ones drawn now.

    A draw is charged before it is made and on disk, for good, before it is used: one that a crash took between the two
    has left nothing behind.
    """
    drawn = "" if bits.source == OPERATING_SYSTEM else f"-{bits.source}"  # what a seed drew protects nobody
    path = folder / f"labels-{unit}-{randomizer.mechanism}-{randomizer.classes}-{randomizer.epsilon!r}{drawn}.npy"
    if path.exists():
        try:
            answers = np.load(path)
        except (OSError, ValueError, EOFError):
            raise InputError(
                f"{path}: damaged; restore it from a copy, or train at another epsilon or split, which draws anew"
            ) from None
        if len(answers) == len(labels):
            return answers
        raise InputError(f"{path}: holds answers about {len(answers)} rows, not {len(labels)}")
    charge()
    clamped = np.minimum(labels, randomizer.classes - 1).astype(np.int64)
    answers = randomizer.release(clamped, bits).astype(np.uint8 if randomizer.classes <= 256 else np.uint16)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        draft = path.with_suffix(".draft")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            np.save(file, answers)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
        sync_folder(folder)
    except OSError as error:
        raise WorkError(f"{path}: cannot be written ({error.strerror}); the labels are charged") from None
    return answers


def sync_folder(folder: Path) -> None:
    """Makes a rename in it last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def estimate(answers: np.ndarray, randomizer: RandomizedResponse, debiased: bool) -> Tensor:
    """For each answer an unbiased estimate of the label (000 §4), or the answer itself."""
    values = np.arange(randomizer.classes, dtype=np.float64)
    if debiased:
        values = randomizer.debias @ values
    return torch.from_numpy(values.astype(np.float32)[answers])
