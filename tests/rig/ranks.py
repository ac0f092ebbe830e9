"""Starts real rank processes for tests, without torchrun, and collects what each of them did.

A rank is ``python rank_child.py FOLDER RANK FD``: it joins the group, calls the target as
``target(rank, world_size, *args)``, leaves the group and writes down its result or exception. It is
forked from a process that has imported torch (``zygote.py``), or, with ``fresh=True`` and where its
environment could have changed those imports, it is an interpreter of its own.
Nothing here waits for ever, and whatever is left of the processes when the parent has had enough is
killed by its pid.

    def double(rank: int, world_size: int, start: float) -> float:
        tensor = torch.full((3,), start + rank)
        dist.all_reduce(tensor)
        return float(tensor[0])

    def test_double() -> None:
        assert run_ranks(2, double, args=(1.0,)).values() == [3.0, 3.0]

Tests that must act in the middle of a run use ``start_ranks`` and marks: a rank calls
``mark("started")``, the test ``running.wait_for_mark(rank, "started")`` and then, say,
``running.kill(rank)``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from processes import (
    IMPORTED_FROM,
    LOOPBACK,
    RIG,
    child_environment,
    free_port,
    free_port_range,
    run_python,
)
from rank_child import (
    RankError,
    Spec,
    describe_exception,
    forbid_other_backends,
    mark,
    other_backends_threads,
)
from thread_state import LOOKS_ASLEEP, state_in
from zygote import Process, Zygote, ZygoteDiedError, zygote_for

__all__ = [
    "IMPORTED_FROM",
    "LOOPBACK",
    "RIG",
    "TORCH_DDP",
    "RankError",
    "RankResult",
    "RankResults",
    "Ranks",
    "child_environment",
    "describe_exception",
    "forbid_other_backends",
    "free_port",
    "free_port_range",
    "mark",
    "other_backends_threads",
    "run_python",
    "run_ranks",
    "start_ranks",
]

TORCH_DDP = ("torch._dynamo",)
"""For ``preload``: what torch's wrapper imports when it is first made, as much as torch itself.

It also ends a nuisance. Once a group exists, default arguments of modules imported then keep that
group, and with it gloo's threads, alive to the end of the process, which at times aborts there.
"""

_TAIL_NCHARS = 6000
_MARKS_NBYTES = 1 << 20
"""What a pipe holds of marks that no test reads: the rank must not wait for that."""
_LONGEST_LOOK_S = 1.0
"""A look that took longer says that the machine stood still, and with it the ranks."""


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one rank did."""

    rank: int
    pid: int
    exit_code: int
    """As ``subprocess`` has it: negative is the signal that ended it."""
    value: Any
    error: RankError | None
    stdout: str
    stderr: str
    timed_out: bool
    """It had to be killed here because it ran too long."""

    @property
    def ok(self) -> bool:
        """The target returned and the process ended with 0."""
        return self.exit_code == 0 and self.error is None and not self.timed_out

    def describe(self) -> str:
        """Everything known, for an assertion's text."""
        how = "killed here, out of time" if self.timed_out else f"exit code {self.exit_code}"
        parts = [f"--- rank {self.rank}: {how}"]
        if self.error is not None:
            parts.append(self.error.traceback)
        for name, text in (("stdout", self.stdout), ("stderr", self.stderr)):
            if text:
                parts.append(f"[{name}]\n{text[-_TAIL_NCHARS:]}")
        return "\n".join(parts)


class RankResults(list[RankResult]):
    """The results of all ranks, in rank order."""

    def values(self) -> list[Any]:
        """What the targets returned."""
        return [result.value for result in self]

    def errors(self) -> list[RankError]:
        """The exceptions of the ranks that raised, in rank order."""
        return [result.error for result in self if result.error is not None]

    def describe(self) -> str:
        """All ranks' ``describe()``."""
        return "\n".join(result.describe() for result in self)

    def check(self) -> RankResults:
        """Raises AssertionError with everything known unless every rank ended well."""
        if not all(result.ok for result in self):
            raise AssertionError("a rank failed\n" + self.describe())
        return self


def _locate(target: str | Callable[..., Any]) -> tuple[str, str]:
    if isinstance(target, str):
        module, _, function = target.partition(":")
        return module, function
    if "<locals>" in target.__qualname__:
        raise ValueError(f"{target.__qualname__} must be a module's own: each rank imports it anew")
    return target.__module__, target.__qualname__


