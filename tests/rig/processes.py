"""Ports, environments and single processes for tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

RIG = Path(__file__).resolve().parent
_FOLDERS = sorted(path for path in (RIG.parent / "python").iterdir() if path.is_dir())
IMPORTED_FROM = [str(folder) for folder in (RIG, *_FOLDERS) if folder.name != "__pycache__"]
"""Ranks import the functions that they run by name: those of the rig, and of any test."""

LOOPBACK = "127.0.0.1"
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ENOUGH_PORTS = 1000


def _ports_that_no_connection_takes() -> range:
    """Ports that the kernel gives to nobody by itself, so that only another bind can take one.

    A port of the kernel's own range can become the end of a connection at any moment, and after
    a connection it stays taken for a minute: after a suite that makes thousands of them, two
    free neighbours are hard to find there. Where hardly any port is outside of that range, any
    port will do.
    """
    first, last = (int(word) for word in _EPHEMERAL.read_text().split())
    below, above = range(max(1024, first - 16384), first), range(last + 1, 65536)
    ports = max(below, above, key=len)
    return ports if len(ports) >= _ENOUGH_PORTS else range(1024, 65536)


def free_port() -> int:
    """A TCP port on the loopback interface that was free a moment ago."""
    return free_port_range(1)[0]


def free_port_range(count: int) -> tuple[int, int]:
    """First and last of ``count`` neighbouring ports that were all free a moment ago."""
    ports = _ports_that_no_connection_takes()
    for _ in range(200):
        first = secrets.choice(ports[: len(ports) - count + 1])
        with contextlib.ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind((LOOPBACK, port))
            except OSError:
                continue
            return first, first + count - 1
    raise RuntimeError(f"no {count} neighbouring free ports on {LOOPBACK}")


def child_environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The environment for a rank or any other child.

    None of the caller's PYCOMM_* or launcher variables, one thread per process, and this very
    pycomm on the path. TEST_TRANSPORT of the caller is their PYCOMM_TRANSPORT, and TEST_SECRET
    their PYCOMM_SECRET. A value of None in ``extra`` removes a variable.
    """
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    prefixes = ("PYCOMM_", "TORCHELASTIC_", "GLOO_", "NCCL_")
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in launcher and not name.startswith(prefixes)
    }
    env["OMP_NUM_THREADS"] = "1"
    if transport := os.environ.get("TEST_TRANSPORT"):  # the same tests over TCP
        env["PYCOMM_TRANSPORT"] = transport
    if secret := os.environ.get("TEST_SECRET"):  # and in TLS
        env["PYCOMM_SECRET"] = secret
    paths = list(IMPORTED_FROM)
    spec = importlib.util.find_spec("pycomm")
    if spec is not None and spec.origin is not None:
        # Not resolved: tools/seam.py makes a package of links beside another extension.
        paths.append(str(Path(spec.origin).absolute().parent.parent))
    if env.get("PYTHONPATH"):
        paths.append(env["PYTHONPATH"])
    env["PYTHONPATH"] = os.pathsep.join(paths)
    for name, value in (extra or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def run_python(
    arguments: Sequence[str],
    *,
    timeout_s: float = 180.0,
    env: Mapping[str, str | None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs ``python ARGUMENTS`` in a session of its own, which is ended whole when time is up.

    It is asked first and killed 10 s later: torchrun's workers have sessions of their own, and it
    ends them when it is asked to end.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=child_environment(env),
        # The first place where "-c" looks for pycomm. It must be another than the sources, whose
        # extension is not the one that is tested with sanitizers.
        cwd=RIG if arguments[0] == "-c" else None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        out, err = _end_session(process)
        raise AssertionError(f"{arguments} ran longer than {timeout_s} s\n{out}\n{err}") from None
    except BaseException:
        _end_session(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _end_session(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a process and its session; what they have written."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def open_files() -> dict[int, str]:
    """What this process's descriptors are open on, as /proc names it.

    The descriptor by which the list is read, and those that close meanwhile, are not in it.
    """
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def thread_names() -> list[str]:
    """Of this process. A thread that was joined may be listed a moment longer."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            names.append(Path("/proc/self/task", task, "comm").read_text().strip())
    return sorted(names)


def fork_and_wait(body: Callable[[], object]) -> int:
    """Runs ``body`` in a forked child; its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
