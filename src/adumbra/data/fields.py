"""From bytes to fields: where each value of a block of text stands, and what it hashes to.

A block of delimited text is cut by one search for its separators; no value becomes a Python object. A column is then
the positions of its values in the block, and its tokens are 64-bit keyed hashes of their bytes.
"""

# pyright: reportAttributeAccessIssue=false
import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

PADDING = 8
"""Zero bytes behind every buffer, so that eight bytes can be read at any of its positions."""
MISSING = np.uint64(1)
"""The hash of a missing value, in every column; no text has it."""

_K1, _K2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_KEPT = np.array([(1 << (8 * kept)) - 1 for kept in range(8)] + [2**64 - 1], dtype=np.uint64)


class Strings:
    """A column of text: n slices of one buffer, which ends in PADDING zero bytes."""

    def __init__(
        self,
        buffer: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        words: np.ndarray | None = None,
        longest: int | None = None,
    ) -> None:
        self.buffer = buffer
        self.starts = starts
        self.lengths = lengths
        self._words = words
        self._longest = longest

    @property
    def longest(self) -> int:
        """No value is longer than this."""
        if self._longest is None:
            self._longest = int(self.lengths.max(initial=0))
        return self._longest

    @property
    def words(self) -> np.ndarray:
        """The first eight bytes of each value, little-endian, zero-padded."""
        if self._words is None:
            self._words = _words(self.buffer, self.starts, self.lengths)
        return self._words

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, rows: np.ndarray) -> "Strings":
        words = None if self._words is None else self._words[rows]
        return Strings(self.buffer, self.starts[rows], self.lengths[rows], words, self._longest)

    def joined(self) -> np.ndarray:
        """The values' bytes, one after another."""
        if self.longest <= 8:
            return self.words.astype("<u8").view(np.uint8).reshape(-1, 8)[np.arange(8) < self.lengths[:, None]]
        ends = np.cumsum(self.lengths)
        where = np.arange(ends[-1] if len(ends) else 0)
        where += np.repeat(self.starts - (ends - self.lengths), self.lengths)
        return self.buffer[where]

    def to_arrow(self) -> pa.LargeStringArray:
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return pa.LargeStringArray.from_buffers(len(self), pa.py_buffer(offsets), pa.py_buffer(self.joined()))  # pyright: ignore[reportReturnType]

    @staticmethod
    def from_arrow(array: pa.Array) -> "Strings":
        """Nulls become the empty text."""
        array = pc.fill_null(array.cast(pa.large_string()), "")
        _, offsets, data = array.buffers()
        bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1] if len(array) else _NONE
        size = int(bounds[-1])
        buffer = np.zeros(size + PADDING, dtype=np.uint8)
        buffer[:size] = np.frombuffer(data, np.uint8)[:size] if data is not None else 0
        return Strings(buffer, bounds[:-1], np.diff(bounds))

    @staticmethod
    def of(values: list[str] | tuple[str, ...]) -> "Strings":
        return Strings.from_arrow(pa.array(values, pa.large_string()))

    def trimmed(self) -> "Strings":
        """Without blanks at either end."""
        starts, lengths = self.starts.copy(), self.lengths.copy()
        while (blank := (lengths > 0) & (self.buffer[starts] == 32)).any():
            starts += blank
            lengths -= blank
        while (blank := (lengths > 0) & (self.buffer[starts + lengths - 1] == 32)).any():
            lengths -= blank
        return Strings(self.buffer, starts, lengths)

    def equal(self, text: str) -> np.ndarray:
        """Which values are exactly this text."""
        wanted = np.frombuffer(text.encode(), np.uint8)
        same = self.lengths == len(wanted)
        for place, byte in enumerate(wanted):
            same[same] = self.buffer[self.starts[same] + place] == byte
        return same

    def missing(self, texts: tuple[str, ...]) -> np.ndarray:
        """Which values are empty or one of the texts that the recipe declares as missing."""
        found = self.words == 0
        for text in texts:
            if text:
                found |= self.equal(text)
        return found

    def hashes(self, seed: np.uint64) -> np.ndarray:
        """A keyed 64-bit hash of each value: for every 8 bytes, little-endian, the last zero-padded,

            h ^= word;  h *= K1;  h ^= h >> 32;  h *= K2;  h ^= h >> 29        from  h = seed.

        0 and 1 are kept free (an empty slot of a table, a missing value): they become 2.
        """
        state = np.full(len(self), seed)
        absorb(state, self.words)
        for place in range(8, self.longest, 8):
            long = np.flatnonzero(self.lengths > place)
            part = state[long]
            absorb(part, _words(self.buffer, self.starts[long] + place, self.lengths[long] - place))
            state[long] = part
        return np.maximum(state, np.uint64(2))


