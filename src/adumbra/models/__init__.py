"""The two-tower contract and the models that keep it: frozen descriptions, whose `.build(layout)` makes the module."""

from adumbra.models.dnn import DNN
from adumbra.models.ffn import FFN
from adumbra.models.fm import FactorizationMachine
from adumbra.models.layers import Bias, Scale
from adumbra.models.logistic import Logistic
from adumbra.models.mlp import MLP
from adumbra.models.towers import Batch, Field, Layout, TowerLayout, TwoTowers

__all__ = [
    "DNN",
    "FFN",
    "MLP",
    "Batch",
    "Bias",
    "FactorizationMachine",
    "Field",
    "Layout",
    "Logistic",
    "Scale",
    "TowerLayout",
    "TwoTowers",
]
