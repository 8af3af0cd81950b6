"""The deep network of 002 App. A."""

from dataclasses import dataclass

from adumbra.models.towers import Layers, Layout, Slots, TowerLayout, TwoTowers


@dataclass(frozen=True)
class DNN:
    """Each categorical feature gets an embedding of int(2 V^0.25), "where V is the number of unique tokens". "The dense
    features are then concatenated with the log-transformed integer features" and fed into four fully connected layers,
    "each with an output dimension of 598 and a ReLU activation function"; a last one gives the logit.

    As two towers: g and h are these first-layer representations of the public and the sensitive features, and the fully
    connected layers are common.
    """

    hidden: tuple[int, ...] = (598,) * 4

    def build(self, layout: Layout) -> TwoTowers:
        g, h = (Slots(tower, widths(tower)) for tower in (layout.public, layout.sensitive))
        return TwoTowers(g, h, Layers(g.width + h.width, self.hidden), sensitive_width=h.width)


def widths(layout: TowerLayout) -> list[int]:
    """int(2 V^0.25) for each field."""
    return [int(2 * field.rows**0.25) for field in layout.fields]
