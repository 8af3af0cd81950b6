"""What the pass over the raw text leaves for the rest: encoded blocks, new tokens, and a journal of what is complete.

A block counts once its line is in the journal; the tokens it uses are on disk before that. So after a kill at any
moment the journal says from which block on to go over the text again.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adumbra.data.encode import Encoded, Encoder
from adumbra.data.tokens import TokenTable
from adumbra.schema import KEYS


@dataclass(frozen=True)
class Entry:
    """One block in the journal."""

    block: int
    file: int
    rows: int
    skipped: int
    cut: int
    tokens: list[int]
    """The size of each table when the block was complete."""


class Spool:
    """A folder of encoded blocks."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder = folder
        self.encoder = encoder
        self.journal = folder / "journal.jsonl"
        self.entries: list[Entry] = []

    def resume(self) -> "Spool":
        """Takes up what is complete: the journal's whole lines, and the tokens that they speak of."""
        lines = self.journal.read_bytes().split(b"\n")[:-1] if self.journal.exists() else []
        self.entries = [Entry(**json.loads(line)) for line in lines]
        if self.journal.exists():
            os.truncate(self.journal, sum(len(line) + 1 for line in lines))
        sizes = self.entries[-1].tokens if self.entries else [1] * len(self._tables())
        for (place, table), size in zip(self._tables(), sizes, strict=True):
            hashes, lengths, _ = self.tokens(place, size - 1)
            for path, kept in zip(
                self._token_files(place), (8 * len(hashes), 8 * len(hashes), lengths.sum()), strict=True
            ):
                if path.exists():
                    os.truncate(path, int(kept))
            table.restore(hashes)
        return self

    def _tables(self) -> list[tuple[int, TokenTable]]:
        return [(place, table) for place, table in enumerate(self.encoder.tables) if table is not None]

    def _token_files(self, place: int) -> tuple[Path, Path, Path]:
        return tuple(self.folder / f"tokens-{place}.{part}" for part in ("hash", "length", "text"))  # pyright: ignore[reportReturnType]

    def tokens(self, place: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Hashes, lengths and text of a table's first tokens, by id from 2 on."""
        hashes, lengths, text = self._token_files(place)
        if count == 0:
            return np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.uint8)
        sizes = np.fromfile(lengths, np.int64, count)
        return np.fromfile(hashes, np.uint64, count), sizes, np.fromfile(text, np.uint8, int(sizes.sum()))

    def path(self, block: int) -> Path:
        return self.folder / f"block-{block:06d}"

    def write(self, block: int, encoded: Encoded) -> None:
        """The block's arrays, each in the smallest integers that hold it, behind one line that says what they are. May
        run in any order."""
        arrays = [ids.astype(_smallest(ids)) for ids in encoded.ids]
        arrays += [*encoded.numbers, *encoded.keys.values(), encoded.label]
        with self.path(block).open("wb") as file:
            file.write(json.dumps([[array.dtype.str, array.shape] for array in arrays]).encode() + b"\n")
            for array in arrays:
                file.write(np.ascontiguousarray(array).data)

    def complete(self, block: int, file: int, encoded: Encoded) -> None:
        """Records a written block; in the order of blocks."""
        for place, table in self._tables():
            for path, part in zip(self._token_files(place), table.take_new(), strict=True):
                if len(part):
                    with path.open("ab") as stream:
                        stream.write(part.tobytes())
        sizes = [table.logged for _, table in self._tables()]
        entry = Entry(block, file, len(encoded.label), encoded.skipped, encoded.cut, sizes)
        with self.journal.open("ab") as stream:
            stream.write(json.dumps(vars(entry)).encode() + b"\n")
        self.entries.append(entry)

    def read(self, entry: Entry) -> list[np.ndarray]:
        """A block's arrays in the order in which they were written: ids, numbers, keys, label."""
        text = self.path(entry.block).read_bytes()
        place = text.index(b"\n") + 1
        arrays = []
        for kind, shape in json.loads(text[:place]):
            array = np.frombuffer(text, kind, math.prod(shape), place).reshape(shape)
            arrays.append(array)
            place += array.nbytes
        return arrays

    def key(self, entry: Entry, role: str) -> np.ndarray:
        return self.read(entry)[len(self.encoder.recipe.features) + self.keys.index(role)]

    @property
    def keys(self) -> list[str]:
        """The keys that the log has, in the order of KEYS."""
        return [role for role in KEYS if self.encoder.recipe.key(role) is not None]


def _smallest(ids: np.ndarray) -> type[np.generic]:
    top = int(ids.max(initial=0))
    return np.uint8 if top < 256 else np.uint16 if top < 65536 else np.int32
