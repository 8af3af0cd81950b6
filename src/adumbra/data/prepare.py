"""`prepare`: a raw log becomes a store. One pass over the text, which leaves encoded blocks; then, once the training
rows are known, counts, the layout of the tables, and the arrays.

Everything is built in `STORE.partial` and takes its name at the very end: a store that has its name is finished.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from adumbra.data import source, vocabulary
from adumbra.data.encode import Encoded, Encoder
from adumbra.data.source import Block, Reader
from adumbra.data.splits import Splits
from adumbra.data.spool import Spool
from adumbra.data.store import LEDGER, SPLITS, TOKENS, Store, unfinished, write_description
from adumbra.data.vocabulary import Layout
from adumbra.errors import InputError, WorkError
from adumbra.privacy.ledger import Ledger
from adumbra.schema import TOWERS, Recipe


class Progress(Protocol):
    """Told how far a long piece of work is."""

    def __call__(self, stage: str, done: int, total: int, rows: int) -> None: ...


def _silent(stage: str, done: int, total: int, rows: int) -> None:
    del stage, done, total, rows


@dataclass(frozen=True)
class BadRows:
    """What to do with rows of another shape, or with a malformed public value."""

    skip: bool = False
    most: float = 0.001
    """The share of rows that may be skipped."""


def prepare(
    recipe: Recipe,
    paths: list[str],
    out: str | Path,
    *,
    resume: bool = False,
    bad_rows: BadRows = BadRows(),
    threads: int = 2,
    progress: Progress = _silent,
    warn: "list[str] | None" = None,
) -> Store:
    """Makes the store `out` of the log in `paths` as `recipe` says.

    What leaves: for public columns exact counts of the training rows; for sensitive ones only counts noised by
    `privacy.counts`, charged in the store's ledger before they are drawn, once. Nothing else is computed from a
    protected column but the rows themselves, which the store holds for training alone (mode 0600).
    """
    out = Path(out)
    files = source.expand(paths, recipe)
    work = unfinished(out)
    with _private_files(), _disk(out):
        if out.exists():
            if resume and (out / "store.json").exists():
                shutil.rmtree(work, ignore_errors=True)
                store = Store.open(out)
                if store.description["recipe"] != _as_written(recipe):
                    raise InputError(f"{out}: a finished store of another recipe; choose another --out")
                return store
            raise InputError(f"{out}: exists already; choose another --out, or remove it")
        fresh = _begin(work, recipe, files, bad_rows, resume)
        try:
            _build(work, recipe, files, bad_rows, threads, progress, warn if warn is not None else [])
            os.rename(work / "store", out)
        except InputError:
            if fresh and not Ledger.open(work / "store" / LEDGER).charges:
                shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work)
    return Store.open(out)


@contextmanager
def _private_files() -> Iterator[None]:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


_NOWHERE = {
    getattr(errno, name) for name in ("EACCES", "EROFS", "EPERM", "ENOTDIR", "ENOENT", "EEXIST", "ENAMETOOLONG")
}


@contextmanager
def _disk(out: Path) -> Iterator[None]:
    try:
        yield
    except WorkError as error:  # the ledger could not be written
        raise InputError(f"{error}; free some space and go on with --resume") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None):  # None: numpy, when a write ends short
            raise InputError(f"{out}: the disk is full; free some space and go on with --resume") from None
        if error.errno in _NOWHERE:
            raise InputError(f"{out}: cannot be written ({error.strerror})") from None
        raise


def _begin(work: Path, recipe: Recipe, files: list[Path], bad_rows: BadRows, resume: bool) -> bool:
    """Makes the folder of an unfinished store, or takes it up again; whether it is a new one."""
    stats = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    cut = [source.BLOCK, source.PARQUET_ROWS, asdict(bad_rows)]
    text = json.dumps({"recipe": recipe.model_dump(mode="json", by_alias=True), "files": stats, "cut": cut})
    inputs = {"digest": hashlib.sha256(text.encode()).hexdigest()}
    if not work.exists():
        work.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{work.name}.", dir=work.parent))
        (draft / "store").mkdir()
        Ledger.create(draft / "store" / LEDGER)
        (draft / "inputs.json").write_text(json.dumps(inputs))
        os.rename(draft, work)
        return True
    if not (work / "inputs.json").exists():
        raise InputError(f"{work}: exists and is no unfinished store; choose another --out, or remove it")
    if not resume:
        raise InputError(f"{work}: an unfinished store; continue with --resume, or remove it with `adumbra purge`")
    if json.loads((work / "inputs.json").read_text()) != inputs:
        raise InputError(f"{work}: was begun with another recipe, files or --bad-rows; --resume needs the same ones")
    return False


def _build(
    work: Path,
    recipe: Recipe,
    files: list[Path],
    bad_rows: BadRows,
    threads: int,
    progress: Progress,
    warn: list[str],
) -> None:
    encoder = Encoder.of(recipe)
    spool = Spool(work / "spool", encoder).resume()
    reader = Reader(recipe, files)
    _read(reader, encoder, spool, bad_rows, threads, progress)
    ledger = Ledger.open(work / "store" / LEDGER)
    splits = Splits(recipe, spool, files)
    progress("counting", 0, 1, splits.rows)
    counted = vocabulary.release(recipe, spool, splits.train(), ledger)
    layout = vocabulary.lay_out(recipe, spool, counted)
    _write_arrays(work / "store", spool, splits, layout, threads, progress)
    _write_tokens(work / "store" / TOKENS, layout)
    write_description(work / "store", _description(recipe, reader, spool, splits, layout, ledger))
    if recipe.expect is not None and splits.rows != recipe.expect.rows:
        expected = f"{recipe.expect.rows:,} rows" + (f" ({recipe.expect.note})" if recipe.expect.note else "")
        warn.append(f"a complete {recipe.name} log gives {expected}; this one gives {splits.rows:,}")


def _read(reader: Reader, encoder: Encoder, spool: Spool, bad_rows: BadRows, threads: int, progress: Progress) -> None:
    """The pass over the text. Blocks are encoded side by side and completed in their order."""
    rows = sum(entry.rows for entry in spool.entries)
    skipped = sum(entry.skipped for entry in spool.entries)
    complete = len(spool.entries)

    def encode(number: int, block: Block) -> Encoded:
        where = f"{reader.files[block.file]}, line"
        encoded = encoder.encode(reader.cut(block, bad_rows.skip), bad_rows.skip, where)
        spool.write(number, encoded)
        return encoded

    with ThreadPoolExecutor(threads) as pool:
        pending: deque[tuple[int, Block, Future[Encoded]]] = deque()

        def finish() -> None:
            nonlocal rows, skipped
            number, block, future = pending.popleft()
            encoded = future.result()
            spool.complete(number, block.file, encoded)
            rows += len(encoded.label)
            skipped += encoded.skipped
            progress("reading", block.position, reader.total, rows)

        try:
            for number, block in enumerate(reader.blocks()):
                if number < complete:
                    continue
                pending.append((number, block, pool.submit(encode, number, block)))
                if len(pending) > threads:
                    finish()
            while pending:
                finish()
        except BaseException:
            for _, _, future in pending:
                future.cancel()
            raise
    if skipped > bad_rows.most * (rows + skipped):
        raise InputError(f"{skipped} of {rows + skipped} rows are bad, more than --max-bad {bad_rows.most:g} allows")


def _write_arrays(folder: Path, spool: Spool, splits: Splits, layout: Layout, threads: int, progress: Progress) -> None:
    """From provisional ids to the rows of the tables, each split in the order of the log."""
    recipe = spool.encoder.recipe
    widths = {tower: sum(c.length for c in layout.tokens if c.tower == tower) for tower in TOWERS}
    numbers = {tower: sum(c.tower == tower for c in layout.numbers) for tower in TOWERS}
    label = {"binary": np.uint8, "count": np.int32, "real": np.float32}[recipe.label.kind]
    shapes: dict[str, tuple[int, Any]] = {}
    for tower in TOWERS:
        shapes[tower] = widths[tower], np.int32
        shapes[f"numbers_{tower}"] = numbers[tower], np.float32
    shapes |= {"label": (-1, label)} | dict.fromkeys(spool.keys, (-1, np.int64))
    sinks = {
        (split, name): _Sink(folder / split / f"{name}.npy", splits.sizes[split], width, kind)
        for split in SPLITS
        if splits.sizes[split]
        for name, (width, kind) in shapes.items()
        if width
    }
    offsets: dict[str, int] = dict.fromkeys(SPLITS, 0)
    done = 0

    def write(block: int, places: dict[str, int]) -> int:
        arrays = _arrays(spool.read(spool.entries[block]), layout, widths, numbers, spool.keys)
        codes = splits.codes[block]
        for code, split in enumerate(SPLITS):
            mask = codes == code
            if mask.any():
                for name, array in arrays.items():
                    if (split, name) in sinks:
                        sinks[split, name].write(places[split], array if mask.all() else array[mask])
        return len(codes)

    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[int]] = deque()
        for block, codes in enumerate(splits.codes):
            pending.append(pool.submit(write, block, offsets.copy()))
            for code, split in enumerate(SPLITS):
                offsets[split] += int(np.count_nonzero(codes == code))
            if len(pending) > 2 * threads or block == len(splits.codes) - 1:
                while pending:
                    done += pending.popleft().result()
                    progress("writing", done, splits.rows, done)
                    if block < len(splits.codes) - 1:
                        break
    for sink in sinks.values():
        sink.close()


def _arrays(
    read: list[np.ndarray], layout: Layout, widths: dict[Any, int], numbers: dict[Any, int], keys: list[str]
) -> dict[str, np.ndarray]:
    """A block's final arrays, by name."""
    rows = len(read[-1])
    by_column: dict[str, np.ndarray] = {}
    for tower in TOWERS:
        by_column[tower] = np.empty((widths[tower], rows), np.int32)
        by_column[f"numbers_{tower}"] = np.empty((numbers[tower], rows), np.float32)
    for place, column in enumerate(layout.tokens):
        into = by_column[column.tower][column.start : column.start + column.length]
        into[:] = layout.rows(place, read[place]).reshape(rows, column.length).T
    for place, column in enumerate(layout.numbers, start=len(layout.tokens)):
        by_column[f"numbers_{column.tower}"][column.place] = column.scaled(read[place])
    arrays = {name: _by_row(array) for name, array in by_column.items()}
    arrays |= dict(zip(keys, read[-1 - len(keys) : -1], strict=True))
    arrays["label"] = read[-1]
    return arrays


