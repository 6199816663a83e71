# SPDX-License-Identifier: Apache-2.0
"""Proves how SGLang's settings become a backend's: parameters, threads,
interfaces, and which settings are refused, in which words.

Nothing is opened here but a transport of the local engine. That NIXL's thread
is on the right GPU before it makes a backend is proven in C, by
tests/unit/test_nixl_gpu.c; here only that `gpu_id` gets there. Numbers are
those of the table in docs/sglang.md.
"""

from __future__ import annotations

import enum
import inspect
import logging
import os
from typing import Any

import pytest

import kvt
from conftest import run_python
from kvt.sglang import NixlTransport, backend_options


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SGLANG_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.delenv("KVT_ENGINE", raising=False)


class Mode(enum.Enum):
    """As SGLang's DisaggregationMode."""

    PREFILL = "prefill"
    DECODE = "decode"


@pytest.mark.parametrize(
    ("role", "backend", "wanted"),
    [
        # Not the 8 of SGLang: docs/sglang.md.
        ("prefill", None, {}),
        (Mode.PREFILL, "UCX", {}),
        ("prefill", "OBJ", {"num_threads": "8"}),
        ("prefill", "GDS_MT", {"thread_count": "8"}),
        ("prefill", "UCCL", {"num_cpus": "8"}),
        ("prefill", "LIBFABRIC", {}),
        ("decode", None, {}),
        (Mode.DECODE, "GDS_MT", {}),
        ("DECODE", "UCCL", {}),
    ],
)
def test_26_params_rules(
    role: Any, backend: Any, wanted: dict[str, str]
) -> None:
    assert backend_options(role, backend) == (backend or "UCX", wanted)


def test_26_the_users_number_of_threads_wins() -> None:
    for params in ({"num_threads": "2"}, '{"num_threads": "2"}'):
        made = backend_options("prefill", "UCX", params)
        assert made == ("UCX", {"num_threads": "2"})


def test_26_the_environment_is_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    start = "SGLANG_DISAGGREGATION_NIXL_BACKEND"
    monkeypatch.setenv(start, "GDS_MT")
    monkeypatch.setenv(f"{start}_PARAMS", '{"a": "b"}')
    made = backend_options("prefill")
    assert made == ("GDS_MT", {"a": "b", "thread_count": "8"})
    assert backend_options("decode", "UCX", {}) == ("UCX", {})


@pytest.mark.parametrize(
    "params", ["{", "[]", '"text"', '{"a": 1}', '{"a": {}}', {"a": 1}, {1: "a"}]
)
def test_26_params_must_be_strings(params: Any) -> None:
    with pytest.raises(ValueError, match="parameters"):
        backend_options("prefill", "UCX", params)


@pytest.mark.parametrize(
    ("ib_device", "wanted"),
    [
        ("mlx5_0", "mlx5_0"),
        ("mlx5_0,mlx5_1", "mlx5_0, mlx5_1"),
        (["mlx5_0", "mlx5_1"], "mlx5_0, mlx5_1"),
        ({3: "mlx5_2,mlx5_3", 0: "mlx5_0"}, "mlx5_2, mlx5_3"),
        ('{"3": "mlx5_2"}', "mlx5_2"),
    ],
)
def test_26_interfaces(ib_device: Any, wanted: str) -> None:
    made = backend_options("decode", "UCX", {}, ib_device, 3)
    assert made == ("UCX", {"device_list": wanted})
    assert backend_options("decode", "OBJ", {}, ib_device, 3) == ("OBJ", {})


@pytest.mark.parametrize(
    "ib_device", ["mlx5_0:1", "mlx5_0,", ",", {0: "mlx5_0"}, "{3}", ["a", ""]]
)
def test_26_interfaces_that_are_none(ib_device: Any) -> None:
    with pytest.raises(ValueError, match="ib_device"):
        backend_options("decode", "UCX", {}, ib_device, 3)


