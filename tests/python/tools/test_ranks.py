"""The rig itself: a test that leans on it is only worth something if the rig can fail."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import random
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
import zygote
from ranks import mark, other_backends_threads, run_python, run_ranks, start_ranks
from time_bound import assert_within

pytestmark = pytest.mark.ci


def double(rank: int, world_size: int, start: float) -> float:
    tensor = torch.full((3,), start + rank)
    dist.all_reduce(tensor)
    return float(tensor[0])


def fail_on_one(rank: int, world_size: int) -> None:
    print(f"rank {rank} was here")
    if rank == 1:
        raise ValueError("wanted")


def hang(rank: int, world_size: int) -> None:
    mark("hanging")
    while True:
        time.sleep(1)


def make_gloo_group(rank: int, world_size: int) -> list[str]:
    """Returns the names of gloo's threads: they name themselves, some time after they started."""
    dist.new_group(backend="gloo")
    deadline = time.monotonic() + 30
    while not (names := other_backends_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return names


def killed(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("init", ["file", "tcp", "env"])
def test_values_come_back_in_rank_order(init: str) -> None:
    results = run_ranks(2, double, args=(1.0,), backend="gloo", init=init, import_pycomm=False)
    assert results.values() == [3.0, 3.0]


def test_an_exception_is_reported_with_its_text_and_output() -> None:
    with pytest.raises(AssertionError, match="ValueError: wanted"):
        run_ranks(2, fail_on_one, init="none")
    results = run_ranks(2, "test_ranks:fail_on_one", init="none", check=False)
    assert [result.exit_code for result in results] == [0, 1]
    (error,) = results.errors()
    assert (error.type_name, error.text) == ("ValueError", "wanted")
    assert "rank 1 was here" in results[1].stdout


def test_a_gloo_group_is_noticed() -> None:
    options: dict[str, Any] = {"backend": "gloo", "import_pycomm": False}
    (value,) = run_ranks(1, make_gloo_group, **options).values()
    assert value, "gloo's threads have other names now: other_backends_threads sees nothing"
    (error,) = run_ranks(1, make_gloo_group, check=False, only_pycomm=True, **options).errors()
    assert "ProcessGroupGloo" in error.text


def test_a_signal_is_seen_as_such() -> None:
    results = run_ranks(2, killed, init="none", check=False)
    assert [result.exit_code for result in results] == [0, -signal.SIGKILL]


@pytest.mark.time_bound
def test_what_hangs_is_killed_and_shows_its_stack() -> None:
    with start_ranks(1, hang, init="none") as running:
        running.wait_for_mark(0, "hanging")
        started_s = time.monotonic()
        (result,) = running.collect(0.5)
    assert result.timed_out and not result.ok
    assert "in hang" in result.stderr
    assert_within(time.monotonic() - started_s, 30)


def sleep_shortly(rank: int, world_size: int) -> None:
    mark("asleep")
    time.sleep(0.3)


def test_a_machine_that_stands_still_is_not_held_against_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = time.monotonic, itertools.count()
    with start_ranks(1, sleep_shortly, init="none") as running:
        running.wait_for_mark(0, "asleep")
        stub = types.SimpleNamespace(monotonic=lambda: real() + 1000 * (next(calls) > 0))
        monkeypatch.setattr(ranks, "time", stub)
        assert running.collect(60)[0].ok


def test_leaving_the_block_kills() -> None:
    with start_ranks(1, hang, init="none") as running:
        running.wait_for_mark(0, "hanging")
        pid = running.pid(0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_mark_never_reached_is_an_error() -> None:
    with (
        start_ranks(1, fail_on_one, init="none") as running,
        pytest.raises(AssertionError, match="'never'"),
    ):
        running.wait_for_mark(0, "never")


# Forked ranks


def look_around(rank: int, world_size: int) -> dict[str, Any]:
    """What a test could trip over in a rank, as long as it is the same in every rank."""
    atexit.register(lambda: print("exit handler", flush=True))
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    mark_fd = int(sys.argv.pop())
    return {
        "environment": dict(os.environ),
        "of libc": (getenv(b"PYCOMM_RANKS_TEST"), getenv(b"RANK")),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "open": [os.readlink(f"/proc/self/fd/{fd}").split("/")[-1] for fd in (0, 1, 2)],
        "mark": os.readlink(f"/proc/self/fd/{mark_fd}").split(":")[0],
        "pycomm": [name for name in sys.modules if name.split(".")[0] == "pycomm"],
        "argv": [Path(each).name for each in sys.argv[:1]] + sys.argv[2:],
        "path": sys.path,
        "signals": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGPIPE)],
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "main": threading.current_thread() is threading.main_thread(),
        "buffered": (sys.stdout.line_buffering, sys.stderr.line_buffering),
    }


def own_random_number(rank: int, world_size: int) -> tuple[int, float, float, float]:
    return os.getppid(), random.random(), float(np.random.random()), float(torch.rand(1))


def test_a_forked_rank_finds_what_a_fresh_one_finds() -> None:
    env: dict[str, str | None] = {"PYCOMM_RANKS_TEST": "here", "RANK": None}
    fresh, forked = (
        run_ranks(1, look_around, init="none", env=env, fresh=fresh) for fresh in (True, False)
    )
    assert fresh[0].value == forked[0].value
    assert fresh[0].value["of libc"] == (b"here", None)
    assert fresh[0].stdout == forked[0].stdout == "exit handler\n"
    assert fresh[0].value["pycomm"] == []


def test_which_ranks_are_forked() -> None:
    (_, *first), (parent, *second) = run_ranks(2, own_random_number, init="none").values()
    assert parent in zygote.zygote_pids()
    assert len({*first, *second}) == 6, "ranks draw the same random numbers"
    for options in ({"fresh": True}, {"env": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}):
        ((parent, *_),) = run_ranks(1, own_random_number, init="none", **options).values()
        assert parent == os.getpid()


def exit_with(rank: int, world_size: int, code: int) -> None:
    os._exit(code)


def test_exit_codes_of_forked_ranks() -> None:
    for code in (0, 3):
        (result,) = run_ranks(1, exit_with, args=(code,), init="none", check=False)
        assert result.exit_code == code


def test_the_end_of_the_zygote_is_told_and_ends_its_ranks() -> None:
    with (
        pytest.raises(zygote.ZygoteDiedError, match="that ranks are forked from has ended with -9"),
        start_ranks(1, hang, init="none") as running,
    ):
        running.wait_for_mark(0, "hanging")
        (pid,) = [each for each in zygote.zygote_pids() if str(each) == parent_of(running.pid(0))]
        os.kill(pid, signal.SIGKILL)
        running.collect(60)
    wait_for_the_end(running.pid(0))
    assert run_ranks(1, double, args=(1.0,), backend="gloo", import_pycomm=False).values() == [1.0]


def parent_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]


def wait_for_the_end(pid: int) -> None:
    """Returns once it has ended. It stays as a zombie until its new parent waits for it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "XZ":
                return
        except OSError:
            return
        time.sleep(0.01)
    raise AssertionError(f"{pid} still runs")


A_PARENT_THAT_IS_KILLED = """
import os, signal, sys
from ranks import start_ranks
with start_ranks(2, "test_ranks:hang", init="none", fresh=sys.argv[1] == "fresh") as running:
    for rank in range(2):
        running.wait_for_mark(rank, "hanging")
    print(running.pid(0), running.pid(1), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["fresh", "forked"])
def test_ranks_end_with_their_parent_however_it_ends(how: str) -> None:
    done = run_python(["-c", A_PARENT_THAT_IS_KILLED, how])
    assert done.returncode == -signal.SIGKILL, done.stderr
    for pid in map(int, done.stdout.split()):
        wait_for_the_end(pid)
