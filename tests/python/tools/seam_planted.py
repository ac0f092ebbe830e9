"""Fails on purpose, in the sanitizers' build only: tools/seam.py runs it to see that build report.

pytest does not collect it by itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import run_ranks

from pycomm._native import loader


def commit_use_after_free(rank: int, world_size: int) -> None:
    loader.load().arm_fault_points("work.use_after_free:1:flip")
    dist.all_reduce(torch.ones(3))


def test_use_after_free() -> None:
    run_ranks(2, commit_use_after_free)
