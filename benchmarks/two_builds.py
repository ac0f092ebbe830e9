"""This checkout beside another one, such as the commit before a large change: is it as fast?

Both have to be built in place, each with its own .venv. In a pair the ranks of both checkouts start
anew and take turns at each row, a block of calls each; those whose turn it is not wait. So whatever
else the machine does falls on both: between runs of some seconds each, its own speed may differ by
more than the builds do. Which of the two starts first changes from pair to pair: where a process
gets its memory stays with it, and of three builds the one that started first was up to 26 % slower
at 25 MiB, 2 ranks. A row shows the median over the pairs of this checkout's time by the other's,
and a 95 % interval by resampling.

    git worktree add ../before main~5 && (cd ../before && make venv)
    python benchmarks/two_builds.py ../before --pairs 20

Before each block one call is checked: sums exactly, and the gradients of a step must be the same
bits in both checkouts and on all ranks; with a wire dtype on all ranks of a checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import die_with_parent
from report import header, paired_ratio

HERE = Path(__file__).resolve().parent.parent
LIMIT_S = 300  # of a pair
_PIN = "TWO_BUILDS_PIN"
BACKENDS = {"pycomm": "auto", "pycomm:tcp": "tcp"}
SIZES = (4, 4 << 10, 1 << 20, 25 << 20)
WIRES = ("", "bf16", "fp16", "int8")
ROWS = [
    *((f"all_reduce {name:10}", nbytes, name, "") for nbytes in SIZES for name in BACKENDS),
    *((f"step {wire:5} {name:10}", 0, name, wire) for wire in WIRES for name in BACKENDS),
]


# --- a rank, in the checkout's own Python ---------------------------------------------------------


def _all_reduce(nbytes: int, group: Any) -> tuple[Callable[[], object], Callable[[], str]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(nbytes // 4).remainder(13).to(torch.float32)
    tensor = torch.zeros_like(pattern)

    def check() -> str:
        tensor.copy_(pattern * (rank + 1))
        dist.all_reduce(tensor, group=group)
        wrong = int((tensor != pattern * (ranks * (ranks + 1) // 2)).sum())
        tensor.zero_()
        return f"{wrong} wrong elements" if wrong else ""

    return lambda: dist.all_reduce(tensor, group=group), check


def _step(group: Any, wire: str) -> tuple[Callable[[], object], Callable[[], str]]:
    import pycomm  # PYTHONPATH says which

    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, 1024) for _ in range(24)]
    model = pycomm.DistributedDataParallel(
        torch.nn.Sequential(*layers), process_group=group, wire_dtype=wire or None
    )
    batch = torch.randn(8, 1024, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()

    def check() -> str:
        step()
        found = hashlib.sha256()
        for parameter in model.parameters():
            assert parameter.grad is not None
            found.update(parameter.grad.numpy().tobytes())
        return "gradients " + found.hexdigest()

    return step, check


def rank_main() -> None:
    """Reads a row's index and a number of calls a line; writes the microseconds that each call took
    and what check() said."""
    import pycomm  # PYTHONPATH says which

    torch.set_num_threads(1)
    dist.init_process_group("pycomm")
    groups = {
        name: dist.new_group(backend="pycomm", pg_options=pycomm.Options(transport=transport))
        for name, transport in BACKENDS.items()
    }
    if _PIN in os.environ:  # the thread that calls, once the groups have counted their cores
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    made: dict[int, tuple[Callable[[], object], Callable[[], str]]] = {}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        index, calls = map(int, line.split())
        _, nbytes, name, wire = ROWS[index]
        if index not in made:
            group = groups[name]
            made[index] = _all_reduce(nbytes, group) if nbytes else _step(group, wire)
            for _ in range(3):  # a step's buckets are cut anew after the first
                made[index][0]()
        call, check = made[index]
        said = check()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = (time.perf_counter() - begin) / calls
        print(json.dumps({"us": seconds * 1e6, "said": said}), flush=True)
    dist.destroy_process_group()


# --- both builds ----------------------------------------------------------------------------------


class Build:
    """The ranks of one checkout."""

    def __init__(self, checkout: Path, port: int, ranks: int) -> None:
        self._ranks: list[subprocess.Popen[str]] = []
        command = [str(checkout / ".venv" / "bin" / "python"), str(Path(__file__).resolve())]
        for rank in range(ranks):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            env |= {"PYTHONPATH": str(checkout), "PYCOMM_SOCKET_IFNAME": "lo"}
            self._ranks.append(
                subprocess.Popen(
                    [*command, "--as-rank", str(os.getpid())],
                    cwd=checkout,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def _answers(self) -> list[dict[str, Any]]:
        lines = []
        for one in self._ranks:
            assert one.stdout is not None
            line = one.stdout.readline()
            if not line:
                raise SystemExit(f"a rank ended with {one.wait()}; its message is above")
            lines.append(json.loads(line))
        return lines

    def ready(self) -> None:
        self._answers()

    def block(self, row: int, calls: int) -> tuple[float, set[str]]:
        """So many calls: the slowest rank's microseconds a call, and what all ranks' checks say."""
        for one in self._ranks:
            assert one.stdin is not None
            one.stdin.write(f"{row} {calls}\n")
            one.stdin.flush()
        answers = self._answers()
        return max(float(one["us"]) for one in answers), {str(one["said"]) for one in answers}

    def kill(self) -> None:
        for one in self._ranks:
            one.kill()

    def end(self) -> None:
        """Lets the ranks leave; ends those that do not."""
        for one in self._ranks:
            assert one.stdin is not None
            one.stdin.close()
        for one in self._ranks:
            try:
                one.wait(30)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


Times = dict[str, list[tuple[float, float]]]


def pair(options: argparse.Namespace, number: int, ranks: int, times: Times) -> None:
    """Adds one pair of blocks to each row of this number of ranks."""
    checkouts = [HERE, options.other.resolve()]
    order = random.Random(number)
    builds: dict[Path, Build] = {}
    late = threading.Timer(LIMIT_S, lambda: [build.kill() for build in builds.values()])
    late.start()
    try:
        for checkout in checkouts[:: 1 if number % 2 == 0 else -1]:
            builds[checkout] = Build(checkout, options.port + len(builds), ranks)
            builds[checkout].ready()
        for index, (name, nbytes, _, wire) in enumerate(ROWS):
            if not re.search(options.rows, f"{name.strip()} {nbytes}"):
                continue
            for build in builds.values():
                build.block(index, 3)
            us, _ = builds[checkouts[1]].block(index, 5)
            calls = max(5, int(options.seconds * 1e6 / us))
            found: dict[Path, float] = {}
            said: list[set[str]] = []
            for checkout in order.sample(checkouts, 2):
                found[checkout], answers = builds[checkout].block(index, calls)
                said.append(answers)
            row = f"{name} {ranks} ranks {nbytes or '':>9}"
            alike = said[0] == said[1] or wire  # the encoding may have changed
            if not alike or max(map(len, said)) > 1 or (nbytes and said[0] != {""}):
                raise SystemExit(f"{row}: {said}")
            times.setdefault(row, []).append((found[checkouts[0]], found[checkouts[1]]))
    finally:
        late.cancel()
        for build in builds.values():
            build.end()


def show(row: str, pairs: list[tuple[float, float]]) -> str:
    """A line of the table."""
    mine, theirs = zip(*pairs, strict=True)
    paired = paired_ratio("here", theirs, mine)
    medians = f"{statistics.median(mine):10.1f} {statistics.median(theirs):10.1f}"
    misses = paired.ratio > 1.03 and not (paired.low <= 1.0 and paired.high < 1.10)
    ratio = f"{paired.ratio:.3f} [{paired.low:.3f}, {paired.high:.3f}]"
    return f"{row} {medians}   {ratio}{'  MISSES' if misses else ''}"


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found or f"{checkout}, which is no git checkout"


def main() -> None:
    if sys.argv[1:2] == ["--as-rank"]:
        die_with_parent(int(sys.argv[2]))
        rank_main()
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("other", type=Path, help="a checkout that is built in place")
    add("--pairs", type=int, default=20)
    add("--seconds", type=float, default=0.3, help="a block; default: %(default)s")
    add("--ranks", default="2,4")
    add(
        "--rows",
        default="^all_reduce|^step +pycomm",
        help="an expression that a row matches, such as 'tcp (4|4096)$', or '^step' for steps of "
        "every wire dtype, too; default: %(default)s",
    )
    add("--pin", action="store_true", help="each rank's calling thread stays on a core of its own")
    add("--port", type=int, default=29571, help="this one and the next")
    options = parser.parse_args()
    if options.other.resolve() == HERE:
        parser.error("this is the other checkout, too: name one that is built elsewhere")
    if options.pin:
        os.environ[_PIN] = "1"
    times: Times = {}
    done = 0
    try:
        while done < options.pairs:
            for ranks in map(int, options.ranks.split(",")):
                pair(options, done, ranks, times)
            done += 1
            print(f"pair {done} of {options.pairs}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:  # half an hour's pairs are worth printing
        print(f"stopped in pair {done + 1}", file=sys.stderr)
    for key, value in header("two_builds", sys.argv[1:]).items():
        print(f"# {key:14s} {value}")
    print(f"# the other checkout: {_commit(options.other)}")
    print(f"# {done} pairs of blocks of {options.seconds} s. MISSES: the median is above")
    print("# 1.03, and not (low <= 1.00 and high < 1.10)")
    print(f"{'':41}B {'here (us)':>10} {'other (us)':>10}   here / other [95 % interval]")
    for row, pairs in times.items():
        print(show(row, pairs))


if __name__ == "__main__":
    main()
