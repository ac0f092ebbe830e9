"""The end of a process whose threads, callbacks or futures are still busy with pycomm.

Its exit code is the one that Python itself gives: pycomm ends no process by a signal, whatever a
thread of the program's is in. `make nightly` repeats each case, as these ends are races.
"""

from __future__ import annotations

import itertools
import json
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rings
from processes import child_environment

pytestmark = pytest.mark.ci

RANKS = r"""
# Forks the ranks of each case from one process that has imported torch. A rank runs the case and
# falls out of this file, so its interpreter ends like that of any program.
import gc, json, os, signal, sys, threading, time
import torch
import torch.distributed as dist
import pycomm

gc.freeze()  # else each end looks through torch's million objects, for half a second

def loop(step, forgiving):
    local.tensor = torch.ones(1000)
    while forgiving or not ended.is_set():
        try:
            step()
        except Exception:
            if not forgiving:
                return
            if not dist.is_initialized():
                time.sleep(0.001)  # else it is in operators of torch: see below

# Made before the loops: a daemon thread that is in an operator of torch at the end aborts the
# process without pycomm, too.
local = threading.local()

def recv():
    dist.recv(local.tensor, src=1 - rank)

def collective():
    dist.all_reduce(local.tensor)

def future():
    dist.irecv(local.tensor, src=1 - rank).get_future().wait()

def hook(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])

def train():
    torch.set_num_threads(1)
    nn = torch.nn
    layers = [nn.Linear(8, 8), pycomm.SyncBatchNorm(8), nn.Linear(8, 8), pycomm.SyncBatchNorm(8)]
    model = pycomm.DistributedDataParallel(nn.Sequential(*layers))
    model.register_comm_hook(None, hook)
    for _ in range(20):
        model(torch.randn(4, 8)).square().sum().backward()

def trains_on():
    # Backward passes with a comm hook, of which most begin when the main thread has ended.
    layers = [torch.nn.Linear(8, 8) for _ in range(2)]
    model = pycomm.DistributedDataParallel(torch.nn.Sequential(*layers))
    model.register_comm_hook(None, hook)
    for _ in range(30):
        model(torch.ones(4, 8)).sum().backward()
        began.set()
        time.sleep(0.1)
    print("it has trained", file=sys.stderr, flush=True)

def polls():
    # Asks a wrapper without a pause: the thread returns from C++ all the time.
    reducer = model.reducer
    ask = reducer.bucket_names if threading.get_ident() % 2 else reducer.members
    while True:
        for _ in range(1000):
            ask()

def sleeping(_):
    time.sleep(case["s"])
    print("it has returned", file=sys.stderr, flush=True)

def computing(_):
    end = time.monotonic() + case["s"]
    while time.monotonic() < end:
        sum(range(1000))
    print("it has returned", file=sys.stderr, flush=True)

def busy():
    what = case["what"]
    if what == "train":
        return train()
    if what == "trains_on":
        threading.Thread(target=trains_on).start()
        began.wait()
        return
    if what == "polls":
        global model
        model = pycomm.DistributedDataParallel(torch.nn.Linear(8, 8))
    if what in ("sleeping", "computing"):
        future = dist.all_reduce(torch.ones(8), async_op=True).get_future()
        futures.append(future.then(globals()[what]))
        return
    for _ in range(case.get("threads", 1)):
        threading.Thread(
            target=loop, args=(globals()[what], case["daemon"]), daemon=case["daemon"]
        ).start()

def start(rank):
    from datetime import timedelta
    seconds = 30 if case.get("daemon", True) else 0.5  # threads that are no daemons end with it
    dist.init_process_group(
        case.get("backend", "pycomm"), store=dist.FileStore(case["store"], 2),
        rank=rank, world_size=2, timeout=timedelta(seconds=seconds),
    )
    if case.get("says"):
        signal.signal(signal.SIGINT, lambda *_: sys.exit(case["says"]))
    dist.barrier()
    busy()
    time.sleep(0.05)  # so that most of the threads are where the case wants them

def exit_code(pid, stderr=None):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if stderr and "Ctrl-C ends it" in open(stderr).read():
            os.kill(pid, signal.SIGINT)
            stderr = None
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"

def end():
    how = case["end"]
    ended.set()
    if how == "forked":
        child = os.fork()
        if child == 0:
            sys.exit(5)
        if exit_code(child) != 5:
            os._exit(1)
    if how == "destroyed":
        dist.destroy_process_group()
    if how == "exception":
        raise RuntimeError("the program's own")
    if how == "exits":
        sys.exit(7)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
futures = []
ended = threading.Event()
began = threading.Event()
rank = None
for line in sys.stdin:
    case = json.loads(line)
    children = []
    for rank in range(2):
        open(case["store"] + f".{rank}", "w").close()
        children.append(os.fork())
        if children[-1] == 0:
            break
    else:
        rank = None
        files = [None, None]
        if case.get("interrupt"):
            files = [f"{case['store']}.{rank}" for rank in range(2)]
        print(json.dumps(list(map(exit_code, children, files))), flush=True)
        continue
    break
if rank is not None:
    os.dup2(os.open(case["store"] + f".{rank}", os.O_WRONLY), 2)
    start(rank)
    end()
"""

CODES = {"returns": 0, "exception": 1, "exits": 7, "destroyed": 0, "forked": 0}


