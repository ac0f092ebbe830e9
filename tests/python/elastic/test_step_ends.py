"""What a process does with an agreement on steps besides steps: it ends, forks, has a secret.

Whatever the state of the agreement is, the process ends by itself, soon, and with its own exit
code; and nothing grows with the number of epochs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_steps import Plan, open_steps, trains
from processes import open_files, thread_names
from ranks import mark, start_ranks
from test_step_agreement import SHARED, TCP, kill_after, survivors
from time_bound import assert_within

import pycomm
from pycomm import _secret

pytestmark = [pytest.mark.needs_native, pytest.mark.faults]

kept: list[Any] = []
"""Until the interpreter ends."""

ENDS_S = 6.0


def in_thread(body: Any) -> None:
    """Runs something that waits for long, on a daemon thread, and returns when it waits."""
    entered = threading.Event()

    def run() -> None:
        entered.set()
        with contextlib.suppress(Exception):
            body()

    threading.Thread(target=run, daemon=True).start()
    entered.wait()
    time.sleep(0.3)


def step(own: Any, steps: Any) -> None:
    steps.begin()
    dist.all_reduce(torch.ones(100), group=own)
    assert not steps.end(None)


def ends(rank: int, world_size: int, how: str) -> None:
    plan = Plan(min_ranks=3 if how == "in begin" else 1, quorum_wait_s=60)
    own, steps = open_steps(world_size, plan)
    kept.extend([own, steps])
    step(own, steps)
    if how == "destroyed":
        mark("ends")
        dist.destroy_process_group()
        with pytest.raises(pycomm.errors.ShutDownError):
            steps.begin()
    elif how == "deleted":
        mark("ends")
        kept.clear()
        del own, steps
        gc.collect()
    elif how == "twice":
        steps.close()
        mark("ends")
        steps.close()
        with pytest.raises(pycomm.errors.ShutDownError):
            steps.begin()
    elif how == "in begin":
        mark("waits")
        with contextlib.suppress(pycomm.errors.PeerError):
            while True:
                dist.all_reduce(torch.ones(100), group=own)
        in_thread(steps.begin)
        mark("ends")
    elif how == "in end":
        steps.begin()
        if rank == 0:
            time.sleep(1.0)
        else:
            in_thread(lambda: steps.end(None))
        mark("ends")
        sys.exit(0)  # before the rig asks whether the group is idle
    elif how == "in the agreement":
        mark("waits")
        with contextlib.suppress(pycomm.errors.PeerError):
            while True:
                dist.all_reduce(torch.ones(100), group=own)
        mark("ends")
    elif how == "in a step":
        steps.begin()
        if rank == 0:
            kept.append(dist.all_reduce(torch.ones(1 << 20), group=own, async_op=True))
        mark("ends")
        sys.exit(3)
    else:
        mark("ends")


@pytest.mark.parametrize(
    "how",
    [
        "open",
        "destroyed",
        "deleted",
        "twice",
        "in begin",
        "in end",
        "in the agreement",
        "in a step",
    ],
)
def test_the_process_ends(how: str) -> None:
    killed = how in ("in begin", "in the agreement")
    with start_ranks(3, ends, args=(how,), destroy=False) as running:
        if killed:
            kill_after(running, 2, "waits")
        for rank in range(2 if killed else 3):
            running.wait_for_mark(rank, "ends")
        began_s = time.monotonic()
        results = running.collect(30)
        took_s = time.monotonic() - began_s
    for result in results[: 2 if killed else 3]:
        assert not result.timed_out, result.describe()
        assert result.exit_code == (3 if how == "in a step" else 0), result.describe()
        assert result.error is None, result.describe()
    assert_within(took_s, ENDS_S, results.describe())


def forks(rank: int, world_size: int) -> None:
    own, steps = open_steps(world_size, Plan())
    step(own, steps)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with pytest.raises(pycomm.errors.ForkedError):
                steps.begin()
            with pytest.raises(pycomm.errors.ForkedError):
                steps.end(ValueError("it has raised"))
            steps.close()
            del own, steps
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    step(own, steps)
    steps.close()


def test_a_child_of_fork_has_no_part_in_it() -> None:
    with start_ranks(2, forks, destroy=False) as running:
        running.collect(60).check()


def forks_and_dies(rank: int, world_size: int) -> Any:
    if rank == 1 and os.fork() == 0:
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.02)
        time.sleep(3.0)
        os._exit(0)
    return trains(rank, world_size, Plan(steps=40))


def forks_in_the_middle(rank: int, world_size: int) -> Any:
    if rank == 1:

        def fork() -> None:
            time.sleep(0.05)
            if os.fork() == 0:
                time.sleep(3.0)
                os._exit(0)

        threading.Thread(target=fork, daemon=True).start()
    return trains(rank, world_size, Plan(steps=40, between_s=0.005))


@pytest.mark.parametrize("target", [forks_and_dies, forks_in_the_middle])
def test_a_rank_has_ended_although_its_child_lives(target: Any) -> None:
    with start_ranks(2, target, destroy=False) as running:
        kill_after(running, 1, "step 15")
        results = running.collect(60)
    (value,) = survivors(results, [1])
    assert value["left"] == [0]


@pytest.mark.parametrize("options", [SHARED, TCP], ids=["shm", "tcp"])
def test_with_a_secret(tmp_path: Path, options: dict[str, Any]) -> None:
    _secret.generate_file(str(tmp_path / "secret"))
    env = {"PYCOMM_SECRET_FILE": str(tmp_path / "secret"), "PYCOMM_SECURITY": "require"}
    plan = Plan(steps=40, options=options)
    with start_ranks(3, trains, args=(plan,), destroy=False, env=env) as running:
        kill_after(running, 1, "step 10")
        results = running.collect(60)
    values = survivors(results, [1])
    assert values[0]["left"] == [0, 2]


# --- many epochs ----------------------------------------------------------------------------------


def cut_connections() -> None:
    """Ends this process's TCP connections, as a firewall could. Nobody is dead."""
    for fd, what in open_files().items():
        if what.startswith("socket:"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
                if copy.family == socket.AF_INET and copy.getpeername():
                    copy.shutdown(socket.SHUT_RDWR)


def rss_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def goes_through_epochs(rank: int, world_size: int, epochs: int) -> dict[str, Any]:
    own, steps = open_steps(world_size, Plan(options=TCP))
    seen: list[dict[str, int]] = []
    changes = 0
    for number in range(epochs):
        changes += steps.begin()
        if number % world_size == rank:
            cut_connections()
        while True:
            raised: Exception | None = None
            total = torch.ones(1 << 14)
            try:
                dist.all_reduce(total, group=own)
            except Exception as caught:
                raised = caught
            if not steps.end(raised):
                break
        assert float(total[0]) == world_size
        if number in (epochs // 4, epochs - 1):
            time.sleep(0.2)  # what is closed behind the step
            seen.append(
                {
                    "files": len(open_files()),
                    "threads": len(thread_names()),
                    "rss": rss_nbytes(),
                }
            )
    assert steps.members() == list(range(world_size))
    steps.close()
    return {"seen": seen, "changes": changes}


def test_nothing_grows_with_the_epochs() -> None:
    with start_ranks(2, goes_through_epochs, args=(100,), destroy=False) as running:
        results = running.collect(200).check()
    for result in results:
        before, after = result.value["seen"]
        assert after["files"] <= before["files"] + 4, result.value
        assert after["threads"] <= before["threads"] + 1, result.value
        assert after["rss"] <= before["rss"] + (16 << 20), result.value
