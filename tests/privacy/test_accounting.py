import math

import pytest

from adumbra.errors import InputError
from adumbra.privacy import accounting
from adumbra.privacy.accounting import dp_sgd_pld, epsilon, joint_epsilon, pld_of, randomized_response_pld
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.calibration import calibrate
from adumbra.privacy.ledger import Charge, total

REPLACE, ZERO, ADD = Adjacency.REPLACE_SENSITIVE, Adjacency.ZERO_OUT, Adjacency.ADD_OR_REMOVE
N = 32_000_000


def charge(mechanism="dp-sgd", unit=Unit.IMPRESSION, accountant="pld", **parameters):
    return Charge(mechanism, 1.0, 1e-8, REPLACE, unit, accountant, parameters)


@pytest.mark.parametrize(
    ("target", "adjacency", "sigma"), [(8, REPLACE, 0.5419), (4, REPLACE, 0.6575), (8, ADD, 0.5217), (4, ADD, 0.6208)]
)
def test_dp_sgd_agrees_with_the_rules(target, adjacency, sigma):
    run = {"sampling_probability": 16_384 / N, "steps": 97_656}
    assert epsilon([dp_sgd_pld(adjacency, noise_multiplier=sigma, **run)], 1 / N) == pytest.approx(target, abs=3e-3)


def test_calibration_finds_the_least_noise():
    def plds(noise_multiplier):
        run = {"sampling_probability": 0.01, "steps": 100}
        return [dp_sgd_pld(REPLACE, noise_multiplier=noise_multiplier, **run), accounting.approximate_pld(0.1, 1e-9)]

    sigma = calibrate(plds, 0.4, 1e-6)
    assert epsilon(plds(sigma), 1e-6) <= 0.4 < epsilon(plds(sigma - 2e-4), 1e-6)
    for target in (0.0, 0.05):
        with pytest.raises(InputError):
            calibrate(plds, target, 1e-6)


@pytest.mark.parametrize(("classes", "label_epsilon"), [(2, 1.0), (5, 2.0)])
def test_randomized_response_is_worth_what_the_sum_says(classes, label_epsilon):
    truth, lie = math.exp(label_epsilon), 1.0
    for other in (0.0, 0.5, 1.5):
        stick = sum(max(p - math.exp(other) * q, 0) for p, q in [(truth, lie), (lie, truth), (lie, lie)])
        claimed = randomized_response_pld(REPLACE, epsilon=label_epsilon, classes=classes).get_delta_for_epsilon(other)
        expected = (stick + (classes - 3) * max(1 - math.exp(other), 0)) / (truth + classes - 1)
        assert expected <= claimed + 1e-12
        assert claimed <= expected + 1e-4


def test_randomized_response_composes_and_knows_its_adjacencies():
    three = [randomized_response_pld(REPLACE, epsilon=1.0, times=3)]
    assert epsilon(three, 1e-9) == pytest.approx(3.0, abs=1e-3)  # not 1.0, whatever an event's count says
    zero_out = [randomized_response_pld(ZERO, epsilon=1.0)]
    assert epsilon(zero_out, 1e-9) == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(InputError, match="add-or-remove"):
        randomized_response_pld(ADD, epsilon=1.0)


def test_an_approximate_release_keeps_its_delta():
    once = accounting.approximate_pld(1.0, 1e-7)
    assert epsilon([once], 1.1e-7) == pytest.approx(1.0, abs=2e-4)
    assert epsilon([once], 0.9e-7) == math.inf
    assert epsilon([], 1e-7) == 0.0


def test_a_run_composes_jointly_and_runs_add():
    charges = [
        charge(noise_multiplier=1.0, sampling_probability=0.01, steps=10),
        charge("randomized-response", epsilon=0.5, classes=2, times=1),
        charge("discrete-gaussian-counts", sigma=100, columns=3, delta_threshold=1e-9),
    ]
    alone = [epsilon([pld_of(c)], 1e-8) for c in charges]
    assert max(alone) < joint_epsilon(charges, 1e-8, REPLACE, Unit.IMPRESSION) < sum(alone)
    assert total(charges) == (3.0, pytest.approx(3e-8))


def test_a_charge_that_cannot_be_accounted_is_refused():
    for wrong, why in [
        (charge("magic"), "unknown mechanism"),
        (charge(noise_multiplier=1.0), "lacks the parameters sampling_probability, steps"),
        (charge(accountant="rdp"), "has no PLD"),
    ]:
        with pytest.raises(InputError, match=why):
            pld_of(wrong)
    with pytest.raises(InputError, match="backs no claim"):
        joint_epsilon([charge()], 1e-8, REPLACE, Unit.USER)
    with pytest.raises(InputError, match="delta"):
        epsilon([], 1e-15)


def test_rdp_only_under_add_or_remove():
    accounting.check_accountant("rdp", ADD)
    for adjacency in Adjacency:
        accounting.check_accountant("pld", adjacency)
        for accountant in ("rdp", "magic"):
            if (accountant, adjacency) != ("rdp", ADD):
                with pytest.raises(InputError, match="no accountant"):
                    accounting.check_accountant(accountant, adjacency)
