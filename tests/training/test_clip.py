"""Clipped sums against per-example autograd, and the refusal of whatever they would not be exact for."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adumbra.errors import InputError
from adumbra.models import Bias, Scale
from adumbra.training import contributions
from adumbra.training.clip import Clipper, clipped_gradients
from adumbra.training.contributions import RowSums


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none")


def by_autograd(model, singles, labels, clip_norm, group_of, divisor=1, loss=loss) -> dict[str, Tensor]:
    """The definition: a gradient for each example, added by group, divided, clipped, added. In fp64.

    Under "" the sum of the groups' norms, which is what rounding is measured against."""
    model = copy.deepcopy(model).double()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in named.items()}
    size = torch.zeros(())
    for group in sorted(set(group_of)):
        members = [i for i, g in enumerate(group_of) if g == group]
        total = [torch.zeros_like(p) for p in named.values()]
        for i in members:
            value = loss(model(*singles[i]), labels[i : i + 1].double()).sum()
            for one, g in zip(total, torch.autograd.grad(value, list(named.values()), allow_unused=True), strict=True):
                one += 0 if g is None else g / divisor
        norm = math.sqrt(sum(float(one.square().sum()) for one in total))
        size += min(norm, clip_norm)
        for into, one in zip(sums.values(), total, strict=True):
            into += one * min(1, clip_norm / norm if norm else 1)
    return sums | {"": size}


def assert_equal(got, want, tolerance=1e-5):
    scale = float(want.pop("", torch.stack([w.norm() for w in want.values()]).norm()))
    assert got.keys() == want.keys()
    for name, w in want.items():
        assert got[name].shape == w.shape
        assert float((got[name].double() - w).norm()) <= tolerance * scale + 1e-12, name


# Models made of every supported layer, small enough that ids collide.


class Tables(nn.Module):
    """Two fields in one table (hashed together), a padded one, a Linear after a ReLU in place."""

    def __init__(self, rows):
        super().__init__()
        self.table = nn.Embedding(rows, 3)
        self.padded = nn.Embedding(rows, 2, padding_idx=0)
        self.linear = nn.Linear(5, 4)
        self.out = nn.Linear(4, 1, bias=False)

    def forward(self, ids, _):
        x = torch.cat([self.table(ids).sum(1), self.padded(ids[:, 0])], 1)
        return self.out(F.relu_(self.linear(x))).squeeze(1)


class Bags(nn.Module):
    """A bag that repeats an id, weighted bags, means with padding; one table tied to another."""

    def __init__(self, rows):
        super().__init__()
        self.sum = nn.EmbeddingBag(rows, 3, mode="sum")
        self.mean = nn.EmbeddingBag(rows, 3, mode="mean", padding_idx=0)
        self.plain = nn.Embedding(rows, 3)
        self.plain.weight = self.sum.weight
        self.linear = nn.Linear(3, 1)

    def forward(self, ids, numbers):
        weights = torch.sigmoid(numbers[:, :1]).expand(ids.shape).contiguous()
        x = self.sum(ids, per_sample_weights=weights) + self.mean(ids) + self.plain(ids[:, 0]) * self.plain(ids[:, -1])
        return self.linear(x).squeeze(1)


class Offsets(nn.Module):
    """The flat form of a bag; this example's bag has as many ids as its first id says."""

    def __init__(self, rows):
        super().__init__()
        self.bag = nn.EmbeddingBag(rows, 3, mode="mean", include_last_offset=True)
        self.linear = nn.Linear(3, 1)

    def forward(self, ids, numbers):
        kept = torch.arange(ids.shape[1]) < ids[:, :1].clamp(max=ids.shape[1])
        ends = F.pad(kept.sum(1).cumsum(0), (1, 0))
        return self.linear(torch.tanh(self.bag(ids[kept], ends)) + numbers[:, :3]).squeeze(1)


class Sequence(nn.Module):
    """Middle dimensions: Linear, LayerNorm, Scale and Bias over [B, T, N]."""

    def __init__(self, rows):
        super().__init__()
        self.table = nn.Embedding(rows, 3)
        self.linear = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = Scale(4)
        self.bias = Bias((4,))
        self.all = Bias()

    def forward(self, ids, _):
        x = self.bias(self.scale(self.norm(self.linear(self.table(ids)))))
        return self.all(torch.tanh(x).mean((1, 2)))


