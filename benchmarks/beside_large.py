"""Small calls beside large ones: `python benchmarks/beside_large.py`.

Two ranks add up 8 bytes in one group, again and again, while another thread of each runs operations
of 1 GiB in another group. A small call takes long because of the other operation, or for want of a
core: the kernel counts how long a thread was ready to run and had none. `waits` is the time of the
call less the longest that a thread that it needs had no core meanwhile, on either rank: the one
that calls, or the data loop's. Calls and waits over 5 ms are counted, and the longest of each is
printed. The results of both groups are checked.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from launching import add_rank_options, ran_as_rank, run_ranks
from report import header
from torch.distributed import TCPStore  # type: ignore[attr-defined]

RANKS = 2
LIMIT_MS = 5.0


def needed_threads() -> list[Path]:
    """Of a call of this thread: it, and the data loop."""
    own = str(threading.get_native_id())
    return [
        task
        for task in Path("/proc/self/task").iterdir()
        if task.name == own or (task / "comm").read_text(encoding="ascii").strip() == "pycomm-data"
    ]


def queued_ns(threads: list[Path]) -> list[int]:
    """How long each of these threads has stood in the run queue so far."""
    return [int((each / "schedstat").read_text(encoding="ascii").split()[1]) for each in threads]


def large_call(kind: str, nbytes: int, group: dist.ProcessGroup) -> Callable[[], bool]:
    """A function that runs one large operation and says whether its result is right."""
    count = nbytes // 4
    mine = torch.full((count,), 1.0)
    whole = torch.empty(count if kind == "all_gather" else 0)
    part = torch.empty(count // RANKS if kind == "reduce_scatter" else 0)

    def run() -> bool:
        if kind == "all_gather":
            dist.all_gather_into_tensor(whole, mine[: count // RANKS], group=group)
            return bool(whole[-1] == 1.0)
        if kind == "reduce_scatter":
            dist.reduce_scatter_tensor(part, mine, group=group)
            return bool(part[-1] == RANKS)
        dist.all_reduce(mine, op=dist.ReduceOp.AVG, group=group)
        return bool(mine[-1] == 1.0)

    return run


def measure(transport: str, kind: str, nbytes: int, calls: int) -> dict[str, object]:
    import pycomm

    timeout = timedelta(seconds=300)
    options = pycomm.Options(transport=transport)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout
    )
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "pycomm", store=store, rank=rank, world_size=RANKS, timeout=timeout, pg_options=options
    )
    other = dist.new_group(backend="pycomm", timeout=timeout, pg_options=options)
    assert isinstance(other, dist.ProcessGroup)
    run_large = large_call(kind, nbytes, other)
    wrong = 0 if run_large() else 1
    stop = torch.zeros(1)
    done = [0]

    def run_until_stopped() -> None:
        nonlocal wrong
        while True:
            wrong += 0 if run_large() else 1
            done[0] += 1
            dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=other)
            if stop.item():
                return

    small = torch.zeros(2)
    dist.all_reduce(small)
    thread = threading.Thread(target=run_until_stopped)
    threads = needed_threads()
    thread.start()
    times, queues = [], []
    for call in range(calls):
        time.sleep(0.01)
        small.fill_(call)
        before, began = queued_ns(threads), time.perf_counter()
        dist.all_reduce(small)
        times.append((time.perf_counter() - began) * 1e3)
        after = queued_ns(threads)
        queues.append(max(map(operator.sub, after, before)) * 1e-6)
        wrong += 0 if small[0] == RANKS * call else 1
    stop.fill_(1.0)
    thread.join()
    everyone: list[dict[str, list[float]]] = [{} for _ in range(RANKS)]
    dist.all_gather_object(everyone, {"times": times, "queues": queues})
    dist.destroy_process_group()
    rows = sorted(
        (max(r["times"][i] for r in everyone), max(r["queues"][i] for r in everyone))
        for i in range(calls)
    )
    waits = sorted(whole - min(queue, whole) for whole, queue in rows)
    return {
        "p50_ms": rows[calls // 2][0],
        "p99_ms": rows[calls * 99 // 100][0],
        "max_ms": rows[-1][0],
        "over": sum(whole > LIMIT_MS for whole, _ in rows),
        "waits_over": sum(wait > LIMIT_MS for wait in waits),
        "waits_ms": waits[-1],
        "large": done[0],
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transports", default="auto,tcp")
    parser.add_argument("--kinds", default="all_reduce,all_gather,reduce_scatter")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=200)
    add_rank_options(parser)
    options = parser.parse_args()
    if ran_as_rank(
        options,
        lambda: measure(options.transports, options.kinds, options.mib << 20, options.calls),
    ):
        return 0
    for key, value in header("beside_large", sys.argv[1:]).items():
        print(f"{key}: {value}")
    columns = ("p50_ms", "p99_ms", "max_ms", "over", "waits_over", "waits_ms", "large", "wrong")
    print("".join(f"{name:>15}" for name in ("transport", "large call", *columns)))
    wrong = 0
    for transport in options.transports.split(","):
        for kind in options.kinds.split(","):
            lines: list[bytes] = []
            chosen = ["--transports", transport, "--kinds", kind]
            chosen += ["--mib", str(options.mib), "--calls", str(options.calls)]
            run_ranks(RANKS, chosen, 600, lines.append)
            row = json.loads(lines[0])
            wrong += row["wrong"]
            cells = (
                f"{row[name]:15.2f}" if "ms" in name else f"{row[name]:15}" for name in columns
            )
            print(f"{transport:>15}{kind:>15}" + "".join(cells), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
