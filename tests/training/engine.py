"""A small DP-SGD engine on rows made by hand, and the checks that every sound one passes."""

import copy
import math

import numpy as np
import torch
from scipy import stats

from adumbra.config import DpPhase, LabelPhase
from adumbra.models import MLP, Batch, FactorizationMachine, Field, Layout, TowerLayout
from adumbra.privacy.noise import Noise
from adumbra.privacy.sampling import Poisson
from adumbra.training.inputs import Rows
from adumbra.training.losses import binary_cross_entropy
from adumbra.training.phases import Ordinary, Private
from adumbra.training.plan import DpSgd

N = 32
CLIP, SIGMA, PROBABILITY = 0.4, 1.3, 0.25
LAYOUT = Layout(
    # Two fields hashed into one range, and a list: ids of an example collide.
    public=TowerLayout((Field("a", 0, 6), Field("b", 1, 6), Field("c", 2, 5, offset=7, length=3)), numbers=1),
    sensitive=TowerLayout((Field("s", 0, 9),), numbers=1),
)
KINDS = {"fm": FactorizationMachine(dim=3, sigma_init=0.3), "mlp": MLP(dim=3, hidden=4)}


def rows(n=N, seed=0) -> Rows:
    generator = torch.Generator().manual_seed(seed)

    def ids(low, high, width=1):
        return torch.randint(low, high, (n, width), generator=generator, dtype=torch.int32)

    # The last rows of every table are touched by nobody.
    public = torch.cat([ids(1, 4), ids(1, 4), ids(7, 9, 3)], dim=1)
    numbers = [torch.randn(n, 1, generator=generator) for _ in range(2)]
    label = torch.randint(0, 2, (n,), generator=generator, dtype=torch.uint8)
    return Rows(Batch(public, ids(1, 5), *numbers), label, torch.device("cpu"))


def model(kind="fm", seed=0):
    torch.manual_seed(seed)
    return KINDS[kind].build(LAYOUT)


def private(kind="fm", *, microbatch=1, physical=None, noise=None, sigma=SIGMA, **phase) -> Private:
    """An engine whose update is the noised sum over the divisor: SGD at rate 1."""
    settings = {"optimizer": "sgd", "learning_rate": 1.0, "schedule": "constant", "physical_batch": physical, **phase}
    plan = DpSgd(Poisson(N // microbatch, PROBABILITY), 1000, CLIP, sigma, microbatch)
    return Private(model(kind), rows(), binary_cross_entropy, DpPhase(**settings), plan, noise or Noise())


def ordinary(made, table, target, **phase) -> Ordinary:
    settings = LabelPhase(**{"epochs": 2, "batch_size": 100, "optimizer": "sgd", "learning_rate": 0.1, **phase})
    return Ordinary(made, made.truncated, table, target, binary_cross_entropy, settings, 0)


def weights(made) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}


def update(engine, groups) -> dict[str, torch.Tensor]:
    """What one step on these groups subtracts from the weights, times the divisor that the plan promises."""
    before = weights(engine.model)
    engine.draw = lambda _step: np.array(groups, dtype=np.int64)
    for _ in engine.run(1):
        pass
    promised = PROBABILITY * (len(engine.rows) // engine.plan.microbatch)
    return {name: (before[name] - tensor).double() * promised for name, tensor in weights(engine.model).items()}


def clipped(engine, groups) -> dict[str, torch.Tensor]:
    """The definition: by autograd example by example, averaged in the groups of the fixed partition, clipped, added."""
    made = copy.deepcopy(engine.model).double()
    size, clip_norm = engine.plan.microbatch, engine.plan.clip_norm
    named = dict(made.named_parameters())
    sums = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for group in groups:
        one = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        for row in range(group * size, (group + 1) * size):
            batch, label = engine.rows.take(torch.tensor([row]))
            batch = Batch(batch[0], batch[1], batch[2].double(), batch[3].double())
            loss = binary_cross_entropy(made(batch), label.double()).sum()
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            for name, gradient in zip(named, found, strict=True):
                if gradient is not None:
                    one[name] += gradient / size
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in one.values()))
        for name, gradient in one.items():
            sums[name] += gradient * min(1, clip_norm / norm if norm else 1)
    return {name: tensor.detach() for name, tensor in sums.items()}


