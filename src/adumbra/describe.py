"""What `check`, `inspect` and `account` say, as one object for scripts and as text for people. Neither holds anything
un-noised about a protected column."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adumbra import config as configuration
from adumbra import schema, toml
from adumbra.data.store import Store
from adumbra.errors import InputError
from adumbra.schema import TOWERS, Recipe

if TYPE_CHECKING:
    from adumbra.privacy.adjacency import Adjacency, Unit
    from adumbra.privacy.ledger import Charge
    from adumbra.privacy.statement import Statement


def checked(path: Path, changes: tuple[str, ...]) -> dict[str, Any]:
    """A recipe or a configuration, as far as it can be verified without running anything."""
    raw = toml.read(path)
    if "columns" in raw or "source" in raw:
        if changes:
            raise InputError("--set is for configurations; edit the recipe itself")
        return {"recipe": str(path), **_recipe(toml.parse(raw, Recipe, str(path)))}
    from adumbra.training import build, inputs
    from adumbra.training.run import plan

    config = configuration.load(path, changes)
    store = Store.open(config.data.store)
    inputs.check_suits(config.model.kind, store)
    planned = plan(config, store)
    if planned.private and not store.stand_in:
        store.ledger.check_budget(*planned.own)
    model = build.build(config.model, inputs.layout(store), config.seed)
    rows = planned.units
    warnings = []
    if planned.delta > 1 / rows * (1 + 1e-9):
        warnings.append(f"delta = {planned.delta:.3g} is above 1/n = {1 / rows:.3g}: it may give away a whole example")
    epsilon, delta = planned.claim
    return {
        "configuration": str(path),
        "store": str(config.data.store),
        "rows": rows,
        "method": config.method.kind,
        "model": config.model.kind,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "epsilon": epsilon if planned.private else None,
        "delta": delta,
        "adjacency": planned.adjacency.value,
        "unit": planned.unit.value,
        "counts_epsilon": sum(charge.epsilon for charge in planned.counts),
        "label_epsilon": planned.labels.epsilon if planned.labels else 0.0,
        "noise_multiplier": planned.dp_sgd.noise_multiplier if planned.dp_sgd else None,
        "steps": planned.dp_sgd.steps if planned.dp_sgd else 0,
        "warnings": warnings,
    }


def _recipe(recipe: Recipe) -> dict[str, Any]:
    roles: dict[str, int] = {}
    for column in recipe.columns:
        roles[column.role] = roles.get(column.role, 0) + 1
    return {
        "name": recipe.name,
        "columns": len(recipe.columns),
        "roles": roles,
        "features": {tower: sum(f.tower == tower for f in recipe.features) for tower in TOWERS},
        "counts": None if recipe.counts is None or not recipe.counted else recipe.counts.model_dump(),
        "warnings": [],
    }


def check_text(value: dict[str, Any]) -> str:
    lines = [f"{key.replace('_', ' '):<16} {_plain(entry)}" for key, entry in value.items() if key != "warnings"]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in value["warnings"]), "nothing was run"])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items())
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def store(store: Store) -> dict[str, Any]:
    """Columns, roles, encodings, sizes, splits and the ledger of a store."""
    about = store.description
    features = about["tokens"] + about["numbers"]
    order = {column["name"]: place for place, column in enumerate(about["recipe"]["columns"])}
    features.sort(key=lambda feature: order[feature["column"]])
    columns = [
        {
            "name": feature["name"],
            "role": feature["role"],
            "tower": feature["tower"],
            "type": feature["type"],
            "derivation": feature["derivation"],
            "encoding": feature.get("encoding", "number"),
            "size": feature.get("rows", 1),
            **({"threshold": feature["effective_threshold"]} if feature.get("effective_threshold") else {}),
        }
        for feature in features
    ]
    columns.insert(0, {"name": "label", "role": "label", "encoding": about["label"]["kind"], "size": 1})
    seen = {feature["column"] for feature in features}
    columns += [
        {"name": column["name"], "role": column["role"], "encoding": "key", "size": 1}
        for column in about["recipe"]["columns"]
        if column["role"] in schema.KEYS and column["name"] not in seen
    ]
    return {
        "name": about["name"],
        "stand_in": about["stand_in"],
        "purged": store.purged,
        "splits": about["splits"],
        "bad_rows_skipped": about["bad_rows_skipped"],
        "public_list_values_cut": about["public_list_values_cut"],
        "columns": columns,
        "towers": {
            tower: {
                "columns": [feature["name"] for feature in features if feature["tower"] == tower],
                "table_rows": about["table_rows"][tower],
            }
            for tower in TOWERS
        },
        # names alone: sizes and digests of the raw files are un-noised functions of protected values
        "source": [entry["file"] for entry in about["source"]],
        "ledger": account(store),
    }


def store_text(value: dict[str, Any]) -> str:
    lines = [f"{value['name']}" + (f" ({value['stand_in']}: nothing to protect)" if value["stand_in"] else "")]
    lines += ["purged: the rows are gone"] if value["purged"] else []
    lines += [f"rows       {', '.join(f'{name} {rows:,}' for name, rows in value['splits'].items())}"]
    if value["bad_rows_skipped"]:
        lines.append(f"           {value['bad_rows_skipped']:,} bad rows skipped")
    for tower, about in value["towers"].items():
        lines.append(f"{tower:<10} {len(about['columns'])} features, a table of {about['table_rows']:,} rows")
    lines += ["", f"{'column':<44} {'role':<11} {'encoding':<11} {'rows':>9}  threshold"]
    for column in value["columns"]:
        line = f"{column['name']:<44} {column['role']:<11} {column['encoding']:<11} {column['size']:>9,}"
        lines.append(f"{line}  {column['threshold']}" if "threshold" in column else line)
    return "\n".join([*lines, "", account_text(value["ledger"])])


def is_run(path: Path) -> bool:
    return (path / "run.json").exists() or (path / "statement.json").exists()


def run(path: Path) -> dict[str, Any]:
    """What a run is and claims."""
    from adumbra.training.run import Run

    found = Run.open(path)
    config = found.config
    return {
        "store": str(config.data.store),
        "model": config.model.kind,
        "method": config.method.kind,
        "claim": found.statement.claim,
        "warnings": list(found.statement.warnings),
        "ledger": _claimed(found.statement),
    }


def run_text(value: dict[str, Any]) -> str:
    head = f"{value['model']} by {value['method']} on {value['store']}"
    return "\n".join([head, value["claim"], *value["warnings"], "", account_text(value["ledger"])])


def accounted(path: Path, changes: tuple[str, ...]) -> dict[str, Any]:
    """Epsilon, delta and charges of a store, of a run, or of what a configuration would do."""
    if path.is_file():
        from adumbra.training.run import plan

        config = configuration.load(path, changes)
        store = Store.open(config.data.store)
        planned = plan(config, store)
        about = (planned.adjacency, planned.unit, planned.accountant)
        return _account(*planned.claim, *about, planned.charges, store.stand_in)
    if is_run(path):
        from adumbra.training.run import Run

        return _claimed(Run.open(path).statement)
    return account(Store.open(path))


def set_budget(path: Path, text: str) -> None:
    """Gives a store's ledger a budget, EPSILON,DELTA."""
    try:
        epsilon, delta = map(float, text.split(","))
    except ValueError:
        raise InputError(f"--budget {text}: expected EPSILON,DELTA, such as 20,1e-6") from None
    Store.open(path).ledger.set_budget(epsilon, delta)


