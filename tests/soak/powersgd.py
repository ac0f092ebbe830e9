"""torch's DDP with torch's PowerSGD hook and five buckets over pycomm, many times 20 steps.

The hook waits for futures inside futures' callbacks and issues collectives from them; on gloo the
process aborts. Counts how runs end, bare and through pycomm.comm_hooks.ordered, at 2 and 3 ranks:

    python tests/soak/powersgd.py 50
"""

from __future__ import annotations

import collections
import datetime
import hashlib
import logging
import multiprocessing as mp
import sys
import tempfile
import time
from typing import Any

STEPS = 20


def one_run(rank: int, world_size: int, mode: str, seed: int, store: str) -> str:
    import torch
    import torch._dynamo
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    import pycomm

    dist.init_process_group(
        "pycomm",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=40),
    )
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(5)])
    # A weight of 0.25 MiB fills a bucket: five of them.
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2)
    state = power_sgd.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    hook = power_sgd.powerSGD_hook
    ddp.register_comm_hook(state, hook if mode == "bare" else pycomm.comm_hooks.ordered(hook))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    batches = torch.Generator().manual_seed(100 * seed + rank)
    try:
        for _ in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.randn(8, 256, generator=batches)).square().mean().backward()
            optimizer.step()
        flat = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        digests: list[Any] = [None] * world_size
        dist.all_gather_object(digests, hashlib.sha256(flat).hexdigest())
        outcome = "equal parameters" if len(set(digests)) == 1 else "DIFFERENT parameters"
    except pycomm.errors.PycommError as error:
        outcome = str(error.code)
    dist.destroy_process_group()
    return outcome


def rank_main(
    rank: int, world_size: int, mode: str, runs: int, folder: str, out: mp.Queue[Any]
) -> None:
    import torch

    logging.getLogger("pycomm").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    out.put((rank, [one_run(rank, world_size, mode, i, f"{folder}/{i}") for i in range(runs)]))


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    mp.set_start_method("spawn")
    clean = True
    for world_size in (2, 3):
        for mode in ("ordered", "bare"):
            with tempfile.TemporaryDirectory() as folder:
                out: mp.Queue[Any] = mp.Queue()
                began = time.monotonic()
                ranks = [
                    mp.Process(target=rank_main, args=(r, world_size, mode, runs, folder, out))
                    for r in range(world_size)
                ]
                for process in ranks:
                    process.start()
                outcomes = dict(out.get(timeout=60 + 60 * runs) for _ in ranks)
                for process in ranks:
                    process.join(20)
                counts = collections.Counter(
                    " / ".join(sorted({outcomes[r][i] for r in outcomes})) for i in range(runs)
                )
                codes = [process.exitcode for process in ranks]
                clean = clean and codes == [0] * world_size
                print(
                    f"{world_size} ranks, {mode}: {dict(counts)}, exit codes {codes}, "
                    f"{time.monotonic() - began:.0f} s",
                    flush=True,
                )
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
