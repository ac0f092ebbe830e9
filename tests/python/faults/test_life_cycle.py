"""How groups begin and end: each bounded, none leaves a trace behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import fork_and_wait, open_files
from ranks import describe_exception, mark, run_ranks, start_ranks
from time_bound import assert_within

import pycomm

pytestmark = [pytest.mark.needs_native, pytest.mark.faults, pytest.mark.ci]

MIB = 1 << 20


def traces() -> dict[str, int]:
    """What a process holds that a group could have left behind."""
    gc.collect()
    fds = open_files().values()
    return {
        "files": len(fds),
        "threads": len(os.listdir("/proc/self/task")),
        "shared memory": sum("pycomm" in fd or "memfd" in fd for fd in fds)
        + len(list(Path("/dev/shm").glob(f"pycomm*-{os.getpid()}-*"))),  # others have some, too
        "children": len(Path("/proc/self/task", str(os.getpid()), "children").read_text().split()),
    }


def grown(before: dict[str, int]) -> dict[str, int]:
    """What there is more than before. What ends on its own has some seconds for it.

    A thread that was joined is listed a moment longer, and so is a file that another one closes.
    """
    settled_s = time.monotonic() + 10
    while True:
        now = traces()
        more = {name: now[name] - before[name] for name in now}
        if max(more.values()) <= 0 or time.monotonic() > settled_s:
            return more
        time.sleep(0.01)


# --- fork -----------------------------------------------------------------------------------------


def has_a_child_and_dies(rank: int, world_size: int) -> Any:
    tensor = torch.ones(MIB)
    dist.all_reduce(tensor)
    if rank == 1:
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            os.setsid()
            sockets = [fd for fd, name in open_files().items() if "socket" in name]
            os.write(write_fd, f"{sockets}".encode())
            signal.pause()
        os.close(write_fd)
        held = os.read(read_fd, 1000).decode()
        Path(os.environ["CHILD_FILE"]).write_text(f"{pid} {held}")
    mark("in the middle")
    try:
        while True:
            dist.all_reduce(tensor)
    except pycomm.errors.PycommError as error:
        return describe_exception(error)


@pytest.mark.alone
@pytest.mark.time_bound
@pytest.mark.ci
def test_a_forked_child_does_not_keep_its_dead_parent_alive(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    with start_ranks(3, has_a_child_and_dies, env={"CHILD_FILE": str(child_file)}) as running:
        try:
            for rank in range(3):
                running.wait_for_mark(rank, "in the middle")
            killed_s = running.kill(1)
            results = running.collect(60)
        finally:
            pid, _, held = child_file.read_text().partition(" ")
            os.kill(int(pid), signal.SIGKILL)
    assert held == "[]", "the child still has sockets"
    for result in results:
        if result.rank != 1:
            error = result.value
            assert error.code == "PEER_DEAD" and error.record["peer"] == 1, results.describe()
    for result in results:
        if result.rank != 1:
            # By the heartbeat it would be PEER_UNRESPONSIVE after 3 s; a quiet machine needs 50 ms.
            assert_within(result.value.monotonic_s - killed_s, 2.5, result.value.text)


def exchange(rank: int, world_size: int) -> None:
    """Through links, and not where the ranks of a host meet."""
    got = torch.empty(world_size * 300_000)
    dist.all_to_all_single(got, torch.full((world_size * 300_000,), float(rank)))
    assert [float(part.max()) for part in got.chunk(world_size)] == list(range(world_size))


def use_in_a_child(rank: int, world_size: int, store: str) -> int:
    dist.all_reduce(torch.ones(3))
    exchange(rank, world_size)
    outstanding = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
    message = dist.irecv(torch.ones(3), src=1) if rank == 0 else None

    def raises_forked() -> None:
        for use in (lambda: dist.all_reduce(torch.ones(3)), dist.barrier):
            with pytest.raises(pycomm.errors.ForkedError, match="child of fork"):
                use()
        if outstanding is not None:
            with pytest.raises(pycomm.errors.ForkedError):
                outstanding.wait()
            for pending in (outstanding, message):
                with pytest.raises(pycomm.errors.ForkedError):
                    pending.is_completed()
        dist.destroy_process_group()  # of the copy: the parent's goes on
        # A group of the child's own, with the other rank's child.
        dist.init_process_group(
            "pycomm", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        tensor = torch.full((5,), rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 5
        exchange(rank, world_size)
        dist.destroy_process_group()

    code = fork_and_wait(raises_forked)
    # And the parent's group is as it was.
    if outstanding is None:
        dist.all_reduce(torch.ones(3))
        dist.send(torch.ones(3), dst=0)
    else:
        outstanding.wait()
        message.wait()
    exchange(rank, world_size)
    dist.barrier()
    return code


def test_a_child_of_fork_is_refused_and_may_make_a_group_of_its_own(tmp_path: Path) -> None:
    results = run_ranks(2, use_in_a_child, args=(str(tmp_path / "childrens store"),))
    assert results.values() == [0, 0], results.describe()


# --- ending ---------------------------------------------------------------------------------------


def end_with_work(rank: int, world_size: int, how: str) -> tuple[str, float]:
    """Rank 0 ends a group in which an operation can never finish; who waits for it is released."""
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=60))
    dist.barrier(group=group)
    # Rank 1 never enters.
    options = dist.AllreduceOptions()
    if how == "timeout":
        options.timeout = timedelta(seconds=2)
    work = group.allreduce([torch.ones(MIB)], options) if rank != 1 else None
    dist.barrier()
    began_s = time.monotonic()
    if rank == 0 and how == "abort":
        pycomm._group.creation.native_backend(group).abort()
    if rank == 0 and how == "destroy":
        dist.destroy_process_group(group)
    if work is None:
        while pycomm.last_error(group) is None and time.monotonic() - began_s < 30:
            time.sleep(0.001)
        record = pycomm.last_error(group) or {}
        return str(record.get("code")), time.monotonic() - began_s
    try:
        work.wait()
    except pycomm.errors.PycommError as error:
        return error.code, time.monotonic() - began_s
    return "nothing raised", 0.0


@pytest.mark.time_bound
@pytest.mark.parametrize(
    ("how", "codes", "limit_s"),
    [
        ("abort", {"ABORTED"}, 10.0),
        ("destroy", {"SHUT_DOWN", "PEER_LEFT"}, 10.0),
        ("timeout", {"TIMEOUT"}, 15.0),
    ],
)
def test_ending_releases_everybody(how: str, codes: set[str], limit_s: float) -> None:
    ended = run_ranks(3, end_with_work, args=(how,)).values()
    assert {code for code, _ in ended} <= codes
    assert_within(max(took_s for _, took_s in ended), limit_s)


def destroy_again(rank: int, world_size: int) -> list[str]:
    group = dist.new_group()
    backend = pycomm._group.creation.native_backend(group)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    seen = []
    dist.destroy_process_group(group)
    for _ in range(3):
        backend.shutdown()
        backend.abort()
    for use in (
        lambda: backend.allreduce([tensor]).wait(),
        lambda: backend.barrier().wait(),
        lambda: dist.all_reduce(tensor, group=group),
        lambda: dist.destroy_process_group(group),
    ):
        try:
            use()
            seen.append("nothing raised")
        except Exception as error:
            seen.append(type(error).__name__)
    dist.barrier()
    return seen


def test_destroying_twice_and_using_what_is_destroyed() -> None:
    for seen in run_ranks(3, destroy_again).values():
        assert seen[:2] == ["ShutDownError", "ShutDownError"]
        assert "nothing raised" not in seen[2:], "torch's own checks"


# --- dropping -------------------------------------------------------------------------------------


class Knot:
    """A cycle: only the collector frees it, at any time and on any thread."""

    def __init__(self, *held: object) -> None:
        self.held = held
        self.me = self


def drop_in_any_order(rank: int, world_size: int, rounds: int) -> dict[str, int]:
    def one_round(order: int) -> None:
        group = dist.new_group()
        dist.barrier()  # a rank that still joins when another one leaves gets that as its error
        backend = pycomm._group.creation.native_backend(group)
        works = [
            dist.all_reduce(torch.ones(1 + 5000 * k), group=group, async_op=True) for k in range(4)
        ]
        done = threading.Event()
        futures = [work.get_future() for work in works]
        chained = futures[-1].then(lambda future: (done.set(), future.value())[1])
        if order == 0:  # the group first, its work and futures later
            dist.destroy_process_group(group)
            del group, backend
            gc.collect()
            del works, futures
        elif order == 1:  # works dropped in a callback
            futures[0].then(lambda _: works.clear())
            chained.wait()
            del futures
            dist.destroy_process_group(group)
        elif order == 2:  # all in one knot
            Knot(group, backend, works, futures, chained)
            dist.destroy_process_group(group)
            del group, backend, works, futures, chained
            gc.collect()
        else:  # nothing waited for, the group last
            del works, futures, chained
            dist.destroy_process_group(group)
        assert done.wait(20), "a callback has not run"

    for order in range(4):  # warm
        one_round(order)
    dist.barrier()
    before = traces()
    for attempt in range(rounds):
        one_round(attempt % 4)
        dist.barrier()
    return grown(before)


def test_groups_works_and_futures_are_dropped_in_any_order(repeats: int) -> None:
    for left in run_ranks(2, drop_in_any_order, args=(20 * repeats,), timeout_s=100).values():
        # Callback threads are kept for the process's life; they follow the peak of callbacks, and
        # not the rounds.
        assert left.pop("threads") <= 8
        assert max(left.values()) <= 0, left  # fewer: what the first rounds made was still closing


# --- many -----------------------------------------------------------------------------------------


def make_many_groups(rank: int, world_size: int, count: int) -> dict[str, int]:
    def one() -> None:
        group = dist.new_group()
        tensor = torch.ones(10)
        dist.all_reduce(tensor, group=group)
        assert tensor[0] == world_size
        dist.destroy_process_group(group)

    one()
    dist.barrier()
    before = traces()
    for _ in range(count):
        one()
    dist.barrier()
    return grown(before)


def test_a_hundred_groups_leave_nothing(repeats: int) -> None:
    results = run_ranks(2, make_many_groups, args=(50 * repeats,), timeout_s=110)
    for left in results.values():
        assert max(left.values()) <= 0, left  # fewer: what the start made was still closing


def hammer(rank: int, world_size: int, rounds: int) -> list[str]:
    groups = [dist.new_group() for _ in range(4)]
    wrong: list[str] = []
    threads = [
        threading.Thread(target=one_of_four, args=(group, rounds, rank, wrong, which))
        for which, group in enumerate(groups)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        dist.destroy_process_group(group)
    return wrong


def one_of_four(group: Any, rounds: int, rank: int, wrong: list[str], which: int) -> None:
    """Threads of one group race for its counter: equal operations, so that any order is right."""
    for step in range(rounds):
        tensor = torch.full((1 + 997 * which,), float(rank + 1))
        dist.all_reduce(tensor, group=group)
        if not torch.equal(tensor, torch.full_like(tensor, 3.0)):
            wrong.append(f"group {which}, step {step}")


def test_four_threads_on_each_of_four_groups(repeats: int) -> None:
    assert run_ranks(2, hammer, args=(15 * repeats,), timeout_s=110).values() == [[], []]


# --- resources ------------------------------------------------------------------------------------


@contextlib.contextmanager
def room_for_files(count: int) -> Iterator[None]:
    """As if no more than ``count`` further descriptors were allowed."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(open_files())
    hoard = []
    for fd in range(highest):  # fill the gaps below
        try:
            os.fstat(fd)
        except OSError:
            hoard.append(os.dup2(0, fd))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in hoard:
            os.close(fd)


