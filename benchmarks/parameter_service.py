"""A parameter service beside all-reduce: a step on equal hosts, and training with one slow worker.

    python benchmarks/switch.py --hosts 0,1,2,3,4 -- parameter_service.py --table step
    python benchmarks/switch.py --hosts 0,1,2,3,4 -- parameter_service.py --table slow

Ranks 0 to 3 are workers; the host of rank 4 has the one server. Servers are processes of
`python -m pycomm serve`, and the workers' all-reduce goes among the workers only.

`step` sends parameters of 25 MB and computes nothing: push and pull of all of them in lock-step
with one server, the same with a server on each worker's host, and all_reduce. They take turns. The
check, after each turn: the worker has the parameters of that many steps.

`slow` trains a small network on scikit-learn's digits. A step takes 20 ms, and on rank 3 80 ms:
the rest of the time sleeps, as if a GPU computed. Rank 0 notes its parameters, with DiLoCo only
directly after a sync; their losses on 360 digits that are not trained on are computed afterwards.
Each method has learning rates of its own, so many that its best one is none of the outer two. All
are printed. `--methods` makes one run of some of them, since all take ten minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import header
from torch import nn, optim

import pycomm

WORKERS = 4
NUMEL = 1_250_000
LAYERS = 5
FAST_S, SLOW_S = 0.02, 0.08
LEARNING_RATES = {
    "no bound": (0.2, 0.3, 0.4),
    "bound 8": (0.2, 0.3, 0.4),
    "lock-step": (0.7, 1.0, 1.3),
    "all_reduce": (0.7, 1.0, 1.3),
    "momentum": (0.3, 0.5, 0.7),
    "diloco 1": (0.5, 0.7, 1.0),
    "diloco 2": (0.3, 0.5, 0.7, 1.0, 1.5),
    "diloco 3": (0.5, 0.7, 1.0, 1.5),
    "diloco 5": (0.5, 0.7, 1.0, 1.5),
    "diloco 10": (0.3, 0.5, 0.7, 1.0, 1.5),
}
"""`momentum` is all_reduce with Nesterov momentum; the number of DiLoCo is its `sync_every`."""
STALENESS = {"lock-step": 0, "bound 8": 8, "no bound": None}
LR = 0.01  # of the servers of `step`


def make_wire() -> tuple[nn.Module, optim.Optimizer]:
    """What a server of `step` keeps."""
    model = nn.Sequential(*(nn.Linear(1, NUMEL, bias=False) for _ in range(LAYERS)))
    return model, optim.SGD(model.parameters(), lr=LR)


def make_digits() -> tuple[nn.Module, optim.Optimizer]:
    """What a server of `slow` keeps."""
    torch.manual_seed(int(os.environ["BENCHMARK_SEED"]))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, optim.SGD(model.parameters(), lr=float(os.environ["BENCHMARK_LR"]))


@contextlib.contextmanager
def servers(make: str, places: Sequence[int]) -> Iterator[str]:
    """A server on the host of each rank in `places`; gives all ranks the addresses."""
    rank = dist.get_rank()
    address = ""
    process = None
    if rank in places:
        host = own_address()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pycomm", "serve", f"{__file__}:{make}"),
                *("--listen", f"{host}:0", "--workers", str(WORKERS)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, address)
    try:
        yield ",".join(filter(None, addresses))
        if process is not None:
            assert process.wait(60) == 0
    finally:
        if process is not None:
            process.kill()
            process.communicate()


def own_address() -> str:
    """This host's, as the other hosts reach it."""
    listed = subprocess.run(
        ["ip", "-4", "-o", "addr", "show", "dev", "eth0"], capture_output=True, text=True
    )
    return listed.stdout.split()[3].split("/")[0] if listed.stdout else "127.0.0.1"


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    images = torch.tensor(loaded.data[order] / 16.0, dtype=torch.float32)
    return images, torch.tensor(loaded.target[order])


class Digits:
    """One worker's part of the digits, and what a step costs it."""

    def __init__(self, rank: int, seed: int) -> None:
        images, labels = digits()
        self.images, self.labels = images[360 + rank :: WORKERS], labels[360 + rank :: WORKERS]
        self.generator = torch.Generator().manual_seed(100 * seed + rank)
        self.step_s = SLOW_S if rank == WORKERS - 1 else FAST_S

    def backward(self, model: nn.Module) -> None:
        begin = time.perf_counter()
        chosen = torch.randint(0, len(self.labels), (32,), generator=self.generator)
        model.zero_grad()
        F.cross_entropy(model(self.images[chosen]), self.labels[chosen]).backward()
        time.sleep(max(0.0, self.step_s - (time.perf_counter() - begin)))


