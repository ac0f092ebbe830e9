"""Any strides, uneven parts, shared memory, sizes at the edges: against what torch says of them."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import rings
import torch
import torch.distributed as dist
from ranks import run_ranks
from time_bound import assert_within

pytestmark = pytest.mark.needs_native

LARGE_NUMEL = 2**31 + 7


def channels_last(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)


def transposed(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(10, 12).t().contiguous().t()


def every_second(values: torch.Tensor) -> torch.Tensor:
    wide = torch.full((240,), -7, dtype=values.dtype)
    wide[::2] = values
    return wide[::2]


def plain(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    plain,
    channels_last,
    transposed,
    every_second,
]


def numbers(rank: int) -> torch.Tensor:
    return torch.arange(120.0) + 1000.0 * rank


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(got.reshape(-1), wanted.reshape(-1))


def every_collective_in_any_layout(rank: int, size: int) -> None:
    total = sum(numbers(each) for each in range(size))
    for mine in LAYOUTS:
        # Another layout on every rank: elements travel in logical order.
        other = LAYOUTS[(LAYOUTS.index(mine) + rank) % len(LAYOUTS)]
        tensor = other(numbers(rank))
        dist.all_reduce(tensor)
        check(tensor, total)
        tensors = [other(numbers(rank)), mine(numbers(rank))]
        dist.group.WORLD.allreduce_coalesced(tensors).wait()
        check(tensors[0], total)
        check(tensors[1], total)
        tensor = other(numbers(rank))
        dist.broadcast(tensor, size - 1)
        check(tensor, numbers(size - 1))
        tensor = other(numbers(rank))
        dist.reduce(tensor, 0)
        check(tensor, total if rank == 0 else numbers(rank))
        outputs = [LAYOUTS[each % len(LAYOUTS)](torch.zeros(120)) for each in range(size)]
        dist.all_gather(outputs, other(numbers(rank)))
        for each in range(size):
            check(outputs[each], numbers(each))
        stacked = torch.zeros(120, size).t()  # (size, 120), columns first
        dist.all_gather_into_tensor(stacked, mine(numbers(rank)))
        for each in range(size):
            check(stacked[each], numbers(each))
        outputs = [other(torch.zeros(120)) for _ in range(size)] if rank == 1 else []
        dist.gather(other(numbers(rank)), outputs or None, dst=1)
        for each, output in enumerate(outputs):
            check(output, numbers(each))
        tensor = other(torch.zeros(120))
        inputs = [mine(numbers(each)) for each in range(size)] if rank == 0 else None
        dist.scatter(tensor, inputs, src=0)
        check(tensor, numbers(rank))
        tensor = other(torch.zeros(120))
        dist.reduce_scatter(tensor, [other(numbers(rank + each)) for each in range(size)])
        check(tensor, sum(numbers(each + rank) for each in range(size)))
        tensor = other(torch.zeros(120))
        whole = torch.stack([numbers(rank + each) for each in range(size)], 1).t()
        dist.reduce_scatter_tensor(tensor, whole)
        check(tensor, sum(numbers(each + rank) for each in range(size)))
        outputs = [other(torch.zeros(120)) for _ in range(size)]
        dist.all_to_all(outputs, [mine(numbers(10 * rank + each)) for each in range(size)])
        for each in range(size):
            check(outputs[each], numbers(10 * each + rank))
        rows = torch.stack([numbers(10 * rank + each) for each in range(size)], 1).t()
        received = torch.zeros(120, size).t()
        dist.all_to_all_single(received, rows)
        for each in range(size):
            check(received[each], numbers(10 * each + rank))
        tensor = other(torch.zeros(120))
        request = dist.isend(mine(numbers(rank)), (rank + 1) % size)
        dist.recv(tensor, (rank - 1) % size)
        request.wait()
        check(tensor, numbers((rank - 1) % size))
    # What lies between the elements of a strided tensor stays as it was.
    wide = torch.arange(20.0)
    dist.all_reduce(wide[::2])
    assert wide[1::2].tolist() == list(range(1, 20, 2))
    assert wide[::2].tolist() == [size * each for each in range(0, 20, 2)]
    # A conjugate view's memory holds other numbers than it shows. (dist.broadcast refuses them.)
    values = torch.tensor([1 + 2j, 3 - 1j])
    received = values.conj() if rank == 0 else torch.zeros(2, dtype=values.dtype)
    dist.group.WORLD.broadcast([received], dist.BroadcastOptions()).wait()
    assert received.tolist() == [1 - 2j, 3 + 1j]
    parameter = torch.nn.Parameter(transposed(numbers(rank)))
    dist.broadcast(parameter, 0)  # a leaf that wants a gradient, copied to
    check(parameter.detach(), numbers(0))
    with torch.inference_mode():
        frozen = transposed(numbers(rank))
        future = dist.all_reduce(frozen, async_op=True).get_future()
    check(future.wait()[0], total)


def uneven_parts(rank: int, size: int) -> None:
    def part(owner: int, value: float) -> torch.Tensor:
        return torch.full((owner, 3), value)  # rank 0's is empty

    outputs = [part(each, -1.0) for each in range(size)]
    dist.all_gather(outputs, part(rank, float(rank)))
    for each in range(size):
        assert torch.equal(outputs[each], part(each, float(each)))
    # Parts of one tensor, one behind the other: no copies, the same result.
    whole = torch.full((sum(range(size)), 3), -1.0)
    dist.all_gather(list(whole.split(list(range(size)))), part(rank, float(rank)))
    assert torch.equal(whole, torch.cat([part(each, float(each)) for each in range(size)]))
    for root in range(size):
        outputs = [part(each, -1.0) for each in range(size)] if rank == root else []
        dist.gather(part(rank, float(rank)), outputs or None, dst=root)
        for each, output in enumerate(outputs):
            assert torch.equal(output, part(each, float(each)))
        inputs = [part(each, 10.0 * each) for each in range(size)] if rank == root else None
        output = part(rank, -1.0)
        dist.scatter(output, inputs, src=root)
        assert torch.equal(output, part(rank, 10.0 * rank))
    output = part(rank, -1.0)
    dist.reduce_scatter(output, [part(each, float(rank + each)) for each in range(size)])
    assert torch.equal(output, part(rank, float(sum(each + rank for each in range(size)))))
    # Rank a sends b + 1 rows and columns of its own number to rank b, 2 a more columns to itself.
    inputs = [torch.full((each + 1, rank + 1), 10.0 * rank + each) for each in range(size)]
    outputs = [torch.zeros(rank + 1, each + 1) for each in range(size)]
    dist.all_to_all(outputs, inputs)
    for each in range(size):
        assert torch.equal(outputs[each], torch.full((rank + 1, each + 1), 10.0 * each + rank))
    stack = torch.full((size, 2, 3), -1.0)
    dist.all_gather_into_tensor(stack, torch.full((2, 3), float(rank)))
    assert torch.equal(stack[:, 0, 0], torch.arange(float(size)))
    output = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(output, torch.ones(size, 2, 3) * (rank + 1))
    assert output.eq(sum(range(1, size + 1))).all()


def in_place_parts(rank: int, size: int) -> None:
    whole = torch.full((4 * size,), -1.0)
    mine = whole[4 * rank : 4 * rank + 4]
    mine.fill_(float(rank))
    dist.all_gather_into_tensor(whole, mine)  # FSDP gathers like this
    assert torch.equal(whole, torch.arange(float(size)).repeat_interleave(4))
    whole = torch.arange(4.0 * size)
    mine = whole[4 * rank : 4 * rank + 4]
    dist.reduce_scatter_tensor(mine, whole)
    assert torch.equal(mine, size * torch.arange(4.0 * rank, 4.0 * rank + 4))
    parts = list(torch.full((4 * size,), float(rank)).chunk(size))
    dist.all_gather(parts, parts[rank])
    assert [float(part[0]) for part in parts] == list(range(size))


def overlaps(rank: int, size: int) -> None:
    from pycomm.errors import InvalidArgumentError

    large = torch.zeros(8 * size)
    same = torch.zeros(4)
    refused: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.zeros(1).expand(4)),
        lambda: dist.broadcast(torch.zeros(1).expand(4), (rank + 1) % size),
        lambda: dist.all_gather_into_tensor(large[: 4 * size], large[2:6]),
        lambda: dist.all_gather([same] * size, torch.zeros(4)),
        lambda: dist.all_gather([large[3 * each : 3 * each + 4] for each in range(size)], same),
        lambda: dist.reduce_scatter_tensor(large[1:5], large[: 4 * size]),
        lambda: dist.all_to_all_single(large, large),
        lambda: dist.all_to_all(list(large.chunk(size)), list(large.chunk(size))),
        lambda: dist.all_to_all_single(large[: 4 * size], large[4 : 4 + 4 * size]),
    ]
    for call in refused:
        with pytest.raises(InvalidArgumentError, match="share memory"):
            call()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # nothing moved, and the group is well
    assert tensor.eq(size).all()


def sizes_at_the_edges(rank: int, size: int) -> None:
    for shape in [(0,), (0, 3), (3, 0), (1,), ()]:
        tensor = torch.full(shape, float(rank))
        dist.all_reduce(tensor)
        assert tensor.eq(sum(range(size))).all()
        dist.broadcast(tensor, 0)
        outputs = [torch.full(shape, -1.0) for _ in range(size)]
        dist.all_gather(outputs, torch.full(shape, float(rank)))
        assert all(outputs[each].eq(each).all() for each in range(size))
        tensor = torch.full(shape, -1.0)
        dist.reduce_scatter(tensor, [torch.full(shape, float(rank))] * size)
        assert tensor.eq(sum(range(size))).all()
        received = [torch.full(shape, -1.0) for _ in range(size)]
        dist.all_to_all(received, [torch.full(shape, float(rank)) for _ in range(size)])
        assert all(received[each].eq(each).all() for each in range(size))


def combinations_without_meaning(rank: int, size: int) -> None:
    from pycomm.errors import UnsupportedError

    before = torch.arange(4)
    calls: list[tuple[torch.Tensor, Any]] = [
        (before.clone(), dist.ReduceOp.AVG),
        (before.to(torch.uint8), dist.ReduceOp.AVG),
        (before.double(), dist.ReduceOp.BAND),
        (before.to(torch.bfloat16), dist.ReduceOp.BXOR),
        (before.clone(), dist._make_nccl_premul_sum(2.0)),
    ]
    for tensor, op in calls:
        kept = tensor.clone()
        with pytest.raises(UnsupportedError, match="undefined"):
            dist.all_reduce(tensor, op=op)
        with pytest.raises(UnsupportedError, match="undefined"):
            dist.reduce(tensor, 0, op=op)
        with pytest.raises(UnsupportedError, match="undefined"):
            dist.reduce_scatter_tensor(tensor[:1].clone(), tensor[:1].repeat(size), op=op)
        assert torch.equal(tensor.float(), kept.float())
    # The first of two is fine, the second is not: neither may start.
    good, bad = torch.ones(3), torch.ones(3, dtype=torch.int64)
    opts = dist.distributed_c10d.AllreduceCoalescedOptions()
    opts.reduceOp = dist.ReduceOp.AVG
    with pytest.raises(UnsupportedError, match="int64"):
        dist.group.WORLD.allreduce_coalesced([good, bad], opts)
    assert good.eq(1).all()
    with pytest.raises(ValueError, match="complex"):
        dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX)
    dist.barrier()


def part_sizes_that_differ(rank: int, size: int) -> float:
    """Only a root knows all sizes of a gather: what passes between two ranks is compared there."""
    from pycomm.errors import CollectiveMismatchError

    def gather(group: Any, most: int, other: int) -> None:
        outputs = [torch.zeros(most) for _ in range(size)] if rank == 0 else None
        dist.gather(torch.zeros(other if rank == 1 else most), outputs, dst=0, group=group)
        dist.barrier(group=group)

    def scatter(group: Any, most: int, other: int) -> None:
        inputs = [torch.zeros(most) for _ in range(size)] if rank == 0 else None
        dist.scatter(torch.zeros(other if rank == 1 else most), inputs, src=0, group=group)
        dist.barrier(group=group)

    def exchange(group: Any, most: int, other: int) -> None:
        outputs = [torch.zeros(other if rank == 1 else most) for _ in range(size)]
        inputs = [torch.zeros(most) for _ in range(size)]
        inputs[rank] = torch.zeros_like(outputs[rank])
        dist.all_to_all(outputs, inputs, group=group)
        dist.barrier(group=group)

    longest_s = 0.0
    segment = 65536  # elements: frames of sizes that differ by whole segments look alike
    sizes = ((3, 4), (segment, 2 * segment), (2 * segment, segment))
    for call, (most, other) in itertools.product((gather, scatter, exchange), sizes):
        group = dist.new_group(list(range(size)), timeout=timedelta(seconds=20))
        dist.barrier()  # of the default group: who is late to make this one would fail in that
        started_s = time.monotonic()
        with pytest.raises(CollectiveMismatchError, match="The ranks disagree about") as caught:
            call(group, most, other)
        assert caught.value.record["peer"] in range(size)
        longest_s = max(longest_s, time.monotonic() - started_s)
    dist.barrier()
    return longest_s


def coalesced(rank: int, size: int) -> None:
    total = sum(range(size))
    device = torch.device("cpu")
    tensors = [torch.full((10 + each,), float(rank)) for each in range(5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(tensor.eq(total).all() for tensor in tensors)
    # With a device torch brackets whatever is called: startCoalescing and endCoalescing.
    strided = torch.full((6, 4), float(rank)).t()
    root = torch.full((7,), float(rank))
    parts = [torch.zeros(rank_ + 1) for rank_ in range(size)]
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        dist.broadcast(root, 1, async_op=True)
        dist.all_gather(parts, torch.full((rank + 1,), float(rank)), async_op=True)
        dist.reduce(strided, 0, async_op=True)
    manager.wait()
    assert root.eq(1).all()
    assert all(parts[each].eq(each).all() for each in range(size))
    assert strided.eq(total if rank == 0 else rank).all()
    outputs = [torch.zeros(size * 3), torch.zeros(size * 2)]
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(outputs[0], torch.full((3,), float(rank)))
        dist.all_gather_into_tensor(outputs[1], torch.full((2,), float(rank)))
    assert torch.equal(outputs[0], torch.arange(float(size)).repeat_interleave(3))
    assert torch.equal(outputs[1], torch.arange(float(size)).repeat_interleave(2))
    outputs = [torch.zeros(3), torch.zeros(2)]
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(outputs[0], torch.ones(3 * size))
        dist.reduce_scatter_tensor(outputs[1], torch.ones(2 * size))
    assert all(output.eq(size).all() for output in outputs)


def body_of_a_coalescing_manager_raises(rank: int, size: int) -> None:
    def manager() -> Any:
        return dist._coalescing_manager(device=torch.device("cpu"), async_ops=True)

    array = np.full(1000, float(rank))
    kept = weakref.ref(array)
    tensor = torch.from_numpy(array)
    with pytest.raises(ZeroDivisionError), manager():
        dist.broadcast(tensor, 1, async_op=True)
        raise ZeroDivisionError  # torch calls no endCoalescing now
    del array, tensor
    for _ in range(2):
        root = torch.full((7,), float(rank))
        with manager() as works:
            dist.broadcast(root, 1, async_op=True)
        works.wait()
        assert root.eq(1).all()
    total = torch.full((7,), float(rank))
    dist.all_reduce(total)
    assert total.eq(sum(range(size))).all()
    deadline_s = time.monotonic() + 30
    while kept() is not None and time.monotonic() < deadline_s:  # its last owner is a pool's thread
        time.sleep(0.01)
    assert kept() is None, "the tensors of the manager that was left are kept"


def sparse(rank: int, size: int) -> None:
    def of(owner: int, dtype: torch.dtype, dense: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(owner)
        count = 3 * owner  # rank 0 has nothing
        indices = torch.randint(0, 6, (2, count), generator=generator)  # some of them twice
        shape = (count,) + (2,) * dense
        values = torch.randint(-8, 8, shape, generator=generator).to(dtype)
        return torch.sparse_coo_tensor(indices, values, (6, 6) + (2,) * dense)

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for dense in (0, 1):
            tensor = of(rank, dtype, dense)
            wanted = sum(of(each, dtype, dense).to_dense() for each in range(size))
            dist.all_reduce(tensor)
            assert torch.equal(tensor.to_dense(), wanted), dtype
    tensor = of(rank, torch.float64)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True)
    (result,) = work.get_future().wait()
    wanted = sum(of(each, torch.float64).to_dense() for each in range(size)) / size
    torch.testing.assert_close(result.to_dense(), wanted)
    # Several under way, beside dense ones, and more from a callback.
    tensors = [of(rank, torch.float32) for _ in range(8)]
    dense_ones = [torch.full((9,), float(rank)) for _ in range(8)]
    works = []
    for one, other in zip(tensors, dense_ones, strict=True):
        works.append(dist.all_reduce(one, async_op=True))
        works.append(dist.all_reduce(other, async_op=True))
    for work in reversed(works):
        work.wait()
    wanted = sum(of(each, torch.float32).to_dense() for each in range(size))
    assert all(torch.equal(tensor.to_dense(), wanted) for tensor in tensors)
    assert all(tensor.eq(sum(range(size))).all() for tensor in dense_ones)

    from pycomm.errors import CollectiveMismatchError, UnsupportedError

    with pytest.raises(UnsupportedError, match="MAX of sparse"):
        dist.all_reduce(of(rank, torch.float32), op=dist.ReduceOp.MAX)
    wrong = torch.sparse_coo_tensor(torch.zeros(1, 1).long(), torch.ones(1), (3 + (rank == 1),))
    with pytest.raises(CollectiveMismatchError, match=r"rank 1"):
        dist.all_reduce(wrong)
    dist.barrier()


@pytest.mark.ci
@pytest.mark.time_bound
@pytest.mark.parametrize(
    "target",
    [
        every_collective_in_any_layout,
        uneven_parts,
        in_place_parts,
        overlaps,
        sizes_at_the_edges,
        combinations_without_meaning,
        part_sizes_that_differ,
        coalesced,
        body_of_a_coalescing_manager_raises,
        sparse,
    ],
)
@pytest.mark.parametrize("world_size", rings.first_of([2, 3]))
def test_tensors(target: Any, world_size: int) -> None:
    for longest_s in run_ranks(world_size, target).values():
        assert_within(longest_s or 0.0, 15)  # of the target that returns one


def more_than_two_to_the_31(rank: int, size: int) -> None:
    tensor = torch.full((LARGE_NUMEL,), rank + 1, dtype=torch.uint8)
    tensor[-1] = 10 * (rank + 1)
    dist.all_reduce(tensor)
    total = sum(range(1, size + 1))
    assert int(tensor[-1]) == 10 * total
    assert int(tensor[0]) == total
    assert bool((tensor[:-1] == total).all())
    dist.broadcast(tensor.fill_(rank), 1)
    assert int(tensor[-1]) == 1 and int(tensor[2**31]) == 1


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_more_elements_than_32_bits_count(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--large"):
        pytest.skip("needs 8 GB of memory: --large runs it")
    run_ranks(2, more_than_two_to_the_31, timeout_s=500)
