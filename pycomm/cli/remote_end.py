"""The end of ``pycomm run`` on each host: checks it, starts torchrun, ends what it has started.

The launcher sends this file's text to the host and runs it there. So it imports nothing but the
standard library, and works before the host is known to have the same pycomm.

Standard input carries the launcher's messages, one JSON object per line; an empty line is a
heartbeat. ssh passes no hang-up on to a command without a terminal, and a cut wire closes nothing.
So this process ends everything if its input ends, or after ``silence_s`` without a line. Standard
output carries what the ranks print. A line of this process begins with a word that only this job
knows.

torchrun gives each rank a session of its own, so no process group has them all. This process makes
itself the reaper of its orphans instead: whatever ran below it can be found and killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import json
import math
import os
import queue
import re
import select
import selectors
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BEAT_S = 3.0
SILENCE_S = 15.0
"""The launcher writes a line every BEAT_S. After SILENCE_S without one it counts as gone."""
_CONNECT_S = 3.0
_BACKLOG = 4096  # all hosts connect at once; the kernel may allow less
_POLITE_S = 2.0
_PATH_S = 30.0
_TICK_S = 0.2
_STARTING_S = 0.005  # a rank that ends within it is not seen
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_EXIT_CODE = 52 - 3  # of /proc/PID/stat, of the fields that stand behind the name: see proc(5)
_ADDRESS_LIST = 0x8912  # SIOCGIFCONF: see netdevice(7)
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_OF_A_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")  # torchrun sets them for each


def main(job: dict[str, Any]) -> None:
    """Runs until torchrun has ended, or the launcher is gone. Does not return."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    host = _Host(job)
    # Another process, as one of the system that shuts down, asks this one to end.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, host.take_signal)
    code = 1
    with contextlib.suppress(_Gone):
        code = host.serve()
    host.close()
    os._exit(code)  # a thread may be writing to a pipe that nobody reads


class _Gone(Exception):
    """The launcher has ended, or nobody knows whether it has."""


def why_not(job: dict[str, Any]) -> str:
    """Goes to the job's folder, and sets sys.path as a rank will find it.

    Returns why the program cannot be started there; "" if it can.
    """
    folder, program, variables = job["folder"], job["program"], job["variables"]
    try:
        os.chdir(folder)
    except OSError as error:
        return f"there is no folder {folder}: {error.strerror}"
    # As Python does for a file or a module, so that its imports are found, or not, as in a rank.
    first = folder if job["module"] else str(Path(program).absolute().parent)
    path = ["", *sys.path]
    with contextlib.suppress(OSError, ValueError, IndexError, subprocess.SubprocessError):
        path = _path_with(variables)
    sys.path[:] = [first if one == "" else one for one in path]
    if job["module"]:
        with contextlib.suppress(ImportError):
            if importlib.util.find_spec(program.partition(".")[0]):
                return ""
        return f"there is no module {program} for {sys.executable}"
    in_path = job["no_python"] and shutil.which(program, path=variables.get("PATH"))
    if not Path(program).exists() and not in_path:
        return f"there is no file {Path(program).absolute()}"
    return ""


def _path_with(variables: dict[str, str]) -> list[str]:
    """sys.path of a Python with the job's variables; "" stands for the program's folder.

    Not made from this one's: an entry of PYTHONPATH may be one of the interpreter's own, too.
    """
    done = subprocess.run(
        [sys.executable, "-c", "import json,sys;print();print(json.dumps(sys.path))"],
        env=_environment(os.environ, variables),
        stdin=subprocess.DEVNULL,  # the launcher's messages are not for it
        stdout=subprocess.PIPE,
        timeout=_PATH_S,
        check=True,
    )
    path: list[str] = json.loads(done.stdout.splitlines()[-1])  # site may have printed more
    return path


def versions() -> dict[str, str]:
    """Of the torch and the pycomm that a rank would import; "" if there is none."""
    return {"torch": _version("torch", "version.py"), "pycomm": _version("pycomm", "_version.py")}


def _version(package: str, file: str) -> str:
    """Read, not imported: importing torch takes seconds."""
    with contextlib.suppress(ImportError, OSError, AttributeError, TypeError):
        origin = importlib.util.find_spec(package).origin  # type: ignore[union-attr]
        text = Path(str(origin)).with_name(file).read_text()
        found = re.search(r"^__version__\b[^=]*=\s*[\"']([^\"']+)", text, re.MULTILINE)
        return found[1] if found else ""
    return ""


