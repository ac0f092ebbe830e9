"""What needs a GPU: the kernels against float64 and torch, and ranks that share one device."""

from __future__ import annotations

import math
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_cuda_staging import lists_on_two_devices

import pycomm
from pycomm._native import loader
from pycomm.errors import PycommError, UnsupportedError

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
from cuda_table import CudaTable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not loader.CUDA_LIBRARY.exists(), reason="libpycomm_cuda.so was not built"),
]

PAIRS = [
    ("float32", "float32"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float32", "float8_e4m3fn"),
    ("float32", "float8_e5m2"),
    ("float16", "float16"),
    ("float16", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
]
SIZES = [1, 3, 0, 64, 8187, 8192, 16391, 1000, 1, 1, 17, 4096, 250_000, *range(50)]


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _gradients(dtype: torch.dtype, offset: int) -> list[torch.Tensor]:
    """On the device; each begins `offset` elements further past a boundary than the last."""
    torch.manual_seed(1)
    made = []
    for number, size in enumerate(SIZES):
        room = torch.randn(size + 16, device="cuda").to(dtype)
        at = (number * offset) % 8
        made.append(room[at : at + size])
    return made


def _where(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize(("grad", "wire"), PAIRS)
def test_pack_and_unpack_have_torchs_bits(grad: str, wire: str, offset: int) -> None:
    table = CudaTable(loader.CUDA_LIBRARY)
    gradients = _gradients(getattr(torch, grad), offset)
    flat = torch.cat([each.reshape(-1) for each in gradients])
    bucket = torch.empty(flat.numel(), device="cuda", dtype=getattr(torch, wire))
    stats = torch.zeros(2, dtype=torch.int64, device="cuda")
    table.pack(
        _where(gradients),
        grad,
        wire,
        bucket.data_ptr(),
        factor=4.0,
        stats=stats.data_ptr(),
        stream=_stream(),
    )
    expected = (flat.float() * 4).to(bucket.dtype)
    assert torch.equal(bucket.float(), expected.float())
    assert int(stats[0]) == 0
    assert int(stats[1]) == int(flat.float().abs().max().view(torch.int32))
    table.unpack(_where(gradients), grad, wire, bucket.data_ptr(), factor=0.125, stream=_stream())
    back = torch.cat([each.reshape(-1) for each in gradients])
    assert torch.equal(back, (bucket.float() * 0.125).to(back.dtype))
    error = (back.double() - flat.double() / 2).abs()
    steps = {"float32": 2**-24, "float16": 2**-10, "bfloat16": 2**-7}
    steps |= {"float8_e5m2": 2**-2, "float8_e4m3fn": 2**-3}
    step = max(steps[grad], steps[wire])
    smallest = 2**-12 if wire == "float8_e4m3fn" else 1e-4 * step  # of e4m3: 2**-9, times 0.125
    assert bool((error <= flat.double().abs() / 2 * step + smallest).all())


def test_overflow_is_counted() -> None:
    table = CudaTable(loader.CUDA_LIBRARY)
    values = torch.tensor([1.0, 65519, 65520, -1e30, float("inf"), float("nan")], device="cuda")
    bucket = torch.empty(6, device="cuda", dtype=torch.float16)
    stats = torch.zeros(2, dtype=torch.int64, device="cuda")
    table.pack(
        _where([values]),
        "float32",
        "float16",
        bucket.data_ptr(),
        stats=stats.data_ptr(),
        stream=_stream(),
    )
    assert int(stats[0]) == 2


@pytest.mark.parametrize(
    "largest", [0.0, 1e-45, 1.1e-38, 1.1754944e-38, 0.5, 1.0, 65520.0, 3.4e38, float("inf")]
)
def test_the_exponent_of_the_largest_is_written(largest: float) -> None:
    table = CudaTable(loader.CUDA_LIBRARY)
    stats = torch.zeros(4, dtype=torch.int32)
    stats[2] = torch.tensor(largest).view(torch.int32)
    on_device = stats.cuda()
    tail = torch.full((300,), 7.0, device="cuda", dtype=torch.float16)
    table.write_exponent(on_device.data_ptr(), tail.data_ptr(), 300, 299, _stream())
    stored = float(torch.tensor(largest))  # as float32
    code = 1000 if math.isinf(stored) else (200 + math.frexp(stored)[1] if stored else 0)
    assert tail.tolist() == [0.0] * 299 + [code]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("op", ["sum", "avg", "product", "min", "max"])
@pytest.mark.parametrize("offset", [0, 1])
def test_reduce_follows_float64(dtype: str, op: str, offset: int) -> None:
    if op == "avg" and dtype.startswith("int"):
        pytest.skip("undefined")
    table = CudaTable(loader.CUDA_LIBRARY)
    torch.manual_seed(2)
    kind = getattr(torch, dtype)
    numel = 100_003
    ranks = [
        (torch.randn(numel + 8, device="cuda") * 4).to(kind)[offset:][:numel] for _ in range(5)
    ]
    exact = torch.stack([each.double() for each in ranks])
    out = torch.empty(numel, device="cuda", dtype=kind)
    pointers = [each.data_ptr() for each in ranks]
    table.reduce(dtype, op, out.data_ptr(), pointers, numel, stream=_stream())
    folds: dict[str, Any] = {
        "sum": lambda all_ranks: all_ranks.sum(0),
        "avg": lambda all_ranks: all_ranks.mean(0),
        "product": lambda all_ranks: all_ranks.prod(0),
        "min": lambda all_ranks: all_ranks.amin(0),
        "max": lambda all_ranks: all_ranks.amax(0),
    }
    expected = folds[op](exact)
    if dtype.startswith("int"):
        assert torch.equal(out, expected.to(kind))
        return
    step = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-22, "float64": 2**-50}[dtype]
    size = exact.abs().prod(0) if op == "product" else exact.abs().sum(0)
    # A product of five may be more than float16 can hold: then it is infinite, with its sign.
    rounded = expected.to(kind).double()
    fits = rounded.isfinite()
    assert torch.equal(out.double()[~fits], rounded[~fits])
    error = (out.double() - expected).abs()
    assert bool((error[fits] <= (size * 5 * step + 2**-24)[fits]).all())


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_codec_kernels_are_within_their_bounds(codec: str) -> None:
    table = CudaTable(loader.CUDA_LIBRARY)
    torch.manual_seed(4)
    numel = 100_003
    values = torch.randn(numel, device="cuda") * torch.exp(torch.randn(numel, device="cuda") * 3)
    values[7] = float("nan")
    values[5000] = -float("inf")
    encoded = torch.empty(numel * 2 + numel // 100, dtype=torch.uint8, device="cuda")
    back = torch.empty_like(values)
    table.encode(codec, values.data_ptr(), numel, encoded.data_ptr(), _stream())
    table.decode(codec, encoded.data_ptr(), numel, back.data_ptr(), _stream())
    assert bool(back[7].isnan()) and float(back[5000]) == -float("inf")
    finite = values.isfinite()
    padded = torch.zeros((numel + 255) // 256 * 256, device="cuda")
    padded[:numel] = torch.where(finite, values, 0).abs()
    largest = padded.view(-1, 256).amax(1).repeat_interleave(256)[:numel].double()
    size = values.double().abs()
    bound = {  # docs/codecs.md
        "fp16": torch.maximum(size * 2**-11, largest * 2**-39),
        "bf16": size * 2**-8,
        "int8": largest / 250 + size * 2**-24,
    }[codec]
    error = (back.double() - values.double()).abs()
    assert bool((error[finite] <= bound[finite]).all())


def _encoded(rank: int, size: int, wire: str) -> list[bool]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group(pg_options=pycomm.Options(wire_dtype=wire))
    torch.manual_seed(rank)
    same = []
    for numel in (5000, 3_000_001):
        tensor = torch.randn(numel) * 1e-6
        on_device = tensor.cuda()
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(on_device, group=group)
        same.append(torch.equal(on_device.cpu(), tensor))
    return same


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8"])
def test_a_codec_gives_cuda_tensors_the_bits_of_cpu_tensors(wire: str) -> None:
    for same in run_ranks(2, _encoded, args=(wire,), fresh=True, timeout_s=120).values():
        assert same == [True, True]


def _sparse(rank: int, size: int) -> tuple[str, float]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    sparse = torch.eye(4, device="cuda").to_sparse()
    with pytest.raises(UnsupportedError) as refused:
        dist.all_reduce(sparse)
    dense = torch.ones(4, device="cuda")
    dist.all_reduce(dense)  # nothing has moved
    return str(refused.value), float(dense[0])


def test_a_sparse_tensor_is_refused_with_what_to_do() -> None:
    for text, value in run_ranks(2, _sparse, fresh=True, timeout_s=120).values():
        assert "sparse" in text and "tensor.cpu()" in text and "tensor.to_dense()" in text
        assert value == 2.0


def _on_one_device(rank: int, size: int) -> list[float]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(rank)
    errors = []
    for numel in (1, 1000, 3_000_000):
        tensor = torch.randn(numel, device="cuda")
        every = torch.empty(size * numel, device="cuda")
        dist.all_gather_into_tensor(every, tensor)
        exact = every.double().view(size, numel).sum(0)
        busy = torch.randn(2048, 2048, device="cuda")
        for _ in range(20):  # the copy must wait for what the stream still has to do
            busy = busy @ busy / 64
        tensor += 0 * busy[0, 0].nan_to_num()
        dist.all_reduce(tensor)
        errors.append(float((tensor.double() - exact).abs().max()))
    works = [dist.all_reduce(torch.ones(1 << 20, device="cuda"), async_op=True) for _ in range(50)]
    for work in works:
        work.wait()
    transposed = torch.arange(12.0, device="cuda").view(3, 4).t()
    dist.all_reduce(transposed)
    assert torch.equal(transposed.cpu(), torch.arange(12.0).view(3, 4).t() * size)
    return errors


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_a_device(size: int) -> None:
    for errors in run_ranks(size, _on_one_device, fresh=True, timeout_s=120).values():
        assert max(errors) < 1e-5


def _ddp(rank: int, size: int) -> list[float]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 10).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(5, 8, 100, generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch[rank::size].cuda()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return [float(parameter.double().sum()) for parameter in model.parameters()]


def test_torchs_ddp_trains_alike_on_all_ranks() -> None:
    first, second = run_ranks(2, _ddp, fresh=True, timeout_s=120).values()
    assert first == second


def _wrapper(rank: int, size: int, wire: str | None) -> tuple[list[float], list[float]]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    batches = torch.randn(5, 8, 100, generator=torch.Generator().manual_seed(1))
    sums = []
    for ours in (True, False):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Linear(300, 10)).cuda()
        model: torch.nn.Module = (
            pycomm.DistributedDataParallel(layers, wire_dtype=wire)
            if ours
            else torch.nn.parallel.DistributedDataParallel(layers)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch[rank::size].cuda()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        sums.append([float(parameter.double().sum()) for parameter in model.parameters()])
    return sums[0], sums[1]


@pytest.mark.parametrize("wire", [None, "fp16", "bf16", "int8"])
def test_pycomms_ddp_trains_as_torchs(wire: str | None) -> None:
    first, second = run_ranks(2, _wrapper, args=(wire,), fresh=True, timeout_s=120).values()
    ours, torchs = first
    assert ours == second[0], "the same bits on both ranks"
    tolerance = {None: 1e-3, "fp16": 1e-2, "bf16": 0.1, "int8": 0.2}[wire]
    assert ours == pytest.approx(torchs, rel=tolerance, abs=tolerance)


def _mixed(rank: int, size: int, cuda_mode: str) -> list[bool]:
    right = []
    group = dist.new_group(pg_options=pycomm.Options(cuda_mode=cuda_mode))  # type: ignore[arg-type]
    if rank != 0:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    for numel in (5, 3_000_001):  # whole, and in pieces
        tensor = torch.full((numel,), float(rank + 1), device="cpu" if rank == 0 else "cuda")
        dist.all_reduce(tensor, group=group)
        right.append(bool((tensor == size * (size + 1) / 2).all()))
        dist.broadcast(tensor, src=0, group=group)
        right.append(bool((tensor == size * (size + 1) / 2).all()))
    return right


def test_ranks_with_and_without_a_device_meet_in_one_collective() -> None:
    def environment(rank: int) -> dict[str, str | None]:
        return {"CUDA_VISIBLE_DEVICES": ""} if rank == 0 else {}

    ranks = run_ranks(3, _mixed, args=("auto",), env=environment, fresh=True, timeout_s=120)
    for right in ranks.values():
        assert all(right)


def test_tensors_of_either_kind_meet_if_the_group_does_not_choose_nccl() -> None:
    for right in run_ranks(3, _mixed, args=("host",), fresh=True, timeout_s=120).values():
        assert all(right)


def _group_by_nccl(
    rank: int, size: int, algorithm: str = "auto", seconds: float = 60
) -> dist.ProcessGroup:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if torch.cuda.device_count() < size:  # so that NCCL does not see that ranks share a GPU
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo")
    options = pycomm.Options(cuda_mode="nccl", algorithm=algorithm)  # type: ignore[arg-type]
    group = dist.new_group(
        list(range(size)), timeout=timedelta(seconds=seconds), pg_options=options
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _random(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The values of a rank, the same on all ranks that ask."""
    made = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randn(numel, generator=made).to(dtype)


def _by_nccl(rank: int, size: int, algorithm: str) -> dict[str, bool]:
    group = _group_by_nccl(rank, size, algorithm)
    right: dict[str, bool] = {}
    for dtype, step in ((torch.float32, 2**-22), (torch.float16, 2**-10)):
        for numel in (1, 1000, 300_001):
            name = f"{dtype} {numel}"
            every = [_random(each, numel, dtype) for each in range(size)]
            exact = torch.stack(every).double().sum(0)
            bound = torch.stack(every).double().abs().sum(0) * size * step

            def summed(
                got: torch.Tensor, exact: torch.Tensor = exact, bound: torch.Tensor = bound
            ) -> bool:
                return bool(((got.cpu().double() - exact).abs() <= bound).all())

            mine = every[rank].cuda()
            result = mine.clone()
            dist.all_reduce(result, group=group)
            right[f"all_reduce {name}"] = summed(result)
            result = mine.clone()
            dist.reduce(result, dst=size - 1, group=group)
            right[f"reduce {name}"] = rank != size - 1 or summed(result)
            result = mine.clone()
            dist.broadcast(result, src=size - 1, group=group)
            right[f"broadcast {name}"] = torch.equal(result.cpu(), every[-1])
            gathered = torch.empty(size * numel, device="cuda", dtype=dtype)
            dist.all_gather_into_tensor(gathered, mine, group=group)
            right[f"all_gather {name}"] = torch.equal(gathered.cpu(), torch.cat(every))
            part = torch.empty(numel, device="cuda", dtype=dtype)
            dist.reduce_scatter_tensor(part, torch.cat([mine] * size), group=group)
            right[f"reduce_scatter {name}"] = summed(part)
            # Rank r sends r + p + 1 values to rank p.
            sent = [rank + peer + 1 for peer in range(size)]
            came = [peer + rank + 1 for peer in range(size)]
            source = torch.cat([_random(rank, count, dtype) for count in sent]).cuda()
            target = torch.empty(sum(came), device="cuda", dtype=dtype)
            dist.all_to_all_single(target, source, came, sent, group=group)
            wanted = torch.cat([_random(peer, count, dtype) for peer, count in enumerate(came)])
            right[f"all_to_all {name}"] = torch.equal(target.cpu(), wanted)
    dist.destroy_process_group(group)
    return right


@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct"])
@pytest.mark.parametrize("size", [1, 2])
def test_collectives_by_nccl(size: int, algorithm: str) -> None:
    ranks = run_ranks(size, _by_nccl, args=(algorithm,), fresh=True, timeout_s=120)
    for right in ranks.values():
        assert len(right) == 36
        assert not [name for name, is_right in right.items() if not is_right]


def _failure_by_nccl(rank: int, size: int, how: str) -> str:
    group = _group_by_nccl(rank, size, seconds=5 if how == "absent" else 60)
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    if rank == 1 and how == "absent":
        store.wait(["rank 0 knows"], timedelta(seconds=60))
        return ""
    if rank == 1:
        os._exit(9)
    with pytest.raises(PycommError) as failed:
        dist.all_reduce(tensor, group=group)  # which only orders streams
        dist.barrier(group=group)
    torch.cuda.synchronize()  # NCCL's kernels have been ended
    store.set("rank 0 knows", "")
    return str(failed.value)


@pytest.mark.parametrize(("how", "code"), [("absent", "TIMEOUT"), ("dead", "PEER_DEAD")])
def test_a_rank_that_nccl_waits_for_is_named(how: str, code: str) -> None:
    ranks = run_ranks(2, _failure_by_nccl, args=(how,), fresh=True, timeout_s=90, check=False)
    text = ranks[0].value
    assert text is not None, ranks[0].describe()
    assert code in text and "rank 1" in text.lower()


def _captured(rank: int, size: int, cuda_mode: str) -> tuple[str, float]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group(pg_options=pycomm.Options(cuda_mode=cuda_mode))  # type: ignore[arg-type]
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
        pytest.raises(UnsupportedError) as refused,
    ):
        dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group)
    return str(refused.value), float(tensor[0])


@pytest.mark.parametrize("cuda_mode", ["host", "nccl"])
def test_a_collective_in_a_cuda_graph_is_refused(cuda_mode: str) -> None:
    for text, value in run_ranks(1, _captured, args=(cuda_mode,), fresh=True).values():
        assert "while a CUDA graph is captured" in text
        assert value == 1.0


def _on_two_devices(rank: int, size: int) -> int:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group(list(range(size)))
    return lists_on_two_devices(group, lambda: torch.ones(4, device="cuda"))


def test_a_list_with_tensors_on_two_devices_is_refused() -> None:
    assert run_ranks(2, _on_two_devices, fresh=True).values() == [24, 16]
