"""A signal handler or a hook asks the wrapper something while its backward pass waits."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import pycomm

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]


def made(**options: Any) -> Any:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return pycomm.DistributedDataParallel(layers, bucket_cap_mb=0.00005, **options)


def backward(model: Any, rank: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.full((2, 4), float(rank + 1))).sum().backward()
    return [param.grad.clone() for param in model.parameters()]


def ask(model: Any) -> Any:
    logged = model._get_ddp_logging_data()
    stats = model.stats()
    model.communication_state_dict()
    assert int(logged["num_buckets"]) > 1
    return stats


def a_signal_comes_while_backward_waits(rank: int, world_size: int) -> None:
    """Rank 1 begins its backward pass only when rank 0's handler has ended."""
    store = dist.distributed_c10d._get_default_store()
    model = made()
    backward(model, rank)
    want = backward(model, rank)  # its forward pass has agreed on the order of the buckets
    asked: list[Any] = []
    refused: list[str] = []

    def handler(*_: object) -> None:
        asked.append(ask(model))
        try:
            model.load_communication_state_dict({"accumulated": 0, "unsynced": 0})
        except RuntimeError as error:
            refused.append(str(error))
        store.set("handled", "yes")

    if rank == 1:
        store.wait(["handled"])
    else:
        signal.signal(signal.SIGUSR1, handler)
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGUSR1)).start()
    assert all(map(torch.equal, backward(model, rank), want))
    if rank == 0:
        assert (asked[0].passes, asked[0].steps) == (3, 2)
        assert "on the thread that runs its backward pass" in refused[0]
    assert model.stats().steps == 3


def a_state_is_taken_while_backward_waits(rank: int, world_size: int) -> None:
    """It has no residuals, which the pass writes; the rest is as before the pass."""
    store = dist.distributed_c10d._get_default_store()
    model = pycomm.DistributedDataParallel(nn.Linear(80, 80, bias=False), wire_dtype="int8")

    def train() -> None:
        model(torch.randn(2, 80)).square().sum().backward()

    for _ in range(2):
        train()
    before = model.communication_state_dict()
    assert before.pop("residuals")["weight"].any()
    taken: list[Any] = []

    def handler(*_: object) -> None:
        taken.append(model.communication_state_dict())
        store.set("handled", "yes")

    if rank == 1:
        store.wait(["handled"])
    else:
        signal.signal(signal.SIGUSR1, handler)
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGUSR1)).start()
    train()
    assert rank == 1 or taken == [before]
    assert "residuals" in model.communication_state_dict()


def a_hook_asks(rank: int, world_size: int) -> None:
    want = backward(made(), rank)
    model = made()
    asked: list[Any] = []
    refused: list[str] = []

    def hook(state: None, bucket: Any) -> Any:
        asked.append(ask(model))
        try:
            model.load_communication_state_dict({"accumulated": 0, "unsynced": 0})
        except RuntimeError as error:
            refused.append(str(error))
        return default_hooks.allreduce_hook(state, bucket)

    hook.__annotations__.clear()
    model.register_comm_hook(None, hook)
    assert all(map(torch.equal, backward(model, rank), want))
    assert len(asked) > 1 and asked[0].passes == 1 and asked[0].steps == 0
    assert len(refused) == len(asked)
    for (
        text
    ) in refused:  # as the hook's thread finds the pass: in a launch, or between two gradients
        assert "comm hook" in text or "in the middle of a backward pass" in text


@pytest.mark.parametrize(
    "program",
    [
        a_signal_comes_while_backward_waits,
        a_state_is_taken_while_backward_waits,
        a_hook_asks,
    ],
)
def test_the_wrapper_is_asked(program: Any) -> None:
    run_ranks(2, program, timeout_s=60)
