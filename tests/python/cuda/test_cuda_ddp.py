"""The DDP wrapper on CUDA parameters, with a strict device that is no GPU and torch's CPU kernels.

Only kernels and copies reach the device's memory, and nothing but events orders its streams; the
bucket kernels are the CUDA library's own, run when their stream comes to them. torch's own wrapper
needs a torch with CUDA.
"""

from __future__ import annotations

import copy
import ctypes
import threading
import time
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from fake_cuda_device import Device, preloading
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import pycomm

# The first test compiles the library: some ten seconds, minutes on a busy machine.
pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

STEPS = 3
RANKS = 2
SAMPLES = 8  # a rank and step


def _run(target: Callable[..., Any], library: Path, *args: Any) -> list[Any]:
    # Eight trainings, every operator through the fake: 75 s where others use the cores, too.
    given = (str(library), *args)
    environment = preloading(library)
    ranks = run_ranks(RANKS, target, args=given, env=environment, fresh=True, timeout_s=300)
    return ranks.values()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 5)
    )


def _large() -> nn.Module:
    """With buckets above what goes into shared memory on a CPU (32 KiB), and one above 4 MiB."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 1200), nn.Tanh(), nn.Linear(1200, 1000), nn.Tanh(), nn.Linear(1000, 5)
    )


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 + step)
    samples = torch.randn(RANKS * SAMPLES, 20, generator=made)
    return samples, torch.randn(RANKS * SAMPLES, 5, generator=made)


def _loss(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (got - wanted).square().mean()


def _weights(model: nn.Module) -> list[Any]:
    return [parameter.detach().cpu().numpy() for parameter in model.parameters()]


def _alone(make: Callable[[], nn.Module] = _model) -> list[Any]:
    """One process on the CPU with all samples."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(STEPS):
        samples, wanted = _batch(step)
        _loss(model(samples), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _weights(model)


def _train(rank: int, ddp: nn.Module) -> list[Any]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, foreach=False)
    for step in range(STEPS):
        samples, wanted = (
            each[rank * SAMPLES : (rank + 1) * SAMPLES].to("cuda:0") for each in _batch(step)
        )
        _loss(ddp(samples), wanted).backward()
        assert all(parameter.grad.is_cuda for parameter in ddp.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return _weights(ddp)


# What a wire of each kind may be off by after the steps; gradients are below 1.
WRAPPED: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 1e-5),
    "several buckets": ({"bucket_cap_mb": 0.001}, 1e-5),
    "no views": ({"gradient_as_bucket_view": False}, 1e-5),
    "bf16": ({"wire_dtype": "bf16"}, 1e-2),
    "fp16": ({"wire_dtype": "fp16"}, 1e-3),
    "fp16, no views": ({"wire_dtype": "fp16", "gradient_as_bucket_view": False}, 1e-3),
    "int8": ({"wire_dtype": "int8"}, 1e-2),
    "find_unused_parameters": ({"find_unused_parameters": True}, 1e-5),
}


def _wrappers(rank: int, size: int, library: str, nccl: bool, names: list[str]) -> dict[str, Any]:
    device = Device(Path(library), nccl=nccl)
    group = dist.new_group(
        list(range(size)),
        pg_options=pycomm.Options(cuda_mode="nccl" if nccl else "host"),  # type: ignore[arg-type]
    )
    results: dict[str, Any] = {}
    for name in names:
        model = _model().to("cuda:0")
        options, _ = WRAPPED[name]
        before = device.library.fake_launches()
        ddp = pycomm.DistributedDataParallel(model, process_group=group, **options)
        results[name] = _train(rank, ddp)
        results[f"launches of {name}"] = device.library.fake_launches() - before
    return results


