"""Ad logs of any size with a planted truth, in the raw textual form of real logs.

A log is generated, never real: it says so in `generated.json`. Beside it lie the recipe that reads it and the true
probability (for `convs` the true mean) of every row, so that the best AUC any model can reach is known. The truths are
in `planted`, one file a world: hidden attributes of values, threshold rules over three of them, curves of frequency and
recency that depend on hidden segments, drift. None is a form that a model of ours could represent exactly.

The same preset, knobs, rows and seed give the same bytes on any machine, with any number of threads. Seeds share one
world: what a value means depends on the preset alone, so a log of another seed is a fresh test set.
"""

import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from adumbra import schema
from adumbra.data.planted import Column, Knobs, World, attribution, ctr, cvr
from adumbra.data.planted.lines import lines
from adumbra.data.planted.truth import Array, Draws, Score, calibrate
from adumbra.errors import InputError, WorkError

CHUNK = 1 << 15
PILOT = 1 << 127  # a key that no seed reaches
WORLDS = {world.name: world for world in (ctr.WORLD, cvr.WORLD, attribution.WORLD, attribution.CONVERSIONS)}
REAL = {"ctr": "criteo-display", "cvr": "criteo-search", "attribution": "criteo-attribution"}
BINS = 1 << 16


def columns(preset: str, **overrides: float) -> list[Column]:
    """The columns of the raw log in their order, with the roles that its recipe declares."""
    world = _world(preset)
    return world.columns(_knobs(world, overrides))


def recipe(preset: str, **overrides: float) -> str:
    """The recipe that reads the log: that of the real log whose form it has, declared as generated, or its own."""
    if preset not in REAL or (preset == "attribution" and not overrides.get("criteo")):
        return schema.text(f"generated-{preset}")
    return schema.text(REAL[preset]).replace("schema_version", 'stand_in = "generated"\nschema_version', 1)


