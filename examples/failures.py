"""Make three failures happen, and read the errors that the other ranks raise.

    python examples/failures.py

It starts its three ranks itself, since torchrun would end them all as soon as one has died.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

import pycomm

FAILURES = {
    "killed": "Rank 1 is killed, as by the kernel's out-of-memory killer.",
    "late": "Rank 1 does not come: it still loads data when the others have waited for 2 seconds.",
    "mismatch": "Rank 1 has 999 elements, the others have 1000.",
}


def run_rank(rank: int, failure: str, folder: str) -> None:
    options = pycomm.Options(flight_recorder_dir=folder, debug="WARN")
    store = f"file://{folder}/store"  # one host only; torchrun sets another
    ids = {"rank": rank, "world_size": 3}
    dist.init_process_group("pycomm", init_method=store, pg_options=options, **ids)
    dist.all_reduce(torch.ones(1000))  # all is well
    if rank == 1 and failure == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and failure == "late":
        time.sleep(4)
        os._exit(0)
    numbers = torch.ones(999 if rank == 1 and failure == "mismatch" else 1000)
    two_seconds = dist.AllreduceOptions()  # as dist.all_reduce, with a timeout of its own
    two_seconds.timeout = timedelta(seconds=2)
    try:
        dist.group.WORLD.allreduce([numbers], two_seconds).wait()
    except pycomm.errors.PycommError as error:
        print(f"  rank {rank}: {error.code}: {error.record.summary}", flush=True)
        if rank == 0:
            print(f"  what to try: {error.record.hint}", flush=True)


if __name__ == "__main__":
    for failure, sentence in FAILURES.items():
        print(f"\n{failure}: {sentence}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for process in start_processes(run_rank, (failure, folder), 3, join=False).processes:
                process.join()
            # Each rank has written down its last operations: which rank was in which?
            subprocess.run([sys.executable, "-m", "pycomm", "trace", folder], check=False)
