"""The two-tower contract: F(public, sensitive) = common(g(public), h(sensitive)), and the truncated F(public, 0)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adumbra.errors import InputError


@dataclass(frozen=True)
class Field:
    """One categorical column: which columns of its tower's id matrix hold it, and which ids it may take.

    An id is 0 (padding, which contributes nothing, in a list field only) or `offset` <= id < `offset + rows`. Fields
    that are hashed together into one range share offset and rows.
    """

    name: str
    start: int
    rows: int
    offset: int = 1
    length: int = 1  # more than 1: a list, padded with 0


@dataclass(frozen=True)
class TowerLayout:
    fields: tuple[Field, ...] = ()
    numbers: int = 0

    def __post_init__(self) -> None:
        position = 0
        for field in self.fields:
            if field.start != position or field.length < 1 or field.rows < 1 or field.offset < 1:
                raise InputError(
                    f"field '{field.name}': start {field.start} (expected {position}), length {field.length}, "
                    f"rows {field.rows}, offset {field.offset}: fields follow each other and row 0 is padding"
                )
            position += field.length

    @property
    def width(self) -> int:
        """Columns of the id matrix."""
        return sum(field.length for field in self.fields)

    @property
    def rows(self) -> int:
        """Rows of one table for the whole tower, the padding row included."""
        return max((field.offset + field.rows for field in self.fields), default=1)

    @property
    def lists(self) -> bool:
        """Whether any id may be padding."""
        return any(field.length > 1 for field in self.fields)


@dataclass(frozen=True)
class Layout:
    """What a model must know of a store: no data, only sizes."""

    public: TowerLayout
    sensitive: TowerLayout


class Batch(NamedTuple):
    """`public` [B, Wp] and `sensitive` [B, Ws] ids, int32 or int64; the numbers float32 [B, Np], [B, Ns]."""

    public: Tensor
    sensitive: Tensor
    numbers_public: Tensor
    numbers_sensitive: Tensor


class TwoTowers(nn.Module):
    """F(public, sensitive) = common(g(public), h(sensitive)), one logit an example (000 §4).

    g and h are modules called with (ids, numbers), `common` with their outputs. h's output has `sensitive_width`
    columns; the truncated model puts zeros there and shares every weight. `embedding_decay` is μ of 000 App. A: it
    depends on no example, so training applies it to `tables()` after the noise, outside the clip.

    A model of one's own keeps the contract by being a TwoTowers of other modules, or any nn.Module with `g`, `h`,
    `common`, `forward(batch)` and `truncated(batch)`.
    """

    def __init__(
        self, g: nn.Module, h: nn.Module, common: nn.Module, *, sensitive_width: int, embedding_decay: float = 0.0
    ) -> None:
        super().__init__()
        self.g = g
        self.h = h
        self.common = common
        self.sensitive_width = sensitive_width
        self.embedding_decay = embedding_decay

    def forward(self, batch: Batch) -> Tensor:
        return self.common(self.g(batch.public, batch.numbers_public), self.h(batch.sensitive, batch.numbers_sensitive))

    def truncated(self, batch: Batch) -> Tensor:
        """F(public, 0): reads nothing sensitive."""
        g_BG = self.g(batch.public, batch.numbers_public)
        return self.common(g_BG, g_BG.new_zeros(len(g_BG), self.sensitive_width))

    def public_parameters(self) -> list[nn.Parameter]:
        """What the frozen variant leaves alone."""
        return list(self.g.parameters())

    def sensitive_parameters(self) -> list[nn.Parameter]:
        return list(self.h.parameters())

    def common_parameters(self) -> list[nn.Parameter]:
        return list(self.common.parameters())

    def tables(self) -> list[Tensor]:
        return [layer.weight for layer in self.modules() if isinstance(layer, nn.Embedding)]


class Lookup(nn.Module):
    """The embeddings of all fields of one width, from one table; a list field is the sum of its values."""

    def __init__(self, fields: Sequence[Field], width: int, *, own_rows: bool) -> None:
        super().__init__()
        shifts: dict[tuple[int, int], int] = {}  # a range of ids -> what takes it to its place in this table
        rows = max(field.offset + field.rows for field in fields) if own_rows else 1
        for field in fields:
            if (field.offset, field.rows) not in shifts:
                shifts[field.offset, field.rows] = 0 if own_rows else rows - field.offset
                rows += 0 if own_rows else field.rows
        self.lengths = [field.length for field in fields]
        self.lists = max(self.lengths) > 1
        columns = [(field.start + i, shifts[field.offset, field.rows]) for field in fields for i in range(field.length)]
        self.register_buffer("columns_W", torch.tensor([column for column, _ in columns]), persistent=False)
        self.register_buffer("shift_W", torch.tensor([shift for _, shift in columns]), persistent=False)
        self.moves = not own_rows
        self.table = nn.Embedding(rows, width, padding_idx=0)
        nn.init.uniform_(self.table.weight, -0.05, 0.05)
        with torch.no_grad():
            self.table.weight[0] = 0

    columns_W: Tensor
    shift_W: Tensor

    def forward(self, ids_BW: Tensor) -> Tensor:
        present_BW = None
        if self.moves:
            ids_BW = ids_BW.index_select(1, self.columns_W)
        if self.lists:
            present_BW = ids_BW != 0
        if self.moves:
            ids_BW = ids_BW + self.shift_W if present_BW is None else (ids_BW + self.shift_W) * present_BW
        values_BWD = self.table(ids_BW)
        if present_BW is None:
            return values_BWD.flatten(1)
        # The mask and not only the zero row: dense noise moves the padding row too.
        parts = (values_BWD * present_BW.unsqueeze(-1)).split(self.lengths, dim=1)
        return torch.cat([part.sum(1) for part in parts], dim=1)


class Slots(nn.Module):
    """A tower's embeddings, one slot a field, with its numbers behind them: one table a width.

    `widths` gives a width for each field. Where all are equal the ids are rows of the one table as they stand; else
    the fields of a width are moved together into their own table.
    """

    def __init__(self, layout: TowerLayout, widths: Sequence[int]) -> None:
        super().__init__()
        by_width: dict[int, list[Field]] = {}
        for field, width in zip(layout.fields, widths, strict=True):
            by_width.setdefault(width, []).append(field)
        self.lookups = nn.ModuleList(
            Lookup(fields, width, own_rows=len(by_width) == 1) for width, fields in sorted(by_width.items())
        )
        self.numbers = layout.numbers
        self.width = sum(widths) + layout.numbers

    def forward(self, ids_BW: Tensor, numbers_BN: Tensor) -> Tensor:
        parts = [lookup(ids_BW) for lookup in self.lookups]
        return torch.cat([*parts, numbers_BN] if self.numbers or not parts else parts, dim=1)


class Layers(nn.Module):
    """Fully connected layers with ReLU over the joined outputs of both towers, then a scalar logit."""

    def __init__(self, width: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(dense(i, o) for i, o in zip([width, *hidden], hidden, strict=False))
        self.logit = dense([width, *hidden][-1], 1)

    def forward(self, g_BG: Tensor, h_BH: Tensor) -> Tensor:
        x = torch.cat([g_BG, h_BH], dim=1)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.logit(x).squeeze(1)


def dense(inputs: int, outputs: int) -> nn.Linear:
    """A Linear with Glorot's uniform weights and no initial bias (what the papers' frameworks do by default)."""
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