@pytest.mark.parametrize("nccl", rings.first_of([False, True]), ids=["host", "nccl"])
def test_training_gives_what_one_process_gives(fake_cuda: Path, nccl: bool) -> None:
    alone = _alone()
    names = [name for name in WRAPPED if not nccl or name in ("plain", "fp16", "no views")]
    ranks = _run(_wrappers, fake_cuda, nccl, names)
    for got in ranks:
        for name, bound in [(n, WRAPPED[n][1]) for n in names]:
            for mine, other, expected in zip(got[name], ranks[0][name], alone, strict=True):
                assert (mine == other).all(), f"{name}: ranks differ"
                assert abs(mine - expected).max() < bound, name
        # All buckets' gradients in one launch each, a step: views need no second one.
        assert got["launches of plain"] == STEPS
        assert got["launches of no views"] == 2 * STEPS
        assert got["launches of fp16"] >= 2 * STEPS, "and one more where the scale was wrong"


FIRST = (5, 16, 3)
"""Of a step's 16 samples, those of rank 0: in the second step rank 1 has none."""


def _group_with_device(size: int, library: str, nccl: bool) -> Any:
    Device(Path(library), nccl=nccl)
    options: Any = pycomm.Options(cuda_mode="nccl" if nccl else "host")
    return dist.new_group(list(range(size)), pg_options=options)


def _unequal(rank: int, size: int, library: str, nccl: bool, names: list[str]) -> dict[str, Any]:
    group = _group_with_device(size, library, nccl)
    results: dict[str, Any] = {}
    for name in names:
        options, _ = WRAPPED[name]
        ddp = pycomm.DistributedDataParallel(
            _model().to("cuda:0"), process_group=group, weight="samples", **options
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, foreach=False)
        for step, first in enumerate(FIRST):
            samples, wanted = (
                (each[:first] if rank == 0 else each[first:]).to("cuda:0") for each in _batch(step)
            )
            if len(samples) == 0:
                ddp.no_batch()
            else:
                _loss(ddp(samples), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
        results[name] = _weights(ddp)
    return results


@pytest.mark.parametrize("nccl", rings.first_of([False, True]), ids=["host", "nccl"])
def test_ranks_count_by_their_samples(fake_cuda: Path, nccl: bool) -> None:
    alone = _alone()
    names = ["plain", "fp16"] if nccl else ["plain", "no views", "fp16", "int8"]
    ranks = _run(_unequal, fake_cuda, nccl, names)
    for got in ranks:
        for name in names:
            for mine, other, expected in zip(got[name], ranks[0][name], alone, strict=True):
                assert (mine == other).all(), f"{name}: ranks differ"
                assert abs(mine - expected).max() < WRAPPED[name][1], name


def _large_wrappers(rank: int, size: int, library: str, nccl: bool) -> dict[str, Any]:
    group = _group_with_device(size, library, nccl)
    results: dict[str, Any] = {}
    for name in LARGE:
        options, _ = WRAPPED[name]
        ddp = pycomm.DistributedDataParallel(_large().to("cuda:0"), process_group=group, **options)
        results[name] = _train(rank, ddp)
        assert ddp.stats().shared_nbytes == 0, "memory of the host, for gradients of a device"
        assert ddp.stats().wire_nbytes > 0
    return results


LARGE = ("plain", "no views", "bf16", "fp16", "int8")


@pytest.mark.nightly
@pytest.mark.parametrize("nccl", rings.first_of([False, True]), ids=["host", "nccl"])
def test_buckets_above_every_threshold_are_on_the_device(fake_cuda: Path, nccl: bool) -> None:
    alone = _alone(_large)
    ranks = _run(_large_wrappers, fake_cuda, nccl)
    for got in ranks:
        for name in LARGE:
            for mine, other, expected in zip(got[name], ranks[0][name], alone, strict=True):
                assert (mine == other).all(), f"{name}: ranks differ"
                assert abs(mine - expected).max() < WRAPPED[name][1], name


def _two_streams(rank: int, size: int, library: str, options: dict[str, Any]) -> list[bool]:
    device = Device(Path(library))
    group = dist.new_group(
        list(range(size)),
        pg_options=pycomm.Options(cuda_mode="host"),  # type: ignore[arg-type]
    )
    model = nn.Linear(20, 5).to("cuda:0", torch.float16)  # which bf16 is packed from by way of fp32
    # Autograd hands gradients over on the stream that was current when a parameter was first used.
    streams = [torch.Stream(device="cuda:0") for _ in range(2)]  # type: ignore[arg-type]
    nodes = []
    for parameter, stream in zip(model.parameters(), streams, strict=True):
        with stream:
            nodes.append(parameter.expand_as(parameter).grad_fn)
    ddp = pycomm.DistributedDataParallel(model, process_group=group, **options)
    places = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda given: places.append(ctypes.c_void_p(given.grad.data_ptr()))
        )
    ddp(torch.ones(3, 20, dtype=torch.float16).to("cuda:0")).sum().backward()
    assert len(nodes) == len(places) == 2
    kept = device.library.fake_was_kept
    return [
        all(kept(place, ctypes.c_int64(stream.stream_id)) for place in places) for stream in streams
    ]


