"""One process of a training that others join, for a host of its own: a plan in, a result out."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import elastic_joining
import rank_child
import torch.distributed as dist


def main() -> None:
    """Arguments: a pickled ``elastic_joining.Plan``, and where its result goes."""
    plan = pickle.loads(Path(sys.argv[1]).read_bytes())
    rank_child._mark_fd = 1  # marks are its output
    dist.init_process_group("pycomm")  # of itself alone
    result = elastic_joining.trains(0, 1, plan)
    dist.destroy_process_group()
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
