"""Time the wire codecs beside memcpy: `python benchmarks/codecs.py --help`.

Rows are interleaved: each block times every codec once, and a ratio is the median over blocks of a
codec's time by that of copying the same float32 bytes in the same block.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from pycomm import codecs
from pycomm._native import loader


def seconds(body: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        body()
    return (time.perf_counter() - start) / repeats


def bodies(values: torch.Tensor, ranks: int) -> dict[str, Callable[[], object]]:
    """The timed calls: a copy, and for each codec encoding and adding up `ranks` encoded rows."""
    copy = torch.empty_like(values)
    timed: dict[str, Callable[[], object]] = {"memcpy": lambda: copy.copy_(values)}
    for codec in codecs.CODECS:
        codes = codecs.encode(codec, values)
        output = torch.empty_like(values)

        def encode(codec: str = codec) -> object:
            return codecs.encode(codec, values)

        def decode(
            codec: str = codec, codes: torch.Tensor = codes, output: torch.Tensor = output
        ) -> object:
            return codecs.decode_sum(codec, [codes], output)

        def add(
            codec: str = codec, codes: torch.Tensor = codes, output: torch.Tensor = output
        ) -> object:
            return codecs.decode_sum(codec, [codes] * ranks, output)

        timed |= {f"{codec} encode": encode, f"{codec} decode": decode, f"{codec} sum": add}
    return timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nbytes", type=int, default=1 << 20, help="of the float32 row")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4, help="rows of a sum")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(arguments.nbytes // 4)
    timed = bodies(values, arguments.ranks)
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for block in range(arguments.blocks + 1):
        for name, body in timed.items():
            spent = seconds(body, arguments.repeats)
            if block > 0:  # the first one warms up
                taken[name].append(spent)
    print(f"# {arguments.nbytes} bytes of float32, one thread; a sum adds {arguments.ranks} rows")
    print(f"# {'':14s} {'GB/s of float32':>16s} {'time / memcpy':>14s}")
    for name, times in taken.items():
        ratio = statistics.median(t / c for t, c in zip(times, taken["memcpy"], strict=True))
        print(f"{name:16s} {arguments.nbytes / statistics.median(times) / 1e9:16.2f} {ratio:14.2f}")
    print(f"# bytes that a rank of {arguments.ranks} sends in an all_reduce of {arguments.nbytes}")
    extension = loader.load()
    share = 2 * (arguments.ranks - 1) / arguments.ranks
    for codec in ("fp32", *codecs.CODECS):
        numel = values.numel()
        whole = 4 * numel if codec == "fp32" else extension.encoded_nbytes(codec, numel)
        print(f"{codec:16s} {round(share * whole):16d} {whole / (4 * numel):14.3f} of fp32")
    return 0


if __name__ == "__main__":
    sys.exit(main())
