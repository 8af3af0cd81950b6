"""Where random bits come from, and noise made of them."""

import hashlib
import os
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

OPERATING_SYSTEM = "operating-system"
INSECURE_REPEATABLE = "insecure-repeatable"
MAX_SIGMA = 2**16  # a table of .6 million entries; beyond it the table, not the exactness, would be the trouble

_DIGITS = 63  # binary digits of the first comparison; the 64th bit is the sign
_BLOCK = 2**17
_ZEROS = bytes(2**18)


class SecretBits:
    """A stream of uniform 64-bit words: AES-256 in counter mode under a key drawn from the operating system.

    There is no seed. The key never leaves the object, which cannot be copied or pickled, and a forked child draws a
    key of its own. Not to be shared between threads.
    """

    source = OPERATING_SYSTEM

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._stream = Cipher(algorithms.AES256(self._key()), modes.CTR(bytes(16))).encryptor()

    def _key(self) -> bytes:
        return os.urandom(32)

    def words(self, n: int) -> NDArray[np.uint64]:
        if os.getpid() != self._owner:
            self._start()  # after a fork, parent and child would otherwise draw the same noise
        out = np.empty(n, np.uint64)
        view = out.view(np.uint8).data
        for start in range(0, len(view), len(_ZEROS)):
            part = view[start : start + len(_ZEROS)]
            self._stream.update_into(_ZEROS[: len(part)], part)
        return out

    def below(self, limit: int, n: int) -> NDArray[np.int64]:
        """Uniform whole numbers from 0 to below `limit`, exactly: words that would favour some are drawn again."""
        most = 2**64 - 2**64 % limit
        words = self.words(n)
        while most < 2**64 and len(again := np.flatnonzero(words >= np.uint64(most))):
            words[again] = self.words(len(again))
        return (words % np.uint64(limit)).astype(np.int64)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a source of secret bits is never copied or stored: make a new one")


class _RepeatableBits(SecretBits):
    source = INSECURE_REPEATABLE

    def __init__(self, seed: int) -> None:
        self._seed = seed
        super().__init__()

    def _key(self) -> bytes:
        return hashlib.sha256(b"adumbra insecure-repeatable %d" % self._seed).digest()


class Noise:
    """Noise for every mechanism. `source` is the name that a statement repeats."""

    def __init__(self, bits: SecretBits | None = None) -> None:
        self._bits = bits or SecretBits()

    @property
    def bits(self) -> SecretBits:
        """The stream beneath, for what draws bits and not noise (randomised labels)."""
        return self._bits

    @property
    def source(self) -> str:
        return self._bits.source

    def discrete_gaussian(self, sigma: int, size: int) -> NDArray[np.int64]:
        """Independent draws with P(x) proportional to exp(-x²/2σ²) on the integers (Canonne, Kamath, Steinke 2020).

        Exact, not approximate: no floating point, no truncated tail, no rounded probability. |x| is the inverse of
        its distribution function at a uniform real number U whose binary digits are drawn lazily. The first 63
        digits decide against a table of certified digits, unless they tie with an entry of it; then further digits
        of both are drawn and computed until they differ. What remains assumed is that AES-CTR is a uniform stream.
        """
        _check_sigma(sigma)
        table = _table(sigma, _DIGITS)
        out = np.empty(size, np.int64)
        for start in range(0, size, _BLOCK):
            block = out[start : start + _BLOCK]
            words = self._bits.words(len(block))
            digits = words >> np.uint64(64 - _DIGITS)
            block[:] = invert(table, digits, _DIGITS, self._bits, partial(cumulative_digits, sigma))
            np.negative(block, out=block, where=(words & np.uint64(1)).astype(bool))
        return out

    def gaussian_(self, tensor: "torch.Tensor", std: float) -> "torch.Tensor":
        """Overwrite `tensor` with independent draws of N(0, std²), and return it: see `adumbra.privacy.gaussian`."""
        from adumbra.privacy import gaussian

        return gaussian.fill_(tensor, std, self._key, add=False)

    def add_gaussian_(self, tensor: "torch.Tensor", std: float) -> "torch.Tensor":
        """Add independent draws of N(0, std²) to `tensor`, in place, and return it."""
        from adumbra.privacy import gaussian

        return gaussian.fill_(tensor, std, self._key, add=True)

    def source_on(self, device: str) -> str:
        """What a statement says of noise that is drawn on a device of this kind."""
        if device == "cpu" or self.source != OPERATING_SYSTEM:
            return self.source
        return f"{OPERATING_SYSTEM} (Philox on {device}, keyed with 64 bits of it)"

    def _key(self) -> bytes:
        """A key for one call, from the secret stream: never used before or after."""
        return self._bits.words(4).tobytes()


