"""How fast a raw log becomes a store: against pyarrow's parser alone, and against a plain polars pipeline, in one run.

    python benchmarks/prepare.py [--rows 5000000] [--more 20000000] [--folder DIR] [--json]

Every contender runs in a process of its own on the same generated log (preset ctr, 40 columns, vocabulary encoding),
after the file has been read once, with two threads. `--more` also prepares a longer log and compares peak memory.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

THREADS = 2
REPEAT = 3


def parse(log: Path, _: Path) -> None:
    import pyarrow as pa
    from pyarrow import csv

    pa.set_cpu_count(THREADS)
    csv.read_csv(
        log, csv.ReadOptions(autogenerate_column_names=True), csv.ParseOptions(delimiter="\t", quote_char=False)
    )


def polars(log: Path, out: Path) -> None:
    """What one would write without adumbra: counts of the first 80 %, enumerations, ids, all streamed."""
    import polars as pl

    from adumbra import schema

    names = [column.name for column in schema.load("criteo-display").columns]
    lines = pl.scan_csv(log, separator="\t", has_header=False, new_columns=names, infer_schema=False, quote_char=None)
    train = lines.head(int(0.8 * lines.select(pl.len()).collect().item()))
    queries = [train.group_by(name).len().filter(pl.col("len") >= 16).select(name) for name in names[1:]]
    kept = pl.collect_all(queries, engine="streaming")
    ids = []
    for name, frame in zip(names[1:], kept, strict=True):
        domain = pl.Enum(frame[name].drop_nulls().sort())
        ids.append(pl.col(name).cast(domain, strict=False).to_physical().fill_null(0).cast(pl.Int32))
    lines.select(pl.col("label").cast(pl.UInt8), *ids).sink_parquet(out, compression="uncompressed")


def adumbra(log: Path, out: Path) -> None:
    from adumbra import schema
    from adumbra.data.prepare import prepare

    prepare(schema.load("criteo-display"), [str(log)], out, threads=THREADS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--more", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "adumbra-benchmark")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        run_here(arguments.only, arguments.log, arguments.folder)
    else:
        report(measure(arguments.rows, arguments.more, arguments.folder), arguments.json)


def run_here(name: str, log: Path, folder: Path) -> None:
    """One contender, timed without its imports, in this process."""
    import pyarrow.parquet  # noqa: F401

    if name == "polars":
        import polars as pl  # noqa: F401
    if name == "adumbra":
        from adumbra.data import prepare  # noqa: F401
    out = folder / f"out-{name}"
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)
    started = time.perf_counter()
    {"pyarrow": parse, "polars": polars, "adumbra": adumbra}[name](log, out)
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "peak": highest_memory()}))
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)


def highest_memory() -> int:
    """The peak of this process; what getrusage says begins with its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def contend(name: str, log: Path, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--only", name, "--log", str(log), "--folder", str(folder)]
    environment = os.environ | {"POLARS_MAX_THREADS": str(THREADS), "OMP_NUM_THREADS": str(THREADS)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def generated(rows: int, folder: Path) -> tuple[Path, float | None]:
    """The log, and the rows/s at which it was generated (None where it lay there already)."""
    from adumbra.data.generate import generate

    out = folder / f"log-{rows}"
    if (out / "log.tsv").exists():
        return out / "log.tsv", None
    started = time.perf_counter()
    generate("ctr", rows, out, threads=THREADS)
    return out / "log.tsv", rows / (time.perf_counter() - started)


def seconds_of(*arguments: str) -> float:
    """The least of several runs of a command: start-up time, without what else the machine did."""
    times = []
    for _ in range(7):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return min(times)


def measure(rows: int, more: int, folder: Path) -> dict[str, object]:
    folder.mkdir(parents=True, exist_ok=True)
    log, rate = generated(rows, folder)
    size = log.stat().st_size
    contend("pyarrow", log, folder)  # the file is in memory from here on
    runs = {name: [contend(name, log, folder) for _ in range(REPEAT)] for name in ("pyarrow", "adumbra")}
    runs["polars"] = [contend("polars", log, folder)]
    times = {name: statistics.median(run["seconds"] for run in several) for name, several in runs.items()}
    nothing = seconds_of("-c", "pass")
    result = {
        "rows": rows,
        "megabytes": round(size / 1e6),
        "rows_per_second": {name: round(rows / seconds) for name, seconds in times.items()},
        "ratios": {
            "to_pyarrow_parse": round(times["pyarrow"] / times["adumbra"], 3),
            "to_polars_pipeline": round(times["polars"] / times["adumbra"], 3),
        },
        "peak_memory_gb": {name: round(max(run["peak"] for run in several) / 1e9, 2) for name, several in runs.items()},
        "generate_rows_per_second": None if rate is None else round(rate),
        "start_seconds": {
            "python -c pass": round(nothing, 3),
            "import adumbra": round(seconds_of("-c", "import adumbra"), 3),
            "adumbra --help": round(seconds_of("-m", "adumbra.cli", "--help"), 3),
        },
    }
    if more:
        longer, _ = generated(more, folder)
        run = contend("adumbra", longer, folder)
        result["more"] = {
            "rows": more,
            "rows_per_second": round(more / run["seconds"]),
            "peak_memory_gb": round(run["peak"] / 1e9, 2),
        }
    return result


def report(result: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<26} {value}")


if __name__ == "__main__":
    main()
