"""The law of Gaussian noise in tensors. Thresholds let a correct source fail once in ten million runs."""

import math
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from scipy import stats

from adumbra.privacy import gaussian
from adumbra.privacy.noise import Noise, insecure_repeatable

RED = 1e-7
LARGE = 4 * gaussian.SEGMENT + 12_345  # several segments, threads, and an odd end


def z_scores(draws, std):
    """Mean, variance and the share beyond 3, 4 and 5 sigma, in standard deviations of what is expected."""
    n = draws.numel()
    total = square = 0.0
    beyond = dict.fromkeys((3, 4, 5), 0)
    for part in draws.split(2**22):
        wide = part.double()
        total, square = total + wide.sum().item(), square + (wide @ wide).item()
        far = part.abs()
        for k in beyond:
            far = far[far > k * std]
            beyond[k] += far.numel()
    scores = {"mean": total / std / math.sqrt(n), "variance": (square / std**2 - n) / math.sqrt(2 * n)}
    for k, count in beyond.items():
        p = 2 * stats.norm.sf(k)
        if n * p > 20:
            scores[f"beyond {k}"] = (count - n * p) / math.sqrt(n * p)
    return scores


def right(draws, std=1.0):
    return max(map(abs, z_scores(draws, std).values())) < 5.7


def ks_p(draws, std):
    return stats.kstest(draws.numpy(), "norm", args=(0, std)).pvalue


@pytest.mark.parametrize("std", [1.0, 1e-3, 250.0])
def test_moments_tails_and_distribution(std):
    draws = Noise().gaussian_(torch.empty(LARGE), std)
    assert right(draws, std)
    assert ks_p(draws[:1_000_000], std) > RED
    added = Noise().add_gaussian_(torch.full((LARGE,), 3 * std), std) - 3 * std
    assert right(added, std)
    assert ks_p(added[-1_000_000:], std) > RED


def test_one_hundred_million_draws():
    noise, draws = Noise(), torch.empty(25_000_000)
    scores = [z_scores(noise.gaussian_(draws, 1.0), 1.0) for _ in range(4)]
    for name in scores[0]:
        assert abs(sum(one[name] for one in scores)) / 2 < 5.7, name


@pytest.mark.slow
def test_a_thousand_million_draws():
    noise, draws = Noise(), torch.empty(100_000_000)
    scores = [z_scores(noise.gaussian_(draws, 1.0), 1.0) for _ in range(10)]
    for name in scores[0]:
        assert abs(sum(one[name] for one in scores)) / math.sqrt(10) < 5.7, name


@pytest.mark.parametrize("fault", [0.99, 1.01])
def test_one_percent_of_noise_is_seen(fault):
    assert not right(Noise().gaussian_(torch.empty(LARGE), fault))


@pytest.mark.parametrize(("bits", "radius"), [(0, 9.419), (1, 9.301), (-(2**63), 0.0), (2**62, 1.1774)])
def test_tails_reach_nine_sigma(monkeypatch, bits, radius):
    """Chosen bits: word w has u = (|w| + ½) / 2^63, and angle 0."""
    planted = np.int64(bits).tobytes() + bytes(4)

    class Planted:
        def encryptor(self):
            return self

        def update_into(self, _zeros, out):
            out[:] = np.frombuffer(planted, np.uint8)

    monkeypatch.setattr(gaussian, "Cipher", lambda *_: Planted())
    assert Noise().gaussian_(torch.empty(2), 1.0).tolist() == pytest.approx([radius, 0], abs=1e-3)
    if 0 < bits < 2:
        assert 2 * stats.norm.sf(radius) < math.exp(-(radius**2) / 2) == pytest.approx(1.5 * 2**-63, rel=1e-3)


def correlations(draws):
    """Between halves of a block, neighbours, blocks and segments, in standard deviations; squares as well."""
    pairs, n = gaussian.PAIRS, draws.numel()
    found = []
    for values in (draws, draws.square() - 1):
        variance = float(values.square().mean())
        for distance in (1, pairs, 2 * pairs, gaussian.SEGMENT, 2 * gaussian.SEGMENT):
            product = (values[distance:].double() * values[:-distance]).sum().item()
            found.append(product / variance / math.sqrt(n - distance))
    return max(map(abs, found))


def test_blocks_and_threads_are_independent():
    noise = Noise()
    draws = noise.gaussian_(torch.empty(LARGE), 1.0)
    assert correlations(draws) < 6
    again = noise.gaussian_(torch.empty(LARGE), 1.0)
    assert abs((draws.double() @ again.double()).item()) / math.sqrt(LARGE) < 6


