# SPDX-License-Identifier: Apache-2.0
"""An agent's notifications."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvt

from ._errors import translated


class Notes:
    """The part of nixl_agent that sends and takes notifications."""

    notifs: dict[str, list[bytes]]

    def _only(self, backends: Sequence[str] | None) -> kvt.Transport:
        raise NotImplementedError

    def _peer(self, agent: str | bytes) -> Any:
        raise NotImplementedError

    def send_notif(
        self,
        remote_agent_name: str | bytes,
        notif_msg: bytes | str,
        backend: str | None = None,
    ) -> None:
        """Sends a message. It is in order with others to this agent, and with
        those of transfers that are done."""
        core = self._only(None if backend is None else [backend])
        peer = self._peer(remote_agent_name)
        with translated():
            core.notify(peer.ident, message(notif_msg))

    def get_new_notifs(
        self, backends: Sequence[str] = ()
    ) -> dict[str, list[bytes]]:
        """What came since the last call, by the sender's name."""
        return self._collect({}, backends)

    def update_notifs(
        self, backends: Sequence[str] = ()
    ) -> dict[str, list[bytes]]:
        """Adds what came to `notifs`, and returns that."""
        self.notifs = self._collect(self.notifs, backends)
        return self.notifs

    def _collect(
        self, found: dict[str, list[bytes]], backends: Sequence[str]
    ) -> dict[str, list[bytes]]:
        core = self._only(backends)
        with translated():
            for note in core.notifications():
                found.setdefault(note.agent_name, []).append(note.data)
        return found

    def check_remote_xfer_done(
        self,
        remote_agent_name: str | bytes,
        lookup_tag: bytes | str,
        backends: Sequence[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        """Whether a message of this agent has begun with the tag, or has it in
        it; that one is taken out of `notifs`."""
        name = message(remote_agent_name).decode(errors="surrogateescape")
        tag = message(lookup_tag)
        waiting = self.update_notifs(backends).get(name, [])
        for i, note in enumerate(waiting):
            if note.startswith(tag) if tag_is_prefix else tag in note:
                del waiting[i]
                return True
        return False


def message(text: bytes | str) -> bytes:
    """NIXL's callers may give either."""
    return text.encode() if isinstance(text, str) else bytes(text)
