"""This checkout beside another one, such as the commit before a large change: is it as fast?

Both have to be built in place, each with its own .venv. For each row the ranks of both run at the
same time and take turns, a block of each, in random order within a pair; those whose turn it is not
wait. So whatever else the machine does falls on both: between runs of some seconds each, its own
speed may differ by more than the builds do. All start anew a few times, since where a process gets
its memory stays with it. A row shows the median over the pairs of this
checkout's time by the other's, and a 95 % interval by resampling.

    git worktree add ../before main~5 && (cd ../before && make venv)
    python benchmarks/two_builds.py ../before --pairs 20

The results of each block are checked: sums exactly, and the gradients of a step must be the same
bits in both checkouts and on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
SIZES = (4, 4 << 10, 1 << 20, 25 << 20)
ROWS = [("all_reduce", nbytes) for nbytes in SIZES] + [("step", 0)]
BACKENDS = {"pycomm": "auto", "pycomm:tcp": "tcp"}


# --- a rank, in the checkout's own Python ---------------------------------------------------------


def _all_reduce(nbytes: int, rank: int, ranks: int) -> tuple[Callable[[], None], Callable[[], str]]:
    import torch
    import torch.distributed as dist

    pattern = torch.arange(nbytes // 4).remainder(13).to(torch.float32)
    tensor = torch.zeros_like(pattern)

    def check() -> str:
        tensor.copy_(pattern * (rank + 1))
        dist.all_reduce(tensor)
        wrong = int((tensor != pattern * (ranks * (ranks + 1) // 2)).sum())
        tensor.zero_()
        return f"{wrong} wrong elements" if wrong else ""

    return lambda: dist.all_reduce(tensor) and None, check


def _step(rank: int) -> tuple[Callable[[], None], Callable[[], str]]:
    import hashlib

    import torch

    import pycomm

    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, 1024) for _ in range(24)]
    model = pycomm.DistributedDataParallel(torch.nn.Sequential(*layers))
    batch = torch.randn(8, 1024, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()

    def check() -> str:
        step()
        found = hashlib.sha256()
        for parameter in model.parameters():
            assert parameter.grad is not None
            found.update(parameter.grad.numpy().tobytes())
        return found.hexdigest()

    for _ in range(3):  # buckets are cut anew after the first
        step()
    return step, check


def rank_main(row: str, nbytes: int, transport: str) -> None:
    """Reads a number of calls a line; writes microseconds for each call and what check() said."""
    import torch
    import torch.distributed as dist

    import pycomm

    torch.set_num_threads(1)
    dist.init_process_group("pycomm", pg_options=pycomm.Options(transport=transport))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    call, check = _step(rank) if row == "step" else _all_reduce(nbytes, rank, ranks)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        said = check()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(int(line)):
            call()
        seconds = (time.perf_counter() - begin) / int(line)
        print(json.dumps({"us": seconds * 1e6, "said": said}), flush=True)
    dist.destroy_process_group()


# --- both builds ----------------------------------------------------------------------------------


class Build:
    """The ranks of one checkout for one row."""

    def __init__(self, checkout: Path, port: int, ranks: int, arguments: Sequence[str]) -> None:
        self._ranks: list[subprocess.Popen[str]] = []
        command = [str(checkout / ".venv" / "bin" / "python"), str(Path(__file__).resolve())]
        for rank in range(ranks):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            env |= {"PYTHONPATH": str(checkout), "PYCOMM_SOCKET_IFNAME": "lo"}
            self._ranks.append(
                subprocess.Popen(
                    [*command, "--rank-of", *arguments],
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

    def block(self, calls: int) -> tuple[float, set[str]]:
        """So many calls: the slowest rank's microseconds a call, and what all ranks' checks say."""
        for one in self._ranks:
            assert one.stdin is not None
            one.stdin.write(f"{calls}\n")
            one.stdin.flush()
        answers = self._answers()
        return max(float(one["us"]) for one in answers), {str(one["said"]) for one in answers}

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


def measure(options: argparse.Namespace, row: str, nbytes: int, backend: str, ranks: int) -> str:
    """One row of the table."""
    from report import paired_ratio

    order = random.Random(7)
    mine: list[float] = []
    theirs: list[float] = []
    for life in range(options.lives):
        here, other = (
            Build(checkout, options.port + number, ranks, [row, str(nbytes), BACKENDS[backend]])
            for number, checkout in enumerate((HERE, options.other.resolve()))
        )
        try:
            for build in (here, other):
                build.ready()
                build.block(3)
            us, _ = other.block(10)
            calls = max(5, int(options.seconds * 1e6 / us))
            for _ in range(len(range(life, options.pairs, options.lives))):
                said: set[str] = set()
                for build, times in order.sample([(here, mine), (other, theirs)], 2):
                    us, answers = build.block(calls)
                    times.append(us)
                    said |= answers
                if len(said) > 1 or (row != "step" and said != {""}):
                    raise SystemExit(f"{row} of {nbytes} B, {backend}, {ranks} ranks: {said}")
        finally:
            here.end()
            other.end()
    paired = paired_ratio("here", theirs, mine)
    name = f"{row:10} {backend:10} {ranks} ranks {nbytes or '':>9}"
    medians = f"{statistics.median(mine):10.1f} {statistics.median(theirs):10.1f}"
    misses = paired.ratio > 1.03 and not (paired.low <= 1.0 and paired.high < 1.10)
    ratio = f"{paired.ratio:.3f} [{paired.low:.3f}, {paired.high:.3f}]"
    return f"{name} {medians}   {ratio}{'  MISSES' if misses else ''}"


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    if sys.argv[1:2] == ["--rank-of"]:
        row, nbytes, transport = sys.argv[2:]
        rank_main(row, int(nbytes), transport)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("other", type=Path, help="a checkout that is built in place")
    add("--pairs", type=int, default=20)
    add("--lives", type=int, default=4, help="processes start anew so often within the pairs")
    add("--seconds", type=float, default=0.15, help="a block; default: %(default)s")
    add("--ranks", default="2,4")
    add("--backends", default=",".join(BACKENDS))
    add("--rows", default="all_reduce,step")
    add("--port", type=int, default=29571, help="this one and the next")
    options = parser.parse_args()
    print(f"# this checkout: {_commit(HERE)}, the other: {_commit(options.other)}")
    print(f"# {options.pairs} pairs of {options.seconds} s in {options.lives} lives; MISSES:")
    print("# the median is above 1.03, and not (low <= 1.00 and high < 1.10)")
    print(f"{'':35}B {'here (us)':>10} {'other (us)':>10}   here / other [95 % interval]")
    for row, nbytes in ROWS:
        for ranks in map(int, options.ranks.split(",")):
            for backend in options.backends.split(","):
                if row in options.rows.split(","):
                    print(measure(options, row, nbytes, backend, ranks), flush=True)


if __name__ == "__main__":
    main()
