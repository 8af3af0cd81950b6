"""Logistic regression: the linear terms alone."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adumbra.models.layers import Bias
from adumbra.models.towers import Layout, Slots, TowerLayout, TwoTowers


@dataclass(frozen=True)
class Logistic:
    """A bias, one weight for each value and one for each number; all weights start at zero (the loss is convex)."""

    def build(self, layout: Layout) -> TwoTowers:
        return TwoTowers(LinearTower(layout.public), LinearTower(layout.sensitive), Sum(), sensitive_width=1)


class LinearTower(nn.Module):
    def __init__(self, layout: TowerLayout) -> None:
        super().__init__()
        self.values = Slots(TowerLayout(layout.fields), [1] * len(layout.fields))
        self.numbers = nn.Linear(layout.numbers, 1, bias=False) if layout.numbers else None
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, ids_BW: Tensor, numbers_BN: Tensor) -> Tensor:
        sum_B1 = self.values(ids_BW, numbers_BN[:, :0]).sum(1, keepdim=True)
        return sum_B1 if self.numbers is None else sum_B1 + self.numbers(numbers_BN)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = Bias()

    def forward(self, g_B1: Tensor, h_B1: Tensor) -> Tensor:
        return self.bias(torch.add(g_B1, h_B1).squeeze(1))
