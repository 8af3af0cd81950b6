"""What one parameter receives from every example of a batch, enough for exact norms; never a gradient per example.

A layer that saw inputs a and output gradients δ gives its parameters one of three contributions. Each knows the exact
squared norm of a group's gradient, and the clipped sum over all groups:

* `Vectors`  v_i            bias, scale, LayerNorm: as small as the activation itself
* `Products` Σ_t δ_it a_itᵀ Linear: the norm follows from inner products
* `Rows`     Σ_t δ_it at row id_it of a table: the norm is over *distinct* rows (privacy.md rule 16)

Shape suffixes: B examples, G groups, T uses within an example (or further dimensions), I in, O out, N table entries,
M rows of δ, D width, U distinct rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from adumbra.errors import InputError

CHUNK_ELEMENTS = 1 << 22  # fp64 numbers held at once for the norms of products


@dataclass(frozen=True)
class Groups:
    """A partition of the batch. A group is what is clipped: an example, a microbatch, a privacy unit."""

    group_B: Tensor
    count: int
    singles: bool  # group i is example i

    @classmethod
    def of(cls, size_B: int, groups: Tensor | int | None, device: torch.device) -> Self:
        """`groups`: None (each example), an int k (k consecutive examples) or an id for each example."""
        if groups is None or (isinstance(groups, int) and groups == 1):
            return cls(torch.arange(size_B, device=device), size_B, True)
        if isinstance(groups, int):
            if groups < 1 or size_B % groups:
                raise InputError(f"{size_B} examples do not divide into groups of {groups}")
            return cls(torch.arange(size_B, device=device) // groups, size_B // groups, False)
        if groups.shape != (size_B,):
            raise InputError(f"group ids have shape {tuple(groups.shape)}; one for each of {size_B} examples is needed")
        distinct, group_B = torch.unique(groups.to(device), return_inverse=True)
        return cls(group_B, len(distinct), False)

    def sum(self, v_B: Tensor) -> Tensor:
        """Sums over the members of each group, along the first dimension."""
        return v_B if self.singles else v_B.new_zeros(self.count, *v_B.shape[1:]).index_add_(0, self.group_B, v_B)

    def by_size(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Groups of one size at a time: their indices [g] and their members [g, k]. No padding, whatever the sizes."""
        size_G = torch.bincount(self.group_B, minlength=self.count)
        order_B = torch.argsort(self.group_B, stable=True)
        start_G = size_G.cumsum(0) - size_G
        for k in size_G.unique().tolist():
            index_g = (size_G == k).nonzero().squeeze(1)
            yield index_g, order_B[start_G[index_g].unsqueeze(1) + torch.arange(k, device=order_B.device)]


class Contribution(Protocol):
    """What all uses of one parameter in one forward give it."""

    @classmethod
    def merge(cls, parts: Sequence[Self], groups: Groups) -> Self:
        """Several uses of the parameter as one, so that they add before the square."""
        ...

    def without(self, bad_B: Tensor) -> Self:
        """With zeros in place of these examples (rule 14: ∞ · 0 is NaN, so a zero clip factor is not enough)."""
        ...

    def square_norms(self, groups: Groups) -> Tensor:
        """|Σ_{i in group} gradient_i|², exact, [G]."""
        ...

    def clipped_sum(self, factor_B: Tensor) -> "Tensor | RowSums":
        """Σ_i factor_i gradient_i."""
        ...


@dataclass(frozen=True)
class Vectors:
    v_BN: Tensor
    shape: torch.Size

    @classmethod
    def merge(cls, parts: Sequence[Self], groups: Groups) -> Self:  # noqa: ARG003
        return parts[0] if len(parts) == 1 else cls(torch.stack([part.v_BN for part in parts]).sum(0), parts[0].shape)

    def without(self, bad_B: Tensor) -> Self:
        return replace(self, v_BN=zeroed(self.v_BN, bad_B))

    def square_norms(self, groups: Groups) -> Tensor:
        return squared(groups.sum(self.v_BN))

    def clipped_sum(self, factor_B: Tensor) -> Tensor:
        return (factor_B.to(self.v_BN.dtype) @ self.v_BN).reshape(self.shape)


