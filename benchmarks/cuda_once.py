"""Every kernel of libpycomm_cuda.so once, for compute-sanitizer; odd sizes, results compared.

compute-sanitizer --tool memcheck python benchmarks/cuda_once.py

All memory of the device is copied from the host's, so that torch runs no kernel of its own, which
the sanitizer would have to look at, too. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is an
allocation of its own, and an access behind its end is seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from cuda_table import CudaTable

from pycomm._native import loader

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
SIZES = [1, 3, 0, 8187, 17, *[5] * 2000]  # more than one launch holds
RANKS = 3
NUMEL = 4099


class Device:
    """The kernels, and memory of their device."""

    def __init__(self, library: Path) -> None:
        self.table = CudaTable(library)
        self.stream = int(torch.cuda.current_stream().cuda_stream)

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        return values.to("cuda", copy=True)


def bucket(on: Device, grad: str, wire: str, offset: int) -> None:
    """Packs, unpacks, and compares both with torch's CPU conversions."""
    grad_dtype, wire_dtype = getattr(torch, grad), getattr(torch, wire)
    values = [torch.randn(size).to(grad_dtype) for size in SIZES]
    rooms = [on.tensor(torch.cat([torch.zeros(offset, dtype=grad_dtype), v])) for v in values]
    begin = offset * rooms[0].element_size()
    where = [(room.data_ptr() + begin, room.numel() - offset) for room in rooms]
    flat = torch.cat(values)
    packed = on.tensor(torch.zeros(flat.numel(), dtype=wire_dtype))
    stats = on.tensor(torch.zeros(2, dtype=torch.int64))
    on.table.pack(
        where, grad, wire, packed.data_ptr(), factor=4.0, stats=stats.data_ptr(), stream=on.stream
    )
    expected = (flat.float() * 4).to(wire_dtype)
    if not torch.equal(packed.cpu().float(), expected.float()) or int(stats.cpu()[0]) != 0:
        raise SystemExit(f"pack of {grad} as {wire} at offset {offset}: wrong values")
    on.table.unpack(where, grad, wire, packed.data_ptr(), factor=0.125, stream=on.stream)
    back = torch.cat([room.cpu()[offset:] for room in rooms])
    if not torch.equal(back, (expected.float() * 0.125).to(grad_dtype)):
        raise SystemExit(f"unpack of {wire} as {grad} at offset {offset}: wrong values")


def exponent(on: Device) -> None:
    """The tail of an fp16 bucket for more ranks than a block has threads; the largest is 3.0."""
    stats = torch.zeros(4, dtype=torch.int32)
    stats[2] = torch.tensor(3.0).view(torch.int32)
    there, tail = on.tensor(stats), on.tensor(torch.ones(300, dtype=torch.float16))
    on.table.write_exponent(there.data_ptr(), tail.data_ptr(), 300, 299, on.stream)
    if tail.cpu().tolist() != [0.0] * 299 + [202.0]:
        raise SystemExit("exponent: wrong values")


def reduce(on: Device, dtype: str, op: str) -> None:
    """Sums of whole numbers, which are exact in every dtype."""
    kind = getattr(torch, dtype)
    values = [torch.randint(1, 4, (NUMEL,)).to(kind) for _ in range(RANKS)]
    sources = [on.tensor(each) for each in values]
    out = on.tensor(torch.zeros(NUMEL, dtype=kind))
    on.table.reduce(
        dtype, op, out.data_ptr(), [each.data_ptr() for each in sources], NUMEL, stream=on.stream
    )
    stacked = torch.stack([each.double() for each in values])
    exact = {
        "sum": stacked.sum(0),
        "avg": stacked.sum(0) / RANKS,
        "product": stacked.prod(0),
        "min": stacked.amin(0),
        "max": stacked.amax(0),
    }[op]
    tolerance = 0.0 if op != "avg" else 2**-7
    if float((out.cpu().double() - exact).abs().max()) > tolerance * 3:
        raise SystemExit(f"{op} of {dtype}: wrong values")


def codec(on: Device, name: str) -> None:
    values = torch.randn(NUMEL)
    here = on.tensor(values)
    encoded = on.tensor(torch.zeros(2 * NUMEL + NUMEL // 64 + 16, dtype=torch.uint8))
    back = on.tensor(torch.zeros(NUMEL))
    on.table.encode(name, here.data_ptr(), NUMEL, encoded.data_ptr(), on.stream)
    on.table.decode(name, encoded.data_ptr(), NUMEL, back.data_ptr(), on.stream)
    if float((back.cpu() - values).abs().max()) > 0.3:
        raise SystemExit(f"codec {name}: wrong values")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, default=loader.CUDA_LIBRARY)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU")
    torch.manual_seed(0)
    on = Device(arguments.library)
    for grad, wire in PAIRS:
        for offset in (0, 1):
            bucket(on, grad, wire, offset)
    exponent(on)
    for dtype in ("float16", "bfloat16", "float32", "float64", "int32", "int64"):
        for op in ("sum", "avg", "product", "min", "max"):
            if op != "avg" or not dtype.startswith("int"):
                reduce(on, dtype, op)
    for name in ("fp16", "bf16", "int8"):
        codec(on, name)
    print("every kernel has run, with the right values")


if __name__ == "__main__":
    main()
