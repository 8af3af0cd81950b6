"""Planted faults: broken engines, each caught by a check that the real one passes.

A row is a fault (what to break) and a check; the check must pass on the real engine and fail on the broken one.
"""

import tempfile
from pathlib import Path

import engine
import numpy as np
import pytest
import runs
import torch

from adumbra.data.store import Store
from adumbra.privacy.noise import Noise, insecure_repeatable
from adumbra.privacy.randomizers import RandomizedResponse
from adumbra.privacy.sampling import Poisson, ShuffledEpochs
from adumbra.training import hybrid, records
from adumbra.training.contributions import RowSums
from adumbra.training.phases import Ordinary, Private
from adumbra.training.plan import DpSgd
from adumbra.training.records import Records
from adumbra.training.run import fit

# Checks of whole runs, on a tiny store


def run(method="hybrid", **sections):
    with tempfile.TemporaryDirectory() as folder:
        store = runs.store(Path(folder))
        made = fit(runs.config(store, method={"kind": method}, **sections), Path(folder) / "run")
        return made.statement, Store.open(store).ledger


def check_labels_are_drawn_once() -> None:
    drawn, release = [], RandomizedResponse.release
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RandomizedResponse, "release", lambda *a: (drawn.append(1), release(*a))[1])
        _, ledger = run("label-dp", label_phase={"epochs": 3})
    assert len(drawn) == sum(c.mechanism == "randomized-response" for c in ledger.charges) == 1


def check_the_ledger_holds_the_claim() -> None:
    statement, ledger = run()
    epsilon, delta = ledger.total()
    assert epsilon == pytest.approx(statement.epsilon, rel=1e-9)
    assert delta == statement.delta


def check_charged_before_computed() -> None:
    """When a step begins, the run's ledger on disk holds it."""
    late, descend, through = [], Private._descend, Records.through_private

    def watched(self, rows):
        if kept[0].charged_steps() <= self.step:
            late.append(self.step)
        descend(self, rows)

    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Private, "_descend", watched)
        patch.setattr(Records, "through_private", lambda self, *a: (kept.append(self), through(self, *a))[1])
        run("dp-sgd")
    assert not late


def check_frozen_is_frozen() -> None:
    """With `frozen` the public tower after the DP-SGD phase is that of the label phase, to the bit."""
    before, after = [], []
    through = Records.through_private

    def watched(self, phase, plan):
        before.append(engine.weights(self.model))
        through(self, phase, plan)
        after.append(engine.weights(self.model))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Records, "through_private", watched)
        with tempfile.TemporaryDirectory() as folder:
            config = runs.config(runs.store(Path(folder)), method={"public_tower": "frozen"})
            fit(config, Path(folder) / "run")
    changed = {name.split(".")[0] for name in before[0] if not before[0][name].equal(after[0][name])}
    assert changed == {"h", "common"}


def check_sampled_as_accounted() -> None:
    engine.check_sampling(DpSgd(Poisson(150, 0.2), 600, 1.0, 1.0, 1))


def check_microbatch_sums() -> None:
    engine.check_sum(microbatch=4)


# Faults


def no_noise(patch):
    patch.setattr(Noise, "gaussian_", lambda _self, tensor, _std: tensor.zero_())


def half_the_noise(patch):
    whole = Noise.gaussian_
    patch.setattr(Noise, "gaussian_", lambda self, tensor, std: whole(self, tensor, std / 2))


def noise_on_touched_rows(patch):
    whole = Private._noised

    def noised(self, parameter, summed):
        out = whole(self, parameter, summed)
        if isinstance(summed, RowSums):
            kept = torch.zeros(len(out), 1)
            kept[summed.rows] = 1
            out *= kept
        return out

    patch.setattr(Private, "_noised", noised)


def sum_of_squares(patch):
    def none_twice(ids_N, _group_N):
        return torch.zeros_like(ids_N, dtype=torch.bool)

    patch.setattr("adumbra.training.contributions.repeats", none_twice)


