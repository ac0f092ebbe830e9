"""Run seeds of the simulator, as many of each kind; docs/evidence/simulator.md has the kinds.

python tools/simulate.py [--seeds 100000] [--first 1] [--remember-failures]
python tools/simulate.py --agreement [--seeds 100000] [--first 1]

The second one is the simulator of docs/evidence/agreement.md, which prints the seeds that fail.
With --remember-failures seeds that fail are added to tests/cpp/proof/seeds.txt: `make test` runs
them then.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import cpp
import machine

KINDS = {
    "one group": 0,
    "messages, codecs": 1_000_000_000_000,
    "a rank leaves at any moment": 1_500_000_000_000,
    "several groups": 2_000_000_000_000,
}
"""The seed before the first of each: kRichSeeds, kLeavingSeeds, kGroupSeeds of proof/sim/plan.h."""


KEPT = Path(__file__).resolve().parent.parent / "tests" / "cpp" / "proof" / "seeds.txt"
_TOTAL = re.compile(r"^all +(\d+) +\d+ +(\d+)$", re.MULTILINE)
_OF_AGREEMENT = re.compile(r"^(\d+) seeds, (\d+) violated;", re.MULTILINE)
_BROKEN = re.compile(r"^seed (\d+) broke a promise$", re.MULTILINE)


def read(output: str) -> tuple[int, int, list[str]]:
    """How many seeds ran, how many were violated, and those that are named."""
    total = _TOTAL.search(output)
    ran, violated = (int(total[1]), int(total[2])) if total else (0, 0)
    return ran, violated, _BROKEN.findall(output)


def remember(seeds: Iterable[str], path: Path = KEPT) -> list[str]:
    """Adds seeds to those that always run; returns those that are new there."""
    kept = {line.strip() for line in path.read_text().splitlines() if not line.startswith("#")}
    new = sorted(set(seeds) - kept)
    with path.open("a") as file:
        file.writelines(f"{seed}\n" for seed in new)
    return new


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100_000, help="how many of each kind")
    parser.add_argument("--first", type=int, default=1, help="counted from each kind's first seed")
    parser.add_argument("--remember-failures", action="store_true", help="add them to seeds.txt")
    parser.add_argument("--agreement", action="store_true", help="of deaths, instead")
    options = parser.parse_args()
    name = "pycomm_agree" if options.agreement else "pycomm_simulate"
    folder = cpp.build("plain", target=name)
    if folder is None:
        return 1
    program = str(folder / "tests" / "cpp" / name)
    jobs = ["--jobs", str(machine.jobs(1.0))]
    if options.agreement:
        seeds = f"{options.first}:{options.first + options.seeds - 1}"
        command = [program, "--seeds", seeds, *jobs]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, end="")
        found = _OF_AGREEMENT.search(done.stdout)
        complete = done.returncode == 0 and found is not None and int(found[1]) == options.seeds
        counts = f"{int(found[1]):,} seeds, {found[2]} violated" if found else "no result"
        print(f"agreement: {'passed' if complete else 'FAILED'}, {counts}")
        return 0 if complete else 1
    ran, violated, complete = 0, 0, True
    broken: list[str] = []
    for kind, base in KINDS.items():
        first = base + options.first
        seeds = f"{first}:{first + options.seeds - 1}"
        print(f"=== {kind}: pycomm_simulate --seeds {seeds}", flush=True)
        command = [program, "--seeds", seeds, *jobs]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, end="", flush=True)
        some, bad, named = read(done.stdout)
        ran, violated = ran + some, violated + bad
        broken += named
        complete = complete and done.returncode == 0 and some == options.seeds
    if options.remember_failures:
        remember(broken)
    print(f"simulator: {'passed' if complete else 'FAILED'}, {ran:,} seeds, {violated} violated")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
