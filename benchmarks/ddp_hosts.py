"""Time training steps between hosts: `python benchmarks/ddp_hosts.py --help`.

    python benchmarks/ddp_hosts.py --hosts 2 --model layers       # cores that compute, 1 Gbit/s
    python benchmarks/ddp_hosts.py --hosts 2 --model device       # cores that are free meanwhile
    python benchmarks/ddp_hosts.py --hosts 4 --model large --alone --sync-every 1,4,16
    python benchmarks/ddp_hosts.py --hosts 2 --model layers --mbit 0    # loopback, no namespaces
    python benchmarks/ddp_hosts.py --rounds 1 --picture step.svg        # one step, drawn

A way is WRAPPER[:CODEC][@MIB][#WIRE][/EVERY]. WRAPPER: "gloo" is torch's wrapper over gloo, "torch"
is torch's over pycomm, "pycomm" is ours, "closed" is ours over a group with a secret, so that its
bytes are encrypted, "no_sync" is ours sending nothing. CODEC is the group's wire dtype ("torch"
only, as our wrapper does not use it). MIB is `bucket_cap_mb`; without it each wrapper has its own
default (torch's 25, ours 4). WIRE is the wrapper's wire dtype; torch's wrapper has a hook for
"fp16". EVERY is `sync_every`.

Each host is a network namespace behind a switch of `--mbit`. All ways of training live in the same
processes and take turns, a step each, forwards and backwards, so that whatever else the machine
does falls on all. `--alone` makes one after the other, where memory would not hold all of them.

The bound is computed from what this run measured: when each gradient exists in a step that sends
nothing, the speed of a plain socket, and the bytes of the way. After the last round each way's
gradients are compared with the average of those that the ranks compute alone.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import closed_group
import ddp_models
import numpy as np
import torch
import torch.distributed as dist
import virtual_switch
from launching import LOOPBACK, add_rank_options, die_with_parent
from report import header, paired_ratio
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

WAYS = [
    "no_sync",
    "gloo",
    "gloo@4",
    "gloo@4#fp16",
    "torch@4",
    "pycomm",
    "pycomm#fp16",
    "pycomm#int8",
]
WIRE_BYTES = {"": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 258 / 1024}
# Of the largest gradient on any rank: each rank's and the sum's rounding, twice with feedback.
TOLERANCE = {"": 1e-5, "fp16": 2e-3, "bf16": 1.6e-2, "int8": 1.6e-2}
TIMEOUT_S = 300


class Way:
    """One model, wrapped in one way."""

    def __init__(self, name: str, model: str, plain: torch.nn.Module, groups: Any, rank: int):
        rest, _, every = name.partition("/")
        rest, _, wire = rest.partition("#")
        wrapper, _, cap = rest.partition("@")
        wrapper, _, codec = wrapper.partition(":")
        buckets = {"bucket_cap_mb": int(cap)} if cap else {}
        self.name, self.wire, self.rank, self.model_name = name, wire or codec, rank, model
        self.every = int(every or 1)
        module = copy.deepcopy(plain)
        group = groups[wrapper if wrapper in ("gloo", "closed") else "pycomm"]
        if codec:
            import pycomm

            group = dist.new_group(backend="pycomm", pg_options=pycomm.Options(wire_dtype=codec))
        self.syncs = wrapper != "no_sync"
        if wrapper in ("gloo", "torch"):
            self.model: Any = TorchDDP(
                module, process_group=group, gradient_as_bucket_view=True, **buckets
            )
            if wire == "fp16":
                self.model.register_comm_hook(group, default_hooks.fp16_compress_hook)
        else:
            import pycomm

            # Hosts average parameters in the step that is one of so many.
            self.model = pycomm.DistributedDataParallel(
                module,
                process_group=group,
                wire_dtype=wire or None,
                sync_every=self.every,
                **buckets,
            )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.batch = ddp_models.batch_of(model, 0, rank)
        self.times: list[float] = []

    def run(self) -> None:
        self.optimizer.zero_grad()
        with contextlib.nullcontext() if self.syncs else self.model.no_sync():
            self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def exposed(self) -> float | None:
        return self.model.stats().exposed_seconds if hasattr(self.model, "stats") else None

    def wrong(self, expected: Sequence[torch.Tensor], largest: float) -> float:
        """The largest error, as a part of the largest gradient."""
        self.run()
        pairs = zip(self.model.parameters(), expected, strict=True)
        return max(float((mine.grad - other).abs().max()) for mine, other in pairs) / largest


def wire_speed(group: dist.ProcessGroup, rank: int, mine: str) -> float:
    """Bytes a second of one plain connection from rank 1 to rank 0, the best of three.

    The bound stands on it, so a moment in which the machine does something else must not count.
    """
    nbytes = 24 << 20
    where: list[Any] = [None]
    if rank == 0:
        listener = socket.create_server((mine, 0))
        where = [listener.getsockname()]
    dist.broadcast_object_list(where, 0, group=group)
    seconds = torch.full((3,), torch.inf)
    for attempt in range(len(seconds)):
        if rank == 0:
            peer, _ = listener.accept()
            begin, got = time.perf_counter(), 0
            peer.sendall(b"!")  # nothing is on its way before
            while chunk := peer.recv(1 << 18):
                got += len(chunk)
            seconds[attempt] = time.perf_counter() - begin
            assert got == nbytes
        elif rank == 1:
            with socket.create_connection(where[0]) as peer:
                peer.recv(1)
                peer.sendall(bytes(nbytes))
    dist.broadcast(seconds, 0, group=group)
    return nbytes / float(seconds.min())


def averages(
    name: str, plain: torch.nn.Module, group: Any, rank: int
) -> tuple[list[torch.Tensor], float]:
    """What gradients should be: each rank's own, averaged by gloo. And the largest of all ranks."""
    alone = copy.deepcopy(plain)
    alone(ddp_models.batch_of(name, 0, rank)).square().mean().backward()
    found = []
    largest = torch.zeros(1)
    for parameter in alone.parameters():
        assert parameter.grad is not None
        largest = torch.maximum(largest, parameter.grad.abs().max())
        dist.all_reduce(parameter.grad, group=group)
        found.append(parameter.grad / dist.get_world_size(group))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return found, float(largest)