class Ranks:
    """Running rank processes. Use ``start_ranks``; leaving its block kills what still runs."""

    def __init__(
        self,
        spec: Spec,
        folder: Path,
        env: Callable[[int], Mapping[str, str | None]],
        ranks: Sequence[int],
        *,
        fresh: bool = False,
        zygote_of: Callable[[int], Zygote] | None = None,
    ) -> None:
        self.spec = spec
        self.folder = folder
        self._env = env
        self._fresh = fresh
        self._zygote_of = zygote_of
        self._selector = selectors.DefaultSelector()
        self._marks: dict[int, list[str]] = {}
        self._partial: dict[int, bytes] = {}
        self._files: list[Any] = []
        self._timed_out: set[int] = set()
        self.processes: dict[int, Process] = {}
        try:
            for rank in ranks:
                self._start(rank)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int) -> None:
        read_fd, write_fd = os.pipe()
        with contextlib.suppress(OSError):  # past the caller's limit it holds 64 KiB
            fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, _MARKS_NBYTES)
        out = (self.folder / f"{rank}.out").open("wb")
        err = (self.folder / f"{rank}.err").open("wb")
        self._files += [out, err]
        try:
            self.processes[rank] = self._start_process(rank, write_fd, out, err)
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self._marks[rank] = []
        self._partial[rank] = b""
        self._selector.register(read_fd, selectors.EVENT_READ, rank)

    def _start_process(self, rank: int, write_fd: int, out: BinaryIO, err: BinaryIO) -> Process:
        env = child_environment(self._env(rank))
        if self._zygote_of is not None:
            zygote: Zygote | None = self._zygote_of(rank)
        else:
            zygote = None if self._fresh else zygote_for(env, self.spec.preload)
        if zygote is not None:
            return zygote.fork(self.folder, rank, env, [write_fd, out.fileno(), err.fileno()])
        command = [sys.executable, str(RIG / "rank_child.py")]
        return subprocess.Popen(
            [*command, str(self.folder), str(rank), str(write_fd)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[write_fd],
        )

    def pid(self, rank: int) -> int:
        """The process id of a rank."""
        return self.processes[rank].pid

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Sends a signal to a rank and returns ``time.monotonic()`` of that moment."""
        sent_s = time.monotonic()
        self.processes[rank].send_signal(number)
        return sent_s

    def wait_for_mark(self, rank: int, name: str, timeout_s: float = 100.0) -> None:
        """Waits until the rank has called ``mark(name)``; AssertionError if it never does."""
        deadline = time.monotonic() + timeout_s
        while name not in self._marks[rank]:
            left_s = deadline - time.monotonic()
            ended = self.processes[rank].poll() is not None
            if (left_s <= 0 or ended) and name not in self._drain_marks(0.0)[rank]:
                what = self.collect(1.0).describe()
                raise AssertionError(f"rank {rank} did not reach mark {name!r}\n{what}")
            self._drain_marks(min(left_s, 0.2))

    def wait_until_asleep(self, rank: int, timeout_s: float = 100.0) -> None:
        """Waits until the rank's main thread blocks: it is inside what its last mark announced."""
        looks = 0

        def sleeps() -> bool:
            nonlocal looks
            looks = looks + 1 if self.state(rank) == "S" else 0
            return looks == LOOKS_ASLEEP

        self.wait_until(rank, sleeps, "never slept", timeout_s)

    def wait_until(
        self, rank: int, is_so: Callable[[], bool], otherwise: str, timeout_s: float = 100.0
    ) -> None:
        """Looks until ``is_so()``; AssertionError with ``otherwise`` if the rank ends before."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.processes[rank].poll() is not None
            if not ended and is_so():
                return
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"rank {rank} {otherwise}\n{self.collect(1.0).describe()}")
            time.sleep(0.002)

    def state(self, rank: int) -> str:
        """The kernel's letter for the rank's main thread: "S" if asleep, "T" if stopped."""
        return state_in(f"/proc/{self.pid(rank)}")

    def marks(self, rank: int) -> list[str]:
        """All marks of a rank so far."""
        return list(self._drain_marks(0.0)[rank])

    def _drain_marks(self, timeout_s: float) -> dict[int, list[str]]:
        for key, _ in self._selector.select(max(timeout_s, 0.0)):
            chunk = os.read(key.fd, _MARKS_NBYTES)
            if not chunk:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                continue
            *lines, self._partial[key.data] = (self._partial[key.data] + chunk).split(b"\n")
            self._marks[key.data] += [line.decode() for line in lines]
        return self._marks

    def collect(self, timeout_s: float, *, grace_s: float = 20.0) -> RankResults:
        """Waits for all ranks to end and gathers their results.

        A rank that runs longer than ``timeout_s``, or than ``grace_s`` after another rank has
        failed, is asked for its stacks (they are in its stderr) and killed.
        """
        left_s = timeout_s
        while running := [rank for rank in self.processes if self.processes[rank].poll() is None]:
            if any(process.poll() not in (None, 0) for process in self.processes.values()):
                left_s = min(left_s, grace_s)
                grace_s = float("inf")  # counted once, from the first failure
            if left_s <= 0:
                self._end(running)
                break
            looked_s = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[running[0]].wait(0.05)
            left_s -= min(time.monotonic() - looked_s, _LONGEST_LOOK_S)
        return RankResults(self._result(rank) for rank in sorted(self.processes))

    def _end(self, running: Sequence[int]) -> None:
        self._timed_out.update(running)
        for rank in running:
            self.processes[rank].send_signal(signal.SIGCONT)
            self.processes[rank].send_signal(signal.SIGUSR1)  # faulthandler writes all stacks
        deadline = time.monotonic() + 1.0
        for rank in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[rank].wait(max(deadline - time.monotonic(), 0.01))
            self.processes[rank].kill()
            self.processes[rank].wait()

    def _result(self, rank: int) -> RankResult:
        value, error = None, None
        with contextlib.suppress(FileNotFoundError):
            value, error = pickle.loads((self.folder / f"{rank}.result").read_bytes())
        return RankResult(
            rank=rank,
            pid=self.processes[rank].pid,
            exit_code=self.processes[rank].wait(),
            value=value,
            error=error,
            stdout=(self.folder / f"{rank}.out").read_text(errors="replace"),
            stderr=(self.folder / f"{rank}.err").read_text(errors="replace"),
            timed_out=rank in self._timed_out,
        )

    def close(self) -> None:
        """Kills what still runs, waits for it and lets go of every descriptor."""
        for process in self.processes.values():
            with contextlib.suppress(ZygoteDiedError):  # and with it the rank
                process.kill()
                process.wait()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        for file in self._files:
            file.close()


@contextlib.contextmanager
def start_ranks(
    world_size: int,
    target: str | Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    backend: str | None = "pycomm",
    init: str = "file",
    init_timeout_s: float = 60.0,
    env: Mapping[str, str | None] | Callable[[int], Mapping[str, str | None]] | None = None,
    pg_options: Mapping[str, Any] | None = None,
    import_pycomm: bool = True,
    destroy: bool = True,
    only_pycomm: bool | None = None,
    ranks: Sequence[int] | None = None,
    fresh: bool = False,
    preload: Sequence[str] = (),
    zygote_of: Callable[[int], Zygote] | None = None,
) -> Iterator[Ranks]:
    """Starts processes that each run ``target(rank, world_size, *args)`` inside a process group.

    Args:
        world_size: Number of ranks.
        target: A module's own function, or "module:function" of a module beside this file.
        args: Further arguments; pickled.
        backend: For ``init_process_group``.
        init: "file", "tcp", "env", a whole init method ("file:///…"), or "none": the target joins
            by itself.
        init_timeout_s: The group's timeout.
        env: Variables for all ranks, or a function of the rank; None as a value removes one.
        pg_options: Keyword arguments of ``pycomm.Options`` for the group.
        import_pycomm: Import pycomm before joining. Off to test the entry point.
        destroy: Call ``destroy_process_group`` after the target.
        only_pycomm: Raise an error if a rank makes a group of gloo, NCCL or MPI, so that nothing
            uses them unnoticed. Default: if ``backend`` is "pycomm".
        ranks: Start only these.
        fresh: Start interpreters, do not fork: for what depends on how a process came to be.
        preload: Modules that the ranks are to find imported already, before any group exists.
        zygote_of: Fork each rank from this process, say on another host.
    """
    folder = Path(tempfile.mkdtemp(prefix="pycomm-ranks-"))
    port = free_port() if init in ("tcp", "env") else 0
    methods = {
        "file": f"file://{folder}/store",
        "tcp": f"tcp://{LOOPBACK}:{port}",
        "env": "env://",
        "none": "",
    }
    module, function = _locate(target)
    spec = Spec(
        module=module,
        function=function,
        args=tuple(args),
        world_size=world_size,
        backend=backend,
        init_method=methods.get(init, init),
        init_timeout_s=init_timeout_s,
        pg_options=pg_options,
        import_pycomm=import_pycomm,
        destroy=destroy,
        only_pycomm=backend == "pycomm" if only_pycomm is None else only_pycomm,
        preload=tuple(preload),
    )
    (folder / "spec").write_bytes(pickle.dumps(spec))

    def rank_environment(rank: int) -> Mapping[str, str | None]:
        own: dict[str, str | None] = {}
        if init == "env":
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(port),
            }
        return own | dict(env(rank) if callable(env) else env or {})

    started = range(world_size) if ranks is None else ranks
    try:
        running = Ranks(spec, folder, rank_environment, started, fresh=fresh, zygote_of=zygote_of)
        try:
            yield running
        finally:
            running.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_ranks(
    world_size: int,
    target: str | Callable[..., Any],
    *,
    timeout_s: float = 100.0,
    check: bool = True,
    **options: Any,
) -> RankResults:
    """Runs ``start_ranks(world_size, target, **options)`` to its end.

    Args:
        timeout_s: After this, ranks that still run are killed and count as failed.
        check: Raise AssertionError, with every rank's traceback and output, unless all ended well.
    """
    with start_ranks(world_size, target, **options) as running:
        results = running.collect(timeout_s)
        return results.check() if check else results
