"""Run seeds of the simulator, as many of each kind: docs/simulator.md says which kinds there are.

python tools/simulate.py [--seeds 100000] [--first 1]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import cpp
import machine

KINDS = {
    "one group": 0,
    "messages, codecs": 1_000_000_000_000,
    "a rank leaves at any moment": 1_500_000_000_000,
    "several groups": 2_000_000_000_000,
}
"""The seed before the first of each: kRichSeeds, kLeavingSeeds, kGroupSeeds of proof/sim/plan.h."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100_000, help="how many of each kind")
    parser.add_argument("--first", type=int, default=1, help="counted from each kind's first seed")
    options = parser.parse_args()
    folder = cpp.build("plain", target="pycomm_simulate")
    if folder is None:
        return 1
    program = str(folder / "tests" / "cpp" / "pycomm_simulate")
    codes, violated = [], 0
    for kind, base in KINDS.items():
        first = base + options.first
        seeds = f"{first}:{first + options.seeds - 1}"
        print(f"=== {kind}: pycomm_simulate --seeds {seeds}", flush=True)
        command = [program, "--seeds", seeds, "--jobs", str(machine.jobs(1.0))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, end="", flush=True)
        total = re.search(r"^all +\d+ +\d+ +(\d+)$", done.stdout, re.MULTILINE)
        violated += int(total.group(1)) if total else 0
        codes.append(done.returncode)
    how = "passed" if not any(codes) else "FAILED"
    print(f"simulator: {how}, {len(KINDS) * options.seeds:,} seeds, {violated} violated")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
