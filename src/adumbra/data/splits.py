"""Which rows train: a rule over public columns and keys, applied to the blocks of a log in their order."""

import fnmatch
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from adumbra.data.fields import absorb, seed
from adumbra.data.spool import Entry, Spool
from adumbra.data.store import SPLITS
from adumbra.errors import InputError
from adumbra.schema import Recipe

TRAIN, VALIDATION, TEST = range(3)


class Splits:
    """The split of every row, as TRAIN, VALIDATION or TEST, block by block."""

    def __init__(self, recipe: Recipe, spool: Spool, files: list[Path]) -> None:
        self.rule = recipe.split
        self.spool = spool
        self.key = seed(recipe.hash_key, "split")
        self.rows = sum(entry.rows for entry in spool.entries)
        if self.rule.kind == "files":
            self.file_codes = [self._file_code(file) for file in files]
        else:
            train, validation = float(self.rule.train), self.rule.validation
            self.shares = np.array([train, train + validation])
        if self.rule.kind == "chronological":
            cuts = np.floor(self.shares * self.rows + 1e-6).astype(np.int64)
            self.cuts = cuts if self.rule.by == "row" else self._times(cuts)
        self.codes = [self._code(entry, first) for entry, first in self._places()]
        counts = sum((np.bincount(codes, minlength=3) for codes in self.codes), np.zeros(3, np.int64))
        self.sizes = dict(zip(SPLITS, map(int, counts), strict=True))
        if self.sizes["train"] == 0:
            raise InputError("no row trains: the log, after the filter, gives the training split nothing")

    def _places(self) -> Iterator[tuple[Entry, int]]:
        first = 0
        for entry in self.spool.entries:
            yield entry, first
            first += entry.rows

    def _file_code(self, file: Path) -> int:
        for pattern, code in ((self.rule.train, TRAIN), (self.rule.test, TEST)):
            if fnmatch.fnmatch(file.name, str(pattern)):
                return code
        raise InputError(
            f"{file}: matches neither split.train = '{self.rule.train}' nor split.test = '{self.rule.test}'"
        )

    def _times(self, cuts: np.ndarray) -> np.ndarray:
        """The times at which validation and test begin; rows of one time stay together."""
        times = np.sort(np.concatenate([self.spool.key(entry, "time") for entry in self.spool.entries]))
        ends = np.append(times, np.iinfo(np.int64).max)
        return ends[cuts]

    def _code(self, entry: Entry, first: int) -> np.ndarray:
        rows = np.arange(first, first + entry.rows)
        match self.rule.kind:
            case "files":
                code = self.file_codes[entry.file]
                codes = np.full(entry.rows, code, np.uint8)
                if code == TRAIN and self.rule.validation:
                    codes[self._uniform(rows.astype(np.uint64)) < self.rule.validation] = VALIDATION
                return codes
            case "chronological":
                order = rows if self.rule.by == "row" else self.spool.key(entry, "time")
                return np.searchsorted(self.cuts, order, side="right").astype(np.uint8)
            case "random":
                units = rows if self.rule.by == "row" else self.spool.key(entry, self.rule.by)
                return np.searchsorted(self.shares, self._uniform(units.view(np.uint64)), side="right").astype(np.uint8)

    def _uniform(self, units: np.ndarray) -> np.ndarray:
        """A number in [0, 1) for each unit: its keyed hash."""
        state = np.full(len(units), self.key)
        absorb(state, units)
        return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def train(self) -> Iterator[tuple[Entry, np.ndarray | None]]:
        """The blocks that hold training rows, with the mask of those rows where there are others."""
        for entry, codes in zip(self.spool.entries, self.codes, strict=True):
            mask = codes == TRAIN
            if mask.any():
                yield entry, None if mask.all() else mask
