# SPDX-License-Identifier: Apache-2.0
"""What is written, by all movers alike."""

BLOCK = 16 << 10
"""Bytes."""

BLOCKS = 256
"""Of the writer, and of each target. A large transfer writes them all."""

SMALL = 8
"""Blocks of all other transfers."""

PEERS = 4
"""The first one is never killed."""

RATE = 500
"""Writes a second."""

INFLIGHT_MAX = 500

CANCEL_EACH = 50
KILL_EACH = 100
NOTE_EACH = 10
BLIND_EACH = 7
"""Each of these may go to a peer of which it is known that it was killed."""

RELOADS = 50
"""Of peers that live, after the run."""
