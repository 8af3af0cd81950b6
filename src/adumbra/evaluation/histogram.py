"""Rows grouped by their logit: all that AUC and calibration need of a log of any size, in bounded memory.

Bins of equal width, in probabilities or in logits, lose a model whose logits lie close together or far out. Here a
group is a float32 with its lowest bits cut off, so a bin's width follows the logit's size, and only groups that hold
rows are kept. Up to `limit` distinct logits nothing is cut and the histogram is exact.
"""

from dataclasses import dataclass

import numpy as np

LIMIT = 1 << 16
"""Groups at most. With millions of logits, those between 4 and 8 then lie in bins of .001 or .002, and AUC is exact to
about 1e-7."""


@dataclass(frozen=True)
class Histogram:
    """Sums over groups of rows. Histograms of parts add up to that of the whole, exactly and in any order: how many
    bits are cut depends on the set of logits alone."""

    keys: np.ndarray
    """Of each group, rising: the float32's bits as an integer of the same order, less the lowest `shift`."""
    sums: np.ndarray
    """A row for each thing that is summed, a column for each group."""
    shift: int = 0
    limit: int = LIMIT

    @staticmethod
    def of(logits: np.ndarray, summands: list[np.ndarray], limit: int = LIMIT) -> "Histogram":
        """The sums of each of `summands` over the rows of every group."""
        keys = ordered(logits)
        order = np.argsort(keys)
        return _fitted(keys[order], np.stack([values[order] for values in summands]), 0, limit)

    def __add__(self, other: "Histogram") -> "Histogram":
        shift, limit = max(self.shift, other.shift), min(self.limit, other.limit)
        keys = np.concatenate([self.keys >> (shift - self.shift), other.keys >> (shift - other.shift)])
        order = np.argsort(keys, kind="stable")
        return _fitted(keys[order], np.concatenate([self.sums, other.sums], axis=1)[:, order], shift, limit)


def ordered(logits: np.ndarray) -> np.ndarray:
    """Integers in the order of the logits as float32; equal ones where the logits are equal."""
    bits = (logits.astype(np.float32) + np.float32(0)).view(np.int32)  # + 0: there are two zeros
    return np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def _fitted(keys: np.ndarray, sums: np.ndarray, shift: int, limit: int) -> Histogram:
    """Sorted keys and what is summed for each, brought together into at most `limit` groups."""
    more = 0
    while np.count_nonzero(_begins(keys >> more)) > limit and shift + more < 31:  # of 31 only the sign is left
        more += 1
    keys = keys >> more
    starts = np.flatnonzero(_begins(keys))
    if len(starts) < len(keys):
        keys, sums = keys[starts], np.add.reduceat(sums, starts, axis=1)
    return Histogram(keys, sums, shift + more, limit)


def _begins(keys: np.ndarray) -> np.ndarray:
    """Where a group begins among sorted keys."""
    begins = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=begins[1:])
    return begins
