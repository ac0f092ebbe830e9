"""Add up one tensor over all ranks, and check the sum.

torchrun --nproc-per-node=2 examples/all_reduce.py
"""

import torch
import torch.distributed as dist

import pycomm  # noqa: F401 (registers the backend)

dist.init_process_group("pycomm")
rank, ranks = dist.get_rank(), dist.get_world_size()

numbers = torch.arange(1_000_000.0) % 100 + rank  # fp32; each rank has other numbers
work = dist.all_reduce(numbers, async_op=True)  # returns at once: compute here meanwhile
work.wait()  # now every rank has the same sum

expected = (torch.arange(1_000_000.0) % 100) * ranks + ranks * (ranks - 1) / 2
assert torch.equal(numbers, expected)
print(f"rank {rank} of {ranks}: the sum is right; its last number is {numbers[-1]:.0f}")
dist.destroy_process_group()