class Ranks:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, "-c", RANKS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, **case: Any) -> tuple[list[int | str], str]:
        """The exit codes of both ranks, and what they wrote to their standard error."""
        store = self._folder / f"store{next(self._numbers)}"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case | {"store": str(store)}) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], 100)
        assert ready, case
        codes = json.loads(self._process.stdout.readline())
        return codes, "".join(Path(f"{store}.{rank}").read_text() for rank in range(2))

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = Ranks(tmp_path_factory.mktemp("ends"))
    yield made
    made.close()


THREADS = [
    *(
        {"what": what, "daemon": daemon, "end": end}
        for what in ("recv", "collective", "future")
        for daemon in (True, False)
        for end in CODES
    ),
    {"what": "recv", "daemon": True, "end": "returns", "threads": 4},
    {"what": "future", "daemon": True, "end": "returns", "threads": 8},
    {"what": "polls", "daemon": True, "end": "returns", "threads": 4},
]


def check(ranks: Ranks, runs: int, **case: Any) -> None:
    ended = [ranks.run(**case) for _ in range(runs)]
    want = CODES[case["end"]]
    wrong = [(codes, text) for codes, text in ended if codes != [want, want]]
    assert not wrong, f"{len(wrong)} of {runs}, such as {wrong[0]}"


def named(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def in_ci(case: dict[str, Any]) -> bool:
    """Every end of one kind of thread, and two ends of the other kinds."""
    return case["daemon"] and (case["what"] == "recv" or case["end"] in ("returns", "forked"))


@pytest.mark.parametrize(
    "case", [case if in_ci(case) else rings.nightly(case) for case in THREADS], ids=named
)
@pytest.mark.parametrize("runs", [1, pytest.param(20, marks=pytest.mark.nightly)])
def test_threads_that_are_in_pycomm(ranks: Ranks, case: dict[str, Any], runs: int) -> None:
    check(ranks, runs, **case)


@pytest.mark.parametrize("end", ["returns", "exception", "exits"])
def test_a_thread_that_is_no_daemon_trains_to_its_end(ranks: Ranks, end: str) -> None:
    """Python waits for it, and so do the threads of its comm hooks."""
    codes, text = ranks.run(what="trains_on", end=end)
    assert codes == [CODES[end]] * 2, text
    assert text.count("it has trained") == 2, text


def callbacks() -> list[Any]:
    # One ends after two seconds of waiting, however late that began; the other near to them.
    cases = [{"what": "sleeping", "s": 4.0}, {"what": "computing", "s": 2.1}]
    often = [{**case, "runs": 20} for case in cases]
    nightly = [
        {"what": what, "s": s}
        for what in ("sleeping", "computing")
        for s in (0.5, 1.9, 2.05, 2.15, 2.6, 3.5)
    ]
    return cases + [pytest.param(case, marks=pytest.mark.nightly) for case in nightly + often]


@pytest.mark.parametrize("end", rings.ends(CODES))
@pytest.mark.parametrize("runs", [1, pytest.param(50, marks=pytest.mark.nightly)])
def test_a_hook_over_gloo(ranks: Ranks, end: str, runs: int) -> None:
    """gloo's thread frees a hook's last callback when backward has returned already."""
    check(ranks, runs, what="train", backend="gloo", end=end)


@pytest.mark.parametrize("end", rings.ends(CODES))
@pytest.mark.parametrize("case", callbacks(), ids=named)
def test_a_callback_is_waited_for(ranks: Ranks, case: dict[str, Any], end: str) -> None:
    for _ in range(case.get("runs", 1)):
        codes, text = ranks.run(end=end, **case)
        assert codes == [CODES[end]] * 2, text
        assert text.count("it has returned") == 2, text
        if end == "forked":  # the child's end takes a part of the time
            continue
        if case["s"] > 3:  # one line says what the process waits for
            assert text.count(f"in {case['what']}. Ctrl-C ends it now.") == 2, text
        elif case["s"] < 1.8:
            assert "Ctrl-C" not in text


def test_ctrl_c_ends_the_wait_for_a_callback(ranks: Ranks) -> None:
    codes, text = ranks.run(what="sleeping", s=600, end="returns", interrupt=True)
    assert codes == [-signal.SIGINT] * 2, text  # as Python ends then


def test_the_text_of_an_exit_is_printed(ranks: Ranks) -> None:
    """A signal handler of the program's calls sys.exit(text) while callbacks are waited for."""
    codes, text = ranks.run(what="sleeping", s=600, end="returns", interrupt=True, says="enough")
    assert codes == [1, 1], text  # as Python ends then
    assert text.count("enough\n") == 2, text


TURN = r"""
# A daemon thread's backward pass waits for rank 1 when rank 0 ends; a handler of the program's,
# which runs after pycomm's own, asks for the reducer's turn.
import atexit, sys, threading, time

import thread_state

def last():
    try:
        model.reducer.prepare_for_forward()
    except RuntimeError as error:
        print("refused:", error)
    print("it has the turn", flush=True)

atexit.register(last)
import torch
import torch.distributed as dist
import pycomm

rank = int(sys.argv[1])
dist.init_process_group("pycomm", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
model = pycomm.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
loss = model(torch.ones(2, 4)).sum()  # on both: the ranks agree on the order of buckets here
if rank == 1:
    time.sleep(600)  # until it is killed
thread = threading.Thread(target=loss.backward, daemon=True)
thread.start()
thread_state.wait_until_asleep(thread.native_id)
"""


def test_a_daemon_thread_keeps_no_turn_at_the_end(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TURN, str(rank), store],
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, _ = started[0].communicate(timeout=120)
    finally:
        for each in started:
            each.kill()
            each.wait()
    assert "it has the turn" in said and "refused" in said, said
    assert started[0].returncode == 0, said
