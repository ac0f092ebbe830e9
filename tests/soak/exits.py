"""Ends the interpreter with collectives outstanding, many times: no abort, no hang.

Pairs of ranks are forked before any group or thread exists and end like any other interpreter,
through its exit handlers:

    python tests/soak/exits.py 100
"""

from __future__ import annotations

import collections
import logging
import os
import shutil
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import pycomm  # noqa: F401

HOW = ("works kept", "futures with callbacks", "one never entered by the other", "works dropped")


def leave_with_work_outstanding(rank: int, how: str, store: str) -> list[object]:
    dist.init_process_group("pycomm", init_method=f"file://{store}", rank=rank, world_size=2)
    tensors = [torch.ones(1 + 100_000 * k) for k in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if how == "futures with callbacks":
        return [work.get_future().then(lambda done: done.value()[0] * 2) for work in works]
    if how == "one never entered by the other" and rank == 0:
        works.append(dist.all_reduce(torch.ones(1 << 20), async_op=True))
    return [] if how == "works dropped" else works


def main() -> list[object]:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    logging.getLogger("pycomm").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    codes: collections.Counter[str] = collections.Counter()
    slowest_s = 0.0
    folder = tempfile.mkdtemp()  # not a context: a child must not delete it on its way out
    for i in range(pairs):
        how = HOW[i % len(HOW)]
        began = time.monotonic()
        pids = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                # Kept alive by the caller until the interpreter itself ends.
                return leave_with_work_outstanding(rank, how, f"{folder}/{i}")
            pids.append(pid)
        for pid in pids:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            codes[f"{how}: exit {status}"] += 1
        slowest_s = max(slowest_s, time.monotonic() - began)
    shutil.rmtree(folder)
    print(f"{sum(codes.values())} exits, slowest pair {slowest_s:.2f} s: {dict(codes)}")
    return []


if __name__ == "__main__":
    kept = main()
