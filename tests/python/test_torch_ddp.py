"""torch's own DistributedDataParallel over pycomm: gloo's numbers within rounding, and PowerSGD.

Annotations are not postponed here: torch compares a hook's with its own classes.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
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


def trajectory(rank: int, world_size: int, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Gradients and parameters of every step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.1, **options)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(STEPS):
        unused = bool(options.get("find_unused_parameters")) and step % 2 == 1
        images, labels = torch.randn(4, 1, 8, 8), torch.randint(0, 10, (4,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images, unused), labels).backward()  # type: ignore[no-untyped-call]
        gradients = [torch.zeros(0) if p.grad is None else p.grad for p in model.parameters()]
        seen.append([tensor.detach().clone() for tensor in gradients])
        optimizer.step()
        seen.append([tensor.detach().clone() for tensor in model.parameters()])
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=["plain", "bucket view", "unused"],
)
def test_the_same_as_gloo_step_by_step(world_size: int, options: dict[str, Any]) -> None:
    """Sums of N numbers differ by at most (N - 1) roundings between orders of adding.

    With two ranks there is one order, so every step has the same bits. With three, a step's
    gradient may differ by 2 roundings of 2^-24 relative to its largest terms, and the difference
    grows through the steps; 2^-24 times 2^9 is what is allowed after eight.
    """
    runs = {}
    for backend in ("gloo", "pycomm"):
        results = run_ranks(world_size, trajectory, args=(options,), backend=backend)
        runs[backend] = results.values()
        for other in runs[backend][1:]:
            for left, right in zip(runs[backend][0], other, strict=True):
                assert all(map(torch.equal, left, right)), f"{backend}: ranks differ"
    for index, (wanted, got) in enumerate(zip(runs["gloo"][0], runs["pycomm"][0], strict=True)):
        for left, right in zip(wanted, got, strict=True):
            if world_size == 2:
                assert torch.equal(left, right), f"step {index // 2}"
            elif left.numel():
                difference = (left - right).abs().max()
                assert difference <= 2.0**-15 * left.abs().max(), f"step {index // 2}"


def make_five_buckets() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(5)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)


def train_with_powersgd(rank: int, world_size: int, steps: int, how: str) -> str:
    model = make_five_buckets()
    hook = powerSGD_hook.powerSGD_hook
    model.register_comm_hook(powersgd_state(), ordered(hook) if how == "ordered" else hook)
    return train(model, rank, steps)


@pytest.mark.parametrize("world_size", [2, 3])
def test_powersgd_ordered(world_size: int, repeats: int) -> None:
    for _ in range(repeats):
        digests = run_ranks(world_size, train_with_powersgd, args=(20, "ordered")).values()
        assert len(set(digests)) == 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_powersgd_bare_is_right_or_says_so(world_size: int, repeats: int) -> None:
    """Without ``ordered`` a callback may run inline on the issuing thread, on some ranks only."""
    for _ in range(repeats):
        results = run_ranks(world_size, train_with_powersgd, args=(20, "bare"), check=False)
        if all(result.ok for result in results):
            assert len(set(results.values())) == 1
            continue
        for result in results:
            assert not result.timed_out and result.exit_code == 1, results.describe()
        codes = {error.code for error in results.errors()}
        assert "COLLECTIVE_MISMATCH" in codes, results.describe()
        assert any("ordered" in error.text for error in results.errors()), results.describe()


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
    assert run_ranks(1, fail_in_ordered_hook).values() == ["the hook's own mistake"]


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
    results = run_ranks(2, collective_fails_in_backward, check=False)
    assert results[0].value in ("PeerLeftError", "PeerDeadError"), results.describe()
