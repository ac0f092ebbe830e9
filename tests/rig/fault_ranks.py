"""What a rank of the fault matrix does: joins, is hit by its case's fault, tells what it met."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import fault_programs
import torch
import torch.distributed as dist
from fault_programs import PROGRAMS
from rank_child import describe_exception, mark

import pycomm
from pycomm._group.creation import native_backend
from pycomm._native import loader

ROOT = Path(__file__).resolve().parents[2]
# tools/seam.py runs these tests with a build of its own, which has fault points too.
MOST_STEPS = 400
MISMATCH_S = 5.0
"""In which a mismatch is known to all; its vote takes 25 ms, and a group's limit is 20 s."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One fault at one place, and what every rank must see of it."""

    kind: str
    phase: str
    world_size: int
    victim: int
    spec: str = ""
    """Fault points that the victim arms; "" for none."""
    at_init: bool = False
    """Armed before the group is made, through PYCOMM_FAULT, and not in its middle."""
    act: str = ""
    """A function of ACTS that the victim calls in the middle."""
    program: str = "large"
    codes: tuple[str, ...] = ("PEER_DEAD",)
    """What the other ranks may raise; () if nothing may happen to them."""
    culprit: str = "victim"
    """Whom the others' errors must name: the "victim" as the peer; "an end" of a connection of the
    victim, where both ends are alive; or "" where nobody can know."""
    victim_codes: tuple[str, ...] | None = None
    """What the victim may raise; () if nothing; None if its process ends otherwise."""
    victim_exit: int = 0
    bound_s: float = 2.0
    """From the first step after the fault was armed to the exception, on every rank."""
    timeout_s: float = 30.0
    """The group's."""
    how: str = ""
    """How the victim joins: "" like the others, or "absent", "duplicate", "world size",
    "algorithm", "segment", "heartbeat", "few files"."""
    transport: str = "tcp"
    """Of cases with a ``spec``; the others take what there is, which is shared memory."""
    steps: int = 12
    """After the fault was armed, where no error ends them."""
    may_end_well: bool = False
    """The others need not notice: the fault may come when nobody needs the victim any more."""

    @property
    def name(self) -> str:
        where = f"{self.kind}-{self.phase}-{self.world_size}ranks"
        return where if self.victim < 0 else f"{where}-rank{self.victim}"


MOST_PATIENCE = 8.0


def patience() -> float:
    """How much longer all may take because others want the cores, too.

    Three times as long at least: the load of the last minute knows nothing of the last second, nor
    of cores that are lent elsewhere. Nothing with ``--exact-bounds``, for a machine that does
    nothing else.
    """
    if os.environ.get("TEST_EXACT_BOUNDS"):
        return 1.0
    return min(max(3.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2), MOST_PATIENCE)


FILES = resource.getrlimit(resource.RLIMIT_NOFILE)


def use_fault_build() -> None:
    """Makes the extension the test build, in this process: wants the fixture fault_build."""
    assert loader.loaded() is None, "the ordinary build is loaded already"
    pycomm.__path__.insert(0, os.environ["TEST_FAULT_BUILD"])


def join(rank: int, case: Case, store: str) -> None:
    """Makes the default group."""
    odd = rank == case.victim
    options: dict[str, Any] = {}
    if odd and case.how == "algorithm":
        options["algorithm"] = "ring"
    elif odd and case.how == "segment":
        options["segment_nbytes"] = 65536
    elif odd and case.how == "heartbeat":
        options["heartbeat_timeout"] = 4
    elif odd and case.how == "few files":
        used = len(os.listdir("/proc/self/fd")) - 1
        limit = used + int(case.phase.removeprefix("+"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, FILES[1]))
    dist.init_process_group(
        "pycomm",
        init_method=store,
        rank=case.victim - 1 if odd and case.how == "duplicate" else rank,
        world_size=case.world_size + (odd and case.how == "world size"),
        timeout=timedelta(seconds=case.timeout_s),
        pg_options=pycomm.Options(**options),
    )


LATER: list[Any] = []
"""What acts need, made before they act: a group."""
STEPS_BEFORE = 2
"""The victim's fault is armed, or it acts, after so many steps."""


# What a victim does to itself


def _end_by(number: int) -> Callable[[Case], None]:
    def act(case: Case) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    return act


def _raise(case: Case) -> None:
    raise ValueError("this rank's own mistake")


def _exit(case: Case) -> None:
    sys.exit(0)


def _os_exit(case: Case) -> None:
    os._exit(3)


def _destroy_in_the_middle(case: Case) -> None:
    for step in (STEPS_BEFORE, STEPS_BEFORE + 1):  # the next of the others', which may succeed
        tensor = fault_programs.values(1 << 20, dist.get_rank(), step)
        dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
    sys.exit(0)


def _abort(case: Case) -> None:
    native_backend().abort()


def _late(case: Case) -> None:
    signal.sigtimedwait([signal.SIGUSR2], 4.5)  # never sent


