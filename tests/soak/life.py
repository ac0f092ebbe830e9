"""How groups begin and end, 1,000 times each: what is left, and did every end come in time.

Three ranks live through all repetitions of a scenario, so whatever a group leaves behind adds up in
them; each repetition has a group of its own, over a store of its own. One line a scenario:

    python tests/soak/life.py --repetitions 1000            # all of them
    python tests/soak/life.py --repetitions 50 abort exits  # some
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from leaks import left
from torch.utils.data import DataLoader, TensorDataset

import pycomm

WORLD_SIZE = 3
WARM_UP = 20
HANGS_AFTER_S = 600.0
RSS_LIMIT_KB = 4096
LARGE = 1 << 18


def join(rank: int, store: str) -> None:
    dist.init_process_group(
        "pycomm", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE
    )
    dist.barrier()  # nobody ends it while others still join: they would rightly say so


def reduce_until_it_fails(most: int = 1_000_000) -> str:
    """Small and large sums until somebody ends the group; how it ended."""
    small, large = torch.ones(16), torch.ones(LARGE)
    try:
        for _ in range(most):
            dist.all_reduce(small)
            dist.all_reduce(large.fill_(1.0))
    except pycomm.errors.PycommError as error:
        return error.code
    return "done"


def a_little() -> None:
    time.sleep(random.random() * 0.004)


# --- scenarios: one repetition in a group that is there; the returned word is counted ------------


def abort(rank: int) -> str:
    """One rank aborts while all reduce."""
    if rank == 0:
        native = pycomm._group.creation.native_backend(dist.group.WORLD)
        timer = threading.Timer(random.random() * 0.01, native.abort)
        timer.start()
        code = reduce_until_it_fails()
        timer.join()
        return code
    return reduce_until_it_fails()


def timeout(rank: int) -> str:
    """One rank never enters; the operation's own deadline ends it."""
    if rank == 1:
        while pycomm.last_error() is None:
            time.sleep(0.002)
        return str((pycomm.last_error() or {}).get("code"))
    options = dist.AllreduceOptions()
    options.timeout = timedelta(milliseconds=30)
    try:
        native = pycomm._group.creation.native_backend(dist.group.WORLD)
        native.allreduce([torch.ones(LARGE)], options).wait()
    except pycomm.errors.PycommError as error:
        return error.code
    return "done"


def destroy(rank: int) -> str:
    """One rank destroys its group while all reduce."""
    works = [dist.all_reduce(torch.ones(LARGE), async_op=True) for _ in range(3)]
    if rank == 0:
        a_little()
        dist.destroy_process_group()
    word = "done"
    for work in works:
        try:
            work.wait()
        except pycomm.errors.PycommError as error:
            word = error.code
    return word


def interrupt(rank: int) -> str:
    """Ctrl-C in the middle of a sum; the others raise an error."""
    if rank != 0:
        return reduce_until_it_fails()
    timer = threading.Timer(0.002 + random.random() * 0.01, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        code = reduce_until_it_fails()
        time.sleep(60)  # the sums failed before the signal came
    except KeyboardInterrupt:
        code = "interrupted"
    timer.join()
    return code


DATASET = TensorDataset(torch.arange(8.0))


def fork(rank: int) -> str:
    """A DataLoader's worker is forked in the middle; it must have nothing of the group's."""
    work = dist.all_reduce(torch.ones(LARGE), async_op=True)
    seen = []
    for (part,) in DataLoader(DATASET, batch_size=4, num_workers=1, worker_init_fn=_no_sockets):
        dist.all_reduce(part)
        seen.append(float(part[0]))
    work.wait()
    return "done" if seen == [0.0, 4.0 * WORLD_SIZE] else f"wrong {seen}"


def _no_sockets(worker: int) -> None:
    mine = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in _sockets()}
    parents = Path(f"/proc/{os.getppid()}/net/tcp").read_text().splitlines()[1:]
    if mine & {int(line.split()[9]) for line in parents}:
        raise RuntimeError("the worker holds TCP sockets of its parent")


