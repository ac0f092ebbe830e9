"""Fuzz each target until it is dry, in as many sessions as that takes (fuzz.py --until-dry).

After each run of libFuzzer the counts of the target are written to build/fuzz/<target>.json, and
its inputs lie in build/fuzz/<target>. A later session continues there. If the program has changed,
the counts begin anew, and the inputs are kept. The CPU time of earlier programs still counts: with
each change of the sources an hour would begin anew, and no target that is not dry would end.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

DRY_INPUTS = 10_000_000
FEWEST_INPUTS = 1000  # of a run: libFuzzer counts what it reads again, and may do none besides
MOST_CPU_SECONDS = 3600
MOST_INPUTS_OF_ALL = 100_000_000
DRY = "dry"
FOUND = "FOUND SOMETHING"
# A target that has one of these is done.
DONE = (DRY, "60 CPU minutes", FOUND)


@dataclasses.dataclass
class Found:
    """The counts of one target, over all its runs."""

    inputs: int = 0
    edges: int = 0
    last_new: int = 0  # the input that reached an edge for the first time, counted over all runs
    cpu_seconds: float = 0.0
    cpu_before: float = 0.0  # seconds of earlier programs
    first_edges: int = 0  # those of the inputs that it began with
    first_corpus: int = 0
    corpus: int = 0
    reason: str = ""  # why no run follows
    program: str = ""  # the hash of the fuzzer

    def since_new(self) -> int:
        return self.inputs - self.last_new

    def line(self, name: str) -> str:
        """A row of the table."""
        return (
            f"{name:<9}{self.inputs:>12,}{self.cpu_seconds:>8.0f}{self.cpu_before:>8.0f}"
            f"{self.first_edges:>8}{self.edges - self.first_edges:>+7}"
            f"{self.first_corpus:>8}{self.corpus - self.first_corpus:>+7}"
            f"{self.since_new():>13,}  {self.reason or 'it was stopped; not dry yet'}"
        )


HEADING = (
    f"{'target':<9}{'inputs':>12}{'CPU s':>8}{'before':>8}{'edges':>8}{'added':>7}{'corpus':>8}"
    f"{'added':>7}{'since added':>13}  reason for stopping"
)


def reason_to_stop(found: Found, inputs_of_all: int) -> str:
    """Why the target gets no further run; empty if it gets one."""
    if found.reason in DONE:
        return found.reason
    if found.since_new() >= DRY_INPUTS:
        return DRY
    if found.cpu_seconds + found.cpu_before >= MOST_CPU_SECONDS:
        return "60 CPU minutes"
    return "10^8 inputs of all targets" if inputs_of_all >= MOST_INPUTS_OF_ALL else ""


def load(folder: Path, name: str, program: str) -> Found:
    """The counts of earlier sessions; of another program's only the CPU time."""
    path = folder / f"{name}.json"
    if path.is_file():
        found = Found(**json.loads(path.read_text()))
        if found.program == program:
            return found
        return Found(program=program, cpu_before=found.cpu_seconds + found.cpu_before)
    return Found(program=program)


def save(folder: Path, name: str, found: Found) -> None:
    """Write the counts as a whole or not at all."""
    new = folder / f"{name}.json.new"
    new.write_text(json.dumps(dataclasses.asdict(found), indent=1) + "\n")
    new.replace(folder / f"{name}.json")


def run_all(
    chosen: Sequence[str],
    every: Sequence[str],
    program: Path,
    folder: Path,
    one_run: Callable[[str, int, Found], bool],
    minutes: float,
) -> dict[str, Found]:
    """Run each chosen target to its end, or until the minutes of this session are used.

    ``one_run(name, inputs, found)`` runs a target for at most so many inputs and adds to the
    counts. Its result is false if it found an error. Returns the counts of every target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(program.read_bytes()).hexdigest()[:16]
    counts = {name: load(folder, name, digest) for name in every}
    end_s = time.monotonic() + minutes * 60
    for name in chosen:
        found = counts[name]
        while time.monotonic() < end_s:
            found.reason = reason_to_stop(found, sum(each.inputs for each in counts.values()))
            if found.reason:
                break
            lacks = max(DRY_INPUTS - found.since_new(), FEWEST_INPUTS)
            if not one_run(name, lacks, found):
                found.reason = FOUND
            save(folder, name, found)
        else:
            found.reason = reason_to_stop(found, 0)
        save(folder, name, found)
        print(found.line(name), flush=True)
    return counts


def _output(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit(root: Path) -> str:
    """The commit, and whether the sources of the fuzzer differ from it."""
    changed = _output("git", "status", "--porcelain", "--", "csrc", "tests/cpp/fuzz", cwd=root)
    found = _output("git", "rev-parse", "--short", "HEAD", cwd=root)
    return f"commit {found}" + (" with changes" if changed else "")


def report(counts: dict[str, Found], at: str, clang: str) -> str:
    """The table, and how it was made; `at` is what commit() returned when the fuzzer was built."""
    inputs = sum(found.inputs for found in counts.values())
    rows = [found.line(name) for name, found in counts.items() if found.inputs]
    missing = [name for name, found in counts.items() if not found.inputs]
    lines = [
        f"Fuzz targets until they reach nothing new, or as far as they ran: "
        f"python {shlex.join(sys.argv)}",
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, {at}, "
        f"{os.cpu_count()} cores ({_processor()}), "
        f"{_output(clang, '--version').splitlines()[0]}, AddressSanitizer and UBSan.",
        f"A target is dry if {DRY_INPUTS:,} inputs in a row reached no new edge. It ends at "
        f"{MOST_CPU_SECONDS:,} s of CPU time,",
        f"dry or not, and all targets together end at {MOST_INPUTS_OF_ALL:,} inputs. "
        "The counts are those of all sessions with this",
        "program; 'before': CPU seconds of earlier programs, which count, too. 'edges': those that "
        "the kept inputs reached before,",
        "and those added; 'corpus': the kept inputs, and those added; 'since added': the inputs "
        "since the last new edge.",
        "",
        HEADING,
        *rows,
        "",
        f"{inputs:,} inputs in all; dry: "
        f"{', '.join(name for name, found in counts.items() if found.reason == DRY) or 'none'}.",
    ]
    lines += [f"Not run with this program: {', '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"
