"""What launchers start in the tests: joins through pycomm.integrations.launch, adds up, says so."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pycomm.integrations import launch


def wait_for_all(path: str, count: int) -> None:
    """Until so many ranks, of whatever jobs, are here: all jobs hold their ports at once."""
    store = dist.FileStore(path, -1)
    store.add("here", 1)
    deadline = time.monotonic() + 180
    while store.add("here", 0) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {store.add('here', 0)} of {count} ranks came")
        time.sleep(0.02)


def main() -> int:
    folder = Path(sys.argv[1])
    found = launch.init_process_group("pycomm", timeout=timedelta(seconds=180))
    if found is None:
        print("no launcher", file=sys.stderr)
        return 3
    total = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(total)
    ids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(ids, os.getpid())
    said = {
        "launcher": found.launcher,
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "local_rank": os.environ.get("LOCAL_RANK"),
        "address": found.address,
        "port": found.port,
        "job": found.job,
        "total": float(total),
        "pids": ids,
        "life": os.environ.get("TORCHELASTIC_RESTART_COUNT"),
    }
    name = f"{found.job or 'run'}-{dist.get_rank()}".replace("/", "_")
    (folder / f"{name}.json").write_text(json.dumps(said))
    if len(sys.argv) > 3:
        wait_for_all(sys.argv[2], int(sys.argv[3]))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
