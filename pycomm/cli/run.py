"""``python -m pycomm run``: one job on several hosts, by ssh and torchrun.

Each host runs ``remote_end``, over ssh or, if it is this host, directly. The launcher first checks
all hosts, then finds an address of the first host that all others reach, then starts torchrun on
each with a static rendezvous there. Two threads per host read what it prints, one writes the
heartbeats, two print, and the main thread decides: it waits for no reader of the output.
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import dataclasses
import hashlib
import ipaddress
import json
import os
import queue
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pycomm.cli import remote_end

_PORT = 29500
_CHECK_S = 60.0
_SETTLE_S = 3.0
"""After a failure the other ranks have so long to report it themselves."""
_ALIVE_S = 5
"""ssh asks the other host after that many seconds of silence, three times, and then gives up."""
_LEAVE_S = 25.0
"""A host that does not answer is noticed within 4 x _ALIVE_S; then it need not be waited for."""
_CLOSE_S = 3.0
_UNPRINTED_NBYTES = 4 << 20
"""So much may wait for a slow reader of the output, per stream."""

_SSH_OPTIONS = {
    "BatchMode": "yes",  # a question would stop the job, and several at once cannot be answered
    "ConnectTimeout": "10",
    "ServerAliveInterval": str(_ALIVE_S),
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",
    "ControlPath": "none",  # a shared connection has its own idea of when the wire is cut
    "ClearAllForwardings": "yes",
    "LogLevel": "ERROR",
}
# Reads byte by byte up to the end of the first line, so that the rest is left for remote_end. -c
# puts the current folder first, the user's home over ssh, where a random.py may lie.
_BOOTSTRAP = (
    "import sys;sys.path[0]or sys.path.pop(0);"
    'import json;j=json.loads(open(0,"rb",0,closefd=False).readline());'
    'n={"__name__":"pycomm_remote_end"};exec(j.pop("code"),n);n["main"](j)'
)

_SSH_REASONS = [
    (
        r"HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that ssh knows",
        "find out why; if the host was installed anew: ssh-keygen -R {name}, then ssh {target}",
    ),
    (
        r"Host key verification failed",
        "its host key is unknown here",
        "connect once by hand, and compare the fingerprint that ssh shows: ssh {target}",
    ),
    (
        r"Permission denied",
        "ssh cannot log in without a password",
        "ssh-copy-id {target}. If your key has a passphrase, ssh-add first",
    ),
    (r"Connection refused", "no ssh server listens there", "start sshd on {name}"),
    (
        r"Could not resolve",
        "its name cannot be resolved",
        "correct the name, or add it to ~/.ssh/config or /etc/hosts",
    ),
    (
        r"timed out|No route to host|unreachable",
        "ssh cannot reach it",
        "ssh {target}. Is the host on, and does a firewall close its ssh port?",
    ),
]

# Of torchrun. The others are set here, or make no sense with a static rendezvous.
_PASSED_ON = {
    "--max-restarts": "N",
    "--monitor-interval": "SECONDS",
    "--role": "NAME",
    "--rdzv-id": "ID",
    "--rdzv-conf": "K=V,...",
    "--log-dir": "PATH",
    "--local-ranks-filter": "0,1",
    "--numa-binding": "MODE",
    "--start-method": "METHOD",
    "--event-log-handler": "NAME",
    "--signals-to-handle": "NAMES",
    "--shutdown-timeout": "SECONDS",
}


class _PassOn(argparse.Action):
    """Collects an option of torchrun as one word."""

    def __call__(self, _: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        namespace.torchrun = [*namespace.torchrun, f"{option}={values}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command; ``pycomm.cli`` has made its parser."""
    parser.description = (
        "Start one job on several hosts. Needs ssh without a password to each of them, and on each "
        "the same folder, interpreter, torch and pycomm. This host, or localhost, needs no ssh."
    )
    parser.epilog = (
        "Example: python -m pycomm run -H alpha:2,beta:2 train.py --epochs 3. Exit codes: 0 all "
        "ranks ended with 0; that of the rank that failed first, or 128 and the number of the "
        "signal that ended it; 1 a host failed; 2 wrong usage; 130 Ctrl-C."
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "-H",
        "--hosts",
        metavar="A:N,B:N",
        help="hosts and how many ranks each runs; the first has rank 0. USER@HOST as in ssh",
    )
    where.add_argument(
        "--hostfile",
        metavar="PATH",
        help='a file with one host per line: "alpha:2" or "alpha slots=2". '
        "`pycomm doctor --hostfile` writes one",
    )
    add(
        "--nproc-per-node",
        type=_count,
        default=1,
        metavar="N",
        help="ranks of a host that is listed without a number (default: %(default)s)",
    )
    add(
        "--python",
        metavar="PATH",
        help="interpreter on each host (default: this one). .venv/bin/python is in the folder",
    )
    add("--folder", metavar="PATH", help="working folder on each host (default: this one)")
    add(
        "--ssh",
        type=_words,
        default="ssh",
        metavar="COMMAND",
        help='ssh with options, as "ssh -p 2222" (default: %(default)s)',
    )
    add(
        "-x",
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for all ranks. PYCOMM_* and OMP_NUM_THREADS are passed if set here",
    )
    add(
        "--secret",
        action="store_true",
        help="make a secret for this job alone: ranks encrypt what they send to other hosts",
    )
    add(
        "--elastic",
        action="store_true",
        help="if a host fails, let the others go on; exit with 0 if one of them ends with 0",
    )
    add(
        "--grace",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="between asking a host's ranks to end and killing them (default: %(default)g)",
    )
    add("--master-addr", metavar="A", help="address of the first host (default: one all reach)")
    add(
        "--master-port",
        type=_port,
        metavar="PORT",
        help=f"of torch's store on the first host (default: {_PORT}, or another if it is taken)",
    )
    add("--dry-run", action="store_true", help="print what would run on each host, and end")
    for option, metavar in _PASSED_ON.items():
        add(option, action=_PassOn, metavar=metavar, help="passed to torchrun")
    add("--no-python", action="store_true", help="passed to torchrun: SCRIPT is a program")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    add("script", metavar="SCRIPT", help="what each rank runs")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="of SCRIPT")
    parser.set_defaults(torchrun=[])


