# SPDX-License-Identifier: Apache-2.0
"""The entry point of the group vllm.general_plugins.

vLLM calls register() once or more in each of its processes, long before the
P2P tier is imported, if it ever is. Importing the tier here would import NIXL
into processes that do not need it; so the class is replaced when vLLM imports
the module that defines it. Where that has happened before, it is replaced at
once, in the modules that have taken it over by then.
"""

from __future__ import annotations

import importlib.abc
import logging
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "kvt"
"""Of the entry point, as VLLM_PLUGINS lists it."""

HOME = "vllm.v1.kv_offload.tiering.p2p.data.nixl"
"""The module that defines vLLM's NixlTransport."""

USERS = (
    "vllm.v1.kv_offload.tiering.p2p.data",
    "vllm.v1.kv_offload.tiering.p2p.manager",
)
"""The modules that import it by name."""

logger = logging.getLogger("vllm.kvt")


def wanted() -> bool:
    """KVT_VLLM decides; without it, being named in VLLM_PLUGINS does."""
    switch = os.environ.get("KVT_VLLM", "")
    if switch:
        return switch == "1"
    listed = os.environ.get("VLLM_PLUGINS", "")
    return NAME in (name.strip() for name in listed.split(","))


def register() -> None:
    """Called by vLLM."""
    if not wanted():
        return
    if not any(isinstance(finder, Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watch())
    replace()


class Watch(importlib.abc.MetaPathFinder):
    """Lets the others find HOME, and replaces the class once it has run."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != HOME:
            return None
        for finder in sys.meta_path:
            spec = (
                None
                if finder is self
                else finder.find_spec(fullname, path, target)
            )
            if spec is not None and spec.loader is not None:
                follow(spec.loader)
                return spec
        return None


def follow(loader: importlib.abc.Loader) -> None:
    """Calls replace() after the module of this loader has run."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        replace()

    loader.exec_module = exec_module  # type: ignore[method-assign]


def replace() -> None:
    """Puts our class where vLLM's is, in what is imported so far."""
    home = sys.modules.get(HOME)
    if home is None:
        return
    base = sys.modules.get("kvt.vllm._base")
    if base is not None and not hasattr(base, "PollResult"):
        # Our own class is being imported, and has imported vLLM's base class
        # from beside HOME: _transport calls again when it is done.
        return
    theirs = getattr(home, "NixlTransport", None)
    if theirs is None:
        logger.warning("kvt: %s has no NixlTransport: kvt is not used", HOME)
        return
    from ._transport import NixlTransport

    if theirs is NixlTransport:
        return
    for module in (home, *map(sys.modules.get, USERS)):
        if getattr(module, "NixlTransport", None) is theirs:
            vars(module)["NixlTransport"] = NixlTransport
    show_log()
    logger.info("kvt %s takes the place of vLLM's NixlTransport", version())


def version() -> str:
    import kvt

    return kvt.__version__


def show_log() -> None:
    """Sends kvt's own lines where vLLM's go, unless they go somewhere."""
    ours = logging.getLogger("kvt")
    theirs = logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    ours.handlers = theirs.handlers
    ours.propagate = theirs.propagate
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)
