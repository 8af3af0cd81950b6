"""Tables from a token's hash to its id: open addressing in flat arrays, looked up a block at a time."""

import threading

import numpy as np

from adumbra.data.fields import MISSING, Strings

_FULL = 0.5
"""How full a table gets before it grows: at this load nearly every token stands in its first slot."""


class TokenTable:
    """Hash → id for one feature. Ids count up from 1, which is the missing value; 0 is left to padding.

    Look-ups take no lock: a table only ever gains tokens, a slot's id is settled before its hash is written, and a
    look-up reads the hash first.
    """

    def __init__(self) -> None:
        self._bits = 10
        self._hashes, self._ids = _slots(self._bits)
        self._lock = threading.Lock()
        self._new: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.size = 0
        self.logged = 1
        """How many of them `take_new` has handed out, the missing value included."""
        self._place(np.array([MISSING]))

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """The ids of known tokens; 0 for the others."""
        with self._lock:
            table, ids, bits = self._hashes, self._ids, self._bits
        slots = (hashes >> np.uint64(64 - bits)).view(np.int64)
        rest = np.flatnonzero(table.take(slots) != hashes)
        found = ids.take(slots)
        if len(rest):
            found[rest] = _probe(table, ids, hashes[rest], slots[rest])
        return found

    def add_unknown(self, found: np.ndarray, hashes: np.ndarray, strings: Strings) -> np.ndarray:
        """Completes what `find` found: tokens that it did not know are added with their text."""
        unknown = np.flatnonzero(found == 0)
        if len(unknown):
            new, first, inverse = np.unique(hashes[unknown], return_index=True, return_inverse=True)
            with self._lock:
                found[unknown] = self._add(new, strings, unknown[first])[inverse]
        return found

    def _add(self, hashes: np.ndarray, strings: Strings, rows: np.ndarray) -> np.ndarray:
        """Adds distinct tokens, of which another thread may have added some meanwhile."""
        slots = (hashes >> np.uint64(64 - self._bits)).view(np.int64)
        ids = _probe(self._hashes, self._ids, hashes, slots)
        absent = np.flatnonzero(ids == 0)
        if len(absent):
            ids[absent] = self._place(hashes[absent])
            text = strings.take(rows[absent])
            self._new.append((hashes[absent], text.lengths.astype(np.int64), text.joined()))
        return ids

    def _place(self, hashes: np.ndarray) -> np.ndarray:
        while self.size + len(hashes) > _FULL * len(self._hashes):
            self._grow()
        ids = np.arange(self.size + 1, self.size + 1 + len(hashes), dtype=np.int32)
        _insert(self._hashes, self._ids, hashes, ids, self._bits)
        self.size += len(hashes)
        return ids

    def _grow(self) -> None:
        live = np.flatnonzero(self._hashes)
        bits = self._bits + 1
        table, ids = _slots(bits)
        _insert(table, ids, self._hashes[live], self._ids[live], bits)
        self._bits, self._hashes, self._ids = bits, table, ids

    def take_new(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Hashes, lengths and bytes of the tokens added since the last call, in the order of their ids."""
        with self._lock:
            new, self._new = self._new, []
        self.logged += sum(len(part[0]) for part in new)
        if not new:
            return np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.uint8)
        hashes, lengths, text = zip(*new, strict=True)
        return np.concatenate(hashes), np.concatenate(lengths), np.concatenate(text)

    def restore(self, hashes: np.ndarray) -> "TokenTable":
        """Fills an empty table with distinct tokens, in this order, from id 2 on."""
        if len(hashes):
            self._place(hashes)
        self.logged = self.size
        return self


def _slots(bits: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(1 << bits, np.uint64), np.zeros(1 << bits, np.int32)


def _probe(table: np.ndarray, ids: np.ndarray, hashes: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """The ids of tokens from their slots on; 0 where an empty slot comes first."""
    out = np.zeros(len(hashes), np.int32)
    rest = np.arange(len(hashes))
    while len(rest):
        held = table[slots]
        here = held == hashes[rest]
        out[rest[here]] = ids[slots[here]]
        on = ~here & (held != 0)
        rest = rest[on]
        slots = (slots[on] + 1) & (len(table) - 1)
    return out


def _insert(table: np.ndarray, ids: np.ndarray, hashes: np.ndarray, new: np.ndarray, bits: int) -> None:
    """Places distinct, absent tokens. Of several that want one slot the last written wins, the others go on."""
    slots = (hashes >> np.uint64(64 - bits)).view(np.int64)
    while len(hashes):
        free = np.flatnonzero(table[slots] == 0)
        ids[slots[free]] = new[free]
        won = free[ids[slots[free]] == new[free]]
        table[slots[won]] = hashes[won]
        rest = np.ones(len(hashes), bool)
        rest[won] = False
        hashes, new = hashes[rest], new[rest]
        slots = (slots[rest] + 1) & (len(table) - 1)
