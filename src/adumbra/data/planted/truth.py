"""The arithmetic of planted truths: draws, power laws, hidden attributes, calibration.

Whatever decides a byte is made of integers, IEEE ``+ - * / sqrt``, comparisons and tables built by `decimal`: numpy's
``exp``, ``log``, ``sum`` and ``dot`` round differently on different processors, these do not.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cache

import numpy as np

Array = np.ndarray


def key(name: str) -> int:
    """A column's key. It does not depend on the seed: logs of several seeds come from one world."""
    return zlib.crc32(name.encode())


def mix(values: Array, name: str, bits: int = 32) -> Array:
    """A keyed bijection of the integers below 2^bits: how the rank of a value becomes the value."""
    mask, half = np.uint32((1 << bits) - 1), bits // 2
    x = (values.astype(np.uint32) + np.uint32(key(name))) & mask
    for odd in (0x7FEB352D, 0x846CA68B):
        x ^= x >> np.uint32(half)
        x *= np.uint32(odd)
        x &= mask
    x ^= x >> np.uint32(half)
    return x


def attribute(values: Array, name: str = "") -> Array:
    """The hidden attribute of each value, uniform in [-1, 1): what a value means, which no model is told."""
    odd = (key(name) | 1) if name else 0x9E3779B1
    x = values * np.uint32(odd)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x2C1B3C6D)
    return (x >> np.uint32(16)).astype(np.float32) * np.float32(2.0**-15) - np.float32(1)


def hashed(values: Array, name: str) -> Array:
    """64 bits that depend on the value alone, to draw from in the place of fresh ones."""
    return mix(values, name).astype(np.uint64) << np.uint64(32) | mix(values, name + "'").astype(np.uint64)


class Draws:
    """Random bits of one chunk of rows: Philox in counter mode, so that no chunk waits for another."""

    def __init__(self, seed: int, chunk: int, n: int) -> None:
        self.n = n
        self._philox = np.random.Philox(key=seed, counter=chunk << 128)

    def bits(self) -> Array:
        return self._philox.random_raw(self.n)

    def uniform(self) -> Array:
        return unit(self.bits())

    def coin(self, probability: Array | float) -> Array:
        return self.uniform() < probability


def unit(bits: Array) -> Array:
    """[0, 1) with 53 bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def odds(u: Array) -> Array:
    """Heavy-tailed and positive, with median 1: the quantile u/(1-u) of a log-logistic law."""
    return u / (1.0 - u)


def saturate(x: Array, half: Array | float) -> Array:
    """0 at 0, 1/2 at `half`, 1 far away (odd in x)."""
    return x / (np.abs(x) + half)


def powers(law: Array, exponent: float) -> Array:
    """law ** exponent for exponents that are multiples of 1/2."""
    result = np.sqrt(law) if exponent % 1 else np.ones_like(law)
    for _ in range(int(exponent)):
        result = result * law
    return result


@dataclass(frozen=True)
class PowerLaw:
    """Ranks 0 … values-1 with frequency ∝ (rank + shift)^-(1 + 2^-flatness), by inversion."""

    values: int
    flatness: int = 4
    shift: float = 1.0

    def ranks(self, bits: Array) -> Array:
        root = np.float64((self.values + self.shift) / self.shift)
        for _ in range(self.flatness):
            root = np.sqrt(root)
        t = 1.0 - unit(bits) * (1.0 - 1.0 / root)
        for _ in range(self.flatness):
            t *= t
        return np.minimum(self.shift / t - self.shift, self.values - 1).astype(np.uint32)


@cache
def _table(function: str) -> Array:
    """exp or the logistic function at -16, -16 + 2^-8, …, 16; correctly rounded on every machine."""
    context = Context(prec=20)
    values = []
    for i in range(-4096, 4097):
        e = context.exp(Decimal(i) / 256)
        values.append(float(e if function == "exp" else context.divide(e, 1 + e)))
    return np.array(values)


def _interpolated(x: Array, function: str) -> Array:
    table = _table(function)
    position = (np.clip(x, -16.0, 15.999) + 16.0) * 256.0
    left = position.astype(np.int64)
    low = table[left]
    return low + (table[left + 1] - low) * (position - left)


def logistic(x: Array) -> Array:
    return _interpolated(x, "logistic")


def exp(x: Array) -> Array:
    return _interpolated(x, "exp")


def poisson(mean: Array, u: Array) -> Array:
    """By inversion; beyond 24 events (mean at most e^1.5) nothing is left."""
    term = exp(-mean)
    below, count = term, np.zeros(len(mean), dtype=np.uint32)
    for k in range(1, 25):
        count += u >= below
        term = term * mean / k
        below = below + term
    return count


@dataclass(frozen=True)
class Link:
    """How a score becomes the mean of the label, the chance that it is not 0, and, with luck in [0, 1), the label."""

    mean: Callable[[Array], Array]
    chance: Callable[[Array], Array]
    label: Callable[[Array, Array], Array]
    most_rate: float
    most_auc: float


BINARY = Link(logistic, lambda mean: mean, lambda mean, luck: (luck < mean).astype(np.uint32), 0.9, 0.95)
COUNT = Link(lambda x: exp(np.minimum(x, 1.5)), lambda mean: 1.0 - exp(-mean), poisson, 1.0, 0.8)


@dataclass(frozen=True)
class Score:
    """intercept + Σ weight · part over the public and the sensitive part of what drives the label."""

    intercept: float
    public: float
    sensitive: float

    def __call__(self, public: Array, sensitive: Array) -> Array:
        return self.intercept + self.public * public + self.sensitive * sensitive


def _moments(x: Array) -> tuple[float, float]:
    fixed = np.round(x * 2.0**16).astype(np.int64)
    n, total, squares = len(fixed), int(fixed.sum()), int((fixed * fixed).sum())
    return total / n / 2**16, float(np.sqrt(np.float64(squares * n - total * total) / n / n)) / 2**16


def expected_auc(chance: Array) -> float:
    """The AUC of chances (ascending) for labels drawn from them, in integers."""
    p = np.round(chance * 2.0**15).astype(np.int64)
    q = 2**15 - p
    below = np.cumsum(q) - q
    return int((p * (2 * below + q)).sum()) / (2 * int(p.sum()) * int(q.sum()))


def calibrate(public: Array, sensitive: Array, share: float, rate: float, auc: float, link: Link) -> Score:
    """The score whose labels have this rate, this Bayes AUC and this share of variance from the sensitive part."""
    (mean_p, sd_p), (mean_s, sd_s) = _moments(public), _moments(sensitive)
    weight_p = float(np.sqrt(1.0 - share)) / sd_p
    weight_s = float(np.sqrt(share)) / sd_s if share else 0.0
    z = np.sort((public - mean_p) * weight_p + (sensitive - mean_s) * weight_s)[8::16]

    def intercept(scale: float) -> float:
        return _bisect(
            lambda b: int((link.mean(scale * z + b) * 2.0**32).astype(np.int64).sum()) / len(z) / 2**32, rate
        )

    scale = _bisect(lambda s: expected_auc(link.chance(link.mean(s * z + intercept(s)))), auc, 0.0, 8.0)
    weight_p, weight_s = weight_p * scale, weight_s * scale
    return Score(intercept(scale) - mean_p * weight_p - mean_s * weight_s, weight_p, weight_s)


def _bisect(rising: Callable[[float], float], target: float, low: float = -14.0, high: float = 14.0) -> float:
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return (low + high) / 2