def _interrupt_in_a_wait(case: Case) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it

    def send() -> None:
        time.sleep(0.1)  # the main thread waits in the operation below, or will: both end alike
        os.kill(os.getpid(), signal.SIGINT)

    began_s = time.monotonic()
    try:
        threading.Thread(target=send, daemon=True).start()
        dist.all_reduce(torch.ones(3), group=LATER[0])  # nobody else enters it
    except KeyboardInterrupt:
        assert time.monotonic() - began_s < 3.0 * patience(), "Ctrl-C came late"
        sys.exit(0)
    raise RuntimeError("the wait was not interrupted")


def _hold_the_gil(case: Case) -> None:
    began_s, ran_s = time.monotonic(), []
    other = threading.Timer(1.0, lambda: ran_s.append(time.monotonic()))
    other.start()
    ctypes.PyDLL(None).usleep(4_000_000)  # PyDLL keeps the lock
    other.join()
    assert ran_s[0] - began_s >= 4.0, "another thread has had the lock meanwhile"


def _stop_and_go(case: Case) -> None:
    pid = os.getpid()
    if os.fork() == 0:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        stat = Path(f"/proc/{pid}/stat").read_text()
        os.kill(pid, signal.SIGCONT)
        os._exit(stat.rpartition(")")[2].split()[0] != "T")
    time.sleep(0.2)
    assert os.wait()[1] == 0, "it was not stopped"


def _fork_a_child_that_stays(case: Case) -> None:
    if os.fork() == 0:
        time.sleep(6.0)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


ACTS: dict[str, Callable[[Case], None]] = {
    "kill": _end_by(signal.SIGKILL),
    "terminate": _end_by(signal.SIGTERM),
    "segfault": _end_by(signal.SIGSEGV),
    "raise": _raise,
    "sys_exit": _exit,
    "os_exit": _os_exit,
    "destroy": _destroy_in_the_middle,
    "abort": _abort,
    "late": _late,
    "interrupt": _interrupt_in_a_wait,
    "hold_gil": _hold_the_gil,
    "stop_and_go": _stop_and_go,
    "fork": _fork_a_child_that_stays,
}


def meet(rank: int, case: Case, store: str) -> None:
    """Until all ranks are here: limits of a second or two are for joining, not for imports."""
    loader.load()
    folder = Path(store.removeprefix("file://")).parent
    (folder / f"here-{rank}").touch()
    while len(list(folder.glob("here-*"))) < case.world_size - (case.how == "absent"):
        time.sleep(0.005)


