"""The models keep the two-tower contract and compute what the papers write."""

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adumbra.errors import InputError
from adumbra.models import (
    DNN,
    FFN,
    MLP,
    Batch,
    Bias,
    FactorizationMachine,
    Field,
    Layout,
    Logistic,
    Scale,
    TowerLayout,
)
from adumbra.models.dnn import widths
from adumbra.training.clip import clipped_gradients

PLAIN = TowerLayout((Field("a", 0, 5, 1), Field("b", 1, 40, 6), Field("c", 2, 5, 46)))
LISTS = TowerLayout(
    (Field("hashed", 0, 4, 1), Field("together", 1, 4, 1), Field("list", 2, 30, 5, length=3)), numbers=2
)
NONE = TowerLayout()
LAYOUTS = [Layout(PLAIN, LISTS), Layout(LISTS, PLAIN), Layout(LISTS, NONE), Layout(NONE, LISTS)]
SPECS = [MLP(4, 6), DNN((7, 6)), FFN(3, (7, 6)), FactorizationMachine(4), Logistic()]


def ids(layout: TowerLayout, size: int) -> Tensor:
    parts = [torch.randint(f.offset, f.offset + f.rows, (size, f.length)) for f in layout.fields]
    for field, part in zip(layout.fields, parts, strict=True):
        if field.length > 1:
            part[torch.arange(field.length) >= torch.randint(0, field.length + 1, (size, 1))] = 0
            part[0] = field.offset  # one list repeats a value
    return torch.cat([torch.zeros(size, 0, dtype=torch.long), *parts], 1).int()


def batch(layout: Layout, size: int) -> Batch:
    numbers = (torch.randn(size, tower.numbers) for tower in (layout.public, layout.sensitive))
    return Batch(ids(layout.public, size), ids(layout.sensitive, size), *numbers)


def built(spec, layout):
    torch.manual_seed(0)
    model = spec.build(layout)
    with torch.no_grad():  # the padding row too, as dense noise would
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def loss(outputs, labels):
    return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none")


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS)
def test_truncated_puts_zeros_in_the_place_of_h_and_reads_nothing_sensitive(spec, layout):
    model, full = built(spec, layout), batch(layout, 9)
    other = full._replace(sensitive=ids(layout.sensitive, 9), numbers_sensitive=full.numbers_sensitive + 1)
    truncated = model.truncated(full)
    assert truncated.shape == model(full).shape == (9,)
    assert truncated.equal(model.truncated(other))
    if layout.sensitive.fields:
        assert not model(full).equal(model(other))
    zeros = torch.zeros_like(model.h(full.sensitive, full.numbers_sensitive))
    model.h.forward = lambda *_: zeros
    assert truncated.equal(model(full))


@pytest.mark.parametrize("spec", SPECS)
def test_parameters_fall_into_public_sensitive_and_common(spec):
    model = spec.build(LAYOUTS[0])
    parts = [*model.public_parameters(), *model.sensitive_parameters(), *model.common_parameters()]
    assert {id(p) for p in parts} == {id(p) for p in model.parameters()}
    assert len(parts) == len(list(model.parameters()))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("frozen", [False, True])
def test_clipped_sums_equal_autograd(spec, groups, frozen):
    """Averages over `groups` examples, clipped and added, by the definition; hashed fields and lists repeat ids."""
    for layout in LAYOUTS[:2]:
        model, full = built(spec, layout), batch(layout, 16)
        for parameter in model.public_parameters():
            parameter.requires_grad_(not frozen)
        labels = torch.randint(0, 2, (16,)).float()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        want = {name: torch.zeros_like(p) for name, p in named.items()}
        for start in range(0, 16, groups):
            part = slice(start, start + groups)
            average = loss(model(Batch(*(x[part] for x in full))), labels[part]).mean()
            gradients = torch.autograd.grad(average, list(named.values()))
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for into, g in zip(want.values(), gradients, strict=True):
                into += g * (0.3 / norm).clamp(max=1)
        got = clipped_gradients(model, (full,), labels, clip_norm=0.3, loss=loss, groups=groups, divisor=groups)
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert float((got[name] - value).norm()) <= 1e-5 * float(value.norm()), name


def test_fm_is_the_sum_over_all_pairs():
    """Eqs. 1-3 as they are written: a double loop over the features of both towers."""
    layout = Layout(PLAIN, LISTS)
    model, full = built(FactorizationMachine(dim=4), layout), batch(layout, 6)
    bias = float(model.common.bias.bias.detach())
    for i, logit in enumerate(model(full).tolist()):
        features = []  # (x_j, w_j)
        for tower, row, numbers in (
            (model.g, full.public[i], full.numbers_public[i]),
            (model.h, full.sensitive[i], full.numbers_sensitive[i]),
        ):
            features += [(1.0, tower.table.weight[j].tolist()) for j in row.tolist() if j != 0]
            features += [(x, tower.number_table.weight[k].tolist()) for k, x in enumerate(numbers.tolist())]
        linear = sum(x * w[0] for x, w in features)
        pairs = sum(
            x * y * sum(a * b for a, b in zip(v[1:], w[1:], strict=True))
            for (x, v), (y, w) in combinations(features, 2)
        )
        assert logit == pytest.approx(bias + linear + pairs, rel=1e-4, abs=1e-5)


def test_dnn_gives_each_field_its_own_width_and_rows():
    tower = TowerLayout((Field("a", 0, 16, 1), Field("b", 1, 300, 17), Field("c", 2, 17, 317)))
    assert widths(tower) == [4, 8, 4]  # int(2 V^0.25)
    model = DNN((5,)).build(Layout(tower, NONE))
    assert [tuple(table.shape) for table in model.tables()] == [(1 + 16 + 17, 4), (301, 8)]
    full = batch(Layout(tower, NONE), 4)
    narrow, broad = model.tables()
    row = full.public[0].tolist()
    want = torch.cat([narrow[row[0]], narrow[row[2] - 317 + 17], broad[row[1] - 16]])
    assert model.g(full.public, full.numbers_public)[0].equal(want)


def test_mlp_and_dnn_sum_a_list_into_one_slot():
    model = built(FFN(3, (4,)), Layout(LISTS, NONE))
    row = torch.tensor([[2, 2, 7, 9, 0]])
    (table,) = model.tables()
    want = torch.cat([table[2], table[2], table[7] + table[9], torch.ones(2)])
    torch.testing.assert_close(model.g(row, torch.ones(1, 2))[0], want)


def test_fm_starts_from_sigma_init():
    model = FactorizationMachine(dim=32, sigma_init=1e-2, embedding_decay=1e-3).build(
        Layout(TowerLayout((Field("a", 0, 5000),)), NONE)
    )
    assert float(model.g.table.weight[1:].detach().std()) == pytest.approx(1e-2, rel=0.02)
    assert not model.g.table.weight[0].any()
    assert model.embedding_decay == 1e-3


def test_bias_and_scale_may_not_reach_over_the_batch():
    assert Bias(3)(torch.zeros(2, 4, 3)).shape == (2, 4, 3)
    for layer, x in ((Bias(3), torch.zeros(3)), (Scale((2, 3)), torch.zeros(2, 3)), (Scale(3), torch.zeros(2, 1))):
        with pytest.raises(InputError, match="batch dimension"):
            layer(x)


def test_fields_must_follow_each_other():
    with pytest.raises(InputError, match="field 'b': start 2"):
        TowerLayout((Field("a", 0, 3), Field("b", 2, 3)))
