"""Groups whose members change: who meets whom, and what is said when somebody does not come.

The cases are those of torch's test_c10d_fault_tolerance.py, in our words and on any torch, and the
ones that its contract leaves open: who has ended, who never comes, who has another list.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import fault_ranks
import pytest
import rings
import torch
import torch.distributed as dist
from processes import open_files
from ranks import RankResults, describe_exception, mark, run_ranks, start_ranks
from thread_state import state_in
from time_bound import assert_within

import pycomm
from pycomm._group.creation import group_options, native_backend

pytestmark = [pytest.mark.needs_native, pytest.mark.faults, pytest.mark.ci]

WORLD = 3
PATIENCE_S = 30.0


class Member:
    """This process, and the file by which the test's processes give each other handles."""

    def __init__(self, rank: int, world_size: int, path: str, **options: Any) -> None:
        self.rank, self.world_size = rank, world_size
        self.store = dist.FileStore(path, world_size)
        dist.init_process_group(
            "pycomm",
            store=dist.HashStore(),  # nobody else's: nothing may need it
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=PATIENCE_S),
            pg_options=pycomm.Reconfigurable(**options),
        )

    def handles(self, name: str) -> list[str]:
        """Of all processes, also of those that are in no group now."""
        self.store.set(f"{name}/{self.rank}", pycomm.reconfigure_handle())
        return [self.store.get(f"{name}/{rank}").decode() for rank in range(self.world_size)]

    def wait_for_all(self, name: str) -> None:
        self.store.set(f"{name}/{self.rank}", "1")
        for rank in range(self.world_size):
            self.store.get(f"{name}/{rank}")

    def all_together(self, uuid: int) -> list[str]:
        handles = self.handles(f"first {uuid}")
        pycomm.reconfigure(uuid, handles)
        assert (dist.get_rank(), dist.get_world_size()) == (self.rank, self.world_size)
        assert_sums()
        return handles


