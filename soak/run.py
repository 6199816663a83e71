# SPDX-License-Identifier: Apache-2.0
"""The command behind `./dev soak`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import proc
from .figures import MEASURES, Slope, grown, slopes
from .proc import Sample
from .shape import CANCEL_EACH, KILL_EACH, PEERS, RATE, RELOADS

ROOT = Path(__file__).resolve().parents[1]
INTERVAL_MAX = 1.0
SAMPLES_MIN = 100
SETTLE = 60.0
"""Seconds until what is still held after the end counts as kept."""

NIXLS = "tcp socket"
NIXLS_SETTLE = 3.0
"""The same for what is NIXL's alone: it does keep some. kvt opens no TCP, but
closes a connection of NIXL's only a second after its last peer went."""


@dataclass(frozen=True)
class Kind:
    """What a writer is."""

    name: str
    mover: str
    options: dict[str, Any] = field(hash=False)


NIXL = {"engine": "nixl", "same_host": False}
KINDS = {
    kind.name: kind
    for kind in (
        Kind("local", "kvt", {"engine": "local"}),
        Kind("nixl", "kvt", NIXL),
        Kind("raw", "raw", NIXL),
    )
}
TITLES = {
    "local": "kvt, engine local",
    "nixl": "kvt, engine nixl",
    "raw": "NIXL without kvt",
}


class Failed(Exception):
    pass