def _words(buffer: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    anywhere = np.ndarray(len(buffer) - PADDING + 1, dtype="<u8", buffer=buffer.data, strides=(1,))
    words = anywhere[starts]
    words &= _KEPT.take(lengths, mode="clip")
    return words


_NONE = np.zeros(1, dtype=np.int64)


def absorb(state: np.ndarray, word: np.ndarray) -> None:
    """One round of the hash, in place."""
    state ^= word
    state *= _K1
    state ^= state >> np.uint64(32)
    state *= _K2
    state ^= state >> np.uint64(29)


def seed(key: str, name: str) -> np.uint64:
    """The hash seed of one column under a recipe's key."""
    digest = hashlib.blake2b(name.encode(), key=key.encode()[:64], digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def bins(hashes: np.ndarray, column_seed: np.uint64, count: int) -> np.ndarray:
    """Which of `count` bins each hash falls into, by its high half; a missing value has a bin too."""
    own = Strings.of(["\0missing"]).hashes(column_seed)
    upper = np.where(hashes == MISSING, own, hashes) >> np.uint64(32)
    return ((upper * np.uint64(count)) >> np.uint64(32)).astype(np.int32)


@dataclass(frozen=True)
class Cut:
    """Some delimited lines cut into rows: positions and lengths by row, words by column, and what was left out."""

    buffer: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    words: np.ndarray
    lines: np.ndarray
    """The line of each row, from 0."""
    bad: np.ndarray
    """Lines with too few or too many fields."""
    fields: int
    """How many fields the first bad line has."""

    @property
    def rows(self) -> int:
        return len(self.starts)

    def columns(self) -> list[Strings]:
        longest = self.lengths.max(axis=0, initial=0)
        return [
            Strings(self.buffer, self.starts[:, place], self.lengths[:, place], words, int(longest[place]))
            for place, words in enumerate(self.words)
        ]


_SLICE = 1 << 19
"""Bytes that are cut at a time: what is derived from them stays in a core's cache."""


def cut(block: bytes, delimiter: str, columns: int) -> Cut:
    """Cuts a block of whole lines, each ended by a newline. Empty lines are passed over."""
    buffer = np.frombuffer(block + bytes(PADDING), dtype=np.uint8)
    parts: list[Cut] = []
    start = line = 0
    while start < len(block):
        end = (block.rfind(b"\n", start, start + _SLICE) if start + _SLICE < len(block) else len(block) - 1) + 1
        end = end or block.index(b"\n", start) + 1
        part, count = _cut_slice(buffer, start, end, ord(delimiter), columns, line)
        parts.append(part)
        start, line = end, line + count
    first_bad = next((part.fields for part in parts if len(part.bad)), columns)
    return Cut(
        buffer,
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.words for part in parts], axis=1),
        np.concatenate([part.lines for part in parts]),
        np.concatenate([part.bad for part in parts]),
        first_bad,
    )


