"""How fast faults are noticed, and what is not a fault. Each prints one line of figures.

python tests/rig/fault_figures.py kills 100          SIGKILL to exception on every other rank
python tests/rig/fault_figures.py messages 100       the same, in messages and not in all_reduce
python tests/rig/fault_figures.py stops 5            SIGSTOP to exception
python tests/rig/fault_figures.py oversubscribed 10  minutes of 4 ranks per core
python tests/rig/fault_figures.py junk 60            seconds of 1,000 junk connections a second
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from processes import open_files
from rank_child import describe_exception, mark
from ranks import run_ranks, start_ranks

LISTENING = "0A"


def reduce_until_it_fails(rank: int, world_size: int) -> Any:
    """A training step's traffic: small and large operations."""
    import torch
    import torch.distributed as dist

    small, large = torch.ones(16), torch.ones(1 << 18)
    for step in range(1_000_000):
        if step == 3:
            mark("in the middle")
        try:
            dist.all_reduce(small)
            dist.all_reduce(large)
        except Exception as error:
            return describe_exception(error)
    return None


def send_until_it_fails(rank: int, world_size: int) -> Any:
    """A pipeline's traffic: small and large messages round the ring."""
    import torch
    import torch.distributed as dist

    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    leaving = [torch.ones(16), torch.ones(1 << 18)]
    arriving = [torch.empty(16), torch.empty(1 << 18)]
    for step in range(1_000_000):
        if step == 3:
            mark("in the middle")
        try:
            works = [dist.irecv(each, left) for each in arriving]
            works += [dist.isend(each, right) for each in leaving]
            for work in works:
                assert work is not None
                work.wait()
        except Exception as error:
            return describe_exception(error)
    return None


