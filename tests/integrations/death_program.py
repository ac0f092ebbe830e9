"""What Slurm starts: trains with elastic= while rank 1 kills itself, and says who is left."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import pycomm
from pycomm.integrations.launch import env_from_launcher

STEPS, DEATH = 60, 20


def main() -> None:
    env_from_launcher()
    torch.distributed.init_process_group("pycomm")
    rank = torch.distributed.get_rank()
    model = pycomm.DistributedDataParallel(nn.Linear(4, 1), elastic=pycomm.Elastic())
    for step in range(STEPS):
        if (rank, step) == (1, DEATH):
            os.kill(os.getpid(), signal.SIGKILL)
        model.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
    assert model.elastic.step == STEPS
    left = {"size": model.elastic.size, "members": list(model.elastic.members)}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(left))


if __name__ == "__main__":
    main()
