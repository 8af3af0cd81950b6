"""The multilayer perceptron of 000 App. A."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adumbra.models.towers import Layers, Layout, Slots, TowerLayout, TwoTowers, dense


@dataclass(frozen=True)
class MLP:
    """Embeddings of 32. "The nonsensitive features are concatenated and fed into a single fully connected layer" with
    ReLU; its output "is concatenated with the embeddings of the sensitive features, and these are fed into two fully
    connected layers"; the logit is a linear combination of the last layer. `hidden`: 598 for Criteo Display Ads, 256
    for Criteo Sponsored Search.
    """

    dim: int = 32
    hidden: int = 598

    def build(self, layout: Layout) -> TwoTowers:
        g = PublicTower(layout.public, self.dim, self.hidden)
        h = Slots(layout.sensitive, [self.dim] * len(layout.sensitive.fields))
        common = Layers(self.hidden + h.width, [self.hidden] * 2)
        return TwoTowers(g, h, common, sensitive_width=h.width)


class PublicTower(nn.Module):
    def __init__(self, layout: TowerLayout, dim: int, hidden: int) -> None:
        super().__init__()
        self.slots = Slots(layout, [dim] * len(layout.fields))
        self.layer = dense(self.slots.width, hidden)

    def forward(self, ids_BW: Tensor, numbers_BN: Tensor) -> Tensor:
        return torch.relu(self.layer(self.slots(ids_BW, numbers_BN)))
