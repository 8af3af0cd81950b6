"""From a store to what a model sees: the layout of its towers, and batches of rows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adumbra.data.store import Split, Store
from adumbra.errors import InputError
from adumbra.models import Batch, Field, Layout, TowerLayout


def layout(store: Store) -> Layout:
    """The towers' fields and tables, as the store describes them."""
    return Layout(public=_tower(store.description, "public"), sensitive=_tower(store.description, "sensitive"))


def _tower(about: dict[str, Any], tower: str) -> TowerLayout:
    encoding = about["recipe"].get(tower)
    shared = encoding is not None and encoding.get("table", "tower") == "tower"
    rows = about["table_rows"][tower]
    fields = []
    for column in about["tokens"]:
        if column["tower"] == tower:
            # In a table that the tower shares any field may hold the row of unknown values.
            offset, count = (1, rows - 1) if shared else (column["offset"], column["rows"])
            fields.append(Field(column["name"], column["start"], count, offset, column["length"]))
    return TowerLayout(tuple(fields), sum(column["tower"] == tower for column in about["numbers"]))


@dataclass(frozen=True)
class Rows:
    """Rows of one split as tensors over the store's memory map; nothing is read before it is taken."""

    batch: Batch
    label: Tensor
    device: torch.device

    @staticmethod
    def of(split: Split, device: str | torch.device = "cpu") -> "Rows":
        names = ("public", "sensitive", "numbers_public", "numbers_sensitive")
        batch = Batch(*(torch.from_numpy(split[name]) for name in names))
        return Rows(batch, torch.from_numpy(split["label"]), torch.device(device))

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: Tensor) -> tuple[Batch, Tensor]:
        """Some rows, in the order given (a memory map likes rising ones)."""
        batch = Batch(*(part.index_select(0, rows).to(self.device) for part in self.batch))
        return batch, self.label.index_select(0, rows).to(self.device, torch.float32)


def check_suits(kind: str, store: Store) -> None:
    """A model whose tables are one a category needs a store that was encoded so."""
    if kind == "dnn":
        for tower in ("public", "sensitive"):
            encoding = store.description["recipe"].get(tower)
            if encoding is not None and encoding.get("table", "tower") == "tower" and encoding["kind"] != "hash":
                raise InputError(
                    "model.kind = 'dnn' gives each category a table of its own: prepare the store with"
                    f" table = 'column' in [{tower}]"
                )
