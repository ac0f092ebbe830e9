"""What ranks remember: read in the process, written when a group fails, and put side by side."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankResults, mark, run_ranks, start_ranks
from signals import CaughtSignal
from time_bound import assert_within
from torch_format import write_torch_records

import pycomm
from pycomm.trace.align import Records, dump_files, read_records
from pycomm.trace.chrome import chrome_trace
from pycomm.trace.findings import Finding, findings_of

pytestmark = [pytest.mark.needs_native, pytest.mark.faults, pytest.mark.ci]


def records_in(folder: Path) -> Records:
    return read_records(dump_files([folder]))


def findings_in(folder: Path) -> dict[str, Finding]:
    records = records_in(folder)
    assert not records.notes
    (group,) = records.groups
    # Which ranks were late by a millisecond, and how many, is chance.
    found = [finding for finding in findings_of(group) if finding.is_problem]
    by_kind: dict[str, Finding] = {}
    for finding in found:
        # Ranks that lose their core while all vote may tell one failure in two ways.
        assert finding.kind == "failed" or finding.kind not in by_kind, found
        by_kind.setdefault(finding.kind, finding)
    return by_kind


def wait_for_failure() -> None:
    """Does nothing of pycomm's until the group has failed.

    An operation that starts in the same moment can still complete in shared memory, on all ranks:
    the failure is known some microseconds before the group ends its operations.
    """
    while pycomm.last_error() is None:
        threading.Event().wait(0.02)
    threading.Event().wait(0.2)


# In the process


def look_back(rank: int, world_size: int) -> list[dict[str, Any]]:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    dist.broadcast(tensor, src=1)
    dist.all_gather([torch.empty(8) for _ in range(world_size)], torch.ones(8))
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(5), dst=1, tag=9)
    else:
        dist.recv(torch.ones(5), src=None, tag=9)
    before = pycomm.flight_record()
    assert (before.rank, before.size, before.failure) == (rank, world_size, None)
    assert list(before.phases_ns) == ["rendezvous", "connect", "ready"]
    return [
        {
            "op": one.op,
            "state": one.state,
            "numel": one.numel,
            "reduce_op": one.reduce_op,
            "root": one.root,
            "label": one.label,
            "sequence": one.sequence,
            "whole": one.bytes_done == one.bytes_total,
            "ordered": one.issued_ns
            <= (one.started_ns or 0)
            <= (one.first_byte_ns or one.started_ns or 0)
            <= (one.ended_ns or 0)
            <= time.time_ns() + 10**9,
        }
        for one in before.operations
    ]


def test_a_group_remembers_what_it_did() -> None:
    values = run_ranks(2, look_back).values()
    messages = [operations.pop() for operations in values]
    labels = ["send to rank 1 (tag 9)", "recv from rank 0 (tag 9)"]
    assert [one["label"] for one in messages] == labels
    # Not "ordered": a small message may have arrived before its receive was posted.
    assert [(one["state"], one["numel"]) for one in messages] == [("done", 5)] * 2
    for operations in values:
        assert [one["op"] for one in operations] == [
            "all_reduce",
            "broadcast",
            "all_gather",
            "barrier",
        ]
        assert [one["sequence"] for one in operations] == [1, 2, 3, 4]
        assert [one["state"] for one in operations] == ["done"] * 4
        assert [one["numel"] for one in operations] == [1000, 1000, 8, 0]
        assert [one["reduce_op"] for one in operations] == ["MAX", None, None, None]
        assert [one["root"] for one in operations] == [None, 1, None, None]
        assert all(one["whole"] and one["ordered"] for one in operations), operations


def many_operations(rank: int, world_size: int) -> tuple[list[int | None], bool, int]:
    silent = dist.new_group(pg_options=pycomm.Options(flight_recorder_size=0))
    for _ in range(20):
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3), group=silent)
    record = pycomm.flight_record()
    nothing = pycomm.flight_record(silent).operations
    return [one.sequence for one in record.operations], record.complete, len(nothing)


@pytest.mark.ci
def test_only_the_last_are_kept_and_none_where_it_is_off() -> None:
    kept = run_ranks(2, many_operations, env={"TORCH_FR_BUFFER_SIZE": "6"}).values()
    assert kept == [([15, 16, 17, 18, 19, 20], False, 0)] * 2


def dump_by_request(rank: int, world_size: int, folder: str) -> str:
    dist.all_reduce(torch.ones(3))
    side = dist.new_group([1, 0])
    dist.all_reduce(torch.ones(3), group=side)
    signal.signal(signal.SIGUSR2, lambda *_: mark(str(pycomm.dump_flight_record(folder))))
    go_on = CaughtSignal(signal.SIGTERM)
    work = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
    mark("ready")
    if work is not None:
        work.wait()  # until rank 1 comes, which the test lets do so only after the signal
    else:
        go_on.wait()
        dist.all_reduce(torch.ones(3))
    return str(pycomm.dump_flight_record(Path(folder) / "later"))


def test_dump_by_a_signal_while_a_rank_waits(tmp_path: Path) -> None:
    with start_ranks(2, dump_by_request, args=(str(tmp_path),)) as running:
        for rank in range(2):
            running.wait_for_mark(rank, "ready")
        running.wait_until_asleep(0)
        running.kill(0, signal.SIGUSR2)
        running.wait_for_mark(0, str(tmp_path / "pycomm_rank_0.json"))
        (waiting,) = records_in(tmp_path).processes
        running.kill(1, signal.SIGTERM)
        results = running.collect(60).check()
    assert results.values() == [str(tmp_path / "later" / f"pycomm_rank_{r}.json") for r in (0, 1)]
    world = next(group for group in waiting.groups if not group.global_ranks)
    last = world.operations[-1]
    assert (last.op, last.state, last.ended_ns) == ("all_reduce", "running", None)
    later = records_in(tmp_path / "later")
    assert len(later.processes) == 2 and len(later.groups) == 2
    assert [f for group in later.groups for f in findings_of(group) if f.is_problem] == []


# Written when a group fails


def steps_until_failure(rank: int, world_size: int, how: str) -> str | None:
    for _ in range(5):
        dist.all_reduce(torch.ones(1000))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    mark("steps")
    try:
        if rank == 1 and how == "killed":
            threading.Event().wait()
        elif rank == 1 and how == "late":
            wait_for_failure()
        elif rank == 1 and how == "mismatch":
            signal.sigtimedwait([signal.SIGTERM], 60)
            dist.all_reduce(torch.ones(2001))
        options = dist.AllreduceOptions()
        if how == "late":
            options.timeout = timedelta(seconds=2)
        dist.group.WORLD.allreduce([torch.ones(2000)], options).wait()
    except pycomm.errors.PycommError as error:
        return error.code
    return None


def fail(folder: Path, how: str, torchs_variable: bool = False) -> RankResults:
    options = None if torchs_variable else {"flight_recorder_dir": str(folder)}
    env = {"TORCH_FR_DUMP_TEMP_FILE": str(folder / "of_rank_") if torchs_variable else None}
    with start_ranks(3, steps_until_failure, args=(how,), pg_options=options, env=env) as running:
        for rank in range(3):
            running.wait_for_mark(rank, "steps")
        if how != "late":  # whose deadline is near
            for rank in (0, 2):  # they are in the sixth operation
                running.wait_until_asleep(rank)
        if how == "killed":
            running.kill(1)
        elif how == "mismatch":
            running.kill(1, signal.SIGTERM)
        return running.collect(60)


@pytest.mark.time_bound
@pytest.mark.ci
def test_a_late_rank(tmp_path: Path) -> None:
    results = fail(tmp_path, "late")
    assert results.values()[0] == results.values()[2] == "TIMEOUT", results.describe()
    assert f"last operations of rank 0 are in {tmp_path}/pycomm_rank_0.json" in results[0].stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"pycomm_rank_{rank}.json" for rank in range(3)
    ]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    found = findings_in(tmp_path)
    assert found["failed"].ranks == (1,)
    late = found["not_entered"]
    assert (late.ranks, late.op) == ((1,), "all_reduce #6")
    host = os.uname().nodename
    assert f"Rank 1 on {host} has not entered all_reduce #6 (SUM, float32 x 2000, " in late.text
    assert "it last finished all_reduce #5, " in late.text
    assert " s before the end. Ranks 0 and 2 waited in it from " in late.text
    waited_s = float(late.text.rstrip(".").split(" on, ")[1].split(" s")[0])
    assert waited_s >= 1.9
    out = tmp_path / "chrome.trace"
    command = [sys.executable, "-m", "pycomm", "trace", str(tmp_path), "--chrome", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1 and late.text in done.stdout, done.stdout + done.stderr
    trace = json.loads(out.read_text())
    assert trace == json.loads(json.dumps(chrome_trace(records_in(tmp_path).groups)))
    whole = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["cat"] != "part"]
    assert {one["pid"] for one in whole} == {0, 1, 2}
    stuck = next(one for one in whole if one["pid"] == 0 and one["name"] == "all_reduce #6")
    assert stuck["dur"] > 1_000_000 and stuck["args"]["code"] == "TIMEOUT"
    names = {one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"}
    assert names == {f"rank {rank} on {host}" for rank in range(3)}
    assert_within(waited_s, 10)


def test_a_killed_rank(tmp_path: Path) -> None:
    results = fail(tmp_path, "killed", torchs_variable=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of_rank_0.json", "of_rank_2.json"]
    assert results[1].exit_code == -signal.SIGKILL
    assert results.values()[0] == results.values()[2] == "PEER_DEAD", results.describe()
    found = findings_in(tmp_path)
    assert found["failed"].ranks == found["no_record"].ranks == (1,)
    assert (
        f"There is no record of rank 1 on {os.uname().nodename}: it was killed"
        in found["no_record"].text
    )
    assert found["unfinished"].op == "all_reduce #6"
    assert "Of rank 1 it is not known." in found["unfinished"].text


def test_a_mismatch(tmp_path: Path) -> None:
    results = fail(tmp_path / "ours", "mismatch")
    assert results.values() == ["COLLECTIVE_MISMATCH"] * 3, results.describe()
    found = findings_in(tmp_path / "ours")
    assert found["mismatch"].ranks == (1,)
    assert found["mismatch"].text.startswith(
        "Operation #6 is not the same on all ranks: rank 1 called all_reduce(SUM, float32 x 2001, "
    )
    assert "but ranks 0 and 2 called all_reduce(SUM, float32 x 2000, " in found["mismatch"].text
    # torch's own analyser comes to the same result.
    write_torch_records(records_in(tmp_path / "ours").processes, tmp_path / "torchs")
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    command += [str(tmp_path / "torchs"), "-o", str(tmp_path / "database")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    _, database = pickle.loads((tmp_path / "database").read_bytes())
    passed = [one for one in database.collectives if one.pass_check]
    assert [one.collective_name for one in passed] == ["gloo:all_reduce"] * 5
    assert [one.collective_seq_id for one in passed] == [1, 2, 3, 4, 5]
    (failed,) = (one for one in database.collectives if not one.pass_check)
    assert failed.collective_seq_id == 6
    assert failed.mismatch_collectives, "it names the rank with another size"


def test_a_folder_that_cannot_be_written_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    results = fail(tmp_path / "file" / "folder", "mismatch")
    assert results.values() == ["COLLECTIVE_MISMATCH"] * 3, results.describe()
    for result in results:
        assert result.exit_code == 0
        assert result.stderr.count("The flight record could not be written to") == 1
        assert "ENOTDIR" in result.stderr or "Not a directory" in result.stderr


def test_ranks_that_never_met_leave_a_record(tmp_path: Path) -> None:
    options = {"timeout": 1.0, "flight_recorder_dir": str(tmp_path)}
    results = run_ranks(2, look_back, pg_options=options, ranks=[0], check=False)
    assert results[0].error is not None and results[0].error.code == "RENDEZVOUS_TIMEOUT"
    found = findings_in(tmp_path)
    assert "RENDEZVOUS_TIMEOUT" in found["failed"].text
    assert found["no_record"].ranks == (1,)