def _cut_slice(buffer: np.ndarray, start: int, end: int, delimiter: int, columns: int, line: int) -> tuple[Cut, int]:
    """Some of a block's lines, and how many they are."""
    text = buffer[start:end]
    newline = text == 10
    ends = np.flatnonzero(newline | (text == delimiter))
    last = ends[columns - 1 :: columns]
    count = int(np.count_nonzero(newline))
    starts = np.empty_like(ends)
    starts[:1] = 0
    np.add(ends[:-1], 1, out=starts[1:])
    lines, bad, fields = np.arange(line, line + count), np.zeros(0, np.int64), columns
    if len(ends) % columns or count != len(last) or not newline[last].all():
        starts, ends, lines, bad, fields = _whole_rows(text, starts, ends, columns)
        lines, bad = lines + line, bad + line
    lengths = (ends - starts).reshape(-1, columns)
    if len(lengths):
        lengths[:, -1] -= (lengths[:, -1] > 0) & (text[ends.reshape(-1, columns)[:, -1] - 1] == 13)
    starts += start
    words = np.ascontiguousarray(_words(buffer, starts, lengths.reshape(-1)).reshape(-1, columns).T)
    starts = starts.astype(np.int32).reshape(-1, columns)
    return Cut(buffer, starts, lengths.astype(np.int32), words, lines, bad, fields), count


def _whole_rows(
    text: np.ndarray, starts: np.ndarray, ends: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """The fields of the lines that have as many as they should, those lines, and the others."""
    last = np.flatnonzero(text[ends] == 10)
    count = np.diff(last, prepend=-1)
    first = starts[last - count + 1]
    size = ends[last] - first
    empty = (size == 0) | ((size == 1) & (text[first] == 13)) if columns > 1 else np.zeros(len(last), bool)
    good = (count == columns) & ~empty
    bad = np.flatnonzero(~good & ~empty)
    kept = np.repeat(good, count)
    return starts[kept], ends[kept], np.flatnonzero(good), bad, int(count[bad[0]]) if len(bad) else columns


def numbers(strings: Strings, missing: np.ndarray, whole: bool) -> tuple[np.ndarray, np.ndarray]:
    """The values as float64, NaN where missing or malformed, and which are malformed."""
    out = np.full(len(strings), np.nan)
    rows = np.flatnonzero(~missing)
    known = strings.take(rows)
    text = known.to_arrow()
    kind = pa.int64() if whole else pa.float64()
    try:
        values = None if whole and _beyond_decimal(known) else text.cast(kind)
    except pa.ArrowInvalid:
        values = None
    if values is None:
        pattern = r"^[+-]?[0-9]{1,18}$" if whole else r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
        text = pc.if_else(pc.match_substring_regex(text, pattern), text, None)
        values = pc.replace_substring_regex(text, r"^\+", "").cast(kind)
    out[rows] = pc.fill_null(values.cast(pa.float64(), safe=False), np.nan).to_numpy(zero_copy_only=False)
    out[~np.isfinite(out)] = np.nan
    return out, np.isnan(out) & ~missing


def _beyond_decimal(strings: Strings) -> bool:
    """Whether some value may be one that pyarrow takes for an integer and a recipe does not: 0x1F, or of 19 digits."""
    second = strings.words >> np.uint64(8) & np.uint64(0xDF)
    return strings.longest > 18 or bool((second == ord("X")).any())


def seconds(strings: Strings, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Timestamps (whole seconds, or ISO dates and times in UTC) as seconds in float64; NaN as in `numbers`."""
    out, malformed = numbers(strings, missing, whole=True)
    rows = np.flatnonzero(malformed)
    if len(rows):
        text = strings.take(rows).to_arrow()
        iso = pc.match_substring_regex(text, r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2})?Z?)?$")
        text = pc.replace_substring(pc.if_else(iso, text, None), "Z", "")
        try:
            stamps = text.cast(pa.timestamp("s"))
        except pa.ArrowInvalid:  # a month 13 among them: one by one
            stamps = pa.array([_stamp(value) for value in text.to_pylist()], pa.timestamp("s"))
        out[rows] = pc.fill_null(stamps.cast(pa.int64()).cast(pa.float64()), np.nan).to_numpy(zero_copy_only=False)
    return out, np.isnan(out) & ~missing


def _stamp(value: str | None) -> object:
    try:
        return None if value is None else pa.scalar(value).cast(pa.timestamp("s")).as_py()
    except pa.ArrowInvalid:
        return None
