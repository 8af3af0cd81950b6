"""Journeys of users who see ads, click and convert: the form of the Criteo Attribution log, and counts of conversions.

A chunk of rows is a window of time. Its journeys (one user, one campaign, 1 to 12 impressions) lie in one window each;
users come back in any window, by a power law. A campaign belongs to one advertiser. The label of a click is drawn from
its truth first; then the earlier clicks of the same journey become the steps that led to it: the same conversion, with
a lower click_pos. Some conversions come later than 30 days, and some are not attributed: neither is a label.

The truth of a click: hidden attributes of the campaign and of the nine contextual categories in a saturated sum that
drifts; a cost curve whose half-way point depends on a hidden segment; a threshold rule over three columns. Sensitive:
frequency times recency of interest, with half-way points that depend on the advertiser's segment; the saturated sum of
the attributes of the user's segments; the distance of the publisher's attribute from the user's first segment. An
impression that was not clicked has truth 0.

`convs` takes every row for a click and draws a Poisson number of conversions whose mean is exp of that score: over
rows, counts vary more than a Poisson law would.
"""

from dataclasses import replace

import numpy as np

from . import Column, Knobs, Rows, World
from .lines import MISSING, Cell, decimals, digits, sign
from .truth import COUNT, Array, Draws, PowerLaw, attribute, hashed, mix, odds, saturate, unit

DAYS, DAY = 30, 86_400
CATS = (9, 70, 1829, 21, 51, 30, 57_196, 11, 30)
BITS = 26  # ids have up to eight digits
SEGMENTS = 12


def columns(knobs: Knobs) -> list[Column]:
    real = [
        Column("timestamp", "time", "timestamp"),
        Column("uid", "user", "category"),
        Column("campaign", "public", "category"),
        *(Column(name, "outcome", "integer") for name in ("conversion", "conversion_timestamp", "conversion_id")),
        Column("attribution", "label", "integer"),
        *(Column(name, "outcome", "integer") for name in ("click", "click_pos", "click_nb")),
        Column("cost", "public", "real"),
        Column("cpo", "outcome", "real"),
        Column("time_since_last_click", "outcome", "integer"),
        *(Column(f"cat{i}", "public", "category") for i in range(1, 10)),
    ]
    return real if knobs.criteo else real + _further()


def _further() -> list[Column]:
    return [
        Column("publisher", "publisher", "category"),
        Column("advertiser", "advertiser", "category"),
        Column("segments", "sensitive", "list"),
        Column("recency_days", "sensitive", "integer"),
        Column("frequency", "sensitive", "integer"),
    ]


def conversion_columns(_: Knobs) -> list[Column]:
    return [
        Column("conversions", "label", "integer"),
        Column("value", "outcome", "real"),
        Column("timestamp", "time", "timestamp"),
        Column("uid", "user", "category"),
        Column("campaign", "public", "category"),
        Column("cost", "public", "real"),
        *(Column(f"cat{i}", "public", "category") for i in range(1, 10)),
        *_further(),
    ]


def draw(d: Draws, index: Array, rows: int, knobs: Knobs) -> Rows:
    features = _Features(d, index, rows, knobs)
    clicked = d.uniform() < 0.36 + 0.06 * attribute(features.value["campaign"], "click")
    outcome = _Outcome(d, index, rows, features, clicked)
    names = [column.name for column in columns(knobs)]

    def cells(label: Array) -> list[Cell]:
        return _ordered(features.cells() | outcome.cells(label), names)

    return Rows(features.public, features.sensitive, clicked, cells)


def draw_counts(d: Draws, index: Array, rows: int, knobs: Knobs) -> Rows:
    features = _Features(d, index, rows, knobs)
    names = [column.name for column in conversion_columns(knobs)]
    basket = np.minimum(2500.0 * odds(d.uniform()), 1e6)

    def cells(label: Array) -> list[Cell]:
        value = (basket * label).astype(np.uint32)
        return _ordered(features.cells() | {"conversions": digits(label), "value": decimals(value, 2)}, names)

    return Rows(features.public, features.sensitive, None, cells)


def _ordered(cells: dict[str, Cell], names: list[str]) -> list[Cell]:
    return [cells[name] for name in names]


