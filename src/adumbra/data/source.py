"""The raw log: which files it is, read block by block, decompressed and digested on the way."""

# pyright: reportAttributeAccessIssue=false
import errno
import glob
import hashlib
import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from adumbra.data import fields
from adumbra.data.fields import Strings
from adumbra.errors import InputError
from adumbra.schema import Recipe

BLOCK = 16 << 20
"""Bytes of text in a block: small enough for the cache, large enough that Python costs nothing."""
LONGEST_LINE = 64 << 20
PARQUET_ROWS = 32_768

_COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_SUFFIXES = {
    "csv": (".csv", ".txt"),
    "tsv": (".tsv", ".csv", ".txt"),
    "space": (".txt", ".csv"),
    "parquet": (".parquet",),
}


def expand(paths: list[str], recipe: Recipe) -> list[Path]:
    """The files that a file, a folder, a glob or several of them name, in order."""
    files: list[Path] = []
    for given in paths:
        path = Path(given)
        try:
            path.stat()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise InputError(f"{given}: {error.strerror}") from None
        if path.is_dir():
            suffixes = _SUFFIXES[recipe.source.format]
            found = sorted(f for f in path.iterdir() if f.is_file() and _bare(f).endswith(suffixes))
            if not found:
                raise InputError(f"{given}: the folder holds no {recipe.source.format} file ({', '.join(suffixes)})")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            found = sorted(Path(name) for name in glob.glob(given) if Path(name).is_file())
            if not found:
                raise InputError(f"{given}: no such file or folder")
            files += found
    seen: set[Path] = set()
    for file in files:
        if file.stat().st_size == 0:
            raise InputError(f"{file}: the file is empty")
        if file.resolve() in seen:
            raise InputError(f"{file}: given twice; every row would count twice")
        seen.add(file.resolve())
    return files


def _bare(file: Path) -> str:
    return file.name.removesuffix(file.suffix) if file.suffix in _COMPRESSION else file.name


@dataclass(frozen=True)
class Block:
    """Some whole rows of one file."""

    file: int
    first_line: int
    """The line (parquet: the row) at which it begins, from 1."""
    text: bytes = b""
    batch: pa.RecordBatch | None = None
    position: int = 0
    """How much of the log's files (in bytes as they lie on disk) has been read when it ends."""


@dataclass(frozen=True)
class Rows:
    """The values of a block, column by column in the recipe's order, with the line of each row."""

    columns: list[Strings]
    lines: np.ndarray
    skipped: int

    def __len__(self) -> int:
        return len(self.lines)

    def take(self, kept: np.ndarray, skipped: int) -> "Rows":
        return Rows([column.take(kept) for column in self.columns], self.lines[kept], skipped)