class Again(nn.Module):
    """Several uses: one Linear three times (once over a sequence), one Scale and one LayerNorm twice."""

    def __init__(self, rows):
        super().__init__()
        self.table = nn.Embedding(rows, 3)
        self.linear = nn.Linear(3, 3)
        self.scale = Scale(3)
        self.norm = nn.LayerNorm(3, bias=False)
        self.out = nn.Linear(3, 1)

    def forward(self, ids, numbers):
        x = self.norm(self.linear(self.table(ids))).sum(1)
        x = self.scale(torch.tanh(self.linear(self.scale(x) + numbers[:, :3])))
        return self.out(self.norm(self.linear(x))).squeeze(1)


MODELS = [Tables, Bags, Offsets, Sequence, Again]


@dataclass
class Case:
    size: int
    width: int
    rows: int
    seed: int
    clip_norm: float
    groups: int | list[int] | None
    divisor: int


@st.composite
def cases(draw) -> Case:
    size = draw(st.integers(0, 7))
    each = [k for k in (1, 2, 4) if size % k == 0]
    ids = st.lists(st.integers(-3, 3), min_size=size, max_size=size)
    return Case(
        size=size,
        width=draw(st.integers(1, 4)),
        rows=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 10_000)),
        clip_norm=draw(st.sampled_from([0.03, 0.5, 100.0])),
        groups=draw(st.none() | st.sampled_from(each) | ids),
        divisor=draw(st.sampled_from([1, 4])),
    )


def build(make: Callable[[int], nn.Module], case: Case):
    torch.manual_seed(case.seed)
    model = make(case.rows)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    ids = torch.randint(0, case.rows, (case.size, case.width))
    return model, ids, torch.randn(case.size, 3), torch.randint(0, 2, (case.size,)).float()


def compare(make, case: Case, tolerance=1e-6):
    model, ids, numbers, labels = build(make, case)
    if isinstance(case.groups, int):
        given_groups, group_of = case.groups, [i // case.groups for i in range(case.size)]
    else:
        group_of = list(range(case.size)) if case.groups is None else case.groups
        given_groups = None if case.groups is None else torch.tensor(case.groups, dtype=torch.long)
    singles = [(ids[i : i + 1], numbers[i : i + 1].double()) for i in range(case.size)]
    want = by_autograd(model, singles, labels, case.clip_norm, group_of, case.divisor)
    got = clipped_gradients(
        model.double(),
        (ids, numbers.double()),
        labels.double(),
        clip_norm=case.clip_norm,
        loss=loss,
        groups=given_groups,
        divisor=case.divisor,
    )
    assert_equal(got, want, tolerance)


@pytest.mark.parametrize("make", MODELS)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_sums_equal_autograd(make, case):
    """Any batch size (0 and 1 too), colliding ids, groups of one size or many, sums or averages."""
    compare(make, case)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("groups", [1, 4])
def test_sums_equal_autograd_in_fp32(make, groups):
    model, ids, numbers, labels = build(make, Case(24, 3, 5, 3, 0.5, None, 1))
    singles = [(ids[i : i + 1], numbers[i : i + 1].double()) for i in range(24)]
    want = by_autograd(model, singles, labels, 0.5, [i // groups for i in range(24)])
    got = clipped_gradients(model, (ids, numbers), labels, clip_norm=0.5, loss=loss, groups=groups)
    assert_equal(got, want)


# What makes the comparison above worth something: each of these broken engines fails it.

WIDE = Case(size=8, width=4, rows=3, seed=1, clip_norm=0.05, groups=4, divisor=4)


def sum_of_squares(ids_N, group_N):  # noqa: ARG001
    return torch.zeros_like(ids_N, dtype=torch.bool)


def without_cross_terms(a_guI, delta_guO):
    return (a_guI.square().sum(2) * delta_guO.square().sum(2)).sum(1)


def clip_after_average(square_G, clip_norm, divisor):
    return (clip_norm / square_G.sqrt()).clamp(max=1).float() / divisor


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("adumbra.training.contributions.repeats", sum_of_squares),
        ("adumbra.training.contributions.square_of_sums", without_cross_terms),
        ("adumbra.training.clip.clip_factors", clip_after_average),
    ],
)
def test_planted_faults_are_caught(monkeypatch, where, fault):
    compare(Tables, WIDE)
    monkeypatch.setattr(where, fault)
    with pytest.raises(AssertionError):
        compare(Tables, WIDE)


def test_a_bag_of_one_id_counts_it_before_the_square():
    """Twenty times the same id: the norm is 20, so the sum must have norm 1 at clip 1 (opacus 1.6 gives 20)."""
    bag = nn.Sequential(nn.EmbeddingBag(3, 1, mode="sum"), nn.Flatten(0))
    ids, labels = torch.ones(1, 20, dtype=torch.long), torch.zeros(1)
    got = clipped_gradients(bag, (ids,), labels, clip_norm=1.0, loss=lambda outputs, _: outputs)
    assert got["0.weight"].tolist() == [[0], [pytest.approx(1, abs=2e-6)], [0]]
    assert float(got["0.weight"].norm()) <= 1


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(-8, 8), make=st.sampled_from(MODELS))
def test_one_group_never_exceeds_the_clip_norm(seed, scale, make):
    """Groups of 4 whose gradients nearly cancel are where rounding could let a norm slip."""
    model, ids, numbers, labels = build(make, Case(4, 3, 4, seed, 1.0, None, 1))
    ids[2:], numbers[2:], labels[2:] = ids[:2], numbers[:2], 1 - labels[:2]
    got = clipped_gradients(
        model, (ids, numbers), labels, clip_norm=1.0, loss=lambda o, y: loss(o, y) * 10**scale, groups=4
    )
    assert math.sqrt(sum(float(g.double().square().sum()) for g in got.values())) <= 1 + 1e-6


