"""Predictions for new rows: files in, one file out, in constant memory."""

import csv
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import torch

from adumbra.data.rows import Encoding
from adumbra.errors import InputError, WorkError
from adumbra.evaluation.evaluate import BATCH, Model, Progress, ahead, infer
from adumbra.evaluation.metrics import predictions

_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def predict(
    model: Model,
    encoding: Encoding,
    inputs: list[str],
    out: str | Path,
    *,
    keep: tuple[str, ...] = (),
    batch_size: int = BATCH,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> int:
    """Writes `out` (.csv, .tsv or .parquet): the row's number from 1, the input's columns named in `keep`, and the
    prediction: a probability (binary label), a mean (count), the value (real). Says how many rows got one.

    A row that the recipe's filter leaves out gets none and is not in `out`. The file appears when it is complete.
    """
    out, rows = Path(out), 0
    if out.suffix not in (*_DELIMITERS, ".parquet"):
        raise InputError(f"{out}: predictions are written as .csv, .tsv or .parquet; end the name in one of them")
    if out.exists():
        raise InputError(f"{out}: exists already; choose another --out, or remove it")
    if clash := sorted({"row", "prediction"} & set(keep)) or (len(set(keep)) < len(keep) and ["(twice)"]):
        raise InputError(f"column '{clash[0]}' cannot be kept: predictions have a column of that name")
    fields = [("row", pa.int64()), *((name, pa.large_string()) for name in keep), ("prediction", pa.float32())]
    schema = pa.schema(fields)
    with _complete(out) as draft, _writer(draft, out.suffix, schema) as writer:
        for block in ahead(encoding.blocks(inputs, keep=keep)):
            logits = [part for _, part in infer(model, block.split, batch_size=batch_size, device=device)]
            if logits:
                predicted = predictions(_sound(np.concatenate(logits), block.numbers), encoding.recipe.label.kind)
                with np.errstate(over="ignore"):
                    columns = [block.numbers, *block.kept.values(), predicted.astype(np.float32)]
                writer.write_table(pa.table(columns, schema=schema))
            rows += len(block.numbers)
            if progress is not None:
                progress("predicting", block.position, block.total, rows)
    return rows


def _sound(logits: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    wrong = ~np.isfinite(logits)
    if wrong.any():
        raise WorkError(f"row {numbers[wrong][0]}: the model's output is NaN or infinite: it diverged")
    return logits


@contextmanager
def _complete(out: Path) -> Iterator[Path]:
    """A draft that takes its name when all went well, and is removed otherwise."""
    draft = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        yield draft
        os.rename(draft, out)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise WorkError(f"{out}: the disk is full") from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.ENOENT):
            raise InputError(f"{out}: cannot be written ({error.strerror})") from None
        raise
    finally:
        draft.unlink(missing_ok=True)


class _Writer(Protocol):
    def write_table(self, table: pa.Table) -> Any: ...


@contextmanager
def _writer(path: Path, suffix: str, schema: pa.Schema) -> Iterator[_Writer]:
    if suffix == ".parquet":
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            yield writer
        return
    delimiter = _DELIMITERS[suffix]
    with path.open("w", newline="") as header:
        csv.writer(header, delimiter=delimiter, lineterminator="\n").writerow(schema.names)
    options = pa_csv.WriteOptions(include_header=False, delimiter=delimiter)
    with path.open("ab") as file, pa_csv.CSVWriter(file, schema, write_options=options) as writer:
        yield writer
