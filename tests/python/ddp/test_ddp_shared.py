"""Gradient buckets that the ranks of one host reach in place: the same bits, and whose they are."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import struct
from typing import Any

import ddp_models
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_rig import wrap
from log_lines import LogLines

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

SHARED = {"transport": "shm"}
WAYS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": False},
    {"wire_dtype": "fp16"},
    {"wire_dtype": {"layers.0.*": "bf16", "*": None}},
]


def step(model: Any, rank: int, number: int) -> None:
    model.zero_grad()
    model(ddp_models.batch_of("buckets", rank, number)).square().mean().backward()


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters()])


def the_same(rank: int, world_size: int) -> list[int]:
    """The default group shares memory, the other one uses TCP: both give the same bits."""
    import pycomm

    over_tcp = dist.new_group(backend="pycomm", pg_options=pycomm.Options(transport="tcp"))
    nbytes = []
    for options in WAYS:
        shared = wrap(ddp_models.make("buckets"), bucket_cap_mb=1, **options)
        plain = wrap(ddp_models.make("buckets"), bucket_cap_mb=1, process_group=over_tcp, **options)
        for number in range(4):  # buckets are cut anew after the first
            step(shared, rank, number)
            step(plain, rank, number)
            assert torch.equal(gradients(shared), gradients(plain)), (options, number)
        assert plain.stats().shared_nbytes == 0
        nbytes.append(shared.stats().shared_nbytes)
    hooked = wrap(ddp_models.make("buckets"))
    hooked.register_comm_hook(None, lambda state, bucket: None)
    encoded = wrap(ddp_models.make("buckets"), wire_dtype="int8")
    return [*nbytes, hooked.stats().shared_nbytes, encoded.stats().shared_nbytes]


def pages_of_their_own(rank: int, world_size: int) -> None:
    """Buckets that are not shared lie outside malloc's heap, where they would leave holes."""
    import pycomm

    over_tcp = dist.new_group(backend="pycomm", pg_options=pycomm.Options(transport="tcp"))
    module = torch.nn.Linear(512, 512, bias=False)  # a bucket of 1 MiB
    model = wrap(module, process_group=over_tcp)
    for _ in range(3):
        model(torch.ones(1, 512)).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.data_ptr() % mmap.PAGESIZE == 0


def followed(rank: int, world_size: int) -> None:
    """In join() a rank without data gives zeros, and its own gradients stay what they were."""
    model = wrap(ddp_models.make("buckets"), bucket_cap_mb=1)
    kept = torch.zeros(())
    with model.join():
        for number in range(3 if rank == 0 else 1):
            step(model, rank, number)
            kept = gradients(model)
    if rank == 1:
        assert torch.equal(gradients(model), kept)
    assert model.stats().shared_nbytes > 0


def forked(rank: int, world_size: int) -> None:
    """A child reads what its parent has, as after share_memory_(), and takes nothing away."""
    model = wrap(ddp_models.make("buckets"))
    step(model, rank, 0)
    before = gradients(model)
    child = os.fork()
    if child == 0:
        same = torch.equal(gradients(model), before)
        del model
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(gradients(model), before)
    step(model, rank, 1)
    assert not torch.equal(gradients(model), before)


def outlived(rank: int, world_size: int) -> None:
    """Gradients outlive the wrapper, its group, and the next group's buckets. Comes last."""
    module = ddp_models.make("buckets")
    model = wrap(module)
    step(model, rank, 0)
    assert model.stats().shared_nbytes > 0
    before = gradients(module).clone()
    del model
    dist.destroy_process_group()
    assert torch.equal(gradients(module), before)
    dist.init_process_group(
        "pycomm", init_method=os.environ["SECOND_STORE"], rank=rank, world_size=world_size
    )
    other = wrap(ddp_models.make("buckets", seed=3))
    for number in range(2):
        step(other, rank, number)
    assert torch.equal(gradients(module), before)
    for each in module.parameters():
        assert each.grad is not None
        each.grad.fill_(2.0)
    assert float(gradients(module).mean()) == 2.0
    assert not bool((gradients(other) == 2.0).any())


def in_turn(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    return {name: globals()[name](rank, world_size) for name in names}


@pytest.mark.ci
def test_buckets_in_shared_memory(tmp_path: Any) -> None:
    names = ["the_same", "pages_of_their_own", "followed", "forked", "outlived"]
    results = ranks.run_ranks(
        2,
        in_turn,
        args=(names,),
        env={"SECOND_STORE": f"file://{tmp_path}/second"},
        pg_options=SHARED,
        preload=ranks.TORCH_DDP,
        timeout_s=200,
    ).values()
    numel = sum(each.numel() for each in ddp_models.make("buckets").parameters())
    for met in results:
        *ways, hooked, encoded = met["the_same"]
        # Small buckets are not worth their pages.
        assert 3 * numel < ways[0] <= 4 * numel
        assert ways[1] == ways[0]
        assert numel < ways[2] <= 2 * (numel + 100)
        assert numel < ways[3] < ways[0]
        assert hooked == encoded == 0


def no_pages_any_more() -> None:
    """From here on, fallocate() of this thread fails as on a machine without memory."""
    number = {"x86_64": 285, "aarch64": 47}[platform.machine()]
    filters = [(0x20, 0, 0, 0), (0x15, 0, 1, number)]  # load the call's number; is it this one?
    filters += [(0x06, 0, 0, 0x00050000 | errno.ENOSPC), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in filters))
    description = struct.pack("HP", len(filters), ctypes.addressof(program))
    set_no_new_privs, set_seccomp, filter_mode = 38, 22, 2
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(set_no_new_privs, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, description, 0, 0) == 0, ctypes.get_errno()


def without_room(rank: int, world_size: int) -> tuple[int, list[str], float]:
    lines = LogLines()
    dist.all_reduce(torch.ones(1 << 20))  # what the group itself needs is there
    if rank == 0:
        no_pages_any_more()
    model = wrap(ddp_models.make("buckets"), bucket_cap_mb=1)
    for number in range(2):
        step(model, rank, number)
    said = lines.that_have("lie in ordinary memory", 20.0 if rank == 0 else 0.0)
    dist.barrier()
    return model.stats().shared_nbytes, said, float(gradients(model).double().square().sum())


def test_without_room_for_them_buckets_are_copied_and_it_is_said() -> None:
    first, second = ranks.run_ranks(
        2, without_room, pg_options=SHARED, preload=ranks.TORCH_DDP
    ).values()
    assert first[0] == 0 < second[0]
    assert first[2] == second[2]
    assert len(first[1]) == 1
    assert second[1] == []


def left_behind(rank: int, world_size: int) -> tuple[str, bool]:
    model = wrap(ddp_models.make("buckets"), bucket_cap_mb=1)
    for number in range(2):  # buckets are cut anew between these
        step(model, rank, number)
    before = gradients(model).clone()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = model(ddp_models.batch_of("buckets", rank, 2)).square().mean()
    same = torch.equal(gradients(model), before)
    try:
        loss.backward()
    except Exception as error:
        for each in model.parameters():
            each.grad.fill_(3.0)  # its own again
        return str(error), same and bool((gradients(model) == 3.0).all())
    return "no error", False


def test_a_dead_peer_leaves_the_gradients_usable() -> None:
    results = ranks.run_ranks(
        3, left_behind, pg_options=SHARED, preload=ranks.TORCH_DDP, check=False
    )
    for rank in (0, 2):
        error, usable = results[rank].value
        assert "Rank 1" in error
        assert usable
