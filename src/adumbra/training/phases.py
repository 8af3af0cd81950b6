"""The two phases. Each goes from a model to a trained model and knows nothing of files or ledgers."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from adumbra.config import DpPhase, LabelPhase, Phase
from adumbra.errors import InputError, WorkError
from adumbra.models import TwoTowers
from adumbra.privacy.noise import Noise
from adumbra.training import optimizers, schedules
from adumbra.training.clip import Clipper, trainable
from adumbra.training.contributions import RowSums
from adumbra.training.inputs import Rows
from adumbra.training.losses import Loss
from adumbra.training.plan import DpSgd

GUARD_SHARE = 0.05
PATIENCE = 3


def optimizer_for(model: nn.Module, phase: Phase) -> torch.optim.Optimizer:
    if phase.learning_rate > torch.finfo(torch.float32).max:
        raise InputError(f"learning_rate = {phase.learning_rate:g} is more than single precision holds")
    return optimizers.make(
        phase.optimizer,
        trainable(model),
        learning_rate=phase.learning_rate,
        momentum=phase.momentum,
        weight_decay=phase.weight_decay,
    )


def set_rate(optimizer: torch.optim.Optimizer, phase: Phase, step: int, steps: int) -> None:
    rate = phase.learning_rate * schedules.factor(phase.schedule, step, steps, phase.warmup)
    for group in optimizer.param_groups:
        group["lr"] = rate


def check_finite(model: nn.Module, when: str, lower: str) -> None:
    for parameter, name in trainable(model).items():
        if not torch.isfinite(parameter).all():
            raise WorkError(
                f"parameter '{name}' became infinite or NaN by {when}: lower {lower}; only what ran so far is spent"
            )


@dataclass
class Ordinary:
    """Training without noise: the label phase on randomised labels, or the non-private reference on true ones.

    On randomised labels it is post-processing of their release and costs nothing, early stopping included: the guard's
    rows are a part of the *randomised* labels, which are released already (000 §4). They show when the debiased loss,
    which is unbounded below, begins to fall by memorising: the weights of the best epoch are kept, and after PATIENCE
    epochs without a better one the phase ends.
    """

    model: TwoTowers
    forward: Callable[[Any], Tensor]
    """`model.truncated` in the label phase, the whole model without privacy."""
    rows: Rows
    target: Tensor
    """The label estimate of each row."""
    loss: Loss
    phase: LabelPhase
    seed: int
    epoch: int = 0
    stale: int = 0
    best_loss: float = math.inf
    best: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed))
        held = int(GUARD_SHARE * len(self.rows)) if len(self.rows) >= 1000 else 0
        self.guard, self.train = order[:held].sort().values, order[held:]
        self.optimizer = optimizer_for(self.model, self.phase)
        self.epochs = math.ceil(self.phase.epochs)
        self.steps_an_epoch = max(1, round(len(self.train) / self.phase.batch_size))

    @property
    def done(self) -> bool:
        return self.epoch >= self.epochs or self.stale >= PATIENCE

    def run_epoch(self) -> Iterator[int]:
        """One pass over the rows; yields the number of steps made so far."""
        order = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch + 1)
        shuffled = self.train[torch.randperm(len(self.train), generator=order)]
        self.model.train()
        for number, rows in enumerate(shuffled.tensor_split(self.steps_an_epoch)):
            step = self.epoch * self.steps_an_epoch + number
            set_rate(self.optimizer, self.phase, step, self.epochs * self.steps_an_epoch)
            self._step(rows.sort().values)
            yield step + 1
        self.epoch += 1
        check_finite(self.model, f"epoch {self.epoch}", "label_phase.learning_rate")
        self._look()

    def _step(self, rows: Tensor) -> None:
        batch, _ = self.rows.take(rows)
        target_B = self.target[rows].to(self.rows.device)
        loss = self.loss(self.forward(batch), target_B).mean()
        if self.model.embedding_decay:
            loss = loss + 0.5 * self.model.embedding_decay * sum(t.square().sum() for t in self.model.tables())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def _look(self) -> None:
        """Keeps the weights of the epoch whose loss on the guard's rows is least."""
        if not len(self.guard):
            return
        self.model.eval()
        total = 0.0
        for rows in self.guard.split(16384):
            batch, _ = self.rows.take(rows)
            total += float(
                self.loss(self.forward(batch), self.target[rows].to(self.rows.device)).sum(dtype=torch.float64)
            )
        if total < self.best_loss:
            self.best_loss, self.stale = total, 0
            self.best = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        else:
            self.stale += 1

    def finish(self) -> None:
        """The best epoch's weights, where epochs were compared."""
        if self.best:
            self.model.load_state_dict(self.best)

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "stale": self.stale,
            "best_loss": self.best_loss,
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.stale, self.best_loss = state["epoch"], state["stale"], state["best_loss"]
        self.best = state["best"]
        self.optimizer.load_state_dict(state["optimizer"])


