"""How a rank's attempt to join ends where some rank is to be refused."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import pycomm


def join(rank: int, world_size: int, timeout_s: float) -> dict[str, Any]:
    """Joins at the place in MEETING, and leaves: "type" of the error or "", "text", "peer" (None
    where it has none) and the seconds that it "took"."""
    begin = time.monotonic()
    try:
        dist.init_process_group(
            "pycomm",
            init_method=os.environ["MEETING"],
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (ValueError, pycomm.errors.PycommError) as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "peer": getattr(error, "peer", None),
            "took": time.monotonic() - begin,
        }
    dist.destroy_process_group()
    return {"type": "", "text": "", "peer": None, "took": time.monotonic() - begin}