# Physical batches


def test_accumulation_gives_the_logical_batch():
    model, ids, numbers, labels = build(Bags, Case(12, 3, 6, 5, 0.5, None, 1))
    units = torch.tensor([7, 7, 2, 2, 2, 9, 4, 4, 4, 4, 1, 0])
    clipper = Clipper(model, loss, clip_norm=0.5)
    whole = clipper((ids, numbers), labels, units)
    cuts = [(0, 5), (5, 6), (6, 6), (6, 12)]
    parts = clipper.accumulate([((ids[a:b], numbers[a:b]), labels[a:b], units[a:b]) for a, b in cuts])
    for name, part in whole.items():
        other = parts[name]
        if isinstance(part, RowSums):
            assert isinstance(other, RowSums)
            assert part.rows.equal(other.rows)
            assert part.rows.unique().equal(part.rows)
            part, other = part.values, other.values
        torch.testing.assert_close(part, other, rtol=1e-5, atol=1e-6)


def test_a_group_over_two_physical_batches_is_refused():
    model, ids, numbers, labels = build(Tables, Case(4, 2, 5, 5, 0.5, None, 1))
    units = torch.tensor([1, 2, 2, 3])
    batches = [((ids[a:b], numbers[a:b]), labels[a:b], units[a:b]) for a, b in ((0, 2), (2, 4))]
    with pytest.raises(InputError, match="split over two"):
        Clipper(model, loss, clip_norm=1.0).accumulate(batches)


def test_no_batch_gives_zeros():
    model, *_ = build(Tables, Case(0, 1, 5, 0, 1.0, None, 1))
    sums = Clipper(model, loss, clip_norm=1.0).accumulate([])
    assert {name for name, _ in model.named_parameters()} == sums.keys()
    assert all(not (s.dense() if isinstance(s, RowSums) else s).any() for s in sums.values())


# Rule 14


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("make", [Bags, Again])
def test_a_non_finite_example_contributes_zero(make, bad):
    model, ids, numbers, labels = build(make, Case(6, 3, 5, 2, 0.5, None, 1))
    others = [0, 1, 3, 4, 5]
    want = clipped_gradients(model, (ids[others], numbers[others]), labels[others], clip_norm=0.5, loss=loss)
    numbers[2] = bad

    def spoilt(outputs, labels):
        return loss(outputs, labels) * torch.where(numbers[:, 0].isfinite(), 1.0, bad)

    got = clipped_gradients(model, (ids, numbers), labels, clip_norm=0.5, loss=spoilt)
    assert_equal(got, want)
    grouped = clipped_gradients(model, (ids, numbers), labels, clip_norm=0.5, loss=spoilt, groups=3)
    last = clipped_gradients(model, (ids[3:], numbers[3:]), labels[3:], clip_norm=0.5, loss=loss, groups=3)
    assert_equal(grouped, last)


# What is trained, and what is refused


