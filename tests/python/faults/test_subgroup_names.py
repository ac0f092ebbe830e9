"""A rank has one number in all that pycomm says: its own in the job, also in a subgroup."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_ranks import use_fault_build
from ranks import RankError, describe_exception, mark, run_ranks, start_ranks

import pycomm
from pycomm._group import creation
from pycomm._native import loader

pytestmark = pytest.mark.ci

PAIR = [2, 3]
"""Neither number is one of the pair's own, 0 and 1."""
_BOUND_S = 30.0
_NUMBERS = re.compile(
    r"(?:\b[Rr]anks? |\b(?:rank|peer)=|\broot |\bmissing: )(\d+(?:(?:, | and |-)\d+)*)"
)


def pair(timeout_s: float = 10.0, **options: Any) -> dist.ProcessGroup:
    """Of ranks 2 and 3 alone: torch names it by a hash, and no other rank waits for it."""
    group = dist.new_group(
        PAIR,
        timeout=timedelta(seconds=timeout_s),
        use_local_synchronization=True,
        group_desc="pair",
        pg_options=pycomm.Options(**options),
    )
    assert group is not None
    return group


def until_failed(group: dist.ProcessGroup) -> dict[str, Any]:
    """Waits until another rank's report has ended the group here."""
    bound = time.monotonic() + _BOUND_S
    while (record := pycomm.last_error(group)) is None:
        assert time.monotonic() < bound, "the group has not failed"
        time.sleep(0.01)
    return dict(record)


def caught(call: Callable[[], object]) -> RankError:
    try:
        call()
    except pycomm.errors.PycommError as error:
        return describe_exception(error)
    raise AssertionError("nothing was raised")


