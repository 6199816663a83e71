# SPDX-License-Identifier: Apache-2.0
"""The library's lines reach the logger "kvt", whichever thread wrote them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

import kvt
from conftest import PATIENCE, Pair


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "kvt"]


def lose_one(pair: Pair) -> None:
    with pytest.raises(kvt.Lost):
        pair.source.wait(pair.write([0], [0]), PATIENCE)


def test_a_warning_arrives_without_another_call(
    fault_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvt")
    pair = fault_pair("never=*")
    lose_one(pair)
    while not lines(caplog):
        pass  # the interpreter runs the pending call by itself
    record = lines(caplog)[0]
    assert record.levelno == logging.WARNING
    assert "lost" in record.getMessage()
    assert "%" not in str(record.msg).replace("%s", "")


def test_log_false_is_silent(
    fault_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvt")
    pair = fault_pair("never=*", log=False)
    lose_one(pair)
    pair.source.poll()
    assert lines(caplog) == []


def test_levels_are_the_loggers(
    fault_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "kvt")
    pair = fault_pair("never=*")
    lose_one(pair)
    pair.source.poll()
    assert lines(caplog) == []


def test_a_handler_may_call_kvt(fault_pair: Callable[..., Pair]) -> None:
    pair = fault_pair("never=*")
    seen: list[int] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(pair.source.stats().lost)
            pair.source.poll()

    handler = Handler()
    logger = logging.getLogger("kvt")
    logger.addHandler(handler)
    try:
        lose_one(pair)
        while not seen:
            pair.source.poll()
    finally:
        logger.removeHandler(handler)
    assert seen[0] == 1
