"""`pycomm status`: what the ranks of this host say of themselves, also while they hang."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import child_environment
from ranks import mark, start_ranks

from pycomm import _process_reports
from pycomm.cli import main

pytestmark = pytest.mark.needs_native


def _status(*arguments: str) -> tuple[int, str]:
    """By a process of its own, as a user would."""
    done = subprocess.run(
        [sys.executable, "-m", "pycomm", "status", *arguments],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
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
        while not Path(go).exists():
            time.sleep(0.01)
    dist.all_reduce(torch.ones(1000))
    mark("ended")
    while not Path(go + ".end").exists():
        time.sleep(0.01)


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
        (said,) = [one for one in report["problems"] if "float32 x 1000" in one]
        assert said.startswith("Rank 0 of group") and "rank 1 has not entered it" in said
        code, text = _status("--after", "0.2")
        assert code == 1 and "rank 1 has not entered it" in " ".join(text.split())
        assert all(len(line) <= 79 for line in text.splitlines())
        go.touch()
        ranks.wait_for_mark(0, "ended")
        ranks.wait_for_mark(1, "ended")
        _, text = _status("--json", "--after", "0.2")
        rows = _of(pids, text)["rows"]
        assert [row["op"] for row in rows] == [None, None]
        (tmp_path / "go.end").touch()
        ranks.collect(30).check()


def test_a_stopped_process_is_said_not_to_answer(tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.touch()
    with start_ranks(2, _one_waits, args=(str(go),)) as ranks:
        for rank in (0, 1):
            ranks.wait_for_mark(rank, "ended")
        ranks.kill(1, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            code, text = _status("--json", "--timeout", "1")
            assert time.monotonic() - begin < 30
        finally:
            ranks.kill(1, signal.SIGCONT)
        (silent,) = _of([ranks.pid(1)], text)["silent"]
        assert code == 1 and "does not answer" in silent["why"]
        assert [row["rank"] for row in _of([ranks.pid(0)], text)["rows"]] == [0]
        (tmp_path / "go.end").touch()
        ranks.collect(30).check()


def test_nobody_is_no_problem(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    table = tmp_path / "unix"
    table.write_text("Num RefCount Protocol Flags Type St Inode Path\n")
    monkeypatch.setattr(_process_reports, "_UNIX_SOCKETS", table)
    assert main(["status"]) == 0
    assert "No process of this user" in capsys.readouterr().out


def test_a_table_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(_process_reports, "_UNIX_SOCKETS", tmp_path / "none")
    assert main(["status"]) == 2
    assert "/proc/net/unix cannot be read" in capsys.readouterr().err
    assert main(["status", "--timeout", "0"]) == 2


def _listing(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "unix"
    row = f"0000000000000000: 00000002 00000000 00010000 0005 01 12345 @{name}\n"
    table.write_text("Num RefCount Protocol Flags Type St Inode Path\n" + row)
    monkeypatch.setattr(_process_reports, "_UNIX_SOCKETS", table)


@pytest.mark.parametrize(
    ("greeting", "answer", "expected"),
    [
        (b"", None, "nothing"),  # hangs up
        (b"hello, I am something else", None, "nothing"),
        (
            _process_reports._GREETING.pack(_process_reports._GREETING_MAGIC, 3),
            b"",
            "does not tell",
        ),
        (
            _process_reports._GREETING.pack(_process_reports._GREETING_MAGIC, 3),
            b"short",
            "something else",
        ),
        (
            _process_reports._GREETING.pack(_process_reports._GREETING_MAGIC, 3),
            _process_reports._ASK.pack(_process_reports._REPORT_MAGIC, 0, 0),
            "no memory",
        ),
        (
            _process_reports._GREETING.pack(_process_reports._GREETING_MAGIC, 3),
            _process_reports._ASK.pack(_process_reports._REPORT_MAGIC, 1, 5),
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
            with listener.accept()[0] as asker:
                if greeting:
                    socket.send_fds(asker, [greeting], [memory])
                if answer:
                    asker.recv(100)
                    socket.send_fds(asker, [answer], [memory])
            os._exit(0)
        try:
            found = _process_reports.reports(5.0)
        finally:
            os.waitpid(child, 0)
            os.close(memory)
    if expected == "nothing":
        assert found == []
    else:
        (one,) = found
        assert one.record is None and expected in one.why
