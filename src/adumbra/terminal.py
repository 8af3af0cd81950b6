"""Progress of long work on standard error: a bar where a person looks on, a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_EVERY = 5.0


class Report(Protocol):
    def __call__(self, stage: str, done: int, total: int, rows: int) -> None: ...


@contextmanager
def progress() -> Iterator[Report]:
    """A function that is told the stage, how much of how much is done (bytes or rows), and the rows so far."""
    if sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[rate]:>14}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, tuple[int, float, int]] = {}

        def report(stage: str, done: int, total: int, rows: int) -> None:
            if stage not in tasks:
                for task, _, _ in tasks.values():
                    bar.update(task, completed=bar.tasks[task].total)  # pyright: ignore[reportArgumentType]
                tasks[stage] = bar.add_task(stage, total=total, rate=""), time.monotonic(), rows
            task, began, first = tasks[stage]
            bar.update(task, completed=done, rate=_rate(rows - first, time.monotonic() - began))  # pyright: ignore[reportArgumentType]

        yield report


def _lines() -> Report:
    started: dict[str, tuple[float, int, int]] = {}
    last = time.monotonic()

    def report(stage: str, done: int, total: int, rows: int) -> None:
        nonlocal last
        now = time.monotonic()
        began, first, rows_before = started.setdefault(stage, (now, done, rows))
        if now - last >= _EVERY and done > first:
            last = now
            left = (now - began) * (total - done) / (done - first)
            rate = _rate(rows - rows_before, now - began)
            print(f"{stage} {100 * done // max(1, total)} %, {rate}, {left:.0f} s left", file=sys.stderr)

    return report


def _rate(rows: int, seconds: float) -> str:
    return f"{rows / seconds:,.0f} rows/s" if seconds > 0.2 else ""
