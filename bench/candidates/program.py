# SPDX-License-Identifier: Apache-2.0
"""A candidate written in C: the programs of bench/ with --serve.

Such a program sets up and checks its transfers once, prints a line "ready",
and then measures once for each line "round" it reads, one JSON object for each
of its variants.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any


class ProgramFailed(Exception):
    pass


class Program:
    def __init__(
        self,
        place: Path,
        name: str,
        *options: str,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        beside: Program | None = None,
    ) -> None:
        """`beside` is a target that has to be awake whenever this is."""
        self.name = name
        self.beside = beside
        if "target" not in options:
            options = ("--serve", *options)
        # A session of its own, so that its children can be stopped with it.
        self.process = subprocess.Popen(
            [*prefix, str(place / "bench" / name), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        if beside is not None:
            beside.wake()
        self.ready = self._line()
        self.rest()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise ProgramFailed(f"{self.name} ended with {code}")
        return json.loads(line)

    def rest(self) -> None:
        if self.beside is not None:
            self.beside.rest()
        os.killpg(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        if self.beside is not None:
            self.beside.wake()
        os.killpg(self.process.pid, signal.SIGCONT)

    def round(self) -> list[dict[str, Any]]:
        """One object for each variant."""
        assert self.process.stdin is not None
        self.wake()
        try:
            self.process.stdin.write("round\n")
            self.process.stdin.flush()
            return [self._line() for _ in range(self.ready["lines"])]
        finally:
            with suppress(ProcessLookupError):
                self.rest()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in self.process.stdin, self.process.stdout:
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
