"""Hybrid (000 §4): label DP on the truncated model, then DP-SGD on the whole one.

k = 0 is DP-SGD on all features, k = 1 is randomised response on the public ones, by the same code; `none` is the
reference without privacy.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from adumbra.config import Config
from adumbra.models import TwoTowers
from adumbra.privacy.noise import Noise
from adumbra.training.inputs import Rows
from adumbra.training.losses import Loss
from adumbra.training.phases import Ordinary, Private
from adumbra.training.plan import Plan
from adumbra.training.records import Records


def train(
    plan: Plan,
    model: TwoTowers,
    rows: Rows,
    loss: Loss,
    config: Config,
    records: Records,
    label_estimate: Callable[[], Tensor],
    noise: Noise,
) -> None:
    """Both phases, one after the other; `records` charges before, and keeps a checkpoint after, whatever leaves."""
    if not plan.private:
        phase = Ordinary(model, model, rows, rows.label.float(), loss, config.label_phase, config.seed)
        records.through(phase, "training")
        return
    if plan.labels is not None:
        # ŷ ← RR_ε1(y), drawn once; F(g(x°), 0) is trained on the debiased loss, and h is not touched.
        with only(model, model.public_parameters() + model.common_parameters()):
            phase = Ordinary(model, model.truncated, rows, label_estimate(), loss, config.label_phase, config.seed)
            records.through(phase, "label phase")
    if plan.dp_sgd is not None:
        # Warm start; g is fine-tuned with the rest, or frozen: then it gets no gradient, no clip and no noise.
        frozen = plan.labels is not None and config.method.public_tower == "frozen"
        trained = model.sensitive_parameters() + model.common_parameters()
        with only(model, trained if frozen else list(model.parameters())):
            phase = Private(model, rows, loss, config.dp_phase, plan.dp_sgd, noise)
            records.through_private(phase, plan)


class only:
    """Within, just these parameters of a model train."""

    def __init__(self, model: TwoTowers, parameters: list[torch.nn.Parameter]) -> None:
        self.model = model
        self.chosen = {id(parameter) for parameter in parameters}

    def __enter__(self) -> None:
        for parameter in self.model.parameters():
            parameter.requires_grad_(id(parameter) in self.chosen)

    def __exit__(self, *_: object) -> None:
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)
