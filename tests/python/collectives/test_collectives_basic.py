"""The collectives on real ranks, compared with float64 and exact integers; the same bits on all."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import pytest
import rings
import torch
import torch.distributed as dist
from ranks import other_backends_threads, run_ranks

pytestmark = pytest.mark.needs_native

WORLD_SIZES = [2, 3]
INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
]
# Half the distance of 1.0 to the next number: what one rounding may cost, relatively.
ROUNDING = {
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
    torch.complex64: 2.0**-24,
    torch.complex128: 2.0**-53,
}
NUMELS = [0, 1, 5, 1023, 100_003]


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def integers_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all: integer sums wrap around."""
    generator = torch.Generator().manual_seed(1000 + rank)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def floats_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2000 + rank)
    if dtype.is_complex:
        return torch.randn(numel, generator=generator, dtype=torch.complex128).to(dtype)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def exact(tensor: torch.Tensor) -> Any:
    if tensor.dtype in INTEGERS:
        return tensor.numpy()
    # Wider than what is looked at, also where that is float64: the reference must not round, too.
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128).numpy().astype(np.clongdouble)
    return tensor.to(torch.float64).numpy().astype(np.longdouble)


def sums_of_integers(rank: int, world_size: int) -> list[str]:
    digests = []
    for dtype in INTEGERS:
        for numel in NUMELS:
            inputs = [integers_of(each, numel, dtype) for each in range(world_size)]
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor)
            wanted = np.zeros(numel, exact(tensor).dtype)
            for each in inputs:
                wanted += exact(each)
            np.testing.assert_array_equal(exact(tensor), wanted, f"{dtype} {numel}")
            digests.append(digest(tensor))
    assert other_backends_threads() == []
    return digests


def sums_of_floats(rank: int, world_size: int) -> list[str]:
    digests = []
    for dtype, rounding in ROUNDING.items():
        for numel in NUMELS:
            inputs = [floats_of(each, numel, dtype) for each in range(world_size)]
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor)
            terms = np.stack([exact(each) for each in inputs])
            # N - 1 additions, each rounded once, of partial sums no larger than the sum of |x|.
            allowed = (world_size - 1) * rounding * np.abs(terms).sum(0) * 1.01 + 1e-300
            if dtype.itemsize == 1:
                allowed = allowed + 2.0**-9 * world_size  # below the smallest normal numbers
            error = np.abs(exact(tensor) - terms.sum(0))
            assert (error <= allowed).all(), f"{dtype} {numel}: {error.max()}"
            digests.append(digest(tensor))
    assert other_backends_threads() == []
    return digests


def other_reductions(rank: int, world_size: int) -> list[str]:
    digests = []
    op = dist.ReduceOp
    cases: list[tuple[Any, torch.dtype, Any]] = [
        (op.MIN, torch.int32, np.minimum.reduce),
        (op.MAX, torch.float32, np.maximum.reduce),
        (op.MIN, torch.bfloat16, np.minimum.reduce),
        (op.PRODUCT, torch.int64, np.multiply.reduce),
        (op.BAND, torch.uint8, np.bitwise_and.reduce),
        (op.BOR, torch.int16, np.bitwise_or.reduce),
        (op.BXOR, torch.int64, np.bitwise_xor.reduce),
    ]
    for reduce_op, dtype, reference in cases:
        make = integers_of if dtype in INTEGERS else floats_of
        inputs = [make(each, 1023, dtype) for each in range(world_size)]
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, op=reduce_op)
        wanted = reference([exact(each) for each in inputs])
        np.testing.assert_array_equal(exact(tensor), wanted, f"{reduce_op} {dtype}")
        digests.append(digest(tensor))
    for dtype in (torch.float16, torch.float32, torch.float64):
        inputs = [floats_of(each, 1023, dtype) for each in range(world_size)]
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, op=op.AVG)
        terms = np.stack([exact(each) for each in inputs])
        allowed = (world_size + 1) * ROUNDING[dtype] * np.abs(terms).mean(0) + 1e-8
        assert (np.abs(exact(tensor) - terms.mean(0)) <= allowed).all()
        digests.append(digest(tensor))
    flags = torch.tensor([rank == 0, False, True])
    dist.all_reduce(flags, op=op.MAX)
    assert flags.tolist() == [True, False, True]
    special = torch.tensor([float("inf"), float("nan") if rank == 0 else 1.0, -0.0])
    dist.all_reduce(special)
    assert special[0] == float("inf") and special[1].isnan() and special[2] == 0
    return [*digests, digest(special)]


def test_other_reductions() -> None:
    """test_support has every operation and dtype, and `make seam` no time for it: it has this."""
    first, second = run_ranks(2, other_reductions).values()
    assert first == second, "ranks have different bits"


def same_bits_from_run_to_run(rank: int, world_size: int) -> list[str]:
    return sums_of_floats(rank, world_size)