def run(arguments: argparse.Namespace) -> int:
    """Runs the job; see the exit codes in ``add_arguments``."""
    try:
        hosts = read_hosts(arguments)
        variables = _variables(os.environ, arguments.env)
    except (ValueError, OSError) as error:
        _say(str(error))
        return 2
    # argparse has seen flags with dashes for underscores; the script's own stay as they are.
    arguments.arguments = arguments.given[len(arguments.given) - len(arguments.arguments) :]
    # A relative path would mean another place over ssh: the home folder.
    arguments.folder = os.path.abspath(arguments.folder or os.getcwd())
    arguments.python = _interpreter(arguments.python, arguments.folder)
    if arguments.dry_run:
        for line in _plan(arguments, hosts, variables):
            print(line)
        if arguments.secret:
            _say("--secret is left out above: each job makes its own, and never prints it")
        return 0
    launch = _Launch(arguments, hosts, variables)
    try:
        launch.open()
        return launch.check() or launch.start() or launch.watch()
    except _Interrupted as signalled:
        return 128 + signalled.number
    finally:
        launch.close()


# Hosts


@dataclasses.dataclass(eq=False)
class Host:
    """A host of the job, and what is known of it."""

    target: str
    """As ssh takes it: HOST or USER@HOST."""
    count: int
    local: bool = False
    process: subprocess.Popen[bytes] | None = None
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The last one of each kind that its remote end has reported."""
    errors: list[str] = dataclasses.field(default_factory=list)
    """Lines of its standard error before torchrun began, for the reason why it failed."""
    open_streams: int = 0
    begun: bool = False
    asked_to_end: bool = False
    writing: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    """A line longer than the pipe is written in parts, and a heartbeat must not come in between."""

    @property
    def name(self) -> str:
        return self.target.rpartition("@")[2]

    @property
    def ended(self) -> bool:
        return self.process is None or self.open_streams == 0

    @property
    def failed(self) -> bool:
        return self.ended and self.answers.get("exit") != 0

    @property
    def went_well(self) -> bool:
        """Whether its ranks ended with 0: torchrun may fail only since it was asked to end."""
        code = self.answers.get("exit")
        return code == 0 or ("done" in self.answers and (code is None or self.asked_to_end))

    def send(self, **message: Any) -> None:
        """One line; nothing happens if the host has ended."""
        with self.writing:
            self._write(json.dumps(message).encode() + b"\n")

    def beat(self) -> None:
        """A heartbeat, unless a line is being written, which is as good as one."""
        if self.writing.acquire(blocking=False):
            try:
                self._write(b"\n")
            finally:
                self.writing.release()

    def _write(self, line: bytes) -> None:
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                while line:
                    line = line[os.write(self.process.stdin.fileno(), line) :]


def read_hosts(arguments: argparse.Namespace) -> list[Host]:
    """The hosts of ``-H`` or of the file.

    Raises:
        ValueError: An entry is malformed, or a host is listed twice.
        OSError: The file cannot be read.
    """
    if arguments.hostfile:
        lines = Path(arguments.hostfile).read_text().splitlines()
        entries = [line.partition("#")[0].strip() for line in lines]
        origin = arguments.hostfile
    else:
        entries, origin = [one.strip() for one in arguments.hosts.split(",")], "-H"
    hosts = [_host(entry, arguments.nproc_per_node, origin) for entry in entries if entry]
    if not hosts:
        raise ValueError(f"{origin} lists no host, as in -H alpha:2,beta:2")
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{origin} lists {name} twice: give it one entry with all its ranks")
    return hosts


_ENTRY = re.compile(
    r"(?P<target>(?:\w[\w.-]*@)?(?:\[[0-9A-Fa-f:.]+\]|\w[\w.-]*))"
    r"(?:(?::|\s+slots\s*=\s*)(?P<count>\d+))?"
)


def _host(entry: str, default: int, origin: str) -> Host:
    found = _ENTRY.fullmatch(entry)
    count = int(found["count"] or default) if found else 0
    if found is None or not 0 < count <= 4096:
        raise ValueError(f"{origin}: {entry!r} is not HOST:RANKS, as alpha:2 or [fd00::1]:2")
    target = re.sub(r"[\[\]]", "", found["target"])
    return Host(target, count, _is_this_host(target))


def _is_this_host(target: str) -> bool:
    """Whether ssh can be left out: for the user's own name, or none, on an address of this host."""
    user, _, name = target.rpartition("@")
    if user:
        return False
    if name in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(OSError, UnicodeError):
        found = [str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)]
        # To bind it is no proof: under net.ipv4.ip_nonlocal_bind every address can be bound.
        own = remote_end.own_addresses()
        return any(address in own or _is_loopback(address) for address in found)
    return False


