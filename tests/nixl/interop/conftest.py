# SPDX-License-Identifier: Apache-2.0
"""Which NIXL on which side, over what. The two virtual environments come from
KVT_TEST_NIXL_15 and KVT_TEST_NIXL_13; ../interop.sh checks that they are
there."""

import itertools
import os

import pytest

from peers import Kvt, Plain

PLACES = {version: os.environ[f"KVT_TEST_NIXL_{version}"] for version in ("15", "13")}

# (NIXL under kvt, NIXL of the plain agent, UCX_TLS). UCX of 1.3 and of 1.5 do
# not understand each other's shared memory: mixed pairs go over TCP.
PAIRS = [
    ("15", "15", None),
    ("15", "15", "tcp"),
    ("13", "13", None),
    ("13", "13", "tcp"),
    ("15", "13", "tcp"),
    ("13", "15", "tcp"),
]

serial = itertools.count()


def pair_name(pair):
    kvt, plain, tls = pair
    return f"kvt_on_{kvt}-plain_{plain}-{tls or 'default'}"


class Stage:
    """Starts both sides and ends whatever a test left running."""

    def __init__(self, pair):
        self.pair = pair
        self.place = PLACES[pair[1]]
        self.started = []
        # A request that NIXL never finished is the engine's to the end, and
        # its close says so.
        self.may_be_busy = False

    def kvt(self, name=None, **more):
        kvt, _, tls = self.pair
        side = Kvt(PLACES[kvt], name or f"kvt-{next(serial)}", tls, **more)
        self.started.append(side)
        return side

    def plain(self, name=None, **more):
        _, plain, tls = self.pair
        side = Plain(PLACES[plain], name or f"plain-{next(serial)}", tls, **more)
        self.started.append(side)
        return side

    def end(self):
        """kvt's sides must close without an error; plain ones are killed, as
        their destructors may wait for peers that are gone."""
        codes = []
        for side in self.started:
            if side.process.stdin.closed:
                continue
            if isinstance(side, Kvt):
                codes.append(side.end())
            else:
                side.kill()
        assert self.may_be_busy or not any(codes), f"kvt_peer ended with {codes}"


@pytest.fixture(params=PAIRS, ids=pair_name)
def stage(request):
    stage = Stage(request.param)
    yield stage
    stage.end()


@pytest.fixture(params=["15", "13"])
def alike(request):
    """Both sides on the same NIXL, default transports."""
    stage = Stage((request.param, request.param, None))
    yield stage
    stage.end()
