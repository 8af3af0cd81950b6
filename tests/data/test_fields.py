"""Cutting, hashing and reading of numbers against plain Python."""

import math
import re
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import recipe

from adumbra.data import fields
from adumbra.data.fields import MISSING, Strings
from adumbra.data.source import Block, Reader
from adumbra.errors import InputError

LETTERS = st.characters(blacklist_categories=("Cs",), blacklist_characters="\t\n\r\0")
VALUES = st.one_of(st.just(""), st.text(LETTERS, max_size=5), st.text("abé€😀", min_size=6, max_size=30))
WORD = 2**64 - 1


def hashed(value, seed):
    """The documented formula, in integers of Python."""
    data, state = value.encode(), seed
    for start in range(0, max(1, len(data)), 8):
        state = (state ^ int.from_bytes(data[start : start + 8], "little")) * 0x9E3779B97F4A7C15 & WORD
        state = (state ^ state >> 32) * 0xBF58476D1CE4E5B9 & WORD
        state ^= state >> 29
    return max(state, 2)


def texts(strings):
    return [value.decode() for value in (bytes(strings.take(np.array([i])).joined()) for i in range(len(strings)))]


def tables(width):
    return st.lists(st.lists(VALUES, min_size=width, max_size=width), max_size=12)


@pytest.fixture(params=[1, 40, None], scope="module")
def slices(request):
    """Blocks are cut a slice at a time; small ones here, too."""
    before = fields._SLICE
    fields._SLICE = request.param or before
    yield fields._SLICE
    fields._SLICE = before


FORMATS = {"\t": "tsv", ",": "csv", " ": "space"}


def cut(block, delimiter, width, skip_bad=False):
    """A block's rows in a log of `width` columns."""
    columns = [{"name": f"c{place}", "role": "public", "type": "category"} for place in range(width)]
    log = recipe(columns=columns, label={"rule": "c0"}, source={"format": FORMATS[delimiter]})
    reader = Reader(log, [])
    reader.files, reader.order = [Path("log")], [list(range(width))]
    return reader.cut(Block(0, 1, block), skip_bad)


@given(st.integers(2, 5).flatmap(tables), st.sampled_from("\t, "), st.booleans())
def test_cut_gives_back_what_was_joined(slices, rows, delimiter, returns):
    assert slices
    rows = [[value.replace(delimiter, "_") for value in row] for row in rows]
    if not rows:
        return
    end = "\r\n" if returns else "\n"
    found = cut("".join(delimiter.join(row) + end for row in rows).encode(), delimiter, len(rows[0]))
    assert len(found) == len(rows)
    assert found.lines.tolist() == list(range(1, len(rows) + 1))
    seed = np.uint64(12345)
    for strings, values in zip(found.columns, zip(*rows, strict=True), strict=True):
        assert texts(strings) == list(values)
        assert strings.to_arrow().to_pylist() == list(values)
        assert strings.hashes(seed).tolist() == [hashed(value, 12345) for value in values]
        assert strings.missing(("-1", values[0])).tolist() == [value in ("", "-1", values[0]) for value in values]
        assert strings.equal(values[-1]).tolist() == [value == values[-1] for value in values]
        assert texts(strings.trimmed()) == [value.strip(" ") for value in values]
        back = np.arange(len(values))[::-1]
        assert texts(strings.take(back)) == list(values)[::-1]
        assert strings.take(back).hashes(seed).tolist() == strings.hashes(seed).tolist()[::-1]


LINES = st.lists(st.lists(st.sampled_from(["", "a", "é", "long value"]), max_size=5), max_size=14)


@given(LINES, st.integers(2, 4))
@example([["a", "a"], ["a", "a", "a", "a"]], 3)
@example([["a", "a", "a", "a"], ["a", "a"]], 3)
@example([[], [], []], 2)
def test_lines_of_another_shape_are_found(slices, rows, width):
    assert slices
    block = "".join("\t".join(row) + "\n" for row in rows).encode()
    filled = [line for line, row in enumerate(rows, 1) if row not in ([], [""])]
    bad = [line for line in filled if len(rows[line - 1]) != width]
    good = [line for line in filled if len(rows[line - 1]) == width]
    if not block:
        return
    if bad:
        message = f"line {bad[0]}: {len(rows[bad[0] - 1])} fields, expected {width}"
        with pytest.raises(InputError, match=message):
            cut(block, "\t", width)
    found = cut(block, "\t", width, skip_bad=True)
    assert found.lines.tolist() == good
    assert found.skipped == len(bad)
    assert list(zip(*map(texts, found.columns), strict=True)) == [tuple(rows[line - 1]) for line in good]


SEED = 0x7715D60E3F5E9203
PINNED = {
    "": 0x3703AB50C5375C69,
    "a": 0x4D2AEF29E29A547D,
    "12345678": 0x3FFE9D0E59A1B1FB,
    "123456789": 0x6B23BB6CF5E54501,
    "größe": 0xD7C47548E3623073,
    "a value of more than sixteen bytes": 0x10F54C28713884B2,
}