def realised_divisor(patch):
    whole, came = Private._descend, [1]

    def descend(self, rows):
        came[0] = max(1, len(rows) // self.plan.microbatch)
        whole(self, rows)

    patch.setattr(Private, "_descend", descend)
    patch.setattr(DpSgd, "divisor", property(lambda _self: float(came[0])))


def labels_redrawn_each_epoch(patch):
    whole = Ordinary.run_epoch

    def run_epoch(self):
        answers = RandomizedResponse(3.0).release(self.rows.label.numpy(), Noise().bits)
        self.target = torch.from_numpy(answers).float()
        yield from whole(self)

    patch.setattr(Ordinary, "run_epoch", run_epoch)


def clip_after_average(patch):
    """The clip norm is met by what the group's rows add, and not by what is averaged."""

    def factors(square_G, clip_norm, divisor):
        return (clip_norm / square_G.sqrt()).clamp(max=1).float() / divisor

    patch.setattr("adumbra.training.clip.clip_factors", factors)


def clip_the_whole_batch(patch):
    """One factor for the whole batch: no example's share is bounded."""

    def factors(square_G, clip_norm, divisor):
        norm = square_G.sum().sqrt() / divisor
        return (torch.ones_like(square_G) * (clip_norm / norm).clamp(max=1) / divisor).float()

    patch.setattr("adumbra.training.clip.clip_factors", factors)


def microbatches_of_the_sample(patch):
    """Rows are sampled one by one and then cut into groups."""

    def rows(self, groups):
        count = len(groups) * self.microbatch
        drawn = np.random.default_rng().choice(self.sampling.units * self.microbatch, count, replace=False)
        return torch.from_numpy(np.sort(drawn))

    patch.setattr(DpSgd, "rows", rows)


def shuffled_as_poisson(patch):
    def sampler(self):
        return ShuffledEpochs(self.sampling.units, round(self.sampling.expected_batch)).sampler()

    patch.setattr(DpSgd, "sampler", sampler)


def batches_of_one_size(patch):
    """Uniform subsets of the expected size: every unit's share is right, and the law is not."""

    def sampler(self):
        units, size, generator = self.sampling.units, round(self.sampling.expected_batch), np.random.default_rng()
        return lambda _step: np.sort(generator.choice(units, size, replace=False))

    patch.setattr(DpSgd, "sampler", sampler)


def the_same_sample_after_a_resume(patch):
    patch.setattr(DpSgd, "sampler", lambda self: self.sampling.sampler(insecure_repeatable(7).bits))


def the_same_noise_after_a_resume(patch):
    patch.setattr(engine, "Noise", lambda: insecure_repeatable(7))


def charge_lost(patch):
    """The run's own ledger alone is charged."""
    patch.setattr(Records, "charge", lambda self, charge: self.ledgers[-1].append(charge))


def charge_for_steps_of_the_first_block_alone(patch):
    whole = Records.charge

    def charge(self, charge):
        if charge.mechanism != "dp-sgd" or not self.charged_steps():
            whole(self, charge)

    patch.setattr(Records, "charge", charge)


def charge_after_compute(patch):
    whole = Private.run

    def through_private(self, phase, plan):
        for step in whole(phase, phase.plan.steps):
            self.progress(records.PRIVATE, step, phase.plan.steps, step)
        self.charge(plan.charge_for_steps(0, phase.plan.steps, self.run, False))

    patch.setattr(Records, "through_private", through_private)


def the_frozen_tower_trains(patch):
    class Everything(hybrid.only):
        def __init__(self, model, _parameters):
            super().__init__(model, list(model.parameters()))

    patch.setattr(hybrid, "only", Everything)


def a_frozen_tower_with_noise(patch):
    whole = Private._descend

    def descend(self, rows):
        whole(self, rows)
        with torch.no_grad():
            for parameter in self.model.public_parameters():
                parameter += 1e-3

    patch.setattr(Private, "_descend", descend)


def noise_twice_of_one_draw(patch):
    """Every tensor of a step gets the beginning of the same stream."""
    whole = Noise.gaussian_

    def drawn(_self, tensor, std):
        fresh = whole(insecure_repeatable(1), torch.empty(tensor.numel()), std)
        return tensor.copy_(fresh.reshape(tensor.shape))

    patch.setattr(Noise, "gaussian_", drawn)


FAULTS = {
    "no noise": (no_noise, engine.check_noise),
    "no noise in an empty batch": (no_noise, engine.check_empty_batch),
    "half the noise": (half_the_noise, engine.check_noise),
    "noise on touched rows only": (noise_on_touched_rows, engine.check_noise),
    "one draw of noise for every step": (noise_twice_of_one_draw, engine.check_noise),
    "sum of squares with duplicate ids": (sum_of_squares, engine.check_sum),
    "realised-batch divisor": (realised_divisor, engine.check_sum),
    "labels redrawn each epoch": (labels_redrawn_each_epoch, check_labels_are_drawn_once),
    "clip after average": (clip_after_average, check_microbatch_sums),
    "clip of the whole batch": (clip_the_whole_batch, engine.check_sum),
    "microbatches cut from the sampled batch": (microbatches_of_the_sample, engine.check_partition),
    "shuffled batches accounted as Poisson": (shuffled_as_poisson, check_sampled_as_accounted),
    "batches of one size accounted as Poisson": (batches_of_one_size, check_sampled_as_accounted),
    "a sampler that repeats after resume": (the_same_sample_after_a_resume, engine.check_fresh_after_resume),
    "noise that repeats after resume": (the_same_noise_after_a_resume, engine.check_fresh_after_resume),
    "a charge that never reaches the store": (charge_lost, check_the_ledger_holds_the_claim),
    "one block charged for all": (charge_for_steps_of_the_first_block_alone, check_the_ledger_holds_the_claim),
    "charged after it was computed": (charge_after_compute, check_charged_before_computed),
    "a frozen tower that trains": (the_frozen_tower_trains, check_frozen_is_frozen),
    "a frozen tower that moves": (a_frozen_tower_with_noise, check_frozen_is_frozen),
}
CHECKS = {check.__name__: check for _, check in FAULTS.values()}


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    monkeypatch.setattr(records, "BLOCKS", 3)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_real_engine_passes(check):
    check()


@pytest.mark.parametrize(("fault", "check"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(monkeypatch, fault, check):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()