def _by_row(columns: np.ndarray) -> np.ndarray:
    """The transpose, a few rows at a time: each line of the cache is then written once."""
    rows = np.empty(columns.shape[::-1], columns.dtype)
    for start in range(0, len(rows), 4096):
        rows[start : start + 4096] = columns[:, start : start + 4096].T
    return rows


class _Sink:
    """An .npy file of known size, written in any order."""

    def __init__(self, path: Path, rows: int, width: int, kind: Any) -> None:
        path.parent.mkdir(exist_ok=True)
        self.kind = np.dtype(kind)
        shape = (rows, width) if width > 0 else (rows,)
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": np.lib.format.dtype_to_descr(self.kind), "fortran_order": False, "shape": shape}
            )
            self.start = file.tell()
        self.stride = max(1, width) * self.kind.itemsize
        self.descriptor = os.open(path, os.O_WRONLY)

    def write(self, row: int, array: np.ndarray) -> None:
        data = memoryview(np.ascontiguousarray(array, self.kind).data).cast("B")
        place = self.start + row * self.stride
        while data:
            count = os.pwrite(self.descriptor, data, place)
            data, place = data[count:], place + count

    def close(self) -> None:
        os.close(self.descriptor)


def _write_tokens(path: Path, layout: Layout) -> None:
    """The values that have rows: what encodes new rows, and what an exported model carries."""
    path.parent.mkdir(exist_ok=True)
    schema = pa.schema(
        [
            ("feature", pa.dictionary(pa.int16(), pa.string())),
            ("token", pa.large_string()),
            ("hash", pa.uint64()),
            ("row", pa.int32()),
            ("count", pa.int64()),
        ]
    )
    names = pa.array(list(layout.values), pa.string())
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for place, values in enumerate(layout.values.values()):
            size = len(values.hashes)
            feature = pa.DictionaryArray.from_arrays(pa.array(np.full(size, place, np.int16)), names)
            rows = np.arange(values.first_row, values.first_row + size, dtype=np.int32)
            writer.write_table(
                pa.table([feature, values.text.to_arrow(), values.hashes, rows, values.counts], schema=schema)
            )