@dataclass(frozen=True)
class Products:
    a_BTI: Tensor
    delta_BTO: Tensor

    @classmethod
    def merge(cls, parts: Sequence[Self], groups: Groups) -> Self:  # noqa: ARG003
        if len(parts) == 1:
            return parts[0]
        return cls(torch.cat([part.a_BTI for part in parts], 1), torch.cat([part.delta_BTO for part in parts], 1))

    def without(self, bad_B: Tensor) -> Self:
        return replace(self, a_BTI=zeroed(self.a_BTI, bad_B), delta_BTO=zeroed(self.delta_BTO, bad_B))

    def square_norms(self, groups: Groups) -> Tensor:
        if groups.singles and self.a_BTI.shape[1] == 1:
            return squared(self.a_BTI.squeeze(1)) * squared(self.delta_BTO.squeeze(1))  # |δ aᵀ|² = |δ|² |a|²
        square_G = self.a_BTI.new_zeros(groups.count, dtype=torch.float64)
        for index_g, member_gk in groups.by_size():
            uses, width = member_gk.shape[1] * self.a_BTI.shape[1], self.a_BTI.shape[2] + self.delta_BTO.shape[2]
            chunk = max(1, CHUNK_ELEMENTS // max(uses * (uses + width), 1))
            for index, member in zip(index_g.split(chunk), member_gk.split(chunk), strict=True):
                # fp64: where contributions cancel, an fp32 sum of inner products could fall short of the norm.
                a_guI, delta_guO = (x_BTX[member].flatten(1, 2).double() for x_BTX in (self.a_BTI, self.delta_BTO))
                square_G[index] = square_of_sums(a_guI, delta_guO)
        return square_G

    def clipped_sum(self, factor_B: Tensor) -> Tensor:
        delta_BTO = self.delta_BTO * factor_B.to(self.delta_BTO.dtype).view(-1, 1, 1)
        return delta_BTO.flatten(0, 1).T @ self.a_BTI.flatten(0, 1)


def square_of_sums(a_guI: Tensor, delta_guO: Tensor) -> Tensor:
    """|Σ_s δ_s a_sᵀ|² = Σ_st <δ_s, δ_t> <a_s, a_t> for each group: cross terms between all of its uses and examples."""
    return ((a_guI @ a_guI.mT) * (delta_guO @ delta_guO.mT)).sum((1, 2)).clamp(min=0)


@dataclass(frozen=True)
class RowSums:
    """A table's clipped sum: what is not listed is zero. `rows` are distinct and ascending."""

    rows: Tensor  # int64 [U]
    values: Tensor  # [U, D]
    shape: torch.Size

    def dense(self) -> Tensor:
        return self.add_to(self.values.new_zeros(self.shape))

    def add_to(self, table: Tensor, factor: float = 1.0) -> Tensor:
        """table += factor * self, in place."""
        return table.index_add_(0, self.rows, self.values, alpha=factor)

    def plus(self, other: "RowSums") -> "RowSums":
        rows_N, order_N = torch.sort(torch.cat([self.rows, other.rows]))
        values_ND = torch.cat([self.values, other.values])
        start_U = starts(rows_N)
        return RowSums(rows_N[start_U], bag_sums(values_ND, order_N, start_U, None), self.shape)


@dataclass(frozen=True)
class Rows:
    """Entry n adds weight_n · value[source_n] to row id_n of the gradient of example_n.

    Once merged, entries are in the order of their row, and within a row of their group.
    """

    ids_N: Tensor
    example_N: Tensor
    source_N: Tensor
    weight_N: Tensor | None  # None: 1
    values_MD: Tensor
    shape: torch.Size

    def at(self, where: Tensor) -> Self:
        weight_N = None if self.weight_N is None else self.weight_N[where]
        ids_N, example_N, source_N = self.ids_N[where], self.example_N[where], self.source_N[where]
        return replace(self, ids_N=ids_N, example_N=example_N, source_N=source_N, weight_N=weight_N)

    @classmethod
    def merge(cls, parts: Sequence[Self], groups: Groups) -> Self:
        whole = parts[0] if len(parts) == 1 else cls._joined(parts)
        return whole.at(torch.argsort(whole.ids_N * groups.count + groups.group_B[whole.example_N]))

    @classmethod
    def _joined(cls, parts: Sequence[Self]) -> Self:
        first_source = [0, *accumulate(len(part.values_MD) for part in parts)]
        return cls(
            torch.cat([part.ids_N for part in parts]),
            torch.cat([part.example_N for part in parts]),
            torch.cat([part.source_N + first for part, first in zip(parts, first_source, strict=False)]),
            torch.cat([part._weights() for part in parts]),
            torch.cat([part.values_MD for part in parts]),
            parts[0].shape,
        )

    def _weights(self) -> Tensor:
        return self.values_MD.new_ones(len(self.ids_N)) if self.weight_N is None else self.weight_N

    def without(self, bad_B: Tensor) -> Self:
        return self.at((~bad_B[self.example_N]).nonzero().squeeze(1))

    def square_norms(self, groups: Groups) -> Tensor:
        """Σ over the group's distinct rows of |Σ of the entries that hit the row|²."""
        group_N = groups.group_B[self.example_N]
        square_N = squared(self.values_MD)[self.source_N]
        if self.weight_N is not None:
            square_N = square_N * self.weight_N.square()
        again_N = repeats(self.ids_N, group_N)
        shared_K = (again_N | F.pad(again_N[1:], (0, 1))).nonzero().squeeze(1)
        square_N[shared_K] = 0  # these entries add up before the square
        square_G = square_N.new_zeros(groups.count).index_add_(0, group_N, square_N)
        if len(shared_K):
            shared = self.at(shared_K)
            start_S = (~again_N[shared_K]).nonzero().squeeze(1)
            sum_SD = bag_sums(shared.values_MD, shared.source_N, start_S, shared.weight_N)
            square_G.index_add_(0, group_N[shared_K][start_S], squared(sum_SD))
        return square_G

    def clipped_sum(self, factor_B: Tensor) -> RowSums:
        factor_N = factor_B.to(self.values_MD.dtype)[self.example_N]
        if self.weight_N is not None:
            factor_N = factor_N * self.weight_N
        start_U = starts(self.ids_N)
        return RowSums(self.ids_N[start_U], bag_sums(self.values_MD, self.source_N, start_U, factor_N), self.shape)


def repeats(ids_N: Tensor, group_N: Tensor) -> Tensor:
    """Which entries hit the same row of the same group's gradient as the entry before them."""
    same_N = (ids_N[1:] == ids_N[:-1]) & (group_N[1:] == group_N[:-1])
    return torch.cat([same_N.new_zeros(min(len(ids_N), 1)), same_N])


def starts(sorted_N: Tensor) -> Tensor:
    """Where each distinct value begins."""
    new_N = torch.cat([sorted_N.new_ones(min(len(sorted_N), 1), dtype=torch.bool), sorted_N[1:] != sorted_N[:-1]])
    return new_N.nonzero().squeeze(1)


def bag_sums(values_MD: Tensor, source_N: Tensor, start_U: Tensor, weight_N: Tensor | None) -> Tensor:
    """Σ weight_n · value[source_n] over each run of entries: gathered, weighed and added in one pass over memory."""
    if not len(source_N):
        return values_MD.new_zeros(0, values_MD.shape[1])
    return F.embedding_bag(source_N, values_MD, start_U, mode="sum", per_sample_weights=weight_N)


def squared(x_XN: Tensor) -> Tensor:
    return x_XN.square().sum(1)  # by pairs: vector_norm is faster, but loses 2e-6 of a wide row in fp32


def zeroed(x_B: Tensor, bad_B: Tensor) -> Tensor:
    return x_B.masked_fill(bad_B.view(-1, *[1] * (x_B.dim() - 1)), 0)