def generate(
    preset: str,
    rows: int,
    out: Path,
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
    **overrides: float,
) -> dict[str, object]:
    """Write `log.tsv`, `truth.npy`, `generated.json` and `recipe.toml` into the folder `out`.

    `overrides` are fields of `Knobs`. `progress` is told how many rows are written so far. Returns what
    `generated.json` says. `out` appears when all is written and not before.
    """
    world = _world(preset)
    if rows < 1:
        raise InputError(f"rows is {rows}: a log has at least one")
    if not 0 <= seed < 2**64:
        raise InputError(f"seed is {seed}: it must lie between 0 and 2^64 - 1")
    if threads is not None and threads < 1:
        raise InputError(f"threads is {threads}: it must be at least 1")
    knobs = _knobs(world, overrides)
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty folder: name another, or remove it")
    log = Log(world, knobs, _calibrated(world, knobs), rows, seed)
    temporary = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        tally = _write(log, temporary, threads or min(os.cpu_count() or 1, 8), progress)
        about = {
            "generated": True,
            "preset": preset,
            "rows": rows,
            "seed": seed,
            "knobs": asdict(knobs),
            **tally.about(),
        }
        (temporary / "generated.json").write_text(json.dumps(about, indent=2) + "\n")
        (temporary / "recipe.toml").write_text(recipe(preset, **overrides))
        temporary.chmod(0o755)
        temporary.rename(out)
    except OSError as error:
        raise WorkError(f"cannot write {out}: {error.strerror}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return about


def _world(preset: str) -> World:
    if preset not in WORLDS:
        raise InputError(f"there is no preset {preset!r}: choose one of {', '.join(WORLDS)}")
    return WORLDS[preset]


def _knobs(world: World, overrides: dict[str, float]) -> Knobs:
    """The preset's knobs with those that were given, or an InputError that says which there are and how far they go."""
    criteo = bool(overrides.get("criteo", False))
    if criteo and world is not attribution.WORLD:
        raise InputError(
            "criteo belongs to the preset attribution: only that one has columns which the real log has not"
        )
    limits = {
        "positive_rate": (0.001, world.link.most_rate),
        "bayes_auc": (0.55, world.link.most_auc),
        "sensitive_share": (0.0, 0.0 if criteo else 1.0),
        "cardinality": (1e-6, 1e3),
        "drift": (0.0, 10.0),
        "missing": (0.0, 20.0),
        "criteo": (False, True),
    }
    for name, value in overrides.items():
        if name not in limits:
            raise InputError(f"there is no knob {name!r}: choose one of {', '.join(limits)}")
        low, high = limits[name]
        if not low <= value <= high:
            raise InputError(f"{name} is {value}: here it must lie between {low} and {high}")
    if criteo:
        overrides = {"sensitive_share": 0.0, **overrides}
    return replace(world.knobs, **overrides)


def _calibrated(world: World, knobs: Knobs) -> Score:
    """The score that has the rate, AUC and share asked for on a pilot: rows always the same, over all times."""
    n = 4 * CHUNK
    pilot = world.draw(Draws(PILOT, 0, n), np.arange(n), n, knobs)
    public, sensitive = pilot.public, pilot.sensitive
    if pilot.eligible is not None:
        public, sensitive = public[pilot.eligible], sensitive[pilot.eligible]
    return calibrate(public, sensitive, knobs.sensitive_share, knobs.positive_rate, knobs.bayes_auc, world.link)


@dataclass(frozen=True)
class Chunk:
    text: bytes
    truth: Array
    label: Array
    """Of the eligible rows, as `logit`."""
    logit: Array


@dataclass(frozen=True)
class Log:
    """All that decides the bytes."""

    world: World
    knobs: Knobs
    score: Score
    rows: int
    seed: int

    def header(self) -> bytes:
        names = [column.name for column in self.world.columns(self.knobs)]
        return ("\t".join(names) + "\n").encode() if self.world.header else b""

    def chunk(self, number: int) -> Chunk:
        first = number * CHUNK
        n = min(CHUNK, self.rows - first)
        draws = Draws(self.seed, number, n)
        drawn = self.world.draw(draws, np.arange(first, first + n), self.rows, self.knobs)
        logit = self.score(drawn.public, drawn.sensitive)
        mean = self.world.link.mean(logit)
        label = self.world.link.label(mean, draws.uniform())
        eligible = np.ones(n, dtype=bool) if drawn.eligible is None else drawn.eligible
        mean, label = mean * eligible, label * eligible
        return Chunk(lines(drawn.cells(label)), mean.astype("<f4"), label[eligible], logit[eligible])

    def chunks(self, threads: int) -> Iterator[Chunk]:
        """In order, with no more than a few in memory."""
        pending: deque[Future[Chunk]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            try:
                for number in range(-(-self.rows // CHUNK)):
                    pending.append(pool.submit(self.chunk, number))
                    if len(pending) > threads + 1:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)


def _write(log: Log, folder: Path, threads: int, progress: Callable[[int], None] | None) -> "Tally":
    tally = Tally()
    done = 0
    with (folder / "log.tsv").open("wb") as text, (folder / "truth.npy").open("wb") as truth:
        text.write(log.header())
        np.lib.format.write_array_header_1_0(truth, {"descr": "<f4", "fortran_order": False, "shape": (log.rows,)})
        for chunk in log.chunks(threads):
            text.write(chunk.text)
            truth.write(chunk.truth.tobytes())
            tally.add(chunk)
            done += len(chunk.truth)
            if progress is not None:
                progress(done)
    return tally


class Tally:
    """Label rate and AUC of the truth, from a histogram of logits: integers only."""

    def __init__(self) -> None:
        self.labels = 0
        self.total = 0
        self.zero = np.zeros(BINS, dtype=np.int64)
        self.positive = np.zeros(BINS, dtype=np.int64)

    def add(self, chunk: Chunk) -> None:
        bins = ((np.clip(chunk.logit, -16.0, 15.999) + 16.0) * (BINS / 32)).astype(np.int64)
        self.labels += len(chunk.label)
        self.total += int(chunk.label.sum())
        self.zero += np.bincount(bins[chunk.label == 0], minlength=BINS)
        self.positive += np.bincount(bins[chunk.label > 0], minlength=BINS)

    def about(self) -> dict[str, object]:
        zeros, positives = int(self.zero.sum()), int(self.positive.sum())
        below = np.cumsum(self.zero) * 2 - self.zero
        wins = sum(int(p) * int(b) for p, b in zip(self.positive, below, strict=True))
        auc = round(wins / (2 * zeros * positives), 4) if zeros and positives else None
        return {
            "labelled_rows": self.labels,
            "label_rate": round(self.total / max(1, self.labels), 6),
            "bayes_auc": auc,
        }
