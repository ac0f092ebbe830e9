"""What a process does with an agreement on steps besides steps: it ends, forks, has a secret.

Whatever the state of the agreement is, the process ends by itself, soon, and with its own exit
code; and nothing grows with the number of epochs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from elastic_rig import announce, await_ranks
from elastic_steps import Plan, open_steps, trains
from processes import open_files, thread_names
from ranks import mark, start_ranks
from test_step_agreement import SHARED, TCP, kill_after, survivors
from time_bound import assert_within

import pycomm
from pycomm._group import secrets

pytestmark = [pytest.mark.needs_native, pytest.mark.faults, pytest.mark.ci, pytest.mark.time_bound]

kept: list[Any] = []
"""Until the interpreter ends."""

ENDS_S = 6.0
"""An interpreter with torch ends, and closes what is open still."""
CLOSES_S = 4.0
"""AgreementDriver::close() takes less than two seconds. No interpreter ends meanwhile."""


def in_thread(body: Any) -> None:
    """Runs something that waits for long, on a daemon thread, and returns while it waits."""
    entered = threading.Event()

    def run() -> None:
        entered.set()
        with contextlib.suppress(Exception):  # of the end
            body()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    entered.wait()
    time.sleep(0.3)
    assert thread.is_alive()


def step(own: Any, steps: Any) -> None:
    steps.begin()
    dist.all_reduce(torch.ones(100), group=own)
    assert not steps.end(None)


def ends(rank: int, world_size: int, how: str) -> float:
    """How long it took to close, in seconds."""
    plan = Plan(min_ranks=3 if how == "in begin" else 1, quorum_wait_s=60)
    own, steps = open_steps(world_size, plan)
    kept.extend([own, steps])
    step(own, steps)
    began_s = time.monotonic()
    took_s = 0.0
    if how == "destroyed":
        dist.destroy_process_group()
        took_s = time.monotonic() - began_s
        mark("ends")
        with pytest.raises(pycomm.errors.ShutDownError):
            steps.begin()
    elif how == "deleted":
        kept.clear()
        del own, steps
        gc.collect()
        took_s = time.monotonic() - began_s
        mark("ends")
    elif how == "twice":
        steps.close()
        took_s = time.monotonic() - began_s
        mark("ends")
        steps.close()
        with pytest.raises(pycomm.errors.ShutDownError):
            steps.begin()
    elif how == "in begin":
        mark("waits")
        with contextlib.suppress(pycomm.errors.PeerError):
            while True:
                dist.all_reduce(torch.ones(100), group=own)

        time.sleep(1.0)  # the agreement's thread reads that, too: before, a step would begin
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
    return took_s


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
    fresh = how in ("open", "in a step")  # with all exit handlers of libraries, which take longer
    with start_ranks(3, ends, args=(how,), destroy=False, fresh=fresh) as running:
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
    if how in ("destroyed", "deleted", "twice"):
        for result in results:
            assert result.value > 0, result.describe()
            assert_within(result.value, CLOSES_S, results.describe())
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
    return trains(rank, world_size, Plan(steps=40, held=((1, 25),)))


def forks_in_the_middle(rank: int, world_size: int) -> Any:
    if rank == 1:

        def fork() -> None:
            time.sleep(0.05)
            if os.fork() == 0:
                time.sleep(3.0)
                os._exit(0)

        threading.Thread(target=fork, daemon=True).start()
    return trains(rank, world_size, Plan(steps=40, between_s=0.005, held=((1, 25),)))


@pytest.mark.parametrize("target", [forks_and_dies, forks_in_the_middle])
def test_a_rank_has_ended_although_its_child_lives(target: Any) -> None:
    with start_ranks(2, target, destroy=False) as running:
        kill_after(running, 1, "step 15")
        results = running.collect(60)
    (value,) = survivors(results, [1])
    assert value["left"] == [0]


@pytest.mark.parametrize("options", rings.first_of([SHARED, TCP]), ids=["shm", "tcp"])
def test_with_a_secret(tmp_path: Path, options: dict[str, Any]) -> None:
    secrets.generate_file(str(tmp_path / "secret"))
    env = {"PYCOMM_SECRET_FILE": str(tmp_path / "secret"), "PYCOMM_SECURITY": "require"}
    plan = Plan(steps=40, options=options, held=((1, 20),))
    with start_ranks(3, trains, args=(plan,), destroy=False, env=env) as running:
        kill_after(running, 1, "step 10")
        results = running.collect(60)
    values = survivors(results, [1])
    assert values[0]["left"] == [0, 2]


# --- what is no death -----------------------------------------------------------------------------


def leaves(rank: int, world_size: int, leaver: int) -> tuple[list[int], int]:
    own, steps = open_steps(world_size, Plan())
    for number in range(20):
        if number == 10 and rank == leaver:
            break
        steps.begin()
        while True:
            raised: Exception | None = None
            total = torch.ones(100)
            try:
                dist.all_reduce(total, group=own)
            except Exception as caught:
                raised = caught
            if not steps.end(raised):
                break
    left = steps.members()
    steps.close()
    return left, int(total[0])


@pytest.mark.parametrize("leaver", rings.first_of([0, 1]))
@pytest.mark.parametrize("world_size", rings.first_of([3, 2]))
def test_a_rank_leaves_in_order(world_size: int, leaver: int) -> None:
    """No process has ended: its goodbye says that it votes no more."""
    with start_ranks(world_size, leaves, args=(leaver,), destroy=False) as running:
        results = running.collect(60).check()
    others = [rank for rank in range(world_size) if rank != leaver]
    for rank in others:
        assert results[rank].value == (others, len(others))


def differs(rank: int, world_size: int) -> list[str]:
    own, steps = open_steps(world_size, Plan())
    step(own, steps)
    steps.begin()
    raised: Exception | None = None
    try:
        dist.all_reduce(torch.ones(100 + rank), group=own)
    except Exception as caught:
        raised = caught
    assert isinstance(raised, pycomm.errors.CollectiveMismatchError)
    seen = []
    for call in (lambda: steps.end(raised), steps.begin, lambda: steps.end(None)):
        try:
            call()
        except pycomm.errors.PycommError as error:
            seen.append(str(error.code))
    steps.close()
    return seen


def test_an_error_of_the_program_is_raised_on_all_ranks() -> None:
    with start_ranks(3, differs, destroy=False) as running:
        results = running.collect(60).check()
    assert results.values() == [["COLLECTIVE_MISMATCH"] * 3] * 3


def raises(rank: int, world_size: int) -> None:
    """An exception of another kind, on one rank only, that no group has seen."""
    own, steps = open_steps(world_size, Plan())
    step(own, steps)
    steps.begin()
    with pytest.raises(ValueError, match="of the program"):
        steps.end(ValueError("of the program"))
    step(own, steps)
    steps.close()


def test_an_exception_that_is_no_failure_comes_back() -> None:
    with start_ranks(2, raises, destroy=False) as running:
        running.collect(60).check()


def raises_beside_a_death(rank: int, world_size: int) -> bool:
    own, steps = open_steps(world_size, Plan())
    step(own, steps)
    steps.begin()
    mark("waits")
    if rank == 2:
        time.sleep(100)
    with pytest.raises(pycomm.errors.PeerError) as caught:
        dist.all_reduce(torch.ones(100), group=own)
    if rank == 1:
        with pytest.raises(ValueError, match="of the program"):
            steps.end(ValueError("of the program"))
    again: bool = steps.end(caught.value)
    steps.close()
    return again


def test_a_death_hides_no_exception_of_the_program() -> None:
    with start_ranks(3, raises_beside_a_death, destroy=False) as running:
        for rank in range(3):
            running.wait_for_mark(rank, "waits")
        running.kill(2)
        results = running.collect(60)
    for rank in (0, 1):
        assert results[rank].ok, results.describe()
        assert results[rank].value is True, results.describe()


def is_left_alone(rank: int, world_size: int) -> None:
    own, steps = open_steps(world_size, Plan(min_ranks=2, quorum_wait_s=0.3))
    step(own, steps)
    if rank == 1:
        await_ranks("closed", [0])
        time.sleep(1.5)
        with pytest.raises(pycomm.errors.QuorumLostError, match="too few ranks"):
            steps.begin()
    steps.close()
    announce("closed", rank)


def test_the_last_ranks_to_end_warn_of_nothing() -> None:
    with start_ranks(2, is_left_alone, destroy=False) as running:
        results = running.collect(60).check()
    assert "WARN" not in results[1].stderr, results.describe()


def is_interrupted(rank: int, world_size: int) -> float:
    own, steps = open_steps(world_size, Plan())
    step(own, steps)
    if rank == 1:
        mark("waits")
        await_ranks("closed", [0])
        steps.close()
        return 0.0
    steps.begin()
    mark("waits")
    with pytest.raises(KeyboardInterrupt):
        steps.end(None)  # the other one does not come
    for call in (steps.begin, lambda: steps.end(None)):
        with pytest.raises(pycomm.errors.AbortedError, match="from a checkpoint"):
            call()
    began_s = time.monotonic()
    steps.close()
    took_s = time.monotonic() - began_s
    announce("closed", rank)
    return took_s


def test_a_signal_interrupts_the_commit_round() -> None:
    with start_ranks(2, is_interrupted, destroy=False) as running:
        for rank in (0, 1):
            running.wait_for_mark(rank, "waits")
        running.wait_until_asleep(0)
        running.kill(0, signal.SIGINT)
        results = running.collect(60)
    assert [result.timed_out for result in results] == [False, False], results.describe()
    assert results[0].value is not None, results.describe()
    assert_within(results[0].value, 3.0)


def forgets_no_verdict(rank: int, world_size: int) -> list[str]:
    """Rank 2 dies in step 2, which all have finished. Rank 1 is interrupted before it knows."""
    own, steps = open_steps(world_size, Plan(options={"heartbeat_timeout": 60.0}))
    step(own, steps)
    steps.begin()
    dist.all_reduce(torch.ones(100), group=own)
    if rank == 2:
        mark("waits")
        time.sleep(100)
    mark("waits")
    if rank == 0:
        assert not steps.end(None)
        mark("counts")
        await_ranks("seen", [1])
        steps.close()
        return []
    with pytest.raises(KeyboardInterrupt):
        steps.end(None)
    mark("interrupted")
    seen = []
    deadline_s = time.monotonic() + 60
    while not (Path(os.environ["ELASTIC_MARKS"]) / "counts").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    for call in (steps.begin, lambda: steps.end(None), steps.begin):
        try:
            seen.append(str(call()))
        except pycomm.errors.PycommError as error:
            seen.append(str(error.code))
    announce("seen", rank)
    steps.close()
    return seen


def test_no_step_begins_before_the_last_one_is_delivered(tmp_path: Path) -> None:
    env = {"ELASTIC_MARKS": str(tmp_path)}
    with start_ranks(3, forgets_no_verdict, destroy=False, env=env) as running:
        for rank in range(3):
            running.wait_for_mark(rank, "waits")
        for rank in (0, 1):
            running.wait_until_asleep(rank)
        running.kill(0, signal.SIGSTOP)  # for less than heartbeat_timeout: nothing is decided
        running.kill(2)
        time.sleep(0.3)
        running.kill(1, signal.SIGINT)
        running.wait_for_mark(1, "interrupted")
        running.kill(0, signal.SIGCONT)
        running.wait_for_mark(0, "counts")
        (tmp_path / "counts").touch()
        results = running.collect(60)
    for rank in (0, 1):
        assert results[rank].ok, results.describe()
    assert results[1].value == ["ABORTED", "False", "True"], results.describe()


def dies_early(rank: int, world_size: int, when: str) -> str:
    c10d: Any = dist.distributed_c10d
    if rank == 1 and when == "before":
        plain = c10d.all_gather_object

        def gather(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        dist.all_gather_object = gather
    elif rank == 1:
        pycomm._native.loader.native.step_agreement = lambda *args, **kwargs: os.kill(  # type: ignore[attr-defined]
            os.getpid(), signal.SIGKILL
        )
    try:
        open_steps(world_size, Plan())
    except pycomm.errors.PycommError as error:
        return str(error.code)
    return "none"


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_death_while_it_is_made_is_raised(when: str) -> None:
    with start_ranks(3, dies_early, args=(when,), destroy=False) as running:
        results = running.collect(60)
    for rank in (0, 2):
        assert results[rank].ok, results.describe()
        assert results[rank].value == "PEER_DEAD", results.describe()


# --- a stop among deaths --------------------------------------------------------------------------


@pytest.mark.parametrize("turn", rings.first_of(range(3)))
def test_a_rank_is_stopped_while_the_others_agree(turn: int) -> None:
    """Before, in or after the meeting of the next epoch, which cannot wait for it for ever."""
    plan = Plan(steps=40, options={"heartbeat_timeout": 1.0}, held=((0, 20), (2, 20)))
    with start_ranks(4, trains, args=(plan,), destroy=False) as running:
        kill_after(running, 0, "step 10")
        time.sleep(0.004 + 0.012 * turn + 0.01 * random.random())
        stopped_s = running.kill(2, signal.SIGSTOP)
        for rank in (1, 3):
            running.wait_for_mark(rank, "step 39", 60)
        took_s = time.monotonic() - stopped_s
        running.kill(2, signal.SIGCONT)
        results = running.collect(60)
    values = [results[rank].value for rank in (1, 3)]
    for value in values:
        assert value["error"] is None, results.describe()
        assert value["members"] == values[0]["members"]
        assert value["left"] == [1, 3]
    error = results[2].value["error"]
    assert error is not None and error.is_a("LeftBehindError"), results.describe()
    assert_within(took_s, 12.0, results.describe())


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


def held_here() -> dict[str, int]:
    return {"files": len(open_files()), "threads": len(thread_names()), "rss": rss_nbytes()}


def has_grown(before: dict[str, int], after: dict[str, int]) -> bool:
    return (
        after["files"] > before["files"] + 4
        or after["threads"] > before["threads"] + 1
        or after["rss"] > before["rss"] + (2 << 20)  # 75 open groups have 7 MiB
    )


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
            changes += 1
        assert float(total[0]) == world_size
        if number in (epochs // 4, epochs - 1):
            time.sleep(0.2)  # what is closed behind the step
            give_up_s = time.monotonic() + 20
            while seen and has_grown(seen[0], held_here()) and time.monotonic() < give_up_s:
                time.sleep(0.05)
            seen.append(held_here())
    assert steps.members() == list(range(world_size))
    steps.close()
    return {"seen": seen, "changes": changes}


def test_nothing_grows_with_the_epochs() -> None:
    with start_ranks(2, goes_through_epochs, args=(100,), destroy=False) as running:
        results = running.collect(200).check()
    for result in results:
        before, after = result.value["seen"]
        assert not has_grown(before, after), result.value
        assert result.value["changes"] >= 90, result.value
