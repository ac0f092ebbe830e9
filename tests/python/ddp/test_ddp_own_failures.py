"""One rank's backward pass fails, the rank lives on, and the others learn of it at once."""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_rig import wrap
from ranks import TORCH_DDP, run_ranks
from signals import interrupt_main_thread
from time_bound import assert_within
from torch import nn
from torch.futures import Future
from torch.utils.checkpoint import checkpoint

import pycomm
from pycomm._group.creation import native_backend

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]

TIMEOUT_S = 40.0
SOON_S = 15.0


class Table(nn.Module):
    """Rank 1 makes the table's gradient sparse when all ranks expect a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 4), nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(batch)).sum()


def another_layout(rank: int) -> Any:
    model = wrap(Table())
    if rank == 1:
        model.module.table.sparse = True
    return model


class Group:
    """A state with a group of its own, as that of PowerSGD has."""

    def __init__(self) -> None:
        self.process_group = dist.new_group()


def failing_hook(state: Any, bucket: Any) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("the hook's own mistake")
    group = None if state is None else state.process_group
    dist.all_reduce(bucket.buffer(), group=group)
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


failing_hook.__annotations__.clear()


def hook_over_another_group(rank: int) -> Any:
    model = wrap(Table())
    model.register_comm_hook(Group(), failing_hook)
    return model


def pair(
    first: nn.Module | None = None, second: nn.Module | None = None, **options: Any
) -> tuple[Any, Any]:
    """Each has a group; by default a layer and a Table. `options`: of the first one."""
    models = (
        wrap(each, process_group=dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)), **more)
        for each, more in ((first or nn.Linear(4, 4), options), (second or Table(), {}))
    )
    return next(models), next(models)


def second_of_two(rank: int) -> Any:
    """Each has a group, and backward reaches the first one last, which ends first."""
    first, second = pair()
    if rank == 1:
        second.module.table.sparse = True
    return lambda batch: first(torch.ones(2, 4)).sum() + second(batch)


class Losses:
    """Of several forward passes before the first backward pass."""

    def __init__(self, models: tuple[Any, ...], losses: list[torch.Tensor]) -> None:
        self.models, self.losses = models, losses

    def backward(self) -> None:
        for loss in self.losses:
            for model in self.models:
                model.zero_grad()
            loss.backward()


def second_of_two_losses(rank: int) -> Any:
    first, second = pair()

    def forwards(batch: torch.Tensor) -> Losses:
        losses = [first(torch.ones(2, 4)).sum() + second(batch)]
        if rank == 1:
            second.module.table.sparse = True
        losses.append(first(torch.ones(2, 4)).sum() + second(batch))
        return Losses((first, second), losses)

    return forwards


def on_two_threads(rank: int) -> Any:
    first, second = pair()
    if rank == 1:
        second.module.table.sparse = True

    def forwards(batch: torch.Tensor) -> torch.Tensor:
        outputs = []
        thread = threading.Thread(target=lambda: outputs.append(first(torch.ones(2, 4)).sum()))
        thread.start()
        thread.join()
        for _ in range(20):  # each thread numbers its nodes: so the first wrapper's come last
            torch.ones(1, requires_grad=True).exp()
        return outputs[0] + second(batch)

    return forwards


class Nested(nn.Module):
    """Its gradients come in a nested call of backward(), on rank 1 after the others' have left."""

    def __init__(self, body: nn.Module, as_object: bool = False) -> None:
        super().__init__()
        self.body, self.as_object = body, as_object

    def forward(self, batch: torch.Tensor) -> Any:
        def late(_: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled() and dist.get_rank() == 1:
                time.sleep(1.0)
            out: torch.Tensor = self.body(batch).sum()
            return out

        loss = checkpoint(late, torch.ones(1, requires_grad=True), use_reentrant=True)
        return SimpleNamespace(loss=loss) if self.as_object else loss


def nested(rank: int) -> Any:
    first, second = pair(second=Nested(Table()))
    if rank == 1:
        second.module.body.table.sparse = True
    return lambda batch: first(torch.ones(2, 4)).sum() + second(batch)


def nested_on_another_thread(rank: int) -> Any:
    forward = nested(rank)

    def on_another_thread(loss: torch.Tensor) -> None:
        raised: list[Exception] = []

        def backward() -> None:
            try:
                loss.backward()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        raise raised[0]

    return lambda batch: SimpleNamespace(backward=partial(on_another_thread, forward(batch)))


def beside_a_nested_one(rank: int) -> Any:
    """The first one has no marks, and its graph is not in the call in which the second fails."""
    first, second = pair(Nested(nn.Linear(4, 4), as_object=True))
    if rank == 1:
        second.module.table.sparse = True

    def forward(batch: torch.Tensor) -> torch.Tensor:
        loss = first(torch.ones(2, 4)).loss + second(batch)
        if rank == 1:
            loss.register_hook(lambda _: time.sleep(1.0))
        return loss

    return forward


CASES = [
    (another_layout, "sparse"),
    (nested, "sparse"),
    (nested_on_another_thread, "sparse"),
    (beside_a_nested_one, "sparse"),
    (second_of_two, "sparse"),
    (second_of_two_losses, "sparse"),
    (on_two_threads, "sparse"),
    (hook_over_another_group, "the hook's own mistake"),
]


def one_fails(rank: int, world_size: int, make: Any) -> tuple[str, str, float]:
    """The type and the text of this rank's error, and the seconds until it came."""
    store = dist.distributed_c10d._get_default_store()
    model = make(rank)
    began_s = time.monotonic()
    with pytest.raises(Exception) as caught:
        model(torch.tensor([1, 2])).backward()
    took_s = time.monotonic() - began_s
    store.set(f"failed/{rank}", "")
    keys = [f"failed/{each}" for each in range(world_size)]
    store.wait(keys, timedelta(seconds=2 * TIMEOUT_S))  # it lives until all know
    return type(caught.value).__name__, str(caught.value), took_s


@pytest.mark.time_bound
@pytest.mark.parametrize(("make", "text"), CASES)
def test_the_others_learn_of_it_at_once(make: Any, text: str) -> None:
    found = run_ranks(
        3,
        one_fails,
        args=(make,),
        timeout_s=100,
        init_timeout_s=TIMEOUT_S,
        preload=TORCH_DDP,
        check=False,
    ).values()
    assert text in found[1][1]
    for rank in (0, 2):
        kind, said, took_s = found[rank]
        assert issubclass(getattr(pycomm.errors, kind), pycomm.errors.PycommError)
        assert "rank 1" in said.lower(), said
        assert_within(took_s, SOON_S)


def only_accumulates(first: Any, second: Any) -> torch.Tensor:
    first(torch.ones(2, 4)).sum().backward()
    return second(torch.tensor([1, 2]))


def accumulates_in_the_call(first: Any, second: Any) -> torch.Tensor:
    return first(torch.ones(2, 4)).sum() + second(torch.tensor([1, 2]))


def is_only_looked_at(first: Any, second: Any) -> torch.Tensor:
    first.looked_at = first(torch.ones(2, 4))
    return second(torch.tensor([1, 2]))


def spared(rank: int, world_size: int, forwards: Any, accumulate: int) -> float:
    """What the first wrapper's group sums after the failure of the second one."""
    first, second = pair(accumulate=accumulate)
    if rank == 1:
        second.module.table.sparse = True
    with pytest.raises((RuntimeError, pycomm.errors.PycommError)):
        forwards(first, second).backward()
    dist.barrier()
    total = torch.ones(1)
    dist.all_reduce(total, group=first.process_group)
    return float(total)


@pytest.mark.parametrize(
    ("forwards", "accumulate"),
    [(only_accumulates, 2), (accumulates_in_the_call, 2), (is_only_looked_at, 1)],
)
def test_a_wrapper_that_backward_does_not_reduce_keeps_its_group(
    forwards: Any, accumulate: int
) -> None:
    found = run_ranks(
        3, spared, args=(forwards, accumulate), init_timeout_s=TIMEOUT_S, preload=TORCH_DDP
    )
    assert list(found.values()) == [3.0] * 3


def cut_off(rank: int, world_size: int) -> str:
    """What the first wrapper's group says after the second one, which has no marks, has failed."""
    first, second = pair(second=Nested(Table(), as_object=True))
    if rank == 1:
        second.module.body.table.sparse = True
    with pytest.raises((RuntimeError, pycomm.errors.PycommError)):
        (first(torch.ones(2, 4)).sum() + second(torch.tensor([1, 2])).loss).backward()
    dist.barrier()
    with pytest.raises(pycomm.errors.AbortedError) as caught:
        dist.all_reduce(torch.ones(1), group=first.process_group)
    return str(caught.value)


def test_one_around_the_call_of_a_pass_without_marks_is_cut_off() -> None:
    found = run_ranks(2, cut_off, init_timeout_s=TIMEOUT_S, preload=TORCH_DDP)
    for said in found.values():
        assert "rank 1" in said.lower(), said


# A hook's future that never completes


def never(state: Any, bucket: Any) -> Any:
    return Future()


never.__annotations__.clear()


def interrupted(rank: int, world_size: int) -> float:
    model = wrap(nn.Linear(4, 4))
    model.register_comm_hook(None, never)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = threading.Event()
    model.module.weight.register_hook(lambda _: begun.set())
    sent_s = interrupt_main_thread(signal.SIGINT, begun)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 4)).sum().backward()
    return time.monotonic() - sent_s[0]


