"""Clicks, in the form of the Criteo Display log: label, 13 integers, 26 categories of 8 hexadecimal characters.

Features are numbered 1-39; the even ones are sensitive. Columns of one entity (the ad, its context, the user, his
interest) are views of one draw, coarser and finer, each replaced by a draw of its own now and then, so that a rare
value of a fine column says much through the common values of the coarse ones.

The truth: each category value has a hidden attribute in [-1, 1), and a missing one 0. The logit is a saturated sum of
attributes whose weights drift along the log; how far two attributes lie apart; threshold rules that hold when three
attributes agree; saturating curves of counts; and frequency times recency, whose half-way points depend on the hidden
segment in which two attributes put the row. It is a function of what is printed and of the place in the file.
"""

from dataclasses import dataclass

import numpy as np

from . import Column, Knobs, Rows, World
from .lines import Cell, digits, hex8, sign
from .truth import Array, Draws, PowerLaw, attribute, mix, odds, powers, saturate, unit


@dataclass(frozen=True)
class Category:
    """A column C1…C26: law, entity of which it is a view, weight in the truth, and what it goes missing with."""

    law: PowerLaw
    entity: str
    weight: float = 0.0
    missing: str = ""


@dataclass(frozen=True)
class Count:
    """A column I1…I13: scale · odds^exponent, rounded down."""

    scale: float
    exponent: float
    most: int
    missing: str = ""


# Numbers of values are those that show the real log's cardinalities in 45.8 M rows.
CATEGORIES = {
    1: Category(PowerLaw(1460, 0), "user", 0.9),
    2: Category(PowerLaw(583), "context", 1.0),
    3: Category(PowerLaw(2_590_000_000), "user", 0.15, "fine"),
    4: Category(PowerLaw(4_800_000, 3), "ad", 0.25, "fine"),
    5: Category(PowerLaw(305, 0), "interest", 0.7),
    6: Category(PowerLaw(24, 1), "", 1.1, "C6"),
    7: Category(PowerLaw(12517, 4, 20.0), "user", 0.5),
    8: Category(PowerLaw(633, 0), "context", 0.8),
    9: Category(PowerLaw(3, 0, 0.2), "", 0.4),
    10: Category(PowerLaw(93145), "ad", 0.5),
    11: Category(PowerLaw(5683, 3, 6.0), "interest", 0.6),
    12: Category(PowerLaw(361_000_000), "ad", 0.15, "fine"),
    13: Category(PowerLaw(3194, 3, 5.0), "interest", 0.7),
    14: Category(PowerLaw(27, 1), "", 1.2),
    15: Category(PowerLaw(14992, 3, 6.0), "user", 0.5),
    16: Category(PowerLaw(29_900_000), "context", 0.15, "fine"),
    17: Category(PowerLaw(10, 1), "", 1.1),
    18: Category(PowerLaw(5652, 3, 2.0), "ad", 0.8),
    19: Category(PowerLaw(2173, 1), "interest", 0.4, "rest"),
    20: Category(PowerLaw(4, 4), "", 0.6, "rest"),
    21: Category(PowerLaw(107_000_000), "user", 0.15, "fine"),
    22: Category(PowerLaw(18, 0), "", 0.4, "C22"),
    23: Category(PowerLaw(15, 1), "", 1.0),
    24: Category(PowerLaw(286_181, 3), "context", 0.3, "fine"),
    25: Category(PowerLaw(105, 1), "", 0.9, "rest"),
    26: Category(PowerLaw(142_572, 3), "context", 0.3, "rest"),
}
COUNTS = {
    1: Count(1.6, 1.0, 5775, "pair"),
    2: Count(4.0, 1.5, 257_675),
    3: Count(7.0, 1.0, 65_535, "I3"),
    4: Count(5.0, 1.0, 969, "I4"),
    5: Count(2780.0, 1.0, 23_159_456, "I5"),
    6: Count(41.0, 1.0, 431_037, "I6"),
    7: Count(3.2, 1.0, 56_311, "counts"),
    8: Count(8.0, 1.0, 6047, "I8"),
    9: Count(42.0, 1.0, 29_019, "counts"),
    10: Count(0.7, 0.5, 11, "pair"),
    11: Count(1.3, 1.0, 231, "counts"),
    12: Count(0.5, 1.0, 4008, "I12"),
    13: Count(5.5, 1.0, 7393, "I4"),
}
MISSING = {
    "fine": 0.033, "rest": 0.453, "C6": 0.133, "C22": 0.819, "pair": 0.451, "counts": 0.048,
    "I3": 0.201, "I4": 0.202, "I5": 0.05, "I6": 0.252, "I8": 0.001, "I12": 0.774,
}  # fmt: skip


def columns(_: Knobs) -> list[Column]:
    features = [f"I{i}" for i in range(1, 14)] + [f"C{i}" for i in range(1, 27)]
    return [Column("label", "label", "integer")] + [
        Column(name, "public" if number % 2 else "sensitive", "integer" if number <= 13 else "category")
        for number, name in enumerate(features, 1)
    ]


