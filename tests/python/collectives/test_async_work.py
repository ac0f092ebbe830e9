"""Work and futures as torch documents them, with much under way: groups, threads, callbacks."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from ranks import run_ranks

pytestmark = pytest.mark.needs_native

IN_FLIGHT = 300


def what_a_work_says(rank: int, size: int) -> None:
    from pycomm.errors import CollectiveTimeoutError

    lone = dist.new_group(list(range(size)))
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), group=lone, async_op=True)
        assert not work.is_completed()  # nobody else has come: it cannot be
        with pytest.raises(CollectiveTimeoutError, match="it goes on"):
            work.wait(timedelta(milliseconds=50))
        dist.barrier()
    else:
        dist.barrier()
        work = dist.all_reduce(torch.ones(4), group=lone, async_op=True)
    assert work.wait() is True
    assert work.is_completed() and work.is_success()
    assert work.wait() is True  # again
    tensor = torch.full((3,), float(rank))
    work = dist.broadcast(tensor, 1, async_op=True)
    work.wait()
    assert work.result()[0].data_ptr() == tensor.data_ptr()
    assert work.get_future().wait()[0].eq(1).all()
    outputs = [torch.zeros(2) for _ in range(size)]
    (value,) = (
        dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True).get_future().wait()
    )
    assert [each.tolist() for each in value] == [[float(each)] * 2 for each in range(size)]
    dist.barrier(async_op=True).get_future().wait()
    # A strided output is there when anything says that the work is done, wait() or not.
    wide = torch.zeros(8)
    work = dist.broadcast(wide[::2].fill_(rank + 1), 0, async_op=True)
    while not work.is_completed():  # nobody waits for it: the native thread moves it on
        time.sleep(0.001)
    assert wide[::2].eq(1).all() and wide[1::2].eq(0).all()


def hundreds_in_flight(rank: int, size: int) -> None:
    order = list(range(IN_FLIGHT))
    random.Random(rank).shuffle(order)  # waited for in another order on every rank
    tensors, works = [], []
    for index in range(IN_FLIGHT):
        kind = index % 4
        tensor = torch.full((1 + (index * 37) % 5000,), float(rank + index))
        if kind == 0:
            work = dist.all_reduce(tensor, async_op=True)
        elif kind == 1:
            work = dist.broadcast(tensor, index % size, async_op=True)
        elif kind == 2:
            mine, tensor = tensor, torch.zeros(size * tensor.numel())
            work = dist.all_gather_into_tensor(tensor, mine, async_op=True)
        else:
            mine, tensor = tensor.repeat(size), tensor
            work = dist.reduce_scatter_tensor(tensor, mine, async_op=True)
        tensors.append(tensor)
        works.append(work)
    for index in order:
        works[index].wait()
        total = float(sum(each + index for each in range(size)))
        tensor = tensors[index]
        if index % 4 == 1:
            assert tensor.eq(index % size + index).all()
        elif index % 4 == 2:
            rows = tensor.view(size, -1)
            assert all(rows[each].eq(each + index).all() for each in range(size))
        else:
            assert tensor.eq(total).all()


def groups_in_another_order(rank: int, size: int) -> None:
    """Tensors larger than all buffers: bytes of a group nobody waits for must not block others."""
    groups = [dist.new_group(list(range(size))) for _ in range(4)]
    for _ in range(3):
        tensors = [torch.full((400_000,), float(rank + index)) for index in range(4)]
        works = [
            dist.all_reduce(tensor, group=group, async_op=True)
            for tensor, group in zip(tensors, groups, strict=True)
        ]
        turn = [(index + rank) % 4 for index in range(4)]
        for index in turn:
            works[index].wait()
            assert tensors[index].eq(sum(each + index for each in range(size))).all()
    # Issued in another order, too: groups are independent.
    tensors = [torch.full((50_000,), float(rank + index)) for index in range(4)]
    issued = {}
    for index in [(index + rank) % 4 for index in range(4)]:
        issued[index] = dist.all_reduce(tensors[index], group=groups[index], async_op=True)
    for index in range(4):
        issued[index].wait()
        assert tensors[index].eq(sum(each + index for each in range(size))).all()


def threads_with_groups(rank: int, size: int) -> None:
    """A group a thread: their operations interleave as they like."""
    groups = [dist.new_group(list(range(size))) for _ in range(4)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(30):
                tensor = torch.full((1 + 1000 * (turn % 7),), float(rank + turn + index))
                dist.all_reduce(tensor, group=groups[index])
                assert tensor.eq(sum(each + turn + index for each in range(size))).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def chains(rank: int, size: int) -> None:
    """Callbacks that launch collectives and wait for them, and chains upon chains."""
    total = float(sum(range(size)))

    def reduce_again(future: Any) -> torch.Tensor:
        tensor = future.value()[0].clone()
        dist.all_reduce(tensor)  # waits, inside a callback
        return tensor

    def gather(future: Any) -> list[torch.Tensor]:
        outputs = [torch.zeros_like(future.value()) for _ in range(size)]
        dist.all_gather(outputs, future.value(), async_op=True).get_future().wait()
        return outputs

    def start(index: int) -> Any:
        # The future is asked for in a function that returns only when its callbacks hang on it.
        work = dist.all_reduce(torch.full((100 + index,), float(rank)), async_op=True)
        return work.get_future().then(reduce_again).then(gather)

    futures = [start(index) for index in range(20)]
    for index in reversed(range(20)):
        outputs = futures[index].wait()
        assert all(output.eq(total * size).all() for output in outputs), index

    def fail(future: Any) -> None:
        raise ArithmeticError("in a callback")

    work = dist.all_reduce(torch.ones(2), async_op=True)
    with pytest.raises(Exception, match="in a callback"):
        work.get_future().then(fail).wait()
    collected = torch.futures.collect_all([start(index) for index in range(5)]).wait()
    assert all(each.value()[0].eq(total * size).all() for each in collected)


def dropped(rank: int, size: int) -> None:
    """Work that nobody keeps or waits for still happens, and its tensors live as long."""
    for index in range(50):
        dist.all_reduce(torch.full((10_000,), float(index)), async_op=True)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(size).all()


def futures_after_wait(rank: int, size: int) -> None:
    """A future that was asked for before wait() is complete when it is asked for again."""
    gate = threading.Event()
    held = [
        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: gate.wait(60))
        for _ in range(30)  # each takes a thread of the pool, which starts the next one ever later
    ]
    tensor = torch.full((4,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    early = work.get_future()
    here = threading.get_ident()
    ran = early.then(lambda _: (gate.wait(60), threading.get_ident() != here)[1])
    work.wait()
    future = work.get_future()  # does not run the callback, which would wait for the gate
    assert future.done()
    assert not gate.is_set()
    for each in (future, early):
        assert each.value()[0].data_ptr() == tensor.data_ptr()
    gate.set()
    assert ran.wait()
    torch.futures.collect_all(held).wait()


@pytest.mark.parametrize(
    "target",
    [
        what_a_work_says,
        futures_after_wait,
        hundreds_in_flight,
        groups_in_another_order,
        threads_with_groups,
        chains,
        dropped,
    ],
)
@pytest.mark.parametrize("world_size", rings.first_of([3, 2]))
def test_asynchronous(target: Any, world_size: int) -> None:
    run_ranks(world_size, target)