def handshake(name: str, own: int) -> None:
    """Waits until both ranks of the pair are here."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{own}", "")
    store.wait([f"{name}/{rank}" for rank in PAIR], timedelta(seconds=_BOUND_S))


def deadline(own: int) -> Any:
    handshake("deadline", own)  # the limit is also that of making the group
    group = pair(3.0)
    if own == 2:
        return caught(lambda: dist.all_reduce(torch.ones(4), group=group))
    return until_failed(group)


def only_the_wait(own: int) -> Any:
    group = pair()
    if own == 3:
        handshake("waited", own)
        dist.all_reduce(torch.ones(4), group=group)
        return None
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    error = caught(lambda: work.wait(timedelta(milliseconds=50)))
    handshake("waited", own)
    work.wait()
    return error


def sizes_differ(own: int) -> Any:
    group = pair()
    return caught(lambda: dist.all_reduce(torch.ones(2 + own), group=group))


def no_meaning(own: int) -> Any:
    group = pair()
    tensor = torch.ones(3, dtype=torch.int64)
    return caught(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group))


def roots_differ(own: int) -> Any:
    group = pair()
    return caught(lambda: dist.broadcast(torch.ones(4), src=own, group=group))


def messages_differ(own: int) -> Any:
    group = pair()
    if own == 2:
        return caught(lambda: dist.recv(torch.ones(4), src=3, group=group))
    # So large that it cannot end before its receiver has compared it.
    return caught(lambda: dist.send(torch.ones(1 << 20), dst=2, group=group))


def no_message(own: int) -> Any:
    handshake("no message", own)  # as above
    group = pair(3.0)
    if own == 2:
        return caught(lambda: dist.recv(torch.ones(4), src=3, group=group, tag=7))
    return until_failed(group)


def aborted(own: int) -> Any:
    group = pair()
    handshake("abort", own)  # both have it: who still joins would fail in that
    if own == 2:
        return caught(lambda: dist.all_reduce(torch.ones(4), group=group))
    creation.native_backend(group).abort()
    return until_failed(group)


def left(own: int) -> Any:
    group = pair()
    handshake("leave", own)  # as above
    error = caught(lambda: dist.all_reduce(torch.ones(4), group=group)) if own == 2 else None
    dist.destroy_process_group(group)  # on both: the next name has the number of groups
    return error


def never_joined(own: int) -> Any:
    return caught(lambda: pair(1.0)) if own == 2 else None


def options_differ(own: int) -> Any:
    return caught(lambda: pair(segment_nbytes=65536 * own))


def missing_in_a_barrier(own: int) -> Any:
    group = pair()
    if own == 3:
        handshake("barrier", own)
    error = caught(lambda: pycomm.monitored_barrier(group, timeout=0.5))
    if own == 2:
        handshake("barrier", own)
    return error


def sizes_do_not_add_up(own: int) -> Any:
    group = pair()
    return caught(
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [3, 3], [2, 2], group=group)
    )


def ends_under_way(own: int) -> Any:
    group = pair()
    handshake("closed", own)
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True) if own == 2 else None
    handshake("issued", own)
    dist.destroy_process_group(group)
    return None if work is None else caught(work.wait)


def in_a_child(own: int) -> Any:
    group = pair()
    if own == 3:
        handshake("forked", own)
        return None
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        error = caught(lambda: dist.all_reduce(torch.ones(4), group=group))
        os.write(writer, pickle.dumps(error))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        error = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    handshake("forked", own)
    return error


def no_interface(own: int) -> Any:
    return caught(lambda: pair(transport="tcp", interface="bond0" if own == 3 else "lo"))


def no_port(own: int) -> Any:
    if own == 2:
        return caught(lambda: pair(transport="tcp"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        return caught(lambda: pair(transport="tcp", port_range=f"{port}-{port}"))


Peers = tuple[set[int | None], set[int | None]]
"""On ranks 2 and 3: whom an error there may blame; None where it has to blame nobody."""
TWO: Peers = ({2}, {2})
THREE: Peers = ({3}, {3})
EITHER: Peers = ({2, 3}, {2, 3})
NOBODY: Peers = ({None}, {None})
# Case, the code on ranks 2 and 3, their peers, and what the texts have to say: that of rank 2, and
# of rank 3 if its peer is the same.
CASES: list[tuple[Callable[[int], Any], str, Peers, str]] = [
    (deadline, "TIMEOUT", THREE, "rank 3 on {host} has not entered it"),
    (only_the_wait, "TIMEOUT", NOBODY, "has not ended; it goes on"),
    (sizes_differ, "COLLECTIVE_MISMATCH", EITHER, "all_reduce(SUM, float32 x 5, "),
    (no_meaning, "UNSUPPORTED", NOBODY, "AVG of int64 is undefined"),
    (roots_differ, "COLLECTIVE_MISMATCH", EITHER, "broadcast(float32 x 4, root 3, "),
    (messages_differ, "COLLECTIVE_MISMATCH", EITHER, "has recv(float32 x 4, from rank 3, tag 0)"),
    (
        messages_differ,
        "COLLECTIVE_MISMATCH",
        EITHER,
        "has send(float32 x 1048576, to rank 2, tag 0)",
    ),
    (no_message, "TIMEOUT", THREE, "recv from rank 3 (tag 7) timed out"),
    (aborted, "ABORTED", THREE, "Rank 3 aborted the process group"),
    (left, "PEER_LEFT", THREE, "Rank 3 on {host} closed its process group while all_reduce #1"),
    (never_joined, "RENDEZVOUS_TIMEOUT", THREE, "rank 2 waited"),
    (options_differ, "CONFIG_MISMATCH", ({3}, {2}), "rank 3 (host {host}"),
    (missing_in_a_barrier, "TIMEOUT", THREE, "rank 3 (on {host}) of group "),
    (sizes_do_not_add_up, "INVALID_ARGUMENT", NOBODY, "all_to_all"),
    (ends_under_way, "SHUT_DOWN", NOBODY, "closed"),
    (in_a_child, "FORKED", NOBODY, "fork"),
    (
        no_interface,
        "NO_INTERFACE",
        ({3}, {None}),
        "Rank 3 on {host} cannot join: no network interface",
    ),
    (no_port, "PORTS_EXHAUSTED", ({3}, {None}), "Rank 3 on {host} cannot join: no port"),
]


def run_cases(rank: int, world_size: int) -> list[tuple[str, Any]]:
    found = []
    if rank in PAIR:
        for case in dict.fromkeys(case for case, *_ in CASES if case is not never_joined):
            found.append((case.__name__, case(rank)))
        found.append((never_joined.__name__, never_joined(rank)))  # the ranks count one group more
    dist.barrier()
    return found


def fails_in(spec: str, transport: str, victim: int = 3) -> Callable[[int], Any]:
    """A sum in which a fault strikes, or the making of the group if that fails."""

    def case(own: int) -> Any:
        handshake(spec, own)
        group = pair(transport=transport)
        loader.load().arm_fault_points(spec if own == victim else "")
        try:
            return caught(lambda: dist.all_reduce(torch.ones(1 << 20), group=group))
        finally:
            loader.load().arm_fault_points("")

    return case


def fails_to_join(spec: str, transport: str, victim: int = 2) -> Callable[[int], Any]:
    def case(own: int) -> Any:
        handshake(spec, own)
        loader.load().arm_fault_points(spec if own == victim else "")
        try:
            return caught(lambda: pair(3.0, transport=transport))
        finally:
            loader.load().arm_fault_points("")

    return case


# Of the other codes, INTERNAL is a defect of pycomm's own, which nothing provokes, and QUORUM_LOST,
# LEFT_BEHIND and JOIN_REFUSED are of elastic steps, which have no subgroups. CONNECT_FAILED,
# VERSION_MISMATCH, DATA_CORRUPT and CONN_RESET: FailureText.RanksHaveTheirNumbersInTheJob.
FAULTS: list[tuple[Callable[[int], Any], str, Peers]] = [
    (fails_in("operation.post:1:errno=EIO", "shm"), "SYSTEM_ERROR", THREE),
    (fails_in("operation.post:1:nomem", "tcp"), "OUT_OF_MEMORY", THREE),
    (fails_in("frame.arriving:1:flip", "tcp"), "PROTOCOL_VIOLATION", TWO),
    (fails_in("arena.commit:1+:errno=ENOSPC", "shm"), "SHM_NO_SPACE", THREE),
    (fails_to_join("socket.connect:1+:errno=EMFILE", "tcp"), "TOO_MANY_FILES", TWO),
]


def run_faults(rank: int, world_size: int, store: str) -> list[Any]:
    use_fault_build()
    dist.init_process_group("pycomm", init_method=store, rank=rank, world_size=world_size)
    found = [case(rank) for case, *_ in FAULTS] if rank in PAIR else []
    dist.barrier()
    return found


def claims_a_rank_twice(rank: int, world_size: int, store: str) -> Any:
    """Rank 2 has a child, which is rank 2, too. Of gloo, as a child has no engine of its own."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    if rank not in PAIR:
        return None

    def join() -> dist.ProcessGroup:
        group = dist.new_group(PAIR, backend="pycomm", use_local_synchronization=True)
        assert group is not None
        return group

    if rank == 3:
        return dist.all_reduce(torch.ones(4), group=join())
    reader, writer = os.pipe()
    go_reader, go_writer = os.pipe()
    if (child := os.fork()) == 0:
        os.read(go_reader, 1)
        os.write(writer, pickle.dumps(caught(join)))
        os._exit(0)
    os.close(writer)
    group = join()
    os.write(go_writer, b"x")
    with os.fdopen(reader, "rb") as pipe:
        error = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    dist.all_reduce(torch.ones(4), group=group)
    return error