@pytest.mark.ci
def test_the_same_bits_from_run_to_run() -> None:
    first, second = (run_ranks(3, same_bits_from_run_to_run).values()[0] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("algorithm", rings.first_of(["ring", "recursive_doubling", "direct"]))
@pytest.mark.ci
def test_every_algorithm(algorithm: str) -> None:
    digests = run_ranks(3, sums_of_floats, pg_options={"algorithm": algorithm}).values()
    assert all(other == digests[0] for other in digests)


def broadcast_from_everyone(rank: int, world_size: int) -> None:
    for root in range(world_size):
        for dtype in (*INTEGERS, *ROUNDING, torch.bool):
            for numel in (0, 1, 1023, 300_001):
                make = floats_of if dtype in ROUNDING else integers_of
                wanted = make(root, numel, torch.uint8 if dtype is torch.bool else dtype)
                wanted = wanted > 127 if dtype is torch.bool else wanted
                tensor = wanted.clone() if rank == root else torch.empty_like(wanted)
                dist.broadcast(tensor, root)
                assert digest(tensor) == digest(wanted), f"{root} {dtype} {numel}"


def gather_everything(rank: int, world_size: int) -> None:
    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.complex128):
        for shape in ((0,), (1,), (3, 5), (7, 11, 13), (100_003,)):
            numel = int(np.prod(shape))
            inputs = []
            for each in range(world_size):
                made = integers_of(each, numel * dtype.itemsize, torch.uint8)
                made = made & 1 if dtype is torch.bool else made
                inputs.append(made.view(dtype).reshape(shape))
            listed = [torch.empty(shape, dtype=dtype) for _ in range(world_size)]
            dist.all_gather(listed, inputs[rank])
            flat = torch.empty(world_size * numel, dtype=dtype)
            dist.all_gather_into_tensor(flat, inputs[rank].reshape(-1))
            wanted = torch.cat([each.reshape(-1) for each in inputs])
            assert digest(torch.cat([each.reshape(-1) for each in listed])) == digest(wanted)
            assert digest(flat) == digest(wanted), f"{dtype} {shape}"


def exchange_objects(rank: int, world_size: int) -> None:
    mine = {"rank": rank, "text": "x" * (10_000 * rank), "list": [rank, None, 2.5]}
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, mine)
    assert [each["rank"] for each in gathered] == list(range(world_size))
    assert [len(each["text"]) for each in gathered] == [10_000 * each for each in range(world_size)]
    for root in range(world_size):
        objects = ["secret", {"of": root}, list(range(root))] if rank == root else [None] * 3
        dist.broadcast_object_list(objects, src=root)
        assert objects == ["secret", {"of": root}, list(range(root))]


@pytest.mark.parametrize("world_size", rings.first_of(WORLD_SIZES[::-1]))
@pytest.mark.parametrize("target", [broadcast_from_everyone, gather_everything])
def test_moving_bytes(target: Any, world_size: int) -> None:
    run_ranks(world_size, target)


@pytest.mark.parametrize("world_size", rings.first_of(WORLD_SIZES[::-1]))
def test_objects(world_size: int) -> None:
    run_ranks(world_size, exchange_objects)


def barriers(rank: int, world_size: int) -> list[tuple[float, float]]:
    times = []
    for late in range(world_size):
        if rank == late:
            time.sleep(0.2)  # the subject: everybody else must wait for it
        entered_s = time.monotonic()
        dist.barrier()
        times.append((entered_s, time.monotonic()))
    return times


@pytest.mark.parametrize("world_size", rings.first_of(WORLD_SIZES[::-1]))
def test_nobody_leaves_a_barrier_before_the_last_has_come(world_size: int) -> None:
    rounds = zip(*run_ranks(world_size, barriers).values(), strict=True)
    for times in rounds:
        last_entered_s = max(entered_s for entered_s, _ in times)
        first_left_s = min(left_s for _, left_s in times)
        assert first_left_s >= last_entered_s


def one_rank_alone(rank: int, world_size: int) -> None:
    tensor = torch.arange(5.0)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    gathered = [torch.empty(5)]
    dist.all_gather(gathered, tensor)
    dist.barrier()
    assert gathered[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_world_of_one() -> None:
    run_ranks(1, one_rank_alone)


def profiled(rank: int, world_size: int) -> list[str]:
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(7))
        dist.barrier()
    return [event.name for event in profile.events() if event.name.startswith("pycomm:")]


@pytest.mark.ci
def test_profiler_events() -> None:
    for names in run_ranks(2, profiled).values():
        assert "pycomm:all_reduce" in names


def test_large_sums_of_integers_wrap_as_numpys() -> None:
    digests = run_ranks(2, sums_of_integers).values()
    assert digests[0] == digests[1], "ranks have different bits"