class _Features:
    """What is known when the ad is shown."""

    def __init__(self, d: Draws, index: Array, rows: int, knobs: Knobs) -> None:
        n = len(index)
        self.second = DAYS * DAY * index // rows

        # Shuffle the rows into journeys; `order` lists them journey by journey, in time order within each.
        turn = np.argsort(d.bits(), kind="stable")
        begins = d.coin(0.42)
        begins[0] = True
        journey = np.cumsum(begins)
        self.order = turn[np.lexsort((turn, journey))]
        self.journey = journey
        first = np.maximum.accumulate(np.where(begins, np.arange(n), 0))

        def shared(bits: Array) -> Array:
            """One draw a journey."""
            result = np.empty_like(bits)
            result[self.order] = bits[first]
            return result

        users = max(2, rows)
        bits = max(BITS, users.bit_length())
        self.value: dict[str, Array] = {}
        v = self.value
        v["uid"] = mix(PowerLaw(users, 1, 0.06 * rows + 1.0).ranks(shared(d.bits())), "uid", bits)
        v["campaign"] = self._ids("campaign", PowerLaw(knobs.values(675), 2, 6.0), shared(d.bits()))
        v["advertiser"] = self._ids("advertiser", PowerLaw(knobs.values(180), 2, 3.0), hashed(v["campaign"], "a"))
        v["publisher"] = self._ids("publisher", PowerLaw(knobs.values(3000), 3, 3.0), d.bits())
        for i, values in enumerate(CATS, 1):
            own = d.bits()
            # The odd categories follow the campaign in most rows, the even ones the place where the ad is shown.
            source = hashed(v["campaign" if i % 2 else "publisher"], f"cat{i}")
            law = PowerLaw(knobs.values(values), 1 if values < 100 else 3)
            v[f"cat{i}"] = self._ids(f"cat{i}", law, np.where(own & np.uint64(3), own, source))
        self.cost = np.minimum(20.0 * odds(d.uniform()), 5e6).astype(np.uint32) + 1  # millionths
        self.frequency = np.minimum(
            3.0 * odds((unit(hashed(v["uid"], "busy")) + unit(shared(d.bits()))) * 0.5), 999
        ).astype(np.uint32)
        self.recency = np.minimum(4.0 * odds(unit(shared(d.bits()))), 365).astype(np.uint32)
        self.known = unit(hashed(v["uid"], "known")) >= min(0.98, 0.15 * knobs.missing)
        length = unit(hashed(v["uid"], "segments"))
        length = (length * length * (SEGMENTS + 1)).astype(np.uint32)
        self.segments = [
            (length > i, PowerLaw(knobs.values(300), 2).ranks(hashed(v["uid"], f"segment {i}")) * SEGMENTS + i)
            for i in range(SEGMENTS)
        ]
        self._score(index / rows - 0.5, knobs)

    @staticmethod
    def _ids(name: str, law: PowerLaw, bits: Array) -> Array:
        return mix(law.ranks(bits), name, BITS)

    def _score(self, when: Array, knobs: Knobs) -> None:
        a = {name: attribute(value) for name, value in self.value.items() if name != "uid"}
        weights = (0.7, 0.8, 0.6, 0.6, 0.5, 0.7, 0.3, 0.5, 0.4)
        total = 1.1 * a["campaign"] + 1.2 * when * knobs.drift * np.abs(a["campaign"])
        for i, weight in enumerate(weights, 1):
            total += weight * a[f"cat{i}"]
        self.public = 4.0 * saturate(total, 4.0)
        self.public += 1.2 * saturate(self.cost, np.where(a["cat1"] > 0, 10.0, 60.0))
        self.public += 1.0 * ((a["campaign"] > -0.3) & (a["cat2"] > -0.3) & (a["cat6"] < 0.3))
        frequency = saturate(self.frequency, np.where(a["advertiser"] > 0, 1.5, 8.0))
        recency = 1.0 - saturate(self.recency, np.where(a["cat4"] > 0, 2.0, 15.0))
        interest = np.zeros(len(when))
        for here, segment in self.segments:
            interest += attribute(segment) * here
        here, segment = self.segments[0]
        away = np.abs(attribute(segment) - a["publisher"]) * here
        self.sensitive = 3.5 * frequency * recency * self.known + 1.5 * saturate(interest, 1.0) - 0.6 * away

    def cells(self) -> dict[str, Cell]:
        cells = {name: digits(value) for name, value in self.value.items()}
        cells["timestamp"] = digits(self.second)
        cells["cost"] = decimals(self.cost, 6)
        cells["recency_days"] = digits(self.recency, self.known, MISSING)
        cells["frequency"] = digits(self.frequency, self.known, MISSING)
        cells["segments"] = []
        for i, (here, segment) in enumerate(self.segments):
            cells["segments"] += ([sign(here, mark=b"|")] if i else []) + digits(segment + np.uint32(1000), here)
        return cells