def loses_its_store(rank: int, world_size: int) -> Any:
    """Rank 0, which serves the store, ends while rank 2 waits for rank 3."""
    if rank == 2:
        mark("joins")
        return caught(lambda: pair(60.0))
    if rank == 0:
        signal.pause()
    return None


def check_names(own: int, text: str, record: dict[str, Any], peers: Peers) -> None:
    """No text and no key may name anybody but ranks 2 and 3."""
    named = {
        int(number) for list_ in _NUMBERS.findall(text) for number in re.findall(r"\d+", list_)
    }
    assert named <= set(PAIR), text
    assert record["rank"] == own, text
    assert record.get("peer") in peers[PAIR.index(own)], text


def test_all_that_an_error_says_of_ranks_is_in_the_numbers_of_the_job() -> None:
    values = run_ranks(4, run_cases, timeout_s=120.0).check().values()
    by_case = {rank: dict(values[rank]) for rank in PAIR}
    for case, code, peers, wanted in CASES:
        seen = {rank: by_case[rank][case.__name__] for rank in PAIR}
        assert any(seen.values()), case.__name__
        for rank, each in seen.items():
            if each is None:
                continue
            record = each if isinstance(each, dict) else each.record
            text = f"{record}" if isinstance(each, dict) else each.text
            check_names(rank, text, record, peers)
            assert record["code"] == code, (case.__name__, text)
            if case is not missing_in_a_barrier:
                assert record["group_ranks"] == "2, 3", text
            if case is messages_differ:
                assert record["op"] == ("recv" if rank == 2 else "send"), text
            if rank == 2 or peers[0] == peers[1]:
                assert wanted in text.replace(record["host"], "{host}"), (case.__name__, text)


@pytest.mark.usefixtures("fault_build")
@pytest.mark.timeout(900)
def test_errors_of_a_system_call_are_in_the_numbers_of_the_job(tmp_path: Path) -> None:
    values = run_ranks(
        4, run_faults, args=(f"file://{tmp_path}/store",), init="none", backend=None
    ).values()
    for number, (_, code, peers) in enumerate(FAULTS):
        for rank in PAIR:
            error = values[rank][number]
            check_names(rank, error.text, error.record, peers)
            assert error.record["code"] == code, error.text
            assert error.record["group_ranks"] == "2, 3", error.text