def test_hashes_are_the_same_on_every_machine():
    assert int(fields.seed("adumbra", "site")) == SEED
    assert Strings.of(list(PINNED)).hashes(np.uint64(SEED)).tolist() == list(PINNED.values())


def test_hashes_keep_two_values_free():
    values = Strings.of([str(i) for i in range(100_000)])
    hashes = values.hashes(np.uint64(7))
    assert hashes.min() >= 2
    assert len(np.unique(hashes)) == 100_000
    bins = np.bincount(fields.bins(hashes, np.uint64(7), 100), minlength=100)
    assert abs(bins - 1000).max() < 6 * math.sqrt(1000)


@given(st.lists(VALUES, min_size=1, max_size=20), st.integers(1, 2**31 - 16))
def test_bins_are_the_high_half_scaled(values, count):
    strings, seed = Strings.of(values), fields.seed("key", "name")
    hashes = strings.hashes(seed)
    hashes[strings.missing(())] = MISSING
    expected = [((hashed(v, int(seed)) if v else hashed("\0missing", int(seed))) >> 32) * count >> 32 for v in values]
    assert fields.bins(hashes, seed, count).tolist() == expected


def whole(text):
    return float(int(text)) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else math.nan


def real(text):
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return math.nan
    return float(text) if math.isfinite(float(text)) else math.nan


def moment(text):
    if not math.isnan(whole(text)):
        return whole(text)
    form = r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?Z?)?"
    try:
        good = re.fullmatch(form, text, re.ASCII)
        return datetime.fromisoformat(text.removesuffix("Z")).replace(tzinfo=UTC).timestamp() if good else math.nan
    except ValueError:
        return math.nan


ODD = (
    *(
        "0",
        "7",
        "-7",
        "+3",
        "007",
        "-0",
        "3.0",
        "1e5",
        "1E5",
        "+1.5",
        ".5",
        "5.",
        "-.5",
        ".",
        "-",
        "+",
        "e5",
        "1e",
        "1e+",
    ),
    *("0x10", "-0x10", "0X1f", "1_000", "1,5", " 3", "3 ", "3\x0b", "nan", "NaN", "inf", "-inf", "Infinity", "1e400"),
    *("1e-400", "1e0005", "1e99999", "--1", "+-1", "٣", "½", "x", "true", "999999999999999999", "1000000000000000000"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "99999999999999999999", "9" * 400),
    *("2020-01-01", "2020-02-29", "2021-02-29", "2020-13-01", "2020-00-10", "2020-01-01T10:20:30Z", "0001-01-01"),
    *("2020-01-01 10:20", "2020-01-01T24:00:00", "2020-01-01T10:60", "2020-01-01T23:59:60", "2020-01-01Z", "20-1-1"),
    *("9999-12-31T23:59:59", "2020-01-01T10:20:30.5", "2020-01-01T10:20+01:00", "1969-12-31", "10000-01-01"),
)
NUMERALS = st.one_of(
    st.sampled_from(ODD),
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(repr),
    st.text("0123456789+-.eExX", min_size=1, max_size=8),
    st.datetimes().map(lambda t: t.strftime("%Y-%m-%d %H:%M:%S")),
)


def check(values):
    strings = Strings.of(values)
    missing = strings.missing(("-1",))
    for read, expected in (
        (lambda: fields.numbers(strings, missing, whole=True), whole),
        (lambda: fields.numbers(strings, missing, whole=False), real),
        (lambda: fields.seconds(strings, missing), moment),
    ):
        found, malformed = read()
        wanted = [math.nan if value in ("", "-1") else expected(value) for value in values]
        np.testing.assert_array_equal(found, wanted)
        assert malformed.tolist() == [
            v not in ("", "-1") and math.isnan(w) for v, w in zip(values, wanted, strict=True)
        ]


@pytest.mark.parametrize("value", ODD)
def test_a_number_is_one_whatever_stands_beside_it(value):
    for others in ([], ["12"], ["x"], ["", "-1", "2020-01-01"]):
        check([value, *others])


@given(st.lists(st.one_of(NUMERALS, st.just("")), max_size=10))
def test_numbers_and_times_are_those_of_python(values):
    check(values)


def test_strings_from_arrow_with_gaps_and_offsets():
    array = pa.array(["drop", "a", None, "größe", ""], pa.string())
    assert texts(Strings.from_arrow(array[1:])) == ["a", "", "größe", ""]
    assert texts(Strings.from_arrow(array[:0])) == []
    assert texts(Strings.from_arrow(pa.array([1, None, -3]))) == ["1", "", "-3"]
    assert texts(Strings.from_arrow(pa.nulls(2))) == ["", ""]
