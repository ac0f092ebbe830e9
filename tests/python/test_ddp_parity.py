"""Our wrapper beside torch's over gloo: every parameter, after every one of 20 steps, bit for bit.

Two addends have one sum, in whatever order, so two ranks must agree to the bit. All shapes train in
one pair of processes.
"""

from __future__ import annotations

from typing import Any

import ddp_shapes
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

STEPS = 20


def train_both(name: str, rank: int, gloo: Any) -> list[str]:
    """What differs, in words; nothing where nothing does."""
    import pycomm

    shape = ddp_shapes.SHAPES[name]
    ours: nn.Module = pycomm.DistributedDataParallel(ddp_shapes.make(name), **shape.options)
    theirs = TorchDDP(ddp_shapes.make(name), process_group=gloo, **shape.options)
    optimizers = [
        # Momentum in dense memory does not go with sparse gradients.
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if "sparse" in name else 0.9)
        for model in (ours, theirs)
    ]
    clips = "sparse" not in name and "complex" not in name
    for step in range(STEPS):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step % 3 != 2)
            shape.loss(model, ddp_shapes.batch_of(name, rank, step)).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        wrong = []
        for (parameter, mine), reference in zip(
            ours.named_parameters(), theirs.parameters(), strict=True
        ):
            if (mine.grad is None) != (reference.grad is None):
                wrong.append(f"{name}, step {step}: the gradient of {parameter} is not there")
            if not torch.equal(mine, reference):
                far = float((mine - reference).abs().max())
                wrong.append(f"{name}, step {step}: {parameter} is off by {far}")
        if wrong:
            return wrong
    buffers = zip(ours.buffers(), theirs.buffers(), strict=True)
    return [f"{name}: a buffer differs" for a, b in buffers if not torch.equal(a, b)]


def all_shapes(rank: int, world_size: int) -> list[str]:
    gloo = dist.new_group(backend="gloo")
    wrong: list[str] = []
    for name in ddp_shapes.SHAPES:
        try:
            wrong += train_both(name, rank, gloo)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return wrong


def test_thirty_shapes_train_as_torchs_wrapper_over_gloo_does() -> None:
    assert len(ddp_shapes.SHAPES) >= 30
    results = ranks.run_ranks(
        2, all_shapes, timeout_s=300, preload=ranks.TORCH_DDP, only_pycomm=False
    )
    assert results.values() == [[], []]
