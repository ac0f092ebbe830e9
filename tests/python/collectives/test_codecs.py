"""Options.wire_dtype on real ranks: bounds in float64, the same bits, what is not encoded, counts.

Annotations are not postponed here: torch compares a hook's with its own classes.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from codec_bounds import BLOCK, BYTES_PER_BLOCK, CODECS, bound, sum_bound
from ranks import TORCH_DDP, run_ranks
from small_training import batch_of, digest, make_model, train
from torch import nn

import pycomm
from pycomm import codecs

pytestmark = pytest.mark.needs_native

NUMEL = 20_000 + 77  # of float32: more than 16 KiB, and no multiple of a block


def row_of(rank: int, numel: int = NUMEL, scale: float = 1e-6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator) * scale


def reduce_all(rank: int, world_size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, op in (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG)):
        for dtype in (torch.float32, torch.float64):
            tensor = row_of(rank).to(dtype)
            dist.all_reduce(tensor, op)
            seen[f"{name} {dtype}"] = tensor
    before = pycomm.codec_stats()
    tensor = row_of(rank)
    dist.all_reduce(tensor)
    after = pycomm.codec_stats()
    seen["sent"] = (
        after.elements_sent - before.elements_sent,
        after.bytes_sent - before.bytes_sent,
        after.bytes_saved - before.bytes_saved,
        after.overflows,
    )
    parts = torch.cat([row_of(rank), row_of(rank + 50)])[: world_size * 9000]
    part = torch.empty(9000)
    dist.reduce_scatter_tensor(part, parts, dist.ReduceOp.AVG)
    seen["part"] = part
    part = torch.empty(9000)
    dist.reduce_scatter_tensor(part, parts, dist._make_nccl_premul_sum(0.25))
    seen["premul"] = part
    return seen


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.ci
def test_sums_are_within_the_bound_and_the_same_on_all_ranks(codec: str) -> None:
    size = 3 if codec in ("int8", "fp16") else 2
    runs = run_ranks(size, reduce_all, pg_options={"wire_dtype": codec}).values()
    rows = np.stack([row_of(rank).double().numpy() for rank in range(size)])
    for key, got in runs[0].items():
        if key.startswith(("sum", "avg")):
            divisor = size if key.startswith("avg") else 1
            error = np.abs(got.double().numpy() - rows.sum(0) / divisor)
            allowed = sum_bound(codec, rows, divisor)
            assert (error <= allowed).all(), key
            assert (error > 0.25 * allowed).any(), f"{key}: not encoded, or the bound is loose"
            assert all(torch.equal(run[key], got) for run in runs), key
    # Each rank sends its part of the sum to the others, and its values for theirs.
    elements, nbytes, saved, overflows = np.sum([run["sent"] for run in runs], axis=0)
    assert elements == 2 * (size - 1) * NUMEL and overflows == 0
    blocks = 2 * (size - 1) * -(-NUMEL // BLOCK)
    header = BYTES_PER_BLOCK[codec] % 256
    assert nbytes == elements * (BYTES_PER_BLOCK[codec] // 256) + blocks * header
    assert saved == 4 * elements - nbytes
    both = [torch.cat([row_of(r), row_of(r + 50)])[: size * 9000].double() for r in range(size)]
    for rank, run in enumerate(runs):
        inputs = np.stack([row[rank * 9000 : (rank + 1) * 9000].numpy() for row in both])
        lost = sum(bound(codec, row) for row in inputs) + np.abs(inputs).sum(0) * 2.0**-22
        for key, factor in (("part", 1 / size), ("premul", 0.25)):
            error = np.abs(run[key].double().numpy() - inputs.sum(0) * factor)
            assert (error <= lost * factor).all(), key
            assert (error > 0.2 * lost * factor).any(), f"{key}: not encoded"


def leave_alone(rank: int, world_size: int) -> int:
    """Everything that must travel as it is, against exact results."""
    small = torch.full((4095,), 1.0 + 2.0**-20)
    dist.all_reduce(small)
    assert (small == world_size * (1.0 + 2.0**-20)).all()
    largest = row_of(rank)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert torch.equal(largest, torch.stack([row_of(r) for r in range(world_size)]).amax(0))
    whole = torch.arange(50_000) + rank
    dist.all_reduce(whole)
    assert torch.equal(whole, torch.arange(50_000) * world_size + sum(range(world_size)))
    halves = torch.full((50_000,), 1.0 + 2.0**-10, dtype=torch.float16)
    dist.all_reduce(halves, dist.ReduceOp.AVG)
    assert (halves == 1.0 + 2.0**-10).all()
    sent = row_of(0)
    dist.broadcast(sent, 0)
    assert torch.equal(sent, row_of(0))
    rows = [torch.empty(NUMEL) for _ in range(world_size)]
    dist.all_gather(rows, row_of(rank))
    assert all(torch.equal(row, row_of(r)) for r, row in enumerate(rows))
    at_root = torch.full((50_000,), 1.0 + 2.0**-20)
    dist.reduce(at_root, 0)
    assert rank != 0 or (at_root == world_size * (1.0 + 2.0**-20)).all()
    exact = dist.new_group(pg_options=pycomm.Options(wire_dtype="fp32"))
    tensor = torch.full((50_000,), 1.0 + 2.0**-20)
    dist.all_reduce(tensor, group=exact)
    assert (tensor == world_size * (1.0 + 2.0**-20)).all()
    return pycomm.codec_stats().elements_sent


def test_what_is_no_large_float_sum_travels_as_it_is() -> None:
    assert run_ranks(2, leave_alone, pg_options={"wire_dtype": "int8"}).values() == [0, 0]


def shrink_to_one(rank: int, world_size: int) -> None:
    values, residual = row_of(rank), row_of(rank + 1)
    expected = values + residual
    codecs.all_reduce(values, "int8", residual=residual)
    assert torch.equal(values, expected)
    assert not residual.any()


def test_a_residual_is_added_in_a_group_of_one() -> None:
    run_ranks(1, shrink_to_one)


def send_specials(rank: int, world_size: int) -> tuple[torch.Tensor, int, int]:
    tensor = row_of(rank, scale=1.0)
    if rank == 0:
        tensor[5], tensor[300], tensor[301] = float("nan"), float("inf"), -float("inf")
    dist.all_reduce(tensor)
    before = pycomm.codec_stats().overflows
    large = torch.full((8192,), torch.finfo(torch.float32).max / 2)  # fits; the sum fits, too
    dist.all_reduce(large)
    assert torch.isfinite(large).all() == (pycomm.codec_stats().overflows == before)
    double = torch.zeros(8192, dtype=torch.float64)
    double[3] = 1e300
    dist.all_reduce(double)
    assert torch.isinf(double[3]) and double[4] == 0
    return tensor, before, pycomm.codec_stats().overflows


@pytest.mark.parametrize("codec", CODECS)
def test_nan_and_infinity_arrive_and_overflow_is_counted(codec: str) -> None:
    runs = run_ranks(2, send_specials, pg_options={"wire_dtype": codec}).values()
    for tensor, before, after in runs:
        assert torch.isnan(tensor[5]) and tensor[300] == float("inf")
        assert tensor[301] == -float("inf")
        assert int((~torch.isfinite(tensor)).sum()) == 3
        assert before == 0 and after >= 1


def train_ddp(rank: int, world_size: int, steps: int) -> Any:
    base = make_model()
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(base), bucket_cap_mb=0.05)
    inputs, targets = batch_of(rank, 0)
    nn.functional.mse_loss(model(inputs), targets).backward()
    gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]
    nn.functional.mse_loss(base(inputs), targets).backward()
    own = torch.cat([p.grad.reshape(-1) for p in base.parameters()])  # type: ignore[union-attr]
    losses = train(model, rank, steps)
    return gradients, own, digest(*model.parameters()), losses, pycomm.codec_stats().bytes_saved


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_ddp_trains_over_an_encoded_group(codec: str) -> None:
    runs = run_ranks(
        2, train_ddp, args=(40,), pg_options={"wire_dtype": codec}, preload=TORCH_DDP
    ).values()
    exact = torch.stack([run[1] for run in runs]).double().mean(0)
    for gradients, _, parameters, losses, saved in runs:
        # A block's largest gradient is at most the largest of all.
        largest = max(float(run[1].abs().max()) for run in runs)
        allowed = {"fp16": 3 * 2.0**-11, "int8": 2.1 / 250}[codec] * largest
        assert (gradients.double() - exact).abs().max() <= allowed
        assert parameters == runs[0][2]
        assert saved > 0
        assert losses[-1] < 0.5 * losses[0]


def train_fsdp(rank: int, world_size: int) -> tuple[list[float], int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    losses = train(model, rank, 40)
    return losses, pycomm.codec_stats().bytes_saved


@pytest.mark.ci
def test_fsdp2_trains_over_an_encoded_group() -> None:
    for losses, saved in run_ranks(2, train_fsdp, pg_options={"wire_dtype": "int8"}).values():
        assert losses[-1] < 0.5 * losses[0] and saved > 0
