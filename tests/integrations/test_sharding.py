"""FSDP2, tensor parallel, DTensor and checkpoints over device meshes, against one process."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import case
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from training import assert_close, batch_of, loss_of, make_model, parameters_of, train_alone

pytestmark = [pytest.mark.needs_native, pytest.mark.nightly]

STEPS = 5
LR = 0.05
# fp32 in another order of adding: a few roundings of numbers below 4 in each of the steps.
EXACT = 4e-6
# bf16 keeps 8 bits of parameters and activations below 4: half a unit in the last place of a
# gradient below 1, a step, times the learning rate; of a loss, of its own size.
BF16 = STEPS * LR * 2.0**-6


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters whole, on every rank."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def train_sharded(model: nn.Module, rank: int, world_size: int) -> Any:
    """Returns the mean loss of each step over all ranks, and the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(step, rank, world_size))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(float(mean))
    return losses, full(model)


def shard_all(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def fsdp2(rank: int, world_size: int, how: str) -> Any:
    mesh = init_device_mesh("cpu", (world_size,))
    options: dict[str, Any] = {}
    if how == "bf16 parameters, fp32 reduction":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if how == "kept whole after forward":
        options["reshard_after_forward"] = False
    model: Any = shard_all(make_model(), mesh, **options)
    if how == "own divide factor (PREMUL_SUM)":
        model.set_gradient_divide_factor(2.0 * world_size)
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.set_gradient_divide_factor(2.0 * world_size)
    return train_sharded(model, rank, world_size)


FSDP2 = {
    "default": EXACT,
    "kept whole after forward": EXACT,
    "bf16 parameters, fp32 reduction": BF16,
}


def assert_as_one_process(values: list[Any], tolerance: float, lr: float = LR) -> None:
    losses, model = train_alone(STEPS, lr)
    for got_losses, got in values:
        assert got_losses == pytest.approx(losses, abs=max(tolerance, 1e-6))
        assert_close(got, parameters_of(model), tolerance)


@pytest.mark.parametrize("how", [pytest.param(how, marks=case(fsdp2, how)) for how in FSDP2])
@pytest.mark.integration("torch", "FSDP2 fully_shard, losses and parameters as one process")
def test_fsdp2(how: str, values: list[Any]) -> None:
    assert_as_one_process(values, FSDP2[how])


@case(fsdp2, "own divide factor (PREMUL_SUM)")
@pytest.mark.integration("torch", "FSDP2 with a divide factor of its own (PREMUL_SUM)")
def test_fsdp2_divide_factor(values: list[Any]) -> None:
    assert_as_one_process(values, EXACT, lr=LR / 2)  # gradients are halved once more


def hybrid(rank: int, world_size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train_sharded(shard_all(make_model(), mesh), rank, world_size)


@case(hybrid, world_size=4)
@pytest.mark.integration("torch", "FSDP2 on a 2-D mesh (replicate x shard), 4 ranks")
def test_hybrid_sharding(values: list[Any]) -> None:
    assert_as_one_process(values, EXACT)


# Tensor parallel


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)  # type: ignore[arg-type]


def tensor_parallel(rank: int, world_size: int) -> Any:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    model = parallelize(make_model(), mesh)
    assert tuple(model[0].weight.to_local().shape) == (48 // world_size, 24)  # type: ignore[index]
    return train_sharded(model, 0, 1)  # all ranks see the whole batch


@case(tensor_parallel)
@pytest.mark.integration("torch", "tensor parallel (colwise, rowwise), as one process")
def test_tensor_parallel(values: list[Any]) -> None:
    assert_as_one_process(values, EXACT)


def tensor_parallel_and_fsdp2(rank: int, world_size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard_all(parallelize(make_model(), mesh["tp"]), mesh["dp"])
    return train_sharded(model, mesh.get_local_rank("dp"), 2)


@case(tensor_parallel_and_fsdp2, world_size=4)
@pytest.mark.integration("torch", "tensor parallel and FSDP2 on a 2-D mesh, 4 ranks")
def test_tensor_parallel_and_fsdp2(values: list[Any]) -> None:
    assert_as_one_process(values, EXACT)


# DTensor

SHAPE = (7, 5)  # neither can be cut evenly


def placements(ndim: int) -> list[tuple[Placement, ...]]:
    kinds: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial("sum")]
    return list(itertools.product(kinds, repeat=ndim))


def redistribute(rank: int, world_size: int, mesh_shape: tuple[int, ...]) -> int:
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(35.0).reshape(SHAPE)
    done = 0
    for source, target in itertools.product(placements(len(mesh_shape)), repeat=2):
        if any(kind.is_partial() for kind in target):
            continue  # what torch offers is the way from partial sums
        replicated = [Replicate() if kind.is_partial() else kind for kind in source]
        local = distribute_tensor(whole, mesh, replicated).to_local()
        times = 1
        for dimension, kind in enumerate(source):
            times *= mesh.size(dimension) if kind.is_partial() else 1
        tensor = DTensor.from_local(
            local, mesh, source, run_check=False, shape=torch.Size(SHAPE), stride=(5, 1)
        )
        moved = tensor.redistribute(mesh, target)
        expected = distribute_tensor(whole * times, mesh, target).to_local()
        assert torch.equal(moved.to_local(), expected), f"{source} to {target}"
        done += 1
    return done


@case(redistribute, (2,))
@pytest.mark.integration("torch", "DTensor redistribute, every pair of placements, uneven")
def test_redistribute(values: list[int]) -> None:
    assert values == [4 * 3] * 2


@case(redistribute, (2, 2), world_size=4)
@pytest.mark.integration("torch", "DTensor redistribute on a 2-D mesh, 4 ranks")
def test_redistribute_on_two_dimensions(values: list[int]) -> None:
    assert values == [16 * 9] * 4


# Checkpoints


def trained(rank: int, world_size: int, seed: int) -> tuple[Any, Any]:
    model = shard_all(make_model(seed), init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch_of(step, rank, world_size)).backward()
        optimizer.step()
    return model, optimizer


def save_and_load(rank: int, world_size: int, how: str) -> Any:
    place = [tempfile.mkdtemp(prefix="pycomm-dcp-") if rank == 0 else ""]
    dist.broadcast_object_list(place, 0)
    folder = place[0]
    model, optimizer = trained(rank, world_size, seed=0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    if how == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        # Its thread must not share a group with the training: both would issue at once.
        own = dist.new_group()
        dcp.async_save(state, checkpoint_id=folder, process_group=own).result(timeout=200)
    other, other_optimizer = trained(rank, world_size, seed=5)
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    for one, another in ((model, optimizer), (other, other_optimizer)):
        another.zero_grad()
        loss_of(one, batch_of(9, rank, world_size)).backward()
        another.step()
    return folder, full(model), full(other)


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=case(save_and_load, how)) for how in ("save", "async_save")]
)
@pytest.mark.integration("torch", "DCP: FSDP2 model and Adam, and load; also into one process")
def test_checkpoint(how: str, values: list[Any]) -> None:
    folder = Path(values[0][0])
    assert folder.name.startswith("pycomm-dcp-")
    for _, saved, loaded in values:
        assert_close(loaded, saved, 0.0)  # the same bits, also of the next step
    alone = make_model(seed=7)
    dcp.load({"model": alone.state_dict()}, checkpoint_id=folder, no_dist=True)
    oracle = make_model(seed=0)
    optimizer = torch.optim.Adam(oracle.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(oracle, batch_of(step)).backward()
        optimizer.step()
    # Adam divides by the gradient's size: where that is near zero, rounding shows.
    assert_close(parameters_of(alone), parameters_of(oracle), 1e-4)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink()
    folder.rmdir()
