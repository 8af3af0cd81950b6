"""What `check`, `inspect` and `account` say, as one object for scripts and as text for people. Neither holds anything
un-noised about a protected column."""

from pathlib import Path
from typing import Any

from adumbra import config as configuration
from adumbra import schema, toml
from adumbra.data.store import Store
from adumbra.errors import InputError
from adumbra.schema import TOWERS, Recipe


def checked(path: Path, changes: tuple[str, ...]) -> dict[str, Any]:
    """A recipe or a configuration, as far as it can be verified without running anything."""
    raw = toml.read(path)
    if "columns" in raw or "source" in raw:
        if changes:
            raise InputError("--set is for configurations; edit the recipe itself")
        return {"recipe": str(path), **_recipe(toml.parse(raw, Recipe, str(path)))}
    config = configuration.load(path, changes)
    store = Store.open(config.data.store)
    rows = store.splits.get("train", 0)
    delta = 1 / rows if config.privacy.delta == "1/n" else config.privacy.delta
    counts = store.description["counts"]
    warnings = []
    if isinstance(delta, float) and delta > 1 / rows:
        warnings.append(f"delta = {delta:.3g} is above 1/n = {1 / rows:.3g}: it allows to give away a whole example")
    if counts is not None and store.description["stand_in"] is None and counts["epsilon"] >= config.privacy.epsilon:
        raise InputError(
            f"{path}: privacy.epsilon = {config.privacy.epsilon:g} is the total, and counting this store's values spent"
            f" {counts['epsilon']:.3g} already"
        )
    for name, phase in (("label_phase", config.label_phase), ("dp_phase", config.dp_phase)):
        if phase.batch_size > rows:
            raise InputError(f"{path}: {name}.batch_size = {phase.batch_size} is larger than the {rows} training rows")
    return {
        "configuration": str(path),
        "store": str(config.data.store),
        "rows": rows,
        "epsilon": config.privacy.epsilon,
        "delta": delta,
        "adjacency": config.privacy.adjacency,
        "unit": config.privacy.unit,
        "method": config.method.kind,
        "model": config.model.kind,
        "table_rows": store.description["table_rows"],
        "spent_on_counts": counts["epsilon"] if counts and store.description["stand_in"] is None else 0.0,
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
        "source": about["source"],
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


def account_text(value: dict[str, Any]) -> str:
    if value["stand_in"]:
        return f"nothing is charged: the log is {value['stand_in']}"
    if not value["charges"]:
        return "nothing has been spent"
    lines = [
        f"spent: epsilon {value['epsilon']:.4f}, delta {value['delta']:.3g} ({value['adjacency']}, one {value['unit']})"
    ]
    for charge in value["charges"]:
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