def _sockets() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                found.append(fd)
    return found


class Knot:
    """A cycle: only the collector frees it, at any time and on any thread."""

    def __init__(self, *held: object) -> None:
        self.held = held
        self.me = self


def collect(rank: int) -> str:
    """Groups, works and futures are dropped in any order, knotted or not, while work goes on."""
    group = dist.new_group()
    dist.barrier(group=group)
    works = [
        dist.all_reduce(torch.ones(1 + 5000 * k), group=group, async_op=True) for k in range(4)
    ]
    futures = [work.get_future() for work in works]
    chained = futures[-1].then(lambda future: future.value()[0] * 2)
    native = pycomm._group.creation.native_backend(group)
    Knot(group, native, works[:2], futures[:2], chained)
    steps: list[Callable[[], object]] = [
        works.clear,
        futures.clear,
        gc.collect,
        lambda: dist.destroy_process_group(group),
    ]
    random.shuffle(steps)
    del native, chained
    for step in steps:
        step()
    return "done"


def many(rank: int) -> str:
    """Two groups with two threads on each."""
    groups = [dist.new_group() for _ in range(2)]
    wrong = []

    def reduce(group: Any, numel: int) -> None:
        for _ in range(5):
            tensor = torch.full((numel,), rank + 1.0)
            dist.all_reduce(tensor, group=group)
            if float(tensor[-1]) != 6.0:
                wrong.append(float(tensor[-1]))

    threads = [
        threading.Thread(target=reduce, args=(group, 1 + 4000 * k))
        for k, group in enumerate(groups)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        dist.destroy_process_group(group)
    return "wrong" if wrong else "done"


# Their bodies, and how a repetition may end.
IN_PROCESS: dict[str, tuple[Callable[[int], str], set[str]]] = {
    "abort": (abort, {"ABORTED"}),
    "timeout": (timeout, {"TIMEOUT"}),
    "destroy": (destroy, {"SHUT_DOWN", "PEER_LEFT", "done"}),
    "interrupt": (interrupt, {"interrupted", "PEER_LEFT"}),
    "collect": (collect, {"done"}),
    "many": (many, {"done"}),
    "fork": (fork, {"done"}),
}


def repeat_on_one_rank(rank: int, name: str, folder: str, repetitions: int) -> dict[str, Any]:
    body, _ = IN_PROCESS[name]
    words: collections.Counter[str] = collections.Counter()
    slowest_s = 0.0
    before: dict[str, int] = {}
    for repetition in range(repetitions + WARM_UP):
        if repetition == WARM_UP:
            before = left()
        random.seed(1000 * repetition + rank)
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        began_s = time.monotonic()
        join(rank, f"{folder}/{name}{repetition}")
        words[body(rank)] += 1
        if dist.is_initialized():
            dist.destroy_process_group()
        slowest_s = max(slowest_s, time.monotonic() - began_s)
    faulthandler.cancel_dump_traceback_later()
    after = left()
    deadline_s = time.monotonic() + 5  # threads of torch's store end a little later
    while any(after[key] > before[key] for key in ("files", "children")):
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
        after = left()
    grown = {key: after[key] - before[key] for key in after}
    return {"words": words, "grown": grown, "slowest_s": slowest_s}


def in_process(name: str, folder: str, repetitions: int) -> bool:
    pids, pipes = [], []
    began_s = time.monotonic()
    for rank in range(WORLD_SIZE):
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                result = repeat_on_one_rank(rank, name, folder, repetitions)
                os.write(write_fd, json.dumps(result).encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write_fd)
        pids.append(pid)
        pipes.append(read_fd)
    results = []
    for read_fd in pipes:
        with os.fdopen(read_fd) as pipe:
            results.append(json.loads(pipe.read() or "null"))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes) or None in results:
        print(f"{name}: FAILED, exit codes {codes}", flush=True)
        return False
    words: collections.Counter[str] = collections.Counter()
    for result in results:
        words.update(result["words"])
    most = {key: max(result["grown"][key] for result in results) for key in results[0]["grown"]}
    slowest_s = max(result["slowest_s"] for result in results)
    good = set(words) <= IN_PROCESS[name][1] and most["rss_kb"] <= RSS_LIMIT_KB
    # Callback threads are kept for the process's life; their number follows the peak of callbacks.
    good = good and most["threads"] <= 8
    good = good and all(most[key] <= 0 for key in ("files", "children", "shared memory"))
    print(
        f"{name}: {'ok' if good else 'BAD'}, {repetitions} after {WARM_UP}, {WORLD_SIZE} ranks, "
        f"{time.monotonic() - began_s:.0f} s, slowest {slowest_s:.2f} s; {dict(words)}; "
        f"grown at most {most}",
        flush=True,
    )
    return good


