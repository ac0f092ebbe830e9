"""Messages far ahead of their receiver: `python benchmarks/messages_ahead.py`.

    python benchmarks/messages_ahead.py --messages 1000000 --sizes 0,4,256

Rank 0 issues all its messages with isend before rank 1 posts its first receive. Each message has
its number in every element, and rank 1 compares all of them. The rate is from the first isend to
the last value received; turns of the backends are interleaved. `work` is what rank 0 holds more
for each Work of the caller's, in bytes, when all are issued, and `ahead` what rank 1 holds more by
then, in MiB: both from the resident memory, the messages' own memory not counted.

    python benchmarks/messages_ahead.py --messages 100000 --sizes 4 --slower-us 100

Here rank 1 receives one message after the other from the beginning, and computes for 0.1 ms after
each: rank 0, which never waits, is further and further ahead. `ahead` is then from the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from launching import RankFailedError, add_rank_options, ran_as_rank, run_ranks
from report import header
from torch.distributed import TCPStore  # type: ignore[attr-defined]

TIMEOUT_S = 900.0


def resident() -> int:
    """Bytes."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def compute(microseconds: float) -> None:
    end = time.perf_counter() + microseconds * 1e-6
    while time.perf_counter() < end:
        pass


def measure(backend: str, nbytes: int, messages: int, slower_us: float) -> dict[str, float]:
    """Of rank 0; rank 1 raises if a value is wrong."""
    name, _, transport = backend.partition(":")
    rank = int(os.environ["RANK"])
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout
    )
    options = None
    if name == "pycomm":
        import pycomm

        options = pycomm.Options(transport=transport or "auto")
    dist.init_process_group(
        name, store=store, rank=rank, world_size=2, timeout=timeout, pg_options=options
    )
    numbers = torch.arange(messages, dtype=torch.float32).unsqueeze(1).expand(-1, nbytes // 4)
    memory = numbers.contiguous() if rank == 0 else torch.full(numbers.shape, -1.0)
    tensors = list(memory.unbind(0)) if nbytes else [torch.empty(0) for _ in range(messages)]
    works: list[dist.Work | None] = [None] * messages
    dist.barrier()
    dist.send(tensors[0], 1) if rank == 0 else dist.recv(tensors[0], 0)  # the links are open
    gc.collect()
    gc.disable()
    dist.barrier()
    before, began = resident(), time.perf_counter()
    if rank == 0:
        for i, tensor in enumerate(tensors):
            works[i] = dist.isend(tensor, 1)
        issued = time.perf_counter() - began
        held = resident() - before
        store.set("issued", "1")
    elif slower_us:
        for tensor in tensors:
            dist.recv(tensor, 0)
            compute(slower_us)
        works.clear()
        held = resident() - before
        issued = 0.0
    else:
        store.wait(["issued"])
        held = resident() - before
        issued = 0.0
        for i, tensor in enumerate(tensors):
            works[i] = dist.irecv(tensor, 0)
    for work in works:
        assert work is not None
        work.wait()
    if rank == 1:
        assert torch.equal(memory, numbers), "a message has another's values"
        store.set("received", str(held))
    received = float(store.get("received"))
    elapsed = time.perf_counter() - began
    works.clear()
    dist.barrier()
    dist.destroy_process_group()
    return {
        "rate": messages / elapsed,
        "issued": messages / max(issued, 1e-9),
        "work": held / messages,
        "ahead": received / 2**20,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--messages", type=int, default=1_000_000, help="default: %(default)s")
    add("--sizes", default="0,4,256", help="in bytes; default: %(default)s")
    add("--backends", default="pycomm:shm,pycomm:tcp,gloo", help="default: %(default)s")
    add("--turns", type=int, default=1, help="default: %(default)s")
    add("--slower-us", type=float, default=0.0, help="rank 1 computes this long for each message")
    add("--one", help=argparse.SUPPRESS)
    add_rank_options(parser)
    options = parser.parse_args()

    def one() -> dict[str, float]:
        backend, nbytes = options.one.split(",")
        return measure(backend, int(nbytes), options.messages, options.slower_us)

    if ran_as_rank(options, one):
        return 0
    for key, value in header("messages_ahead", sys.argv[1:]).items():
        print(f"# {key:14s} {value}")
    print(
        f"{'backend':12s} {'bytes':>5s} {'messages':>9s} "
        f"{'messages/s':>11s} {'issued/s':>9s} {'work B':>7s} {'ahead MiB':>9s}"
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    for nbytes in map(int, options.sizes.split(",")):
        for _ in range(options.turns):
            for backend in options.backends.split(","):
                rows: list[bytes] = []
                argv = ["--messages", str(options.messages), "--one", f"{backend},{nbytes}"]
                argv += ["--slower-us", str(options.slower_us)]
                try:
                    run_ranks(2, argv, TIMEOUT_S, rows.append)
                except RankFailedError as error:
                    print(f"{backend}, {nbytes} bytes failed: {error}", file=sys.stderr)
                    return 1
                row = json.loads(rows[0])
                print(
                    f"{backend:12s} {nbytes:5d} {options.messages:9d} {row['rate']:11.0f} "
                    f"{row['issued']:9.0f} {row['work']:7.0f} {row['ahead']:9.1f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
