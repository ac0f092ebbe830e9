"""What syncing seldom costs between hosts: exposed seconds of each round, and bytes on the wire.

    python benchmarks/switch.py --hosts 0,1,2,3 -- outer_hosts.py
    python benchmarks/switch.py --hosts 0,1,2,3 -- outer_hosts.py --compute core
    python benchmarks/switch.py --hosts 0,1 --mbit 100 -- outer_hosts.py --methods sparse --segments

There is no model: parameters of 2.5 million elements, which move a little in every round, and
steps that take a fixed time. `--compute device` sleeps, as when a GPU computes; `core` computes,
always the same amount, on the core that the rank would train on.

A turn of a method is `--every` steps and the longest delay: each parameter is sent once, and all
fragments land in it. Its exposed seconds are how much longer it takes than the turn of the method
"nothing" of the same round, where the slowest rank counts; "counted in step()" is what
stats().exposed_seconds counts. Methods take turns, in another order in each round, and share the
parameters. The bytes are those that eth0 sent, from /sys/class/net. After each turn the method
syncs, off the clock, and all ranks must have equal parameters.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from outer_quality import make
from report import header
from torch import nn

METHODS = [
    "diloco",
    "streaming:parts=4:tau=8",
    "streaming:parts=4:tau=8:wire=int8",
]
NUMEL = 2_500_000  # of one parameter: a layer of a model of 62.5 million


def given_to(method: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in method.split(":")[1:])


def compute(how: str, seconds: float) -> Callable[[], None]:
    """One step, which takes so long on a core that does nothing else."""
    if how == "device":
        return lambda: time.sleep(seconds)
    left, right = torch.randn(2, 192, 192)
    products = 1
    while True:  # as many products as take the time, measured while all ranks do the same
        begin = time.perf_counter()
        for _ in range(products):
            torch.mm(left, right)
        took = time.perf_counter() - begin
        if took > seconds / 2:
            break
        products *= 2
    number = torch.tensor([products * seconds / took])
    dist.all_reduce(number)
    products = int(number / dist.get_world_size())

    def work() -> None:
        for _ in range(products):
            torch.mm(left, right)

    return work


def sent_nbytes() -> int:
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


class Method:
    def __init__(self, name: str, model: nn.Module, every: int) -> None:
        self.name, self.model = name, model
        self.local: Any = None if name == "nothing" else make(name, model, every)
        self.seconds: list[float] = []
        self.counted: list[float] = []
        self.sent: list[float] = []

    def turn(self, noise: torch.Tensor, steps: int, work: Callable[[], None]) -> None:
        with torch.no_grad():  # what training does to the parameters, before the clock starts
            for parameter in self.model.parameters():
                parameter.add_(noise)
        counted = self.exposed()
        dist.barrier()
        sent, begin = sent_nbytes(), time.perf_counter()
        for _ in range(steps):
            work()
            if self.local is not None:
                self.local.step()
        self.seconds.append(time.perf_counter() - begin)
        self.counted.append(self.exposed() - counted)
        dist.barrier()
        self.sent.append(float(sent_nbytes() - sent))
        if self.local is not None:
            self.local.sync()
            self.check()

    def exposed(self) -> float:
        return 0.0 if self.local is None else float(self.local.stats().exposed_seconds)

    def check(self) -> None:
        for parameter in self.model.parameters():
            sums = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
            mine = parameter.detach().view(torch.int32).sum(dtype=torch.int64).reshape(1)
            dist.all_gather(sums, mine)
            assert all(each == sums[0] for each in sums), f"{self.name}: parameters differ"


def slowest(values: Sequence[float]) -> Any:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.numpy()


def spread(values: Any) -> str:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{middle:8.3f} [{low:.3f}, {high:.3f}]".ljust(26)


def print_rows(methods: Sequence[Method], entries: dict[str, int]) -> None:
    rows = {each.name: (slowest(each.seconds), slowest(each.counted)) for each in methods}
    sent = {each.name: slowest(each.sent) for each in methods}
    memory = slowest([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    if dist.get_rank() != 0:
        return
    width = max(map(len, rows)) + 2
    columns = (
        f"{'turn s':<26}{'exposed s':<26}{'counted in step() s':<26}{'/diloco':>8}{'MB sent':>9}"
    )
    print(f"{'method':<{width}}{columns}  bits/entry   median [quartiles]")
    quiet = rows["nothing"][0]
    base = np.median(rows["diloco"][0] - quiet) if "diloco" in rows else np.nan
    for name, (seconds, counted) in rows.items():
        exposed = seconds - quiet
        mean = float(np.mean(sent[name]))
        share = "" if name == "nothing" else f"{np.median(exposed) / base:8.3f}"
        bits = f"{8 * mean / entries[name]:11.2f}" if name in entries else ""
        print(
            f"{name:<{width}}{spread(seconds)}{spread(exposed)}{spread(counted)}{share:>8}"
            f"{mean / 1e6:9.2f}{bits}"
        )
    print(f"# largest resident memory of a rank: {float(memory[0]):.0f} MiB", flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--methods", type=lambda text: text.split(","), default=METHODS, help="see outer_quality")
    add("--every", type=int, default=48)
    add("--step", type=float, default=0.1, help="seconds of a step; default: %(default)s")
    add("--layers", type=int, default=25, help="of 10 MB each; default: %(default)s")
    add("--rounds", type=int, default=5)
    add("--compute", choices=["device", "core"], default="device")
    add("--segments", action="store_true", help="the card sends packets of one segment each")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.segments:
        command = ["ip", "link", "set", "dev", "eth0", "gso_max_segs", "1"]
        subprocess.run(command, check=True, timeout=10)
    dist.init_process_group("pycomm")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    work = compute(options.compute, options.step)
    torch.manual_seed(0)
    layers = [nn.Linear(1, NUMEL, bias=False) for _ in range(options.layers)]
    model = nn.Sequential(*layers)
    methods = [Method(name, model, options.every) for name in ["nothing", *options.methods]]
    delays = [int(given_to(each.name).get("tau", 0)) for each in methods]
    generator = torch.Generator().manual_seed(rank)
    order = random.Random(0)
    for number in range(options.rounds + 1):
        noise = 1e-3 * torch.randn(NUMEL, 1, generator=generator)
        for method in order.sample(methods, len(methods)):
            method.turn(noise, options.every + max(delays), work)
            if number == 0:  # the first outer step allocates
                method.seconds, method.counted, method.sent = [], [], []
    rows = options.layers * -(-NUMEL // 4096) * (ranks - 1)
    entries = {
        each.name: rows * int(given_to(each.name).get("k", 64))
        for each in methods
        if each.name.startswith("sparse")
    }
    if rank == 0:
        facts = header("outer_hosts", argv)
        facts["ranks"] = ranks
        facts["parameters"] = f"{4e-6 * NUMEL * options.layers:.0f} MB, float32"
        print("\n".join(f"# {key}: {value}" for key, value in facts.items()))
    print_rows(methods, entries)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