def _as_written(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _description(
    recipe: Recipe, reader: Reader, spool: Spool, splits: Splits, layout: Layout, ledger: Ledger
) -> dict[str, Any]:
    mechanism = vocabulary.private_counts(recipe)
    return {
        "name": recipe.name,
        "stand_in": recipe.stand_in,
        "recipe": _as_written(recipe),
        "source": [
            {"file": file.name, "bytes": file.stat().st_size, "sha256": digest}
            for file, digest in zip(reader.files, reader.digests, strict=True)
        ],
        "splits": {name: rows for name, rows in splits.sizes.items() if rows},
        "bad_rows_skipped": sum(entry.skipped for entry in spool.entries),
        "public_list_values_cut": sum(entry.cut for entry in spool.entries),
        "label": {"kind": recipe.label.kind},
        "keys": spool.keys,
        "table_rows": layout.table_rows,
        "tokens": [asdict(column) for column in layout.tokens],
        "numbers": [asdict(column) for column in layout.numbers],
        "counts": None
        if mechanism is None
        else {
            "epsilon": mechanism.epsilon,
            "delta": mechanism.delta,
            "sigma": mechanism.sigma,
            "columns": mechanism.columns,
            "release_threshold": mechanism.tau,
            "epsilon_vocabulary_known": mechanism.epsilon_vocabulary_known,
        },
        "ledger_head": list(ledger.head),
    }