def same_counter(*arguments):
    """A fault: every segment begins at the same counter."""
    algorithm, mode = arguments
    return Cipher(algorithm, type(mode)(bytes(16)))


def test_a_repeated_block_is_seen(monkeypatch):
    draws = Noise().gaussian_(torch.empty(LARGE), 1.0)
    block = 2 * gaussian.PAIRS
    draws[5 * block : 6 * block] = draws[4 * block : 5 * block]
    assert right(draws)  # as a law for one entry it is right
    assert correlations(draws) > 6
    monkeypatch.setattr(gaussian, "Cipher", same_counter)
    assert correlations(Noise().gaussian_(torch.empty(LARGE), 1.0)) > 6


def test_no_two_draws_have_one_key_and_counter(monkeypatch):
    seen = []
    cipher = gaussian.Cipher

    def watched(algorithm, mode):
        seen.append((algorithm.key, mode.nonce))
        return cipher(algorithm, mode)

    monkeypatch.setattr(gaussian, "Cipher", watched)
    noise = Noise()
    for size in (LARGE, 1, 7, LARGE):
        noise.gaussian_(torch.empty(size), 1.0)
    assert len(set(seen)) == len(seen) == 2 * 5 + 2
    assert len({key for key, _ in seen}) == 4
    counters = sorted(int.from_bytes(nonce, "big") for key, nonce in seen if key == seen[0][0])
    used = 12 * (gaussian.SEGMENT // 2) // 16
    assert all(later - earlier > used for earlier, later in pairwise(counters))


def test_threads_do_not_change_repeatable_noise(monkeypatch):
    draws = insecure_repeatable(7).gaussian_(torch.empty(LARGE), 1.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    assert torch.equal(draws, insecure_repeatable(7).gaussian_(torch.empty(LARGE), 1.0))
    assert not torch.equal(draws, insecure_repeatable(8).gaussian_(torch.empty(LARGE), 1.0))
    noise = insecure_repeatable(7)
    assert torch.equal(draws, noise.gaussian_(torch.empty(LARGE), 1.0))
    assert not torch.equal(draws, noise.gaussian_(torch.empty(LARGE), 1.0))


def test_secret_noise_is_new_each_time_and_after_a_fork():
    noise = Noise()
    one, other = (noise.gaussian_(torch.empty(1000), 1.0) for _ in range(2))
    assert not torch.isin(one, other).all()
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, noise.gaussian_(torch.empty(4), 1.0).numpy().tobytes())
        os._exit(0)
    os.wait()
    assert os.read(read, 16) != noise.gaussian_(torch.empty(4), 1.0).numpy().tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2,), (3, 5), (gaussian.PAIRS * 2 + 1,), (gaussian.SEGMENT + 1,)])
def test_every_entry_of_every_shape_is_drawn(shape):
    tensor = torch.zeros(shape)
    assert Noise().gaussian_(tensor, 1.0) is tensor
    assert tensor.shape == shape
    assert (tensor != 0).all()
    before = tensor.clone()
    assert Noise().add_gaussian_(tensor, 1.0) is tensor
    assert (tensor != before).all()


def test_parameters_views_and_other_precisions():
    parameter = torch.nn.Parameter(torch.zeros(300, 200))
    Noise().add_gaussian_(parameter, 2.0)
    assert right(parameter.detach().flatten(), 2.0)
    base = torch.zeros(600, 200)
    Noise().add_gaussian_(base[::2], 1.0)
    assert (base[::2] != 0).all()
    assert (base[1::2] == 0).all()
    Noise().gaussian_(base.t(), 1.0)
    assert right(base.flatten())
    assert right(Noise().gaussian_(torch.zeros(100_000, dtype=torch.float64), 1.0))


def test_another_device_draws_from_its_own_generator_and_says_so():
    drawn = [
        gaussian.generated_(torch.zeros(100_000), 2.0, torch.Generator(), bytes([key] * 32), add=add)
        for key in (1, 1, 255)
        for add in (False, True)
    ]
    assert all(right(one, 2.0) for one in drawn)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[4])
    assert Noise().source_on("cpu") == "operating-system"
    assert "Philox on cuda" in Noise().source_on("cuda")
    assert insecure_repeatable(1).source_on("cuda") == "insecure-repeatable"


def test_nonsense_is_refused():
    for std in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="standard deviation"):
            Noise().gaussian_(torch.zeros(3), std)
    with pytest.raises(ValueError, match="floating-point"):
        Noise().gaussian_(torch.zeros(3, dtype=torch.int64), 1.0)
