# SPDX-License-Identifier: Apache-2.0
"""The names of NIXL's module `nixl._api`."""

from ._agent import nixl_agent
from ._bindings import nixlBind
from ._config import nixl_agent_config
from ._enums import DEFAULT_COMM_PORT, nixl_thread_sync_t
from ._handles import nixl_prepped_dlist_handle, nixl_xfer_handle
from ._log import logger

nixl_backend_handle = int

__all__ = [
    "DEFAULT_COMM_PORT",
    "logger",
    "nixlBind",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
