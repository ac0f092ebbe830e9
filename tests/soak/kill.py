"""Kills one of three ranks in an all_reduce, many times: who notices what, and how soon.

Ranks are forked before any group or thread exists. The victim may hold memory, which the kernel
frees before it closes its sockets:

    python tests/soak/kill.py --kills 100
    python tests/soak/kill.py --kills 20 --resident-gb 4
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import random
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

import pycomm

WORLD_SIZE = 3


def rank_main(rank: int, store: str, write_fd: int, numel: int, resident_nbytes: int) -> None:
    """Reduces until somebody dies, and says through the pipe what it saw and when."""

    def say(line: dict[str, object]) -> None:
        os.write(write_fd, json.dumps(line).encode() + b"\n")

    held = None
    if resident_nbytes:
        held = mmap.mmap(-1, resident_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, resident_nbytes, mmap.PAGESIZE):
            held[at] = 1
    dist.init_process_group("pycomm", init_method=f"file://{store}", rank=rank, world_size=3)
    tensor = torch.ones(numel)
    dist.all_reduce(tensor)
    say({"ready": True})
    try:
        while True:
            tensor.fill_(1.0)
            dist.all_reduce(tensor)
    except pycomm.errors.PycommError as error:
        at_s = time.monotonic()
        say({"at": at_s, "code": error.code, "peer": error.record.get("peer"), "text": str(error)})
    dist.destroy_process_group()
    del held


def read_line(fd: int, timeout_s: float) -> dict[str, object]:
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        deadline_s = time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError("a rank says nothing")
            chunk = os.read(fd, 65536)
            if not chunk:
                raise EOFError("a rank has ended without a word")
            line += chunk
    return dict(json.loads(line))


def one_kill(
    store: str, victim: int, numel: int, resident_nbytes: int, pause_s: float
) -> list[tuple[float, str]]:
    pipes, pids = [], []
    for rank in range(WORLD_SIZE):
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(rank, store, write_fd, numel, resident_nbytes if rank == victim else 0)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write_fd)
        pipes.append(read_fd)
        pids.append(pid)
    seen = []
    try:
        for fd in pipes:
            read_line(fd, 60)
        time.sleep(pause_s)  # into another phase each time
        killed_s = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        for rank, fd in enumerate(pipes):
            if rank != victim:
                line = read_line(fd, 20)
                named = "named" if line["peer"] == victim else f"WRONG peer {line['peer']}"
                seen.append((float(str(line["at"])) - killed_s, f"{line['code']} {named}"))
    finally:
        for fd, pid in zip(pipes, pids, strict=True):
            os.close(fd)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return seen


def percentile(sorted_values: list[float], share: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--resident-gb", type=float, default=0.0)
    parser.add_argument("--mib", type=float, default=1.0, help="size of the all_reduce")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-ms", type=float, default=0.0, help="fail above this p99")
    arguments = parser.parse_args()
    logging.getLogger("pycomm").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dice = random.Random(arguments.seed)
    folder = tempfile.mkdtemp()
    # The slower of the two survivors counts: "on all ranks".
    slowest_ms: list[float] = []
    kinds: dict[str, int] = {}
    for attempt in range(arguments.kills):
        seen = one_kill(
            f"{folder}/{attempt}",
            dice.randrange(WORLD_SIZE),
            int(arguments.mib * (1 << 18)),
            int(arguments.resident_gb * (1 << 30)),
            dice.uniform(0.005, 0.06),
        )
        slowest_ms.append(1000 * max(at for at, _ in seen))
        for _, kind in seen:
            kinds[kind] = kinds.get(kind, 0) + 1
    shutil.rmtree(folder)
    slowest_ms.sort()
    p50, p99 = percentile(slowest_ms, 0.5), percentile(slowest_ms, 0.99)
    print(
        f"{arguments.kills} kills, {arguments.resident_gb} GB resident, {arguments.mib} MiB: "
        f"SIGKILL to exception on all survivors p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
        f"max {slowest_ms[-1]:.1f} ms; {kinds}",
        flush=True,
    )
    good = set(kinds) == {"PEER_DEAD named"} and not 0 < arguments.limit_ms < p99
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
