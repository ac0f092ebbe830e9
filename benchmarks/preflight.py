"""Seconds that PYCOMM_PREFLIGHT adds to init_process_group, between hosts: namespaces on a switch.

    python benchmarks/preflight.py                       # 4 hosts, 20 groups with and 20 without
    python benchmarks/preflight.py --hosts 2 --rounds 50

The ranks make and destroy a default group again and again, in turn with and without the preflight.
All ranks begin together, and the slowest rank counts. The first group with it is a row of its own:
it imports the code. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import ddp_hosts
import virtual_switch
from launching import add_rank_options, die_with_parent
from report import header

PORT = 29561  # as ddp_hosts.launch has it


def measure(rounds: int) -> list[list[float]]:
    """Seconds by round, without and with."""
    import torch.distributed as dist

    import pycomm

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=60)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], PORT, size, rank == 0, timeout)
    found: list[list[float]] = []
    for number in range(rounds + 1):
        row = []
        for wanted in (False, True):
            place = dist.PrefixStore(f"{number}/{wanted}", store)
            place.set(f"here/{rank}", "")
            place.wait([f"here/{other}" for other in range(size)])
            begin = time.perf_counter()
            dist.init_process_group(
                "pycomm",
                store=place,
                rank=rank,
                world_size=size,
                timeout=timeout,
                pg_options=pycomm.Options(preflight=wanted, debug="WARN"),
            )
            took = time.perf_counter() - begin
            place.set(f"took/{rank}", str(took))
            keys = [f"took/{other}" for other in range(size)]
            place.wait(keys)
            row.append(max(float(place.get(key)) for key in keys))
            dist.destroy_process_group()
        found.append(row)
    last = [f"left/{other}" for other in range(size)]
    store.set(last[rank], "")
    if rank == 0:  # which holds the store
        store.wait(last)
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--hosts", type=int, default=4)
    add("--rounds", type=int, default=20)
    add("--limit", type=float, default=120.0, help="end after so many seconds")
    add_rank_options(parser)
    options = parser.parse_args(argv)
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
        found = measure(options.rounds)
        if os.environ["RANK"] == "0":
            os.write(options.results_fd, json.dumps(found).encode())
        return 0
    with virtual_switch.switch(options.hosts, 1000) as hosts:
        rows = json.loads(ddp_hosts.launch(hosts, argv, options.limit, __file__))
    for name, value in header("preflight", argv).items():
        print(f"# {name}: {value}")
    first, *rest = rows
    plain, compared = (statistics.median(column) for column in zip(*rest, strict=True))
    added = statistics.median(one[1] - one[0] for one in rest)
    print(f"{'':<28}{'without ms':>12}{'with ms':>10}{'added ms':>10}")
    for name, cells in (
        ("first group of a process", (*first, first[1] - first[0])),
        (f"median of {len(rest)} more", (plain, compared, added)),
    ):
        print(f"{name:<28}{cells[0] * 1e3:12.1f}{cells[1] * 1e3:10.1f}{cells[2] * 1e3:10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
