"""The two phases step by step: what is added, divided by what, of whom, and what stays untouched."""

import copy
from dataclasses import replace

import engine
import numpy as np
import pytest
import torch

from adumbra.config import LabelPhase
from adumbra.errors import WorkError
from adumbra.evaluation.metrics import Tally, summary
from adumbra.models import MLP, Batch, Field, Layout, TowerLayout
from adumbra.privacy.noise import Noise, SecretBits
from adumbra.privacy.randomizers import RandomizedResponse
from adumbra.privacy.sampling import Poisson, TruncatedPoisson
from adumbra.training import labels, phases
from adumbra.training.hybrid import only
from adumbra.training.inputs import Rows
from adumbra.training.losses import binary_cross_entropy
from adumbra.training.phases import Ordinary
from adumbra.training.plan import DpSgd

# The DP-SGD phase


@pytest.mark.parametrize("kind", list(engine.KINDS))
def test_the_noise_has_the_variance_that_is_accounted(kind):
    engine.check_noise(kind)


def test_an_empty_batch_is_an_ordinary_step_of_noise():
    engine.check_empty_batch()


def test_an_empty_batch_divides_by_the_same_constant():
    class Kept(Noise):
        def gaussian_(self, tensor, std):
            drawn.append(super().gaussian_(tensor, std).clone())
            return tensor

    drawn = []
    made = engine.private(noise=Kept())
    found = engine.update(made, [])
    assert len(drawn) == len(found)
    for tensor, noise in zip(found.values(), drawn, strict=True):
        torch.testing.assert_close(tensor.float(), noise, rtol=1e-4, atol=1e-5)
    assert made.step == 1


@pytest.mark.parametrize("kind", list(engine.KINDS))
@pytest.mark.parametrize("microbatch", [1, 4])
@pytest.mark.parametrize("physical", [None, 5, 1])
def test_the_update_is_the_clipped_sum_over_a_constant(kind, microbatch, physical):
    """Also in physical batches that do not divide it, and smaller than a microbatch."""
    engine.check_sum(kind, microbatch=microbatch, physical=physical)


def test_physical_batches_change_nothing():
    class Same(Noise):
        def gaussian_(self, tensor, std):
            return tensor.normal_(0, std, generator=generator)

    results = []
    for physical in (None, 7, 3, 1):
        generator = torch.Generator().manual_seed(4)
        made = engine.private("mlp", physical=physical, noise=Same())
        engine.update(made, range(20))
        results.append(engine.weights(made.model))
    for result in results[1:]:
        for name, tensor in result.items():
            torch.testing.assert_close(tensor, results[0][name], rtol=1e-5, atol=1e-6)


def test_microbatches_are_sampled_whole():
    engine.check_partition()


@pytest.mark.parametrize("sampling", [Poisson(150, 0.2), Poisson(40, 0.5), TruncatedPoisson(150, 0.2, 70)])
def test_who_is_sampled_has_the_accounted_probability(sampling):
    engine.check_sampling(DpSgd(sampling, 600, 1.0, 1.0, 1))


def test_a_resumed_phase_draws_anew():
    engine.check_fresh_after_resume()


def test_what_is_kept_tells_nothing_of_who_was_sampled():
    made = engine.private(optimizer="momentum")
    engine.update(made, [1, 2, 3])
    assert made.state().keys() == {"step", "optimizer"}
    engine.update(made, [])
    shapes = {tuple(parameter.shape) for parameter in made.model.parameters()}
    for state in made.state()["optimizer"]["state"].values():
        assert all(tuple(t.shape) in shapes or t.dim() == 0 for t in state.values() if isinstance(t, torch.Tensor))


def test_the_regularisation_of_tables_is_after_the_noise_and_outside_the_clip():
    made = engine.private(sigma=1e-7)
    made.model.embedding_decay = 0.5
    before = engine.weights(made.model)
    found = engine.update(made, [])
    promised = engine.PROBABILITY * engine.N
    for name, tensor in found.items():
        expected = 0.5 * before[name].double() * promised if "table" in name else torch.zeros_like(tensor)
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)


def test_an_infinite_example_contributes_nothing():
    made = engine.private(sigma=1e-7)
    expected = engine.clipped(made, [1, 2])
    made.rows.batch.numbers_public[5] = torch.nan
    found = engine.update(made, [1, 2, 5])
    for name, tensor in expected.items():
        assert float((found[name] - tensor).norm()) < 1e-5


@pytest.mark.parametrize("phase", ["dp_phase", "label_phase"])
def test_parameters_that_become_nan_stop_the_phase(phase):
    if phase == "dp_phase":
        made = engine.private(learning_rate=3e38, optimizer="momentum", momentum=0.99)
        with pytest.raises(WorkError, match=f"infinite or NaN.*{phase}.learning_rate") as caught:
            list(made.run(60))
    else:
        table = engine.rows(200)
        made = engine.ordinary(engine.model(), table, table.label.float(), learning_rate=1e38)
        with pytest.raises(WorkError, match=f"infinite or NaN.*{phase}.learning_rate") as caught:
            list(made.run_epoch())
    assert "\n" not in str(caught.value)


# The label phase