@dataclass
class Private:
    """DP-SGD: each step's sum of clipped gradients, plus noise of `plan`, over a constant (000 §3; privacy.md, 13).

    Guarantee: what leaves `step` is a function of the sum plus N(0, (noise multiplier · clip norm)²) on every trainable
    parameter, rows of tables that no example touched included, of units drawn by the plan's own sampler. Nothing else
    computed from protected rows leaves: no loss, no norm, no realised batch size.
    """

    model: TwoTowers
    rows: Rows
    loss: Loss
    phase: DpPhase
    plan: DpSgd
    noise: Noise
    step: int = 0
    """Where the schedule stands: steps charged, whether they were made or lost."""

    def __post_init__(self) -> None:
        self.clipper = Clipper(self.model, self.loss, clip_norm=self.plan.clip_norm, divisor=self.plan.microbatch)
        self.optimizer = optimizer_for(self.model, self.phase)
        self.draw = self.plan.sampler()

    def run(self, steps: int) -> Iterator[int]:
        """Some steps; yields after each."""
        self.model.train()
        for _ in range(steps):
            set_rate(self.optimizer, self.phase, self.step, self.plan.steps)
            self._descend(self.plan.rows(torch.from_numpy(self.draw(self.step))))
            self.step += 1
            yield self.step
        # Looks at noised parameters only (privacy.md, rule 14).
        check_finite(self.model, f"step {self.step}", "dp_phase.learning_rate or dp_phase.clip_norm")

    def _descend(self, rows: Tensor) -> None:
        sums = self.clipper.accumulate(self._physical(rows))
        parameters = {name: parameter for parameter, name in trainable(self.model).items()}
        for name, parameter in parameters.items():
            parameter.grad = self._noised(parameter, sums[name]).div_(self.plan.divisor)
        if self.model.embedding_decay:
            for table in self.model.tables():
                if table.grad is not None:
                    table.grad.add_(table.detach(), alpha=self.model.embedding_decay)
        self.optimizer.step()

    def _noised(self, parameter: Tensor, summed: Tensor | RowSums) -> Tensor:
        """The whole tensor gets noise, also where the sum is zero."""
        # The memory of the step before: fresh pages would cost more than the noise that fills them.
        noised = torch.empty_like(parameter, requires_grad=False) if parameter.grad is None else parameter.grad
        self.noise.gaussian_(noised, self.plan.noise_std)
        return summed.add_to(noised) if isinstance(summed, RowSums) else noised.add_(summed)

    def _physical(self, rows: Tensor) -> Iterator[tuple[Any, Tensor, int | None]]:
        """The drawn rows a memory's worth at a time; a microbatch is never divided."""
        size = self.phase.physical_batch or 16384
        size = max(1, size // self.plan.microbatch) * self.plan.microbatch
        for part in rows.split(size):
            batch, label_B = self.rows.take(part)
            yield (batch,), label_B, self.plan.microbatch if self.plan.microbatch > 1 else None

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.optimizer.load_state_dict(state["optimizer"])
