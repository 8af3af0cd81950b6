"""The factorization machine of 000, eqs. 1-3."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adumbra.models.layers import Bias
from adumbra.models.towers import Layout, TowerLayout, TwoTowers


@dataclass(frozen=True)
class FactorizationMachine:
    """The logit "is the sum of this linear model and all the pairwise dot-products of the […] embeddings".

    A value has one linear weight and `dim` interaction weights, drawn from N(0, sigma_init²); `embedding_decay` is μ.
    Every value of a list field counts as a feature of its own with x_j = 1, a number as one with x_j = the number.
    """

    dim: int = 32
    sigma_init: float = 1e-2
    embedding_decay: float = 0.0

    def build(self, layout: Layout) -> TwoTowers:
        g, h = (FMTower(tower, self.dim, self.sigma_init) for tower in (layout.public, layout.sensitive))
        return TwoTowers(g, h, FMCommon(), sensitive_width=1 + self.dim, embedding_decay=self.embedding_decay)


class FMTower(nn.Module):
    """Column 1: linear effects and the tower's own pairs (eq. 2). Columns 2…d: the sum of the embeddings (eq. 3)."""

    def __init__(self, layout: TowerLayout, dim: int, sigma_init: float) -> None:
        super().__init__()
        self.table = nn.Embedding(layout.rows, 1 + dim, padding_idx=0)
        self.number_table = nn.Embedding(layout.numbers, 1 + dim) if layout.numbers else None
        for table in (self.table, self.number_table):
            if table is not None:
                nn.init.normal_(table.weight, std=sigma_init)
        with torch.no_grad():
            self.table.weight[0] = 0
        self.lists = layout.lists

    def forward(self, ids_BW: Tensor, numbers_BN: Tensor) -> Tensor:
        values_BWD = self.table(ids_BW)
        if self.lists:  # the mask and not only the zero row: dense noise moves the padding row too
            values_BWD = values_BWD * (ids_BW != 0).unsqueeze(-1)
        sum_BD, squares_BD = values_BWD.sum(1), values_BWD.square().sum(1)
        if self.number_table is not None:
            columns_BN = torch.arange(numbers_BN.shape[1], device=numbers_BN.device).expand(len(numbers_BN), -1)
            values_BND = self.number_table(columns_BN) * numbers_BN.unsqueeze(-1)
            sum_BD, squares_BD = sum_BD + values_BND.sum(1), squares_BD + values_BND.square().sum(1)
        # Σ_j Σ_{k>j} <v_j, v_k> = (|Σ v_j|² - Σ |v_j|²) / 2
        pairs_B = (sum_BD[:, 1:].square() - squares_BD[:, 1:]).sum(1) / 2
        return torch.cat([(sum_BD[:, 0] + pairs_B).unsqueeze(1), sum_BD[:, 1:]], dim=1)


class FMCommon(nn.Module):
    """w_1 + g_1 + h_1 + <g_2…d, h_2…d> (eq. 1): no parameter but the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = Bias()

    def forward(self, g_BD: Tensor, h_BD: Tensor) -> Tensor:
        return self.bias(g_BD[:, 0] + h_BD[:, 0] + (g_BD[:, 1:] * h_BD[:, 1:]).sum(1))