def own_addresses() -> list[str]:
    """The addresses of this host's interfaces without loopback: IPv4 first, then IPv6."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_one:
        room = bytearray(64 * 1024)
        place = (ctypes.c_char * len(room)).from_buffer(room)
        asked = struct.pack("iP", len(room), ctypes.addressof(place))
        size, _ = struct.unpack("iP", fcntl.ioctl(any_one, _ADDRESS_LIST, asked))
        step = 40  # of struct ifreq: the name, and a union of 24 bytes
        found = [socket.inet_ntoa(bytes(room[at + 20 : at + 24])) for at in range(0, size, step)]
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0]))
            found += [] if text.startswith("fe80") else [text]  # those need an interface's name
    return [one for one in found if one != "::1" and not one.startswith("127.")]


def reach(addresses: list[str], port: int, word: str) -> dict[str, str]:
    """Connects to each address at once: "" if the job's listener answered, else why it did not."""

    def ask(address: str) -> str:
        try:
            with socket.create_connection((address, port), _CONNECT_S) as link:
                link.settimeout(_CONNECT_S)
                answer = b""
                while len(answer) < len(word) and (more := link.recv(256)):
                    answer += more
                return "" if answer == word.encode() else "another program answered"
        except OSError as error:
            return error.strerror or str(error)

    with ThreadPoolExecutor(len(addresses)) as pool:
        return dict(zip(addresses, pool.map(ask, addresses), strict=True))


class _Listener:
    """Answers at the port where torch's store will be, so that other hosts can try to reach it."""

    def __init__(self, port: int | None, default: int, word: str) -> None:
        try:
            self._socket = _listen(default if port is None else port)
        except OSError:
            if port is not None:
                raise
            self._socket = _listen(0)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._answer, args=(word.encode(),), daemon=True)
        self._thread.start()

    def _answer(self, word: bytes) -> None:
        """In a thread. All clients at once: one that says nothing must not hold up the others."""
        until: dict[socket.socket, float] = {}
        with contextlib.suppress(OSError), selectors.DefaultSelector() as any_of:
            any_of.register(self._socket, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in any_of.select(_TICK_S if until else None)]
                if self._socket in ready:
                    link, _ = self._socket.accept()  # fails after close()
                    until[link] = time.monotonic() + _CONNECT_S
                    any_of.register(link, selectors.EVENT_READ)
                    with contextlib.suppress(OSError):
                        link.sendall(word)
                # The client closes first, and TIME_WAIT is at its port.
                now = time.monotonic()
                for link in [one for one in until if one in ready or until[one] < now]:
                    any_of.unregister(link)
                    link.close()
                    del until[link]
        for link in until:
            link.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * _CONNECT_S)
        self._socket.close()


def _listen(port: int) -> socket.socket:
    with contextlib.suppress(OSError):
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
        )
    return socket.create_server(("", port), backlog=_BACKLOG)


class _Inbox:
    """The launcher's messages."""

    def __init__(self, silence_s: float) -> None:
        self.closed = False
        """If set, it counts as ended."""
        self._silence_s = silence_s
        self._heard = time.monotonic()
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """Those that have come. Does not wait.

        Raises:
            _Gone: The input has ended, or has been silent for too long.
        """
        while select.select([0], [], [], 0)[0]:
            got = os.read(0, 65536)
            if not got:
                raise _Gone
            self._heard = time.monotonic()
            *lines, self._rest = (self._rest + got).split(b"\n")
            yield from (json.loads(line) for line in lines if line)
        if self.closed or time.monotonic() - self._heard > self._silence_s:
            raise _Gone