def test_gradients_stay_until_the_copy_that_converts_them_is_through(fake_cuda: Path) -> None:
    for kept in _run(_two_streams, fake_cuda, {"wire_dtype": "bf16"}):
        assert sorted(kept) == [False, True], "all gradients are copied on one of the two streams"


def _both_ways(size: int, nccl: bool) -> list[Any]:
    """The wrapper's group, and one that goes the other way: by NCCL or through the host."""
    return [
        dist.new_group(
            list(range(size)),
            timeout=timedelta(seconds=20),
            pg_options=pycomm.Options(cuda_mode="nccl" if each else "host"),  # type: ignore[arg-type]
        )
        for each in (not nccl, nccl)
    ]


def _hook_of_another_group(rank: int, size: int, library: str, nccl: bool) -> list[Any]:
    """The hook's state names a group that goes the other way than the wrapper's."""
    Device(Path(library), nccl=True)
    own, other = _both_ways(size, nccl)
    threads = []

    def hook(state: Any, bucket: Any) -> Any:
        threads.append(threading.current_thread().name)
        work = dist.all_reduce(bucket.buffer(), group=state.process_group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0].div_(size))

    hook.__annotations__.clear()
    ddp = pycomm.DistributedDataParallel(_model().to("cuda:0"), process_group=own)
    ddp.register_comm_hook(types.SimpleNamespace(process_group=other), hook)
    return [_train(rank, ddp), set(threads)]


@pytest.mark.parametrize("nccl", rings.first_of([False, True]), ids=["host", "nccl"])
def test_the_group_in_a_hooks_state_decides_where_it_runs(fake_cuda: Path, nccl: bool) -> None:
    alone = _alone()
    for weights, threads in _run(_hook_of_another_group, fake_cuda, nccl):
        assert (threads == {"pycomm-ordered-hook"}) == (not nccl), threads
        for mine, expected in zip(weights, alone, strict=True):
            assert abs(mine - expected).max() < 1e-5


def _hook_without_a_group(rank: int, size: int, library: str, nccl: bool) -> list[Any]:
    """torch's hooks take the default group then, which goes the other way than the wrapper's."""
    Device(Path(library), nccl=True)
    own, other = _both_ways(size, nccl)
    dist.distributed_c10d._update_default_pg(other)
    threads = []
    issue = default_hooks._allreduce_fut

    def issued(process_group: Any, tensor: torch.Tensor) -> Any:
        assert process_group is None
        threads.append(threading.current_thread().name)
        return issue(process_group, tensor)

    default_hooks._allreduce_fut = issued  # type: ignore[assignment]
    ddp = pycomm.DistributedDataParallel(_model().to("cuda:0"), process_group=own)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return [_train(rank, ddp), set(threads)]


@pytest.mark.nightly
@pytest.mark.parametrize("nccl", rings.first_of([False, True]), ids=["host", "nccl"])
def test_the_default_group_decides_where_torchs_hooks_run_if_the_state_has_none(
    fake_cuda: Path, nccl: bool
) -> None:
    alone = _alone()
    for weights, threads in _run(_hook_without_a_group, fake_cuda, nccl):
        assert (threads == {"pycomm-ordered-hook"}) == (not nccl), threads
        for mine, expected in zip(weights, alone, strict=True):
            assert abs(mine - expected).max() < 1e-5