def test_the_label_phase_reads_nothing_sensitive_and_leaves_the_sensitive_tower_alone():
    table = engine.rows(300)
    poisoned = replace(
        table,
        batch=table.batch._replace(
            sensitive=torch.full_like(table.batch.sensitive, 10**6),  # a row that no table has
            numbers_sensitive=torch.full_like(table.batch.numbers_sensitive, torch.nan),
        ),
    )
    made = engine.model()
    before = engine.weights(made)
    with only(made, made.public_parameters() + made.common_parameters()):
        phase = engine.ordinary(made, poisoned, table.label.float())
        list(phase.run_epoch())
    after = engine.weights(made)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    changed = {name.split(".")[0] for name in before if not before[name].equal(after[name])}
    assert changed == {"g", "common"}


def test_the_label_phase_never_looks_at_true_labels():
    """Neither its steps nor its guard: with every true label spoilt, the same weights."""
    table = engine.rows(1500)
    target = table.label.float()
    results = []
    for label in (table.label, torch.full((1500,), torch.nan)):
        made = engine.model()
        phase = engine.ordinary(made, replace(table, label=label), target, epochs=3)
        while not phase.done:
            list(phase.run_epoch())
        phase.finish()
        assert len(phase.guard) == 75
        results.append((engine.weights(made), phase.best_loss))
    assert results[0][1] == results[1][1]
    assert all(results[0][0][name].equal(results[1][0][name]) for name in results[0][0])


def test_an_epoch_sees_every_row_once_and_the_guard_none():
    table = engine.rows(1500)
    phase = engine.ordinary(engine.model(), table, table.label.float(), batch_size=128)
    for _ in range(2):
        seen = []
        phase._step = seen.append
        steps = list(phase.run_epoch())
        assert steps[-1] == phase.epoch * phase.steps_an_epoch
        assert sorted(torch.cat(seen).tolist()) == sorted(set(range(1500)) - set(phase.guard.tolist()))


def test_a_restored_phase_goes_on_as_if_nothing_had_happened():
    table = engine.rows(1500)

    def fresh():
        return engine.ordinary(engine.model(), table, table.label.float(), epochs=4, optimizer="adam")

    whole = fresh()
    while not whole.done:
        list(whole.run_epoch())
    first = fresh()
    list(first.run_epoch())
    kept = copy.deepcopy((first.model.state_dict(), first.state()))
    second = fresh()
    second.model.load_state_dict(kept[0])
    second.restore(kept[1])
    while not second.done:
        list(second.run_epoch())
    for phase in (whole, second):
        phase.finish()
    expected, found = engine.weights(whole.model), engine.weights(second.model)
    assert all(expected[name].equal(found[name]) for name in expected)


class Memory:
    """A log in which a public attribute decides and a public id, which two rows share, tells nothing."""

    def __init__(self, n=3000, seed=0):
        generator = np.random.default_rng(seed)
        self.layout = Layout(TowerLayout((Field("signal", 0, 20), Field("id", 1, n // 2, 21))), TowerLayout())
        self.signal = generator.integers(0, 20, n)
        ids = generator.integers(0, n // 2, n)
        chance = 1 / (1 + np.exp(-(self.signal - 9.5) / 4))
        self.label = (generator.random(n) < chance).astype(np.uint8)
        public = torch.from_numpy(np.stack([self.signal + 1, ids + 21], 1).astype(np.int32))
        none, numbers = torch.zeros(n, 0, dtype=torch.int32), torch.zeros(n, 0)
        self.rows = Rows(Batch(public, none, numbers, numbers), torch.from_numpy(self.label), torch.device("cpu"))

    def auc(self, made):
        """On fresh labels of the same attributes, with the ids dealt out anew."""
        generator = np.random.default_rng(99)
        batch = self.rows.batch
        ids = batch.public[torch.from_numpy(generator.permutation(len(batch.public)))][:, 1:]
        with torch.no_grad():
            logits = made.truncated(batch._replace(public=torch.cat([batch.public[:, :1], ids], 1))).numpy()
        chance = 1 / (1 + np.exp(-(self.signal - 9.5) / 4))
        return summary(Tally.of(logits, (generator.random(len(chance)) < chance).astype(np.uint8), "binary"))["auc"]


def test_the_guard_keeps_a_model_that_memorises_from_ruin(monkeypatch):
    """The debiased loss is unbounded below: memorised examples drive it to −∞, and the AUC down. The guard, a part of
    the randomised labels, sees it and keeps the best epoch."""
    log = Memory()
    randomizer = RandomizedResponse(1.0)
    answers = randomizer.release(log.label, SecretBits())
    target = labels.estimate(answers.astype(np.uint8), randomizer, debiased=True)

    def trained():
        torch.manual_seed(0)
        made = MLP(dim=8, hidden=32).build(log.layout)
        settings = LabelPhase(epochs=20, batch_size=256, optimizer="adam", learning_rate=0.02, schedule="constant")
        phase = Ordinary(made, made.truncated, log.rows, target, binary_cross_entropy, settings, 0)
        while not phase.done:
            list(phase.run_epoch())
        phase.finish()
        with torch.no_grad():
            loss = binary_cross_entropy(made.truncated(log.rows.batch), target)[phase.train].mean()
        return phase, float(loss), log.auc(made)

    guarded, loss, auc = trained()
    assert guarded.epoch < 20
    assert loss > -1
    monkeypatch.setattr(phases, "GUARD_SHARE", 0.0)
    unguarded, ruined_loss, ruined_auc = trained()
    assert unguarded.epoch == 20
    assert ruined_loss < -20
    assert auc > 0.75
    assert auc > ruined_auc + 0.1
