"""Seconds per step, or per round, of each wire pattern without a model, for time_to_loss.py.

    python benchmarks/switch.py --hosts 0,1,2,3 -- \\
        time_to_loss_clocks.py FOLDER --numel 62500000 --turn 0

One turn of every pattern, in an order drawn from the turn's number; its result is a file in FOLDER.
A step computes for 1.2 seconds: a sleep, as if a GPU computed. Patterns that send in each step
launch a bucket when a backward pass would have made it: evenly over the last two thirds of the
step. Patterns that send in rounds are the library's classes around parameters of the gradient's
size. Training stands still during their syncs, so only the sync is timed. StreamingDiLoCo sends
while steps compute, so its steps are run: a round of FRAGMENTS x (DELAY + 1) steps, which has as
many launches and landings as a round of EVERY steps.

Written is what communication adds to the computing of one step, or of one round: the longest of
all ranks. Every sum is checked: values are whole numbers, so that sums are exact in fp32 and fp16.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from outer_hosts import sent_nbytes
from report import header
from time_to_loss_curves import save
from time_to_loss_pace import PERIOD, Pace, error, fill, user_seconds
from time_to_loss_product import COMPUTE_S, DELAY, FRAGMENTS
from torch import nn

PATTERNS = ["gloo@4", "gloo@25", "gloo@25#fp16", "fp32", "fp16", "int8"]
PATTERNS += ["local_sgd", "diloco", "streaming", "sparse"]
LAYERS, TOP_K = 100, 64


class Layer(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class Rank:
    def __init__(self, numel: int, compute_s: float) -> None:
        dist.init_process_group("gloo")
        self.gloo = dist.group.WORLD
        self.ours = dist.new_group(backend="pycomm")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # Each 255 neighbours have all whole numbers from -127 to 127, so int8's scales are whole.
        self.tile = (torch.arange(PERIOD) * 37 % PERIOD - 127).float()
        self.flat = torch.zeros(numel)
        self.pace = Pace(compute_s)
        small = torch.zeros(1 << 20)
        for group in (self.gloo, self.ours):  # connections, and the path that data takes
            dist.all_reduce(small, group=group)

    def timed(self, work: Callable[[], object]) -> dict[str, float]:
        """The largest of all ranks, and the cores that other programs took meanwhile."""
        dist.barrier()
        before, sent = resource.getrusage(resource.RUSAGE_SELF), sent_nbytes()
        everything, begin = user_seconds(), time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        everything = user_seconds() - everything
        after = resource.getrusage(resource.RUSAGE_SELF)
        user = after.ru_utime - before.ru_utime
        cpu = user + after.ru_stime - before.ru_stime
        dist.barrier()
        values = [seconds, cpu, float(sent_nbytes() - sent)]
        largest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        ours = torch.tensor([user], dtype=torch.float64)
        dist.all_reduce(ours)
        found = dict(zip(("seconds", "cpu_s", "sent"), largest.tolist(), strict=True))
        return {**found, "others": (everything - float(ours)) / seconds}

    def step(self, pattern: str) -> None:
        """What DDP sends in one step; the sums, not the averages, stay in the buffer."""
        from pycomm import codecs

        wrapper, _, cast = pattern.partition("#")
        cap = int(wrapper.partition("@")[2] or 4)
        buckets = self.flat.split(cap << 18)
        works: list[Any] = []
        halves: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.pace.begin()
        for number, bucket in enumerate(buckets):
            self.pace.until((1 + 2 * (number + 1) / len(buckets)) / 3)
            if cast == "fp16":
                halves.append((bucket, bucket.half()))
                works.append(dist.all_reduce(halves[-1][1], group=self.gloo, async_op=True))
            elif wrapper.startswith("gloo"):
                works.append(dist.all_reduce(bucket, group=self.gloo, async_op=True))
            else:
                works.append(codecs.all_reduce(bucket, pattern, group=self.ours, async_op=True))
        for work in works:
            work.wait()
        for bucket, half in halves:
            bucket.copy_(half)

    def each_step(self, pattern: str) -> dict[str, Any]:
        fill(self.flat, self.rank + 1.0, self.tile)
        found = self.timed(lambda: self.step(pattern))
        total = sum(range(1, self.ranks + 1))
        wrong = error(self.flat, total, self.tile)
        allowed = 0.01 * 127 * total if pattern == "int8" else 0.0
        return {**found, "exposed": found["seconds"] - self.pace.seconds, "error": wrong} | (
            {} if wrong <= allowed else {"wrong": True}
        )

    def make(self, pattern: str) -> Any:
        import pycomm

        self.flat.zero_()
        layers = [Layer(weight) for weight in self.flat.split(self.flat.numel() // LAYERS)]
        model = nn.Sequential(*layers)
        given = {"process_group": self.ours, "init_sync": False}
        if pattern == "local_sgd":
            return pycomm.LocalSGD(model, sync_every=1, **given)
        if pattern == "diloco":
            return pycomm.DiLoCo(model, sync_every=1, **given)
        if pattern == "sparse":
            return pycomm.SparseLoCo(model, sync_every=1, top_k=TOP_K, **given)
        return pycomm.StreamingDiLoCo(
            model,
            sync_every=FRAGMENTS * (DELAY + 1),
            fragments=FRAGMENTS,
            fragment_sync_delay=DELAY,
            wire_dtype="int8",
            **given,
        )

    def local_sgd(self) -> dict[str, Any]:
        local = self.make("local_sgd")
        fill(self.flat, self.rank + 1.0, self.tile)
        found = self.timed(local.step)
        wrong = error(self.flat, sum(range(1, self.ranks + 1)) / self.ranks, self.tile)
        return {**found, "exposed": found["seconds"], "error": wrong} | (
            {"wrong": True} if wrong else {}
        )

    def diloco(self) -> dict[str, Any]:
        local = self.make("diloco")
        fill(self.flat, self.rank + 1.0, self.tile)
        local.step()  # allocates the momentum
        fill(self.flat, self.rank + 1.0, self.tile)
        found = self.timed(local.step)
        mean = sum(range(1, self.ranks + 1)) / self.ranks
        first = 0.7 * 1.9 * mean  # two outer steps from 0 with Nesterov's momentum
        movement = first - mean
        momentum = 0.9 * -mean + movement
        wrong = error(self.flat, first - 0.7 * (movement + 0.9 * momentum), self.tile)
        return {**found, "exposed": found["seconds"], "error": wrong} | (
            {"wrong": True} if wrong > 1e-3 else {}
        )

    def streaming(self) -> dict[str, Any]:
        local = self.make("streaming")
        fill(self.flat, self.rank + 1.0, self.tile)
        steps = FRAGMENTS * (DELAY + 1)
        for _ in range(steps):  # allocates; the last fragment stays in flight, as it would
            local.step()
        fill(self.flat, self.rank + 1.0, self.tile)
        found = self.timed(lambda: self.compute_and(local, steps))
        local.sync()
        largest = float(self.flat[: 2 * PERIOD].max())
        wrong = error(self.flat[: self.flat.numel() // LAYERS], largest / 127, self.tile)
        good = self.equal() and largest > 0 and wrong <= 0.02 * largest
        return {**found, "exposed": found["seconds"] - steps * self.pace.seconds} | {
            "error": wrong / largest,
            **({} if good else {"wrong": True}),
        }

    def compute_and(self, local: Any, steps: int) -> None:
        for _ in range(steps):
            self.pace.begin()
            self.pace.until(1.0)
            local.step()

    def sparse(self) -> dict[str, Any]:
        local = self.make("sparse")
        torch.manual_seed(self.rank)
        fill(self.flat, 1.0, torch.randn(PERIOD * 16))
        found = self.timed(local.step)
        layer = self.flat[: self.flat.numel() // LAYERS]
        rows, moved = -(-layer.numel() // 4096), int((layer != 0).sum())
        good = self.equal() and TOP_K * (rows - 1) <= moved <= TOP_K * rows * self.ranks
        return {**found, "exposed": found["seconds"], "error": 0.0} | (
            {} if good else {"wrong": True}
        )

    def equal(self) -> bool:
        pieces = self.flat.view(torch.int32).split(1 << 20)  # sum() makes an int64 copy
        mine = torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum().reshape(1)
        every = [torch.zeros_like(mine) for _ in range(self.ranks)]
        dist.all_gather(every, mine)
        return all(bool(each == every[0]) for each in every)

    def turn(self, pattern: str) -> dict[str, Any]:
        alone: dict[str, Callable[[], dict[str, Any]]] = {
            "local_sgd": self.local_sgd,
            "diloco": self.diloco,
            "streaming": self.streaming,
            "sparse": self.sparse,
        }
        return alone[pattern]() if pattern in alone else self.each_step(pattern)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path)
    add("--numel", type=int, default=62_500_000)
    add("--turn", type=int, default=0)
    add("--compute", type=float, default=COMPUTE_S, help="seconds of a step; default: %(default)s")
    add("--patterns", type=lambda text: text.split(","), default=PATTERNS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, none but this
    rank = Rank(options.numel, options.compute)
    rows = {}
    for pattern in random.Random(options.turn).sample(options.patterns, len(options.patterns)):
        rows[pattern] = rank.turn(pattern)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what tensors below 32 MiB have freed
        if rank.rank == 0:
            print(f"# {pattern} {rows[pattern]}", flush=True)
    memory = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    bad = [pattern for pattern, row in rows.items() if "wrong" in row]
    if rank.rank == 0:
        found = {"numel": options.numel, "turn": options.turn, "rows": rows}
        found |= {"compute_s": options.compute, "rss_mib": float(memory)}
        found |= {"facts": header("time_to_loss_clocks", argv)}
        if bad:
            print(f"wrong results: {', '.join(bad)}", file=sys.stderr)
        else:
            options.folder.mkdir(parents=True, exist_ok=True)
            save(options.folder, f"{options.numel}-turn{options.turn}.json", found)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
