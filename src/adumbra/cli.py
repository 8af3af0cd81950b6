"""The verbs. Each is a few lines: what it does stands in the rooms."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from adumbra.errors import InputError, WorkError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trains ad-prediction models privately when some features are public and the rest, with the label, are not.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on standard output.")]


def main() -> None:
    """Runs a verb. 0: done; 1: the work failed; 2: the input is wrong. No traceback for either."""
    try:
        app()
    except InputError as error:
        _fail(str(error), 2)
    except WorkError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("interrupted; what is complete is kept, and --resume goes on from there", 130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def _fail(message: str, status: int) -> None:
    print(f"adumbra: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


def _note(message: str) -> None:
    print(message, file=sys.stderr)


@app.command()
def init(
    recipe: Annotated[str | None, typer.Argument(help="A recipe that ships, to start from.")] = None,
    log: Annotated[Path | None, typer.Option("--from", help="A raw log, to fill in names and types from.")] = None,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("adumbra"),
) -> None:
    """Write a commented recipe and configuration to edit."""
    from adumbra import schema
    from adumbra.data import init as make

    if (recipe is None) == (log is None):
        raise InputError(f"init: give a recipe that ships ({', '.join(schema.shipped())}) or --from LOG")
    if log is not None:
        make.write(out, "store", make.recipe_from(log))
        _note(f"{out}/recipe.toml: now decide every column's role and the label's rule")
    else:
        make.write(out, f"stores/{recipe}", schema.text(str(recipe)))
        _note(f"{out}/recipe.toml and {out}/adumbra.toml")


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="A configuration or a recipe.")],
    changes: Annotated[list[str] | None, typer.Option("--set", help="section.key=value")] = None,
    as_json: Json = False,
) -> None:
    """Verify types, roles, budget and sizes. Runs nothing."""
    from adumbra import describe

    _print(describe.checked(config, tuple(changes or ())), as_json, describe.check_text)


@app.command()
def prepare(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of one that ships.")],
    source: Annotated[list[str], typer.Argument(help="The raw log: files, a folder or a glob.")],
    out: Annotated[Path, typer.Option(help="The store to make.")],
    resume: Annotated[bool, typer.Option(help="Continue an unfinished store.")] = False,
    bad_rows: Annotated[str, typer.Option(help="fail or skip")] = "fail",
    max_bad: Annotated[float, typer.Option(help="The share of rows that may be skipped.")] = 0.001,
    threads: Annotated[int, typer.Option(min=1, max=64)] = 2,
) -> None:
    """Make a store of a raw log."""
    from adumbra import schema, terminal
    from adumbra.data import prepare as data

    if bad_rows not in ("fail", "skip") or not 0 <= max_bad <= 1:
        raise InputError("--bad-rows is fail or skip, and --max-bad a share between 0 and 1")
    warnings: list[str] = []
    with terminal.progress() as progress:
        store = data.prepare(
            schema.load(recipe),
            source,
            out,
            resume=resume,
            bad_rows=data.BadRows(bad_rows == "skip", max_bad),
            threads=threads,
            progress=progress,
            warn=warnings,
        )
    for warning in warnings:
        _note(f"warning: {warning}")
    rows = ", ".join(f"{name} {count:,}" for name, count in store.splits.items())
    _note(f"{out}: {rows} rows")


@app.command()
def generate(
    rows: Annotated[int, typer.Option(help="How many rows.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    preset: Annotated[str, typer.Option(help="ctr, cvr, attribution or convs")] = "ctr",
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes on any machine.")] = 0,
    positive_rate: Annotated[float | None, typer.Option(help="The share of positive labels.")] = None,
    bayes_auc: Annotated[float | None, typer.Option(help="The AUC of the planted truth.")] = None,
    sensitive_share: Annotated[float | None, typer.Option(help="How much of the signal is sensitive.")] = None,
    cardinality: Annotated[float | None, typer.Option(help="A factor on the number of distinct values.")] = None,
    drift: Annotated[float | None, typer.Option(help="How fast the truth changes.")] = None,
    missing: Annotated[float | None, typer.Option(help="A factor on how much is missing.")] = None,
    criteo: Annotated[bool, typer.Option(help="attribution: exactly the real log's columns.")] = False,
    threads: Annotated[int, typer.Option(min=1, max=64)] = 2,
) -> None:
    """Write an ad log with a planted truth, and its recipe."""
    from adumbra import terminal
    from adumbra.data import generate as data

    given = {
        "positive_rate": positive_rate,
        "bayes_auc": bayes_auc,
        "sensitive_share": sensitive_share,
        "cardinality": cardinality,
        "drift": drift,
        "missing": missing,
    }
    knobs: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    knobs |= {"criteo": True} if criteo else {}
    with terminal.progress() as progress:
        about = data.generate(
            preset,
            rows,
            out,
            seed=seed,
            threads=threads,
            progress=lambda done: progress("generating", done, rows, done),
            **knobs,
        )
    _note(f"{out}: {rows:,} generated rows; the best reachable AUC is {about['bayes_auc']}")


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A configuration.")],
    out: Annotated[Path, typer.Option(help="The run's folder.")],
    changes: Annotated[list[str] | None, typer.Option("--set", help="section.key=value")] = None,
    resume: Annotated[bool, typer.Option(help="Continue an unfinished run.")] = False,
    start: Annotated[Path | None, typer.Option("--from", help="A released run to start from.")] = None,
    disjoint: Annotated[bool, typer.Option(help="--from: no unit is in both stores.")] = False,
    metrics: Annotated[str | None, typer.Option(help="A held-out split whose metrics are shown on the way.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
) -> None:
    """Train a model privately and release it with its statement."""
    from adumbra import config as configuration
    from adumbra import terminal
    from adumbra.training.run import fit

    if start is not None:
        changes = [*(changes or ()), f'start.run="{start.resolve()}"', f"start.disjoint={str(disjoint).lower()}"]
    with terminal.progress() as progress:
        run = fit(
            configuration.load(config, tuple(changes or ())),
            out,
            resume=resume,
            device=device,
            metrics=metrics,
            progress=progress,
            note=_note,
        )
    _note(f"{out}: epsilon {run.statement.epsilon:.4g}, delta {run.statement.delta:.3g}; see {out}/statement.md")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run.")],
    split: Annotated[str, typer.Option(help="validation or test")] = "test",
    by: Annotated[str | None, typer.Option(help="Also for each value of this public column.")] = None,
    device: str = "cpu",
    as_json: Json = False,
) -> None:
    """Metrics on held-out rows, which they give no protection."""
    from adumbra import terminal
    from adumbra.training.run import Run

    with terminal.progress() as progress:
        found = Run.open(run).evaluate(split, by=by, device=device, progress=progress)
    _print(found.as_json(), as_json, _lines)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run.")],
    source: Annotated[list[str], typer.Argument(help="Rows like those of the run's log.")],
    out: Annotated[Path, typer.Option(help="A .csv or .parquet file.")],
) -> None:
    """Probabilities (for counts, means) for new rows."""
    from adumbra import terminal
    from adumbra.training.run import Run

    with terminal.progress() as progress:
        rows = Run.open(run).predict(source, out, progress=progress)
    _note(f"{out}: {rows:,} predictions")


@app.command()
def inspect(path: Annotated[Path, typer.Argument(help="A store or a run.")], as_json: Json = False) -> None:
    """Show a store's columns, roles, encodings, sizes, splits and ledger; of a run, what it is and claims."""
    from adumbra import describe
    from adumbra.data.store import Store

    if describe.is_run(path):
        _print(describe.run(path), as_json, describe.run_text)
    else:
        _print(describe.store(Store.open(path).verify()), as_json, describe.store_text)


