"""A run's state on disk: enough to go on, and nothing that tells who was sampled.

A checkpoint holds released or noised state only (parameters, moments, how many steps were charged and made): no key, no
sampler, no batch. It replaces the one before in one rename, so one is always whole.
"""

import os
from pathlib import Path
from typing import Any

import torch

from adumbra.errors import InputError, WorkError

VERSION = 1


def save(path: Path, state: dict[str, Any]) -> None:
    draft = path.with_name(path.name + ".draft")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            torch.save({"version": VERSION, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
        draft.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "the disk may be full"
        raise WorkError(f"{path}: cannot be written ({reason}); free some space and go on with --resume") from None


def load(path: Path, run: str) -> dict[str, Any] | None:
    """The state of the run with this id; None where there is no checkpoint yet."""
    if not path.exists():
        return None
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception:
        raise InputError(f"{path}: damaged; start the run anew in another folder") from None
    if state.get("version") != VERSION:
        raise InputError(f"{path}: a checkpoint of version {state.get('version')}; this adumbra reads {VERSION}")
    if state.get("run") != run:
        raise InputError(f"{path}: belongs to another run")
    return state
