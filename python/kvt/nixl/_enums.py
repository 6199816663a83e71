# SPDX-License-Identifier: Apache-2.0
"""NIXL's numbers under NIXL's names."""

from __future__ import annotations

from enum import Enum, IntEnum

import kvt

NIXL_INIT_AGENT = ""
"""Names this side in prep_xfer_dlist(); so does its own spelling."""

DEFAULT_COMM_PORT = 8888

HAVE_UCX_GPU_DEVICE_API = False
"""Memory views for GPU kernels are not offered."""


class nixl_mem_t(IntEnum):
    """What memory is."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(IntEnum):
    """What a transfer does."""

    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_status_t(IntEnum):
    """NIXL's answers. Here an error is an exception, never a number."""

    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9


class nixl_cost_t(IntEnum):
    """How a cost was estimated."""

    NIXL_COST_ANALYTICAL_BACKEND = 0


class nixl_thread_sync_t(Enum):
    """How NIXL guards an agent against threads. kvt's calls may be made from
    any thread whichever is asked for."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0  # NIXL's alias


DRAM_SEG = nixl_mem_t.DRAM_SEG
VRAM_SEG = nixl_mem_t.VRAM_SEG
BLK_SEG = nixl_mem_t.BLK_SEG
OBJ_SEG = nixl_mem_t.OBJ_SEG
FILE_SEG = nixl_mem_t.FILE_SEG

MEMORY_BY_NAME = {
    "DRAM": DRAM_SEG,
    "VRAM": VRAM_SEG,
    "FILE": FILE_SEG,
    "BLOCK": BLK_SEG,
    "OBJ": OBJ_SEG,
    "cpu": DRAM_SEG,
    "cuda": VRAM_SEG,
}
"""What `mem_type` may say; NIXL calls the last two deprecated."""

KINDS = {DRAM_SEG: kvt.DRAM, VRAM_SEG: kvt.VRAM}
"""kvt moves no other memory."""

OPS = {
    "WRITE": nixl_xfer_op_t.NIXL_WRITE,
    "READ": nixl_xfer_op_t.NIXL_READ,
}
