"""The encoded store: memory-mapped arrays that are all training reads, and `store.json`, which says what they are.

Reading a store needs NumPy alone.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from adumbra.errors import InputError
from adumbra.privacy.ledger import Head, Ledger

VERSION = 1
ARRAYS = (
    "public",
    "sensitive",
    "numbers_public",
    "numbers_sensitive",
    "label",
    "user",
    "publisher",
    "advertiser",
    "time",
)
DESCRIPTION, LEDGER, RECIPE, TOKENS = "store.json", "ledger.jsonl", "recipe.toml", "vocabulary/tokens.parquet"
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Split:
    """One part of a log: an array for each of ARRAYS that the store has."""

    name: str
    rows: int
    arrays: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        """An array; one of a tower that has no such features has no columns."""
        if name in ("public", "sensitive", "numbers_public", "numbers_sensitive") and name not in self.arrays:
            kind = np.float32 if name.startswith("numbers") else np.int32
            return np.zeros((self.rows, 0), kind)
        return self.arrays[name]

    def __len__(self) -> int:
        return self.rows


class Store:
    """A finished store. `open` refuses one whose files are missing or of another size; `verify` reads them all."""

    def __init__(self, path: Path, description: dict[str, Any]) -> None:
        self.path = path
        self.description = description

    @staticmethod
    def open(path: str | Path) -> "Store":
        path = Path(path)
        if not (path / DESCRIPTION).is_file():
            if unfinished(path).exists():
                raise InputError(f"{path}: the store is unfinished; continue with `adumbra prepare … --resume`")
            raise InputError(f"{path}: not a store (no {DESCRIPTION})")
        try:
            description = json.loads((path / DESCRIPTION).read_bytes())
            body = {key: value for key, value in description.items() if key != "digest"}
            if description["version"] != VERSION:
                raise InputError(f"{path}: a store of version {description['version']}; this adumbra reads {VERSION}")
            if description["digest"] != digest_of(body):
                raise InputError(f"{path}/{DESCRIPTION}: changed since the store was made; prepare it again")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(f"{path}/{DESCRIPTION}: damaged; prepare the store again") from None
        store = Store(path, description)
        if store.purged:
            return store
        for name, entry in store.description["files"].items():
            file = path / name
            if not file.is_file():
                raise InputError(f"{file}: missing; prepare the store again")
            if file.stat().st_size != entry["bytes"]:
                raise InputError(
                    f"{file}: {file.stat().st_size} bytes, expected {entry['bytes']}; prepare the store again"
                )
        return store

    def verify(self) -> "Store":
        """Reads every file and compares it with the digest that was taken when it was written."""
        if not self.purged:
            for name, entry in self.description["files"].items():
                with (self.path / name).open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                        raise InputError(f"{self.path / name}: changed since the store was made; prepare it again")
        return self

    @property
    def purged(self) -> bool:
        return (self.path / "purged.json").exists()

    @cached_property
    def ledger(self) -> Ledger:
        head = self.description["ledger_head"]
        return Ledger.open(self.path / LEDGER, Head(*head))

    @property
    def stand_in(self) -> str | None:
        """`generated` or `public`: this log needs no protection, and nothing is charged."""
        return self.description["stand_in"]

    @property
    def splits(self) -> dict[str, int]:
        return self.description["splits"]

    def split(self, name: str) -> Split:
        """A split's arrays, memory-mapped (copy on write: nothing reaches the disk)."""
        if self.purged:
            raise InputError(f"{self.path}: the store's rows were purged")
        if name not in self.splits:
            raise InputError(f"{self.path}: no split '{name}' (there are: {', '.join(self.splits)})")
        arrays = {
            array: np.load(file, mmap_mode="c")
            for array in ARRAYS
            if (file := self.path / name / f"{array}.npy").exists()
        }
        return Split(name, self.splits[name], arrays)


def unfinished(path: Path) -> Path:
    """Where a store is built before it takes its name."""
    return path.parent / f"{path.name}.partial"


def digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write_description(folder: Path, body: dict[str, Any]) -> None:
    """`store.json`, with the digests of all that stands in the folder and of itself."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in (LEDGER, DESCRIPTION))
    body = body | {"version": VERSION, "files": {str(file.relative_to(folder)): _entry(file) for file in files}}
    text = json.dumps(body | {"digest": digest_of(body)}, indent=1)
    descriptor = os.open(folder / DESCRIPTION, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