def _variables(own: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """For all ranks: PYCOMM_* and OMP_NUM_THREADS as set here, and the variables of ``-x``."""
    found = {name: own[name] for name in own if re.match("PYCOMM_|OMP_NUM_THREADS$", name)}
    for each in wanted:
        name, equals, value = each.partition("=")
        if not equals and name not in own:
            raise ValueError(f"-x {name}: the variable is not set here")
        found[name] = value if equals else own[name]
    if found.pop("PYCOMM_SECRET", ""):
        raise ValueError(
            "PYCOMM_SECRET is not passed to other hosts. Try: unset it and use --secret"
        )
    return found


def make_secret() -> str:
    """A new secret, as in the files that ``pycomm secret`` writes."""

    def text_of(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    key = text_of(secrets.token_bytes(32))
    return f"pycomm-secret-1:{key}{text_of(hashlib.sha256(key.encode()).digest()[:3])}"


# The commands of each host


def _remote_command(arguments: argparse.Namespace, host: Host) -> list[str]:
    """Starts the remote end; its text, and all that it must know, come through its input."""
    python = [arguments.python, "-c", _BOOTSTRAP]
    if host.local:
        return python
    options = [f"-o{name}={value}" for name, value in _SSH_OPTIONS.items()]
    ssh = [*arguments.ssh, "-T", "-x", "-a", *options, host.target]
    return [*ssh, f"exec {shlex.join(python)}"]


def _torchrun(
    arguments: argparse.Namespace, hosts: Sequence[Host], host: Host, address: str, port: int
) -> list[str]:
    return [
        f"--nnodes={len(hosts)}",
        f"--node-rank={hosts.index(host)}",
        f"--nproc-per-node={host.count}",
        f"--master-addr={address}",
        f"--master-port={port}",
        "--tee=3",
        *arguments.torchrun,
        *(["--no-python"] if arguments.no_python else []),
        *(["-m"] if arguments.module else []),
        arguments.script,
        *arguments.arguments,
    ]


def _plan(
    arguments: argparse.Namespace, hosts: Sequence[Host], variables: Mapping[str, str]
) -> Iterator[str]:
    """What could be typed by hand."""
    address = arguments.master_addr or _address_by_hand(hosts[0].name)
    address, port = _bracketed(address), arguments.master_port or _PORT
    given = [f"{name}={value}" for name, value in variables.items()]
    for host in hosts:
        words = _torchrun(arguments, hosts, host, address, port)
        words = [arguments.python, "-u", "-m", "torch.distributed.run", *words]
        line = shlex.join(["env", *given, *words] if given else words)
        line = f"cd {shlex.quote(arguments.folder)} && {line}"
        ssh = shlex.join([*arguments.ssh, host.target])
        yield line if host.local else f"{ssh} {shlex.quote(line)}"


def _address_by_hand(name: str) -> str:
    """Of the first host. A name that leads each host to itself is replaced by an address."""
    found = []
    with contextlib.suppress(OSError, UnicodeError):
        found = [str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)]
    if found and all(map(_is_loopback, found)):
        return next(iter(remote_end.own_addresses()), name)
    return name


# The job


# A pycomm error of the default group, as torchrun has prefixed it: the rank, and the peer it names.
# It has a group only if it has lost members; those of subgroups always have one.
_ERROR = re.compile(
    rb"\[(\d+)@.*\[code=\w+ peer=(\d+)(?: peer_host=\S+)? rank=\d+ host=\S+"
    rb"(?! group=(?!0 ))[ \]]"
)


class _Interrupted(Exception):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@dataclasses.dataclass(frozen=True)
class _Event:
    """A line that a host has printed, its end, a signal to this process, or why it cannot print."""

    host: Host | None
    stream: int = 0
    line: bytes = b""
    signal: int = 0
    error: OSError | None = None


@dataclasses.dataclass(frozen=True)
class _End:
    """Of a rank, of a torchrun (no rank), or of the connection to a host."""

    host: Host
    rank: int | None = None
    code: int | None = None
    """None: not known."""
    lost: bool = False

    @property
    def failed(self) -> bool:
        return self.lost or self.code not in (0, None)


class _Printer:
    """Prints to a descriptor in a thread of its own."""

    def __init__(
        self,
        descriptor: int,
        fail: Callable[[OSError], None],
        writing: threading.Lock | None = None,
    ) -> None:
        """``fail`` gets the first error; ``writing`` is held while a text is written."""
        self._descriptor = descriptor
        self._fail = fail
        self._writing = writing or threading.Lock()
        self._changed = threading.Condition()
        """Guards the rest."""
        self._texts: collections.deque[tuple[bytes, int]] = collections.deque()
        """Each with what it adds to _nbytes, until it is printed."""
        self._nbytes = 0
        self._hurried = False
        self._complete = True
        self._error: OSError | None = None
        threading.Thread(target=self._print, daemon=True).start()

    def admit(self, nbytes: int, *, wait: bool) -> bool:
        """Counts a line for which ``put`` will be called, as soon as there is room, or at once.

        Returns False for one that is to be left out.
        """
        with self._changed:
            self._changed.wait_for(lambda: not wait or self._hurried or self._has_room())
            if wait and not self._has_room():
                self._complete = False
                return False
            self._nbytes += nbytes
            return True

    def put(self, text: bytes, nbytes: int = 0) -> None:
        """Does not wait. ``nbytes``: as ``admit`` has counted it."""
        with self._changed:
            self._texts.append((text, nbytes))
            self._changed.notify_all()

    def hurry(self) -> None:
        """From now on a line for which there is no room is left out."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def finish(self, timeout_s: float | None) -> bool:
        """Waits until all is printed; whether it is, and nothing was left out.

        Raises:
            OSError: The first error; what came after it is not printed.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not self._texts, timeout_s)
            if self._error is not None:
                raise self._error
            return done and self._complete

    def _has_room(self) -> bool:
        return self._nbytes < _UNPRINTED_NBYTES

    def _print(self) -> None:
        """In the thread. Not by sys.stdout, whose lock would be held when this process ends."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                text, nbytes = self._texts[0]
            if self._error is None:
                try:
                    with self._writing:
                        while text:
                            text = text[os.write(self._descriptor, text) :]
                except OSError as error:
                    self._error = error
                    self._fail(error)
            with self._changed:
                self._texts.popleft()
                self._nbytes -= nbytes
                self._changed.notify_all()


class _Launch:
    """The processes of all hosts, and one queue of their events."""

    def __init__(
        self, arguments: argparse.Namespace, hosts: list[Host], variables: dict[str, str]
    ) -> None:
        self._arguments = arguments
        self._hosts = hosts
        self._variables = variables
        # A line of a remote end begins with it, and a rank cannot know it.
        self._word = f"pycomm-run-{secrets.token_hex(8)}:"
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        # A pipe takes a long text in parts, and those of the other stream must not come in between.
        one = threading.Lock()
        other = one if _are_one_file(1, 2) else threading.Lock()
        self._printers = {
            stream: _Printer(
                stream, lambda error: self._events.put(_Event(None, error=error)), writing
            )
            for stream, writing in ((1, one), (2, other))
        }
        self._ends: list[_End] = []
        """In the order of the reports."""
        self._blamed: dict[int, int] = {}
        """The peer that the last error of a rank names: the ones before may have been caught."""
        self._over = threading.Event()
        self._restore: dict[int, Any] = {}
        self._signal = 0
        self._give_up_at = float("inf")
        """A host that does not answer is not waited for any longer."""
        self._address, self._port = "127.0.0.1", 0

    def open(self) -> None:
        """Starts a process for each host, and the heartbeats."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:  # by nohup, or a shell's "&"
                continue
            self._restore[number] = signal.signal(
                number, lambda got, _: self._events.put(_Event(None, signal=got))
            )
        code = Path(remote_end.__file__).read_text()
        for host in self._hosts:
            prefix = f"[${{rank}}@{host.name}] "
            job = {
                "code": code,
                "word": self._word,
                "folder": self._arguments.folder,
                "program": self._arguments.script,
                "module": self._arguments.module,
                "no_python": self._arguments.no_python,
                "variables": {**self._variables, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": prefix},
                "silence_s": remote_end.SILENCE_S,
                "grace_s": self._arguments.grace,
            }
            try:
                host.process = subprocess.Popen(
                    _remote_command(self._arguments, host),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for the launcher, which passes it on
                )
            except OSError as error:
                host.errors.append(f"{error.filename}: {error.strerror}")
                continue
            host.open_streams = 2
            for stream, lines in ((1, host.process.stdout), (2, host.process.stderr)):
                assert lines is not None
                threading.Thread(target=self._read, args=(host, stream, lines), daemon=True).start()
            host.send(**job)
        threading.Thread(target=self._beat, daemon=True).start()

    def check(self) -> int:
        """Waits until every host has answered; 1 if one of them cannot run the job."""
        self._collect("facts", self._hosts)
        own = remote_end.versions()
        reasons = [(host, self._why_not(host, own)) for host in self._hosts]
        return self._refuse([(host, why) for host, why in reasons if why])

    def start(self) -> int:
        """Chooses the address of the first host, and starts torchrun; 1 if there is none."""
        if why := self._find_address():
            return self._refuse(why)
        secret = make_secret() if self._arguments.secret else ""
        for host in self._hosts:
            host.begun = True
            host.send(
                act="start",
                torchrun=_torchrun(self._arguments, self._hosts, host, self._address, self._port),
                count=host.count,
                # Not looked for in torchrun's command there, which has the script's options, too.
                keeps_logs=any(word.startswith("--log-dir=") for word in self._arguments.torchrun),
                secret=secret,
            )
        return 0

    def watch(self) -> int:
        """Prints until every host has ended; the job's exit code."""
        end_at = float("inf")
        reported: set[str] = set()
        while not self._have_ended():
            self._take(min(end_at, self._give_up_at) - time.monotonic())
            now = time.monotonic()
            if self._give_up_at < float("inf"):  # all are asked to end
                end_at = float("inf")
                if now >= self._give_up_at:
                    self._ends += [_End(host, lost=True) for host in self._hosts if not host.ended]
                    break
                continue
            failed = [host for host in self._hosts if host.failed]
            if self._arguments.elastic:
                for host in failed:
                    if host.name not in reported:
                        reported.add(host.name)
                        self._say(f"{self._first_failure([host])[0]}; the other hosts go on")
                # Their torchruns would wait five minutes for that of a host that is gone.
                if failed and all(one.went_well for one in self._hosts if one not in failed):
                    end_at = min(end_at, now)
            elif failed or self._a_rank_failed():
                end_at = min(end_at, now + _SETTLE_S)
            if now >= end_at:
                self._end(signal.SIGTERM)
        return 128 + self._signal if self._signal else self._verdict()

    def close(self) -> None:
        """Ends every host that has not ended, and waits for it, at most until it must have.

        Prints what they print meanwhile.

        Raises:
            OSError: The output cannot be printed, and no other exception is under way.
        """
        failing = sys.exc_info()[0] is not None
        self._over.set()
        if not self._have_ended():  # else a reader of theirs may wait for room, and they for it
            self._hurry()
        for host in self._hosts:
            if host.process is not None and host.process.stdin is not None:
                with contextlib.suppress(OSError):
                    host.process.stdin.close()  # which ends the remote end
        begun = any(host.begun for host in self._hosts)
        wait_s = self._arguments.grace + remote_end.SILENCE_S if begun else _CLOSE_S
        deadline = time.monotonic() + wait_s
        self._take_rest(deadline)
        late = []
        for host in self._hosts:
            if host.process is None:
                continue
            try:
                host.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                host.process.kill()
                host.process.wait()
                late.append(host.name)
        if late and begun:
            self._say(f"{', '.join(late)} did not answer; what runs there ends by itself")
            self._take_rest(time.monotonic() + _CLOSE_S)  # their connections end with them
        for number, handler in self._restore.items():
            signal.signal(number, handler)
        for _ in range(self._events.qsize()):  # a signal is one, too
            self._take_at_end(0.0)
        # After a signal or an error this process ends, too; else a reader has all time.
        wait_s = _CLOSE_S if self._signal or failing else None
        errors = []
        try:
            if not self._printers[1].finish(wait_s):
                self._say("some output is left out: it was not read")
            elif begun and not self._have_ended():
                self._say("some output is left out: it came too late")
        except OSError as error:
            errors.append(error)
        try:
            self._printers[2].finish(wait_s)
        except OSError as error:
            errors.append(error)
        if errors and not failing:
            raise errors[0]

    def _have_ended(self) -> bool:
        return all(host.ended for host in self._hosts)

    def _hurry(self) -> None:
        for printer in self._printers.values():
            printer.hurry()

    def _take_rest(self, deadline: float) -> None:
        """Until every host has ended, at most until the deadline."""
        while not self._have_ended() and (left_s := deadline - time.monotonic()) > 0:
            self._take_at_end(left_s)

    def _take_at_end(self, timeout_s: float) -> None:
        with contextlib.suppress(OSError):  # of a printer, whose finish() raises it
            self._take(timeout_s)

    # Events

    def _read(self, host: Host, stream: int, lines: IO[bytes]) -> None:
        """In a thread per stream."""
        word = self._word.encode()
        with contextlib.suppress(OSError, ValueError):
            for line in lines:
                if self._printers[stream].admit(len(line), wait=word not in line):
                    self._events.put(_Event(host, stream, line))
        self._events.put(_Event(host, stream))

    def _beat(self) -> None:
        """In a thread: a line to a host may be long, and the host slow to read it."""
        while not self._over.wait(remote_end.BEAT_S):
            for host in self._hosts:
                host.beat()

    def _take(self, timeout_s: float) -> None:
        """Takes one event, or none after the timeout, or after a minute."""
        try:
            event = self._events.get(timeout=min(max(timeout_s, 0.0), 60.0))
        except queue.Empty:
            return
        if event.error is not None:
            raise event.error
        if event.signal:
            self._interrupt(event.signal)
        elif event.host is not None and event.line:
            self._take_line(event.host, event.stream, event.line)
        elif event.host is not None:
            event.host.open_streams -= 1
            if event.host.ended and "exit" not in event.host.answers:
                self._ends.append(_End(event.host, lost=True))

    def _take_line(self, host: Host, stream: int, line: bytes) -> None:
        before, word, answer = line.partition(self._word.encode())
        if word and answer.endswith(b"\n"):  # else it was cut off with its connection
            values = json.loads(answer)
            if "restart" in values:
                self._forget(host)
            if "rank" in values or "exit" in values:
                code = values.get("code", values.get("exit"))
                self._ends.append(_End(host, values.get("rank"), code))
            host.answers.update(values)
        shown = b""
        if before and host.begun:
            shown = _shown(host, before)
            if named := _ERROR.match(before):
                self._blamed[int(named[1])] = int(named[2])
        elif before.strip():
            host.errors.append(before.decode(errors="replace").strip())
        self._printers[stream].put(shown, len(line))

    def _forget(self, host: Host) -> None:
        """How its ranks ended and who was to blame: torchrun has started them again."""
        ranks = {rank for rank in self._blamed if self._host_of(rank) is host}
        ranks |= {rank for rank in self._blamed.values() if self._host_of(rank) is host}
        self._blamed = {one: peer for one, peer in self._blamed.items() if not {one, peer} & ranks}
        self._ends = [end for end in self._ends if end.host is not host]

    def _collect(self, kind: str, hosts: Sequence[Host]) -> None:
        """Until each host has answered this, or has ended."""
        deadline = time.monotonic() + _CHECK_S
        while time.monotonic() < deadline and not all(
            kind in host.answers or host.ended for host in hosts
        ):
            self._take(deadline - time.monotonic())

    def _interrupt(self, number: int) -> None:
        """Passes the first signal on; a second one kills.

        Raises:
            _Interrupted: No rank has begun.
        """
        again = self._signal
        self._signal = again or number
        self._hurry()
        if self._over.is_set():  # close() ends all hosts
            return
        if not any(host.begun for host in self._hosts):
            raise _Interrupted(number)
        if again:
            self._end(signal.SIGKILL, 0.0)
            return
        self._say(f"{signal.Signals(number).name}: ending all hosts; once more kills the ranks")
        self._end(number)

    def _end(self, number: int, grace_s: float | None = None) -> None:
        grace_s = self._arguments.grace if grace_s is None else grace_s
        self._give_up_at = min(self._give_up_at, time.monotonic() + grace_s + _LEAVE_S)
        for host in self._hosts:
            host.asked_to_end = host.asked_to_end or "exit" not in host.answers
            host.send(act="end", signal=int(number), grace_s=grace_s)

    def _say(self, text: str) -> None:
        self._printers[2].put(_said(text).encode(errors="backslashreplace"))

    # Reasons

    def _refuse(self, reasons: list[tuple[Host, str]]) -> int:
        for host, why in reasons:
            self._say(f"{host.name}: {why}")
        return 1 if reasons else 0

    def _why_not(self, host: Host, own: Mapping[str, str]) -> str:
        """Why this host cannot run the job; "" if it can."""
        facts = host.answers.get("facts")
        if facts is None:
            return self._why_no_answer(host)
        if facts["problem"]:
            return f"{facts['problem']}. Try: copy it there, or --folder"
        python = self._arguments.python
        for name, version in facts["versions"].items():
            if not version:
                return f"{python} has no {name} there. Try: install it, or --python"
            if _compared(name, version) != _compared(name, own[name]):
                return (
                    f"{python} has {name} {version} there, and {own[name]} here. "
                    "Try: install the same, or --python"
                )
        return ""

    def _why_no_answer(self, host: Host) -> str:
        last = host.errors[-1] if host.errors else ""
        shown = f" ({last})" if last else ""
        if host.process is None:
            hint = "--python" if host.local else "install the ssh client, or --ssh"
            return f"its process did not start{shown}. Try: {hint}"
        if not host.ended:
            return f"no answer after {_CHECK_S:g} s{shown}"
        code = host.process.wait()
        if code == 255 and not host.local:
            for pattern, why, hint in _SSH_REASONS:
                if re.search(pattern, "\n".join(host.errors)):
                    return f"{why}{shown}. Try: {hint.format(name=host.name, target=host.target)}"
            return f"ssh failed{shown}"
        python = self._arguments.python
        if code in (126, 127):
            return f"there is no interpreter {python}{shown}. Try: --python"
        return f"{python} ended with {code} before it checked the host{shown}"

    def _find_address(self) -> list[tuple[Host, str]]:
        """Sets the address and the port of torch's store; or why there are none."""
        first = self._hosts[0]
        word = secrets.token_hex(16)
        first.send(act="listen", port=self._arguments.master_port, default=_PORT, word=word)
        self._collect("port", [first])
        self._port = first.answers.get("port", 0)
        if not self._port:
            why = first.answers.get("why", "it has ended")
            return [(first, f"cannot listen at port {self._arguments.master_port}: {why}")]
        if len(self._hosts) == 1:
            return []
        candidates = self._candidates(first)
        for host in self._hosts:
            host.send(act="reach", addresses=candidates, port=self._port, word=word)
        self._collect("reached", self._hosts)
        results = [host.answers.get("reached", {}) for host in self._hosts]
        for candidate in candidates:
            if all(reached.get(candidate) == "" for reached in results):
                self._address = _bracketed(candidate)
                return []
        reasons = []
        for host, reached in zip(self._hosts, results, strict=True):
            if "" not in reached.values():
                tried = ", ".join(f"{each}: {why}" for each, why in reached.items())
                reasons.append((host, f"does not reach {first.name} ({tried or 'no answer'})"))
        hint = f"Try: open port {self._port} of {first.name}, or --master-addr, --master-port"
        if not reasons:
            reasons = [(first, "has no address that all other hosts reach")]
        return [(host, f"{why}, port {self._port}. {hint}") for host, why in reasons]

    def _candidates(self, first: Host) -> list[str]:
        """Addresses that may lead to the first host, the likeliest first.

        Numbers, not names: a name may be 127.0.1.1 on the host itself. What its name resolves to
        here comes first, then where its sshd was reached, then all others.
        """
        if self._arguments.master_addr:
            return [self._arguments.master_addr]
        found = []
        with contextlib.suppress(OSError, UnicodeError):
            found += [str(one[4][0]) for one in socket.getaddrinfo(first.name, None)]
        found += first.answers["facts"]["addresses"]
        usable = [one for one in dict.fromkeys(found) if not _is_loopback(one)]
        return usable or ["127.0.0.1"]

    def _a_rank_failed(self) -> bool:
        """Whether one did that torchrun does not start again."""
        restarts = any(word.startswith("--max-restarts") for word in self._arguments.torchrun)
        return not restarts and any(end.failed for end in self._ends)

    def _first_rank(self, dead: int) -> int:
        """The rank whose failure has made the rank ``dead`` fail, as the errors of ranks say.

        A process that ends takes longer than a peer needs to report that, and to end.
        """
        seen = {dead}
        rank = dead
        while rank in self._blamed and self._may_have_failed(self._blamed[rank]):
            rank = self._blamed[rank]
            if rank in seen:  # two that blame each other
                return dead
            seen.add(rank)
        return rank

    def _may_have_failed(self, rank: int) -> bool:
        """Not one that ended with 0, or that still runs."""
        own = [end.code for end in self._ends if end.rank == rank]
        return any(code != 0 for code in own) or (not own and self._is_lost(self._host_of(rank)))

    def _is_lost(self, host: Host) -> bool:
        return any(end.lost and end.host is host for end in self._ends)

    def _host_of(self, rank: int) -> Host:
        for host in self._hosts:
            if rank < host.count:
                return host
            rank -= host.count
        return self._hosts[-1]

    def _first_failure(self, failed: Sequence[Host]) -> tuple[str, int]:
        """What failed first on these hosts, as a clause, and the exit code for it."""
        first = next(end for end in self._ends if end.failed and end.host in failed)
        host, dead, code = first.host, first.rank, first.code or 1
        if first.lost:
            return f"the connection to {host.name} was lost", 1
        if "not_started" in host.answers:
            return f"torchrun did not start on {host.name}: {host.answers['not_started']}", 1
        if dead is None and code > 0:  # since a rank failed, whose exit code torchrun took first
            unknown = [end.rank for end in self._ends if end.host is host and end.code is None]
            dead = unknown[0] if unknown else None
        if dead is None:
            return f"torchrun on {host.name} failed{_how(code)}", code
        rank = self._first_rank(dead)
        place = self._host_of(rank)
        # A rank that torchrun ends meanwhile has no exit code of its own.
        codes = [end.code for end in self._ends if end.rank == rank]
        own = next((one for one in codes if one not in (0, None, -signal.SIGTERM)), None)
        if rank != dead and own is None and self._is_lost(place):  # its peers were the first to see
            return f"the connection to {place.name} was lost", 1
        return f"rank {rank} on {place.name} failed first{_how(own)}", own or code

    def _verdict(self) -> int:
        """Reports what failed first; the exit code."""
        failed = [host for host in self._hosts if host.answers.get("exit") != 0]
        if not failed or (self._arguments.elastic and any(host.went_well for host in self._hosts)):
            return 0
        clause, code = self._first_failure(failed)
        others = "no host has finished" if self._arguments.elastic else "all hosts were ended"
        with contextlib.suppress(OSError):  # close() raises it
            self._printers[1].finish(_SETTLE_S)  # on a terminal the verdict comes last
        self._say(f"{clause}; {others}" if len(self._hosts) > 1 else clause)
        return code if code > 0 else 128 - code


def _are_one_file(first: int, second: int) -> bool:
    with contextlib.suppress(OSError):  # one of them is closed
        return os.path.sameopenfile(first, second)
    return False


def _how(code: int | None) -> str:
    if code is None:
        return ""
    return f": signal {signal.Signals(-code).name}" if code < 0 else f": exit code {code}"


def _compared(name: str, version: str) -> list[str]:
    """The part of a version that must be equal: of torch its minor, as cpu and cu128 mix."""
    return version.split("+")[0].split(".")[:2] if name == "torch" else [version]


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False


def _shown(host: Host, line: bytes) -> bytes:
    """A rank's line has its prefix from torchrun; torchrun's own lines get the host's name."""
    if not re.match(rb"\[\d+@", line):
        line = f"[{host.name}] ".encode() + line
    return line if line.endswith(b"\n") else line + b"\n"


def _said(text: str) -> str:
    return f"pycomm run: {text}\n"


def _say(text: str) -> None:
    """Where there is no job."""
    sys.stderr.write(_said(text))
    sys.stderr.flush()


def _interpreter(given: str | None, folder: str) -> str:
    """A bare name is looked for in PATH on each host, a relative path in the folder."""
    if given is None:
        return sys.executable
    return os.path.join(folder, given) if "/" in given else given


def _words(text: str) -> list[str]:
    with contextlib.suppress(ValueError):
        if words := shlex.split(text):
            return words
    raise argparse.ArgumentTypeError(f"{text!r} is no command: are its quotes closed?")


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, 1 to 4096")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 3600:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 to 3600")