class Subject(threading.Thread):
    """A writer, sampled in a thread of ours from its start to its end."""

    def __init__(self, kind: Kind, seconds: float) -> None:
        super().__init__()
        self.kind = kind
        self.interval = min(INTERVAL_MAX, seconds / SAMPLES_MIN)
        self.samples: list[Sample] = []
        self.target: list[Sample] = []
        self.stages: dict[str, dict[str, Any]] = {}
        self.at: dict[str, Sample] = {}
        self.threads: dict[str, dict[str, int]] = {}
        self.target_pid = 0
        self.failure = ""
        options = json.dumps(kind.options)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "soak.writer", kind.mover, options, options,
             str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )  # fmt: skip

    def run(self) -> None:
        try:
            self.follow()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self.process.kill()
            self.process.wait()

    def follow(self) -> None:
        self.reach("started")
        self.reach("opened")
        self.reach("connected")
        self.target_pid = self.stages["connected"]["target"]
        self.reach("stopped", sampled=True)
        self.reach("reloaded")
        self.reach("removed", settle="opened")
        self.reach("closed", settle="started")
        if self.process.wait() != 0:
            raise Failed(f"the writer ended with {self.process.returncode}")

    def reach(
        self, stage: str, sampled: bool = False, settle: str = ""
    ) -> None:
        """Waits for a stage, looks at the writer while it rests there, and
        lets it go on."""
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        began = time.monotonic()
        while sampled and not self.said(self.interval):
            self.samples.append(proc.sample(self.process.pid, began))
            self.target.append(proc.sample(self.target_pid, began))
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise Failed(f"the writer ended with {code} before it {stage}")
        said = json.loads(line)
        assert said["stage"] == stage
        self.stages[stage] = said
        self.at[stage] = proc.sample(self.process.pid)
        self.threads[stage] = proc.threads(self.process.pid)
        if settle:
            self.settle(stage, self.at[settle])
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def said(self, seconds: float) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def settle(self, stage: str, before: Sample) -> None:
        """What is closed by other threads may take a moment, and a thread
        that was joined is not gone at once."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < SETTLE:
            now = proc.sample(self.process.pid)
            self.at[stage] = now
            self.threads[stage] = proc.threads(self.process.pid)
            kept = grown(before.kinds, now.kinds)
            patient = kept.pop(NIXLS, 0) and waited < NIXLS_SETTLE
            running = stage == "closed" and now.threads > before.threads
            if not (kept or patient or running):
                return
            time.sleep(0.05)

    # --------------------------------------------------------------- figures

    def json(self) -> dict[str, Any]:
        return {
            "title": TITLES[self.kind.name],
            "run": self.stages["stopped"],
            "reloads": self.stages["reloaded"]["reloads"],
            "slopes": {n: s.json() for n, s in slopes(self.samples).items()},
            "target's slopes": {
                n: s.json() for n, s in slopes(self.target).items()
            },
            "stages": {
                stage: {**sample.json(), "threads by name": self.threads[stage]}
                for stage, sample in self.at.items()
            },
            "samples": [each.json() for each in self.samples],
            "target's samples": [each.json() for each in self.target],
        }


def environment() -> dict[str, str]:
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        # NIXL agents that kvt does not start crash at exit with it.
        "UCX_MODULES": "^efa",
        "NIXL_LOG_LEVEL": "FATAL",
        "UCX_LOG_LEVEL": "fatal",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
    }


# --------------------------------------------------------------------- report


def slope_line(words: str, slope: Slope) -> str:
    return (
        f"    {words:12} {slope.first:10.0f} -> {slope.last:8.0f}   "
        f"{slope.per_hour:+10.1f} an hour (+- {2 * slope.error:.1f})   "
        f"{slope.low:.0f} to {slope.high:.0f}"
    )


def change_line(words: str, change: dict[str, int], count: int) -> str:
    if not change:
        return f"    {words}: none"
    parts = [f"{by:+d} {name}" for name, by in change.items()]
    each = f" ({sum(change.values()) / count:+.3f} each)" if count else ""
    return f"    {words}: {', '.join(parts)}{each}"


def report(subject: Subject) -> str:
    run, at = subject.stages["stopped"], subject.at
    counts = ", ".join(f"{n} {c}" for n, c in sorted(run["counts"].items()))
    kinds = {stage: sample.kinds for stage, sample in at.items()}
    named = subject.threads
    lines = [
        f"{TITLES[subject.kind.name]}: {run['writes']} writes in "
        f"{run['seconds']:.0f} s ({run['missed']} left out: too slow), "
        f"{run['kills']} of {run['kills_due']} kills",
        f"    {counts}",
        *(
            slope_line(MEASURES[name], slope)
            for name, slope in slopes(subject.samples).items()
        ),
        "  a target that lives",
        *(
            slope_line(MEASURES[name], slope)
            for name, slope in slopes(subject.target).items()
        ),
        "  descriptors",
        change_line("opened", grown(kinds["started"], kinds["opened"]), 0),
        change_line(
            "with peers", grown(kinds["opened"], kinds["connected"]), 0
        ),
        change_line(
            f"after {run['kills']} kills",
            grown(kinds["connected"], kinds["stopped"]),
            run["kills"],
        ),
        change_line(
            f"after {RELOADS} reloads of peers that live",
            grown(kinds["stopped"], kinds["reloaded"]),
            RELOADS,
        ),
        change_line(
            "kept without peers", grown(kinds["opened"], kinds["removed"]), 0
        ),
        change_line(
            "kept when closed", grown(kinds["started"], kinds["closed"]), 0
        ),
        "  threads",
        f"    started: {named['started']}",
        change_line("opened", grown(named["started"], named["opened"]), 0),
        change_line("in the run", grown(named["opened"], named["stopped"]), 0),
        change_line(
            "kept when closed", grown(named["started"], named["closed"]), 0
        ),
    ]
    lines += [f"    WRONG: {each}" for each in run["wrong"]]
    return "\n".join(lines)


# -------------------------------------------------------------------- command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev soak",
        description=f"Writes {RATE} times a second to {PEERS} processes; at "
        f"every {KILL_EACH}th write its peer is killed and started anew, every "
        f"{CANCEL_EACH}th is cancelled. Docs: docs/reliability.md",
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="of the run (600)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(KINDS),
        help="these writers; all at once is the default",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/soak", metavar="FOLDER"
    )
    return parser.parse_args()


def why_not(name: str) -> str:
    """Why a writer cannot be, or nothing."""
    import kvt

    if name != "local":
        found = {engine.name: engine for engine in kvt.engines()}["nixl"]
        if not found.available:
            return found.text
    if name == "raw" and importlib.util.find_spec("nixl") is None:
        return "this interpreter has no package nixl"
    return ""


def chosen(only: list[str] | None) -> list[Kind]:
    found = []
    for name in only or KINDS:
        why = why_not(name)
        if why and only:
            raise SystemExit(f"soak: no {TITLES[name]}: {why}")
        if why:
            print(f"soak: without {TITLES[name]}: {why}", file=sys.stderr)
        else:
            found.append(KINDS[name])
    return found


def main() -> int:
    args = arguments()
    kinds = chosen(args.only)
    args.out.mkdir(parents=True, exist_ok=True)
    subjects = [Subject(kind, args.seconds) for kind in kinds]
    for subject in subjects:
        subject.start()
    for subject in subjects:
        subject.join()
    whole = [each for each in subjects if not each.failure]
    results = {each.kind.name: each.json() for each in whole}
    text = json.dumps(results, indent=1)
    (args.out / "results.json").write_text(text + "\n")
    for subject in whole:
        print(report(subject) + "\n")
    draw(whole, args.out / "soak.svg")
    bad = False
    for subject in subjects:
        if subject.failure:
            print(f"soak: {TITLES[subject.kind.name]}: {subject.failure}")
        bad |= bool(subject.failure or subject.stages["stopped"]["wrong"])
    return int(bad)


def draw(subjects: list[Subject], path: Path) -> None:
    if not subjects:
        return
    if importlib.util.find_spec("matplotlib") is None:
        print("soak: no plot: this interpreter has no package matplotlib")
        return
    from . import plots

    runs = {TITLES[each.kind.name]: each.samples for each in subjects}
    plots.draw(runs, f"{RATE} writes a second, with kills and cancels", path)
    print(f"plot: {path}")


if __name__ == "__main__":
    sys.exit(main())
