"""Counts of sensitive values: charged before they are drawn, drawn once, and nothing exact ever leaves."""

import errno
import json
from collections import Counter

import numpy as np
import pytest
from support import VOCABULARY, ads, column, contents, ids, made, recipe, vocabulary, write

from adumbra import describe
from adumbra.data import prepare as module
from adumbra.data import source
from adumbra.data.vocabulary import once_a_row, private_counts
from adumbra.errors import InputError
from adumbra.privacy.counts import PrivateCounts
from adumbra.privacy.ledger import Ledger
from adumbra.privacy.noise import Noise

pytestmark = pytest.mark.filterwarnings("error")
PRIVATE = recipe(**VOCABULARY)
CANARY = "seen once"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(source, "BLOCK", 20_000)


def popular(rows=6000, values=20):
    """Each interest is seen by hundreds, one by nobody but a single row."""
    out = ads(rows)
    for number, row in enumerate(out):
        row[4] = f"interest {number % values}"
    out[17][4], out[18][6], out[19][6] = CANARY, CANARY, f"x|{CANARY} too|x"
    return out


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write(tmp_path_factory.mktemp("popular") / "log", popular())


class Killed(BaseException):
    pass


def test_the_charge_is_on_disk_before_the_draw(tmp_path, log, monkeypatch):
    def killed(*_):
        raise Killed

    monkeypatch.setattr(Noise, "discrete_gaussian", killed)
    with pytest.raises(Killed):
        made(PRIVATE, log, tmp_path / "store")
    charges = Ledger.open(tmp_path / "store.partial/store/ledger.jsonl").charges
    mechanism = PrivateCounts.calibrate(4, 1.0, 1e-6, "discovered")  # an interest, three segments
    assert [(c.epsilon, c.delta) for c in charges] == [(mechanism.epsilon, 1e-6)]
    assert 0.9 < mechanism.epsilon <= 1
    assert not (tmp_path / "store.partial/spool/released.npz").exists()


def test_columns_are_counted_at_their_width():
    log = recipe(**VOCABULARY, column={"recency": {"as": ["token", "number"], "bounds": "counted"}})
    assert private_counts(log).columns == 1 + 3 + 2
    declared = recipe(**VOCABULARY, column={"interest": {"values": ["sport"]}})
    assert private_counts(declared).columns == 3


def test_the_noise_is_real(tmp_path, log):
    """Two draws differ, by as much as the mechanism says."""
    exact = Counter(row[4] for row in popular()[:4800])
    errors = []
    for name in ("one", "two"):
        store = made(PRIVATE, log, tmp_path / name)
        counts = {token: count for token, (_, count) in vocabulary(store.path)["interest"].items()}
        assert len(counts) == 20
        errors.append(
            [counts[f"interest {i}"] - exact[f"interest {i}"] for i in range(20) if f"interest {i}" in counts]
        )
    sigma = store.description["counts"]["sigma"]
    assert errors[0] != errors[1]
    for error in errors:
        assert 0.3 * sigma < np.std(error) < 2 * sigma
        assert abs(np.mean(error)) < 5 * sigma / np.sqrt(len(error))


def test_a_value_of_one_row_never_leaves(tmp_path, log):
    store = made(PRIVATE, log, tmp_path / "store")
    for file in store.path.rglob("*"):
        assert file.is_dir() or CANARY.encode() not in file.read_bytes()
    known = vocabulary(store.path)
    assert not any(CANARY in token for tokens in known.values() for token in tokens)
    assert not (tmp_path / "store.partial").exists()
    about = column(store, "interest")
    assert about["effective_threshold"] == PrivateCounts.calibrate(4, 1.0, 1e-6, "discovered").tau > 1
    assert (
        min(count for tokens in ("interest", "segments") for _, count in known[tokens].values())
        >= about["effective_threshold"]
    )
    assert ids(store, "interest")[17] == 1


