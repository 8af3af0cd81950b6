"""The table of tokens against a dict, alone and with threads side by side."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adumbra.data.fields import MISSING, Strings
from adumbra.data.tokens import TokenTable

SHARED = 0xABCDEF << 40
"""Hashes above this one share their upper bits, and so their first slot."""
HASHES = st.one_of(st.integers(2, 40), st.integers(SHARED, SHARED + 60), st.integers(2**64 - 30, 2**64 - 1))


def add(table, hashes):
    hashes = np.array(hashes, np.uint64)
    return table.add_unknown(table.find(hashes), hashes, Strings.of([f"token {h}" for h in hashes.tolist()]))


def handed_out(table):
    """{hash: text} of what the table has not handed out before, in order."""
    hashes, lengths, text = table.take_new()
    ends = np.cumsum(lengths)
    return {int(h): bytes(text[end - size : end]).decode() for h, end, size in zip(hashes, ends, lengths, strict=True)}


@given(st.lists(st.lists(HASHES, min_size=1, max_size=30), max_size=12))
def test_it_is_a_dict(blocks):
    table, known = TokenTable(), {1: 1}
    for block in blocks:
        before = [known.get(h, 0) for h in block]
        assert table.find(np.array(block, np.uint64)).tolist() == before
        ids = add(table, block).tolist()
        for token, number in zip(block, ids, strict=True):
            assert known.setdefault(token, number) == number
    assert sorted(known.values()) == list(range(1, len(known) + 1))
    assert table.size == len(known)
    assert table.find(np.array([MISSING])).tolist() == [1]
    new = handed_out(table)
    assert new == {h: f"token {h}" for h in known if h != 1}
    assert [known[h] for h in new] == list(range(2, len(known) + 1))
    assert handed_out(table) == {}
    restored = TokenTable().restore(np.array(list(new), np.uint64))
    assert restored.find(np.array(list(known), np.uint64)).tolist() == list(known.values())
    assert (restored.size, restored.logged) == (table.size, table.logged)
    assert handed_out(restored) == {}


@pytest.mark.parametrize("upper", [0, SHARED])
def test_growth_with_every_hash_in_one_slot(upper):
    table = TokenTable()
    hashes = upper + np.arange(2, 5000, dtype=np.uint64)
    ids = np.concatenate([add(table, part) for part in np.array_split(hashes, 7)])
    assert sorted(ids) == list(range(2, 5000))
    assert (table.find(hashes) == ids).all()
    assert (table.find(hashes + np.uint64(10_000)) == 0).all()


def test_threads_agree():
    """Threads that add overlapping tokens while others look them up: one id a token, no token without one."""
    table, rng = TokenTable(), np.random.default_rng(0)
    universe = np.concatenate([rng.integers(2, 2**64, 30_000, np.uint64), SHARED + np.arange(300, dtype=np.uint64)])
    blocks = [rng.choice(universe, 2000) for _ in range(60)]
    found = [np.zeros(0)] * len(blocks)
    wrong = []

    def work(first):
        for number in range(first, len(blocks), 3):
            found[number] = add(table, blocks[number])
            again = table.find(blocks[number])
            if (again != found[number]).any() or not again.all():
                wrong.append(number)

    def hand_out():
        while not done.is_set():
            kept.update(handed_out(table))

    done, kept = threading.Event(), {}
    threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
    taker = threading.Thread(target=hand_out)
    for thread in (*threads, taker):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    taker.join()
    kept.update(handed_out(table))
    ids = {}
    for block, numbers in zip(blocks, found, strict=True):
        for token, number in zip(block.tolist(), numbers.tolist(), strict=True):
            assert ids.setdefault(token, number) == number
    assert not wrong
    assert sorted(ids.values()) == list(range(2, len(ids) + 2))
    assert table.size == len(ids) + 1
    assert list(kept) == sorted(ids, key=ids.__getitem__)
    assert all(text == f"token {token}" for token, text in kept.items())
