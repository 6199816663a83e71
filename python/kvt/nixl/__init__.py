# SPDX-License-Identifier: Apache-2.0
"""NIXL's Python agent on kvt: the names of the package `nixl`.

    import kvt.nixl as nixl

or, for programs that are not to be changed, :func:`install`, which KVT_NIXL=1
in the environment calls when this module is imported; and that is done by the
first import of NIXL where kvt is installed. docs/nixl_agent.md has every name,
and what is different. Needs numpy.
"""

import os as _os

from ._api import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
)
from ._bindings import *  # noqa: F403
from ._bindings import __all__ as _names
from ._switch import install, uninstall

__all__ = [
    "DEFAULT_COMM_PORT",
    "install",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
    "uninstall",
]
__all__ += _names

if _os.environ.get("KVT_NIXL") == "1":
    install()