def invert(
    table: NDArray[np.uint64],
    digits: NDArray[np.uint64],
    n_digits: int,
    bits: SecretBits,
    cumulative: Callable[[int], list[int]],
) -> NDArray[np.int64]:
    """Draws of a law on 0, 1, … by inverting its distribution function at reals U of which `n_digits` are drawn.

    `cumulative(n)` gives the first n binary digits of P(X ≤ 0), P(X ≤ 1), … until all are ones; `table` holds those
    of `n_digits`. Where the digits of U tie with an entry, more digits of both are drawn and computed.
    """
    values = np.searchsorted(table, digits, side="right")  # how many entries are ≤ the digits
    for i in np.flatnonzero(table[np.maximum(values, 1) - 1] == digits):
        values[i] = _invert_tie(int(digits[i]), n_digits, bits, cumulative)
    return values


def _invert_tie(digits: int, n_digits: int, bits: SecretBits, cumulative: Callable[[int], list[int]]) -> int:
    while True:
        digits = digits << 64 | int(bits.words(1)[0])
        n_digits += 64
        entries = cumulative(n_digits)
        if digits not in entries:
            return sum(entry < digits for entry in entries)


def insecure_repeatable(seed: int) -> Noise:
    """For tests only: whoever knows the seed can subtract the noise, so nothing it makes is private."""
    return Noise(_RepeatableBits(seed))


@lru_cache(maxsize=8)
def _table(sigma: int, n_digits: int) -> NDArray[np.uint64]:
    return np.array(cumulative_digits(sigma, n_digits), np.uint64)


def cumulative_digits(sigma: int, n_digits: int) -> list[int]:
    """The first `n_digits` binary digits of P(|Z| ≤ m), as integers, for m = 0, 1, … until all of them are ones.

    With D the digits of U and T those of P(|Z| ≤ m): D < T means U < P(|Z| ≤ m) and D > T means the reverse, for
    certain; D = T decides nothing.

    Weights w_m = exp(-m²/2σ²) are summed in fixed point. Each is the one before times r_m, and r_m the one before
    times exp(-1/σ²), every step wrong by less than one unit in the last place (ulp). So r_m is off by at most 2m + 1,
    w_m by m(m + 1), their sum over m < N by less than N³. The first weight that rounds to zero is less than
    N(N + 1) + 1, so the omitted tail is less than that times 2(1 + σ²/N). `slack` exceeds both together, and digits
    on which both ends of the quotient's interval agree are certified.
    """
    point = n_digits + 128
    with localcontext(prec=point):  # decimal digits: three times what is needed, and `exp` is correctly rounded
        ratio = int((Decimal(-1) / (2 * sigma * sigma)).exp() * 2**point)
        step = int((Decimal(-1) / (sigma * sigma)).exp() * 2**point)
    weights = [1 << point]
    while weights[-1]:
        weights.append(weights[-1] * ratio >> point)
        ratio = ratio * step >> point
    sums = list(accumulate(weights[1:], lambda total, w: total + 2 * w, initial=weights[0]))
    slack = 4 * (len(weights) + sigma + 1) ** 3
    digits: list[int] = []
    for total in sums:
        low = ((total - slack) << n_digits) // (sums[-1] + slack)
        high = min(((total + slack) << n_digits) // (sums[-1] - slack), (1 << n_digits) - 1)
        if low != high:
            raise ArithmeticError(f"digits of the discrete Gaussian with sigma {sigma} are not certified")
        digits.append(low)
        if low == (1 << n_digits) - 1:
            break
    return digits


def _check_sigma(sigma: int) -> None:
    if not isinstance(sigma, int) or not 1 <= sigma <= MAX_SIGMA:
        raise ValueError(f"sigma is a whole number from 1 to {MAX_SIGMA}, not {sigma!r}")