def run_case(rank: int, world_size: int, case: Case, store: str) -> dict[str, Any]:
    """The rank's whole life in a case; what it met."""
    use_fault_build()
    if case.spec:
        os.environ["PYCOMM_TRANSPORT"] = case.transport  # a fault point is on one way only
    if case.at_init and rank == case.victim and case.spec:
        os.environ["PYCOMM_FAULT"] = case.spec
    met: dict[str, Any] = {"error": None, "steps": 0, "fault_points": []}
    began_s = time.monotonic()
    if rank == case.victim and case.how == "absent":
        return met
    meet(rank, case, store)
    program = PROGRAMS[case.program]
    try:
        join(rank, case, store)
        if case.act == "interrupt":
            LATER.append(dist.new_group())
        for step in range(STEPS_BEFORE):
            program(rank, world_size, step)
        mark("in the middle")
        began_s = time.monotonic()
        if rank == case.victim and not case.at_init:
            loader.load().arm_fault_points(case.spec)
            if case.act:
                ACTS[case.act](case)
        most = MOST_STEPS if (case.codes and not case.may_end_well) else case.steps
        for step in range(STEPS_BEFORE, STEPS_BEFORE + most):
            program(rank, world_size, step)
            met["steps"] += 1
    except pycomm.errors.PycommError as error:
        # torch's FileStore opens a file to close itself; where it cannot, its destructor ends the
        # process. The error's traceback holds the store, so here it is not too late.
        resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
        met["error"] = describe_exception(error)
        met["s"] = time.monotonic() - began_s
        met["sticks"] = _second_error(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
    met.setdefault("s", time.monotonic() - began_s)
    ending_s = time.monotonic()
    if dist.is_initialized():
        dist.destroy_process_group()
    met["destroy_s"] = time.monotonic() - ending_s
    met["fault_points"] = loader.load().fault_points()  # a test build has it
    fault_programs.check_what_was_given_back()
    return met


def nothing(rank: int, world_size: int) -> None:
    """A target that only joins."""


def _second_error(first: pycomm.errors.PycommError) -> str | None:
    if not dist.is_initialized():
        return first.code
    try:
        dist.all_reduce(torch.ones(3))
    except pycomm.errors.PycommError as again:
        return again.code
    return None


# Ranks that call different things: one set of processes, a new group for each mistake


def _split(*, outputs: list[int], inputs: list[int]) -> Callable[[Any], None]:
    def call(group: Any) -> None:
        dist.all_to_all_single(
            torch.empty(sum(outputs)), torch.ones(sum(inputs)), outputs, inputs, group=group
        )

    return call


def mismatches(world_size: int) -> dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]]:
    """By name: what the victim calls and what the others call."""

    def reduce_of(
        numel: int, dtype: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM
    ) -> Any:
        return lambda group: dist.all_reduce(torch.ones(numel, dtype=dtype), op, group=group)

    def broadcast(root: int, numel: int = 1000) -> Any:
        return lambda group: dist.broadcast(torch.ones(numel), root, group=group)

    def reduce_to(root: int, numel: int = 1000) -> Any:
        return lambda group: dist.reduce(torch.ones(numel), root, group=group)

    def gather_of(numel: int) -> Any:
        return lambda group: dist.all_gather_into_tensor(
            torch.empty(numel * world_size), torch.ones(numel), group=group
        )

    def scatter_of(numel: int) -> Any:
        return lambda group: dist.reduce_scatter_tensor(
            torch.empty(numel), torch.ones(numel * world_size), group=group
        )

    def in_turn(*calls: Any) -> Any:
        def call(group: Any) -> None:
            for each in calls:
                each(group)

        return call

    def barrier(group: Any) -> None:
        dist.barrier(group)

    def more_for_the_next(group: Any) -> None:
        inputs = [4] * world_size
        inputs[(dist.get_rank() + 1) % world_size] = 5
        _split(outputs=[4] * world_size, inputs=inputs)(group)

    def with_a_message_under_way(then: Any) -> Any:
        """Far more than a link holds goes round; what has not come when it ends stays away."""

        def call(group: Any) -> None:
            rank, numel = dist.get_rank(), 8 << 20
            arriving = torch.empty(numel)
            works = [
                dist.irecv(arriving, (rank - 1) % world_size, group=group),
                dist.isend(torch.ones(numel), (rank + 1) % world_size, group=group),
            ]
            try:
                then(group)
            finally:  # each operation leaves its own tensor alone when its own error is raised
                for work in works:
                    assert work is not None
                    with contextlib.suppress(dist.DistError):
                        work.wait()
                arriving.fill_(-1.0)
                assert float(arriving.min()) == float(arriving.max()) == -1.0

        return call

    even = [4] * world_size
    return {
        "shape, small": (reduce_of(10), reduce_of(11)),
        "shape, large": (reduce_of(1 << 20), reduce_of((1 << 20) + 1)),
        "shape, small against large": (reduce_of(1), reduce_of(1 << 20)),
        "dtype, one size": (reduce_of(10, torch.int32), reduce_of(10)),
        "dtype, large": (reduce_of(1 << 19, torch.float64), reduce_of(1 << 20)),
        "reduce op": (reduce_of(10, op=dist.ReduceOp.MAX), reduce_of(10)),
        "reduce op, large": (reduce_of(1 << 20, op=dist.ReduceOp.MAX), reduce_of(1 << 20)),
        "root of broadcast": (broadcast(1), broadcast(0)),
        "root of reduce": (reduce_to(1), reduce_to(0)),
        "root, large": (broadcast(1, 1 << 20), broadcast(0, 1 << 20)),
        "all_reduce against broadcast": (reduce_of(1000), broadcast(0)),
        "reduce against broadcast": (reduce_to(0), broadcast(0)),
        "all_gather against reduce_scatter": (gather_of(1000), scatter_of(1000)),
        "barrier against all_reduce": (barrier, reduce_of(10)),
        "all_gather, other shapes": (gather_of(1001), gather_of(1000)),
        "order": (in_turn(reduce_of(10), broadcast(0)), in_turn(broadcast(0), reduce_of(10))),
        "order, large": (
            in_turn(reduce_of(1 << 20), gather_of(1 << 18)),
            in_turn(gather_of(1 << 18), reduce_of(1 << 20)),
        ),
        "splits": (
            more_for_the_next,
            _split(outputs=even, inputs=even),
        ),
        "splits, large": (
            _split(outputs=[1 << 18] * world_size, inputs=[1 << 18] * world_size),
            _split(outputs=[1 << 17] * world_size, inputs=[1 << 17] * world_size),
        ),
        "beside a message": (
            with_a_message_under_way(reduce_of(10)),
            with_a_message_under_way(reduce_of(11)),
        ),
        "one rank alone goes on": (
            in_turn(reduce_of(10), barrier),
            in_turn(reduce_of(11), barrier),
        ),
    }


def run_mismatches(
    rank: int, world_size: int, cases: list[tuple[str, int]], repeats: int
) -> list[dict[str, Any]]:
    """Every (mismatch, victim), each in a group of its own; what this rank met."""
    table = mismatches(world_size)
    found = []
    for name, victim in cases * repeats:
        mine, others = table[name]
        group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=20))
        dist.barrier()  # of the default group: who is late to make this one would fail in that
        began_s = time.monotonic()
        met: dict[str, Any] = {"case": name, "victim": victim, "error": None}
        try:
            (mine if rank == victim else others)(group)
            # Who only sends ends before anybody can know, and may enter thousands of barriers in
            # shared memory before its other threads get a core: the error comes, and sticks.
            while time.monotonic() - began_s < MISMATCH_S:
                dist.barrier(group)
        except Exception as error:
            met["error"] = describe_exception(error)
        met["s"] = time.monotonic() - began_s
        found.append(met)
        dist.all_reduce(torch.ones(1))  # the default group is as good as ever
        dist.destroy_process_group(group)
    return found