def test_26_device_list_conflict() -> None:
    params = {"device_list": "mlx5_1"}
    with pytest.raises(ValueError, match="mlx5_1.*mlx5_0"):
        backend_options("decode", "UCX", params, "mlx5_0")
    made = backend_options("decode", "UCX", params, "mlx5_1")
    assert made == ("UCX", params)


def test_26_ucx_net_devices_wins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_9:1")
    with caplog.at_level(logging.WARNING, "kvt.sglang"):
        made = backend_options("decode", "UCX", {}, "mlx5_0")
    assert made == ("UCX", {})
    assert "UCX_NET_DEVICES is set" in caplog.text


class Opened(Exception):
    """Instead of a transport."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What kvt.Transport would be opened with."""
    seen: dict[str, Any] = {}

    def transport(engine: str, **options: Any) -> None:
        seen.update(options, engine=engine)
        raise Opened

    monkeypatch.setattr(kvt, "Transport", transport)
    return seen


def test_25_the_gpu_is_handed_on(opened: dict[str, Any]) -> None:
    with pytest.raises(Opened):
        NixlTransport.create("prefill", 3, engine="local")
    assert opened["device"] == 3
    assert opened["backends"] == ["UCX"]
    assert opened["params"] is None
    assert opened["workers"] == 8
    assert opened["call_timeout"] == 60.0
    assert len(opened["agent_name"]) == 36


def test_create_takes_sglangs_timeout(
    opened: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT"
    monkeypatch.setenv(name, "7")
    with pytest.raises(Opened):
        NixlTransport.create("decode", engine="local")
    assert (opened["call_timeout"], opened["params"]) == (7.0, None)
    monkeypatch.setenv(name, "soon")
    with pytest.raises(ValueError, match="soon is no number"):
        NixlTransport.create("decode", engine="local")


def test_the_engine_is_nixl_unless_it_is_named(
    opened: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvt.sglang import _transport

    monkeypatch.setattr(_transport, "_check_engine", lambda engine: None)
    with pytest.raises(Opened):
        NixlTransport.create("decode")
    assert opened["engine"] == "nixl"
    monkeypatch.setenv("KVT_ENGINE", "fault:nixl?reject=1")
    with pytest.raises(Opened):
        NixlTransport.create("decode")
    assert opened["engine"] == "fault:nixl?reject=1"


def test_every_transport_has_a_name_of_its_own() -> None:
    made = [NixlTransport.create("decode", engine="local") for _ in range(2)]
    assert made[0].agent_name != made[1].agent_name
    for transport in made:
        assert isinstance(transport.agent_metadata, bytes)
        transport.close()


def test_wrong_settings_are_value_errors() -> None:
    cases: tuple[dict[str, Any], ...] = (
        {"role": "both"},
        {"role": "prefill", "engine": "no engine"},
        {"role": "prefill", "engine": "local", "agent_name": "x" * 300},
    )
    for options in cases:
        with pytest.raises(ValueError):
            NixlTransport.create(**{"engine": "local", **options})


def test_without_nixl_it_is_an_import_error() -> None:
    done = run_python(
        """
import os
os.environ["KVT_NIXL_LIBRARY"] = "/nowhere/libnixl_capi.so"
from kvt.sglang import NixlTransport
for engine in (None, "nixl", "fault:nixl?reject=1", "nixl:gpu=0"):
    try:
        NixlTransport.create("prefill", engine=engine)
    except ImportError as error:
        assert "pip install nixl-cu12" in str(error), error
        assert "/nowhere" in str(error), error
    else:
        raise AssertionError(engine)
print("done")
"""
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_every_public_name_has_a_docstring() -> None:
    from kvt import sglang

    for name in sglang.__all__:
        assert inspect.getdoc(getattr(sglang, name)), name
    for name, member in inspect.getmembers(NixlTransport):
        if not name.startswith("_") and callable(member):
            assert inspect.getdoc(member), name
