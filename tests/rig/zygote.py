"""Ranks that need not import torch: they are forked from a process that has done so.

Importing torch takes a rank 1 to 3 seconds of a core, forking one takes some milliseconds. The
first rank of a session starts that process (``zygote_process.py``), the end of the session ends it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from processes import RIG, child_environment
from zygote_process import MAX_NBYTES, Job

_ANSWER_S = 60.0
_IMPORT_S = 120.0

MODULES = ("numpy", "torch", "torch.distributed", "torch._dynamo", "pytest")
"""What every zygote has imported. Nothing of pycomm: tests look at how that comes in.

torch's wrapper imports torch._dynamo when it is first made, which takes each rank as long as torch.
"""

_FREE = (
    "PYCOMM_",
    "GLOO_",
    "NCCL_",
    "PYTEST_",
    "FAULT",
    "TORCHINDUCTOR_",
    "TORCHELASTIC_",
    "TEST_",
)
_FREE_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HOME"),
    *("MEETING", "TOGETHER", "SECOND_STORE", "CHILD_FILE", "ELASTIC_MARKS"),  # of tests
)
"""Variables that nothing reads while it is imported: a forked process may have others."""


class ZygoteDiedError(RuntimeError):
    """The process that ranks are forked from has gone, and they with it."""


class Process(Protocol):
    """What of subprocess.Popen is used of a rank."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class ForkedProcess:
    """A rank forked by a zygote, with the face of subprocess.Popen."""

    def __init__(self, zygote: Zygote, number: int, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote
        self._number = number  # its process id as the zygote knows it, in a pid namespace another

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._zygote.ask("poll", self._number)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; subprocess.TimeoutExpired if it does not come in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause_s = 0.0005
        while (code := self.poll()) is None:
            left_s = float("inf") if deadline is None else deadline - time.monotonic()
            if timeout is not None and left_s <= 0:
                raise subprocess.TimeoutExpired(f"forked rank {self.pid}", timeout)
            pause_s = min(2 * pause_s, 0.02, left_s)
            time.sleep(pause_s)
        return code

    def send_signal(self, sig: int) -> None:
        """Sends a signal unless it has ended. The id is its own: nobody has waited for it."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kills it unless it has ended."""
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The process that ranks are forked from."""

    def __init__(self, modules: Sequence[str], inside: Sequence[str] = ()) -> None:
        """``inside``: the words of a command that runs another one as a child, in namespaces."""
        self.env = child_environment()
        self._is_inside = bool(inside)
        self._death = ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (until close)
        self._control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other_end:
            command = [
                sys.executable,
                str(RIG / "zygote_process.py"),
                str(other_end.fileno()),
                *modules,
            ]
            self._process = subprocess.Popen(
                [*inside, *command],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[other_end.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for pytest, which ends the ranks
            )
        self.pid = self._process.pid
        self._control.settimeout(_IMPORT_S)
        self._receive()
        self._control.settimeout(_ANSWER_S)

    def can_serve(self, env: dict[str, str]) -> bool:
        """Whether a rank with this environment may be forked: imports would have gone alike."""

        def fixed(variables: dict[str, str]) -> dict[str, str]:
            return {
                name: value
                for name, value in variables.items()
                if name not in _FREE_NAMES and not name.startswith(_FREE)
            }

        return fixed(env) == fixed(self.env)

    def fork(
        self, folder: Path, rank: int, env: dict[str, str], fds: Sequence[int]
    ) -> ForkedProcess:
        """Forks a rank; ``fds`` are its mark pipe, stdout and stderr."""
        number = self.ask("fork", Job(folder, rank, env), fds)
        return ForkedProcess(self, number, self._pid_here(number) if self._is_inside else number)

    def _pid_here(self, number: int) -> int:
        """The process id in this namespace of a child that the zygote knows by that number."""
        (own,) = _children(self.pid)
        for pid in _children(own):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                (numbers,) = [line for line in status.splitlines() if line.startswith("NSpid:")]
                if int(numbers.split()[-1]) == number:
                    return pid
        raise ZygoteDiedError(f"the forked process {number} of zygote {self.pid} is not there")

    def ask(self, kind: str, subject: Any, fds: Sequence[int] = ()) -> Any:
        """Sends a request and returns the answer; ZygoteDiedError if it has died."""
        if self._death:
            raise ZygoteDiedError(self._death)
        try:
            socket.send_fds(self._control, [pickle.dumps((kind, subject))], fds)
        except (BrokenPipeError, ConnectionResetError):
            self._raise_dead()
        return self._receive()

    def _receive(self) -> Any:
        try:
            packet = self._control.recv(MAX_NBYTES)
        except (TimeoutError, ConnectionResetError):
            packet = b""
        if not packet:
            self._raise_dead()
        return pickle.loads(packet)

    def _raise_dead(self) -> None:
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        how = "does not answer" if code is None else f"has ended with {code}"
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace")
        self._death = f"the process {self.pid} that ranks are forked from {how}\n{said}"
        raise ZygoteDiedError(self._death)

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return not self._death and self._process.poll() is None

    def close(self) -> None:
        """Ends it, and with it the ranks that still run."""
        self._control.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


_zygotes: dict[tuple[str, ...], Zygote] = {}


def zygote_for(env: dict[str, str], preload: Sequence[str]) -> Zygote | None:
    """The session's zygote for ranks with this environment; None if they must start afresh."""
    modules = tuple(dict.fromkeys((*MODULES, *preload)))
    if modules in _zygotes and not _zygotes[modules].alive:
        _zygotes.pop(modules).close()
    if modules not in _zygotes:
        _zygotes[modules] = Zygote(modules)
    zygote = _zygotes[modules]
    return zygote if zygote.can_serve(env) else None


def zygote_pids() -> list[int]:
    """Process ids of the session's zygotes: children of this process that outlive a test."""
    return [zygote.pid for zygote in _zygotes.values()]


def end_zygotes() -> None:
    """Ends them all, at the end of the session."""
    while _zygotes:
        _zygotes.popitem()[1].close()
