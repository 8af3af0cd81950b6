"""What a run keeps while it trains: charges before, checkpoints after.

The ledger belongs to the store, and the run keeps a copy of its own lines. Steps are charged in blocks that end at a
checkpoint. Steps that were charged and are in no checkpoint (a crash) count as spent: the run ends that many earlier.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adumbra.models import TwoTowers
from adumbra.privacy.ledger import Charge, Ledger
from adumbra.training import checkpoint
from adumbra.training.phases import Ordinary, Private
from adumbra.training.plan import Plan

PRIVATE = "DP-SGD phase"
BLOCKS = 20
"""Into how many blocks the steps of a run are divided."""

Progress = Callable[[str, int, int, int], None]


@dataclass
class Records:
    folder: Path
    run: str
    model: TwoTowers
    ledgers: tuple[Ledger, ...]
    """The store's, where its log is protected, and the run's own."""
    progress: Progress
    look: Callable[[str], None]
    """Called at every checkpoint, with the phase: held-out metrics, where they were asked for."""
    batch_size: int
    lost: int = 0
    """Steps that a crash took: charged, never made."""

    def __post_init__(self) -> None:
        """A crash may have come between two ledgers: what the store was charged for this run, its own holds too."""
        *others, own = self.ledgers
        held = {charge.id for charge in own.charges}
        for ledger in others:
            for charge in ledger.charges:
                if charge.run == self.run and charge.id not in held:
                    own.append(charge)

    @property
    def path(self) -> Path:
        return self.folder / "checkpoints" / "last.pt"

    def charge(self, charge: Charge) -> None:
        """On every ledger, synced; only then may what it pays for be computed."""
        for ledger in self.ledgers:
            ledger.append(charge)

    def charge_for_labels(self, charge: Charge) -> None:
        """Once: a draw that a crash took before it was on disk was seen by nobody, and there is no checkpoint of it."""
        if not self.charged_labels() or self.path.exists():
            self.charge(charge)

    def charged_labels(self) -> bool:
        return any(charge.mechanism == "randomized-response" for charge in self.ledgers[-1].charges)

    def charged_steps(self) -> int:
        own = self.ledgers[-1]
        return sum(charge.parameters["steps"] for charge in own.charges if charge.mechanism == "dp-sgd")

    def through(self, phase: Ordinary, name: str) -> None:
        """A phase that costs nothing while it trains: a checkpoint an epoch."""
        saved = checkpoint.load(self.path, self.run)
        if saved is not None:
            if saved["phase"] == PRIVATE:
                return
            self.model.load_state_dict(saved["model"])
            phase.restore(saved["state"])
        total = phase.epochs * phase.steps_an_epoch
        while not phase.done:
            for step in phase.run_epoch():
                self.progress(name, step, total, step * self.batch_size)
            self._save(phase, name)
            self.look(name)
        phase.finish()

    def through_private(self, phase: Private, plan: Plan) -> None:
        """The DP-SGD phase, a charge and a checkpoint for each block of steps."""
        saved = checkpoint.load(self.path, self.run)
        if saved is not None and saved["phase"] == PRIVATE:
            self.model.load_state_dict(saved["model"])
            phase.restore(saved["state"])
            self.lost = saved["lost"]
        steps, charged = phase.plan.steps, self.charged_steps()
        self.lost += charged - phase.step
        phase.step = charged
        block = max(1, -(-steps // BLOCKS))
        labels = self.charged_labels()
        while phase.step < steps:
            size = min(block, steps - phase.step)
            self.charge(plan.charge_for_steps(phase.step, size, self.run, labels))
            for step in phase.run(size):
                self.progress(PRIVATE, step, steps, step * self.batch_size)
            self._save(phase, PRIVATE)
            self.look(PRIVATE)

    def _save(self, phase: Ordinary | Private, name: str) -> None:
        state = {"run": self.run, "phase": name, "lost": self.lost, "model": self.model.state_dict()}
        checkpoint.save(self.path, state | {"state": phase.state()})
