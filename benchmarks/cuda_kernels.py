"""Bandwidth of the fused bucket kernels, beside the device's copy and torch's own ways.

python benchmarks/cuda_kernels.py [--mib 25] [--gradients 200] [--blocks 20]

Needs a GPU and libpycomm_cuda.so (docs/cuda.md). Each block times every row once, so that all rows
meet the same clocks; the table has each row's median. GB/s counts the bytes read and written.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from cuda_table import CudaTable

from pycomm import _extension


def milliseconds(body: Callable[[], object], repeats: int = 20) -> float:
    """Of one run of `body`, on the device, from `repeats` in a row."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        body()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


Rows = dict[str, tuple[int, Callable[[], object]]]


def rows(gradients: list[torch.Tensor], table: CudaTable) -> Rows:
    """Name, bytes moved, and what to run."""
    numel = sum(each.numel() for each in gradients)
    bucket = torch.empty(numel, device="cuda", dtype=torch.float16)
    flat = torch.empty(numel, device="cuda")
    other = torch.empty_like(flat)
    views = list(torch.split(bucket, [each.numel() for each in gradients]))
    where = [(each.data_ptr(), each.numel()) for each in gradients]
    stream = int(torch.cuda.current_stream().cuda_stream)

    def pack() -> None:
        table.pack(where, "float32", "float16", bucket.data_ptr(), factor=0.5, stream=stream)

    def unpack() -> None:
        table.unpack(where, "float32", "float16", bucket.data_ptr(), factor=0.5, stream=stream)

    def both() -> None:
        pack()
        unpack()

    def foreach() -> None:
        torch._foreach_copy_(views, gradients)
        bucket.div_(2)
        torch._foreach_copy_(gradients, views)

    def sources() -> None:
        table.reduce(
            "float32",
            "sum",
            flat.data_ptr(),
            [flat.data_ptr(), other.data_ptr()],
            numel,
            stream=stream,
        )

    codes = torch.empty(numel * 2 + numel // 128 + 64, device="cuda", dtype=torch.uint8)

    def encode(codec: str) -> Callable[[], object]:
        return lambda: table.encode(codec, flat.data_ptr(), numel, codes.data_ptr(), stream)

    return {
        "device copy": (8 * numel, lambda: flat.copy_(other)),
        "pack": (6 * numel, pack),
        "unpack": (6 * numel, unpack),
        "pack and unpack": (12 * numel, both),
        "cat, half, div": (6 * numel, lambda: torch.cat(gradients).half().div_(2)),
        "_foreach copies and div": (12 * numel, foreach),
        "reduce of 2": (12 * numel, sources),
        "encode as fp16": (6 * numel, encode("fp16")),
        "encode as int8": (5 * numel, encode("int8")),
    }


def launches(body: Callable[[], object]) -> int:
    """Kernels that one run starts, as CUDA's profiler counts them; -1 where it sees nothing."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        body()
        torch.cuda.synchronize()
    on_device = [
        event
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Kernel" in event.name
    ]
    return len(on_device) or -1


def verdicts(found: Rows, medians: dict[str, float]) -> list[str]:
    """What is to be reached, and whether it was."""

    def speed(name: str) -> float:
        return found[name][0] / medians[name]

    copy = speed("device copy")
    both = medians["pack and unpack"]
    measured = [
        ("pack, of a device copy's bandwidth", speed("pack") / copy, 0.85),
        ("unpack, of a device copy's bandwidth", speed("unpack") / copy, 0.85),
        ("pack, times as fast as cat, half, div", medians["cat, half, div"] / medians["pack"], 2.5),
        (
            "pack and unpack, times as fast as _foreach",
            medians["_foreach copies and div"] / both,
            1.4,
        ),
    ]
    lines = [
        f"{name:46}{value:8.2f}  at least {target:.2f}: {'met' if value >= target else 'MISSED'}"
        for name, value, target in measured
    ]
    for name in ("pack", "unpack"):
        count = launches(found[name][1])
        told = "not seen" if count < 0 else ("met" if count == 1 else "MISSED")
        lines.append(f"{'launches of ' + name:46}{count:8}  one: {told}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=25.0, help="of fp32 gradients")
    parser.add_argument("--gradients", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    table = CudaTable(_extension.CUDA_LIBRARY)
    numel = int(arguments.mib * 2**20 / 4 / arguments.gradients)
    # Not neighbours: a gap behind each, as an allocator leaves it.
    gradients = [
        torch.randn(numel + 128, device="cuda")[:numel] for _ in range(arguments.gradients)
    ]
    found = rows(gradients, table)
    times: dict[str, list[float]] = {name: [] for name in found}
    for _name, (_, body) in found.items():
        milliseconds(body, 3)
    for _ in range(arguments.blocks):
        for name, (_, body) in found.items():
            times[name].append(milliseconds(body))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{arguments.gradients} gradients of {numel} fp32 elements, {arguments.blocks} blocks")
    print(f"{'':26}{'µs':>10}{'GB/s':>10}{'of a copy':>12}")
    medians = {name: statistics.median(each) for name, each in times.items()}
    copy = found["device copy"][0] / medians["device copy"]
    for name, (nbytes, _) in found.items():
        speed = nbytes / medians[name]
        print(f"{name:26}{medians[name] * 1e3:10.1f}{speed / 1e6:10.0f}{speed / copy:12.2f}")
    print("\n".join(verdicts(found, medians)))


if __name__ == "__main__":
    main()
