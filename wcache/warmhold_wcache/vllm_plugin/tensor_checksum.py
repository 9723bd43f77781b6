# SPDX-License-Identifier: Apache-2.0
"""A checksum of bytes that a GPU computes where they lie, the same on every device.

It finds damage and mix-ups, one flipped bit as well as two words that changed places. It is no
defence against someone who chooses the bytes.

The bytes are read as 64-bit words w, numbered from 0, little-endian, in arithmetic modulo 2**64.
With m = 2 * number + 1, two sums are taken over all words: of w * m, and of mix(w + m * K), which
is not linear in w. The checksum is BLAKE2b (128 bits) of both sums and the length.
"""

import hashlib
import struct

import torch

_CHUNK_WORDS = 2 << 20  # what is computed at once needs four times its memory
# Odd numbers with bits well spread (the golden ratio, and splitmix64's), as signed 64-bit integers.
K = 0x9E3779B97F4A7C15 - (1 << 64)
A = 0xBF58476D1CE4E5B9 - (1 << 64)
B = 0x94D049BB133111EB - (1 << 64)


def compute_checksum(data: torch.Tensor) -> str:
    """Given bytes (uint8, contiguous, a multiple of 8), return their checksum, hexadecimal."""
    words = data.view(torch.int64)
    count = words.numel()
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, count, _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        end = start + part.numel()
        odd = torch.arange(2 * start + 1, 2 * end + 1, 2, dtype=torch.int64, device=data.device)
        sums[0] += (part * odd).sum()
        sums[1] += _mix(odd.mul_(K).add_(part)).sum()
    linear, mixed = sums.tolist()
    return hashlib.blake2b(
        struct.pack("<qqQ", linear, mixed, 8 * count), digest_size=16
    ).hexdigest()


def _mix(words: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser, in place. Shifts of signed words bring copies of the sign along,
    which the masks take away."""
    words ^= (words >> 30) & ((1 << 34) - 1)
    words *= A
    words ^= (words >> 27) & ((1 << 37) - 1)
    words *= B
    words ^= (words >> 31) & ((1 << 33) - 1)
    return words