def _claimed(claim: "Statement") -> dict[str, Any]:
    about = (claim.adjacency, claim.unit, claim.accountant)
    stand_in = "generated or public" if claim.stand_in else None
    return _account(claim.epsilon, claim.delta, *about, claim.charges, stand_in)


def _account(
    epsilon: float,
    delta: float,
    adjacency: "Adjacency",
    unit: "Unit",
    accountant: str,
    charges: tuple["Charge", ...],
    stand_in: str | None,
) -> dict[str, Any]:
    return {
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "delta": delta,
        "adjacency": adjacency.value,
        "unit": unit.value,
        "accountant": accountant,
        "stand_in": stand_in,
        "charges": [charge.to_json() for charge in charges],
        "vocabulary_known": None,
    }


def account(store: Store) -> dict[str, Any]:
    """What the store's ledger holds; across releases epsilons and deltas add up (privacy.md, rule 21)."""
    ledger = store.ledger
    epsilon, delta = ledger.total()
    counts = store.description["counts"]
    charges = [charge.to_json() for charge in ledger.charges]
    return {
        "epsilon": epsilon,
        "delta": delta,
        "adjacency": charges[0]["adjacency"] if charges else "replace-sensitive",
        "unit": charges[0]["unit"] if charges else "impression",
        "accountant": "pld",
        "stand_in": store.description["stand_in"],
        "charges": charges,
        "vocabulary_known": None
        if counts is None
        else {"epsilon": counts["epsilon_vocabulary_known"], "delta": counts["delta"]},
        **({"repaired": ledger.repaired} if ledger.repaired else {}),
    }


def _by_run(charges: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A run's blocks of steps as one line."""
    lines: list[dict[str, Any]] = []
    for charge in charges:
        last = lines[-1] if lines else None
        if last and charge["mechanism"] == last["mechanism"] == "dp-sgd" and charge["run"] == last["run"]:
            last["blocks"] += 1
            last["steps"] += charge["parameters"]["steps"]
            last["epsilon"] += charge["epsilon"]
            last["delta"] += charge["delta"]
            last["note"] = f"{last['steps']} steps in {last['blocks']} blocks, jointly with what the run spent before"
        else:
            lines.append({**charge, "blocks": 1, "steps": charge["parameters"].get("steps", 0)})
    return lines


def account_text(value: dict[str, Any]) -> str:
    if value["epsilon"] is None:
        return "without privacy: nothing is protected"
    lines = [f"the log is {value['stand_in']}: nothing is protected, nothing is charged"] if value["stand_in"] else []
    if not value["charges"]:
        return lines[0] if lines else "nothing has been spent"
    spent = f"epsilon {value['epsilon']:.4f}, delta {value['delta']:.3g} ({value['adjacency']}, one {value['unit']})"
    lines.append(f"in all: {spent}")
    for charge in _by_run(value["charges"]):
        lines.append(
            f"  {charge['mechanism']}: epsilon {charge['epsilon']:.4f}, delta {charge['delta']:.3g}; {charge['note']}"
        )
    if value["vocabulary_known"]:
        known = value["vocabulary_known"]
        lines.append(
            f"  if the values themselves were known, as papers assume, counting would be ({known['epsilon']:.4f},"
            f" {known['delta']:.3g})"
        )
    return "\n".join(lines)
