"""What `metrics_dir` costs a rank: `python benchmarks/metrics_cost.py`.

Two ranks fill the flight records of 1, 8 and 64 groups, which is the most that they hold. Then rank
0 writes its metrics again and again on the thread that measures, with 50 new operations of each
group in between. `write ms` is the CPU time of one write, `native ms` the part of it without the
interpreter's lock, `wall ms` its duration, `poll us` the CPU time of one look for failed groups,
`period s` the time between two writes, and `share` the CPU time of writes and polls in percent of
one core. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from launching import RankFailedError, add_rank_options, ran_as_rank, run_ranks
from report import header
from torch.distributed import TCPStore  # type: ignore[attr-defined]

TIMEOUT_S = 600.0


def measure(groups: int, operations: int, repeats: int, folder: str) -> dict[str, float]:
    """Of rank 0."""
    import pycomm
    from pycomm._group import creation
    from pycomm._metrics import metrics_file, writer
    from pycomm._native import loader

    rank = int(os.environ["RANK"])
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout
    )
    writer.PERIOD_S = 1e6  # but for the first one, writes are those that are measured
    dist.init_process_group(
        "pycomm",
        store=store,
        rank=rank,
        world_size=2,
        timeout=timeout,
        pg_options=pycomm.Options(metrics_dir=folder),
    )
    everyone = [dist.group.WORLD, *(dist.new_group([0, 1]) for _ in range(groups - 1))]

    def run(count: int) -> None:
        for group in everyone:
            for _ in range(count):
                dist.all_reduce(torch.ones(4), group=group)

    run(operations)
    cpu, wall, native, poll = [], [], [], []
    for _ in range(repeats):
        run(50)
        if rank == 0:
            began, began_cpu = time.perf_counter(), time.thread_time()
            writer.write_now()
            wall.append(time.perf_counter() - began)
            cpu.append(time.thread_time() - began_cpu)
            began_cpu = time.thread_time()
            metrics_file.open_record(loader.load(), folder).close()
            native.append(time.thread_time() - began_cpu)
            began_cpu = time.thread_time()
            creation._failed_groups()
            poll.append(time.thread_time() - began_cpu)
    dist.barrier()
    nbytes = sum(path.stat().st_size for path in Path(folder).glob("pycomm_rank_0_*.prom"))
    dist.barrier()
    dist.destroy_process_group()
    if rank != 0:
        return {}
    write, look = statistics.median(cpu), statistics.median(poll)
    period = max(5.0, write / writer._SHARE)
    return {
        "write": write * 1e3,
        "wall": statistics.median(wall) * 1e3,
        "native": statistics.median(native) * 1e3,
        "poll": look * 1e6,
        "period": period,
        "share": 100 * (write / period + look / writer._POLL_S),
        "nbytes": nbytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--groups", default="1,8,64", help="default: %(default)s")
    add("--operations", type=int, default=2500, help="of each group; default: %(default)s")
    add("--repeats", type=int, default=21, help="default: %(default)s")
    add("--one", type=int, help=argparse.SUPPRESS)
    add("--folder", help=argparse.SUPPRESS)
    add_rank_options(parser)
    options = parser.parse_args()
    if ran_as_rank(
        options,
        lambda: measure(options.one, options.operations, options.repeats, options.folder),
    ):
        return 0
    for key, value in header("metrics_cost", sys.argv[1:]).items():
        print(f"# {key:14s} {value}")
    print("groups operations  write ms  native ms  wall ms  poll us  period s  share %  file B")
    os.environ["OMP_NUM_THREADS"] = "1"
    for groups in map(int, options.groups.split(",")):
        rows: list[bytes] = []
        with tempfile.TemporaryDirectory() as folder:
            argv = ["--operations", str(options.operations), "--repeats", str(options.repeats)]
            argv += ["--one", str(groups), "--folder", folder]
            try:
                run_ranks(2, argv, TIMEOUT_S, rows.append)
            except RankFailedError as error:
                print(f"{groups} groups failed: {error}", file=sys.stderr)
                return 1
        row = json.loads(rows[0])
        print(
            f"{groups:6d} {options.operations:10d} {row['write']:9.1f} {row['native']:10.1f} "
            f"{row['wall']:8.1f} {row['poll']:8.0f} {row['period']:9.1f} {row['share']:8.2f} "
            f"{row['nbytes']:7.0f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
