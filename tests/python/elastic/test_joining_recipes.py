"""The recipes of docs/elastic.md by which processes join: by hand, and with torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import child_environment

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.timeout(200),
]

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "joining.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
ALONE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}


class Replica:
    """A process, or a torchrun, whose output goes to a file. It ends by itself after a while."""

    def __init__(self, folder: Path, name: str, *flags: str, torchrun: bool) -> None:
        self.torchrun = torchrun
        self.output = folder / name
        launcher = [*TORCHRUN, "--max-restarts=3"] if torchrun else []
        command = [sys.executable, *launcher, str(EXAMPLE), str(folder / "peers"), *flags]
        env = child_environment({} if torchrun else ALONE)
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The last match in its output, as soon as there is one."""
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            found = list(re.finditer(pattern, self.output.read_text()))
            if found:
                return found[-1]
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} in {self.output.read_text()}")

    def kill(self) -> None:
        if self.torchrun and self.process.poll() is None:
            self.process.terminate()  # its worker has a session of its own
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(40)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def replica(folder: Path, name: str, *flags: str, torchrun: bool = False) -> Iterator[Replica]:
    made = Replica(folder, name, "--steps=40000", "--pause=0.005", *flags, torchrun=torchrun)
    try:
        yield made
    finally:
        made.kill()


def test_processes_by_hand(tmp_path: Path) -> None:
    with replica(tmp_path, "first") as first:
        first.wait_for(r"members \(0,\)")
        with replica(tmp_path, "second", "--join") as second:
            second.wait_for(r"members \(0, 1\)")
            first.wait_for(r"members \(0, 1\)")
        first.wait_for(r"step [1-9]\d*, members \(0,\)")
        with replica(tmp_path, "third", "--join") as third:
            third.wait_for(r"members \(0, 2\)")
            first.kill()
            third.wait_for(r"members \(2,\)")


def test_one_torchrun_per_replica(tmp_path: Path) -> None:
    """torchrun starts the process that has died again, and that joins."""
    with replica(tmp_path, "first", torchrun=True) as first:
        first.wait_for(r"members \(0,\)")
        with replica(tmp_path, "second", "--join", torchrun=True) as second:
            second.wait_for(r"members \(0, 1\)")
            worker = first.wait_for(r"pid (\d+): step \d+, members \(0, 1\)")[1]
            os.kill(int(worker), signal.SIGKILL)  # that of the replica that began
            second.wait_for(r"members \(1, 2\)")
            first.wait_for(r"members \(1, 2\)")