def draw(d: Draws, index: Array, rows: int, knobs: Knobs) -> Rows:
    present = {name: ~d.coin(min(0.98, share * knobs.missing)) for name, share in MISSING.items()}
    entities = {name: d.bits() for name in ("ad", "context", "user", "interest")}
    words, attributes = {}, {}
    for i, column in CATEGORIES.items():
        bits = d.bits()
        if column.entity:  # a value of its own in one row of eight
            bits = np.where(bits & np.uint64(7), entities[column.entity], bits)
        law = PowerLaw(knobs.values(column.law.values), column.law.flatness, column.law.shift)
        words[i] = mix(law.ranks(bits), f"C{i}")
        attributes[i] = attribute(words[i])
        if column.missing:
            attributes[i] = attributes[i] * present[column.missing]
    busy = d.uniform()
    counts = {}
    for i, column in COUNTS.items():
        own = d.uniform()
        law = odds((own + busy) * 0.5 if i % 2 == 0 else own)  # the sensitive counts are those of one user
        counts[i] = np.minimum(column.scale * powers(law, column.exponent), column.most).astype(np.uint32)
    below = unit(d.bits())
    negative = np.where(below < 0.12, 1 + (below < 0.002).astype(np.uint32) + (below < 0.0005), 0).astype(np.uint32)
    counts[2] = np.where(negative > 0, 0, counts[2])

    curve = {i: saturate(counts[i], COUNTS[i].scale) for i in COUNTS}
    for i, column in COUNTS.items():
        if column.missing:
            curve[i] = np.where(present[column.missing], curve[i], 0.3)
    drift = (index / rows - 0.5) * knobs.drift
    public = _part(attributes, 0, drift)
    public += _rules(attributes, ((0.5, 6, 14, 2), (-0.6, 8, 18, 20), (0.5, 14, 10, 22)))
    public += _apart(attributes, ((1.2, 14, 2), (0.8, 6, 18)))
    public += (
        1.0 * curve[1] - 0.7 * curve[7] * (1.5 - curve[13]) + 0.8 * curve[3] * (attributes[14] > 0) - 0.6 * curve[11]
    )
    sensitive = _part(attributes, 1, drift)
    sensitive += _rules(attributes, ((0.6, 17, 23, 14), (-0.6, 1, 6, 25), (0.6, 5, 13, 8), (-0.5, 9, 18, 11)))
    sensitive += _apart(attributes, ((1.4, 17, 14), (1.0, 23, 6), (1.0, 5, 8)))
    segment = (attributes[17] > 0).astype(np.float64) + 2.0 * (attributes[6] > 0)
    frequency = np.where(present["I6"], saturate(counts[6], 15.0 + 30.0 * segment), 0.3)
    recency = np.where(present["I8"], 1.0 - saturate(counts[8], 4.0 + 6.0 * segment), 0.3)
    sensitive += 2.2 * frequency * recency + 0.7 * curve[2] - 0.5 * curve[4] + 0.5 * curve[12] * (attributes[23] > 0)

    def cells(label: Array) -> list[Cell]:
        text = [digits(label.astype(np.uint32))]
        for i, column in COUNTS.items():
            here = present[column.missing] if column.missing else None
            if i == 2:
                text.append([sign(negative > 0), *digits(np.where(negative > 0, negative, counts[2]))])
            else:
                text.append(digits(counts[i], here))
        text += [hex8(words[i], present[c.missing] if c.missing else None) for i, c in CATEGORIES.items()]
        return text

    return Rows(public, sensitive, None, cells)


def _part(attributes: dict[int, Array], odd: int, drift: Array) -> Array:
    """The saturated, drifting sum over the public (C with even numbers) or the sensitive categories."""
    steady = np.zeros(len(drift))
    moving = np.zeros(len(drift))
    for i, column in CATEGORIES.items():
        if i % 2 == odd:
            steady += column.weight * attributes[i]
            if i % 3 == 0:
                moving += column.weight * (np.abs(attributes[i]) - 0.5)
    return 4.0 * saturate(steady + 1.5 * drift * moving, 4.0)


def _rules(attributes: dict[int, Array], rules: tuple[tuple[float, int, int, int], ...]) -> Array:
    total = np.zeros(len(attributes[1]))
    for weight, a, b, c in rules:
        total += 2.0 * weight * ((attributes[a] > -0.2) & (attributes[b] > -0.2) & (attributes[c] < 0.2))
    return total


def _apart(attributes: dict[int, Array], pairs: tuple[tuple[float, int, int], ...]) -> Array:
    """How far two attributes lie apart: a taste, and what is offered."""
    total = np.zeros(len(attributes[1]))
    for weight, a, b in pairs:
        total -= weight * np.abs(attributes[a] - attributes[b])
    return total


WORLD = World("ctr", columns, draw, Knobs(positive_rate=0.25, bayes_auc=0.81, sensitive_share=0.42))