class Reader:
    """Reads a log's files one after another, and knows their digests when it is through."""

    def __init__(self, recipe: Recipe, files: list[Path]) -> None:
        self.recipe = recipe
        self.files = files
        self.digests: list[str] = []
        self.total = sum(file.stat().st_size for file in files)
        self.names = [column.name for column in recipe.columns]
        self.order: list[list[int]] = []

    def blocks(self) -> Iterator[Block]:
        done = 0
        self.digests, self.order = [], []
        for number, file in enumerate(self.files):
            read = self._parquet if self.recipe.source.format == "parquet" else self._text
            for block in read(number, file):
                yield Block(block.file, block.first_line, block.text, block.batch, done + block.position)
            done += file.stat().st_size

    def _text(self, number: int, file: Path) -> Iterator[Block]:
        raw = _Hashing(file)
        line, rest, started = 1, b"", False
        with raw, _decompressed(raw, file) as stream:
            while True:
                try:
                    part = stream.read(BLOCK)
                except (OSError, EOFError, pa.ArrowException):
                    raise InputError(f"{file}: not readable as {file.suffix[1:]}: truncated or damaged") from None
                text = rest + part
                if not part and text and not text.endswith(b"\n"):
                    text += b"\n"
                end = self._whole_lines(text)
                if not part and end < len(text):
                    raise InputError(f"{file}, line {line}: a quote is opened and never closed")
                if end == 0 and len(text) > LONGEST_LINE:
                    raise InputError(
                        f"{file}, line {line}: longer than {LONGEST_LINE >> 20} MiB; is this the declared format?"
                    )
                text, rest = text[:end], text[end:]
                if text and not started:
                    text = text.removeprefix(b"\xef\xbb\xbf")
                    started = True
                    skip = self._header(file, text)
                    line += 1 if skip else 0
                    text = text[skip:]
                if text:
                    yield Block(number, line, text, position=raw.count)
                    line += int(np.count_nonzero(np.frombuffer(text, np.uint8) == 10))
                if not part:
                    break
        if not started:
            raise InputError(f"{file}: the file is empty")
        self.digests.append(raw.digest.hexdigest())

    def _whole_lines(self, text: bytes) -> int:
        """Where the last whole row ends; a newline between quotes ends none."""
        end = text.rfind(b"\n") + 1
        quote = self.recipe.source.quote.encode()
        if end and quote and quote in text:
            ends = _record_ends(np.frombuffer(text, np.uint8, end), quote)
            end = int(ends[-1]) + 1 if len(ends) else 0
        return end

    def _header(self, file: Path, text: bytes) -> int:
        """Matches the header, if there is to be one, column by column; how many bytes it has."""
        source = self.recipe.source
        end = text.index(b"\n") + 1
        first = text[:end].decode("utf-8", "replace").rstrip("\r\n").split(source.delimiter)
        first = [name.strip().strip(source.quote or '"') for name in first]
        known = {name.lower() for name in self.names}
        looks = sum(name.lower() in known for name in first)
        if not source.header:
            if looks >= max(2, len(self.names) // 2) or (looks and len(self.names) == 1):
                raise InputError(
                    f"{file}: the first line names columns, but the recipe declares no header (header = true)"
                )
            self.order.append(list(range(len(self.names))))
            return 0
        if looks < max(1, len(self.names) // 2):  # else the message might quote a row's values
            raise InputError(
                f"{file}: the recipe declares a header, but the first line names {looks} of {len(self.names)} columns"
            )
        self._match(file, first)
        return end

    def _match(self, file: Path, names: list[str]) -> None:
        """A file's columns are matched with the recipe's one by one, by name."""
        for place, name in enumerate(names, 1):
            if name not in self.names:
                # what a name cannot be may be a row's value, in a file whose lines end otherwise than it should
                quoted = f"'{name}'" if name.isprintable() and len(name) <= 100 else str(place)
                raise InputError(
                    f"{file}: column {quoted} is not declared; give it a role in the recipe (or as = 'drop')"
                )
            if names.count(name) > 1:
                raise InputError(f"{file}: two columns are named '{name}'")
        for name in self.names:
            if name not in names:
                raise InputError(f"{file}: column '{name}' of the recipe is missing")
        self.order.append([names.index(name) for name in self.names])

    def _parquet(self, number: int, file: Path) -> Iterator[Block]:
        try:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            with _seekable(file) as stream:
                table = pq.ParquetFile(stream)
                self._match(file, table.schema_arrow.names)
                row, size = 1, file.stat().st_size
                for batch in table.iter_batches(PARQUET_ROWS):
                    done = size * (row + batch.num_rows) // max(1, table.metadata.num_rows)
                    yield Block(number, row, batch=batch, position=min(size, done))
                    row += batch.num_rows
        except (OSError, pa.ArrowException):
            raise InputError(f"{file}: not readable as parquet: truncated or damaged") from None
        self.digests.append(digest)

    def cut(self, block: Block, skip_bad: bool) -> Rows:
        """A block's rows; one of another shape than the recipe's is an error that names its line, or skipped."""
        order = self.order[block.file]
        where = f"{self.files[block.file]}, line"
        if block.batch is not None:
            columns = [
                _text_of(block.batch.column(place), self.recipe, c, self.files[block.file])
                for c, place in enumerate(order)
            ]
            return Rows(columns, np.arange(block.first_line, block.first_line + block.batch.num_rows), 0)
        if not block.text.isascii():
            self._check_utf8(block, where)
        if (place := block.text.find(b"\0")) >= 0:
            line = block.first_line + block.text.count(b"\n", 0, place)
            raise InputError(f"{where} {line}: holds a zero byte; is this text in UTF-8?")
        source = self.recipe.source
        if source.quote and source.quote.encode() in block.text:
            return self._cut_quoted(block, skip_bad, where)
        cut = fields.cut(block.text, source.delimiter, len(order))
        if len(cut.bad) and not skip_bad:
            raise InputError(f"{where} {block.first_line + cut.bad[0]}: {cut.fields} fields, expected {len(order)}")
        found = cut.columns()
        columns = [found[place] for place in order]
        if source.trim:
            columns = [column.trimmed() for column in columns]
        return Rows(columns, cut.lines + block.first_line, len(cut.bad))

    def _check_utf8(self, block: Block, where: str) -> None:
        try:
            block.text.decode("utf-8")
        except UnicodeDecodeError as error:
            line = block.first_line + block.text.count(b"\n", 0, error.start)
            raise InputError(f"{where} {line}: not valid UTF-8") from None

    def _cut_quoted(self, block: Block, skip_bad: bool, where: str) -> Rows:
        source, width = self.recipe.source, len(self.names)
        bad: list[tuple[int, int]] = []

        def note(row: pa_csv.InvalidRow) -> str:
            bad.append((row.number or 0, row.actual_columns))
            return "skip"

        names = [str(place) for place in range(width)]
        try:
            table = pa_csv.read_csv(
                pa.py_buffer(block.text),
                pa_csv.ReadOptions(column_names=names, use_threads=False, block_size=len(block.text) + 1),
                pa_csv.ParseOptions(
                    delimiter=source.delimiter,
                    quote_char=source.quote,
                    newlines_in_values=True,
                    invalid_row_handler=note,
                ),
                pa_csv.ConvertOptions(column_types={name: pa.string() for name in names}, strings_can_be_null=False),
            )
        except pa.ArrowInvalid as error:
            raise InputError(f"{where} {block.first_line}: not readable ({str(error).split(':')[0]})") from None
        lines = _record_lines(block.text, source.quote.encode()) + block.first_line
        if len(lines) != table.num_rows + len(bad):
            raise InputError(f"{where} {block.first_line} or later: a quote or a carriage return stands within a value")
        if bad and not skip_bad:
            row, found = bad[0]
            raise InputError(f"{where} {lines[row - 1]}: {found} fields, expected {width}")
        columns = [Strings.from_arrow(table.column(place).combine_chunks()) for place in self.order[block.file]]
        if source.trim:
            columns = [column.trimmed() for column in columns]
        return Rows(columns, np.delete(lines, [row - 1 for row, _ in bad]), len(bad))


def _record_ends(text: np.ndarray, quote: bytes) -> np.ndarray:
    """The newlines that end a record: those that stand between no quotes."""
    newlines = np.flatnonzero(text == 10)
    quotes = np.flatnonzero(text == ord(quote))
    return newlines[np.searchsorted(quotes, newlines) % 2 == 0]


def _record_lines(block: bytes, quote: bytes) -> np.ndarray:
    """The line, from 0, at which each record of a block begins that is not empty."""
    text = np.frombuffer(block, np.uint8)
    ends = _record_ends(text, quote)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lines = np.searchsorted(np.flatnonzero(text == 10), starts)
    empty = (ends == starts) | ((ends == starts + 1) & (text[starts] == 13))
    return lines[~empty]


def _text_of(array: pa.Array, recipe: Recipe, place: int, file: Path) -> Strings:
    try:
        return _as_text(array, recipe, place)
    except pa.ArrowException:
        raise InputError(f"{file}: column '{recipe.columns[place].name}' is of type {array.type}, no text") from None


def _as_text(array: pa.Array, recipe: Recipe, place: int) -> Strings:
    """A parquet column as the text that a delimited log would hold."""
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), None, array)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        array = pc.binary_join(array.cast(pa.list_(pa.string())), recipe.columns[place].separator)
    elif pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    elif pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
    elif pa.types.is_floating(array.type) and recipe.columns[place].type != "real":
        whole = array.cast(pa.int64(), safe=False)
        if pc.all(pc.fill_null(pc.equal(whole.cast(array.type), array), True)).as_py():
            array = whole  # integers with gaps arrive as floats from many tools
    return Strings.from_arrow(array)


