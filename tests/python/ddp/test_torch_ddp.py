"""torch's own DistributedDataParallel over pycomm: gloo's numbers within rounding, and PowerSGD.

Annotations are not postponed here: torch compares a hook's with its own classes.
"""

import copy
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from ranks import TORCH_DDP, run_ranks
from test_ordered import powersgd_state, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from pycomm.comm_hooks import ordered

pytestmark = pytest.mark.needs_native

STEPS = 8


class Net(nn.Module):
    """Convolution, batch norm with buffers, a shared and, on odd steps, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 6 * 6, 300)
        self.shared = nn.Linear(300, 300)
        self.sometimes = nn.Linear(300, 300)
        self.last = nn.Linear(300, 10)

    def forward(self, images: torch.Tensor, odd: bool) -> torch.Tensor:
        x = self.norm(self.conv(images)).relu().flatten(1)
        x = self.shared(self.shared(self.hidden(x).relu()).relu())
        x = x if odd else self.sometimes(x).relu()
        out: torch.Tensor = self.last(x)
        return out


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], unused: bool) -> Any:
    images, labels = batch
    return nn.functional.cross_entropy(model(images, unused), labels)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    found = [torch.zeros(0) if p.grad is None else p.grad for p in model.parameters()]
    return [gradient.detach().clone() for gradient in found]


def trajectory(rank: int, world_size: int, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """This rank's own first gradients; then everybody's gradients and parameters, step by step."""
    torch.manual_seed(0)
    net = Net()
    alone = copy.deepcopy(net)
    model = DistributedDataParallel(net, bucket_cap_mb=0.1, **options)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen: list[list[torch.Tensor]] = []
    for step in range(STEPS):
        unused = bool(options.get("find_unused_parameters")) and step % 2 == 1
        batch = (torch.randn(4, 1, 8, 8), torch.randint(0, 10, (4,)))
        if step == 0:
            loss_of(alone, batch, unused).backward()
            seen.append(gradients_of(alone))
        optimizer.zero_grad()
        loss_of(model, batch, unused).backward()
        seen.append(gradients_of(model))
        optimizer.step()
        seen.append([tensor.detach().clone() for tensor in model.parameters()])
    return seen


@pytest.mark.ci
@pytest.mark.parametrize("world_size", rings.first_of([2, 3]))
@pytest.mark.parametrize(
    "options",
    rings.ends([{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]),
    ids=["plain", "bucket view", "unused"],
)
def test_the_same_as_gloo_step_by_step(world_size: int, options: dict[str, Any]) -> None:
    """With two ranks there is one order of adding, so every step has the same bits.

    With three there are several, each with N - 1 roundings of at most 2^-24 of the sum of |g|: the
    first gradients may differ by two such sums. From then on the parameters differ, and some
    gradients (of the bias before the batch norm) are zero but for rounding: later steps are held
    to 2^-15 of the step's largest number.
    """
    runs = {}
    for backend in ("gloo", "pycomm"):
        # The plain case on pycomm imports what it needs while the group exists, as users do.
        preload = () if backend == "pycomm" and not options else TORCH_DDP
        results = run_ranks(
            world_size, trajectory, args=(options,), backend=backend, preload=preload
        )
        runs[backend] = results.values()
        for other in runs[backend][1:]:
            for left, right in zip(runs[backend][0][1:], other[1:], strict=True):
                assert all(map(torch.equal, left, right)), f"{backend}: ranks differ"
    own = [run[0] for run in runs["gloo"]]
    pairs = list(zip(runs["gloo"][0][1:], runs["pycomm"][0][1:], strict=True))
    for index, (wanted, got) in enumerate(pairs):
        largest = max(float(tensor.abs().max()) for tensor in wanted if tensor.numel())
        for position, (left, right) in enumerate(zip(wanted, got, strict=True)):
            if world_size == 2:
                assert torch.equal(left, right), f"step {index // 2}"
            elif index == 0 and left.numel():
                terms = torch.stack([rank_own[position].double().abs() for rank_own in own])
                rounding = (world_size - 1) * 2.0**-24 * terms.mean(0)
                assert ((left.double() - right.double()).abs() <= 2 * rounding * 1.01).all()
            elif left.numel():
                difference = float((left - right).abs().max())
                assert difference <= 2.0**-15 * largest, f"step {index // 2}"


def make_five_buckets() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(5)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)


def train_with_powersgd(rank: int, world_size: int, steps: int, how: str) -> str:
    model = make_five_buckets()
    hook = powerSGD_hook.powerSGD_hook
    model.register_comm_hook(powersgd_state(), ordered(hook) if how == "ordered" else hook)
    return train(model, rank, steps)


@pytest.mark.parametrize("world_size", rings.first_of([2, 3]))
@pytest.mark.ci
def test_powersgd_ordered(world_size: int, repeats: int) -> None:
    for _ in range(repeats):
        digests = run_ranks(
            world_size, train_with_powersgd, args=(20, "ordered"), preload=TORCH_DDP
        ).values()
        assert len(set(digests)) == 1


@pytest.mark.parametrize("world_size", rings.first_of([2, 3]))
@pytest.mark.ci
def test_powersgd_bare(world_size: int, repeats: int) -> None:
    """Without ``ordered`` its callbacks issue while autograd goes on to the next buckets."""
    for _ in range(repeats):
        digests = run_ranks(
            world_size, train_with_powersgd, args=(20, "bare"), preload=TORCH_DDP
        ).values()
        assert len(set(digests)) == 1


class HookError(Exception):
    """Raised by a hook below."""


def fail_in_ordered_hook(rank: int, world_size: int) -> str:
    def bad_hook(state, bucket):  # type: ignore[no-untyped-def]
        raise HookError("the hook's own mistake")

    model = make_five_buckets()
    model.register_comm_hook(None, ordered(bad_hook))
    try:
        train(model, rank, 1)
    except HookError as error:
        return str(error)
    return "another exception, or none"


def test_backward_raises_the_hooks_own_exception() -> None:
    assert run_ranks(1, fail_in_ordered_hook, preload=TORCH_DDP).values() == [
        "the hook's own mistake"
    ]


def collective_fails_in_backward(rank: int, world_size: int) -> str:
    model = make_five_buckets()
    if rank == 1:
        return "left"
    try:
        train(model, rank, 1)
    except dist.DistNetworkError as error:
        return type(error).__name__
    return "nothing"


def test_backward_raises_pycomms_own_exception() -> None:
    results = run_ranks(2, collective_fails_in_backward, check=False, preload=TORCH_DDP)
    assert results[0].value in ("PeerLeftError", "PeerDeadError"), results.describe()
