"""This checkout beside another one, such as the commit before a large change: is it as fast?

Both have to be built in place, each with its own .venv. Runs of the two take turns, in random
order within a pair, and each run starts fresh processes, so that whatever else the machine does
falls on both. Each row shows the ratio of the medians of a pair, this checkout's by the other's:
its median over the pairs, and a 95 % interval by resampling.

    git worktree add ../before main~5 && (cd ../before && make venv)
    python benchmarks/two_builds.py ../before --pairs 20
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import paired_ratio

HERE = Path(__file__).resolve().parent.parent
# What a pair runs: a script of benchmarks/ and its arguments.
TABLES = {
    "all_reduce": ["allreduce.py", "--sizes", "4,4K,1M,25M", "--blocks", "1", "--seconds", "0.15"],
    "ddp": ["ddp.py", "--only", "step", "--sizes", "1M,25M", "--blocks", "1", "--seconds", "0.6"],
}
BACKENDS = "pycomm,pycomm:tcp"


def measure(checkout: Path, table: str, ranks: str) -> tuple[dict[str, float], str]:
    """One run of a table in a checkout.

    Returns:
        The median of each row in microseconds, by the row's name, and the checkout's commit.

    Raises:
        SystemExit: The run failed, or a row has a wrong result.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [".venv/bin/python", f"benchmarks/{TABLES[table][0]}", *TABLES[table][1:]]
        command += ["--backends", BACKENDS, "--ranks", ranks, "--json", out.name]
        ran = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=300)
        if ran.returncode != 0:
            sys.exit(
                f"in {checkout}: {' '.join(command)} ended with {ran.returncode}\n{ran.stderr}"
            )
        report = json.loads(Path(out.name).read_text())
    medians = {}
    for row in report["rows"]:
        name = f"{row['workload']:10} {row['backend']:10} {row['ranks']} ranks"
        name += f" {row['size_bytes']:>9} B"
        if row["wrong"]:
            sys.exit(f"in {checkout}: {name}: {row['wrong']} wrong elements")
        medians[name] = row["p50_us"]
    return medians, report["header"]["commit"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="a checkout that is built in place")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--tables", default=",".join(TABLES), help="some of " + ", ".join(TABLES))
    options = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {}
    commits = {}
    order = random.Random(7)
    done = 0
    try:
        while done < options.pairs:
            pair: dict[str, tuple[float, float]] = {}
            for table in options.tables.split(","):
                found = {}
                for checkout in order.sample([HERE, options.other.resolve()], 2):
                    found[checkout], commits[checkout] = measure(checkout, table, options.ranks)
                here, other = found[HERE], found[options.other.resolve()]
                pair |= {name: (here[name], other[name]) for name in here}
            for name, both in pair.items():
                times.setdefault(name, []).append(both)
            done += 1
            print(f"pair {done} of {options.pairs}", file=sys.stderr, flush=True)
    except (KeyboardInterrupt, subprocess.TimeoutExpired) as stopped:
        if not done:
            raise
        # An hour's pairs are worth printing although the last one is not whole.
        print(f"stopped in pair {done + 1}: {stopped!r}", file=sys.stderr)
    other_commit = commits[options.other.resolve()]
    print(f"# this checkout: {commits[HERE]}, the other: {other_commit}, {done} pairs")
    print(f"{'':44} {'here (us)':>10} {'other (us)':>10}   here / other [95 % interval]")
    for name, pairs in times.items():
        mine, theirs = zip(*pairs, strict=True)
        paired = paired_ratio("here", theirs, mine)
        ratio = f"{paired.ratio:.3f} [{paired.low:.3f}, {paired.high:.3f}]"
        medians = f"{statistics.median(mine):10.1f} {statistics.median(theirs):10.1f}"
        print(f"{name:44} {medians}   {ratio}")


if __name__ == "__main__":
    main()
