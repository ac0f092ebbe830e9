"""Rounds of mixed operations in one group, 100,000 of them: are memory and descriptors flat?

python tests/soak/rounds.py --rounds 100000
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rig"))

from ranks import run_ranks

RSS_LIMIT_KB = 4096
"""Between the medians of the third and the last quarter of the looks: for what malloc does not
count. Its pages alone vary by 2 MiB."""
MALLOC_LIMIT_NBYTES = 4
"""A round, between the same, of what malloc counts."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    results = run_ranks(
        arguments.ranks,
        "mixed_rounds:mixed_rounds",
        args=(arguments.rounds,),
        timeout_s=60.0 + arguments.rounds * 0.05,
    )
    good = True
    if not any(looks[0]["malloc_nbytes"] for looks in results.values()):
        print("this C library has no mallinfo2(): malloc is not measured")
    for rank, looks in enumerate(results.values()):
        half, last = looks[len(looks) // 2 : -len(looks) // 4], looks[-len(looks) // 4 :]
        grown = {name: last[-1][name] - looks[0][name] for name in looks[0]}
        early, late = (
            {name: round(statistics.median(look[name] for look in part)) for name in grown}
            for part in (half, last)
        )
        malloc = (late["malloc_nbytes"] - early["malloc_nbytes"]) / (arguments.rounds / 4)
        print(
            f"rank {rank}: grown since the first look {grown}; medians {early}, then {late}: "
            f"{malloc:.1f} bytes of malloc a round"
        )
        good = (
            good
            and grown["files"] <= 0
            and grown["threads"] <= 0
            and late["rss_kb"] - early["rss_kb"] <= RSS_LIMIT_KB
            and malloc <= MALLOC_LIMIT_NBYTES
        )
    print(
        f"{arguments.rounds} rounds in {time.monotonic() - began_s:.0f} s: "
        f"{'flat' if good else 'NOT FLAT'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
