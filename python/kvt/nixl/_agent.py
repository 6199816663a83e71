# SPDX-License-Identifier: Apache-2.0
"""nixl_agent: NIXL's calls, each made of kvt's.

The agent is the transport, its peers, and what was registered; prepared lists
and transfers look after themselves (_handles.py). Every call may be made from
any thread; only the table of backends and what belongs to it has a lock, since
a backend may have to open the transport anew.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import kvt

from . import _blob, _descs, _engine, _forms
from ._config import nixl_agent_config
from ._descs import nixlRegDList, nixlRemoteDList, nixlXferDList
from ._enums import KINDS, MEMORY_BY_NAME, OPS, nixl_mem_t, nixl_xfer_op_t
from ._errors import (
    nixlInvalidParamError,
    nixlNotFoundError,
    not_offered,
    translated,
)
from ._handles import nixl_xfer_handle
from ._log import logger
from ._notes import Notes
from ._peers import Peer, Peers
from ._xfers import Xfers

_CLOSE_S = 3.0


class nixl_agent(Notes, Xfers):
    """One agent: an engine, registered memory, peers and transfers.

    Attributes:
        name: of the agent.
        backends: the started ones by name.
        notifs: what update_notifs() has collected.
        plugin_list: the plugins that are there.
        core: the :class:`kvt.Transport` below, for its statistics; None until
            a backend is started.
    """

    def __init__(
        self,
        agent_name: str,
        nixl_conf: nixl_agent_config | None = None,
        instantiate_all: bool = False,
    ) -> None:
        self.core: kvt.Transport | None = None
        if not agent_name:
            raise ValueError("an agent needs a name that is not empty")
        if nixl_conf and instantiate_all:
            instantiate_all = False
            logger.warning("instantiate_all is ignored: a config is given")
        conf = nixl_conf or nixl_agent_config()
        if conf.enable_listen:
            raise not_offered(
                "the listener for metadata (enable_listen_thread)",
                "send get_agent_metadata() by your own means, or use plain "
                "NIXL's agent",
            )
        self.name = agent_name
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, int] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        self.plugin_list = _engine.plugins()
        self.plugin_b_options: dict[str, dict[str, str]] = {}
        self.plugin_mem_types: dict[str, list[str]] = {}
        self.nixl_mems: dict[str, nixl_mem_t] = dict(MEMORY_BY_NAME)
        self.nixl_ops: dict[str, nixl_xfer_op_t] = dict(OPS)
        self._measure = bool(conf.capture_telemetry)
        self._used = False  # another backend would be too late
        self._lock = threading.Lock()
        self._peers: Peers | None = None
        wanted = self.plugin_list if instantiate_all else conf.backends
        params = {}
        for backend in wanted:
            if backend in self.plugin_list:
                threads = _engine.threads_for(backend, conf.num_threads)
                params[backend] = threads
            else:
                logger.warning("there is no plugin for backend %s", backend)
        if params:
            self._start(params)

    def __del__(self) -> None:
        core = getattr(self, "core", None)
        if core is not None:
            with contextlib.suppress(Exception):
                core.close(_CLOSE_S)

    # -------------------------------------------------------------- backends

    def _start(self, params: Mapping[str, Mapping[str, str]]) -> None:
        """Opens the transport with what is started and `params`."""
        every = {**self.backend_options, **params}
        old, self.core = self.core, None
        if old is not None:
            old.close(_CLOSE_S)
        try:
            self.core = _engine.start(self.name, every)
        except Exception:
            if old is not None:
                self.core = _engine.start(self.name, self.backend_options)
                self._peers = Peers(self.core)
            raise
        self._peers = Peers(self.core)
        mems = _engine.kinds()
        for backend, given in params.items():
            self.backends[backend] = len(self.backends) + 1
            self.backend_options[backend] = dict(given)
            self.backend_mems[backend] = mems

    def create_backend(
        self, backend: str, initParams: Mapping[str, str] | None = None
    ) -> None:
        """Starts a backend. Another one can be started only before memory is
        registered, metadata is asked for, or a peer is added."""
        params = dict(initParams or {})
        with self._lock:
            if backend not in self.plugin_list:
                self.plugin_list = _engine.plugins()
            if backend not in self.plugin_list:
                raise nixlNotFoundError(
                    f"there is no plugin for backend {backend!r}"
                )
            if backend in self.backends:
                raise nixlInvalidParamError(
                    f"backend {backend!r} is started already"
                )
            if self._used:
                raise not_offered(
                    "another backend for an agent that is in use",
                    "create all backends before you register memory",
                )
            self._start({backend: params})
        logger.info("backend %s is started", backend)

    def get_plugin_list(self) -> list[str]:
        """The plugins that are there. Some may need more than is there."""
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """The memory that kvt moves with a plugin."""
        if backend in self.plugin_list:
            return self.backend_mems.get(backend) or _engine.kinds()
        logger.warning("plugin %s is not there to say what it moves", backend)
        return []

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Always empty, which create_backend() takes for every default: NIXL's
        C interface does not give kvt the names."""
        logger.warning("kvt does not know the parameters of %s", backend)
        return {}

    def get_backend_mem_types(self, backend: str) -> list[str]:
        if backend in self.backend_mems:
            return self.backend_mems[backend]
        logger.warning("backend %s is not started", backend)
        return []

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """What the backend was started with."""
        if backend in self.backend_options:
            return self.backend_options[backend]
        logger.warning("backend %s is not started", backend)
        return {}

    def _only(self, backends: Sequence[str] | None) -> kvt.Transport:
        """The transport, for a call that is limited to some backends: kvt
        leaves it to NIXL which of them moves what."""
        for backend in backends or ():
            if backend not in self.backends:
                raise KeyError(backend)
        if backends and set(backends) != set(self.backends):
            raise not_offered(
                "a choice among the backends of an agent",
                "make an agent with the one that you want",
            )
        return self._open()

    def _open(self) -> kvt.Transport:
        if self.core is None:
            raise nixlNotFoundError("no backend is started: create_backend()")
        return self.core

    # ---------------------------------------------------------------- memory

    def register_memory(
        self,
        reg_list: Any,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> nixlRegDList:
        """Registers memory, all or none. It must be mapped. The buffers are
        not held: they must stay until they are deregistered."""
        core = self._only(backends)
        descs: nixlRegDList = _list_of(
            self.get_reg_descs(reg_list, mem_type), nixlRegDList
        )
        with translated():
            core.register(_regions(descs))
        self._used = True
        return descs

    def deregister_memory(
        self, dereg_list: nixlRegDList, backends: Sequence[str] = ()
    ) -> None:
        """Takes registrations back. kvt's peers on this host write no more into
        the memory once this has returned."""
        core = self._only(backends)
        descs = _list_of(dereg_list, nixlRegDList)
        with translated():
            core.deregister(_regions(descs))

    def query_memory(
        self, reg_list: Any, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        """Not offered: it is for files and objects."""
        if backend not in self.backends:
            raise ValueError(
                f"Backend {backend!r} not found. Available backends: "
                f"{list(self.backends)}"
            )
        raise not_offered(
            "query_memory()", "it is for storage, which kvt does not move"
        )

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        """A list for registration, of 4-tuples, an N x 3 array, a tensor or a
        list of tensors; None, and a line in the log, for anything else."""
        return _forms.list_of(nixlRegDList, descs, mem_type, self.nixl_mems)

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        """A list for transfers, of 3-tuples, an N x 3 array, a tensor or a list
        of tensors; None, and a line in the log, for anything else."""
        return _forms.list_of(nixlXferDList, descs, mem_type, self.nixl_mems)

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        """A list of (address, length, device, agent name)."""
        return _forms.list_of(nixlRemoteDList, descs, mem_type, self.nixl_mems)

    def get_serialized_descs(self, descs: Any) -> bytes:
        """Bytes that deserialize_descs() takes, here or under plain NIXL."""
        return _descs.dumps(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """The list. Bytes that hold anything but a list are refused."""
        return _descs.loads(serialized_descs)

    # ----------------------------------------------------------------- peers

    def get_agent_metadata(self) -> bytes:
        """NIXL's metadata, with kvt's behind it, which NIXL ignores."""
        core = self._open()
        self._used = True
        with translated():
            return core.metadata()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Adds an agent; its name, as bytes.

        Known metadata of an agent that is loaded changes nothing; newer one
        updates it. After a disconnect, or for another process under the same
        name, the agent is loaded anew, and lists have to be prepared again.
        """
        if isinstance(metadata, str):
            metadata = metadata.encode()
        peers = self._table()
        self._used = True
        with translated():
            return peers.add(bytes(metadata))

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Forgets an agent; what is under way with it is stopped."""
        if self._peers is not None:
            with translated():
                self._peers.remove(_name(agent))

    def check_remote_metadata(
        self, agent: str | bytes, descs: nixlXferDList | None = None
    ) -> bool:
        """Whether transfers to the agent are taken: False once a disconnect
        was seen. With `descs`, whether all of them are in its memory."""
        core = self.core
        if core is None or self._peers is None:
            return False
        peer = self._peers.find(_name(agent))
        if peer is None or not peer.loaded(core):
            return False
        return descs is None or self._covers(core, peer, descs)

    def _table(self) -> Peers:
        if self._peers is None:
            raise nixlNotFoundError("no backend is started: create_backend()")
        return self._peers

    def _peer(self, agent: str | bytes) -> Peer:
        peer = self._table().find(_name(agent))
        if peer is None:
            raise nixlNotFoundError(
                f"agent {_name(agent)!r} was not added: add_remote_agent()"
            )
        return peer

    def make_connection(
        self, remote_agent: str | bytes, backends: Sequence[str] = ()
    ) -> None:
        """Connects before the first transfer."""
        core = self._only(backends)
        peer = self._peer(remote_agent)
        with translated():
            core.wait(core.warm_up(peer.ident))

    def get_partial_agent_metadata(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
    ) -> bytes:
        """Metadata with these registrations only, and with the connections
        (also for an empty list) or without: for peers that have them."""
        core = self._only(backends)
        descs = _list_of(descs, nixlRegDList)
        self._used = True
        with translated():
            whole = core.metadata()
        rows = descs.rows().tolist()
        connect = inc_conn_info or not rows
        return _blob.part(whole, int(descs.getType()), rows, connect)

    # ----------------------------------------------------------- not offered

    def send_local_metadata(self, ip_addr: str = "", port: int = 0) -> None:
        raise _no_exchange("send_local_metadata()")

    def send_partial_agent_metadata(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
        ip_addr: str = "",
        port: int = 0,
        label: str = "",
    ) -> None:
        raise _no_exchange("send_partial_agent_metadata()")

    def fetch_remote_metadata(
        self,
        remote_agent: str,
        ip_addr: str = "",
        port: int = 0,
        label: str = "",
    ) -> None:
        raise _no_exchange("fetch_remote_metadata()")

    def invalidate_local_metadata(
        self, ip_addr: str = "", port: int = 0
    ) -> None:
        raise _no_exchange("invalidate_local_metadata()")

    def prep_mem_view(
        self, dlist: Any, *, backends: Sequence[str] | None = None
    ) -> int:
        raise not_offered("memory views", "they are for GPU kernels of NIXL")

    def release_mem_view(self, mvh: int) -> None:
        raise not_offered("memory views", "they are for GPU kernels of NIXL")

    def estimate_xfer_cost(
        self, req_handle: nixl_xfer_handle
    ) -> tuple[int, int, str]:
        """NIXL's answer where a backend has no estimate."""
        return 0, 0, "UNKNOWN"


def _no_exchange(what: str) -> Exception:
    return not_offered(
        what,
        "send get_agent_metadata() by your own means and call "
        "add_remote_agent() there",
    )


def _name(agent: str | bytes) -> str:
    if isinstance(agent, str):
        return agent
    return agent.decode(errors="surrogateescape")


def _list_of(descs: Any, kind: type[Any]) -> Any:
    """TypeError, as in NIXL, for what is no list of this kind."""
    if not isinstance(descs, kind):
        raise TypeError(
            f"a {kind.__name__} is needed, not a {type(descs).__name__}"
        )
    return descs


def _regions(descs: nixlRegDList) -> list[tuple[int, int, int, int]]:
    kind = KINDS.get(descs.getType())
    if kind is None:
        raise not_offered(
            f"memory of the type {descs.getType().name}",
            "it moves DRAM and VRAM",
        )
    return [
        (addr, length, kind, device)
        for addr, length, device in descs.rows().tolist()
    ]
