"""`adumbra demo`: all of it on a generated log, in minutes: four methods at one budget, a table and a picture."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adumbra import schema
from adumbra.config import Config
from adumbra.data.generate import generate
from adumbra.data.prepare import prepare
from adumbra.data.store import Store
from adumbra.errors import InputError
from adumbra.evaluation.metrics import relative_auc_loss
from adumbra.terminal import Report
from adumbra.training.run import fit

EPSILON = 8.0

# Every method was searched over the same grid on such a log: DP-SGD phases with rates .001, .003, .01 and clip norms
# 3, 10, 30 (then 6 and 12 epochs); label phases and ordinary training with rates .0003, .001, .003; Hybrid also with
# splits .25 and .5, ordinary training with weight decay. Noise, sampling and randomised labels are secret, so figures
# move a little from run to run.
_MODEL = {"kind": "fm", "dim": 8}
_ORDINARY = {"epochs": 4, "batch_size": 2048, "learning_rate": 0.003}
_DP = {"epochs": 12, "batch_size": 8192, "learning_rate": 0.003, "clip_norm": 10.0}
METHODS: dict[str, dict[str, Any]] = {
    "non-private": {
        "method": {"kind": "none"},
        "model": _MODEL | {"embedding_decay": 1e-5},
        "label_phase": _ORDINARY | {"epochs": 6, "learning_rate": 0.001},
    },
    "label DP (public features)": {"method": {"kind": "label-dp"}, "label_phase": _ORDINARY},
    "DP-SGD (all features)": {"method": {"kind": "dp-sgd"}, "dp_phase": _DP},
    "Hybrid": {
        "method": {"kind": "hybrid", "split": 0.5},
        "label_phase": _ORDINARY | {"epochs": 3, "learning_rate": 0.001},
        "dp_phase": _DP,
    },
}


@dataclass(frozen=True)
class Result:
    method: str
    auc: float
    log_loss: float
    epsilon: float | None
    relative_auc_loss: float | None


def demo(out: Path, rows: int, progress: Report, note: Callable[[str], None]) -> list[Result]:
    """Generates, prepares, trains and compares in the folder `out`; writes results.json and results.svg."""
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out}: exists already; choose another --out, or remove it")
    note(f"generating {rows:,} clicks on ads, of which one in ten leads to a sale (a generated log, not a real one)")
    about = generate(
        "cvr", rows, out / "log", threads=2, progress=lambda done: progress("generating", done, rows, done)
    )
    note("preparing: 17 public and 3 sensitive features, the label protected")
    recipe = schema.load(out / "log" / "recipe.toml")
    store = prepare(recipe, [str(out / "log" / "log.tsv")], out / "store", progress=progress)
    found: list[Result] = []
    for name, settings in METHODS.items():
        note(f"training: {name}" + (f", epsilon {EPSILON:g}" if settings["method"]["kind"] != "none" else ""))
        found.append(_run(name, settings, store, out, found, progress))
        note(f"  AUC {found[-1].auc:.4f}")
    bayes = about["bayes_auc"]
    assert isinstance(bayes, float)
    (out / "results.json").write_text(
        json.dumps({"generated": about, "epsilon": EPSILON, "results": [vars(result) for result in found]}, indent=1)
    )
    _draw(found, bayes, out / "results.svg")
    note(table(found, bayes))
    note(f"\npicture {out}/results.svg; what Hybrid claims {out}/hybrid/statement.md")
    return found


def _run(
    name: str, settings: dict[str, Any], store: Store, out: Path, before: list[Result], progress: Report
) -> Result:
    config = {
        "data": {"store": str(store.path)},
        "model": _MODEL,
        "privacy": {"epsilon": EPSILON},
        **settings,
    }
    folder = out / name.split(" (")[0].replace(" ", "-").lower()
    # A bar's stage per method: the phases of several runs have the same names.
    run = fit(Config.model_validate(config), folder, progress=lambda stage, *rest: progress(f"{name}: {stage}", *rest))
    metrics = run.evaluate("test").as_json()
    base = before[0].auc if before else None
    claim = run.statement.epsilon if settings["method"]["kind"] != "none" else None
    return Result(name, metrics["auc"], metrics["log_loss"], claim, relative_auc_loss(metrics["auc"], base))


def table(results: list[Result], bayes: float) -> str:
    lines = [f"\n{'method':<28} {'epsilon':>7} {'AUC':>7} {'AUC loss, relative':>19} {'log loss':>9}"]
    for result in results:
        epsilon = "-" if result.epsilon is None else f"{result.epsilon:.3g}"
        relative = "-" if result.relative_auc_loss is None else f"{100 * result.relative_auc_loss:+.2f} %"
        lines.append(f"{result.method:<28} {epsilon:>7} {result.auc:>7.4f} {relative:>19} {result.log_loss:>9.4f}")
    return "\n".join([*lines, f"{'the planted truth (bound)':<28} {'-':>7} {bayes:>7.4f}"])


def _draw(results: list[Result], bayes: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 2.6))
    colours = {"Hybrid": "#1b6ca8", "non-private": "#555555"}
    names = [result.method for result in results]
    bars = axes.barh(names, [result.auc for result in results], color=[colours.get(name, "#a9bcd0") for name in names])
    axes.bar_label(bars, fmt="%.4f", padding=3)
    axes.axvline(bayes, color="#b04a3a", linestyle="--", linewidth=1)
    axes.text(bayes, -0.75, "planted truth ", color="#b04a3a", ha="right", va="center", fontsize=8)
    low = min(result.auc for result in results)
    axes.set_xlim(max(0.5, low - 0.03), bayes + 0.012)
    axes.invert_yaxis()
    axes.set_xlabel(f"AUC on held-out rows; private methods at ε = {EPSILON:g}, δ = 1/n (generated log)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
