"""Where an all_reduce's time goes: `python benchmarks/profile_paths.py` (Linux's perf, root).

For each path two ranks on this host repeat one all_reduce, and perf samples rank 0, by the clock,
once it is warm. Printed are the functions in which it was found most often, and the shares of the
kernel, of pycomm, of torch and of Python.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from launching import RankFailedError, add_rank_options, die_with_parent, run_ranks
from report import header
from torch.distributed import TCPStore  # type: ignore[attr-defined]

SECONDS = 4.0
PATHS = [("shm", 4), ("shm", 25 << 20), ("tcp", 4), ("tcp", 25 << 20)]
_PARTS = {"[kernel": "kernel", "_C.": "pycomm", "libtorch": "torch", "libc10": "torch"}
_PARTS |= {"libpython": "Python", "python": "Python", "libc.so": "libc"}


def run_path(transport: str, nbytes: int, report: int | None) -> None:
    """One rank's part: repeat the operation, and on rank 0 let perf watch."""
    import pycomm

    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=60)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout
    )
    options = pycomm.Options(transport=transport)
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=2, pg_options=options)
    tensor = torch.zeros(max(1, nbytes // 4))
    more = torch.ones(1)
    ops, perf = 0, None
    until = time.monotonic() + 1.0  # warm
    with tempfile.TemporaryDirectory() as folder:
        samples = f"{folder}/perf.data"
        while True:
            for _ in range(200 if nbytes < 1 << 20 else 4):
                dist.all_reduce(tensor)
                ops += 1
            if rank == 0 and time.monotonic() > until:
                if perf is None:
                    command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "1999"]
                    command += ["-o", samples, "-p", str(os.getpid())]
                    perf = subprocess.Popen(
                        [*command, "--", "sleep", str(SECONDS)], stdout=subprocess.DEVNULL
                    )
                elif perf.poll() is not None:
                    more.zero_()
            dist.broadcast(more, 0)
            if not more.item():
                break
        if report is not None:
            os.write(report, summary(samples).encode())
    dist.barrier()
    dist.destroy_process_group()


def summary(samples: str) -> str:
    """The shares of the parts, and the first functions."""
    command = [
        "perf",
        "report",
        "-i",
        samples,
        "--no-children",
        "--stdio",
        "-F",
        "overhead,dso,sym",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shares: Counter[str] = Counter()
    lines = []
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) < 3 or not words[0].endswith("%"):
            continue
        share = float(words[0].rstrip("%"))
        name = next((part for key, part in _PARTS.items() if words[1].startswith(key)), "other")
        shares[name] += share
        if len(lines) < 10:
            lines.append(f"  {share:5.1f} %  {name:7s} {' '.join(words[3:])[:84]}\n")
    total = ", ".join(f"{name} {share:.0f} %" for name, share in shares.most_common())
    return f"  {total}\n{''.join(lines)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", type=int, help=argparse.SUPPRESS)
    add_rank_options(parser)
    options = parser.parse_args()
    if options.path is not None:
        die_with_parent(options.parent_pid)
        run_path(*PATHS[options.path], options.results_fd)
        return 0
    for key, value in header("profile_paths", sys.argv[1:]).items():
        print(f"# {key:14s} {value}")
    for index, (transport, nbytes) in enumerate(PATHS):
        print(f"all_reduce of {nbytes} bytes, 2 ranks, {transport}", flush=True)
        try:
            run_ranks(2, ["--path", str(index)], 90.0, lambda line: print(line.decode()))
        except RankFailedError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
