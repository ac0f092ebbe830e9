"""For torchrun's restarts: in each life but the last, a rank fails, or is killed, after two steps.

    elastic_program.py FOLDER LIVES [killed [LATE_S]]

It is rank 1 in the first life, rank 0 in the second, and so on. With LATE_S, rank 0 is the first to
join in the first life, the last in the second, and so on; in the fourth, LATE_S after the other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import batch_of, digest, loss_of, make_model

import pycomm


def main() -> int:
    folder, lives = Path(sys.argv[1]), int(sys.argv[2])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if len(sys.argv) > 4 and int(os.environ["RANK"]) != life % 2:
        time.sleep(float(sys.argv[4]) if life == 3 else 0.5)
    dist.init_process_group("pycomm", timeout=timedelta(seconds=180))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model())
    saved = folder / "step.json"
    first, optimizer = 0, torch.optim.SGD(model.parameters(), lr=0.05)
    if saved.exists():
        state = torch.load(folder / "state.pt")
        model.module.load_state_dict(state)
        first = json.loads(saved.read_text())
    for step in range(first, 2 * lives):
        if life < lives - 1 and step == 2 * (life + 1) and rank == (life + 1) % 2:
            if len(sys.argv) > 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return 7
        optimizer.zero_grad()
        loss_of(model, batch_of(step, rank, world_size)).backward()
        optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), folder / "state.pt")
            saved.write_text(json.dumps(step + 1))
        pycomm.monitored_barrier()
    done = {"life": life, "first": first, "digest": digest(model.parameters())}
    (folder / f"done-{rank}.json").write_text(json.dumps(done))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
