"""Gaussian noise for tensors of any size, at the speed of memory rather than of mathematics.

On a CPU: AES-256 in counter mode under a key that only this call has, and Box-Muller. The tensor is cut into segments;
segment s draws from counters (s, 0), (s, 1), …, so no two draws in the life of a key share a block of the cipher,
whichever thread makes them, and a repeatable source gives the same noise on any number of threads.

A radius comes from 64 random bits in double precision, so tails are right to 9.4 standard deviations, where 2^-64 of
the mass is cut off; an angle from 32. Results are rounded to single precision. This is not the discrete Gaussian:
what floating point still leaves open, the statement names.

On any other device: torch's own generator (Philox, no cipher), made for this call with 64 bits of the secret stream.
"""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

PAIRS = 2**14  # of a block, whose arrays of under 1 MB stay in a core's cache; torch does not split work so small
SEGMENT = 2**18  # draws of one counter range: what a thread takes at a time

_ZEROS = bytes(12 * PAIRS)  # a pair takes 8 bytes for its radius and 4 for its angle


def fill_(tensor: torch.Tensor, std: float, key: Callable[[], bytes], *, add: bool) -> torch.Tensor:
    """Set `tensor` to N(0, std²), or add it, under a fresh `key()`."""
    if not (math.isfinite(std) and std > 0):
        raise ValueError(f"a standard deviation is a positive number, not {std}")
    if not tensor.is_floating_point():
        raise ValueError(f"Gaussian noise needs a floating-point tensor, not {tensor.dtype}")
    if tensor.numel() == 0:
        return tensor
    with torch.no_grad():
        if tensor.device.type != "cpu":
            generator = torch.Generator(tensor.device)
            return generated_(tensor, std, generator, key(), add=add)
        if tensor.dtype == torch.float32 and tensor.is_contiguous():
            _draw(tensor.view(-1), std, key(), add)
            return tensor
        noise = torch.empty(tensor.shape)
        _draw(noise.view(-1), std, key(), add=False)
        return tensor.add_(noise) if add else tensor.copy_(noise)


def generated_(tensor: torch.Tensor, std: float, generator: torch.Generator, key: bytes, *, add: bool) -> torch.Tensor:
    """The same by torch's generator of the tensor's device, which takes no more than 64 bits of the key."""
    generator.manual_seed(int.from_bytes(key[:8], "little", signed=True))
    if not add:
        return tensor.normal_(0.0, std, generator=generator)
    noise = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.add_(noise.normal_(0.0, std, generator=generator))


def _draw(out: torch.Tensor, std: float, key: bytes, add: bool) -> None:
    segments = enumerate(out.split(SEGMENT))
    workers = min(len(os.sched_getaffinity(0)), out.numel() // SEGMENT)
    if workers <= 1:
        return _work(segments, Lock(), out.numel(), std, key, add)
    lock = Lock()
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(_work, segments, lock, out.numel(), std, key, add) for _ in range(workers)]:
            done.result()
    return None


def _work(
    segments: Iterator[tuple[int, torch.Tensor]], lock: Lock, numel: int, std: float, key: bytes, add: bool
) -> None:
    """Box-Muller over whatever segments are left: (r cos φ, r sin φ) with r = std √(-2 ln u)."""
    pairs = min(PAIRS, (numel + 1) // 2)
    random = torch.from_numpy(np.empty(12 * pairs, np.uint8))
    bytes_, zeros = random.numpy().data, memoryview(_ZEROS)[: 12 * pairs]
    radius_bits, angle_bits = random[: 8 * pairs].view(torch.int64), random[8 * pairs :].view(torch.int32)
    u = torch.empty(pairs, dtype=torch.float64)
    radius, angle, cosine = torch.empty(pairs), torch.empty(pairs), torch.empty(pairs)
    while True:
        with lock, torch.no_grad():
            number, segment = next(segments, (0, None))
        if segment is None:
            return
        with torch.no_grad():
            stream = Cipher(algorithms.AES256(key), modes.CTR(number.to_bytes(8, "big") + bytes(8))).encryptor()
            for out in segment.split(2 * pairs):
                stream.update_into(zeros, bytes_)
                # |w| of a signed word is uniform on 63 bits, and small ones keep their precision: u is in (0, 1].
                u.copy_(radius_bits).abs_().add_(0.5).mul_(2.0**-63)
                torch.log(u, out=u)
                radius.copy_(u).mul_(-2 * std * std).sqrt_()
                angle.copy_(angle_bits).mul_(math.pi / 2**31)
                torch.cos(angle, out=cosine)
                angle.sin_()
                half = (out.numel() + 1) // 2
                for part, direction in ((out[:half], cosine), (out[half:], angle)):
                    r, direction = radius[: len(part)], direction[: len(part)]
                    if add:
                        part.addcmul_(r, direction)
                    else:
                        torch.mul(r, direction, out=part)
