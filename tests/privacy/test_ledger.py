import os
import random
import signal
import stat
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adumbra.errors import InputError, WorkError
from adumbra.privacy.adjacency import Adjacency, Unit
from adumbra.privacy.ledger import Charge, Head, Ledger


def charge(epsilon=0.1, delta=1e-9, **others):
    values = {
        "mechanism": "discrete-gaussian-counts",
        "adjacency": "replace-sensitive",
        "unit": "impression",
        "accountant": "pld",
        "parameters": {"sigma": 65, "digest": "0" * 64},  # a key that looks like the line's own end
    }
    return Charge(epsilon=epsilon, delta=delta, **{**values, **others})


@pytest.fixture
def path(tmp_path):
    """A ledger of a header, two charges and a budget between them."""
    ledger = Ledger.create(tmp_path / "ledger.jsonl")
    ledger.append(charge())
    ledger.set_budget(1.0, 1e-6)
    ledger.append(charge(note="é\n"))
    return ledger.path


def test_what_was_charged_is_read_again(path):
    ledger = Ledger.open(path)
    assert [c.note for c in ledger.charges] == ["", "é\n"]
    assert ledger.total() == (pytest.approx(0.2), pytest.approx(2e-9))
    assert ledger.budget == (1.0, 1e-6)
    assert ledger.repaired is None
    assert ledger.head.sequence == 3
    assert Ledger.open(path, expected_head=ledger.head).id == ledger.id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(InputError, match="there already"):
        Ledger.create(path)
    assert list(path.parent.iterdir()) == [path]


@given(
    st.builds(
        Charge,
        mechanism=st.text(),
        epsilon=st.floats(0, 1e300),
        delta=st.floats(0, 1),
        adjacency=st.sampled_from(Adjacency),
        unit=st.sampled_from(Unit),
        accountant=st.text(),
        parameters=st.dictionaries(
            st.text(), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        ),
        note=st.text(),
        run=st.none() | st.text(),
    )
)
def test_charges_survive_the_file(tmp_path_factory, one):
    assert Charge.from_json(one.to_json()) == one
    ledger = Ledger.create(tmp_path_factory.mktemp("round") / "ledger.jsonl")
    ledger.append(one)
    assert ledger.charges == Ledger.open(ledger.path).charges == [one]


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": -0.1},
        {"epsilon": float("nan")},
        {"epsilon": float("inf")},
        {"delta": 1.1},
        {"adjacency": "similar"},
        {"unit": "household"},
        {"parameters": {"sigma": float("nan")}},
        {"parameters": {"sigma": object()}},
    ],
)
def test_no_charge_that_means_nothing(wrong):
    with pytest.raises(InputError):
        charge(**wrong)


def test_a_charge_is_taken_once_and_within_the_budget(path):
    ledger = Ledger.open(path)
    size = path.stat().st_size
    for refused, why in [
        (ledger.charges[0], "already"),
        (charge(epsilon=0.81), "budget"),
        (charge(delta=1e-6), "budget"),
    ]:
        with pytest.raises(InputError, match=why):
            ledger.append(refused)
    assert path.stat().st_size == size
    ledger.append(charge(epsilon=0.8))  # .1 + .1 + .8 in floating point is not 1 and must fit all the same
    with pytest.raises(InputError, match="budget"):
        ledger.check_budget(0.001, 0)
    assert len(ledger.charges) == 3


def test_a_change_of_any_byte_is_refused(path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _fd: None)  # a thousand of them take seconds
    text = path.read_bytes()
    for position in range(len(text)):
        changed = bytearray(text)
        changed[position] ^= random.choice([0x01, 0x20, 0x80])
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"line \d"):
            Ledger.open(path)
        assert path.read_bytes() == changed


def test_lines_lost_moved_repeated_or_from_elsewhere_are_refused(path):
    lines = path.read_bytes().splitlines(keepends=True)
    other = Ledger.create(path.with_name("other.jsonl"))
    other.append(charge())
    lines.append(other.path.read_bytes().splitlines(keepends=True)[1])
    for wrong in ([0, 1, 3], [0, 2, 1, 3], [0, 1, 1, 2, 3], [1, 2, 3], [], [0, 4], [0, 4, 2, 3]):
        path.write_bytes(b"".join(lines[i] for i in wrong))
        with pytest.raises(InputError, match=r"line \d"):
            Ledger.open(path)