@app.command()
def account(
    path: Annotated[Path, typer.Argument(help="A configuration, a run or a store.")],
    changes: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, for a configuration")] = None,
    budget: Annotated[str | None, typer.Option(help="EPSILON,DELTA: a store takes no charge beyond it.")] = None,
    as_json: Json = False,
) -> None:
    """Show epsilon, delta and every charge behind them."""
    from adumbra import describe

    if budget is not None:
        describe.set_budget(path, budget)
    _print(describe.accounted(path, tuple(changes or ())), as_json, describe.account_text)


@app.command()
def purge(path: Annotated[Path, typer.Argument(help="A store, finished or not, or a run.")]) -> None:
    """Remove a store's rows, or a run's model and checkpoints; ledger and receipt stay."""
    from adumbra import describe
    from adumbra.data import purge as data

    _note(data.purge_run(path) if describe.is_run(path) else data.purge(path))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="A new folder.")] = Path("demo"),
    rows: Annotated[int, typer.Option(min=20_000, help="Rows of the generated log.")] = 400_000,
) -> None:
    """All of it on a generated log, in minutes."""
    from adumbra import demo as shown
    from adumbra import terminal

    with terminal.progress() as progress:
        shown.demo(out, rows, progress, _note)


def _lines(value: dict[str, Any]) -> str:
    return "\n".join(f"{name:<20} {entry}" for name, entry in value.items())


def _print(value: dict[str, Any], as_json: bool, text: Any) -> None:
    print(json.dumps(value) if as_json else text(value))


if __name__ == "__main__":
    main()
