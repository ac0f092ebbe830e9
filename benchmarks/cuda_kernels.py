"""Bandwidth of the fused bucket kernels, beside the device's copy and torch's own ways.

python benchmarks/cuda_kernels.py [--mib 25] [--gradients 200] [--blocks 20]

Needs a GPU and libpycomm_cuda.so (docs/cuda.md). Each block times every row once, so that all rows
meet the same clocks; the table has each row's median. GB/s counts the bytes read and written. What
is timed is the device's part: 20 runs of a row are one CUDA graph, since starting a kernel from
Python takes about as long as one of these runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from cuda_table import Bucket, CudaTable

from pycomm._native import loader

Body = Callable[[], object]
Rows = dict[str, tuple[int, Body]]
REPEATS = 20


def repeated(body: Body) -> Body:
    """`REPEATS` runs of `body`: as a graph, or one by one where that cannot be captured."""

    def plain() -> None:
        for _ in range(REPEATS):
            body()

    plain()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plain()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"not as a graph, so with the time that Python takes: {error}")
        return plain
    return graph.replay


def milliseconds(body: Body) -> float:
    """Of one of the runs that `body` repeats, on the device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    body()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS


def current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def rows(gradients: list[torch.Tensor], table: CudaTable) -> Rows:
    """Name, bytes moved, and what to run."""
    numel = sum(each.numel() for each in gradients)
    bucket = torch.empty(numel, device="cuda", dtype=torch.float16)
    flat = torch.empty(numel, device="cuda")
    other = torch.empty_like(flat)
    views = list(torch.split(bucket, [each.numel() for each in gradients]))
    where = Bucket([(each.data_ptr(), each.numel()) for each in gradients])

    def pack() -> None:
        at = bucket.data_ptr()
        table.pack(where, "float32", "float16", at, factor=0.5, stream=current_stream())

    def unpack() -> None:
        at = bucket.data_ptr()
        table.unpack(where, "float32", "float16", at, factor=0.5, stream=current_stream())

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
            stream=current_stream(),
        )

    codes = torch.empty(numel * 2 + numel // 128 + 64, device="cuda", dtype=torch.uint8)

    def encode(codec: str) -> Body:
        return lambda: table.encode(
            codec, flat.data_ptr(), numel, codes.data_ptr(), current_stream()
        )

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


def launches(body: Body) -> int:
    """Kernels that one run starts, as CUDA's profiler counts them; -1 where it sees nothing."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=activities) as profiled:
            body()
            torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the profiler does not work here: {error}")
        return -1
    on_device = [
        event
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Kernel" in event.name
    ]
    return len(on_device) or -1


def verdicts(found: Rows, medians: dict[str, float]) -> list[str]:
    """The targets, and whether the medians met them."""

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
    table = CudaTable(loader.CUDA_LIBRARY)
    numel = int(arguments.mib * 2**20 / 4 / arguments.gradients)
    # Not neighbours: a gap behind each, as an allocator leaves it.
    gradients = [
        torch.randn(numel + 128, device="cuda")[:numel] for _ in range(arguments.gradients)
    ]
    found = rows(gradients, table)
    times: dict[str, list[float]] = {name: [] for name in found}
    graphs = {name: repeated(body) for name, (_, body) in found.items()}
    for _ in range(arguments.blocks):
        for name, graph in graphs.items():
            times[name].append(milliseconds(graph))
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