class Rank:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rank = options, int(os.environ["RANK"])
        torch.manual_seed(0)
        dist.init_process_group("gloo")
        self.size = dist.get_world_size()
        ours = dist.new_group(backend="pycomm")
        self.groups = {"gloo": dist.group.WORLD, "pycomm": ours}
        if any(name.startswith("closed") for name in options.ways):
            agreed = [closed_group.new_secret() if self.rank == 0 else ""]
            dist.broadcast_object_list(agreed, 0)
            with closed_group.secret(agreed[0]):
                self.groups["closed"] = dist.new_group(backend="pycomm")
        self.plain = ddp_models.MODELS[options.model][0]()
        self.speed = wire_speed(dist.group.WORLD, self.rank, os.environ["BENCH_ADDRESS"])
        self.expected, self.largest = averages(
            options.model, self.plain, dist.group.WORLD, self.rank
        )

    def make(self, name: str) -> Way:
        return Way(name, self.options.model, self.plain, self.groups, self.rank)

    def step(self, way: Way) -> float:
        dist.barrier()
        begin = time.perf_counter()
        way.run()
        return time.perf_counter() - begin

    def measure(self, ways: Sequence[Way]) -> list[dict[str, Any]]:
        for way in ways:
            for _ in range(2):  # after the first, buckets are cut anew
                self.step(way)
        before = {way.name: (way.exposed(), time.process_time()) for way in ways}
        cpu = dict.fromkeys(before, 0.0)
        for turn in range(self.options.rounds):
            for way in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
                for _ in range(way.every):  # whole cycles: one sync in each
                    begin = time.process_time()
                    way.times.append(self.step(way))
                    cpu[way.name] += time.process_time() - begin
        return [self.row(way, before[way.name][0], cpu[way.name]) for way in ways]

    def row(self, way: Way, exposed: float | None, cpu_s: float) -> dict[str, Any]:
        now = way.exposed()
        waited = None
        if now is not None and exposed is not None and way.syncs:
            waited = (now - exposed) / len(way.times)
        slowest = torch.tensor(way.times)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        compared = way.syncs and way.every == 1
        wrong = torch.tensor([way.wrong(self.expected, self.largest) if compared else 0.0])
        dist.all_reduce(wrong, dist.ReduceOp.MAX)
        cycles = slowest.view(-1, way.every).mean(1).tolist()
        return {
            "way": way.name,
            "steps_s": cycles,
            "p50_s": float(np.median(cycles)),
            "exposed_s": waited,
            "cpu_s": cpu_s / len(way.times),
            "error": float(wrong),
            "allowed": TOLERANCE[way.wire],
            "factor": WIRE_BYTES[way.wire] * 2 * (self.size - 1) / self.size / way.every,
        }

    def table(self) -> list[dict[str, Any]]:
        if not self.options.alone:
            rows = self.measure([self.make(name) for name in self.options.ways])
        else:
            rows = [self.measure([self.make(name)])[0] for name in self.options.ways]
        silent = self.make("no_sync")
        self.step(silent)
        dist.barrier()
        came, forward, end = ddp_models.arrivals(silent.model, silent.run)
        backward = came[-1][0] - forward
        quiet = next((row["p50_s"] for row in rows if row["way"] == "no_sync"), end)
        nbytes = sum(nbytes for _, nbytes in came)
        for row in rows:
            sends = row["factor"] if row["way"] != "no_sync" else 0.0
            row["bound_s"] = ddp_models.bound(
                [(at * quiet / end, size) for at, size in came], quiet, self.speed, sends
            )
            alone = nbytes * sends / self.speed
            hidden = quiet + alone - row["p50_s"]
            row["overlap"] = hidden / min(alone, backward) if sends else None
            row["over_quiet_s"] = row["p50_s"] - quiet if sends else None
            row["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return rows

    def draw(self, path: Path) -> None:
        """One step of each way under each other: see pycomm.report."""
        import pycomm

        steps = {}
        names = {"gloo": "torch + gloo", "pycomm": "pycomm", "pycomm#int8": "pycomm, int8"}
        for name, shown in names.items():
            way = self.make(name)
            recorder = pycomm.report.Recorder(way.model)
            for _ in range(3):
                self.step(way)
            dist.barrier()
            steps[shown] = recorder.record(way.run)
        if self.rank == 0:
            pycomm.report.write(path, steps)


def print_table(rows: list[dict[str, Any]], facts: dict[str, Any], beside: str) -> int:
    for name, value in facts.items():
        print(f"# {name}: {value}")
    columns = f"{'way':<16}{'step s':>8}{'bound s':>9}{'/bound':>8}{'overlap':>9}"
    columns += f"{'-no_sync s':>11}{'counted s':>11}"  # the step less no_sync's; as stats() counts
    print(columns + f"{'cpu s':>7}{'error':>9}  {beside}'s step by this one's [95 %]")
    base = next((row["steps_s"] for row in rows if row["way"] == beside), None)
    for row in rows:
        over = row["p50_s"] / row["bound_s"]
        text = f"{row['way']:<16}{row['p50_s']:8.3f}{row['bound_s']:9.3f}{over:8.2f}"
        for name, width in (("overlap", 9), ("over_quiet_s", 11), ("exposed_s", 11)):
            value = row[name]
            text += f"{'':>{width}}" if value is None else f"{value:{width}.3f}"
        text += f"{row['cpu_s']:7.2f}{row['error']:9.1e}"
        if base is not None and row["way"] != beside and len(base) == len(row["steps_s"]):
            against = paired_ratio(beside, row["steps_s"], base)
            row[f"{beside}_over_this"] = [against.ratio, against.low, against.high]
            text += f"  {against.ratio:.3f} [{against.low:.3f}, {against.high:.3f}]"
        print(text)
    bad = [row["way"] for row in rows if not row["error"] <= row["allowed"]]
    if bad:
        print(f"wrong gradients: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def launch(
    hosts: Sequence[virtual_switch.Host | None],
    argv: Sequence[str],
    limit_s: float,
    script: str = __file__,
) -> bytes:
    """One rank a host; what rank 0 reports."""
    read_fd, write_fd = os.pipe()
    ranks: list[subprocess.Popen[bytes]] = []
    first = hosts[0].address if hosts[0] is not None else LOOPBACK
    try:
        for rank, host in enumerate(hosts):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(len(hosts)))
            env |= {"MASTER_ADDR": first, "MASTER_PORT": "29561", "OMP_NUM_THREADS": "1"}
            env["GLOO_SOCKET_IFNAME"] = "eth0" if host is not None else "lo"
            env["BENCH_ADDRESS"] = host.address if host is not None else LOOPBACK
            inner = [sys.executable, script, *argv, "--parent-pid", str(os.getpid())]
            inner += ["--results-fd", str(write_fd)]
            command = host.command(*inner) if host is not None else inner
            ranks.append(subprocess.Popen(command, env=env, pass_fds=[write_fd]))
        os.close(write_fd)
        write_fd = -1
        deadline = time.monotonic() + limit_s
        with os.fdopen(read_fd, "rb") as reports:
            read_fd = -1
            while any(rank.poll() is None for rank in ranks):
                failed = [number for number, rank in enumerate(ranks) if rank.poll()]
                if failed or time.monotonic() > deadline:
                    what = f"ranks {failed} failed" if failed else f"not done in {limit_s:.0f} s"
                    raise SystemExit(f"{what}; --limit says how long it may take")
                time.sleep(0.1)
            if any(rank.returncode for rank in ranks):
                raise SystemExit("a rank failed; its own message is above")
            return reports.read()
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
        for fd in (read_fd, write_fd):
            if fd >= 0:
                os.close(fd)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--hosts", type=int, default=2)
    add("--model", choices=list(ddp_models.MODELS), default="layers")
    add("--mbit", type=int, default=1000, help="0: loopback, without namespaces")
    add("--rounds", type=int, default=10, help="a step of each way, in turn")
    add("--ways", type=lambda text: text.split(","), default=WAYS, help=f"default: {WAYS}")
    add("--beside", default="gloo", help="the way that the others are compared with")
    add("--sync-every", help="such as 1,4: pycomm's ways with each of these")
    add("--alone", action="store_true", help="make one way after the other")
    add("--limit", type=float, default=600.0, help="end after so many seconds")
    add("--json", type=Path)
    add("--picture", type=Path, help="one step of gloo and of pycomm under each other, as SVG")
    add_rank_options(parser)
    options = parser.parse_args(argv)
    if plain := [way for way in options.ways if way.startswith("closed:")]:
        parser.error(f"{', '.join(plain)}: a group with a codec of its own has no secret here")
    if unused := [way for way in options.ways if way.startswith("pycomm:")]:
        parser.error(f"{', '.join(unused)}: our wrapper does not use a group's codec; try torch:")
    if options.beside not in ("gloo", *options.ways):
        parser.error(f"--beside {options.beside}: it is none of the ways")
    if options.sync_every:
        ours = [way for way in options.ways if way.startswith("pycomm")]
        every = [number for number in options.sync_every.split(",") if number != "1"]
        many = [f"{way}{'' if '#' in way else '#'}/{number}" for number in every for way in ours]
        options.ways = [*options.ways, *many]
    return options


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
        rank = Rank(options)
        rows = rank.table()
        if options.picture is not None:
            rank.draw(options.picture)
        if rank.rank == 0:
            found = {"rows": rows, "wire_mbit": rank.speed * 8e-6}
            os.write(options.results_fd, json.dumps(found).encode())
        dist.barrier()
        dist.destroy_process_group()
        return 0
    with contextlib.ExitStack() as stack:
        hosts: Sequence[virtual_switch.Host | None] = [None] * options.hosts
        if options.mbit > 0:
            hosts = stack.enter_context(virtual_switch.switch(options.hosts, options.mbit))
        found = json.loads(launch(hosts, argv, options.limit))
    facts = header("ddp_hosts", argv) | {"one plain connection, Mbit/s": round(found["wire_mbit"])}
    code = print_table(found["rows"], facts, options.beside)
    if options.json is not None:
        options.json.write_text(json.dumps({"facts": facts, "rows": found["rows"]}, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