def head(file: Path, size: int) -> str:
    """The whole lines at the beginning of a text file."""
    try:
        with _Hashing(file) as raw, _decompressed(raw, file) as stream:
            text = stream.read(size)
    except (OSError, pa.ArrowException):
        raise InputError(f"{file}: not readable: truncated or damaged") from None
    whole = text[: text.rfind(b"\n") + 1] or text
    try:
        return whole.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = whole[: error.start].count(b"\n") + 1
        raise InputError(f"{file}, line {line}: not valid UTF-8") from None


class _Hashing(io.RawIOBase):
    """A file that is digested and counted while it is read, in order."""

    def __init__(self, file: Path) -> None:
        try:
            self._file = file.open("rb", buffering=0)
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}") from None
        self.digest = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: "memoryview | bytearray") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        count = self._file.readinto(into)
        self.digest.update(memoryview(into)[:count])
        self.count += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def _seekable(file: Path) -> "Iterator[Path | IO[bytes]]":
    """The file, or a decompressed copy without a name: parquet is not read in order."""
    if file.suffix not in _COMPRESSION:
        yield file
        return
    with _Hashing(file) as raw, _decompressed(raw, file) as stream, tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy, BLOCK)
        yield copy


def _decompressed(raw: _Hashing, file: Path) -> io.BufferedIOBase:
    """The file's text. pyarrow's stream reports a truncated file and reads concatenated members, for all three."""
    if file.suffix not in _COMPRESSION:
        return io.BufferedReader(raw, BLOCK)
    return pa.CompressedInputStream(pa.PythonFile(raw, "r"), _COMPRESSION[file.suffix])