class _SumInBackward(torch.autograd.Function):
    """What SyncBatchNorm's backward does: an all_reduce of the same group by autograd's thread."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any, issue: Callable[[], None]) -> Any:
        ctx.group, ctx.issue = group, issue
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        summed = torch.ones(155, device=grad.device)  # as large as the bucket
        ctx.issue()
        dist.all_reduce(summed, group=ctx.group)
        return grad * (summed[0] / dist.get_world_size(ctx.group)), None, None


class _Crossing(nn.Module):
    def __init__(self, group: Any, issue: Callable[[], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(20, 30), nn.Linear(30, 5)
        self.group, self.issue = group, issue

    def forward(self, values: torch.Tensor) -> Any:
        return self.last(
            _SumInBackward.apply(torch.tanh(self.first(values)), self.group, self.issue)
        )


def _crossing(rank: int, size: int, library: str, nccl: bool) -> list[Any]:
    Device(Path(library), nccl=nccl)
    group = dist.new_group(
        list(range(size)),
        timeout=timedelta(seconds=20),
        pg_options=pycomm.Options(cuda_mode="nccl" if nccl else "host"),  # type: ignore[arg-type]
    )
    hooked, issued = threading.Event(), threading.Event()

    def issue() -> None:
        # If the hook's collective were another thread's, rank 0 would issue it first, and rank 1
        # the sum first: in an order that NCCL cannot match.
        if rank == 0:
            hooked.wait(2)
        issued.set()

    def hook(state: Any, bucket: Any) -> Any:
        if rank == 1 and bucket.index() == 0:
            issued.wait(1)
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        if bucket.index() == 0:
            hooked.set()
        return work.get_future().then(lambda future: future.value()[0].div_(size))

    hook.__annotations__.clear()
    model = _Crossing(group, issue).to("cuda:0")
    ddp = pycomm.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0001)
    ddp.register_comm_hook(None, hook)
    return _train(rank, ddp)


@pytest.mark.parametrize("nccl", rings.first_of([False, True]), ids=["host", "nccl"])
def test_a_comm_hook_and_autograd_issue_in_one_order(fake_cuda: Path, nccl: bool) -> None:
    alone = _alone(_uncrossed)
    ranks = _run(_crossing, fake_cuda, nccl)
    for weights in ranks:
        for mine, other, expected in zip(weights, ranks[0], alone, strict=True):
            assert (mine == other).all()
            assert abs(mine - expected).max() < 1e-5


def _bucket_counts(rank: int, size: int, library: str) -> dict[str, int]:
    Device(Path(library), nccl=True)
    counts = {}
    for mode in ("host", "nccl"):
        group = dist.new_group(pg_options=pycomm.Options(cuda_mode=mode))  # type: ignore[arg-type]
        dist.distributed_c10d._update_default_pg(group)  # torch copies no other wrappers
        layers = [nn.Linear(1024, 512, bias=False) for _ in range(6)]  # 2 MiB each
        ddp = pycomm.DistributedDataParallel(nn.Sequential(*layers).to("cuda:0"), init_sync=False)
        counts[mode] = len(ddp.reducer.bucket_names())
        with pytest.MonkeyPatch.context() as patched:  # one rank alone may copy: it asks nobody
            patched.setattr("pycomm.ddp.wrapper.by_nccl", None)
            assert len(copy.deepcopy(ddp).reducer.bucket_names()) == counts[mode]
    return counts


def test_buckets_that_nccl_moves_are_large(fake_cuda: Path) -> None:
    # 4 MiB: {2} {2 2} {2 2} {2}, as the first and the last are small; 25 MiB: {2} {2 2 2 2} {2}.
    for counts in _run(_bucket_counts, fake_cuda):
        assert counts == {"host": 4, "nccl": 3}


def _uncrossed() -> nn.Module:
    """The same numbers, without ranks."""
    torch.manual_seed(0)
    first, last = nn.Linear(20, 30), nn.Linear(30, 5)
    return nn.Sequential(first, nn.Tanh(), last)


def _stalled(rank: int, size: int, library: str) -> bool:
    Device(Path(library), nccl=True)
    group = dist.new_group(
        list(range(size)),
        timeout=timedelta(seconds=20),
        pg_options=pycomm.Options(cuda_mode="nccl"),  # type: ignore[arg-type]
    )
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(3, device="cuda:0"), group=group)
    hooked = threading.Event()

    def hook(state: Any, bucket: Any) -> Any:
        hooked.set()
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    hook.__annotations__.clear()
    ddp = pycomm.DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5)).to("cuda:0"),
        process_group=group,
        bucket_cap_mb=0.0001,
    )
    ddp.register_comm_hook(None, hook)
    samples, wanted = (each[:SAMPLES].to("cuda:0") for each in _batch(0))
    if rank == 1:
        store.wait(["rank 0 computes"], timedelta(seconds=15))
    middle = ddp.module[0](samples)
    loss = _loss(ddp(samples), wanted) + 0 * middle.sum()

    def computed(grad: torch.Tensor) -> None:
        # The last layer's bucket is with NCCL, which waits for rank 1; this rank computes on.
        if rank == 0:
            assert hooked.wait(10)
            time.sleep(0.3)
            assert float((grad + 1).sum()) != 0
            store.set("rank 0 computes", "")

    ddp.module[0].bias.register_hook(computed)
    loss.backward()
    return True


@pytest.mark.nightly
def test_backward_computes_while_a_comm_hooks_sum_is_under_way(fake_cuda: Path) -> None:
    assert _run(_stalled, fake_cuda) == [True] * RANKS


def _temporaries(rank: int, size: int, library: str) -> list[float]:
    Device(Path(library))
    largest = []
    for _ in range(6):  # each with streams of its own, of which half are slow
        group = dist.new_group(
            list(range(size)),
            pg_options=pycomm.Options(cuda_mode="host", wire_dtype="int8"),  # type: ignore[arg-type]
        )
        values = torch.ones(200_000).to("cuda:0")
        work = dist.all_reduce(values, group=group, async_op=True)
        with torch.Stream(device="cuda:0"):  # type: ignore[arg-type]
            work.wait()
            del work  # and with it what the sum was encoded into
            largest.append(float((values - size).abs().max()))
    return largest


def test_what_a_sum_is_encoded_into_stays_until_it_is_decoded(fake_cuda: Path) -> None:
    for largest in _run(_temporaries, fake_cuda):
        assert max(largest) < 0.1, largest


def _amp(rank: int, size: int, library: str) -> tuple[list[Any], list[float]]:
    Device(Path(library), nccl=True)
    group = dist.new_group(
        list(range(size)),
        pg_options=pycomm.Options(cuda_mode="host"),  # type: ignore[arg-type]
    )
    ddp = pycomm.DistributedDataParallel(_model().to("cuda:0"), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, foreach=False)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    scales = []
    before = copy.deepcopy(_weights(ddp))
    for step in range(STEPS + 1):
        samples, wanted = (
            each[rank * SAMPLES : (rank + 1) * SAMPLES].to("cuda:0")
            for each in _batch(max(step - 1, 0))
        )
        with torch.autocast("cuda", dtype=torch.float16):
            loss = _loss(ddp(samples).float(), wanted)
        if step == 0 and rank == 1:
            loss = loss * float("inf")  # on one rank: every rank must skip this step
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(float(scaler.get_scale()))
        if step == 0:
            assert all((a == b).all() for a, b in zip(before, _weights(ddp), strict=True))
    return _weights(ddp), scales


@pytest.mark.nightly
def test_grad_scaler_and_autocast(fake_cuda: Path) -> None:
    alone = _alone()
    ranks = _run(_amp, fake_cuda)
    for weights, scales in ranks:
        assert scales == [512.0] * (STEPS + 1), "the first step was skipped, and no other"
        for mine, other, expected in zip(weights, ranks[0][0], alone, strict=True):
            assert (mine == other).all()
            assert abs(mine - expected).max() < 1e-2
