"""Three ranks without a launcher; rank 2 gets SIGKILL in a 100 MiB all_reduce.

python tests/soak/kill.py 5
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
from typing import Any

VICTIM = 2


def rank_main(rank: int, store: str, out: mp.Queue[Any]) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("pycomm", init_method=f"file://{store}", rank=rank, world_size=3)
    tensor = torch.ones(25 << 20)
    dist.all_reduce(tensor)
    out.put((rank, "ready", "", time.time()))
    try:
        while True:
            dist.all_reduce(tensor)
    except dist.DistError as error:
        out.put((rank, type(error).__name__, str(error), time.time()))


def main() -> None:
    mp.set_start_method("spawn")
    for attempt in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
        with tempfile.TemporaryDirectory() as folder:
            out: mp.Queue[Any] = mp.Queue()
            ranks = [
                mp.Process(target=rank_main, args=(rank, f"{folder}/store", out))
                for rank in range(3)
            ]
            for process in ranks:
                process.start()
            for _ in ranks:
                out.get(timeout=60)
            time.sleep(0.3 + 0.05 * attempt)  # into another phase each time
            killed_at = time.time()
            pid = ranks[VICTIM].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            for _ in range(2):
                rank, kind, text, at = out.get(timeout=30)
                print(
                    f"rank {rank}, {1000 * (at - killed_at):.0f} ms after the kill: {kind}: {text}"
                )
            for process in ranks:
                process.join(20)
            print(f"exit codes {[process.exitcode for process in ranks]}", flush=True)


if __name__ == "__main__":
    main()
