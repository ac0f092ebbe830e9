"""``python -m pycomm run``: its lists of hosts, its secret, and a job on this host alone."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from processes import child_environment, run_python

from pycomm._native import loader
from pycomm.cli import doctor, main, remote_end, run
from pycomm.doctor.facts import HostFacts, unique_names
from pycomm.doctor.report import Report

_LIMIT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def parse(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return parser.parse_args([*given, "train.py"])


def hosts_of(*given: str) -> list[run.Host]:
    return run.read_hosts(parse(*given))


def test_hosts_have_names_and_ranks(tmp_path: Path) -> None:
    listed = hosts_of("-H", "nowhere.example:2,me@other.example,[fd00::9]:3", "--nproc-per-node=4")
    assert [(host.target, host.name, host.count) for host in listed] == [
        ("nowhere.example", "nowhere.example", 2),
        ("me@other.example", "other.example", 4),
        ("fd00::9", "fd00::9", 3),
    ]
    file = tmp_path / "hosts"
    file.write_text("# two\n\nnowhere.example slots=2  # a\nme@other.example : 1\n")
    with pytest.raises(ValueError, match=r"hosts: 'me@other\.example : 1' is not HOST:RANKS"):
        hosts_of("--hostfile", str(file))
    file.write_text(file.read_text().replace(" : ", ":"))
    assert [host.count for host in hosts_of("--hostfile", str(file))] == [2, 1]
    assert [host.local for host in hosts_of("-H", "localhost,me@127.0.0.1")] == [True, False]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["-H", "alpha:0"], "'alpha:0' is not HOST:RANKS"),
        (["-H", "-oProxyCommand=touch:1"], "is not HOST:RANKS"),
        (["-H", "-Fx@alpha:1"], "is not HOST:RANKS"),
        (["-H", "alpha:1,root@alpha:2"], "lists alpha twice"),
        (["-H", ","], "lists no host"),
        (["--hostfile", "/nowhere/hosts"], "No such file or directory: '/nowhere/hosts'"),
        (["-H", "localhost", "-x", "NO_SUCH_VARIABLE_9"], "NO_SUCH_VARIABLE_9: the variable is"),
        (["-H", "localhost", "-x", "PYCOMM_SECRET=a"], "PYCOMM_SECRET is not passed"),
    ],
)
def test_wrong_usage_is_2(given: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = f"{given[0]}{given[1]}" if given[1].startswith("-") else None
    assert main(["run", *([option] if option else given), "train.py"]) == 2
    assert why in capsys.readouterr().err


def test_an_ssh_command_with_an_open_quote_is_wrong_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["run", "-H", "a", "--ssh", 'ssh "x', "train.py"]) == 2
    assert "'ssh \"x' is no command: are its quotes closed?" in capsys.readouterr().err


def test_what_to_type_by_hand_has_the_variables_and_whole_paths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYCOMM_LOG_LEVEL", "info")
    given = ["-H", "far.example,localhost", "-x", "MINE=a b", "--secret", "--folder=work"]
    assert main(["run", *given, "--python=.venv/bin/python", "--dry-run", "train.py"]) == 0
    out, err = capsys.readouterr()
    far, here = out.splitlines()
    assert here.startswith(f"cd {tmp_path}/work && env ")
    assert " PYCOMM_LOG_LEVEL=info " in here and " 'MINE=a b' " in here
    assert f" {tmp_path}/work/.venv/bin/python -u -m torch.distributed.run " in here
    assert (
        "'MINE=a b'"
        in subprocess.run(
            ["sh", "-c", f"printf %s {far.partition(' far.example ')[2]}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    assert "--secret is left out above" in err
    assert "pycomm-secret" not in out + err


@pytest.mark.parametrize(
    ("first", "own", "address"),
    [
        ("localhost", ["192.0.2.1", "192.0.2.2"], "192.0.2.1"),
        ("127.0.1.1", ["fd00::1"], "[fd00::1]"),
        ("localhost", [], "localhost"),
        ("[fd00::9]", ["192.0.2.1"], "[fd00::9]"),
    ],
)
def test_what_to_type_by_hand_has_an_address_that_leads_to_the_first_host(
    first: str,
    own: list[str],
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(remote_end, "own_addresses", lambda: own)
    assert main(["run", "-H", f"{first},192.0.2.9", "--dry-run", "train.py"]) == 0
    found = re.findall(r"--master-addr=([^ ']+)", capsys.readouterr().out.replace("'\"'\"'", ""))
    assert found == [address, address]


def test_an_address_that_can_be_bound_is_not_of_this_host_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)  # net.ipv4.ip_nonlocal_bind
    assert not run._is_this_host("192.0.2.1")
    monkeypatch.setattr(remote_end, "own_addresses", lambda: ["192.0.2.1"])
    assert run._is_this_host("192.0.2.1")
    assert run._is_this_host("127.0.0.9")


def test_a_file_in_the_home_folder_does_not_hide_a_standard_module(tmp_path: Path) -> None:
    for name in ("json", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stray file')")
    code = "import random\ndef main(job): print(job['word'])\n"
    done = subprocess.run(
        [sys.executable, "-c", run._BOOTSTRAP],
        cwd=tmp_path,
        input=json.dumps({"code": code, "word": "up"}) + "\n",
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("up\n", "")


def test_silent_clients_do_not_hold_up_the_one_that_asks() -> None:
    listener = remote_end._Listener(None, 0, "a word")
    try:
        with contextlib.ExitStack() as held:
            for _ in range(3):
                held.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
            assert remote_end.reach(["127.0.0.1"], listener.port, "a word") == {"127.0.0.1": ""}
    finally:
        listener.close()


def test_a_host_without_an_ssh_client_says_what_to_install(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "-H", "nowhere.example", "--ssh=/nowhere/ssh", "train.py"]) == 1
    why = "its process did not start (/nowhere/ssh: No such file or directory)"
    hint = "Try: install the ssh client, or --ssh"
    assert capfd.readouterr().err == f"pycomm run: nowhere.example: {why}. {hint}\n"


# What the launcher makes of what the hosts report


class Reports:
    """A launcher of hosts a (ranks 0 and 1) and b (rank 2), fed with what they would print."""

    def __init__(self, *options: str) -> None:
        arguments = parse("-H", "a.example:2,b.example:1", *options)
        self.launch = run._Launch(arguments, run.read_hosts(arguments), {})
        self.a, self.b = self.launch._hosts
        for host in (self.a, self.b):
            host.begun = True
            host.open_streams = 2
            host.process = subprocess.Popen(["true"])
            host.process.wait()

    def say(self, host: run.Host, **values: Any) -> None:
        line = f"{self.launch._word}{json.dumps(values)}\n".encode()
        self.launch._take_line(host, 1, line)

    def print_error(self, host: run.Host, rank: int, peer: int, group: str = "") -> None:
        who = f"peer={peer} peer_host=b rank={rank} host={host.name} {group}"
        line = f"[{rank}@{host.name}] lost [code=PEER_DEAD {who}op=send seq=1]\n"
        self.launch._take_line(host, 2, line.encode())

    def end(self, host: run.Host, code: int | None) -> None:
        """With an exit of torchrun, or as a lost connection does."""
        if code is not None:
            self.say(host, exit=code)
        for _ in range(2):
            self.launch._events.put(run._Event(host, 1))
            self.launch._take(1.0)

    def verdict(self, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
        code = self.launch._verdict()
        for printer in self.launch._printers.values():
            assert printer.finish(10)
        lines = capfd.readouterr().err.splitlines()
        return code, lines[-1].removeprefix("pycomm run: ").partition(";")[0] if lines else ""


def an_unknown_code_came_first(job: Reports) -> None:
    job.say(job.a, rank=0, code=None)
    job.say(job.a, rank=1, code=7)
    job.end(job.a, 1)
    job.end(job.b, 1)


def only_an_unknown_code_came(job: Reports) -> None:
    job.say(job.a, rank=1, code=None)
    job.end(job.a, 1)
    job.end(job.b, 1)


def an_error_was_caught(job: Reports) -> None:
    job.print_error(job.a, 0, 2)
    job.print_error(job.a, 0, 1)
    for rank, code in ((0, 3), (1, 5)):
        job.say(job.a, rank=rank, code=code)
    job.end(job.a, 1)
    job.say(job.b, rank=2, code=-signal.SIGTERM)
    job.end(job.b, 1)


def an_error_of_a_subgroup(job: Reports) -> None:
    job.print_error(job.a, 0, 2, 'group=dp group_ranks="0, 2" ')
    job.say(job.a, rank=0, code=3)
    job.end(job.a, 1)
    job.end(job.b, None)


def an_error_of_a_default_group_that_has_lost_a_rank(job: Reports) -> None:
    job.print_error(job.a, 0, 2, 'group=0 group_ranks="0, 2" ')
    job.say(job.a, rank=0, code=3)
    job.end(job.a, 1)
    job.end(job.b, None)


def the_blamed_rank_ended_with_0(job: Reports) -> None:
    job.print_error(job.a, 0, 2)
    job.say(job.b, rank=2, code=0)
    job.end(job.b, 0)
    job.say(job.a, rank=0, code=3)
    job.end(job.a, 1)


def ranks_were_started_again(job: Reports) -> None:
    job.print_error(job.a, 0, 2)
    job.say(job.a, rank=0, code=3)
    job.say(job.a, restart=True)
    job.say(job.a, rank=0, code=4)
    job.end(job.a, 1)
    job.say(job.b, rank=2, code=6)
    job.end(job.b, 1)


def a_host_was_lost_later(job: Reports) -> None:
    job.say(job.a, rank=0, code=7)
    job.end(job.b, None)
    job.end(job.a, 1)


def a_rank_saw_first_that_a_host_was_lost(job: Reports) -> None:
    job.print_error(job.a, 0, 2)
    job.say(job.a, rank=0, code=1)
    job.end(job.a, 1)
    job.end(job.b, None)


def torchrun_did_not_start(job: Reports) -> None:
    job.say(job.b, not_started="[Errno 28] No space left on device")
    job.end(job.b, 1)
    job.say(job.a, rank=0, code=1)
    job.end(job.a, 1)


@pytest.mark.parametrize(
    ("of_b", "address"),
    [
        (["10.77.0.1", "fd00::1"], "10.77.0.1"),
        (["fd00::1"], "[fd00::1]"),
        ([], ""),
    ],
)
def test_the_first_address_that_all_hosts_reach_is_taken(of_b: list[str], address: str) -> None:
    """Host a reaches itself at all candidates but the last; b reaches it there, and at `of_b`."""
    job = Reports()
    candidates = ["10.99.0.9", "10.77.0.1", "fd00::1", "10.88.0.8"]
    of_b = [*of_b, candidates[-1]]
    job.a.answers.update(port=29500, facts={"addresses": candidates})
    for host, reached in ((job.a, candidates[:-1]), (job.b, of_b)):
        found = {each: "" if each in reached else "timed out" for each in candidates}
        host.answers["reached"] = found
    reasons = job.launch._find_address()
    assert [(host.name, why.partition(",")[0]) for host, why in reasons] == (
        [] if address else [("a.example", "has no address that all other hosts reach")]
    )
    assert job.launch._address == (address or "127.0.0.1")


VERDICTS: dict[Callable[[Reports], None], tuple[int, str]] = {
    an_unknown_code_came_first: (7, "rank 1 on a.example failed first: exit code 7"),
    only_an_unknown_code_came: (1, "rank 1 on a.example failed first"),
    an_error_was_caught: (5, "rank 1 on a.example failed first: exit code 5"),
    an_error_of_a_subgroup: (3, "rank 0 on a.example failed first: exit code 3"),
    an_error_of_a_default_group_that_has_lost_a_rank: (1, "the connection to b.example was lost"),
    the_blamed_rank_ended_with_0: (3, "rank 0 on a.example failed first: exit code 3"),
    ranks_were_started_again: (4, "rank 0 on a.example failed first: exit code 4"),
    a_host_was_lost_later: (7, "rank 0 on a.example failed first: exit code 7"),
    a_rank_saw_first_that_a_host_was_lost: (1, "the connection to b.example was lost"),
    torchrun_did_not_start: (
        1,
        "torchrun did not start on b.example: [Errno 28] No space left on device",
    ),
}


@pytest.mark.parametrize("happen", VERDICTS, ids=lambda one: one.__name__)
def test_what_failed_first(
    happen: Callable[[Reports], None], capfd: pytest.CaptureFixture[str]
) -> None:
    job = Reports()
    happen(job)
    assert job.verdict(capfd) == VERDICTS[happen]


@pytest.mark.parametrize("asked", [False, True], ids=["by itself", "asked to end"])
def test_a_torchrun_that_failed_after_its_ranks_has_not_gone_well(
    asked: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Reports("--elastic")
    job.end(job.b, None)
    job.say(job.a, done=True)
    if asked:
        job.launch._end(signal.SIGTERM)
    job.end(job.a, 9)
    assert job.verdict(capfd)[0] == (0 if asked else 1)


def test_a_line_that_was_cut_off_with_its_connection_is_ignored() -> None:
    job = Reports()
    job.launch._take_line(job.b, 1, f'{job.launch._word}{{"rank": 2, "co'.encode())
    assert not job.b.answers


def test_a_launcher_that_waits_for_the_last_hosts_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_SETTLE_S", 0.01)
    monkeypatch.setattr(run, "_LEAVE_S", 0.3)
    job = Reports("--grace=0")
    take, end = job.launch._take, job.launch._end
    timeouts: list[float] = []

    def report(rank: int, code: int) -> None:
        line = f"{job.launch._word}{json.dumps({'rank': rank, 'code': code})}\n"
        job.launch._events.put(run._Event(job.a, 1, line.encode()))

    def take_counted(timeout_s: float) -> None:
        timeouts.append(timeout_s)
        take(timeout_s)

    def end_with_reports(*given: Any) -> None:
        end(*given)
        report(1, -signal.SIGTERM)

    monkeypatch.setattr(job.launch, "_take", take_counted)
    monkeypatch.setattr(job.launch, "_end", end_with_reports)
    report(0, 7)
    assert job.launch.watch() == 7
    assert len(timeouts) < 10
    assert job.launch._printers[2].finish(10)


def test_output_waits_for_room_and_reports_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    line = b"x" * 999 + b"\n"
    monkeypatch.setattr(run, "_UNPRINTED_NBYTES", 100 * len(line))
    read, write = os.pipe()
    errors: list[OSError] = []
    printer = run._Printer(write, errors.append)

    def print_many() -> None:
        for _ in range(1000):
            assert printer.admit(len(line), wait=True)
            printer.put(line, len(line))

    many = threading.Thread(target=print_many)
    many.start()
    try:
        deadline = time.monotonic() + 10
        full_since = time.monotonic()
        while time.monotonic() < min(full_since + 0.3, deadline):
            time.sleep(0.01)
            if printer._nbytes < 100 * len(line):  # as long as the pipe takes lines
                full_since = time.monotonic()
        assert printer._nbytes == 100 * len(line)
        assert printer.admit(0, wait=False)
        assert not printer.finish(0.0)
        with open(read, "rb") as lines:
            assert all(next(lines) == line for _ in range(1000))
            many.join()
            assert printer.finish(10)
        printer.put(line)
        printer.put(line)
        with pytest.raises(BrokenPipeError):
            printer.finish(10)
        assert [type(error) for error in errors] == [BrokenPipeError]
    finally:
        many.join(10)
        os.close(write)


def test_output_without_room_is_left_out_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_UNPRINTED_NBYTES", 1)
    printer = run._Printer(os.open(os.devnull, os.O_WRONLY), lambda _: None)
    assert printer.admit(1, wait=True)
    admitted: list[bool] = []
    waiting = threading.Thread(target=lambda: admitted.append(printer.admit(1, wait=True)))
    waiting.start()
    printer.hurry()
    waiting.join(10)
    assert admitted == [False]
    assert not printer.finish(0.0)


def test_lines_to_one_place_are_whole() -> None:
    prints = """
