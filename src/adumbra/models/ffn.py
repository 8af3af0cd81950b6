"""The feed-forward network of 003."""

from dataclasses import dataclass

from adumbra.models.towers import Layers, Layout, Slots, TwoTowers


@dataclass(frozen=True)
class FFN:
    """A feed-forward network with embeddings of 8 and hidden layers of 128 and 64 over all of them."""

    dim: int = 8
    hidden: tuple[int, ...] = (128, 64)

    def build(self, layout: Layout) -> TwoTowers:
        g, h = (Slots(tower, [self.dim] * len(tower.fields)) for tower in (layout.public, layout.sensitive))
        return TwoTowers(g, h, Layers(g.width + h.width, self.hidden), sensitive_width=h.width)