def strike(
    number: int, count: int, ranks_do: Any = reduce_until_it_fails
) -> tuple[list[float], int]:
    """Signals one of three ranks at a random moment, many times; prints the distribution.

    Returns:
        Seconds to every exception, sorted, and how many did not name the rank.
    """
    random.seed(7)
    seconds, wrong, worst = [], 0, []
    for attempt in range(count):
        victim = attempt % 3
        with start_ranks(3, ranks_do) as running:
            for rank in range(3):
                running.wait_for_mark(rank, "in the middle")
            time.sleep(random.random() * 0.05)
            struck_s = running.kill(victim, number)
            if number == signal.SIGSTOP:
                for rank in {0, 1, 2} - {victim}:
                    running.processes[rank].wait(60)
                running.kill(victim, signal.SIGKILL)
            results = running.collect(60)
        latest = 0.0
        for result in results:
            if result.rank == victim:
                continue
            error = result.value
            right = error is not None and error.record.get("peer") == victim
            wrong += not right
            if error is None:
                print(results.describe())
                continue
            if not right:
                print(error.text)
            latest = max(latest, error.monotonic_s - struck_s)
            seconds.append(error.monotonic_s - struck_s)
        worst.append(latest)
    for name, values in (("every exception", seconds), ("slowest rank of each", worst)):
        values.sort()
        p50, p99 = statistics.median(values), values[min(len(values) - 1, int(len(values) * 0.99))]
        print(
            f"{signal.Signals(number).name}, {count} times, 3 ranks, {name}: "
            f"p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms, longest {1e3 * values[-1]:.1f} ms; "
            f"{wrong} of {len(seconds)} did not name the rank; "
            f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
    return sorted(seconds), wrong


def busy_rank(rank: int, world_size: int, minutes: float) -> dict[str, Any]:
    """Computes, holds the GIL now and then, reduces."""
    import torch
    import torch.distributed as dist

    os.nice(10)
    chance = random.Random(rank)
    end_s, steps, held_s, longest_s = time.monotonic() + 60 * minutes, 0, 0.0, 0.0
    matrix = torch.ones(256, 256)
    error = None
    try:
        while True:
            until = time.monotonic() + chance.random() * 0.2
            while time.monotonic() < until:
                matrix = (matrix @ matrix).clamp(0, 1)
            if rank % 2 and chance.random() < 0.02:
                hold_s = 1 + chance.random() * 3
                ctypes.PyDLL(None).usleep(int(1e6 * hold_s))  # PyDLL keeps the lock
                held_s += hold_s
            began_s = time.monotonic()
            flag = torch.tensor([float(time.monotonic() > end_s)])
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            longest_s = max(longest_s, time.monotonic() - began_s)
            steps += 1
            if float(flag):
                break
    except Exception as caught:
        error = describe_exception(caught).text
    return {"steps": steps, "held_s": held_s, "longest_s": longest_s, "error": error}


def oversubscribed(minutes: float) -> None:
    ranks = 4 * (os.cpu_count() or 1)
    results = run_ranks(
        ranks, busy_rank, args=(minutes,), timeout_s=60 * minutes + 120, check=False
    )
    found = [
        result.value or {"error": result.describe(), "held_s": 0, "steps": 0} for result in results
    ]
    errors = [each["error"] for each in found if each["error"]]
    for error in errors:
        print(error)
    held_s = sum(each["held_s"] for each in found)
    print(
        f"{ranks} ranks on {os.cpu_count()} cores for {minutes:g} minutes: "
        f"{len(errors)} errors, {found[0]['steps']} steps, the GIL held for {held_s:.0f} s; "
        f"load at the end {os.getloadavg()[0]:.1f}"
    )


def listening_port() -> int:
    """Where this process's group listens."""
    mine = set(open_files().values())
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENING and f"socket:[{fields[9]}]" in mine:
            return int(fields[1].partition(":")[2], 16)
    raise RuntimeError("no listening socket")


THROW = """
import os, random, socket, sys, time
port, until, rate = int(sys.argv[1]), time.monotonic() + float(sys.argv[2]), float(sys.argv[3])
sink = None
if port == 0:  # the same work, and nobody but ourselves to receive it
    sink = socket.create_server(("127.0.0.1", 0), backlog=1024)
    sink.setblocking(False)
    port = sink.getsockname()[1]
thrown, began = 0, time.monotonic()
junk = [b"", b"GET / HTTP/1.1\\r\\n\\r\\n", os.urandom(64), os.urandom(600)]
junk += [b"cy\\x01\\x01" + bytes(60)]
while (now := time.monotonic()) < until:
    if thrown > (now - began) * rate:
        time.sleep(0.001)
        continue
    with socket.socket() as stranger:
        try:
            stranger.connect(("127.0.0.1", port))
            stranger.send(junk[thrown % len(junk)])
        except OSError:
            pass
    thrown += 1
    if sink is not None:
        try:
            while True:
                sink.accept()[0].close()
        except BlockingIOError:
            pass
print(thrown)
"""


def with_junk(rank: int, world_size: int, seconds: float, rate: float) -> dict[str, Any]:
    """Times all_reduces under junk on rank 0's listener and, in turn, on somebody else's."""
    import torch
    import torch.distributed as dist

    tensor, slice_s = torch.ones(1 << 18), 3.0
    counts: dict[str, list[float]] = {"here": [], "elsewhere": []}
    thrown = 0
    for turn in range(2 * round(seconds / slice_s)):
        where = "here" if turn % 2 else "elsewhere"
        thrower = None
        if rank == 0:
            port = listening_port() if where == "here" else 0
            arguments = [sys.executable, "-c", THROW, str(port), str(slice_s), str(rate)]
            thrower = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
            time.sleep(0.3)  # until it throws
        began_s, done = time.monotonic(), 0
        while True:
            for _ in range(20):
                dist.all_reduce(tensor)
            done += 20
            over = torch.tensor([float(time.monotonic() - began_s > slice_s - 0.5)])
            dist.all_reduce(over, dist.ReduceOp.MAX)
            if float(over):
                break
        counts[where].append(done / (time.monotonic() - began_s))
        if thrower is not None:
            said = int(thrower.communicate(timeout=30)[0])
            thrown += said if where == "here" else 0
        dist.barrier()
    return {"counts": counts, "thrown": thrown}


def junk(seconds: float) -> None:
    results = run_ranks(
        2,
        with_junk,
        args=(seconds, 1000.0),
        timeout_s=seconds * 4 + 60,
        check=False,
        env={"PYCOMM_TRANSPORT": "tcp"},  # a port to throw it at
    )
    errors = [result.error.text for result in results if result.error]
    print("\n".join(errors))
    found = results[0].value
    if found is None:
        return
    pairs = zip(found["counts"]["elsewhere"], found["counts"]["here"], strict=True)
    ratios = sorted(elsewhere / here for elsewhere, here in pairs)
    print(
        f"junk for {seconds:g} s at 1,000 a second ({found['thrown']} came): {len(errors)} errors; "
        f"an all_reduce of 1 MiB takes {statistics.median(ratios):.3f} times as long as with "
        f"the same junk thrown elsewhere (median of {len(ratios)} pairs, middle half "
        f"{ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f}); "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


def main() -> None:
    what, number = sys.argv[1], float(sys.argv[2])
    if what == "kills":
        strike(signal.SIGKILL, int(number))
    elif what == "messages":
        strike(signal.SIGKILL, int(number), send_until_it_fails)
    elif what == "stops":
        strike(signal.SIGSTOP, int(number))
    elif what == "oversubscribed":
        oversubscribed(number)
    elif what == "junk":
        junk(number)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    # Ranks import this file by its name: one module, not two.
    import fault_figures

    fault_figures.main()