class _Ranks:
    """torchrun's ranks on this host: says at once which has ended. torchrun looks ten times a
    second, which is too late to know which rank failed first."""

    def __init__(self, torchrun: int, count: int) -> None:
        self._children = Path(f"/proc/{torchrun}/task/{torchrun}/children")
        self._count = count
        self._known: set[int] = set()
        self._begun: set[int] = set()
        self._clean: set[int] = set()
        self.alive: dict[int, tuple[int, int]] = {}
        """Rank and process, by a descriptor that becomes readable when the process has ended."""

    @property
    def starting(self) -> bool:
        return len(self._known) < self._count

    @property
    def all_done(self) -> bool:
        """Whether every rank is known to have ended with 0, the last time it was started."""
        return len(self._clean) >= self._count and not self.alive

    def find(self) -> bool:
        """Looks for ranks that have begun; finds none where the kernel lacks what that needs.

        Returns whether torchrun has started its ranks again. It did when all of them had ended.
        """
        found: dict[int, int] = {}
        with contextlib.suppress(OSError):
            for process in map(int, self._children.read_text().split()):
                if process not in self._known and (rank := _rank_of(process)) is not None:
                    found[process] = rank
        again = not self._begun.isdisjoint(found.values())
        if again:
            for descriptor in self.alive:
                os.close(descriptor)
            self.alive, self._begun, self._clean = {}, set(), set()
        for process, rank in found.items():
            with contextlib.suppress(OSError, AttributeError):
                self.alive[os.pidfd_open(process)] = (rank, process)
                self._known.add(process)
                self._begun.add(rank)
        return again

    def ended(self, descriptor: int) -> tuple[int, int | None]:
        """The rank, and its exit code: negative for a signal, None if torchrun was faster."""
        rank, process = self.alive.pop(descriptor)
        os.close(descriptor)
        code: int | None = None
        fields = _stat_fields(process)
        if len(fields) > _EXIT_CODE and fields[0] == "Z":
            code = os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
        if code == 0:
            self._clean.add(rank)
        return rank, code


def _rank_of(process: int) -> int | None:
    words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)


def _stat_fields(process: int) -> list[str]:
    """Of /proc/PID/stat, from the state on: the name before it may hold anything."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class _Host:
    """One job on this host."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._inbox = _Inbox(job["silence_s"])
        self._listener: _Listener | None = None
        self._begun = False
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._status: int | None = None
        self._ranks: _Ranks | None = None
        self._grace_s = float(job["grace_s"])
        self._kill_at = float("inf")
        self._logs = ""
        self._outbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._speaker: threading.Thread | None = None

    def serve(self) -> int:
        """Answers until torchrun has ended; its exit code."""
        problem = why_not(self._job)
        ssh = os.environ.get("SSH_CONNECTION", "").split()[2:3]  # where sshd was reached
        addresses = [*ssh, *own_addresses()]
        self._report(facts={"versions": versions(), "addresses": addresses, "problem": problem})
        reported_done = False
        while self._status is None and time.monotonic() < self._kill_at:
            try:
                for message in self._inbox.read():
                    self._obey(**message)
            except _Gone:
                if self._torchrun is None:
                    raise
                if self._kill_at == float("inf"):
                    self._end(signal.SIGTERM, self._grace_s)
            self._wait()
            self._reap()
            if self._ranks and self._ranks.all_done and not reported_done:
                reported_done = True
                self._report(done=True)
        return 1 if self._status is None else self._status

    def take_signal(self, *_: object) -> None:
        """The next ``read`` raises _Gone, where ``serve`` expects it; before torchrun begins, when
        no rank needs a grace and much may block, this does."""
        self._inbox.closed = True
        if not self._begun:
            raise _Gone

    def close(self) -> None:
        """Ends every process below this one, and reports torchrun's exit."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if self._torchrun is not None:
            _end_all(self._reap)
        if self._logs:
            shutil.rmtree(self._logs, ignore_errors=True)
        if self._listener is not None:
            self._listener.close()
        if self._status is not None:
            self._report(exit=self._status)
        if self._speaker is not None:
            self._outbox.put(None)
            self._speaker.join(_POLITE_S)

    def _obey(self, act: str, **values: Any) -> None:
        if act == "listen":
            try:
                self._listener = _Listener(values["port"], values["default"], values["word"])
                self._report(port=self._listener.port)
            except OSError as error:
                self._report(port=0, why=error.strerror or str(error))
        elif act == "reach":
            self._report(reached=reach(values["addresses"], values["port"], values["word"]))
        elif act == "start":
            try:
                self._start(**values)
            except OSError as error:  # no room for its files, or too many variables
                self._report(not_started=str(error))
                self._status = 1
        elif act == "end":
            self._end(values["signal"], values["grace_s"])

    def _start(
        self,
        torchrun: list[str],
        count: int,
        keeps_logs: bool,
        secret: str,
    ) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        environment = _environment(os.environ, self._job["variables"])
        # Else torchrun kills its ranks after 30 s. torch 2.11 does so in any case.
        environment.setdefault(_SHUTDOWN_TIMEOUT, str(math.ceil(self._grace_s) + 1))
        if secret:
            environment.pop("PYCOMM_SECRET", None)
            environment["PYCOMM_SECRET_FILE"] = _hold_in_memory(secret)
        if not keeps_logs:
            self._logs = tempfile.mkdtemp(prefix="pycomm-run-")
            torchrun = [f"--log-dir={self._logs}", *torchrun]
        self._begun = True
        self._torchrun = subprocess.Popen(
            # -u: a line comes when it is printed, not when 8 KiB are full.
            [sys.executable, "-u", "-m", "torch.distributed.run", *torchrun],
            env=environment,
            stdin=subprocess.DEVNULL,  # the launcher's messages are not for ranks
            preexec_fn=_end_with_parent,
        )
        self._ranks = _Ranks(self._torchrun.pid, count)
        self._speaker = threading.Thread(target=self._speak, daemon=True)
        self._speaker.start()

    def _end(self, number: int, grace_s: float) -> None:
        if self._torchrun is None:
            raise _Gone
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._torchrun.pid, number)

    def _wait(self) -> None:
        """Until something happens, at most a tick."""
        if self._ranks is None:
            select.select([0], [], [], _TICK_S)
            return
        if self._ranks.find():
            self._report(restart=True)
        tick = _STARTING_S if self._ranks.starting else _TICK_S
        # At its end, and after that for ever, the input is readable.
        inputs = [0] if self._kill_at == float("inf") else []
        if not inputs:
            tick = _STARTING_S
        for descriptor in select.select([*inputs, *self._ranks.alive], [], [], tick)[0]:
            if descriptor in self._ranks.alive:
                rank, code = self._ranks.ended(descriptor)
                self._report(rank=rank, code=code)

    def _reap(self) -> None:
        """Takes the exit codes of torchrun, and of orphans, which are this process's children."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if self._torchrun is not None and found[0] == self._torchrun.pid:
                    self._status = os.waitstatus_to_exitcode(found[1])
                    self._torchrun.returncode = self._status

    def _report(self, **values: Any) -> None:
        line = f"{self._job['word']}{json.dumps(values)}\n"
        if self._speaker is None:
            os.write(1, line.encode())
        else:
            self._outbox.put(line)

    def _speak(self) -> None:
        """In a thread: after a cut wire the pipe is full, and the main thread must not wait."""
        with contextlib.suppress(OSError):
            while (line := self._outbox.get()) is not None:
                os.write(1, line.encode())