import argparse
from pycomm.cli import run
launch = run._Launch(argparse.Namespace(), [], {})
for _ in range(20):
    for stream, letter in ((1, b"a"), (2, b"b")):
        launch._printers[stream].put(letter * 100_000 + b"\\n")
for printer in launch._printers.values():
    printer.finish(None)
"""
    done = subprocess.run(
        [sys.executable, "-c", prints],
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert sorted(done.stdout.split()) == 20 * [b"a" * 100_000] + 20 * [b"b" * 100_000]


def test_lines_of_a_host_that_was_given_up_are_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_CLOSE_S", 0.1)
    monkeypatch.setattr(remote_end, "SILENCE_S", 0.1)
    job = Reports("--grace=0")
    job.launch._give_up_at = time.monotonic()
    assert job.launch.watch() == 1
    job.launch._events.put(run._Event(job.a, 1, b"[0@a] the last words\n"))
    job.launch.close()
    shown = capfd.readouterr()
    assert shown.out == "[0@a] the last words\n"
    assert "some output is left out" in shown.err  # the streams have not ended


def test_a_host_can_end_if_nobody_reads_the_output_any_more(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_UNPRINTED_NBYTES", 1000)
    monkeypatch.setattr(remote_end, "SILENCE_S", 5.0)
    job = Reports("--grace=0")
    fail = job.launch._printers[1]._fail
    read, write = os.pipe()
    os.close(read)
    job.launch._printers[1] = run._Printer(write, fail)
    job.a.open_streams, job.b.open_streams = 0, 1
    much = "print('x\\n' * 500_000)"
    with subprocess.Popen([sys.executable, "-c", much], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        job.b.process = process
        reader = threading.Thread(target=job.launch._read, args=(job.b, 1, process.stdout))
        reader.start()
        with pytest.raises(BrokenPipeError):
            try:
                job.launch.watch()
            finally:
                job.launch.close()
        assert process.returncode == 0
        reader.join(10)
    os.close(write)
    assert "did not answer" not in capfd.readouterr().err


def test_a_signal_after_the_last_line_ends_the_wait_for_a_reader(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_CLOSE_S", 0.1)
    job = Reports()
    job.a.open_streams = job.b.open_streams = 0
    read, write = os.pipe()
    job.launch._printers[1] = run._Printer(write, lambda _: None)
    job.launch._printers[1].put(b"x" * 1_000_000)
    job.launch._events.put(run._Event(None, signal=signal.SIGTERM))
    closing = threading.Thread(target=job.launch.close, daemon=True)
    closing.start()
    closing.join(10)
    ended = not closing.is_alive()
    os.close(read)  # ends the others
    closing.join(10)
    assert ended
    assert capfd.readouterr().err == "pycomm run: some output is left out: it was not read\n"


@pytest.mark.parametrize("another", [False, True])
def test_an_error_of_the_last_line_is_raised(another: bool) -> None:
    job = Reports()
    job.a.open_streams = job.b.open_streams = 0
    job.launch._printers[1] = run._Printer(os.open("/dev/full", os.O_WRONLY), lambda _: None)
    job.launch._printers[1].put(b"x\n")
    with pytest.raises(ValueError if another else OSError, match="another" if another else "space"):
        try:
            if another:
                raise ValueError("another")
        finally:
            job.launch.close()


def test_a_long_line_is_whole_beside_heartbeats() -> None:
    read, write = os.pipe()
    host = hosts_of("-H", "a.example")[0]
    with open(read, "rb") as lines, open(write, "wb", buffering=0) as stdin:
        process: Any = argparse.Namespace(stdin=stdin)
        host.process = process
        sent = "x" * 1_000_000
        sender = threading.Thread(target=host.send, kwargs={"sent": sent})
        beats = threading.Thread(target=lambda: [host.beat() for _ in range(100)])
        sender.start()
        while select.select([], [write], [], 0)[1]:  # until the line has filled the pipe
            pass
        beats.start()
        assert json.loads(next(line for line in lines if line.strip())) == {"sent": sent}
        sender.join()
        beats.join()


@pytest.mark.parametrize("ignored", [False, True])
def test_a_signal_that_nohup_ignores_stays_ignored(ignored: bool) -> None:
    arguments = parse("-H", "localhost")
    arguments.python, arguments.folder = sys.executable, os.getcwd()
    launch = run._Launch(arguments, [], {})
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        launch.open()
        signal.raise_signal(signal.SIGHUP)
        assert launch._events.empty() == ignored
    finally:
        launch.close()
        signal.signal(signal.SIGHUP, before)


# What a host makes of its ranks


def test_ranks_are_done_when_the_last_of_each_is_known_to_have_ended_with_0() -> None:
    ranks = remote_end._Ranks(os.getpid(), 2)
    for attempt, (codes, reaped) in enumerate([((0, 0), True), ((0, 7), False), ((0, 0), False)]):
        children = [
            subprocess.Popen(
                ["sh", "-c", f"read line; exit {code}"],
                env={"RANK": str(rank)},
                stdin=subprocess.PIPE,
            )
            for rank, code in enumerate(codes)
        ]
        restarted = ranks.find()
        deadline = time.monotonic() + 10
        while (
            len(ranks.alive) < 2 and time.monotonic() < deadline
        ):  # exec() sets the environment last
            restarted = ranks.find() or restarted
        assert restarted == (attempt > 0)
        assert not ranks.find()
        assert not ranks.all_done
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
            # As torchrun does, or a moment before it does.
            os.waitid(os.P_PID, child.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
        ends = sorted(ranks.ended(descriptor) for descriptor in list(ranks.alive))
        assert ends == [(rank, None if reaped else code) for rank, code in enumerate(codes)]
        assert ranks.all_done == (codes == (0, 0) and not reaped)
        for child in children:
            child.wait()


def test_torchrun_inherits_no_rank() -> None:
    # Until a child of torchrun begins, its variables are torchrun's.
    old = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "ROLE_RANK": "0", "HOME": "/root"}
    found = remote_end._environment(old, {"RANK": "1", "MINE": "a"})
    assert found == {"HOME": "/root", "MINE": "a"}


@contextlib.contextmanager
def remote_end_that_starts(
    text: str, folder: Path, grace_s: float, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A remote end and its output. What it starts as torchrun is this text."""
    package = folder / "torch" / "distributed"
    package.mkdir(parents=True)
    for path in (folder / "train.py", package.parent / "__init__.py", package / "__init__.py"):
        path.touch()
    (package / "run.py").write_text(text)
    job = {
        "code": Path(remote_end.__file__).read_text(),
        "word": "a-word:",
        "folder": str(folder),
        "program": "train.py",
        "module": False,
        "no_python": False,
        "variables": variables,
        "silence_s": 600.0,
        "grace_s": grace_s,
    }
    start = {"act": "start", "torchrun": [], "count": 1, "keeps_logs": True, "secret": ""}
    with subprocess.Popen(
        [sys.executable, "-c", run._BOOTSTRAP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as end:
        assert end.stdin is not None and end.stdout is not None
        try:
            end.stdin.write(f"{json.dumps(job)}\n{json.dumps(start)}\n")
            end.stdin.flush()
            yield end, end.stdout
        finally:
            end.kill()


SAVES_SLOWLY = f"""
import signal, sys, time
def save(*_):
    time.sleep({remote_end._POLITE_S + 1})
    print("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up")
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_remote_end_that_is_asked_to_end_leaves_ranks_their_grace(
    number: signal.Signals, tmp_path: Path
) -> None:
    with remote_end_that_starts(SAVES_SLOWLY, tmp_path, 100.0) as (end, output):
        while (line := output.readline()) != "up\n":
            assert line
        end.send_signal(number)
        # Its input stays open: the signal alone has to end it.
        assert "saved\n" in output.readlines()
        assert end.wait(60) == 0


@pytest.mark.parametrize(("given", "limit"), [({}, "42"), ({_LIMIT: "7"}, "7")])
def test_torchrun_kills_no_rank_before_its_grace_is_over(
    given: dict[str, str], limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(_LIMIT, raising=False)
    text = f"import os\nprint('limit', os.environ.get('{_LIMIT}'))\n"
    with remote_end_that_starts(text, tmp_path, 40.5, **given) as (_, output):
        assert f"limit {limit}\n" in output.readlines()


@pytest.mark.parametrize(
    ("program", "variables", "why"),
    [
        ("in_lib", {"PYTHONPATH": "{0}/lib:/nowhere"}, ""),
        ("in_lib", {"PYTHONPATH": "lib"}, ""),
        ("in_lib", {}, "there is no module in_lib"),
        ("in_own", {}, ""),
        ("in_own", {"PYTHONPATH": "{0}/lib"}, "there is no module in_own"),
        ("pytest", {"PYTHONPATH": "{0}/lib"}, ""),  # among the interpreter's own packages
        ("a_tool", {"PATH": "{0}/bin"}, ""),
        ("a_tool", {}, "there is no file {0}/a_tool"),
    ],
)
def test_a_host_is_checked_with_the_variables_of_the_job(
    program: str, variables: dict[str, str], why: str, tmp_path: Path
) -> None:
    for folder, name in (("lib", "in_lib.py"), ("own", "in_own.py"), ("bin", "a_tool")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch(0o700)
    job = {
        "folder": str(tmp_path),
        "program": program,
        "module": program != "a_tool",
        "no_python": program == "a_tool",
        "variables": {name: text.format(tmp_path) for name, text in variables.items()},
    }
    ask = f"{Path(remote_end.__file__).read_text()}\nprint(why_not(json.loads(input())))\n"
    done = subprocess.run(
        [sys.executable, "-c", ask],
        input=json.dumps(job),
        env={"PYTHONPATH": f"{tmp_path}/own:{sysconfig.get_path('purelib')}", "PATH": "/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout.partition(" for ")[0].rstrip(), done.stderr) == (why.format(tmp_path), "")


def test_a_host_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    host = remote_end._Host({"silence_s": 1.0, "grace_s": 1.0, "word": "", "variables": {}})
    reports: list[dict[str, Any]] = []
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    # close() ignores signals for the rest of its process, and of those that it starts.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(host, "_report", lambda **values: reports.append(values))
    host._obey("start", torchrun=[], count=1, keeps_logs=False, secret="")
    host.close()
    why = "[Errno 28] No space left on device: '/tmp/x'"
    assert reports == [{"not_started": why}, {"exit": 1}]


@pytest.mark.needs_native
def test_a_secret_is_one_to_the_native_part() -> None:
    loader.load()
    made = [loader.native.Secret.parse(run.make_secret(), "a test").key_id for _ in range(2)]
    assert made[0] != made[1]


def test_versions_are_those_of_what_would_be_imported() -> None:
    import pycomm

    assert remote_end.versions() == {"torch": str(torch.__version__), "pycomm": pycomm.__version__}


@pytest.mark.needs_native
def test_this_host_alone_needs_no_ssh_and_passes_arguments_and_exit_codes(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['MINE'], flush=True)\nsys.exit(5)\n"
    )
    done = run_python(
        [
            *("-m", "pycomm", "run", "-H", "localhost:1", "--ssh=/nowhere/ssh", "-x", "MINE=a b"),
            *("--monitor_interval=0.5", str(script), "--with_underscore", "--help", "--log-dir=x"),
        ],
        env={"TMPDIR": str(temporary)},
    )
    assert done.returncode == 5, done.stderr
    expected = r"[0@localhost] ['--with_underscore', '--help', '--log-dir=x'] a b"
    assert expected in done.stdout.splitlines(), done.stdout
    last = done.stderr.splitlines()[-1]
    assert last == "pycomm run: rank 0 on localhost failed first: exit code 5"
    assert not list(temporary.iterdir())
    # Of torchrun itself: a host, and no rank.
    assert re.search(r"^\[localhost\] .*exitcode", done.stderr, re.MULTILINE)


PRINTS_MUCH = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(int(sys.argv[1])):
    print("x" * 999)
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""


@contextlib.contextmanager
def printing_to_nobody(
    folder: Path, *given: str, kib: int, sleep_s: float
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[str], None]]]:
    """A job whose output fills the pipe, and a wait for a text among its errors."""
    (folder / "prints_much.py").write_text(PRINTS_MUCH)
    path = f"{folder}:{child_environment()['PYTHONPATH']}"
    words = ["-H", "localhost", "-x", f"PYTHONPATH={path}", *given, "-m", "prints_much"]
    job = subprocess.Popen(
        [sys.executable, "-m", "pycomm", "run", *words, str(kib), str(sleep_s)],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert job.stdout is not None and job.stderr is not None
    errors: list[bytes] = []
    stderr = job.stderr
    reader = threading.Thread(target=lambda: errors.extend(iter(stderr.readline, b"")))
    reader.start()

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + 60
        reads = True
        while text.encode() not in b"".join(errors):
            assert time.monotonic() < deadline and reads, b"".join(errors).decode()
            reads = reader.is_alive()  # asked before the text is looked for the last time
            time.sleep(0.02)

    try:
        deadline = time.monotonic() + 120
        unread = bytearray(4)
        while int.from_bytes(unread, sys.byteorder) < 60_000:
            assert time.monotonic() < deadline and job.poll() is None, b"".join(errors).decode()
            time.sleep(0.02)
            fcntl.ioctl(job.stdout, termios.FIONREAD, unread)
        yield job, wait_for
    finally:
        job.kill()
        job.stdout.close()
        job.wait()
        reader.join()
        stderr.close()


@pytest.mark.needs_native
@pytest.mark.ci
def test_signals_end_a_job_whose_output_nobody_reads(tmp_path: Path) -> None:
    much = printing_to_nobody(tmp_path, "--grace=100", kib=8000, sleep_s=300)
    with much as (job, wait_for):
        job.send_signal(signal.SIGTERM)
        wait_for("pycomm run: SIGTERM: ending all hosts; once more kills the ranks")
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 128 + signal.SIGTERM
        wait_for("pycomm run: some output is left out: it was not read")


@pytest.mark.needs_native
@pytest.mark.ci
def test_a_failed_rank_ends_a_job_whose_output_nobody_reads(tmp_path: Path) -> None:
    with printing_to_nobody(tmp_path, kib=500, sleep_s=0) as (job, wait_for):
        wait_for("pycomm run: rank 0 on localhost failed first: exit code 7")
        assert job.stdout is not None
        assert sum(b"x" * 999 in line for line in job.stdout) == 500
        assert job.wait(60) == 7


ENDS_LATE = """
import signal, sys, time
def save(*_):
    time.sleep(33)  # torchrun's own limit is 30
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.needs_native
@pytest.mark.nightly
@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="this torchrun kills its ranks after 30 s in any case"
)
def test_a_grace_longer_than_torchruns_own_limit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDS_LATE)
    with subprocess.Popen(
        [sys.executable, "-m", "pycomm", "run", "-H", "localhost", "--grace=300", str(script)],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        try:
            while line := job.stdout.readline():
                if line == "[0@localhost] up\n":
                    job.send_signal(signal.SIGTERM)
                    break
            assert "[0@localhost] saved\n" in job.stdout.readlines()
        finally:
            job.kill()


LEAVES_EARLY = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("pycomm")
dist.barrier()
if dist.get_rank() == 1:
    dist.destroy_process_group()  # the other one fails at once
    time.sleep(100)  # and has ended before this one, as if this one had much memory to give back
    sys.exit(7)
dist.barrier()
"""


@pytest.mark.needs_native
@pytest.mark.ci
def test_the_rank_that_others_blame_has_failed_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEAVES_EARLY)
    done = run_python(["-m", "pycomm", "run", "-H", "localhost:2", str(script)])
    assert "PEER_LEFT" in done.stderr
    last = done.stderr.splitlines()[-1]
    # torchrun, which sees rank 0 end first, ends rank 1 with a signal.
    assert last == "pycomm run: rank 1 on localhost failed first", done.stderr
    assert done.returncode == 1


def test_the_doctor_writes_what_run_reads(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    facts = [
        HostFacts(name="b", ranks=(2, 3), address="10.0.0.2"),
        HostFacts(name="a", ranks=(0, 1)),
    ]
    given = argparse.Namespace(hostfile=str(path), hosts=None, ranks_per_host=1)
    doctor._write_hostfile(Report(hosts=facts), given)
    assert path.read_text() == "a:2\nb:2  # 10.0.0.2\n"
    assert [(one.name, one.count) for one in hosts_of("--hostfile", str(path))] == [
        ("a", 2),
        ("b", 2),
    ]
    names = ["x.example", "fd00::2"]
    by_hand = argparse.Namespace(hostfile=str(path), hosts=names, ranks_per_host=8)
    facts = [HostFacts(name="x", ranks=range(8)), HostFacts(name="y", ranks=range(8, 16))]
    doctor._write_hostfile(Report(hosts=facts), by_hand)
    assert path.read_text() == "x.example:8\n[fd00::2]:8\n"
    assert [one.name for one in hosts_of("--hostfile", str(path))] == names


def test_the_doctor_writes_the_addresses_of_cloned_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    names, addresses = ["pi", "b", "pi"], ["192.0.2.1", "192.0.2.2", "fd00::3"]
    facts = [
        HostFacts(name=name, address=address, ranks=(rank,))
        for rank, (name, address) in enumerate(
            zip(unique_names(names, addresses), addresses, strict=True)
        )
    ]
    given = argparse.Namespace(hostfile=str(path), hosts=None, ranks_per_host=1)
    doctor._write_hostfile(Report(hosts=facts), given)
    listed = [one.name for one in hosts_of("--hostfile", str(path))]
    assert listed == ["192.0.2.1", "b", "fd00::3"]
