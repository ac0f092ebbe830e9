"""Makes the common failures happen and writes what a user sees into docs/troubleshooting.md.

    python tools/transcripts.py            # rewrites the blocks
    python tools/transcripts.py killed     # only prints one

Each scenario is a program that real processes run, one per rank. test_troubleshooting.py in
tests/python/docs runs them all and compares what comes out with what the document shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "troubleshooting.md"
WIDTH = 112
HOST = "node1"
"""What this machine is called in the document."""
_TIMEOUT_S = 120
_ERROR = re.compile(
    r"(\[rank\d+\]: )?pycomm\.errors\.\w+Error: "
)  # torch marks lines with the rank

# argv: rank, world size, a folder for the store and the records, how many processes there are
_BEGIN = """
import os, signal, sys, threading
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
import pycomm
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
Path(folder, f"here-{os.getpid()}").touch()
while len(list(Path(folder).glob("here-*"))) < int(sys.argv[4]):  # however slowly they start
    threading.Event().wait(0.01)
dist.init_process_group(
    "pycomm", init_method=f"file://{folder}/store", rank=rank, world_size=size,
    timeout=timedelta(seconds=60),
)
for _ in range(4):
    dist.all_reduce(torch.ones(1000))
"""

_KILLED = """
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(25_000_000))
"""

_LATE = """
if rank == 2:  # a slow loader, an exception, a deadlock: it does not come
    while pycomm.last_error() is None:
        threading.Event().wait(0.05)
    os._exit(0 if pycomm.dump_flight_record(folder + "/records") else 1)
options = dist.AllreduceOptions()
options.timeout = timedelta(seconds=1)
dist.group.WORLD.allreduce([torch.ones(250_000)], options).wait()
"""

_MISMATCH = """
dist.all_reduce(torch.ones(1000 if rank != 2 else 999))
"""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One failure."""

    program: str
    size: int = 3
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    size_of: Callable[[int], int] | None = None
    """The WORLD_SIZE that a rank gets, if that is wrong."""
    ranks_of: Callable[[int], int] | None = None
    shown: tuple[int, ...] = (0,)
    """The processes whose errors are shown."""
    trace: bool = False
    """Show what ``python -m pycomm trace`` says, too."""


SCENARIOS: Mapping[str, Scenario] = {
    "killed": Scenario(_BEGIN + _KILLED),
    "late": Scenario(_BEGIN + _LATE, trace=True),
    "mismatch": Scenario(_BEGIN + _MISMATCH, shown=(0, 2)),
    "interface": Scenario(_BEGIN, size=1, env={"PYCOMM_SOCKET_IFNAME": "eth7"}),
    "world_size": Scenario(_BEGIN, size=2, size_of=lambda rank: 2 + rank),
    "second_job": Scenario(
        _BEGIN.replace("seconds=60", "seconds=4"), size=2, ranks_of=lambda _: 0, shown=(0, 1)
    ),
}


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a scenario printed."""

    errors: Mapping[int, str]
    """By process: the last line, with the exception."""
    trace: str


def play(name: str) -> Seen:
    """Runs one scenario to its end."""
    scenario = SCENARIOS[name]
    with tempfile.TemporaryDirectory(prefix="pycomm-transcript-") as folder:
        program = Path(folder, "train.py")
        program.write_text(scenario.program)
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYCOMM_")}
        env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}"
        env.update(scenario.env)
        records = Path(folder, "records")
        env |= {"PYCOMM_FLIGHT_RECORDER_DIR": str(records)} if scenario.trace else {}
        processes = []
        for number in range(scenario.size):
            rank = scenario.ranks_of(number) if scenario.ranks_of else number
            size = scenario.size_of(number) if scenario.size_of else scenario.size
            arguments = [str(rank), str(size), folder, str(scenario.size)]
            command = [sys.executable, str(program), *arguments]
            processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        try:
            told = [process.communicate(timeout=_TIMEOUT_S)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        trace = ""
        if scenario.trace:
            command = [sys.executable, "-m", "pycomm", "trace", str(records)]
            trace = subprocess.run(
                command, env=env, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S
            ).stdout
    errors = {
        number: line
        for number, text in enumerate(told)
        for line in text.splitlines()
        if _ERROR.match(line)
    }
    missing = [number for number in scenario.shown if number not in errors]
    if missing:
        raise RuntimeError(f"{name}: no error of process {missing} in\n" + "\n".join(told))
    return Seen({number: errors[number] for number in scenario.shown}, trace)


def blocks(name: str, seen: Seen) -> dict[str, str]:
    """The fenced blocks of a scenario, by the name of their marker."""
    lines = []
    for text in seen.errors.values():
        lines.append(textwrap.fill(_renamed(text), WIDTH, subsequent_indent="  "))
    made = {name: "\n".join(lines)}
    if seen.trace:
        wrapped = [
            textwrap.fill(line, WIDTH, subsequent_indent="    ", drop_whitespace=True)
            if len(line) > WIDTH
            else line
            for line in _renamed(seen.trace).rstrip().splitlines()
        ]
        made[f"{name}_trace"] = "\n".join(wrapped)
    return made


def _renamed(text: str) -> str:
    host = re.escape(os.uname().nodename)
    return re.sub(rf"(?<![\w.-]){host}(?![\w-])", HOST, text)


def marked(text: str, name: str) -> re.Match[str]:
    """The block of one marker in the document."""
    found = re.search(rf"(<!-- made: {name} -->\n)(.*?)(<!-- end -->)", text, re.DOTALL)
    if found is None:
        raise RuntimeError(f"{DOCUMENT.name} has no block {name}")
    return found


def replaced(text: str, name: str, body: str) -> str:
    """The document with another block."""
    block = marked(text, name)
    return f"{text[: block.start(2)]}{body}\n{text[block.end(2) :]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenario", nargs="?", choices=list(SCENARIOS), help="only print this one")
    wanted = parser.parse_args().scenario
    if wanted:
        for body in blocks(wanted, play(wanted)).values():
            print(body)
        return 0
    text = DOCUMENT.read_text()
    for name in SCENARIOS:
        for marker, body in blocks(name, play(name)).items():
            text = replaced(text, marker, f"```text\n{body}\n```")
    DOCUMENT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