def test_a_rank_of_a_subgroup_that_is_claimed_twice_has_its_own_number(tmp_path: Path) -> None:
    results = run_ranks(
        4,
        claims_a_rank_twice,
        args=(f"file://{tmp_path}/store",),
        init="none",
        backend=None,
        preload=["torch.distributed"],
    )
    error = results.values()[2]
    check_names(2, error.text, error.record, TWO)
    assert error.record["code"] == "DUPLICATE_RANK"
    assert "rank 2 is taken" in error.text


def test_a_subgroup_that_loses_its_store_says_that_it_has_closed() -> None:
    with start_ranks(4, loses_its_store, init="tcp", destroy=False) as running:
        running.wait_for_mark(2, "joins")
        running.wait_until_asleep(2)
        running.kill(0)
        result = running.collect(60.0)
    error = result[2].value
    record = error.record
    assert (record["code"], record["rank"], record["group_ranks"]) == ("STORE_LOST", 2, "2, 3")
    assert "peer" not in record, error.text
    assert "answered before, and has closed since" in error.text
    assert "rank 0, or the launcher that serves the store, ended" in error.text


def dies(rank: int, world_size: int, how: int) -> Any:
    if rank not in PAIR:
        return None
    group = pair()
    dist.all_reduce(torch.ones(4), group=group)
    handshake("summed", rank)  # a death that comes before would end this one
    if rank == 3:
        os.kill(os.getpid(), how)
    error = caught(lambda: dist.all_reduce(torch.ones(4), group=group))
    mark("seen")
    return error


@pytest.mark.parametrize(
    ("how", "code", "wanted"),
    [
        (signal.SIGKILL, "PEER_DEAD", "Rank 3 on {host} is gone"),
        (signal.SIGSTOP, "PEER_UNRESPONSIVE", "Rank 3 on {host} has been silent"),
    ],
)
def test_a_rank_that_dies_or_stops_has_its_own_number(how: int, code: str, wanted: str) -> None:
    with start_ranks(4, dies, args=(how,)) as running:
        running.wait_for_mark(2, "seen")
        running.kill(3)
        error = running.collect(60.0)[2].value
    check_names(2, error.text, error.record, THREE)
    assert error.record["code"] == code, error.text
    assert wanted in error.text.replace(error.record["host"], "{host}")


def leaves_after_another_failure(rank: int, world_size: int, store: str, late: str) -> Any:
    if late:
        use_fault_build()
    dist.init_process_group("pycomm", init_method=store, rank=rank, world_size=world_size)
    first = dist.new_group([0, 1], timeout=timedelta(seconds=30))
    second = dist.new_group([1, 2], timeout=timedelta(seconds=30))
    if late and rank == 1:
        loader.load().arm_fault_points(late)
    if rank == 0:
        return caught(lambda: dist.all_reduce(torch.ones(4), group=first))
    if rank == 1:
        options = dist.AllreduceOptions()
        options.asyncOp = False
        options.timeout = timedelta(seconds=1)  # of the operation: a group's is that of making it
        error = caught(lambda: second.allreduce([torch.ones(4)], options).wait())
        dist.destroy_process_group(first)
        return error
    return until_failed(second)


# With the fault rank 1 has the error, and leaves, before its process is done with the failure.
@pytest.mark.usefixtures("fault_build")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("late", ["", "group.failed:1:delay=500"])
def test_a_rank_that_leaves_since_another_group_has_failed_says_so(
    late: str, tmp_path: Path
) -> None:
    results = run_ranks(
        3,
        leaves_after_another_failure,
        args=(f"file://{tmp_path}/store", late),
        init="none",
        backend=None,
        timeout_s=60.0,
    )
    seen, cause, _ = results.check().values()
    assert cause.record["code"] == "TIMEOUT"
    record = seen.record
    assert (record["code"], record["peer"]) == ("PEER_LEFT", 1), seen.text
    host = record["host"]
    group = cause.record["group"]
    assert re.search(
        rf"Rank 1 on {host} closed its process group while all_reduce #1 still needs it, after "
        rf"group '{group}' of ranks 1, 2 had failed: all_reduce #1 timed out after \d+ ms: "
        rf"rank 2 on {host} has not entered it",
        seen.text,
    ), seen.text
