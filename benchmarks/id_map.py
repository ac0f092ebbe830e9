"""How long a step of an id map takes while new ids keep coming: ours beside TorchRec's.

    python tools/torchrec_tests.py --run benchmarks/id_map.py

10 million ids arrive, 100,000 a step, each new with probability 0.5, else one of the last million
that came. Each map gets the same ids and has a million rows, so that it replaces all the time. Runs
of the two take turns. TorchRec's makes room every 100 steps, and in another run in each step; that
one sees a tenth of the ids. The check: an id that is asked for twice in a step has one row, and
with ours ids of a step share none but the buckets' last ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from report import header
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from pycomm.integrations.torchrec import LRUManagedCollisionModule

ROWS = 1_000_000
STEP = 100_000
BUCKETS = 16
CPU = torch.device("cpu")
INTERVALS = {"TorchRec, every 100 steps": 100, "TorchRec, every step": 1}


def steps(count: int, seed: int) -> Iterator[torch.Tensor]:
    """The ids of each step."""
    generator = torch.Generator().manual_seed(seed)
    recent = torch.randint(0, 2**62, (ROWS,), generator=generator)
    for number in range(count):
        ids = torch.randint(0, 2**62, (STEP,), generator=generator)
        again = torch.rand(STEP, generator=generator) < 0.5
        ids[again] = recent[torch.randint(0, ROWS, (int(again.sum()),), generator=generator)]
        recent[number * STEP % ROWS :][:STEP] = ids
        yield ids


def make(name: str) -> Any:
    if name == "pycomm":
        return LRUManagedCollisionModule(ROWS, buckets=BUCKETS)
    return MCHManagedCollisionModule(
        zch_size=ROWS,
        device=CPU,
        eviction_policy=DistanceLFU_EvictionPolicy(),
        eviction_interval=INTERVALS[name],
        input_hash_size=0,
    )


def run(name: str, count: int, seed: int) -> list[float]:
    """The seconds of each step."""
    id_map = make(name)
    took = []
    lengths = torch.ones(STEP, dtype=torch.int64)
    for number, ids in enumerate(steps(count, seed)):
        features = {"x": JaggedTensor(values=ids, lengths=lengths)}
        begin = time.perf_counter()
        rows = id_map(features)["x"].values()
        id_map.evict()
        took.append(time.perf_counter() - begin)
        if name == "pycomm" and number % 10 == 9:
            own = rows[rows % (ROWS // BUCKETS) != ROWS // BUCKETS - 1]
            shared = len(rows) - len(own)
            assert len(own.unique()) >= len(ids.unique()) - shared, "two ids share a row"
    return took[1:]  # the first one allocates


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=101)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    facts = header("id_map", argv)
    print("\n".join(f"# {key}: {value}" for key, value in facts.items()))
    print(
        f"{'':26} {'run':>3} {'median ms':>10} {'longest ms':>11} {'longest / median':>17}  bound"
    )
    for seed in range(options.runs):
        for name in ("pycomm", *INTERVALS):
            count = options.steps if name != "TorchRec, every step" else options.steps // 10 + 1
            took = run(name, count, seed)
            middle, most = 1e3 * statistics.median(took), 1e3 * max(took)
            held = "held" if most <= max(3 * middle, 50.0) else "not held"
            print(
                f"{name:26} {seed:3} {middle:10.1f} {most:11.1f} {most / middle:17.1f}  {held}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