def noise(engine, groups, steps) -> dict[str, torch.Tensor]:
    """[steps, …] per tensor: updates less the clipped sums, computed by themselves before each step."""
    drawn: dict[str, list[torch.Tensor]] = {}
    start = weights(engine.model)
    for _ in range(steps):
        engine.model.load_state_dict(start)
        expected = clipped(engine, groups)
        for name, tensor in update(engine, groups).items():
            drawn.setdefault(name, []).append(tensor - expected[name])
    return {name: torch.stack(tensors) for name, tensors in drawn.items()}


def assert_variance(values: torch.Tensor, std: float, where: str) -> None:
    """Chi-square, two-sided; a sound engine fails once in a million."""
    statistic, n = float((values / std).square().sum()), values.numel()
    assert 5e-7 < stats.chi2.cdf(statistic, n) < 1 - 5e-7, f"{where}: variance {statistic / n:.3f} of what is accounted"
    assert abs(float(values.sum())) / std < 5.5 * math.sqrt(n), f"{where}: the noise has a mean"


def check_noise(kind="fm", groups=(0, 3, 4, 11), steps=60) -> None:
    """The variance that is accounted: in every tensor, and in those rows of tables that no example touched."""
    for name, values in noise(private(kind), groups, steps).items():
        assert_variance(values, SIGMA * CLIP, name)
        if "table" in name and values.dim() == 3 and values.shape[1] > 4:
            assert_variance(values[:, 4:7], SIGMA * CLIP, f"{name}, untouched rows")


def check_empty_batch() -> None:
    for name, values in noise(private(), (), 60).items():
        assert_variance(values, SIGMA * CLIP, name)


def check_sum(kind="fm", *, microbatch=1, physical=None) -> None:
    """Nearly without noise: the update is the clipped sum over a divisor that does not depend on who came."""
    for groups in ([1], [0, 2, 3, 5, 7], list(range(N // microbatch))):
        engine = private(kind, microbatch=microbatch, physical=physical, sigma=1e-7)
        expected = clipped(engine, groups)
        found = update(engine, groups)
        scale = CLIP * len(groups)
        for name, tensor in expected.items():
            assert float((found[name] - tensor).norm()) < 2e-5 * scale, f"{name}, {len(groups)} groups"


def check_partition() -> None:
    """A microbatch is sampled whole, and its members never change."""
    engine = private(microbatch=4)
    for step in range(50):
        drawn = engine.plan.rows(torch.from_numpy(engine.draw(step))).reshape(-1, 4)
        assert (drawn // 4 == drawn[:, :1] // 4).all()
        assert (drawn % 4 == torch.arange(4)).all()


def check_sampling(plan: DpSgd, steps=600) -> None:
    """Who comes is Poisson with the probability that the charge records: sizes and each unit's turns are binomial."""
    units = plan.sampling.units
    probability = plan.sampling.charge_parameters(plan.noise_multiplier, 1)["sampling_probability"]
    draw = plan.sampler()
    drawn = np.zeros((steps, units), bool)
    for step in range(steps):
        drawn[step, draw(step)] = True
    sizes, turns = drawn.sum(1), drawn.sum(0)
    for counts, n in ((sizes, units), (turns, steps)):
        expected, variance = n * probability, n * probability * (1 - probability)
        statistic = float(np.square(counts - expected).sum() / variance)
        assert 1e-6 < stats.chi2.cdf(statistic, len(counts)) < 1 - 1e-6, "not the sampling that is accounted"
    again = float((drawn[1:] & drawn[:-1]).mean())  # whether taking part twice in a row is independent
    spread = math.sqrt(probability**2 / drawn[1:].size)
    assert abs(again - probability**2) < 6 * spread, "steps are not sampled independently"


def check_fresh_after_resume() -> None:
    """A resumed engine has the state that was kept, and draws batches and noise that were never drawn before."""
    first = private()
    state = first.state()
    resumed = private()
    resumed.restore(state)
    before = [first.draw(step).tolist() for step in range(20)]
    after = [resumed.draw(step).tolist() for step in range(20)]
    assert before != after, "the sampler repeats after a resume"
    one, other = (engine.noise.gaussian_(torch.empty(50), 1.0) for engine in (first, resumed))
    assert not one.equal(other), "the noise repeats after a resume"
