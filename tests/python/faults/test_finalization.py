"""What daemon threads do while the interpreter is finalized, which takes a second here.

A thread that asks for the interpreter's lock then, in C++ code, aborts the process.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import child_environment

from pycomm._native import process_end

pytestmark = pytest.mark.ci

COMMON = r"""
import atexit, os, sys, threading, time

import thread_state

rank, folder = int(sys.argv[1]), sys.argv[2]

class Slow:
    def __del__(self, mkdir=os.mkdir, sleep=time.sleep, path=folder + "/finalizing"):
        if mkdir is not None:
            mkdir(path)
            sleep(1.5)

def last():  # after pycomm's own handler
    ends.set()
    time.sleep(0.05)
    at_last()

def at_last():
    pass

ends = threading.Event()
if rank == 0:
    atexit.register(last)
import torch
import torch.distributed as dist
import pycomm

def start(backend, ranks):
    dist.init_process_group(
        backend, store=dist.FileStore(folder + "/store", ranks), rank=rank, world_size=ranks
    )

hooked = threading.Event()

def hook(state, bucket):
    hooked.set()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])

if rank == 0:
    sys.slow = Slow()  # gone when the interpreter clears its own modules
"""

FUTURE = r"""
# The future of an operation that has ended; its output is copied from staging, which takes a while.
start("pycomm", 1)
work = dist.all_reduce(torch.ones(6000, 6000).t(), async_op=True)

def late():
    ends.wait()
    work.get_future()

threading.Thread(target=late, daemon=True).start()
"""

TURN = r"""
# A hook that waits for another rank has the reducer's turn; the program's last handler wants it.
start("gloo", 2)
model = pycomm.DistributedDataParallel(torch.nn.Linear(4, 4))
model.register_comm_hook(None, hook)
if rank == 1:
    time.sleep(600)  # until it is killed

def at_last():
    try:
        model.reducer.prepare_for_forward()
    except RuntimeError as error:
        print("refused:", error, flush=True)

thread = threading.Thread(target=model(torch.ones(2, 4)).sum().backward, daemon=True)
thread.start()
hooked.wait()
thread_state.wait_until_asleep(thread.native_id)
"""

REFUSAL = r"""
# A rank whose settings are wrong stays two seconds, for the others to read why.
from pycomm._native import loader

refuse = loader.load().refuse_to_join
store = dist.FileStore(folder + "/store", 1)
why = (store, 0, 2, "group", "a test's reason", "localhost", [], False, None)
threading.Thread(target=refuse, args=why, daemon=True).start()
time.sleep(1)
"""


@pytest.mark.needs_native
@pytest.mark.parametrize(
    ("program", "ranks", "want"),
    [(FUTURE, 1, ""), (TURN, 2, "refused: the process ends"), (REFUSAL, 1, "")],
    ids=["future", "turn", "refusal"],
)
def test_a_daemon_thread_is_late(program: str, ranks: int, want: str, tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COMMON + program, str(rank), str(tmp_path)],
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said, _ = started[0].communicate(timeout=120)
    finally:
        for each in started:
            each.kill()
            each.wait()
    assert started[0].returncode == 0, said
    assert want in said


def test_the_end_waits_for_threads_that_want_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    # So long that only a thread that wants nothing ends it, also where it hardly gets a core.
    monkeypatch.setattr(process_end, "_SETTLE_S", 60.0)
    monkeypatch.setattr(process_end, "_HOLD_S", 0.05)
    interval_s = sys.getswitchinterval()
    naps = [0]
    enough = threading.Event()

    def nap() -> None:
        for _ in range(12):
            time.sleep(0.004)
            naps[0] += 1
        enough.wait()

    thread = threading.Thread(target=nap)
    thread.start()
    try:
        process_end._let_threads_return()
    finally:
        sys.setswitchinterval(interval_s)
    seen = naps[0]
    enough.set()
    thread.join()
    assert seen == 12
