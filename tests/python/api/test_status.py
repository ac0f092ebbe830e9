"""`pycomm status`: what the ranks of this host say of themselves, also while they hang."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command import run_pycomm
from ranks import mark, start_ranks
from time_bound import assert_within

from pycomm._native.flight_record import ProcessRecord, parse_record
from pycomm.cli import main, status
from pycomm.trace import process_reports

pytestmark = pytest.mark.needs_native

GREETING = process_reports._GREETING.pack(process_reports._GREETING_MAGIC, 3)


def _status(*arguments: str) -> tuple[int, str]:
    """By a process of its own, as a user would."""
    done = run_pycomm(["status", *arguments], timeout_s=60)
    assert done.stderr == ""
    return done.returncode, done.stdout


def _of(pids: list[int], text: str) -> dict[str, Any]:
    """Of a JSON report, what is about these processes: other tests have ranks, too."""
    report = json.loads(text)
    rows = [row for row in report["rows"] if row["pid"] in pids]
    silent = [one for one in report["silent"] if one["pid"] in pids]
    return {"rows": rows, "silent": silent, "problems": report["problems"]}


def _one_waits(rank: int, size: int, go: str) -> None:
    dist.all_reduce(torch.ones(4))
    mark("begun")
    if rank == 1:
        asleep = ctypes.PyDLL(None).usleep  # which keeps the interpreter's lock
        while not Path(go).exists():
            asleep(20_000)
    dist.all_reduce(torch.ones(1013))  # a number that no other test's ranks have
    mark("ended")
    while not Path(go + ".end").exists():
        time.sleep(0.01)


@pytest.mark.ci
def test_a_rank_that_has_not_entered_is_named(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with start_ranks(2, _one_waits, args=(str(go),)) as ranks:
        pids = [ranks.pid(0), ranks.pid(1)]
        ranks.wait_for_mark(0, "begun")
        ranks.wait_for_mark(1, "begun")
        ranks.wait_until_asleep(0)
        time.sleep(0.3)
        code, text = _status("--json", "--after", "0.2")
        report = _of(pids, text)
        assert code == 1 and report["silent"] == []
        by_rank = {row["rank"]: row for row in report["rows"]}
        assert by_rank[0]["op"].startswith("all_reduce #") and by_rank[0]["for_s"] > 0.2
        assert by_rank[1]["op"] is None and by_rank[1]["last"].startswith("all_reduce #")
        assert by_rank[0]["pid"] == pids[0] and by_rank[0]["state"] == "ready"
        (said,) = [one for one in report["problems"] if "float32 x 1013" in one]
        assert said.startswith("Rank 0 of group")
        assert f"rank 1 (pid {pids[1]}) has not entered it" in said
        code, text = _status("--after", "0.2")
        assert code == 1 and "has not entered it" in " ".join(text.split())
        assert all(len(line) <= 79 for line in text.splitlines())
        go.touch()
        ranks.wait_for_mark(0, "ended")
        ranks.wait_for_mark(1, "ended")
        _, text = _status("--json", "--after", "0.2")
        rows = _of(pids, text)["rows"]
        assert [row["op"] for row in rows] == [None, None]
        (tmp_path / "go.end").touch()
        ranks.collect(30).check()


@pytest.mark.time_bound
def test_a_stopped_process_is_said_not_to_answer(tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.touch()
    with start_ranks(2, _one_waits, args=(str(go),)) as ranks:
        for rank in (0, 1):
            ranks.wait_for_mark(rank, "ended")
        ranks.kill(1, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            code, text = _status("--json", "--timeout", "5")
            took_s = time.monotonic() - begin
        finally:
            ranks.kill(1, signal.SIGCONT)
        (silent,) = _of([ranks.pid(1)], text)["silent"]
        assert code == 1 and "does not answer" in silent["why"]
        assert [row["rank"] for row in _of([ranks.pid(0)], text)["rows"]] == [0]
        (tmp_path / "go.end").touch()
        ranks.collect(30).check()
    assert_within(took_s, 30)


def _each_receives(rank: int, size: int, go: str) -> None:
    dist.all_reduce(torch.ones(4))
    for number in range(20):
        dist.all_reduce(torch.ones(number + 1))
    mark("begun")
    dist.recv(torch.ones(3), src=1 - rank)  # and nobody sends


def test_each_of_two_ranks_that_receive_from_each_other_is_told(tmp_path: Path) -> None:
    with start_ranks(2, _each_receives, args=("",)) as ranks:
        pids = [ranks.pid(0), ranks.pid(1)]
        for rank in (0, 1):
            ranks.wait_for_mark(rank, "begun")
            ranks.wait_until_asleep(rank)
        time.sleep(0.3)
        code, text = _status("--json", "--after", "0.2")
        problems = _of(pids, text)["problems"]
        for rank in (0, 1):
            waits = f"Rank {rank} (pid {pids[rank]}) waits in recv from rank {1 - rank}"
            assert code == 1 and any(one.startswith(waits) for one in problems)


def _fails(rank: int, size: int, end: str) -> None:
    dist.all_reduce(torch.ones(4))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has summed"])
        os._exit(3)
    store.set("rank 0 has summed", "")
    with pytest.raises(dist.DistError):
        dist.all_reduce(torch.ones(4))
    mark("failed")
    while not Path(end).exists():
        time.sleep(0.01)
    os._exit(0)


def test_a_group_that_has_failed_is_told(tmp_path: Path) -> None:
    with start_ranks(2, _fails, args=(str(tmp_path / "end"),)) as ranks:
        pid = ranks.pid(0)
        ranks.wait_for_mark(0, "failed")
        code, text = _status("--json")
        (row,) = _of([pid], text)["rows"]
        problems = _of([pid], text)["problems"]
        (tmp_path / "end").touch()
    assert code == 1 and row["state"] == "failed"
    said = f"Group {row['group']} has failed on rank 0 (pid {pid}): Rank 1"
    assert any(one.startswith(said) for one in problems)


def _process(rank: int, operations: list[dict[str, Any]], **more: Any) -> ProcessRecord:
    known = {"dtype": "float32", "numel": 4, "algorithm": "ring", "bytes_done": 0}
    known |= {"bytes_total": 0, "thread": 1, "issued_ns": 0, "ticket": 1}
    group = {
        "name": "sub",
        "rank": rank,
        "size": 3,
        "global_ranks": [4, 5, 6],
        "hosts": ["here", "here", "there"],
        "run": "7",
        "slots": 2000,
        "complete": False,
        "phases_ns": {"ready": 1},
        "operations": [known | one for one in operations],
        **more,
    }
    top = {"format": "pycomm-flight-record", "version": 3, "rank": 4 + rank, "host": "here"}
    text = json.dumps(top | {"pid": 100 + rank, "written_ns": 60 * 10**9, "groups": [group]})
    return parse_record(text, "test")


def _op(sequence: int, state: str, **more: Any) -> dict[str, Any]:
    ended = {"ended_ns": 1} if state == "done" else {}
    given = {"id": str(sequence), "sequence": sequence, "op": "all_reduce", "state": state}
    return given | ended | more


def _told(*processes: ProcessRecord) -> list[str]:
    found = [status.Report(one.pid, one) for one in processes]
    return list(status._problems(found, processes, 10**10))


def test_a_rank_that_is_past_an_operation_is_not_accused() -> None:
    waits = _process(0, [_op(100, "running")])
    # It waits in an older one, and has ended everything else: its report leaves out most of that.
    past = _process(1, [_op(5, "running"), _op(199, "done"), _op(200, "done")])
    (said,) = _told(waits, past)
    assert "not entered" not in said
    behind = _process(1, [_op(98, "done"), _op(99, "done")])
    (said,) = _told(waits, behind)
    assert said == (
        "Rank 4 of group 'sub' of ranks 4, 5 and 6 waits in all_reduce #100 (float32 x 4, ring), "
        "for 60.0 s so far; rank 5 (pid 101) has not entered it. Of rank 6 nothing is known here: "
        "run this on there."
    )
    (said,) = _told(waits)
    assert "Rank 5 of this host did not answer or has ended" in said


def test_a_receive_that_waits_does_not_hide_a_collective() -> None:
    receive = _op(0, "running") | {"op": "recv", "id": "0", "sequence": None, "peer": 5}
    one, other = _told(_process(0, [receive, _op(7, "running")]), _process(1, [_op(6, "done")]))
    assert one.startswith("Rank 4 (pid 100) waits in recv from rank 5")
    assert "all_reduce #7" in other and "rank 5 (pid 101) has not entered" in other


@pytest.mark.parametrize("flag", ["--after=nan", "--after=-1", "--timeout=inf", "--timeout=0"])
def test_seconds_that_are_none_are_refused(flag: str, capsys: Any) -> None:
    assert main(["status", flag]) == 2
    assert "--after is at least 0" in capsys.readouterr().err


def test_a_process_whose_queue_is_full_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"pycomm/{os.getpid():016x}"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind("\0" + name)
        listener.listen(0)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        waiting.connect("\0" + name)
        _listing(name, monkeypatch, tmp_path)
        (one,) = process_reports.reports(0.2)
    assert one.record is None and "takes no connection" in one.why


def test_nobody_is_no_problem(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    table = tmp_path / "unix"
    table.write_text("Num RefCount Protocol Flags Type St Inode Path\n")
    monkeypatch.setattr(process_reports, "_UNIX_SOCKETS", table)
    assert main(["status"]) == 0
    assert "No process of this user" in capsys.readouterr().out


def test_a_table_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(process_reports, "_UNIX_SOCKETS", tmp_path / "none")
    assert main(["status"]) == 2
    assert "/proc/net/unix cannot be read" in capsys.readouterr().err


def _listing(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "unix"
    row = f"0000000000000000: 00000002 00000000 00010000 0005 01 12345 @{name}\n"
    table.write_text("Num RefCount Protocol Flags Type St Inode Path\n" + row)
    monkeypatch.setattr(process_reports, "_UNIX_SOCKETS", table)


@pytest.mark.parametrize(
    ("greeting", "answer", "expected"),
    [
        (b"", None, "hung up"),
        (b"hello, I am something else", None, "nothing"),
        (
            GREETING,
            b"",
            "does not tell",
        ),
        (
            GREETING,
            b"short",
            "something else",
        ),
        (
            GREETING,
            process_reports._ASK.pack(process_reports._REPORT_MAGIC, 0, 0),
            "could not make the memory",
        ),
        (
            GREETING,
            process_reports._ASK.pack(process_reports._REPORT_MAGIC, 1, 5),
            "not a flight record",
        ),
    ],
)
def test_what_other_programs_say_is_survived(
    greeting: bytes,
    answer: bytes | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    name = f"pycomm/{os.getpid():016x}"
    memory = os.memfd_create("report")
    os.write(memory, b"{...}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + name)
        listener.listen()
        _listing(name, monkeypatch, tmp_path)
        child = os.fork()
        if child == 0:
            try:
                while True:  # the `pycomm status` of another test finds this socket, too
                    with contextlib.suppress(OSError), listener.accept()[0] as asker:
                        if greeting:
                            socket.send_fds(asker, [greeting], [memory])
                        if answer:
                            asker.recv(100)
                            socket.send_fds(asker, [answer], [memory])
            finally:
                os._exit(0)
        try:
            found = process_reports.reports(5.0)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(memory)
    if expected == "nothing":
        assert found == []
    else:
        (one,) = found
        assert one.record is None and expected in one.why
