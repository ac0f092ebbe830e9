"""The programs that measure CUDA tensors, on a strict device that is no GPU: that they come to
their end and say what was to be reached. Their figures mean nothing here.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda_device import Device, preloading
from ranks import run_ranks

import pycomm

# The first test compiles the library: some ten seconds, minutes on a busy machine.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))


class _Event:
    """A CUDA event, of a stream that has nothing to do."""

    device: Device

    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.device.synchronize()
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return (end.seconds - self.seconds) * 1e3


def _stand_in(size: int, library: str) -> None:
    """For what of torch.cuda a CPU build of torch does not have."""
    _Event.device = Device(Path(library), nccl=True)
    replaced: dict[str, Any] = {
        "Event": _Event,
        "synchronize": lambda *_: _Event.device.synchronize(),
        "device_count": lambda: size,
        "get_device_name": lambda *_: "no GPU",
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)


def _run(size: int, target: Callable[..., str], library: Path, *args: str) -> list[str]:
    given = (str(library), *args)
    environment = preloading(library)
    ranks = run_ranks(size, target, args=given, env=environment, fresh=True, timeout_s=300)
    return ranks.values()


def _table(rank: int, size: int, library: str, name: str) -> str:
    _stand_in(size, library)
    benchmark: Any = importlib.import_module(f"cuda_{name}")
    make_group = dist.new_group

    def new_group(backend: str, pg_options: Any, **more: Any) -> Any:
        options = pycomm.Options(cuda_mode="nccl") if backend == "nccl" else pg_options
        return make_group(backend="pycomm", pg_options=options, **more)

    dist.new_group = new_group
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if name == "allreduce":
            benchmark.LARGE = 1 << 20
            benchmark.table([1024, 1 << 20], 2, "command")
        else:
            benchmark.WIDTH, benchmark.LAYERS = 16, 2
            benchmark.nn.parallel.DistributedDataParallel = pycomm.DistributedDataParallel
            benchmark.table(1, 8, "command")
    return printed.getvalue()


@pytest.mark.nightly
def test_the_table_of_all_reduce(fake_cuda: Path) -> None:
    first, second = _run(2, _table, fake_cuda, "allreduce")
    assert second == ""
    for backend in ("pycomm:host", "pycomm:wire", "pycomm:nccl", "nccl", "pycomm:host cpu"):
        assert len(re.findall(rf"^ *(?:1024|1048576) +{backend} +[\d.]+ ", first, re.M)) == 2
    reached = re.findall(r"^(\d+) bytes by (\S+): [\d.]+ of .* (met|MISSED)$", first, re.M)
    assert [(nbytes, backend) for nbytes, backend, _ in reached] == [
        ("1024", "pycomm:nccl"),
        ("1048576", "pycomm:host"),
        ("1048576", "pycomm:wire"),
        ("1048576", "pycomm:nccl"),
    ]


@pytest.mark.nightly
def test_the_table_of_training_steps(fake_cuda: Path) -> None:
    first, second = _run(2, _table, fake_cuda, "ddp")
    assert second == ""
    for row in ("torch DDP, nccl", "pycomm:nccl, fp16", "pycomm:wire, fp32", "no_sync"):
        assert re.search(rf"^ *{row} +[\d.]+ ", first, re.M), first
    assert re.search(r"^exposed: .* at most 5 % more: (met|MISSED)$", first, re.M), first


def _kernels(rank: int, size: int, library: str) -> str:
    _stand_in(size, library)
    benchmark: Any = importlib.import_module("cuda_kernels")
    benchmark.current_stream = lambda: 0
    benchmark.REPEATS = 2
    sys.argv = ["cuda_kernels.py", "--mib", "0.1", "--gradients", "20", "--blocks", "2"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        benchmark.main()
    return printed.getvalue()


@pytest.mark.nightly
def test_the_table_of_kernels(fake_cuda: Path) -> None:
    (text,) = _run(1, _kernels, fake_cuda)
    assert len(re.findall(r" at least [\d.]+: (?:met|MISSED)$", text, re.M)) == 4, text
    assert len(re.findall(r"^launches of .* one: not seen$", text, re.M)) == 2, text


def _once(rank: int, size: int, library: str) -> str:
    _stand_in(size, library)
    torch.cuda.current_stream = lambda *_: types.SimpleNamespace(cuda_stream=0)  # type: ignore[assignment,return-value]
    once: Any = importlib.import_module("cuda_once")
    sys.argv = ["cuda_once.py", "--library", library]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        once.main()
    return printed.getvalue()


def test_every_kernel_runs_once(fake_cuda: Path) -> None:
    (text,) = _run(1, _once, fake_cuda)
    assert "every kernel has run" in text
