"""Our wrapper beside torch's over gloo: every parameter, after every one of 20 steps, bit for bit.

Two addends have one sum, in whatever order, so two ranks must agree to the bit. All shapes train in
one pair of processes. Three and four addends have several sums: there each gradient is compared
with the float64 mean of the ranks' own gradients, within the roundings of so many additions.
"""

from __future__ import annotations

from typing import Any

import ddp_shapes
import pytest
import ranks
import rings
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


ROUNDING = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8}
"""Half the distance of 1.0 to the next number."""
FEW_STEPS = 3


def own_gradients(name: str, replica: nn.Module, of: int, step: int) -> list[torch.Tensor]:
    """What rank ``of`` computes alone from these parameters; zeros where it has no gradient."""
    replica.zero_grad(set_to_none=True)
    ddp_shapes.SHAPES[name].loss(replica, ddp_shapes.batch_of(name, of, step)).backward()
    return [
        torch.zeros_like(each) if each.grad is None else each.grad.to_dense()
        for each in replica.parameters()
    ]


def compare_with_the_mean(name: str, rank: int, size: int) -> list[str]:
    """Steps of our wrapper; each rank computes all ranks' gradients itself and averages them."""
    import copy

    import pycomm

    shape = ddp_shapes.SHAPES[name]
    plain = ddp_shapes.make(name)
    ours: nn.Module = pycomm.DistributedDataParallel(plain, **shape.options)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    wrong = []
    for step in range(FEW_STEPS):
        before = copy.deepcopy(plain)
        optimizer.zero_grad(set_to_none=True)
        shape.loss(ours, ddp_shapes.batch_of(name, rank, step)).backward()
        wide = torch.complex128 if name == "complex" else torch.float64
        parts = [
            [each.to(wide) for each in own_gradients(name, copy.deepcopy(before), of, step)]
            for of in range(size)
        ]
        for (parameter, mine), *each in zip(ours.named_parameters(), *parts, strict=True):
            mean = torch.stack(each).sum(0) / size
            # One rounding per addition and one for the mean, of at most the sum of the magnitudes;
            # as much again for a reduction inside backward that another run orders differently.
            real = mine.dtype.to_real() if mine.dtype.is_complex else mine.dtype
            limit = 2 * (size + 1) * ROUNDING[real] * torch.stack(each).abs().sum(0) / size + 1e-40
            got = torch.zeros_like(mine) if mine.grad is None else mine.grad.to_dense()
            far = (got.to(wide) - mean).abs()
            if not bool((far <= limit).all()):
                at = int((far - limit).argmax())
                off, most = float(far.flatten()[at]), float(limit.flatten()[at])
                wrong.append(f"{name}, step {step}: {parameter}[{at}] is off by {off} > {most}")
        optimizer.step()
    return wrong


def all_shapes_against_the_mean(rank: int, world_size: int) -> list[str]:
    torch.set_num_threads(1)
    wrong: list[str] = []
    for name in ddp_shapes.SHAPES:
        try:
            wrong += compare_with_the_mean(name, rank, world_size)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return wrong


@pytest.mark.parametrize("size", rings.first_of([3, 4]))
@pytest.mark.ci
def test_on_more_ranks_each_gradient_is_the_mean_of_the_ranks_own(size: int) -> None:
    results = ranks.run_ranks(
        size, all_shapes_against_the_mean, timeout_s=300, preload=ranks.TORCH_DDP
    )
    assert results.values() == [[]] * size
