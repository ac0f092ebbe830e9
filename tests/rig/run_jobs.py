"""``pycomm run`` on hosts with sshd: the launcher as a test sees it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hosts import Host
from processes import child_environment
from ssh_servers import SshHosts, processes_of

LIMIT_S = 90.0
GRACE_S = 3.0


def write_interpreter(folder: Path, line: str = ":") -> list[str]:
    """The option for an interpreter that finds what this one does, and does ``line`` first."""
    python = folder / "python"
    path = shlex.quote(child_environment()["PYTHONPATH"])
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={path}\n{line}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return [f"--python={python}"]


class Job:
    """A launcher on node1, and the lines it has printed so far."""

    def __init__(self, hosts: SshHosts, folder: Path, *arguments: str, script: str) -> None:
        """Without a script, the arguments say what each rank runs."""
        self.hosts = hosts
        self.go = folder / "go"
        if script:
            (folder / "train.py").write_text(script)
            arguments = (*arguments, "train.py", str(self.go))
        if not any(word.startswith("--python=") for word in arguments):
            arguments = (*write_interpreter(folder), *arguments)
        self.process = subprocess.Popen(
            hosts.nodes[0].command(
                *(sys.executable, "-m", "pycomm", "run", "--ssh", hosts.ssh),
                *(f"--grace={GRACE_S}", *arguments),
            ),
            cwd=folder,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, count: int = 1) -> None:
        def there() -> bool:
            return len(re.findall(pattern, self.text, re.MULTILINE)) >= count

        with self._changed:
            assert self._changed.wait_for(there, LIMIT_S), f"no {pattern!r} in\n{self.text}"

    def end(self, limit_s: float = LIMIT_S) -> int:
        """The exit code; all lines have come."""
        try:
            code = self.process.wait(limit_s)
            self._reader.join(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {limit_s} s\n{self.text}") from None
        return code

    def all_gone(
        self, limit_s: float, *, on: Sequence[Host] = (), but_launcher: bool = False
    ) -> None:
        """Nothing of the job is on these hosts, or on any."""
        deadline = time.monotonic() + limit_s

        def left_on(node: Host) -> dict[int, str]:
            found = processes_of(node)
            if but_launcher:
                found.pop(self.process.pid, None)
            return found

        while left := {
            node.name: found for node in on or self.hosts.nodes if (found := left_on(node))
        }:
            assert time.monotonic() < deadline, f"left after {limit_s} s: {left}\n{self.text}"
            time.sleep(0.05)

    def pid_of(self, node: Host, pattern: str) -> int:
        """The one process of a host whose command line matches."""
        found = [pid for pid, line in processes_of(node).items() if re.search(pattern, line)]
        assert len(found) == 1, processes_of(node)
        return found[0]