def _environment(own: Any, variables: dict[str, str]) -> dict[str, str]:
    """Of torchrun. Until a rank's program begins, the rank has it, too: see _rank_of."""
    merged = {**own, **variables}
    return {name: merged[name] for name in merged if name not in _OF_A_RANK}


def _hold_in_memory(secret: str) -> str:
    """The path of a file without a name, in memory, that goes with this process."""
    descriptor = os.memfd_create("pycomm-secret")
    os.fchmod(descriptor, stat.S_IRUSR | stat.S_IWUSR)
    os.write(descriptor, secret.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _end_with_parent() -> None:
    """In torchrun, before it begins: if this process is killed, torchrun ends its ranks."""
    _prctl(_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_all(reap: Callable[[], None]) -> None:
    """Ends every process below this one: asks, and kills after _POLITE_S.

    A process that the kernel cannot end, as one that waits for a dead NFS server, is left after
    ten times as long.
    """
    begin = time.monotonic()
    asked: set[int] = set()
    while time.monotonic() < begin + 10 * _POLITE_S:
        reap()
        below = _descendants()
        if not below:
            return
        kill = time.monotonic() > begin + _POLITE_S
        for process in below if kill else below - asked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL if kill else signal.SIGTERM)
        asked |= below
        time.sleep(0.02)


def _descendants() -> set[int]:
    """Of this process, without those that have ended."""
    children: dict[int, list[int]] = {}
    ended = set()
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _stat_fields(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
            if fields[0] in "ZX":
                ended.add(int(name))
    found: set[int] = set()
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found |= set(below)
        pending += below
    return found - ended
