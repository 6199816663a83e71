# SPDX-License-Identifier: Apache-2.0
"""What a caller may give for memory, and the lists that it becomes.

As in NIXL, what is no form of a list gives None and a line in the log, so that
a program that tests for None goes on working.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from ._descs import _List, nixlRemoteDList
from ._enums import DRAM_SEG, VRAM_SEG, nixl_mem_t
from ._log import logger

Kinds: TypeAlias = Mapping[str, nixl_mem_t]
"""What a mem_type may say: an agent's `nixl_mems`."""


def is_tensor(value: object) -> bool:
    """A torch tensor, without importing torch for it."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if isinstance(tensor, type) and isinstance(value, tensor):
        return True
    return all(hasattr(value, name) for name in ("data_ptr", "get_device"))


def list_of(made: Any, descs: Any, mem_type: str | None, kinds: Kinds) -> Any:
    """A list of the class `made`, of any of its forms."""
    if isinstance(descs, made):
        return descs
    if isinstance(descs, _List):
        return _no(f"a {made.__name__} is needed, not a %s", descs)
    if isinstance(descs, np.ndarray):
        return _from_array(descs, mem_type, kinds, made)
    if is_tensor(descs):
        return _from_tensors([descs], made)
    if isinstance(descs[0], tuple):
        return _from_tuples(descs, mem_type, kinds, made)
    if is_tensor(descs[0]):
        return _from_tensors(descs, made)
    return _no("no descriptors can be made of a %s", descs)


def _no(text: str, value: object) -> Any:
    logger.error(text, type(value).__name__)
    return None


def _from_tuples(
    descs: Any, mem_type: str | None, kinds: Kinds, made: Any
) -> Any:
    if mem_type is None:
        return _no("name the mem_type of this %s", descs)
    if len(descs[0]) != made.width:
        return _no(f"tuples of {made.width} elements are needed in a %s", descs)
    return made(kinds[mem_type], descs)


def _from_array(
    descs: Any, mem_type: str | None, kinds: Kinds, made: Any
) -> Any:
    if made is nixlRemoteDList:
        return _no("an agent for each is needed, not a %s", descs)
    if mem_type is None:
        return _no("name the mem_type of this %s", descs)
    if descs.ndim != 2 or descs.shape[1] != 3:
        return _no("an Nx3 %s is needed", descs)
    if len(descs) == 0:
        raise IndexError("the array has no rows")
    return made(kinds[mem_type], descs)


def _from_tensors(tensors: Any, made: Any) -> Any:
    if made is nixlRemoteDList:
        return _no("an agent for each is needed, not a %s", tensors[0])
    rows = np.empty((len(tensors), 3), dtype=np.uint64)
    device = tensors[0].device
    for i, tensor in enumerate(tensors):
        if tensor.device != device:
            return _no("all tensors must be on one device, not this %s", tensor)
        if not tensor.is_contiguous():
            return _no("a contiguous %s is needed", tensor)
        size = tensor.numel() * tensor.element_size()
        rows[i] = tensor.data_ptr(), size, max(tensor.get_device(), 0)
    return made(_kind_of(tensors[0]), rows)


def _kind_of(tensor: Any) -> nixl_mem_t:
    return DRAM_SEG if tensor.get_device() == -1 else VRAM_SEG
