# SPDX-License-Identifier: Apache-2.0
"""From what kvt knows of a transfer to what SGLang's protocol asks.

The protocol treats a write by two words: whether it is over on both sides
(`quiescent`), and whether NIXL could tell. So a part that failed while others
still move is in progress until all have settled, but a link that broke, or a
state that nobody can tell, is said at once. What was said once stays; only
`quiescent` may become true later, when kvt has the proof.
"""

from __future__ import annotations

import time

import kvt

from ._errors import translate
from ._types import NixlHandle, NixlResult, NixlState

_STEP_S = 0.00005

_EARLY = {
    kvt.State.REJECTED: NixlState.REJECTED,
    kvt.State.DISCONNECTED: NixlState.UNREADABLE,
    kvt.State.UNREADABLE: NixlState.UNREADABLE,
    kvt.State.CANCELLED: NixlState.UNREADABLE,
}
"""What is said of a transfer before it is finished; else, in progress."""

_FINISHED = {
    kvt.State.DONE: NixlState.DONE,
    kvt.State.REJECTED: NixlState.REJECTED,
    kvt.State.FAILED: NixlState.FAILED,
    kvt.State.CANCELLED: NixlState.FAILED,
    kvt.State.TIMED_OUT: NixlState.FAILED,
    kvt.State.DISCONNECTED: NixlState.UNREADABLE,
    kvt.State.LOST: NixlState.UNREADABLE,
}


def look(core: kvt.Transport, handle: NixlHandle) -> NixlResult:
    """The answer to status(); safe in several threads at once."""
    if handle._final is not None:
        return handle._final
    try:
        seen = core.status(handle._xfer)
    except kvt.Error as error:
        if handle._final is not None:  # another thread was faster
            return handle._final
        handle.error = translate(error)
        return NixlResult(NixlState.UNREADABLE, False, handle.error)
    return _judge(handle, seen)


def _judge(handle: NixlHandle, seen: kvt.Result) -> NixlResult:
    error = seen.error
    if handle.error is None and error is not None:
        handle.error = translate(error)
    states = _FINISHED if seen.finished else _EARLY
    state = handle._state or states.get(seen.state)
    if state is None:
        return NixlResult(NixlState.IN_PROGRESS, False)
    handle._state = state
    if state is NixlState.REJECTED:
        # Never called quiescent, whatever kvt can prove: the protocol raises
        # on it and keeps the pages.
        return handle._finish(NixlResult(state, False, handle.error))
    result = NixlResult(state, seen.quiescent, handle.error)
    return handle._finish(result) if seen.quiescent else result


def wait_for_post(
    core: kvt.Transport, handle: NixlHandle, longest_s: float
) -> None:
    """Until the first part is refused, or has landed, or takes its time."""
    until = time.monotonic() + longest_s
    while True:
        try:
            seen = core.status(handle._xfer)
        except kvt.Error:
            return  # status() will say it
        if (
            not _judge(handle, seen).in_progress
            or seen.bytes_done > 0
            or time.monotonic() >= until
        ):
            return
        time.sleep(_STEP_S)