@pytest.mark.time_bound
def test_ctrl_c_ends_the_wait_for_a_hook() -> None:
    for took_s in run_ranks(1, interrupted, preload=TORCH_DDP).values():
        assert_within(took_s, 5.0)


def future_interrupted(rank: int, world_size: int) -> float:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = threading.Event()
    sent_s = interrupt_main_thread(signal.SIGINT, begun)
    with pytest.raises(KeyboardInterrupt):
        begun.set()
        Future().wait()
    return time.monotonic() - sent_s[0]


@pytest.mark.time_bound
def test_ctrl_c_ends_the_wait_for_a_future() -> None:
    for took_s in run_ranks(1, future_interrupted).values():
        assert_within(took_s, 5.0)


def overdue(rank: int, world_size: int) -> tuple[str, str]:
    model = wrap(nn.Linear(4, 4))
    model.register_comm_hook(None, never)
    native_backend().set_timeout(timedelta(seconds=1))
    with pytest.raises(pycomm.errors.CollectiveTimeoutError) as caught:
        model(torch.ones(2, 4)).sum().backward()
    return caught.value.code, str(caught.value)


def test_a_hook_that_never_ends_is_a_timeout_that_names_it() -> None:
    for code, text in run_ranks(1, overdue, preload=TORCH_DDP).values():
        assert code == "TIMEOUT"
        for part in ("comm hook 'never'", "bucket 0 of 1", "'weight'", "'bias'", "2000 ms"):
            assert part in text, text
