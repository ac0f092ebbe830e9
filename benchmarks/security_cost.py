"""What a secret costs where groups open and while they stand: `python benchmarks/security_cost.py`.

Two ranks over TCP on loopback. Groups with a secret and groups without one open in turns, in the
same processes; each does one all_reduce of 4 bytes. Then many of each kind stay open, have sent
1 MiB, and what a rank holds for each of them is counted: the memory that only this process has,
and the descriptors. What TLS costs per byte and per call are rows of
`allreduce.py --backends pycomm:tcp,pycomm:tls`, and of `ddp_hosts.py --ways pycomm,closed`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import closed_group
import torch
import torch.distributed as dist
from footprint import held
from launching import RankFailedError, add_rank_options, ran_as_rank, run_ranks
from report import header, paired_ratio
from torch.distributed import TCPStore  # type: ignore[attr-defined]

TIMEOUT_S = 240.0
RANKS = 2


def sockets() -> int:
    """Sockets of this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own descriptor
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import pycomm

    rank = int(os.environ["RANK"])
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    agreed = [closed_group.new_secret() if rank == 0 else ""]
    dist.broadcast_object_list(agreed, 0)
    texts = {"plain": "", "closed": agreed[0]}
    one = torch.ones(1)

    def opened(kind: str) -> dist.ProcessGroup:
        with closed_group.secret(texts[kind]):
            group = dist.new_group(
                backend="pycomm", pg_options=pycomm.Options(transport="tcp"), timeout=timeout
            )
        dist.all_reduce(one.fill_(1), group=group)
        if one.item() != RANKS:
            raise SystemExit(f"wrong sum in a {kind} group: {one.item()}")
        return group

    seconds: dict[str, list[float]] = {kind: [] for kind in texts}
    cpu: dict[str, list[float]] = {kind: [] for kind in texts}
    for turn in range(options.groups + 2):
        for kind in list(texts)[:: 1 if turn % 2 == 0 else -1]:
            dist.barrier()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            group = opened(kind)
            if turn >= 2:
                seconds[kind].append(time.perf_counter() - begin)
                cpu[kind].append(time.process_time() - cpu_begin)
            dist.destroy_process_group(group)
    standing: dict[str, dict[str, float]] = {}
    large = torch.ones(1 << 18)
    for kind in texts:
        gc.collect()
        dist.barrier()
        before, before_sockets = held(), sockets()
        groups = [opened(kind) for _ in range(options.standing)]
        for group in groups:
            dist.all_reduce(large.fill_(1), group=group)
        gc.collect()
        dist.barrier()
        after, connections = held(), (sockets() - before_sockets) / options.standing
        grown = {key: (after[key] - before[key]) / options.standing for key in ("private", "files")}
        standing[kind] = {**grown, "sockets": connections}
        dist.barrier()
        for group in groups:
            dist.destroy_process_group(group)
        del groups, group
    dist.destroy_process_group()
    return {"seconds": seconds, "cpu": cpu, "standing": standing}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--groups", type=int, default=40, help="of each kind, in turns; default: %(default)s")
    add("--standing", type=int, default=32, help="of each kind, at once; default: %(default)s")
    add_rank_options(parser)
    options = parser.parse_args()
    if ran_as_rank(options, lambda: measure(options)):
        return 0
    for key, value in header("security_cost", sys.argv[1:]).items():
        print(f"# {key:14s} {value}")
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[bytes] = []
    try:
        run_ranks(RANKS, sys.argv[1:], TIMEOUT_S, rows.append)
    except RankFailedError as error:
        print(f"a rank failed: {error}", file=sys.stderr)
        return 1
    found = json.loads(rows[0])
    print(f"{'a group of 2 ranks, rank 0':34s} {'plain':>10s} {'closed':>10s}")
    for name, key in (("opens and adds 4 B, ms", "seconds"), ("  CPU of one rank, ms", "cpu")):
        plain, closed = (found[key][kind] for kind in ("plain", "closed"))
        ratio = paired_ratio("closed / plain", plain, closed)
        print(
            f"{name:34s} {statistics.median(plain) * 1e3:10.2f} "
            f"{statistics.median(closed) * 1e3:10.2f}   closed takes {ratio.ratio:.2f} "
            f"[{ratio.low:.2f}, {ratio.high:.2f}] times as long"
        )
    plain, closed = (found["standing"][kind] for kind in ("plain", "closed"))
    for name, key, factor in (
        ("memory that only it has, KiB", "private", 1024),
        ("descriptors", "files", 1),
        ("  of them sockets", "sockets", 1),
    ):
        print(f"{name:34s} {plain[key] * factor:10.1f} {closed[key] * factor:10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
