"""A log in every form gives the same store; whatever is wrong with one is a line that says where."""

import bz2
import gzip
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import NAMES, SECRET, ads, contents, made, raw, recipe, refusal, vocabulary, write

from adumbra.data import source
from adumbra.data.source import Block, Reader

pytestmark = pytest.mark.filterwarnings("error")
ROWS = ads(150)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(source, "BLOCK", 1500)
    monkeypatch.setattr(source, "PARQUET_ROWS", 40)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The contents of the store of ROWS as plain tsv."""
    folder = tmp_path_factory.mktemp("plain")
    return contents(made(recipe(), write(folder / "log", ROWS), folder / "store").path)


def compressed(path, kind):
    data, out = Path(path).read_bytes(), Path(f"{path}.{kind}")
    if kind == "zst":
        with pa.CompressedOutputStream(str(out), "zstd") as stream:
            stream.write(data)
    else:
        out.write_bytes(gzip.compress(data) if kind == "gz" else bz2.compress(data))
    return str(out)


def table(rows=ROWS):
    """The rows as a table of proper types: integers with gaps as floats, lists, times."""
    columns = [[value or None for value in column] for column in zip(*rows, strict=True)]

    def each(place, kind):
        return [None if v is None else kind(v) for v in columns[place]]

    return pa.table(
        {
            "clicked": pa.array(each(0, int), pa.int8()),
            "site": pa.array(columns[1]).dictionary_encode(),
            "visits": pa.array(each(2, float), pa.float64()),
            "price": pa.array(each(3, float), pa.float64()),
            "interest": pa.array(columns[4], pa.large_string()),
            "recency": pa.array(each(5, float), pa.float64()),
            "segments": pa.array(each(6, lambda v: v.split("|")), pa.list_(pa.string())),
            "user": columns[7],
            "time": pa.array(
                each(8, lambda v: datetime.fromtimestamp(int(v), UTC).replace(tzinfo=None)), pa.timestamp("ms")
            ),
        }
    )


def quoted(rows):
    return [
        [f'"{value.replace(chr(34), chr(34) * 2)}"' if i % 2 == 0 else value for i, value in enumerate(row)]
        for row in rows
    ]


FORMS = {
    "tsv": lambda p: (write(p, ROWS), {"format": "tsv"}),
    "csv": lambda p: (write(p, ROWS, ","), {"format": "csv"}),
    "quoted": lambda p: (write(p, quoted(ROWS), ","), {"format": "csv", "quote": '"'}),
    "space": lambda p: (write(p, ROWS, " "), {"format": "space"}),
    "windows": lambda p: (write(p, ROWS, end="\r\n"), {"format": "tsv"}),
    "byte order mark": lambda p: (write(p, [["\ufeff" + ROWS[0][0], *ROWS[0][1:]], *ROWS[1:]]), {"format": "tsv"}),
    "blanks": lambda p: (write(p, [[f" {v}  " for v in row] for row in ROWS], ","), {"format": "csv", "trim": True}),
    "empty lines": lambda p: (write(p, [r for row in ROWS for r in (row, [""])]), {"format": "tsv"}),
    "header": lambda p: (write(p, ROWS, header=NAMES), {"format": "tsv", "header": True}),
    "quoted header": lambda p: (
        write(p, ROWS, ",", header=[f'"{n}"' for n in NAMES]),
        {"format": "csv", "header": True},
    ),
    "reordered": lambda p: (write(p, [r[::-1] for r in ROWS], header=NAMES[::-1]), {"format": "tsv", "header": True}),
    "parquet": lambda p: (pq.write_table(table(), p, row_group_size=64) or str(p), {"format": "parquet"}),
    "parquet reordered": lambda p: (
        pq.write_table(table().select(NAMES[::-1]), p) or str(p),
        {"format": "parquet"},
    ),
}


@pytest.mark.parametrize("kind", ["", "gz", "zst", "bz2"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_store(tmp_path, plain, form, kind):
    path, changes = FORMS[form](tmp_path / "log.txt")
    path = compressed(path, kind) if kind else path
    assert contents(made(recipe(source=changes), path, tmp_path / "store").path) == plain


def test_no_newline_at_the_end(tmp_path, plain):
    path = write(tmp_path / "log", ROWS)
    Path(path).write_bytes(Path(path).read_bytes()[:-1])
    assert contents(made(recipe(), path, tmp_path / "store").path) == plain


def test_a_folder_a_glob_and_several_files(tmp_path, plain):
    folder = tmp_path / "[logs]"
    folder.mkdir()
    write(folder / "a.tsv", ROWS[:50])
    write(folder / "c.tsv", ROWS[60:])
    compressed(write(tmp_path / "b.tsv", ROWS[50:60]), "gz")
    (tmp_path / "b.tsv.gz").rename(folder / "b.tsv.gz")
    (folder / "README.md").write_text("not a log")
    names = [str(folder / name) for name in ("a.tsv", "b.tsv.gz", "c.tsv")]
    for number, paths in enumerate(([str(folder)], names, [f"{tmp_path}/*logs?/*.tsv*"])):
        store = made(recipe(), paths, tmp_path / str(number))
        assert contents(store.path) == plain
        assert [entry["file"] for entry in store.description["source"]] == ["a.tsv", "b.tsv.gz", "c.tsv"]


def test_members_of_a_gzip_file_one_after_another(tmp_path, plain):
    parts = [write(tmp_path / f"part{n}", ROWS[n * 50 : n * 50 + 50]) for n in range(3)]
    (tmp_path / "log.gz").write_bytes(b"".join(gzip.compress(Path(part).read_bytes()) for part in parts))
    assert contents(made(recipe(), str(tmp_path / "log.gz"), tmp_path / "store").path) == plain


def test_quoted_values_hold_anything(tmp_path, monkeypatch):
    """Delimiters, newlines and doubled quotes, wherever a block happens to end."""
    odd = [list(row) for row in ROWS]
    for number, row in enumerate(odd):
        row[1] = ["a,b", 'say "hi"', "two\nlines", '"', ",\n,", "plain", "\r\n", ""][number % 8]
        row[4] = ["x\n" * 20, '""', "y"][number % 3]
    text = [[f'"{v.replace(chr(34), chr(34) * 2)}"' if set(v) & set('",\n\r') else v for v in row] for row in odd]
    pq.write_table(table(odd), tmp_path / "log.parquet")
    expected = made(recipe(source={"format": "parquet"}), str(tmp_path / "log.parquet"), tmp_path / "parquet")
    path = write(tmp_path / "log.csv", text, ",")
    for block in (80, 333, 1500, 1 << 20):
        monkeypatch.setattr(source, "BLOCK", block)
        store = made(recipe(source={"format": "csv", "quote": '"'}), path, tmp_path / str(block))
        assert contents(store.path) == contents(expected.path)
    assert {"a,b", 'say "hi"', "two\nlines", '"', ",\n,", "plain", "\r\n"} == set(vocabulary(expected.path)["site"])


def test_a_quote_is_opened_and_never_closed_in_a_large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "BLOCK", 1 << 20)
    rows = ads(20) * 2000
    rows[3] = [*rows[3][:4], '"' + SECRET, *rows[3][5:]]
    path = write(tmp_path / "log.csv", rows, ",")
    message = refusal(recipe(source={"format": "csv", "quote": '"'}), path, tmp_path / "store")
    assert "a quote is opened and never closed" in message


def test_lines_are_those_of_the_file_beside_quotes_and_gaps(tmp_path):
    text = b'a,1\n"x\ny\n",2\n\nbad\n"z",3\r\n\r\nb,4,5\n"q",6\n'
    columns = [{"name": n, "role": "public", "type": "category"} for n in "ab"]
    log = recipe(columns=columns, label={"rule": "a"}, source={"format": "csv", "quote": '"'})
    reader = Reader(log, [])
    reader.files, reader.order = [tmp_path / "log"], [[0, 1]]
    rows = reader.cut(Block(0, 11, text), True)
    assert rows.lines.tolist() == [11, 12, 17, 20]
    assert rows.skipped == 2
    assert rows.columns[0].to_arrow().to_pylist() == ["a", "x\ny\n", "z", "q"]
    path = tmp_path / "log.csv"
    path.write_bytes(text)
    assert "line 6: 1 fields, expected 2" in refusal(log, str(path), tmp_path / "store")


def secret_rows(rows=60):
    """Rows whose protected cells hold what no message may."""
    return [[SECRET if place in (0, 4, 5, 6) else value for place, value in enumerate(row)] for row in ads(rows)]


@pytest.mark.parametrize("line", [1, 2, 57, 200])
@pytest.mark.parametrize("change", ["few", "many", "one"])
def test_a_row_of_another_shape_is_named_by_its_line(tmp_path, line, change):
    rows = secret_rows(200)
    rows[line - 1] = {"few": rows[0][:-1], "many": [*rows[0], SECRET], "one": [SECRET]}[change]
    for form, delimiter in (("tsv", "\t"), ("csv", ",")):
        for header in (False, True):
            path = write(tmp_path / "log", rows, delimiter, header=NAMES if header else None)
            changes = {"format": form, "header": header, "quote": '"' if form == "csv" else ""}
            message = refusal(recipe(source=changes), path, tmp_path / "store")
            fields = {"few": 8, "many": 10, "one": 1}[change]
            assert f"line {line + header}: {fields} fields, expected 9" in message


def test_bad_rows_are_skipped_and_counted(tmp_path):
    rows = ads(200)
    for line in (0, 50, 51, 199):
        rows[line] = rows[line][:5]
    path = write(tmp_path / "log", rows)
    store = made(recipe(), path, tmp_path / "store", skip=True, most=0.02)
    assert sum(store.splits.values()) == 196
    assert store.description["bad_rows_skipped"] == 4
    assert "4 of 200 rows are bad, more than --max-bad 0.019" in refusal(
        recipe(), path, tmp_path / "more", skip=True, most=0.019
    )
    good = [row for row in rows if len(row) == 9]
    same = made(recipe(), write(tmp_path / "good", good), tmp_path / "same")
    assert contents(same.path)["train/public.npy"] == contents(store.path)["train/public.npy"]


def broken(kind, tmp_path):
    """A damaged log and what is said about it."""
    rows = secret_rows()
    path = tmp_path / "log.tsv"
    write(path, rows)
    data = path.read_bytes()
    lines = data.split(b"\n")
    match kind:
        case "utf-8":
            lines[44] = lines[44][:-2] + b"\xff\xfe"
            path.write_bytes(b"\n".join(lines))
            return path, "line 45: not valid UTF-8"
        case "zero byte":
            lines[30] = lines[30] + b"\0"
            path.write_bytes(b"\n".join(lines))
            return path, "line 31: holds a zero byte"
        case "utf-16":
            path.write_bytes(data.decode().encode("utf-16"))
            return path, "line 1: not valid UTF-8"
        case "empty":
            path.write_bytes(b"")
            return path, "the file is empty"
        case "newlines":
            path.write_bytes(b"\n\n\n")
            return path, "no row trains"
        case "header undeclared":
            write(path, rows, header=NAMES)
            return path, "the first line names columns, but the recipe declares no header"
        case "no such file":
            return tmp_path / "none.tsv", "no such file or folder"
        case "name too long":
            return tmp_path / ("x" * 300), "File name too long"
        case "empty folder":
            (tmp_path / "folder").mkdir()
            return tmp_path / "folder", "the folder holds no tsv file"
    kind, damage = kind.split()
    path = tmp_path / f"log.tsv.{kind}"
    if damage == "empty":
        path.with_suffix("").write_bytes(b"")
        compressed(str(tmp_path / "log.tsv"), kind)
        return path, "the file is empty"
    compressed(str(tmp_path / "log.tsv"), kind)
    data = path.read_bytes()
    path.write_bytes(
        {"cut": data[: len(data) * 2 // 3], "short": data[:-1], "head": data[:3], "text": b"x" + data[1:]}[damage]
    )
    return path, f"not readable as {kind}: truncated or damaged"


DAMAGE = [f"{kind} {damage}" for kind in ("gz", "zst", "bz2") for damage in ("empty", "cut", "short", "head", "text")]


@pytest.mark.parametrize(
    "kind",
    [
        *["utf-8", "zero byte", "utf-16", "empty", "newlines", "header undeclared"],
        *["no such file", "name too long", "empty folder", *DAMAGE],
    ],
)
def test_damage_is_one_line(tmp_path, kind):
    path, expected = broken(kind, tmp_path)
    assert expected in refusal(recipe(), str(path), tmp_path / "store")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ([*NAMES[:-1], "tiem"], "column 'tiem' is not declared"),
        (NAMES[:-1], "column 'time' of the recipe is missing"),
        ([*NAMES, "more"], "column 'more' is not declared"),
        ([*NAMES[:-1], "site"], "two columns are named 'site'"),
        (None, "the recipe declares a header, but the first line names 0 of 9"),
        (["clicked", *[SECRET] * 8], "the first line names 1 of 9"),
    ],
)
def test_headers_are_matched_one_by_one(tmp_path, header, expected):
    log = recipe(source={"header": True})
    assert expected in refusal(log, write(tmp_path / "log", secret_rows(), header=header), tmp_path / "store")
    if header is not None:
        second = [write(tmp_path / "first", ads(10), header=NAMES), str(tmp_path / "log")]
        assert expected in refusal(log, second, tmp_path / "store")


def test_one_file_twice_would_count_twice(tmp_path):
    path = write(tmp_path / "log.tsv", ads(10))
    assert "given twice" in refusal(recipe(), [path, str(tmp_path)], tmp_path / "store")


def test_parquet_that_is_none(tmp_path):
    log = recipe(source={"format": "parquet"})
    path = tmp_path / "log.parquet"
    pq.write_table(table(), path)
    data = path.read_bytes()
    for damaged in (
        data[:-1],
        data[:100],
        data[: len(data) // 2] + data[len(data) // 2 + 1 :],
        b"PAR1" * 9,
        b"\0" * 99,
    ):
        path.write_bytes(damaged)
        assert "log.parquet" in refusal(log, str(path), tmp_path / "store")
    pages = bytearray(data)
    pages[8:400] = b"\xff" * 392
    path.write_bytes(pages)
    assert "log.parquet" in refusal(log, str(path), tmp_path / "store")
    pq.write_table(table().rename_columns([*NAMES[:-1], "when"]), path)
    assert "column 'when' is not declared" in refusal(log, str(path), tmp_path / "store")
    pq.write_table(table().drop_columns(["site"]), path)
    assert "column 'site' of the recipe is missing" in refusal(log, str(path), tmp_path / "store")


@pytest.mark.parametrize(
    "values",
    [
        pa.array([{"a": 1}] * 150),
        pa.array([[[SECRET]]] * 150),
        pa.array([b"\xff\xfe"] * 150),
        pa.array([[("a", 1)]] * 150, pa.map_(pa.string(), pa.int8())),
    ],
    ids=lambda values: str(values.type),
)
@pytest.mark.parametrize("name", ["site", "interest", "segments"])
def test_parquet_of_types_that_no_text_has(tmp_path, values, name):
    path = tmp_path / "log.parquet"
    pq.write_table(table().set_column(NAMES.index(name), name, values), path)
    assert f"column '{name}'" in refusal(recipe(source={"format": "parquet"}), str(path), tmp_path / "store")


def test_parquet_of_other_types(tmp_path, plain):
    """Gaps as NaN, booleans, decimals, unsigned and dates."""
    columns = table()
    gaps = np.array([np.nan if v is None else v for v in columns["visits"].to_pylist()])
    columns = columns.set_column(0, "clicked", columns["clicked"].cast(pa.bool_()))
    columns = columns.set_column(2, "visits", pa.array(gaps))
    columns = columns.set_column(3, "price", columns["price"].cast(pa.decimal128(12, 3)))
    pq.write_table(columns, tmp_path / "log.parquet")
    store = made(recipe(source={"format": "parquet"}), str(tmp_path / "log.parquet"), tmp_path / "store")
    assert contents(store.path) == plain
    days = raw(source={"format": "parquet"})
    pq.write_table(
        columns.set_column(8, "time", pa.array([18_000] * 150, pa.int32()).cast(pa.date32())), tmp_path / "days"
    )
    store = made(recipe(days), str(tmp_path / "days"), tmp_path / "by days")
    assert set(store.split("train")["time"]) == {18_000 * 86_400}
