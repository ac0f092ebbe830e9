"""What a rank holds as its group grows: memory, files, threads. `python benchmarks/footprint.py`.

    python benchmarks/footprint.py --ranks 2,4,8,16,32 --backends pycomm,pycomm:tcp,gloo

For each number of ranks and each backend, ranks start anew, make a group and do one all_reduce of
4 bytes, one of 25 MiB, and one all_to_all; what each of them then holds more than before the group
is counted, and the largest rank's figures are printed. Memory is what only this process has (USS)
and its share of what several map (PSS), in MiB, from /proc/self/smaps_rollup.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from launching import RankFailedError, add_rank_options, ran_as_rank, run_ranks
from report import header
from torch.distributed import TCPStore  # type: ignore[attr-defined]

TIMEOUT_S = 180.0
COLUMNS = ["private", "shared", "files", "threads"]


def held() -> dict[str, float]:
    """What this process holds now."""
    mapped: dict[str, float] = {}
    with open("/proc/self/smaps_rollup", encoding="ascii") as rollup:
        for line in rollup:
            key, _, rest = line.partition(":")
            if rest.strip().endswith("kB"):
                mapped[key] = float(rest.split()[0]) / 1024
    private = mapped["Private_Clean"] + mapped["Private_Dirty"]
    return {
        "private": private,
        "shared": mapped["Pss"] - private,
        "files": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(len(os.listdir("/proc/self/task"))),
    }


def measure(backend: str) -> dict[str, float]:
    """What this rank's group has taken, after it was used."""
    name, _, transport = backend.partition(":")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout
    )
    options = None
    if name == "pycomm":
        import pycomm

        options = pycomm.Options(transport=transport or "auto")
    small, large = torch.ones(1), torch.ones(25 << 18)
    parts, received = torch.ones(1024 * ranks), torch.empty(1024 * ranks)
    before = held()
    dist.init_process_group(
        name, store=store, rank=rank, world_size=ranks, timeout=timeout, pg_options=options
    )
    for tensor in (small, large):
        dist.all_reduce(tensor)
        assert float(tensor[0]) == ranks
    dist.all_to_all(list(received.chunk(ranks)), list(parts.chunk(ranks)))
    dist.barrier()
    gc.collect()
    after = held()
    each: list[dict[str, float] | None] = [None] * ranks
    dist.all_gather_object(each, {key: after[key] - before[key] for key in COLUMNS})
    dist.barrier()
    dist.destroy_process_group()
    return {key: max(rank[key] for rank in each if rank is not None) for key in COLUMNS}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--ranks", default="2,4,8,16", help="numbers of ranks; default: %(default)s")
    add("--backends", default="pycomm,pycomm:tcp,gloo", help="default: %(default)s")
    add("--one", help=argparse.SUPPRESS)
    add_rank_options(parser)
    options = parser.parse_args()
    if ran_as_rank(options, lambda: measure(options.one)):
        return 0
    for key, value in header("footprint", sys.argv[1:]).items():
        print(f"# {key:14s} {value}")
    print(f"{'backend':12s} {'ranks':>5s} " + " ".join(f"{name:>10s}" for name in COLUMNS))
    os.environ["OMP_NUM_THREADS"] = "1"
    for ranks in map(int, options.ranks.split(",")):
        for backend in options.backends.split(","):
            rows: list[bytes] = []
            try:
                run_ranks(ranks, ["--one", backend], TIMEOUT_S, rows.append)
            except RankFailedError as error:
                print(f"{backend} over {ranks} ranks failed: {error}", file=sys.stderr)
                return 1
            figures = json.loads(rows[0])
            row = " ".join(f"{figures[name]:10.1f}" for name in COLUMNS)
            print(f"{backend:12s} {ranks:5d} {row}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
