"""The doctor's predicted seconds per sync beside training's, between two hosts at a gigabit.

    python benchmarks/doctor_predictions.py --out benchmarks/results/doctor-predictions.txt
    python benchmarks/doctor_predictions.py --rounds 1          # a first look, two minutes

Each round is of one model, and starts one rank per host anew. The ranks first run stage 3 of the
doctor (pycomm/doctor/sync.py), which predicts seconds for each wire dtype, with idle and with busy
cores. Then they train the model with pycomm.DistributedDataParallel, with each wire dtype, and
record one step of each with pycomm.report.Recorder. A row compares the medians over the rounds.

The header has the cores that other programs of this machine used in each round: trust a table
only if they are near 0.

The sync of a step is the reduction of the model's gradients, `Step.sync_s`: the time in which at
least one bucket is launched and not yet reduced, on the slower rank. Pauses, in which backward has
no bucket to launch, are the model's. A step hides a part of the sync; `exposed` is the rest.

idle: the gradients are there without computing, as when a device computes them: the cores are the
    sync's.
busy: forward and backward of one sample, while another thread of each rank trains a second model
    without a pause.

Hosts are network namespaces with a token bucket at both ends of each wire. Needs root, `ip`, `tc`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import ddp_hosts
import torch
import torch.distributed as dist
import virtual_switch
from launching import add_rank_options, die_with_parent
from report import busy_s, header
from torch import nn

PORT = 29561  # as ddp_hosts.launch has it
WIRES = ("fp32", "fp16", "int8")
CORES = ("idle", "busy")
ALLOWED = 0.15
TIMEOUT = timedelta(seconds=120)


def _layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(20)))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)


def _alexnet() -> nn.Module:
    def conv(*shape: int, stride: int = 1, padding: int = 1, pool: bool = False) -> list[nn.Module]:
        made = [nn.Conv2d(*shape, stride=stride, padding=padding), nn.ReLU()]
        return [*made, nn.MaxPool2d(3, 2)] if pool else made

    return nn.Sequential(
        *conv(3, 64, 11, stride=4, padding=2, pool=True),
        *conv(64, 192, 5, padding=2, pool=True),
        *conv(192, 384, 3),
        *conv(384, 256, 3),
        *conv(256, 256, 3, pool=True),
        nn.Flatten(),
        nn.Linear(9216, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 1000),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (_layers, (1, 512)),
    "transformer": (_transformer, (1, 1, 512)),
    "alexnet": (_alexnet, (1, 3, 224, 224)),
}
"""Name: what makes it, and the shape of a batch. 5.3 M parameters in 20 equal layers; 25 M in 8
blocks; 61 M, of which one layer has 38 M."""


class _Prepared(torch.autograd.Function):
    """A loss whose gradients are there already."""

    @staticmethod
    def forward(
        context: Any, gradients: Sequence[torch.Tensor], *parameters: torch.Tensor
    ) -> torch.Tensor:
        context.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> Any:
        return None, *context.gradients


class Model(nn.Module):
    """One of the models, which a device or the cores train."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._gradients = [torch.randn_like(one) for one in inner.parameters()]

    def forward(self, batch: torch.Tensor | None) -> torch.Tensor:
        if batch is not None:
            loss: torch.Tensor = self.inner(batch).square().mean()
            return loss
        made = _Prepared.apply(self._gradients, *self.inner.parameters())  # type: ignore[no-untyped-call]
        prepared: torch.Tensor = made
        return prepared


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Trains a second model meanwhile, in a thread, and reduces nothing."""
    stop, ready = threading.Event(), threading.Event()

    def train() -> None:
        model = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768))
        batch = torch.rand(128, 768)
        while not stop.is_set():
            model.zero_grad()
            model(batch).square().mean().backward()
            ready.set()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    ready.wait(20.0)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def slowest(seconds: float) -> float:
    taken = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def syncs_of(name: str, wire: str) -> dict[str, Any]:
    """Seconds of a sync of one model, with idle and with busy cores."""
    import pycomm

    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = pycomm.DistributedDataParallel(Model(make()), wire_dtype=wire)
    recorder = pycomm.report.Recorder(model)
    torch.manual_seed(dist.get_rank())
    batch = torch.rand(shape)

    def step(batch: torch.Tensor | None) -> None:
        model.zero_grad()
        model(batch).backward()

    def recorded(batch: torch.Tensor | None) -> dict[str, float]:
        dist.barrier()
        done = recorder.record(lambda: step(batch))
        return {"sync": slowest(done.sync_s), "exposed": slowest(done.exposed_s)}

    found: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters())}
    for _ in range(2):  # after the first, buckets are cut anew
        step(batch)
    step(None)
    found["idle"] = recorded(None)
    with busy_cores():
        step(batch)
        found["busy"] = recorded(batch)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One round on one rank."""
    from pycomm.doctor import sync

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], PORT, size, rank == 0, TIMEOUT
    )
    syncs = sync.measure(dist.PrefixStore("doctor", store), rank, size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "pycomm",
        store=dist.PrefixStore("training", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )
    found = {}
    for wire in WIRES:
        one = found[wire] = syncs_of(options.models[0], wire)
        for cores in CORES:
            told = sync.find(syncs, wire, busy=cores == "busy")
            assert told is not None
            one[cores]["predicted"] = told.of(one["parameters"])
    dist.barrier()
    dist.destroy_process_group()
    return found


def rounds_of(
    name: str, argv: Sequence[str], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[float]]:
    """The rounds of one model, and the cores that other programs used in each."""
    rounds: list[dict[str, Any]] = []
    others: list[float] = []
    while len(rounds) < options.rounds:
        begin, before = time.monotonic(), busy_s()
        with virtual_switch.switch(2, options.mbit) as hosts:
            own = [*argv, "--models", name]
            rounds.append(json.loads(ddp_hosts.launch(hosts, own, options.limit, __file__)))
        took = time.monotonic() - begin
        others.append(round((busy_s() - before) / took, 2))
        print(f"{name}: {took:.0f} s, others {others[-1]} cores", file=sys.stderr, flush=True)
    return rounds, others


def table(rounds: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """A row per model, cores and wire, and how many are within the limit."""
    lines = [
        f"{'model':<12}{'M param.':>9} {'cores':<5}{'wire':>5}{'predicted s':>12}{'(range)':>15}"
        f"{'sync s':>8}{'(range)':>15}{'ratio':>7}{'exposed s':>10}"
    ]
    ratios = []
    for name, made in rounds.items():
        for cores in CORES:
            for wire in WIRES:
                found = [one[wire] for one in made]
                numel = found[0]["parameters"]
                told = [one[cores]["predicted"] for one in found]
                took = [one[cores]["sync"] for one in found]
                exposed = statistics.median(one[cores]["exposed"] for one in found)
                ratios.append(statistics.median(told) / statistics.median(took))
                lines.append(
                    f"{name:<12}{numel / 1e6:9.1f} {cores:<5}{wire:>5}"
                    f"{statistics.median(told):12.3f}{_range(told):>15}"
                    f"{statistics.median(took):8.3f}{_range(took):>15}"
                    f"{ratios[-1]:7.2f}{exposed:10.3f}"
                )
    close = sum(abs(ratio - 1.0) <= ALLOWED for ratio in ratios)
    lines.append(f"{close} of {len(ratios)} predictions are within {ALLOWED:.0%} of the sync")
    return lines


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f}-{max(values):.3f}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--models", type=lambda text: text.split(","), default=list(MODELS))
    add("--mbit", type=int, default=1000)
    add("--limit", type=float, default=240.0, help="end a round after so many seconds")
    add("--out", type=Path)
    add_rank_options(parser)
    options = parser.parse_args(argv)
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
        found = measure(options)
        if os.environ["RANK"] == "0":
            os.write(options.results_fd, json.dumps(found).encode())
        return 0
    lines = [f"# {name}: {value}" for name, value in header("doctor_predictions", argv).items()]
    rounds = {}
    for name in options.models:
        rounds[name], others = rounds_of(name, argv, options)
        lines.append(f"# cores that others used, {name}: {others}")
    lines += table(rounds)
    text = "\n".join(lines) + "\n"
    print(text, end="", flush=True)
    if options.out is not None:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