def test_a_cut_at_any_byte_loses_the_last_line_alone(path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _fd: None)  # a thousand of them take seconds
    text = path.read_bytes()
    head = Ledger.open(path).head
    ends = [i + 1 for i, byte in enumerate(text) if byte == ord("\n")]
    for cut in range(len(text)):
        path.write_bytes(text[:cut])
        if cut < ends[0]:  # a ledger is made with its header or not at all
            with pytest.raises(InputError, match="line 1"):
                Ledger.open(path)
            continue
        whole = sum(end <= cut + 1 for end in ends)  # a line that lacks its newline is whole
        ledger = Ledger.open(path)
        assert ledger.head.sequence == whole - 1
        assert (ledger.repaired is None) == (cut in ends)
        assert path.read_bytes() == text[: ends[whole - 1]]
        if whole < len(ends):
            with pytest.raises(InputError, match="line 4 is missing"):
                Ledger.open(path, expected_head=head)
    path.write_bytes(text[:-5] + b"\x00\xff?")  # a torn line that a power cut garbled
    assert "line 4" in (Ledger.open(path).repaired or "")
    Ledger.open(path).append(charge())
    assert Ledger.open(path).head.sequence == 3
    with pytest.raises(InputError, match="line 4 is not"):
        Ledger.open(path, expected_head=head)


def test_what_another_wrote_meanwhile_is_seen(path):
    one, other = Ledger.open(path), Ledger.open(path)
    spent = charge(epsilon=0.7)
    one.append(spent)
    with pytest.raises(InputError, match="budget"):
        other.append(charge(epsilon=0.2))
    with pytest.raises(InputError, match="already"):
        other.append(spent)
    with path.open("r+b") as file:
        file.truncate(Ledger.open(path)._size - 700)
    with pytest.raises(InputError, match="shorter"):
        one.append(charge())


APPEND = """
import sys, time
from adumbra.privacy.ledger import Charge, Ledger
write = Ledger._write
Ledger._write = lambda *args: (time.sleep(float(sys.argv[3])), write(*args))  # between having read and writing
ledger = Ledger.open(sys.argv[1])
print("open", flush=True)
for i in range(int(sys.argv[2])):
    one = Charge("m", 0.1, 1e-9, "replace-sensitive", "impression", "pld", {"filler": "x" * 2000})
    ledger.append(one)
    print(one.id, flush=True)
"""


def appender(path, n, pause=0.0):
    return subprocess.Popen(
        [sys.executable, "-c", APPEND, str(path), str(n), str(pause)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_kill_9_loses_nothing_that_was_reported(path):
    Ledger.open(path).set_budget(1000, 1)
    reported: set[str] = set()
    for _ in range(20):
        process = appender(path, 10_000)
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(random.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        reported |= set(process.communicate()[0].split())
        kept = {c.id for c in Ledger.open(path).charges}
        assert reported - {"open"} <= kept
    assert len(reported) > 5


def test_two_processes_lose_nothing(path):
    Ledger.open(path).set_budget(100, 1)
    processes = [appender(path, 30, 0.005) for _ in range(2)]
    reported = [set(process.communicate()[0].split()) - {"open"} for process in processes]
    assert [len(ids) for ids in reported] == [30, 30]
    assert reported[0] | reported[1] <= {c.id for c in Ledger.open(path).charges}


FILL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
"""


def test_a_full_disk_leaves_a_valid_ledger(path):
    process = subprocess.run(
        [sys.executable, "-c", FILL + APPEND, str(path), "100", "0"], capture_output=True, text=True, check=False
    )
    assert "WorkError" in process.stderr.splitlines()[-1]
    assert "nothing was charged" in process.stderr
    ledger = Ledger.open(path)
    assert ledger.repaired is None
    assert [c.id for c in ledger.charges[2:]] == process.stdout.split()[1:] != []


def test_a_file_that_cannot_be_opened_or_made(tmp_path):
    with pytest.raises(InputError, match="cannot open"):
        Ledger.open(tmp_path / "none")
    with pytest.raises(WorkError, match="cannot create"):
        Ledger.create(tmp_path / "none" / "ledger.jsonl")
    empty = Ledger.create(tmp_path / "l")
    assert empty.head == Head(0, empty.head.digest)
    assert empty.total() == (0.0, 0.0)


def test_importing_the_ledger_is_cheap():
    heavy = "{'numpy', 'scipy', 'dp_accounting', 'torch', 'cryptography'}"
    code = f"import sys, adumbra.privacy.ledger; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_relations_and_units():
    from dp_accounting.privacy_accountant import NeighboringRelation as Relation

    assert [a.relation() for a in Adjacency] == [
        Relation.REPLACE_ONE,
        Relation.REPLACE_ONE,
        Relation.REPLACE_SPECIAL,
        Relation.ADD_OR_REMOVE_ONE,
    ]
    assert all(a.sentence.startswith("Two logs are neighbours if") for a in Adjacency)
    assert Unit.USER.covers(Unit.USER_PUBLISHER)
    assert Unit.USER_PUBLISHER.covers(Unit.IMPRESSION)
    assert not Unit.IMPRESSION.covers(Unit.USER)
    assert not Unit.USER_PUBLISHER.covers(Unit.USER_ADVERTISER)
