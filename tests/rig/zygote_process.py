"""The process that ranks are forked from: it imports torch once, for all of them.

Run by ``zygote.py`` as ``python zygote_process.py FD MODULE …``. It has imported the modules and
nothing of pycomm, has one thread, and answers one request after another on the socket FD:

    ("fork", Job) + descriptors    a rank is forked; answered with its process id
    ("poll", process id)           answered with the exit code, or None while it runs

A rank that has ended is not waited for before it is asked for, so its process id stays its own.
When the socket's other end is gone, however that happened, ranks that still run are killed.

A forked rank ends as any interpreter does, exit handlers and modules and all, but for this: what
was there before the fork stays as it is. Its objects are frozen, its modules are not torn down (but
those of torch.distributed are: they hold the groups), and the libraries that it loaded are not told
of the end. That would take nine tenths of what a short rank takes. Tests of how a process ends
start their ranks with ``fresh=True``.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rank_child

MAX_NBYTES = 1 << 17
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Job:
    """A rank to be forked. The descriptors of mark pipe, stdout and stderr come with it."""

    folder: Path
    rank: int
    env: dict[str, str]


def serve(control: socket.socket) -> tuple[Job, int] | None:
    """Answers requests to their end: None then. In a forked rank: its job and mark descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    zygote, running = os.getpid(), set()
    while True:
        packet, fds, _, _ = socket.recv_fds(control, MAX_NBYTES, 3)
        if not packet:
            break
        kind, subject = pickle.loads(packet)
        answer: Any = None
        if kind == "fork":
            pid = os.fork()
            if pid == 0:
                control.close()
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != zygote:
                    os._exit(1)
                # exit() calls the handlers in turn, the newest first. Those of libraries that are
                # loaded from now on come before this one, with which the process has ended.
                libc.on_exit(libc._exit, None)
                _become(subject, fds)
                return subject, fds[0]
            for fd in fds:
                os.close(fd)
            running.add(pid)
            answer = pid
        elif subject in running:
            pid, status = os.waitpid(subject, os.WNOHANG)
            if pid:
                running.remove(pid)
                answer = os.waitstatus_to_exitcode(status)
        control.send(pickle.dumps(answer))
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _become(job: Job, fds: Sequence[int]) -> None:
    """Makes this process what a fresh interpreter with this environment and these files is."""
    mark_fd, *outputs = fds
    null_fd = os.open(os.devnull, os.O_RDONLY)
    for fd, number in zip((null_fd, *outputs), (0, 1, 2), strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(job.env)
    sys.argv = [str(rank_child.__file__), str(job.folder), str(job.rank), str(mark_fd)]
    # As anywhere, each process has random numbers of its own; Python's random sees to it itself.
    for generator in ("numpy.random", "torch.default_generator"):
        module, _, name = generator.partition(".")
        if module in sys.modules:
            getattr(sys.modules[module], name).seed()


_stay: list[str] = []
"""Names of modules that are not torn down when the process ends."""


def _let_stay() -> None:
    """The last exit handler: what is not in sys.modules and has a reference too much stays."""
    for name in _stay:
        if (module := sys.modules.pop(name, None)) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))


def _stays(name: str) -> bool:
    package = name.partition(".")[0]
    imported_from = os.path.dirname(vars(sys.modules[name]).get("__file__") or "")
    return (
        package not in sys.stdlib_module_names
        and not name.startswith("torch.distributed")
        and imported_from != os.path.dirname(__file__)
    )


def main() -> int:
    atexit.register(_let_stay)  # the first one is called last
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        sys.exit(f"{sys.argv[2:]} have started threads, so nothing can be forked: {threads}")
    _stay.extend(name for name in sys.modules if _stays(name))
    gc.collect()
    gc.freeze()
    control.send(pickle.dumps("ready"))
    found = serve(control)
    if found is None:
        return 0
    job, mark_fd = found
    return rank_child.main(job.folder, job.rank, mark_fd)


if __name__ == "__main__":
    # Objects that are pickled here and unpickled there must be of one class.
    import zygote_process as _this

    sys.exit(_this.main())