def run_out_of_files(rank: int, world_size: int, most: int) -> list[tuple[str, str]]:
    """Rank 0 has ever more room for a new group, rank 1 all it wants."""
    dist.barrier()
    seen = []
    for count in range(most):
        with room_for_files(count) if rank == 0 else contextlib.nullcontext():
            try:
                group = dist.new_group(timeout=timedelta(seconds=20))
                tensor = torch.ones(1000)
                dist.all_reduce(tensor, group=group)
                seen.append(("done", str(float(tensor[0]))))
                dist.destroy_process_group(group)
            except pycomm.errors.PycommError as error:
                seen.append((error.code, str(error)))
        dist.barrier()
    return seen


@pytest.mark.ci
def test_too_many_files_is_said_by_all_ranks_whenever_it_strikes() -> None:
    seen = run_ranks(2, run_out_of_files, args=(24,), init="tcp", timeout_s=110).values()
    codes = [[code for code, _ in mine] for mine in seen]
    assert codes[0] == codes[1], seen
    assert set(codes[0]) == {"TOO_MANY_FILES", "done"}, seen
    assert codes[0][0] == "TOO_MANY_FILES" and codes[0][-1] == "done"
    for code, text in seen[1]:
        if code == "TOO_MANY_FILES":
            for part in ("peer=0", "may open no more than", "takes up to"):
                assert part in text, text


def run_out_of_files_in_the_store(rank: int, world_size: int) -> tuple[str, str]:
    """The store is a file, which torch opens at every call."""
    dist.barrier()
    with room_for_files(0) if rank == 0 else contextlib.nullcontext():
        try:
            dist.new_group(timeout=timedelta(seconds=3))
        except pycomm.errors.PycommError as error:
            return error.code, str(error)
    return "nothing raised", ""


def test_too_many_files_inside_the_store() -> None:
    results = run_ranks(2, run_out_of_files_in_the_store, init="file", destroy=False)
    (code, text), (other_code, _) = results.values()
    assert code == "TOO_MANY_FILES", text
    assert "may open no more than" in text and "ulimit -n" in text
    assert other_code == "RENDEZVOUS_TIMEOUT"  # who cannot open the store can say nothing in it