def assert_sums() -> None:
    """What the group is for works, small and large, and says who is who."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in (4, 1 << 18):
        tensor = torch.full((numel,), rank + 1.0)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((numel,), size * (size + 1) / 2))
    first = torch.full((4,), 42.0 if rank == 0 else 0.0)
    dist.broadcast(first, group_src=0)
    assert torch.equal(first, torch.full((4,), 42.0))
    assert dist.get_process_group_ranks(None) == list(range(size))


def outcome(body: Any) -> dict[str, Any]:
    """What a call has raised, and how long it took."""
    began_s = time.monotonic()
    try:
        body()
    except Exception as error:
        described = describe_exception(error)
        return {
            "type": type(error).__name__,
            "text": described.text,
            "record": described.record,
            "took_s": time.monotonic() - began_s,
        }
    return {"type": "", "took_s": time.monotonic() - began_s}


def run(world_size: int, target: Any, tmp_path: Path, **options: Any) -> RankResults:
    return run_ranks(world_size, target, init="none", args=(str(tmp_path / "met"),), **options)


# --- who meets whom -------------------------------------------------------------------------------


def meets(rank: int, world_size: int, path: str) -> None:
    member = Member(rank, world_size, path)
    assert pycomm.supports_reconfigure()
    before = pycomm.reconfigure_handle()
    assert len(before) <= 1024 and before.isascii() and before.startswith("pycomm1:")
    member.all_together(100)
    assert pycomm.reconfigure_handle() == before
    backend = native_backend()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    got = torch.zeros(4)
    sent = backend.send([torch.full((4,), rank + 1.0)], right, 0)
    backend.recv([got], left, 0).wait()
    sent.wait()
    assert torch.equal(got, torch.full((4,), left + 1.0))
    member.wait_for_all("done")


def test_members_meet_and_communicate(tmp_path: Path) -> None:
    run(WORLD, meets, tmp_path)


def shrinks(rank: int, world_size: int, path: str, excluded: int) -> int:
    member = Member(rank, world_size, path)
    handles = member.all_together(400)
    if rank != excluded:  # which just stops calling; its group lives
        pycomm.reconfigure(401, [each for at, each in enumerate(handles) if at != excluded])
        assert dist.get_world_size() == world_size - 1
        assert dist.get_rank() == rank - (rank > excluded)
        assert_sums()
    member.wait_for_all("done")
    dist.destroy_process_group()
    return 1


@pytest.mark.parametrize("excluded", rings.first_of([0, 1, 2]))
def test_a_live_group_shrinks(tmp_path: Path, excluded: int) -> None:
    run_ranks(WORLD, shrinks, init="none", args=(str(tmp_path / "met"), excluded), destroy=False)


def goes_down_and_up(rank: int, world_size: int, path: str) -> None:
    member = Member(rank, world_size, path)
    pycomm.reconfigure(600 + rank, [pycomm.reconfigure_handle()])
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert_sums()
    pycomm.reconfigure(603, member.handles("up"))
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    assert_sums()
    pycomm.reconfigure(604 + rank, {pycomm.reconfigure_handle()})
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    pycomm.reconfigure(610, list(reversed(member.handles("again"))))
    assert (dist.get_rank(), dist.get_world_size()) == (world_size - 1 - rank, world_size)
    assert_sums()
    member.wait_for_all("done")


def test_down_to_one_and_up_again(tmp_path: Path) -> None:
    run(WORLD, goes_down_and_up, tmp_path)


def meets_the_same_again(rank: int, world_size: int, path: str) -> None:
    member = Member(rank, world_size, path)
    member.all_together(800)
    pycomm.reconfigure(801, member.handles("again"))
    assert_sums()
    pycomm.reconfigure(802, set(member.handles("as a set")))
    assert_sums()
    member.wait_for_all("done")


def test_the_same_members_meet_again(tmp_path: Path) -> None:
    run(WORLD, meets_the_same_again, tmp_path)


def comes_later(rank: int, world_size: int, path: str) -> None:
    member = Member(rank, world_size, path)
    handles = member.handles("first")
    if rank == 0:
        pycomm.reconfigure(900, handles[:1])
    elif rank == 1:
        time.sleep(0.7)  # longer than the first member waits before it looks for the others
    pycomm.reconfigure(901, member.handles("all"))
    assert_sums()
    member.wait_for_all("done")


def test_some_meet_for_the_first_time(tmp_path: Path) -> None:
    run(WORLD, comes_later, tmp_path)


def splits_and_merges(rank: int, world_size: int, path: str) -> None:
    member = Member(rank, world_size, path)
    handles = member.handles("first")
    half = world_size // 2
    pycomm.reconfigure(1000 + (rank >= half), handles[:half] if rank < half else handles[half:])
    assert_sums()
    pycomm.reconfigure(1002, member.handles("all"))
    assert_sums()
    member.wait_for_all("done")


def test_two_groups_become_one(tmp_path: Path) -> None:
    run(4, splits_and_merges, tmp_path)


def goes_on_after_abort(rank: int, world_size: int, path: str) -> None:
    member = Member(rank, world_size, path)
    member.all_together(1200)
    called: list[int] = []
    pycomm.register_abort_hook(7, lambda: called.append(7))
    pycomm.register_abort_hook(8, lambda: called.append(8))
    pycomm.unregister_abort_hook(8)
    native_backend().abort()
    assert called == [7]
    failed = outcome(lambda: dist.all_reduce(torch.ones(4)))
    assert failed["type"] == "AbortedError", failed
    assert failed["record"]["epoch"] == 1200 and " epoch=1200 " in failed["text"], failed
    pycomm.reconfigure(1201, member.handles("again"))
    assert_sums()
    assert pycomm.last_error() is None and called == [7]
    member.wait_for_all("done")


def test_a_group_that_was_aborted_meets_again(tmp_path: Path) -> None:
    run(WORLD, goes_on_after_abort, tmp_path)


def goes_on_after_a_timeout(rank: int, world_size: int, path: str) -> dict[str, Any]:
    member = Member(rank, world_size, path)
    member.all_together(1300)
    hooked = threading.Event()
    pycomm.register_abort_hook(0, hooked.set)
    member.wait_for_all("hooked")
    seen: dict[str, Any] = {}
    if rank == 0:
        native_backend().set_timeout(timedelta(milliseconds=100))
        seen = outcome(lambda: dist.all_reduce(torch.ones(4)))
    assert hooked.wait(PATIENCE_S)
    native_backend().set_timeout(timedelta(seconds=PATIENCE_S))
    member.wait_for_all("failed")
    pycomm.reconfigure(1301, member.handles("again"))
    assert_sums()
    member.wait_for_all("done")
    return seen


def test_a_group_that_timed_out_meets_again(tmp_path: Path) -> None:
    results = run(WORLD, goes_on_after_a_timeout, tmp_path)
    assert results[0].value["type"] == "CollectiveTimeoutError"
    assert "timed out" in results[0].value["text"].lower()


def rejoins(rank: int, world_size: int, path: str, excluded: int) -> None:
    member = Member(rank, world_size, path)
    uuid = 1400
    handles = member.all_together(uuid)
    for turn in range(3):  # its old group has failed or lost its others meanwhile
        uuid += 1
        if rank != excluded:
            pycomm.reconfigure(uuid, [each for at, each in enumerate(handles) if at != excluded])
            assert_sums()
        uuid += 1
        handles = member.handles(f"again {turn}")
        pycomm.reconfigure(uuid, handles)
        assert dist.get_rank() == rank
        assert_sums()
    member.wait_for_all("done")


@pytest.mark.parametrize("excluded", rings.first_of([0, 1, 2]))
def test_a_member_leaves_and_comes_again(tmp_path: Path, excluded: int) -> None:
    run_ranks(WORLD, rejoins, init="none", args=(str(tmp_path / "met"), excluded))


# --- groups of new_group --------------------------------------------------------------------------


def all_handles(group: Any) -> list[str]:
    handles = [""] * dist.get_world_size()
    dist.all_gather_object(handles, pycomm.reconfigure_handle(group))
    return handles


def keeps_the_ranks_of_the_job(rank: int, world_size: int) -> None:
    group = dist.new_group(list(range(world_size)), pg_options=pycomm.Reconfigurable())
    handles = all_handles(group)
    for uuid, members in enumerate(([1, 2], [0, 1, 2], [2, 0])):
        if rank in members:
            pycomm.reconfigure(uuid, [handles[each] for each in members], group=group)
            assert dist.get_rank(group) == members.index(rank)
            assert dist.get_world_size(group) == len(members)
            assert dist.get_process_group_ranks(group) == members
            for src in members:
                tensor = torch.tensor([rank])
                dist.broadcast(tensor, src=src, group=group)
                assert tensor.item() == src
        dist.barrier()


def test_another_group_s_members_keep_their_ranks_of_the_job() -> None:
    run_ranks(WORLD, keeps_the_ranks_of_the_job)


def names_ranks_of_the_job(rank: int, world_size: int) -> dict[str, Any]:
    group = dist.new_group(list(range(world_size)), pg_options=pycomm.Reconfigurable())
    zero, one, two = all_handles(group)
    pycomm.reconfigure(1, [zero, two, one], group=group)
    absent = rank == 1
    failed = (
        {}
        if absent
        else outcome(lambda: pycomm.reconfigure(2, [zero, two, one], group=group, timeout=2))
    )
    dist.barrier()
    return failed


def test_errors_name_ranks_of_the_job_whatever_the_order(tmp_path: Path) -> None:
    zero, _, two = run_ranks(WORLD, names_ranks_of_the_job).values()
    for failed in (zero, two):
        assert failed["type"] == "RendezvousTimeoutError", failed
        assert failed["record"]["peer"] == 1 and "rank 1 of the new group" in failed["text"], failed


def mixes_jobs(rank: int, world_size: int) -> None:
    group, other = (dist.new_group([0, 1], pg_options=pycomm.Reconfigurable()) for _ in range(2))
    handles = all_handles(group)
    pycomm.reconfigure(1, handles, group=group)
    twice = [*handles, all_handles(other)[0]]
    no_rank = [handles[rank], re.sub(r";r=[0-9]+", "", handles[1 - rank])]
    for wrong, words in ((twice, "two members have rank 0"), (no_rank, "of a default group")):
        failed = outcome(lambda each=wrong: pycomm.reconfigure(2, each, group=group))
        assert failed["type"] == "InvalidArgumentError" and words in failed["text"], failed
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)  # as it was
    assert tensor.eq(2).all()


def test_members_whom_torch_could_not_tell_apart_are_refused() -> None:
    run_ranks(2, mixes_jobs)


def changes_both(rank: int, world_size: int, path: str) -> None:
    store = dist.FileStore(path, world_size)
    of_members = pycomm.Reconfigurable()
    dist.init_process_group(
        "pycomm", store=store, rank=rank, world_size=world_size, pg_options=of_members
    )
    group = dist.new_group(pg_options=pycomm.Reconfigurable())
    handle = pycomm.reconfigure_handle(group)
    with pytest.raises(pycomm.errors.UnsupportedError, match="places that change"):
        pycomm.reconfigure(1, [handle], group=group)


def test_a_group_beside_a_default_group_that_changes_is_refused(tmp_path: Path) -> None:
    run_ranks(2, changes_both, init="none", args=(str(tmp_path / "met"),))


def makes_an_ordinary_group(rank: int, world_size: int, path: str) -> None:
    dist.init_process_group(
        "pycomm",
        store=dist.FileStore(path, world_size),
        rank=rank,
        world_size=world_size,
        pg_options=pycomm.Reconfigurable(segment_nbytes=65536),
    )
    group = dist.new_group()
    assert not pycomm.supports_reconfigure(group)
    assert type(group_options(group)) is pycomm.Options
    assert group_options(group).segment_nbytes == 65536
    model = pycomm.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group, sync_every=2)
    model(torch.ones(1, 2)).sum().backward()
    handles = [""] * world_size
    dist.all_gather_object(handles, pycomm.reconfigure_handle(), group=group)
    pycomm.reconfigure(1, handles)
    with pytest.raises(pycomm.errors.UnsupportedError, match="sync_every"):
        pycomm.DistributedDataParallel(torch.nn.Linear(2, 2), sync_every=2)


def test_sync_every_needs_an_ordinary_group(tmp_path: Path) -> None:
    run_ranks(2, makes_an_ordinary_group, init="none", args=(str(tmp_path / "met"),))


# --- as torchft reconfigures a group --------------------------------------------------------------


def meets_by_store(store: dist.Store, generation: int, rank: int, size: int) -> None:
    """One generation: a store has a handle per rank and the uuid; then all members call."""
    prefix = dist.PrefixStore(str(generation), store)
    prefix.set(f"handle/{rank}", pycomm.reconfigure_handle())
    if rank == 0:
        prefix.set("uuid", str(1500 + generation))
    keys = [f"handle/{each}" for each in range(size)]
    prefix.wait(["uuid", *keys])
    uuid, handles = int(prefix.get("uuid")), [prefix.get(key).decode() for key in keys]
    limit = timedelta(seconds=PATIENCE_S)
    if not hasattr(dist, "_reconfigure"):
        return pycomm.reconfigure(uuid, handles, timeout=limit)
    options: Any = dist.distributed_c10d.ReconfigureOptions()  # torch 2.14's
    options.uuid, options.handles, options.timeout = uuid, handles, limit
    group: Any = dist.group.WORLD
    assert group.supports_reconfigure and group.get_reconfigure_handle() == handles[rank]
    group.reconfigure(options).wait()


def changes_as_torchft_does(rank: int, world_size: int, path: str) -> None:
    member = Member(rank, world_size, path)
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    for generation, members in enumerate(([0, 1, 2], [2, 0], [1, 2, 0], [0, 1, 2])):
        if generation == 3:
            group.abort()
            failed = outcome(lambda: dist.all_reduce(torch.ones(4)))
            assert failed["type"] == "AbortedError", failed
        if rank in members:
            meets_by_store(member.store, generation, members.index(rank), len(members))
            place = (members.index(rank), len(members))
            assert place == (group.rank(), group.size())
            assert place == (dist.get_rank(), dist.get_world_size())
            tensor = torch.full((4,), 10.0**rank)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.full((4,), sum(10.0**each for each in members)))
        assert dist.group.WORLD is group and group.group_name == name
        member.wait_for_all(f"over {generation}")


def test_members_meet_by_a_store_and_a_uuid_as_in_torchft(tmp_path: Path) -> None:
    run(WORLD, changes_as_torchft_does, tmp_path)


# --- arguments ------------------------------------------------------------------------------------


def gives_wrong_arguments(rank: int, world_size: int, path: str) -> float:
    """The seconds of the longest call that is refused."""
    member = Member(rank, world_size, path)
    alone = outcome(lambda: dist.all_reduce(torch.ones(4)))
    assert alone["type"] == "InvalidArgumentError" and "reconfigure()" in alone["text"], alone
    assert pycomm.last_error() is None
    handles = member.all_together(1100)
    mine = handles[rank]
    longest_s = 0.0
    others = [each for each in handles if each != mine]
    for uuid, wrong, words in (
        (1100, handles, "already used"),
        (1, [], "empty"),
        (2, others, "own handle is not among"),
        (3, [*handles, mine], "twice"),
        (4, [*handles, "somewhere:1234"], "no reconfigure handle"),
        (5, [*others, mine.replace("v=", "v=9")], "wire version"),
        (6, [*others, mine[: len(mine) // 2]], "no reconfigure handle"),
        (7, [mine, others[0].replace(";k=", ";k=0123abcd")], "secret"),
    ):
        failed = outcome(lambda u=uuid, w=wrong: pycomm.reconfigure(u, w))
        assert words in failed["text"], (words, failed)
        longest_s = max(longest_s, failed["took_s"])
    assert_sums()  # the group is as it was
    member.wait_for_all("done")
    return longest_s


@pytest.mark.time_bound
def test_wrong_arguments_leave_the_group_as_it_is(tmp_path: Path) -> None:
    longest_s = max(run(WORLD, gives_wrong_arguments, tmp_path).values())
    assert_within(longest_s, 2.0)


def is_ordinary(rank: int, world_size: int) -> dict[str, Any]:
    assert not pycomm.supports_reconfigure()
    return outcome(pycomm.reconfigure_handle)


def test_an_ordinary_group_says_how_it_would_have_to_be_made() -> None:
    (seen,) = run_ranks(1, is_ordinary).values()
    assert seen["type"] == "InvalidArgumentError" and "enable_reconfigure=True" in seen["text"]


def forks(rank: int, world_size: int, path: str) -> int:
    member = Member(rank, world_size, path)
    handles = member.all_together(1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for use in (pycomm.reconfigure_handle, lambda: pycomm.reconfigure(2, handles)):
                with pytest.raises(pycomm.errors.ForkedError, match="child of fork"):
                    use()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    pycomm.reconfigure(2, handles)  # the child has used nothing up
    assert_sums()
    member.wait_for_all("done")
    return code


def test_a_child_of_fork_is_refused(tmp_path: Path) -> None:
    results = run(2, forks, tmp_path)
    assert results.values() == [0, 0], results.describe()


# --- who does not come ----------------------------------------------------------------------------


def waits_for(rank: int, world_size: int, path: str, absent: int, limit_s: float) -> Any:
    member = Member(rank, world_size, path)
    handles = member.all_together(1)
    if rank == absent:
        member.wait_for_all("done")
        return None
    failed = outcome(lambda: pycomm.reconfigure(2, handles, timeout=limit_s))
    nobody = outcome(lambda: dist.all_reduce(torch.ones(4)))
    assert "uuid=2" in nobody["text"], nobody
    member.wait_for_all("done")
    return failed


@pytest.mark.time_bound
@pytest.mark.parametrize("absent", rings.first_of([2, 0, 1]))
def test_all_who_called_name_the_one_who_did_not(tmp_path: Path, absent: int) -> None:
    limit_s = 2.0
    results = run_ranks(
        WORLD, waits_for, init="none", args=(str(tmp_path / "met"), absent, limit_s)
    )
    pid = results[absent].pid
    for rank, failed in enumerate(results.values()):
        if rank != absent:
            assert failed["type"] == "RendezvousTimeoutError", failed
            assert f"rank {absent} of the new group" in failed["text"], failed
            assert f"pid {pid}" in failed["text"] and failed["record"]["peer"] == absent
            assert_within(failed["took_s"], limit_s + 1.0)


def waits_for_the_dead(rank: int, world_size: int, path: str, dead: int) -> Any:
    member = Member(rank, world_size, path)
    handles = member.all_together(1)
    mark("met")
    if rank == dead:
        signal.pause()
    while True:  # until its death is known here
        if outcome(lambda: dist.all_reduce(torch.ones(4)))["type"]:
            break
    failed = outcome(lambda: pycomm.reconfigure(2, handles, timeout=20))
    without = [each for at, each in enumerate(handles) if at != dead]
    pycomm.reconfigure(3, without, timeout=20)
    assert dist.get_world_size() == world_size - 1
    assert_sums()
    return failed


@pytest.mark.time_bound
@pytest.mark.parametrize("dead", rings.first_of([0, 1, 2]))
def test_a_process_that_has_ended_is_named_soon(tmp_path: Path, dead: int) -> None:
    args = (str(tmp_path / "met"), dead)
    with start_ranks(WORLD, waits_for_the_dead, init="none", args=args) as running:
        for rank in range(WORLD):
            running.wait_for_mark(rank, "met")
        running.kill(dead)
        results = running.collect(60)
    for result in results:
        if result.rank != dead:
            assert result.ok, results.describe()
            failed = result.value
            assert failed["type"] == "PeerDeadError", failed
            assert f"rank {dead} of the new group" in failed["text"], failed
            assert_within(failed["took_s"], 4.0, failed["text"])


def ends_at_a_fault_point(rank: int, world_size: int, path: str) -> Any:
    fault_ranks.use_fault_build()
    member = Member(rank, world_size, path)
    handles = member.handles("first")
    failed = outcome(lambda: pycomm.reconfigure(1, handles, timeout=20))
    victim = int(os.environ["TEST_VICTIM"])
    pycomm.reconfigure(2, [each for at, each in enumerate(handles) if at != victim])
    assert_sums()
    return failed


@pytest.mark.time_bound
@pytest.mark.usefixtures("fault_build")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", rings.first_of([1, 0, 2]))
@pytest.mark.parametrize(
    "point", ["endpoint.ask:4:kill", "group.joined:1:kill", "reconfigure.ready:1:kill"]
)
def test_nobody_has_the_group_if_a_member_ends_before_it_is_ready(
    tmp_path: Path, point: str, victim: int
) -> None:
    if victim == 0 and point.startswith("endpoint.ask"):
        pytest.skip("the first member asks at no endpoint")

    def env(rank: int) -> dict[str, str]:
        fault = {"PYCOMM_FAULT": point} if rank == victim else {}
        return {"TEST_VICTIM": str(victim), **fault}

    results = run_ranks(
        WORLD,
        ends_at_a_fault_point,
        init="none",
        args=(str(tmp_path / "met"),),
        env=env,
        check=False,
    )
    for result in results:
        if result.rank == victim:
            assert result.exit_code == -signal.SIGKILL, results.describe()
            continue
        assert result.ok, results.describe()
        failed = result.value
        assert failed["type"] == "PeerDeadError", failed  # nobody has returned well
        assert failed["record"]["peer"] == victim, failed
        assert_within(failed["took_s"], 5.0, failed["text"])


def waits_for_the_stopped(rank: int, world_size: int, path: str, stopped: int) -> Any:
    member = Member(rank, world_size, path)
    handles = member.handles("first")
    if rank == stopped:
        member.store.set("pid", str(os.getpid()))
        mark("ready")
        signal.pause()
    mark("ready")
    process = "/proc/" + member.store.get("pid").decode()
    give_up_s = time.monotonic() + PATIENCE_S
    while state_in(process) != "T":
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    failed = outcome(lambda: pycomm.reconfigure(2, handles, timeout=2))
    mark("over")
    return failed


@pytest.mark.time_bound
@pytest.mark.parametrize("stopped", rings.first_of([0, 2]))
def test_a_stopped_process_ends_it_in_time(tmp_path: Path, stopped: int) -> None:
    args = (str(tmp_path / "met"), stopped)
    with start_ranks(WORLD, waits_for_the_stopped, init="none", args=args) as running:
        for rank in range(WORLD):
            running.wait_for_mark(rank, "ready")
        running.kill(stopped, signal.SIGSTOP)
        for rank in range(WORLD):
            if rank != stopped:
                running.wait_for_mark(rank, "over")
        running.kill(stopped, signal.SIGKILL)
        results = running.collect(60)
    for result in results:
        if result.rank != stopped:
            assert result.ok, results.describe()
            assert f"rank {stopped} of the new group" in result.value["text"], result.value
            assert_within(result.value["took_s"], 3.0)


def has_another_list(rank: int, world_size: int, path: str) -> Any:
    member = Member(rank, world_size, path)
    handles = member.all_together(1)
    if rank == 2:
        handles = [handles[0], handles[2], handles[1]]
    failed = outcome(lambda: pycomm.reconfigure(2, handles, timeout=20))
    member.wait_for_all("failed")
    pycomm.reconfigure(3, member.handles("again"))
    assert_sums()
    member.wait_for_all("done")
    return failed


@pytest.mark.time_bound
def test_different_lists_for_one_uuid_are_named(tmp_path: Path) -> None:
    found = run(WORLD, has_another_list, tmp_path).values()
    for failed in found:
        assert failed["type"] == "ConfigMismatchError", failed
        assert "another list" in failed["text"]
    assert_within(max(failed["took_s"] for failed in found), 10)


def has_a_handle_of_a_former_group(rank: int, world_size: int, path: str) -> Any:
    member = Member(rank, world_size, path)
    handles = member.all_together(1)
    member.wait_for_all("met")
    if rank == 1:  # its process lives, and makes another group
        dist.destroy_process_group()
        member = Member(rank, world_size, path)
        member.wait_for_all("other group")
        return None
    member.store.get("other group/1")
    failed = outcome(lambda: pycomm.reconfigure(2, handles, timeout=20))
    member.wait_for_all("other group")
    return failed


@pytest.mark.time_bound
def test_a_handle_of_a_former_group_is_named(tmp_path: Path) -> None:
    zero, _, two = run(WORLD, has_a_handle_of_a_former_group, tmp_path).values()
    for failed in (zero, two):
        assert failed["type"] == "PeerDeadError", failed
        assert "rank 1 of the new group" in failed["text"]
    assert_within(max(zero["took_s"], two["took_s"]), 5)


# --- models ---------------------------------------------------------------------------------------


def trains_after_a_change(rank: int, world_size: int, path: str) -> None:
    member = Member(rank, world_size, path)
    handles = member.all_together(1)
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 8)
    model = pycomm.DistributedDataParallel(module)
    model(torch.ones(4, 8) * rank).sum().backward()
    if rank < 2:
        pycomm.reconfigure(2, handles[:2])
        refused = outcome(lambda: model(torch.ones(4, 8)))
        assert refused["type"] == "InvalidArgumentError", refused
        assert "wrap the module again" in refused["text"]
        module.zero_grad()
        again = pycomm.DistributedDataParallel(module)
        again(torch.full((4, 8), 1.0 + 2.0 * rank)).sum().backward()
        assert module.weight.grad is not None
        assert torch.equal(module.weight.grad, torch.full((8, 8), 8.0))  # the mean of 4 and 12
    member.wait_for_all("done")


def test_a_model_has_to_be_wrapped_again(tmp_path: Path) -> None:
    run(WORLD, trains_after_a_change, tmp_path)


# --- nothing is left ------------------------------------------------------------------------------


def meets_often(rank: int, world_size: int, path: str, times: int) -> list[dict[str, int]]:
    member = Member(rank, world_size, path)
    handles = member.all_together(0)
    seen = []
    for uuid in range(1, times + 1):
        pycomm.reconfigure(uuid, handles)
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((4,), float(world_size)))
        if uuid % (times // 3) == 0:
            # The other rank watches this process by a descriptor, until it closes its group.
            member.wait_for_all(f"looks {uuid}")
            seen.append(settled(seen[0] if seen else None))
            member.wait_for_all(f"has looked {uuid}")
    return seen


def settled(first: dict[str, Any] | None) -> dict[str, Any]:
    """What this process has, once that is as much as at first, or, at first, twice the same."""
    before = first
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        files = sorted(open_files().values())
        now = {"files": len(files), "threads": len(os.listdir("/proc/self/task"))}
        if (before and now.items() <= before.items()) or time.monotonic() > give_up_s:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
            return {**now, "resident": resident, "open": files}
        before = before if first else now
        time.sleep(0.2)


@pytest.mark.parametrize("times", [90, pytest.param(2000, marks=pytest.mark.nightly)])
def test_nothing_grows(tmp_path: Path, times: int) -> None:
    args = (str(tmp_path / "met"), times)
    for seen in run_ranks(2, meets_often, init="none", args=args, timeout_s=900).values():
        for now in seen:
            for what in ("files", "threads"):
                assert now[what] == seen[0][what], (seen[0], now)
            # A group that is kept has 97 KiB.
            assert now["resident"] - seen[0]["resident"] < 2 << 20, (seen[0], now)


def hook_before_members(rank: int, world_size: int, path: str) -> None:
    Member(rank, world_size, path)
    with pytest.raises(pycomm.errors.InvalidArgumentError, match="has no members"):
        pycomm.comm_hooks.ordered(lambda state, bucket: None, group=dist.group.WORLD)


def test_a_hook_for_a_group_without_members_is_refused(tmp_path: Path) -> None:
    run_ranks(1, hook_before_members, args=(f"{tmp_path}/store",), init="none", backend=None)