def test_frozen_parameters_get_nothing_and_count_for_nothing():
    model, ids, numbers, labels = build(Tables, Case(6, 2, 4, 2, 0.5, None, 1))
    for frozen in (model.table.weight, model.linear.bias):
        frozen.requires_grad_(False)
    singles = [(ids[i : i + 1], numbers[i : i + 1].double()) for i in range(6)]
    want = by_autograd(model, singles, labels, 0.5, list(range(6)))
    got = clipped_gradients(model, (ids, numbers), labels, clip_norm=0.5, loss=loss)
    assert "table.weight" not in got
    assert_equal(got, want)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["table.weight", "linear.bias"]
    assert all(p.grad is None for p in model.parameters())


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(3), "BatchNorm1d.*mixes"),
        (nn.BatchNorm1d(3, affine=False, track_running_stats=False), "BatchNorm1d.*mixes"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "InstanceNorm1d.*running"),
        (nn.Conv1d(3, 3, 1), "Conv1d.*not known"),
        (nn.GRU(3, 3), "GRU.*not known"),
        (nn.MultiheadAttention(4, 2), "MultiheadAttention.*not known"),
        (nn.PReLU(), "PReLU.*not known"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), "ParametrizedLinear.*not known"),
        (Bare(), "Bare.*weight.*not known"),
        (nn.Embedding(3, 2, max_norm=1.0), "max_norm"),
        (nn.Embedding(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.EmbeddingBag(3, 2, mode="max"), "'max'"),
    ],
)
def test_unsupported_layers_are_refused_by_name(layer, words):
    with pytest.raises(InputError, match=f"'1'.*{words}"):
        Clipper(nn.Sequential(nn.Linear(3, 3), layer), loss, clip_norm=1.0)


class Uses(nn.Module):
    """A Linear, and a function that does something with it, its input and its output."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(3, 3)
        self.table = nn.Embedding(5, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.function(self, x)


def changed_input(model, x):
    x = torch.tanh(x)
    y = model.linear(x)
    x += 1
    return (x + y).sum(1)


def remembers(model, x):
    model.seen += x.detach().mean()
    return model.linear(x).sum(1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda m, x: (m.linear(x) + F.linear(x, m.linear.weight)).sum(1), "'linear.weight' reaches the loss"),
        (lambda m, x: m.linear.forward(x).sum(1), "'linear.weight' reaches the loss"),
        (lambda m, x: m.linear(x).sum(1) + m.linear.bias.square().sum(), "'linear.bias' reaches the loss"),
        (lambda m, x: (lambda y: (y - y.mean(0)).square().sum(1))(m.linear(x)), "depends on other examples"),
        (lambda m, x: m.linear(x.T.contiguous()).T.sum(1), "depends on other examples"),
        (lambda m, x: m.linear(x.repeat(2, 1))[:3].sum(1), "first dimension must be the batch"),
        (changed_input, "changed in place"),
        (remembers, "buffer 'seen'"),
        (lambda m, x: m.linear(x), "one number an example"),
    ],
)
def test_what_would_not_be_exact_is_refused(function, words):
    model = Uses(function)
    with pytest.raises(InputError, match=words):
        clipped_gradients(model, (torch.randn(3, 3),), torch.ones(3), clip_norm=1.0, loss=lambda o, _: o.tanh())
    assert all(p.requires_grad for p in model.parameters())
    assert not model.linear._forward_hooks


def test_a_table_tied_to_a_linear_is_refused():
    model = Uses(lambda m, x: (m.linear(x) + m.table(x[:, 0].long().clamp(0, 2))).sum(1))
    model.linear.weight = model.table.weight = nn.Parameter(torch.randn(3, 3))
    with pytest.raises(InputError, match="different kinds"):
        clipped_gradients(model, (torch.randn(3, 3),), torch.ones(3), clip_norm=1.0, loss=lambda o, _: o.tanh())


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan, math.inf])
def test_a_clip_norm_that_is_no_bound_is_refused(clip_norm):
    with pytest.raises(InputError, match="clip norm"):
        Clipper(nn.Linear(1, 1), loss, clip_norm=clip_norm)


def test_groups_must_fit_the_batch():
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    for groups in (2, torch.zeros(2, dtype=torch.long)):
        with pytest.raises(InputError, match="examples"):
            clipped_gradients(model, (torch.randn(3, 3),), torch.ones(3), clip_norm=1.0, loss=loss, groups=groups)


def test_products_are_summed_in_full_precision():
    """Rule 15: bf16 products are allowed before the norm, not after it."""
    torch.set_float32_matmul_precision("medium")
    try:
        model = nn.Sequential(nn.Linear(300, 1, bias=False), nn.Flatten(0))
        x = torch.randn(1, 300)
        got = clipped_gradients(model, (x,), torch.ones(1), clip_norm=1.0, loss=lambda o, _: o)["0.weight"]
        torch.testing.assert_close(got, x / x.norm(), rtol=3e-6, atol=0)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_norms_of_products_do_not_depend_on_the_chunks(monkeypatch):
    compare(Again, WIDE)
    monkeypatch.setattr(contributions, "CHUNK_ELEMENTS", 1)
    compare(Again, WIDE)
