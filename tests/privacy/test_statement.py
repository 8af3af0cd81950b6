import json
import math
from dataclasses import fields, replace

import pytest

from adumbra.errors import InputError
from adumbra.privacy.accounting import joint_epsilon
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.ledger import Charge
from adumbra.privacy.noise import SecretBits
from adumbra.privacy.randomizers import RandomizedResponse
from adumbra.privacy.sampling import Poisson
from adumbra.privacy.statement import VERSION, Statement

REPLACE = Adjacency.REPLACE_SENSITIVE
COMMON = {"adjacency": REPLACE, "unit": Unit.IMPRESSION, "run": "r"}
LABEL = RandomizedResponse(0.5).charge(SecretBits(), **COMMON)
STEPS = Charge(
    "dp-sgd",
    1.0,
    1e-4,
    accountant="pld",
    parameters={**Poisson(10_000, 0.01).charge_parameters(1.5, 100), "noise": "operating-system"},
    **COMMON,
)


def statement(**others):
    values = {
        "delta": 1e-4,
        "adjacency": REPLACE,
        "unit": Unit.IMPRESSION,
        "units": 10_000,
        "method": "hybrid",
        "noise": "operating-system",
        "store_total": (3.0, 2e-4),
        "planned_steps": 100,
        "steps": 90,
        "lost_steps": 10,
        "ended_early": True,
        "shown": ("training loss",),
        "notes": ("A note.",),
    }
    return Statement.of([LABEL, STEPS], **{**values, **others})


def test_every_field_is_in_the_json_and_comes_back():
    one = statement()
    written = json.loads(json.dumps(one.to_json(), allow_nan=False))
    assert {f.name for f in fields(one)} <= set(written)
    assert {"claim", "protects", "sampling", "covered", "not_covered", "warnings"} <= set(written)
    assert written["version"] == VERSION
    assert written["sampling"] == ["poisson"]
    assert [c["mechanism"] for c in written["charges"]] == ["randomized-response", "dp-sgd"]
    assert Statement.from_json(written) == one
    assert one.epsilon == pytest.approx(joint_epsilon([LABEL, STEPS], 1e-4, REPLACE, Unit.IMPRESSION))
    assert statement(planned=8.0).epsilon == 8.0
    assert statement(planned=0.1).epsilon == one.epsilon


def test_plain_words_come_first_and_every_number_is_there():
    text = statement().to_markdown()
    first = text.splitlines()[2]
    assert first.startswith("If one impression's sensitive features and label had been others")
    for phrase in (
        f"e^{statement().epsilon:.4g}",
        REPLACE.sentence,
        "10000",
        "hybrid",
        "pld",
        "randomized-response",
        "dp-sgd",
        '"noise_multiplier": 1.5',
        "operating-system",
        "Poisson sampling",
        "All runs on this store together spend epsilon 3",
        "90 of 100 planned steps",
        "10 steps were lost in a crash; they count as spent",
        "ended early. The claim is that of the planned budget",
        "Shown without noise, and not covered: training loss",
        "Held-out rows",
        "Floating point",
        "chosen by looking",
        "A note.",
    ):
        assert phrase in text, phrase


@pytest.mark.parametrize("adjacency", [a for a in Adjacency if a is not Adjacency.ADD_OR_REMOVE])
@pytest.mark.parametrize("unit", list(Unit))
def test_each_adjacency_and_unit_has_its_words(adjacency, unit):
    charges = [replace(c, adjacency=adjacency, unit=Unit.USER if unit is Unit.USER else unit) for c in (LABEL, STEPS)]
    one = Statement.of(
        charges, delta=1e-4, adjacency=adjacency, unit=unit, units=10_000, method="hybrid", noise="operating-system"
    )
    assert one.claim.startswith("If one ")
    assert adjacency.sentence in one.to_markdown()
    one.check()


def test_insecure_noise_is_named():
    one = statement(noise="insecure-repeatable")
    assert not one.protects
    assert one.covered == ()
    assert "Nothing is protected" in one.claim
    for text in (one.claim, str(one), one.to_markdown(), json.dumps(one.to_json())):
        assert "insecure-repeatable" in text
    assert statement().protects


def test_a_stand_in_and_a_run_without_privacy_claim_nothing():
    stand_in = statement(stand_in=True)
    assert "generated or public" in stand_in.claim
    plain = Statement.of(
        [], delta=1e-4, adjacency=REPLACE, unit=Unit.IMPRESSION, units=10, method="none", noise="operating-system"
    )
    for one in (stand_in, plain):
        assert one.claim.startswith("Nothing is protected")
        assert not one.protects
        assert one.covered == ()
        json.dumps(one.to_json(), allow_nan=False)
    assert math.isinf(plain.epsilon)
    assert Statement.from_json(plain.to_json()) == plain


def test_a_delta_above_one_over_n_is_warned_of():
    assert not any("1/n" in warning for warning in statement().warnings)
    warning = next(w for w in statement(units=20_000).warnings if "1/n" in w)
    assert warning in statement(units=20_000).to_markdown()


def test_a_claim_that_its_charges_do_not_bear_is_refused():
    statement().check()
    with pytest.raises(InputError, match="cost"):
        replace(statement(), epsilon=0.95 * statement().epsilon).check()
    less = replace(STEPS, parameters={**STEPS.parameters, "noise_multiplier": 1.0})
    with pytest.raises(InputError, match="cost"):
        replace(statement(), charges=(LABEL, less)).check()
    with pytest.raises(InputError, match="backs no claim"):
        statement(unit=Unit.USER)


def test_other_versions_and_nonsense_are_refused():
    written = statement().to_json()
    for wrong in ({"version": 99}, {"units": 0}, {"adjacency": "similar"}, {"epsilon": -1}, {"unknown": 1}):
        with pytest.raises(InputError):
            Statement.from_json({**written, **wrong})
    with pytest.raises(InputError):
        Statement.from_json({})
