"""Groups of device maps such as "cpu:pycomm,cuda:nccl": CPU tensors travel over pycomm.

NCCL is played by gloo where there is none: what is tested is what torch does with such a map.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from ranks import TORCH_DDP, run_ranks
from torch import nn
from torch._C._distributed_c10d import Backend as C10dBackend
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

pytestmark = pytest.mark.needs_native

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class PlayedOptions(C10dBackend.Options):
    def __init__(self) -> None:
        super().__init__("nccl", timedelta(minutes=10))
        self.is_high_priority_stream = False


class PlayedNccl(ProcessGroupGloo):
    Options = PlayedOptions

    def __init__(self, store: Any, rank: int, size: int, options: PlayedOptions) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)


def play_nccl() -> None:
    made: Any = c10d
    made.is_nccl_available = lambda: True
    made.ProcessGroupNCCL = PlayedNccl


def join(backend: str, folder: str, rank: int, size: int, **options: Any) -> Any:
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, **options
    )
    return dist.group.WORLD


def recorded(group: Any = None) -> list[str]:
    """Operations over pycomm so far."""
    import pycomm

    return [one.op for one in pycomm.flight_record(group).operations]


def gradient_of(wrapper: Any, rank: int, **options: Any) -> float:
    layer = nn.Linear(1, 1, bias=False)
    model = wrapper(layer, **options)
    model(torch.tensor([[rank + 1.0]])).sum().backward()
    assert layer.weight.grad is not None
    return float(layer.weight.grad)


def work_on_the_cpu(rank: int, size: int, backend: str, folder: str) -> dict[str, Any]:
    import pycomm

    if "nccl" in backend:
        play_nccl()
    world = join(backend, folder, rank, size)
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    sent = [("from 0", rank)]
    dist.broadcast_object_list(sent, 0)
    dist.barrier()
    pycomm.monitored_barrier(timeout=60)
    operations = set(recorded())
    pair = dist.new_group([0, 1])
    of_pair = torch.ones(2)
    if rank in (0, 1):
        dist.all_reduce(of_pair, group=pair)
        assert recorded(pair) == ["all_reduce"]
        assert pair._get_backend(CUDA).name() == "gloo"
    before = len(recorded())
    gradients = [
        gradient_of(nn.parallel.DistributedDataParallel, rank),
        gradient_of(pycomm.DistributedDataParallel, rank),
        gradient_of(pycomm.DistributedDataParallel, rank, wire_dtype="fp16"),
        gradient_of(pycomm.DistributedDataParallel, rank, sync_every=2),
    ]
    assert len(recorded()) > before
    found = {
        "backends": [world._get_backend(each).name() for each in (CPU, CUDA)],
        "sum": tensor.tolist(),
        "objects": [each["rank"] for each in objects],
        "sent": sent,
        "operations": operations,
        "pair": of_pair.tolist(),
        "gradients": gradients,
    }
    dist.destroy_process_group()
    return found


@pytest.mark.ci
@pytest.mark.parametrize(
    "backend",
    rings.first_of(
        ["cpu:pycomm,cuda:nccl", "cuda:nccl,cpu:pycomm", "cpu:pycomm,cuda:gloo"], number=2
    ),
)
def test_cpu_tensors_travel_over_pycomm(backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"init": "none", "only_pycomm": False, "preload": TORCH_DDP}
    results = run_ranks(3, work_on_the_cpu, args=(backend, str(tmp_path)), **options)
    for rank, found in enumerate(results.values()):
        assert found["backends"] == ["pycomm", "gloo"]
        assert found["sum"] == [6.0] * 3
        assert found["objects"] == [0, 1, 2]
        assert found["sent"] == [("from 0", 0)]
        assert {"all_reduce", "all_gather", "broadcast", "barrier"} <= found["operations"]
        assert found["pair"] == [2.0 if rank < 2 else 1.0] * 2
        assert found["gradients"] == [2.0] * 4


def options_of_either(rank: int, size: int, folder: str) -> list[str]:
    import pycomm

    play_nccl()
    said = []
    for index, (backend, options) in enumerate(
        [
            ("cuda:nccl,cpu:pycomm", PlayedOptions()),
            ("cpu:pycomm,cuda:nccl", PlayedOptions()),
            ("cpu:pycomm,cuda:nccl", pycomm.Options()),
            ("pycomm", PlayedOptions()),
            ("cpu:pycomm,cuda:gloo", pycomm.Options(timeout=45)),
        ]
    ):
        try:
            join(backend, f"{folder}/{index}", rank, size, pg_options=options)
        except (TypeError, AssertionError) as error:
            said.append(f"{type(error).__name__}: {error}")
            continue
        dist.barrier()
        said.append(str(pycomm.Options() if index == 0 else options))
        dist.destroy_process_group()
    return said


def test_whose_options_may_be_passed(tmp_path: Path) -> None:
    for index in range(5):
        (tmp_path / str(index)).mkdir()
    options: dict[str, Any] = {"init": "none", "only_pycomm": False}
    for said in run_ranks(2, options_of_either, args=(str(tmp_path),), **options).values():
        nccls_first, nccls, ours, alone, ours_beside_gloo = said
        assert "Options(" in nccls_first and "timeout=45" in ours_beside_gloo
        for refused in (nccls, alone):
            assert refused.startswith("TypeError: pg_options must be a pycomm.Options, not Played")
        assert ours.startswith("AssertionError: Expected backend_options argument to be of type")


def want_cuda(rank: int, size: int, folder: str) -> Sequence[str]:
    said = []
    try:
        join("cpu:pycomm,cuda:nccl", folder, rank, size)
    except RuntimeError as error:
        said.append(str(error))
    # That of torch's is no end: the next group of this process works.
    world = join("cpu:pycomm", f"{folder}/second", rank, size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    try:
        world._get_backend(CUDA)
    except RuntimeError as error:
        said.append(str(error))
    said.append(world.name())
    dist.destroy_process_group()
    return said


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_errors_name_the_part_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    for said in run_ranks(2, want_cuda, args=(str(tmp_path),), init="none").values():
        missing, no_device, name = said
        assert missing == "Distributed package doesn't have NCCL built in"
        assert "No backend type associated with device type cuda" in no_device
        assert name == "undefined"


def two_plugins(rank: int, size: int, folder: str) -> str:
    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return ProcessGroupGloo(store, rank, size, timeout=timeout)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.Backend.register_backend("other", make, devices=["cuda"])
    world = join("cpu:pycomm,cuda:other", folder, rank, size)
    name: str = world._get_backend(CUDA).name()
    dist.destroy_process_group()
    return name


def test_torch_keeps_one_plugin_per_group(tmp_path: Path) -> None:
    """torch's doing, for any two plugins. If this fails, torch has mended it: tell users."""
    options: dict[str, Any] = {"init": "none", "only_pycomm": False}
    results = run_ranks(2, two_plugins, args=(str(tmp_path),), **options)
    assert results.values() == ["pycomm"] * 2
