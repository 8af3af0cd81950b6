"""Removes what may not be kept, and leaves what was spent."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

from adumbra.data.store import DESCRIPTION, LEDGER, Store, unfinished
from adumbra.errors import InputError

RECEIPT = "purged.json"


def purge(path: Path) -> str:
    """Removes a store's rows and vocabulary, or an unfinished store; what it spent stays on record. Says what it did.

    The receipt is written first: a purge that is interrupted has begun, and purging again completes it.
    """
    partial = path if path.name.endswith(".partial") else unfinished(path)
    if not path.exists() and partial.exists():
        path = partial
    if path == partial and (path / "inputs.json").exists():
        return _purge_unfinished(path)
    store = Store.open(path)
    receipt = path / RECEIPT
    if not receipt.exists():
        when = datetime.now(UTC).isoformat(timespec="seconds")
        receipt.write_text(json.dumps({"purged": when, "files": sorted(store.description["files"])}, indent=1) + "\n")
    for entry in path.iterdir():
        if entry.name not in (LEDGER, DESCRIPTION, RECEIPT):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if (partial / "inputs.json").exists() and not (partial / "store").exists():  # a kill just before the end left it
        shutil.rmtree(partial)
    return f"{path}: rows removed; {LEDGER}, {DESCRIPTION} and {RECEIPT} stay"


def purge_run(path: Path) -> str:
    """Removes what a run made, its model and checkpoints with it; what it claimed and what it spent stay."""
    kept = {LEDGER, "config.toml", "run.json", "statement.json", "statement.md"}
    for entry in path.iterdir():
        if entry.name not in kept:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return f"{path}: model and checkpoints removed; {LEDGER} and statement stay"


def _purge_unfinished(path: Path) -> str:
    from adumbra.privacy.ledger import Ledger

    ledger = path / "store" / LEDGER
    if ledger.exists() and Ledger.open(ledger).charges:
        kept = path.with_name(path.name + "." + LEDGER)
        if kept.exists():
            raise InputError(f"{kept}: the ledger of an earlier unfinished store stands there; move it first")
        ledger.rename(kept)
        shutil.rmtree(path)
        return f"{path}: removed; what it had spent stays in {kept}"
    shutil.rmtree(path)
    return f"{path}: an unfinished store that had spent nothing, removed"
