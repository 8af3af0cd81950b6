"""Columns of numbers to lines of text, without a loop over rows.

A cell is one or more unsigned words whose bytes, lowest first, are its characters; a zero byte is no character. The
words of all cells are laid side by side in one matrix of bytes, and dropping its zeros gives the text.
"""

import numpy as np

Array = np.ndarray
Cell = list[Array]

MISSING = int.from_bytes(b"-1", "little")


def _words(texts: list[bytes]) -> Array:
    return np.frombuffer(b"".join(t.rjust(4, b"\0") for t in texts), dtype="<u4").astype(np.uint64)


_LOWER = _words([b"%04x" % i for i in range(1 << 16)])
_UPPER = _words([b"%04X" % i for i in range(1 << 16)])
_SHORT = _words([b"%d" % i for i in range(10_000)])
_FULL = _words([b"%04d" % i for i in range(10_000)])
_HEAD = np.concatenate([np.zeros(1, dtype=np.uint64), _SHORT[1:]])
_TAIL = np.concatenate([_SHORT, _FULL]) << np.uint64(32)
_HALF, _LOW16 = np.uint64(32), np.uint32(0xFFFF)


def _blank(word: Array, present: Array | None, missing: int = 0) -> Array:
    return word if present is None else np.where(present, word, np.uint64(missing))


def hex8(words: Array, present: Array | None = None) -> Cell:
    """8 hexadecimal characters, or nothing."""
    return [_blank(_LOWER[words >> np.uint32(16)] | _LOWER[words & _LOW16] << _HALF, present)]


def hex32(words: Array, present: Array | None = None, missing: int = MISSING) -> Cell:
    """32 capital hexadecimal characters that begin with the word, or the mark of a missing value."""
    cell: Cell = []
    for odd in (1, 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35):
        part = words * np.uint32(odd)
        cell.append(_blank(_UPPER[part >> np.uint32(16)] | _UPPER[part & _LOW16] << _HALF, present, missing))
        missing = 0
    return cell


def digits(values: Array, present: Array | None = None, missing: int = 0) -> Cell:
    """A whole number from 0 to 10^12 - 1, or the mark of a missing value."""
    if int(values.max(initial=0)) < 10_000:
        return [_blank(_SHORT[values], present, missing).astype(np.uint32)]
    if int(values.max()) >= 10**8:
        high, low = values // 10**8, values % 10**8
        more = (high > 0).astype(np.uint32) * 10_000
        head = _blank(_HEAD[high], present, missing).astype(np.uint32)
        middle, last = low // 10_000, low % 10_000
        rest = np.where(more > 0, _FULL[middle], _HEAD[middle])
        return [head, _blank(rest | _TAIL[last + np.maximum(more, (middle > 0) * 10_000)], present)]
    high, low = values // 10_000, values % 10_000
    return [_blank(_HEAD[high] | _TAIL[low + (high > 0) * np.uint32(10_000)], present, missing)]


def decimals(values: Array, places: int, present: Array | None = None, missing: int = 0) -> Cell:
    """A number of 10^-places units with 2 or 6 digits after the point, or the mark of a missing value."""
    whole, part = values // 10**places, values % 10**places
    if places == 2:
        tail = _FULL[part] >> np.uint64(16)
    else:
        tail = _FULL[part // 100] | (_FULL[part % 100] >> np.uint64(16)) << _HALF
    return [*digits(whole, present, missing), sign(part >= 0, present, b"."), _blank(tail, present)]


def sign(where: Array, present: Array | None = None, mark: bytes = b"-") -> Array:
    """One character, or none."""
    return np.where(where if present is None else where & present, np.uint8(mark[0]), np.uint8(0))


def lines(cells: list[Cell], separator: bytes = b"\t") -> bytes:
    rows = len(cells[0][0])
    width = sum(word.itemsize for cell in cells for word in cell) + len(cells)
    text = np.zeros((rows, width), dtype=np.uint8)
    at = 0
    for cell in cells:
        for word in cell:
            text[:, at : at + word.itemsize].view(word.dtype.newbyteorder("<"))[:, 0] = word
            at += word.itemsize
        text[:, at] = separator[0]
        at += 1
    text[:, -1] = ord("\n")
    flat = text.reshape(-1)
    return flat[flat != 0].tobytes()