# --- exits: each repetition is three interpreters that end --------------------------------------

HOW = ("works kept", "futures with callbacks", "one never entered", "works dropped", "Ctrl-C")


def leave_with_work_outstanding(rank: int, how: str, store: str) -> list[object]:
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    join(rank, store)
    works: list[Any] = [
        dist.all_reduce(torch.ones(1 + 50_000 * k), async_op=True) for k in range(6)
    ]
    if how == "futures with callbacks":
        return [work.get_future().then(lambda done: done.value()[0] * 2) for work in works]
    if how == "one never entered" and rank == 0:
        works.append(dist.all_reduce(torch.ones(LARGE), async_op=True))
    if how == "Ctrl-C" and rank == 0:
        sys.excepthook = lambda *_: None
        timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()
        time.sleep(60)
    return [] if how == "works dropped" else works


def exits(folder: str, repetitions: int) -> tuple[bool, list[object]]:
    """In a child, the second value is what its works are kept in until the interpreter ends."""
    codes: collections.Counter[str] = collections.Counter()
    began_s, slowest_s, before = time.monotonic(), 0.0, left()
    for repetition in range(repetitions):
        how = HOW[repetition % len(HOW)]
        once_s = time.monotonic()
        pids = []
        for rank in range(WORLD_SIZE):
            pid = os.fork()
            if pid == 0:
                kept = leave_with_work_outstanding(rank, how, f"{folder}/exits{repetition}")
                return True, kept
            pids.append(pid)
        for rank, pid in enumerate(pids):
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            interrupted = how == "Ctrl-C" and rank == 0
            right = code == (-signal.SIGINT if interrupted else 0)
            codes["right" if right else f"{how}, rank {rank}: exit {code}"] += 1
        slowest_s = max(slowest_s, time.monotonic() - once_s)
    grown = {key: value - before[key] for key, value in left().items()}
    good = set(codes) == {"right"} and all(
        grown[key] <= 0 for key in ("files", "children", "shared memory")
    )
    print(
        f"exits: {'ok' if good else 'BAD'}, {repetitions} times {WORLD_SIZE} interpreters, "
        f"{time.monotonic() - began_s:.0f} s, slowest {slowest_s:.2f} s; {dict(codes)}; "
        f"grown {grown}",
        flush=True,
    )
    return good, []


def main() -> tuple[int, list[object]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", default=["exits", *IN_PROCESS])
    parser.add_argument("--repetitions", type=int, default=50)
    arguments = parser.parse_args()
    logging.getLogger("pycomm").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # torch's own hundred thousands of objects need not be looked at 1,000 times
    here = os.getpid()
    good = True
    folder = tempfile.mkdtemp(prefix="pycomm-life-")
    for name in arguments.scenarios:
        if name == "exits":
            well, kept = exits(folder, arguments.repetitions)
            if os.getpid() != here:
                return 0, kept
        else:
            well = in_process(name, folder, arguments.repetitions)
        good = good and well
    for name in os.listdir(folder):
        os.unlink(f"{folder}/{name}")
    os.rmdir(folder)
    return int(not good), []


if __name__ == "__main__":
    code, kept_until_the_end = main()
    sys.exit(code)
