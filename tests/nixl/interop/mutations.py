# SPDX-License-Identifier: Apache-2.0
"""Damage done to metadata: seeded, so that a case can be had again by its kind,
seed and number."""

import os
import random
import struct
import subprocess


def truncated(blob, rng):
    return blob[: rng.randrange(len(blob))]


def one_bit(blob, rng):
    damaged = bytearray(blob)
    bit = rng.randrange(8 * len(blob))
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def eight_bits(blob, rng):
    for _ in range(8):
        blob = one_bit(blob, rng)
    return blob


def one_byte(blob, rng):
    damaged = bytearray(blob)
    damaged[rng.randrange(len(blob))] = rng.randrange(256)
    return bytes(damaged)


def moved(blob, rng):
    """A piece of it is put elsewhere."""
    low, high, at = (rng.randrange(len(blob)) for _ in range(3))
    low, high = min(low, high), max(low, high)
    rest = blob[:low] + blob[high:]
    return rest[:at] + blob[low:high] + rest[at:]


def noise(blob, rng):
    return rng.randbytes(rng.randrange(1, 2 * len(blob)))


def noise_after_intro(blob, rng):
    return blob[: blob.index(b"|") + 1] + noise(blob, rng)


KINDS = (truncated, one_bit, eight_bits, one_byte, moved, noise, noise_after_intro)


def make(kind, blob, count, seed):
    """Yields damaged blobs; one that came out whole is damaged again."""
    rng = random.Random(f"{kind.__name__} {seed}")
    for _ in range(count):
        damaged = kind(blob, rng)
        while damaged == blob:
            damaged = kind(blob, rng)
        yield damaged


def taken(blobs):
    """Which of them kvt's structure check takes, and that it is a check: every
    other one is refused as damaged (blob_filter.c sees to that)."""
    data = b"".join(struct.pack("<I", len(blob)) + blob for blob in blobs)
    done = subprocess.run(
        [os.environ["KVT_TEST_BLOB_FILTER"]], input=data, capture_output=True, check=True
    )
    assert len(done.stdout) == len(blobs)
    return [blob for blob, verdict in zip(blobs, done.stdout) if verdict == ord("1")]
