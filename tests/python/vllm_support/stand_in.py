# SPDX-License-Identifier: Apache-2.0
"""Makes the P2P tier's modules of an unpacked vLLM wheel importable.

Their code is vLLM's own and unchanged. What stands in for the rest: packages
without their __init__ (those import PyTorch and most of vLLM), and the five
modules from which the tier takes a name or two.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace


def module(name: str, **contents: object) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(contents)
    sys.modules[name] = made
    return made


def package(name: str, place: Path) -> None:
    """A package whose modules are found, and whose __init__ is not run."""
    module(name, __path__=[str(place.joinpath(*name.split(".")))])


def install(place: Path) -> None:
    """`place` is the folder that has vllm/ in it."""
    package("vllm", place)
    package("vllm.distributed", place)
    module(
        "torch",
        Tensor=type("Tensor", (), {}),
        version=SimpleNamespace(hip=None),
    )
    module(
        "vllm.platforms",
        current_platform=SimpleNamespace(is_rocm=lambda: False),
    )
    module(
        "vllm.distributed.parallel_state",
        is_local_first_rank=lambda: True,
        is_global_first_rank=lambda: True,
    )
    module(
        "vllm.v1.core.kv_cache_utils",
        get_none_hash_seed=lambda: "seed of the test",
    )
    module(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping",
        canonical_format_id=str,
    )