class Notes:
    """Parameters with their times, at most twenty a second."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.begin = time.perf_counter()
        self.kept: list[tuple[float, torch.Tensor]] = []

    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def note(self) -> None:
        now = self.seconds()
        if not self.kept or now - self.kept[-1][0] >= 0.05:
            self.kept.append((now, nn.utils.parameters_to_vector(self.model.parameters()).detach()))

    def seconds_to(self, target: float) -> float:
        images, labels = digits()
        for seconds, vector in self.kept:
            nn.utils.vector_to_parameters(vector, self.model.parameters())
            with torch.no_grad():
                if F.cross_entropy(self.model(images[:360]), labels[:360]) <= target:
                    return seconds
        return float("inf")


def train(method: str, lr: float, seed: int, seconds: float, workers: Any) -> Notes | None:
    """One run; the notes of rank 0."""
    rank = dist.get_rank()
    os.environ["BENCHMARK_LR"], os.environ["BENCHMARK_SEED"] = str(lr), str(seed)
    model, optimizer = make_digits()
    steps = int(seconds / SLOW_S)
    notes = None
    if method in STALENESS:
        with servers("make_digits", [WORKERS]) as addresses:
            if rank < WORKERS:
                data = Digits(rank, seed)
                client = pycomm.ParameterClient(
                    model, servers=addresses, worker=rank, staleness=STALENESS[method]
                )
                dist.barrier(workers)
                notes = Notes(model)
                while notes.seconds() < seconds and (method != "lock-step" or client.clock < steps):
                    data.backward(model)
                    client.push()
                    client.pull()
                    notes.note()
                client.close()
        return notes
    if rank < WORKERS:
        data = Digits(rank, seed)
        wrapped: Any = model
        local = None
        if method.startswith("diloco"):
            every = int(method.split()[1])
            local = pycomm.DiLoCo(model, sync_every=every, process_group=workers)
        else:
            wrapped = pycomm.DistributedDataParallel(model, process_group=workers)
        if method == "momentum":
            optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
        dist.barrier(workers)
        notes = Notes(model)
        for _ in range(steps):
            data.backward(wrapped)
            optimizer.step()
            if local is None or local.step():
                notes.note()
    return notes


def table_slow(options: argparse.Namespace, workers: Any) -> None:
    runs = [
        (method, lr, seed)
        for seed in range(options.seeds)
        for method in options.methods
        for lr in LEARNING_RATES[method]
    ]
    random.Random(0).shuffle(runs)
    found: dict[tuple[str, float], list[float]] = {}
    for method, lr, seed in runs:
        notes = train(method, lr, seed, options.seconds, workers)
        if dist.get_rank() == 0:
            assert notes is not None
            seconds = notes.seconds_to(options.target)
            found.setdefault((method, lr), []).append(seconds)
    if dist.get_rank() != 0:
        return
    print(f"seconds to a loss of {options.target}; never: not in {options.seconds:g} s")
    print(f"{'method':12} {'lr':>5} {'median':>7} [all]")
    for method in options.methods:
        medians = {lr: statistics.median(found[method, lr]) for lr in LEARNING_RATES[method]}
        best = min(medians.values())
        for lr, median in medians.items():
            each = ", ".join(map(shown, sorted(found[method, lr])))
            mark = "  best" if median == best else ""
            print(f"{method:12} {lr:5} {shown(median):>7} [{each}]{mark}")


def shown(seconds: float) -> str:
    return "never" if seconds == float("inf") else f"{seconds:.2f}"


def table_step(options: argparse.Namespace, workers: Any) -> None:
    rank = dist.get_rank()
    flat = torch.zeros(NUMEL * LAYERS)
    with servers("make_wire", [WORKERS]) as one, servers("make_wire", range(WORKERS)) as four:
        took: dict[str, list[float]] = {}
        if rank < WORKERS:
            clients, models, first = {}, {}, {}
            for name, addresses in (("one server", one), ("server on each host", four)):
                model, _ = make_wire()
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, rank)
                clients[name] = pycomm.ParameterClient(model, servers=addresses, worker=rank)
                clients[name].pull()
                models[name] = model
                first[name] = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            order = random.Random(0)
            for turn in range(options.turns + 1):
                for name in order.sample(["all_reduce", *clients], len(clients) + 1):
                    dist.barrier(workers)
                    begin = time.perf_counter()
                    if name == "all_reduce":
                        dist.all_reduce(flat, group=workers)
                    else:
                        clients[name].push()
                        clients[name].pull()
                    seconds = torch.tensor([time.perf_counter() - begin])
                    if name in clients:
                        now = nn.utils.parameters_to_vector(models[name].parameters()).detach()
                        expected = first[name] - (turn + 1) * LR * (WORKERS - 1) / 2
                        torch.testing.assert_close(now, expected, rtol=0.0, atol=1e-5)
                    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=workers)
                    if turn:
                        took.setdefault(name, []).append(float(seconds))
            for client in clients.values():
                client.close()
    if rank == 0:
        base = statistics.median(took["all_reduce"])
        print(f"{'a step of 25 MB':22} seconds: median [least, most]   / all_reduce")
        for name, seconds in took.items():
            middle = statistics.median(seconds)
            spread = f"{middle:.3f} [{min(seconds):.3f}, {max(seconds):.3f}]"
            print(f"{name:22} {spread:30} {middle / base:6.2f}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", choices=["step", "slow"], required=True)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--methods",
        type=lambda text: text.split(","),
        default=list(LEARNING_RATES),
        help="of slow, with commas; default: all",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of a run; default: %(default)s")
    parser.add_argument("--target", type=float, default=0.3, help="loss; default: %(default)s")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("pycomm")
    if dist.get_world_size() != WORKERS + 1:
        sys.exit(f"needs {WORKERS + 1} ranks: {WORKERS} workers and the host of a server")
    workers = dist.new_group(list(range(WORKERS)))
    if dist.get_rank() == 0:
        facts = header("parameter_service", argv)
        print("\n".join(f"# {key}: {value}" for key, value in facts.items()))
    (table_slow if options.table == "slow" else table_step)(options, workers)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
