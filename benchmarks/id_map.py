"""How long a step of an id map takes while new ids keep coming: ours beside TorchRec's.

    python tools/torchrec_tests.py --run benchmarks/id_map.py

10 million ids arrive, 100,000 a step, each new with probability 0.5, else one of the last million
that came. Each map gets the same ids and has a million rows, so that it replaces all the time. Runs
of the two take turns. TorchRec's makes room every 100 steps, every 10 (both with all ids), and in
each step; that run sees a tenth of the ids. Each map runs on one thread, in one process, without
tables. The first step, in which memory is allocated, has a column of its own and is part of "all".

The check of ours, in every step and outside the timed part: two ids of a step have one row exactly
if they are equal, and an id that came in the step before has kept its row.
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
INTERVALS = {
    "TorchRec, every 100 steps": 100,
    "TorchRec, every 10 steps": 10,
    "TorchRec, every step": 1,
}
Known = tuple[torch.Tensor, torch.Tensor]
"""Ids, sorted and each once, and their rows."""


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


def check(ids: torch.Tensor, rows: torch.Tensor, before: Known | None) -> Known:
    """Raises if the rows of a step are wrong; returns them for the check of the next step."""
    assert int(rows.min()) >= 0 and int(rows.max()) < ROWS, "a row outside the table"
    ids, order = ids.sort()
    rows = rows[order]
    again = ids[1:] == ids[:-1]
    assert bool((rows[1:] == rows[:-1])[again].all()), "an id has two rows"
    first = torch.cat([torch.ones(1, dtype=torch.bool), ~again])
    ids, rows = ids[first], rows[first]
    assert len(rows.unique()) == len(ids), "two ids share a row"
    if before is not None:
        at = torch.searchsorted(before[0], ids).clamp(max=len(before[0]) - 1)
        known = before[0][at] == ids
        assert bool(known.any())
        assert torch.equal(before[1][at[known]], rows[known]), "an id has lost its row"
    return ids, rows


def run(name: str, count: int, seed: int) -> list[float]:
    """The seconds of each step."""
    id_map = make(name)
    took = []
    before = None
    lengths = torch.ones(STEP, dtype=torch.int64)
    for ids in steps(count, seed):
        features = {"x": JaggedTensor(values=ids, lengths=lengths)}
        begin = time.perf_counter()
        rows = id_map(features)["x"].values()
        id_map.evict()
        took.append(time.perf_counter() - begin)
        if name == "pycomm":
            before = check(ids, rows, before)
    return took


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=101)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    facts = header("id_map", argv)
    print("\n".join(f"# {key}: {value}" for key, value in facts.items()))
    print(
        f"{'':26} {'run':>3} {'all s':>6} {'steps':>5} {'first ms':>9} {'median ms':>10} "
        f"{'longest ms':>11} {'longest / median':>17}  bound"
    )
    for seed in range(options.runs):
        for name in ("pycomm", *INTERVALS):
            count = options.steps if name != "TorchRec, every step" else options.steps // 10 + 1
            first, *took = run(name, count, seed)
            middle, most = 1e3 * statistics.median(took), 1e3 * max(took)
            held = "held" if most <= max(3 * middle, 50.0) else "not held"
            print(
                f"{name:26} {seed:3} {first + sum(took):6.2f} {count:5} {1e3 * first:9.1f} "
                f"{middle:10.1f} {most:11.1f} {most / middle:17.1f}  {held}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