class _Outcome:
    """What happened after: worked out journey by journey, so that all rows of one tell the same story."""

    def __init__(self, d: Draws, index: Array, rows: int, features: _Features, clicked: Array) -> None:
        self.features, self.clicked = features, clicked
        self.number = mix(index, "conversion", max(BITS, rows.bit_length()))
        self.delay = (14_000.0 * odds(0.9945 * d.uniform())).astype(np.int64)  # below 30 days
        self.other = d.uniform()
        self.before = np.minimum(90_000.0 * odds(d.uniform()), DAYS * DAY).astype(np.int64)
        self.known_before = d.coin(0.45)
        self.cpo = np.minimum(100_000.0 * odds(d.uniform()), 5e6).astype(np.uint32) + 1000

    def cells(self, label: Array) -> dict[str, Cell]:
        f, n = self.features, len(label)
        order = f.order
        clicked, label, second = self.clicked[order], label[order] > 0, f.second[order]
        late = clicked & ~label & (self.other[order] < 0.01)
        unattributed = clicked & ~label & (self.other[order] > 0.985)
        ends = label | late | unattributed

        # A path runs from after one end (or the start of the journey) to the next end, or leads nowhere.
        starts = np.empty(n, dtype=bool)
        starts[0] = True
        starts[1:] = (f.journey[1:] != f.journey[:-1]) | ends[:-1]
        path = np.cumsum(starts) - 1
        end = np.full(int(path[-1]) + 1, -1)
        end[path[ends]] = np.flatnonzero(ends)
        end = end[path]
        converted = end >= 0
        clicks = np.cumsum(clicked)
        start = np.maximum.accumulate(np.where(starts, np.arange(n), 0))
        earlier = clicks[start] - clicked[start]
        position = clicks - earlier - 1
        count = clicks[end] - earlier

        delay = np.where(late[end], DAYS * DAY + 1 + self.delay[order][end], self.delay[order][end])
        when = second[end] + delay

        last = np.maximum.accumulate(np.where(clicked, np.arange(n), -1))
        previous = np.concatenate([[-1], last[:-1]])
        same = (previous >= 0) & (f.journey[previous] == f.journey)
        since = np.where(same, second - second[previous], self.before[order])

        def column(values: Array, present: Array | None = None) -> Cell:
            if present is None:
                return digits(_back(values, order))
            return digits(_back(np.where(present, values, 0), order), _back(present, order), MISSING)

        on_path = converted & clicked
        return {
            "conversion": column(converted.astype(np.uint32)),
            "conversion_timestamp": column(when, converted),
            "conversion_id": column(self.number[order][end], converted),
            "attribution": column((converted & ~unattributed[end]).astype(np.uint32)),
            "click": column(clicked.astype(np.uint32)),
            "click_pos": column(position, on_path),
            "click_nb": column(count, on_path),
            "cpo": decimals(self.cpo, 6),
            "time_since_last_click": column(since, same | self.known_before[order]),
        }


def _back(values: Array, order: Array) -> Array:
    result = np.empty_like(values)
    result[order] = values
    return result


KNOBS = Knobs(positive_rate=0.067, bayes_auc=0.75, sensitive_share=0.4)
WORLD = World("attribution", columns, draw, KNOBS, header=True)
CONVERSIONS = World("convs", conversion_columns, draw_counts, replace(KNOBS, positive_rate=0.15), COUNT, header=True)