def test_what_is_said_depends_on_what_was_released_alone(tmp_path, monkeypatch):
    """Two logs that differ in protected values and share a draw give the same words."""
    monkeypatch.setattr("adumbra.data.vocabulary._noised", lambda _, counts, __: 777 * (counts > 0))
    said = []
    for shift in (0, 1):
        rows = popular(600, 6)
        for number, row in enumerate(rows):
            row[4] = f"interest {(number * (1 + 4 * shift)) % 6}"
            row[5] = str(number % (7 + 5 * shift))
            row[0] = str(shift)
        log = recipe(**VOCABULARY, column={"recency": {"as": "number", "bounds": {"low": 0, "high": 9}}})
        (tmp_path / str(shift)).mkdir()
        store = made(log, write(tmp_path / str(shift) / "log", rows), tmp_path / str(shift) / "store")
        told = describe.store(store)
        assert describe.store_text(told)
        for charge in told["ledger"]["charges"]:
            charge.pop("id")
            charge.pop("time")
        about = {k: v for k, v in store.description.items() if k not in ("source", "files", "digest", "ledger_head")}
        said.append((told, about, vocabulary(store.path)))
    assert said[0] == said[1]


@pytest.mark.parametrize("changes", [{**VOCABULARY, "stand_in": "generated"}, {}], ids=["stand-in", "hashed"])
def test_nothing_is_charged_where_nothing_is_spent(tmp_path, log, changes):
    store = made(recipe(**changes), log, tmp_path / "store")
    assert store.ledger.charges == []
    told = describe.account(store)
    assert (told["epsilon"], told["delta"], told["charges"]) == (0, 0, [])


def test_a_draw_is_kept_and_paid_once(tmp_path, log, monkeypatch):
    drawn = tmp_path / "store.partial/spool/released.npz"
    before = None
    for stage in ("lay_out", "_write_arrays", "_write_tokens", "write_description"):
        owner = module.vocabulary if stage == "lay_out" else module
        with monkeypatch.context() as patch:
            patch.setattr(owner, stage, lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            with pytest.raises(InputError, match="disk is full"):
                made(PRIVATE, log, tmp_path / "store", resume=before is not None)
        before = before or drawn.read_bytes()
        assert drawn.read_bytes() == before
    counts = np.load(drawn)
    store = made(PRIVATE, log, tmp_path / "store", resume=True)
    assert len(store.ledger.charges) == 1
    released = sorted(count for array in counts.values() for count in array[2:].tolist() if count)
    known = vocabulary(store.path)
    assert sorted(count for name in ("interest", "segments") for _, count in known[name].values()) == released


def test_a_kill_between_charge_and_draw_is_paid_twice_and_never_less(tmp_path, log, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("adumbra.data.vocabulary._keep", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            made(PRIVATE, log, tmp_path / "store")
    assert len(made(PRIVATE, log, tmp_path / "store", resume=True).ledger.charges) == 2


def test_account_is_the_ledger(tmp_path, log):
    store = made(PRIVATE, log, tmp_path / "store")
    told = describe.account(store)
    lines = [json.loads(line) for line in (store.path / "ledger.jsonl").read_text().splitlines()]
    charge = lines[1]["charge"]
    assert (told["epsilon"], told["delta"]) == (charge["epsilon"], charge["delta"])
    assert (told["adjacency"], told["unit"]) == ("replace-sensitive", "impression")
    assert told["charges"] == [charge]
    assert told["vocabulary_known"]["epsilon"] < told["epsilon"]
    assert store.description["counts"]["epsilon"] == charge["epsilon"]


def test_a_value_that_a_list_repeats_counts_once():
    assert sorted(once_a_row(np.array([[2, 2, 3], [3, 0, 0], [1, 0, 0], [2, 3, 2]]))) == [1, 2, 2, 3, 3, 3]
    assert once_a_row(np.array([5, 5, 1])).tolist() == [5, 5, 1]


def test_public_arrays_do_not_depend_on_the_draw(tmp_path, log):
    first, second = (contents(made(PRIVATE, log, tmp_path / n).path, private=False) for n in ("one", "two"))
    assert first == second
