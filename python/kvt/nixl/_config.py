# SPDX-License-Identifier: Apache-2.0
"""The configuration of an agent."""

from __future__ import annotations

from collections.abc import Sequence

from ._enums import DEFAULT_COMM_PORT, nixl_thread_sync_t


class nixl_agent_config:
    """What an agent is made with.

    Args:
        enable_prog_thread: taken and not needed: kvt has a thread of its own.
        enable_listen_thread: not offered; nixl_agent() refuses it.
        listen_port: of no use without it.
        capture_telemetry: whether get_xfer_telemetry() answers. kvt's own
            counters are always on.
        num_threads: threads of a backend; UCX's become kvt's copy threads.
        backends: that are started with the agent.
        sync_mode: taken and not needed: every call may be made from any
            thread.
    """

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(
            sync_mode, nixl_thread_sync_t
        ):
            raise TypeError(
                "sync_mode must be a nixl_thread_sync_t, not a "
                f"{type(sync_mode).__name__}"
            )
        self.backends = list(backends)
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode
