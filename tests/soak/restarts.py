"""What others take for a killed rank, of the same model on the same host: torchrun and torchft.

    python tests/soak/restarts.py torchrun --kills 20 --every 100
    python tests/soak/restarts.py torchft --kills 20 --python VENV/bin/python
    python tests/soak/restarts.py torchft --kills 20 --backend pycomm

torchrun ends all ranks when one has died and starts them again, from a checkpoint that rank 0 saves
every so many steps. torchft (0.2.0 of PyPI, in VENV) goes on with the others. Each rank is a
replica group, with a lighthouse as its README starts it, over gloo; or over pycomm, which VENV then
has, too, and whose group gets its members by reconfigure(). Beside it: tests/soak/deaths.py
--kills.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch
import torch.distributed as dist
from launching import LOOPBACK, die_with_parent
from report import header
from torch import nn

SAMPLES = 32
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYCOMM_SOCKET_IFNAME": "lo",
    # No backends that torch imports by itself.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    # Else, with torch 2.13, ranks that are started again find the addresses of the dead ones in the
    # store of torchrun, and gloo gives up: "connectFullMesh failed ... Connection refused".
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
START_S = 120.0
STEPS_AFTER = 10
POLL_S = 0.02


class Notes:
    """A line of JSON per event, each by one system call."""

    def __init__(self, folder: str) -> None:
        path = Path(folder) / f"{os.getpid()}.notes"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **line: Any) -> None:
        os.write(self._fd, json.dumps(line | {"at": time.monotonic()}).encode() + b"\n")


class Net(nn.Module):
    """The layers of the model of tests/rig/death_training.py."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(64, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers(inputs)


def loss_of(model: nn.Module, rank: int, step: int, pause_s: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(SAMPLES, 64, generator=generator)
    labels = torch.randint(10, (SAMPLES,), generator=generator)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    time.sleep(pause_s)
    return loss


# --- ranks ----------------------------------------------------------------------------------------


def rank_of_torchrun(options: argparse.Namespace) -> None:
    notes = Notes(options.folder)
    rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    notes.write(kind="begin", rank=rank, pid=os.getpid(), generation=generation)
    dist.init_process_group(options.backend)
    net = Net(options.hidden)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-4)
    step, saved = 0, Path(options.folder) / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved)
        step = state["step"]
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    model = nn.parallel.DistributedDataParallel(net)
    while True:
        optimizer.zero_grad()
        loss_of(model, rank, step, options.pause_s).backward()
        notes.write(kind="step", step=step, generation=generation)
        optimizer.step()
        step += 1
        if step % options.every == 0 and rank == 0:
            state = {"step": step, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, saved.with_suffix(".partial"))
            saved.with_suffix(".partial").rename(saved)


def pycomm_for_torchft(timeout: timedelta) -> Any:
    """A process group for torchft's Manager: one group of pycomm's for all its quorums."""
    from torchft.process_group import ProcessGroup, create_store_client

    import pycomm

    dist.init_process_group(
        "pycomm",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timeout,
        pg_options=pycomm.Reconfigurable(),
    )
    pg = dist.group.WORLD
    assert pg is not None

    class PycommGroup(ProcessGroup):  # type: ignore[misc]  # torchft has no types
        def configure(
            self,
            store_addr: str,
            replica_id: str,
            rank: int,
            world_size: int,
            quorum_id: int,
            *others: Any,
        ) -> None:
            store = create_store_client(store_addr, timeout)
            store.set(f"handle/{rank}", pycomm.reconfigure_handle())
            handles = [store.get(f"handle/{each}").decode() for each in range(world_size)]
            pycomm.reconfigure(quorum_id, handles, timeout=timeout)

        def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
            return pg.allreduce(tensors, opts)

        def size(self) -> int:
            return pg.size()

        def getBackendName(self) -> str:
            return "pycomm"

    return PycommGroup(0, 1)


def rank_of_torchft(options: argparse.Namespace) -> None:
    from torchft import Manager, Optimizer, ProcessGroupGloo

    make_group = pycomm_for_torchft if options.backend == "pycomm" else ProcessGroupGloo
    notes = Notes(options.folder)
    net = Net(options.hidden)
    inner = torch.optim.Adam(net.parameters(), lr=3e-4)

    def load(state: Any) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore(LOOPBACK, 0, 1, True, timedelta(seconds=60))
    manager = Manager(
        pg=make_group(timedelta(seconds=options.timeout_s)),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"rank{options.number}-{os.getpid()}-",
        hostname=LOOPBACK,
    )
    # Not torchft 0.2.0's DistributedDataParallel: when an all_reduce of gloo fails, it raises
    # AssertionError on all survivors (ddp.py, _comm_hook: "assert fut._fut").
    optimizer = Optimizer(manager, inner)
    notes.write(kind="begin", rank=int(options.number), pid=os.getpid(), generation=0)
    while True:
        optimizer.zero_grad()
        step = manager.current_step()
        loss_of(net, int(options.number), step, options.pause_s).backward()
        grads = [each.grad for each in net.parameters()]
        flat = torch.cat([each.flatten() for each in grads])
        manager.allreduce(flat).wait()
        torch._foreach_copy_(grads, [
            part.view_as(each)
            for part, each in zip(flat.split([g.numel() for g in grads]), grads, strict=True)
        ])  # fmt: skip
        before = manager.current_step()
        optimizer.step()
        members = manager.num_participants()
        kind = "step" if manager.current_step() > before else "dropped"
        notes.write(kind=kind, step=before, members=members, generation=0)


def serve_lighthouse(options: argparse.Namespace) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"{LOOPBACK}:0",
        min_replicas=1,
        quorum_tick_ms=100,
        join_timeout_ms=10000,
        heartbeat_timeout_ms=options.heartbeat_ms,
    )
    address = Path(options.folder) / "lighthouse"
    address.with_suffix(".partial").write_text(server.address())
    address.with_suffix(".partial").rename(address)
    signal.pause()


# --- who kills ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Rank:
    """A process, as its notes say."""

    pid: int
    rank: int
    generation: int
    steps: list[tuple[int, float, int]] = dataclasses.field(default_factory=list)
    """Number, end, and how many took part."""
    dropped: int = 0


class Watch:
    """Reads the notes of all processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.ranks: dict[int, Rank] = {}
        self.must_run: list[subprocess.Popen[bytes]] = []

    def read(self) -> None:
        for path in self._folder.glob("*.notes"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.read()
            lines = lines[: lines.rfind(b"\n") + 1]  # a write across two pages shows in two parts
            self._read[path] = self._read.get(path, 0) + len(lines)
            for line in map(json.loads, lines.splitlines()):
                self._take(int(path.stem), line)

    def _take(self, pid: int, line: dict[str, Any]) -> None:
        if line["kind"] == "begin":
            self.ranks[pid] = Rank(pid, line["rank"], line["generation"])
        elif line["kind"] == "step":
            self.ranks[pid].steps.append((line["step"], line["at"], line.get("members", 0)))
        else:
            self.ranks[pid].dropped += 1

    def wait(self, is_so: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline_s = time.monotonic() + limit_s
        while True:
            self.read()
            if is_so():
                return
            ended = [each for each in self.must_run if each.poll() is not None]
            if ended or time.monotonic() > deadline_s:
                said = [
                    f"--- {each.name}\n{each.read_text(errors='replace')[-2000:]}"
                    for each in self._folder.glob("*.err")
                ]
                raise TimeoutError(
                    f"waited {limit_s:g} s for {what}; {len(ended)} processes have ended\n"
                    + "\n".join(said)
                )
            time.sleep(POLL_S)

    def sit(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > until_s, seconds + 30, "")


def start(folder: Path, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.err").open("wb") as err:
        return subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=err,
            stderr=err,
        )


def this_as(role: str, options: argparse.Namespace, folder: Path, *more: str) -> list[str]:
    return [
        *(__file__, options.way, "--role", role, "--folder", str(folder)),
        *("--parent-pid", str(os.getpid()), "--model-mb", str(options.model_mb)),
        *("--pause-ms", str(options.pause_ms), "--every", str(options.every)),
        *("--heartbeat-ms", str(options.heartbeat_ms), "--timeout-s", str(options.timeout_s)),
        *("--backend", options.backend, *more),
    ]


_AGENT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from launching import die_with_parent; "
    "die_with_parent(int(sys.argv[2])); from torch.distributed.run import main; main(sys.argv[3:])"
)


def watch_torchrun(
    options: argparse.Namespace, folder: Path, stack: contextlib.ExitStack
) -> list[str]:
    dice = random.Random(options.seed)
    launching = str(Path(__file__).parents[2] / "benchmarks")
    command = [
        *(options.python, "-c", _AGENT, launching, str(os.getpid()), "--standalone"),
        *(f"--nproc-per-node={options.ranks}", f"--max-restarts={options.kills}"),
        *this_as("rank", options, folder),
    ]
    watch = Watch(folder)
    watch.must_run.append(start(folder, "torchrun", command))
    stack.callback(end, watch.must_run[0])

    def train(generation: int, until: int) -> list[Rank]:
        """Waits until the ranks of a restart have ended this step, and some more."""
        ranks: list[Rank] = []

        def is_so() -> bool:
            ranks[:] = [each for each in watch.ranks.values() if each.generation == generation]
            return len(ranks) == options.ranks and all(
                len(each.steps) > STEPS_AFTER and each.steps[-1][0] > until for each in ranks
            )

        watch.wait(is_so, START_S, f"restart {generation} to end step {until}")
        return ranks

    first, back, again = [], [], []
    ranks = train(0, 0)
    for kill in range(options.kills):
        watch.sit(dice.uniform(1.0, 3.0))
        killed_s = time.monotonic()
        os.kill(dice.choice(ranks).pid, signal.SIGKILL)
        watch.sit(0.5)
        reached = max(each.steps[-1][0] for each in ranks)
        ranks = train(kill + 1, reached)
        first.append(max(each.steps[0][1] for each in ranks) - killed_s)
        ends = [next(at for step, at, _ in each.steps if step > reached) for each in ranks]
        back.append(max(ends) - killed_s)
        again.append(reached + 1 - ranks[0].steps[0][0])
    return [
        row("SIGKILL to the end of the first step after it, on all", first),
        row("SIGKILL to the end of the step that was under way, on all", back),
        f"steps trained again per kill: median {statistics.median(again):g}, most {max(again)}; "
        f"a checkpoint every {options.every} steps",
    ]


def watch_torchft(
    options: argparse.Namespace, folder: Path, stack: contextlib.ExitStack
) -> list[str]:
    dice = random.Random(options.seed)
    light = start(folder, "lighthouse", [options.python, *this_as("lighthouse", options, folder)])
    stack.callback(end, light)
    watch = Watch(folder)
    watch.must_run.append(light)
    address = folder / "lighthouse"
    watch.wait(address.exists, START_S, "the lighthouse")
    processes: dict[int, subprocess.Popen[bytes]] = {}

    def begin(number: int) -> None:
        more = ["--lighthouse", address.read_text(), "--number", str(number)]
        command = [options.python, *this_as("rank", options, folder, *more)]
        started = start(folder, f"rank{number}-{len(processes)}", command)
        processes[started.pid] = started
        watch.must_run.append(started)
        stack.callback(end, started)

    for number in range(options.ranks):
        begin(number)

    def whole(count: int) -> Callable[[], bool]:
        def is_so() -> bool:
            alive = [r for pid, r in watch.ranks.items() if processes[pid].poll() is None]
            return len(alive) == options.ranks and all(
                len(r.steps) >= count and all(n == options.ranks for *_, n in r.steps[-count:])
                for r in alive
            )

        return is_so

    goes_on, dropped = [], []
    for _ in range(options.kills):
        watch.wait(whole(STEPS_AFTER), START_S, "all ranks in one group")
        watch.sit(dice.uniform(0.2, 0.5))
        alive = [r for pid, r in watch.ranks.items() if processes[pid].poll() is None]
        victim = dice.choice(alive)
        others = [each for each in alive if each is not victim]
        before = sum(each.dropped for each in others)
        killed_s = time.monotonic()
        watch.must_run.remove(processes[victim.pid])
        processes[victim.pid].kill()

        def without() -> bool:
            return all(each.steps[-1][2] < options.ranks for each in others)  # noqa: B023

        watch.wait(without, START_S, "a step without it")
        ends = [
            next(at for _, at, n in each.steps if at > killed_s and n < options.ranks)
            for each in others
        ]
        goes_on.append(max(ends) - killed_s)
        dropped.append((sum(each.dropped for each in others) - before) / len(others))
        begin(victim.rank)
    watch.wait(whole(STEPS_AFTER), START_S, "all ranks in one group")
    return [
        row("SIGKILL to the end of the first step without it, on all", goes_on),
        f"steps dropped by the others per kill: mean {statistics.mean(dropped):.2f}",
    ]


def row(name: str, seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    cells = f"{statistics.median(ordered):.2f} p99 {p99:.2f} max {ordered[-1]:.2f}"
    return f"{name}, {len(ordered)} kills, seconds: p50 {cells}"


def end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks when it is asked to end."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("torchrun", "torchft"))
    parser.add_argument("--backend", choices=("gloo", "pycomm"), default="gloo")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model-mb", type=float, default=1.0)
    parser.add_argument("--pause-ms", type=float, default=2.0)
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--python", default=sys.executable, help="of an environment with torchft")
    parser.add_argument(
        "--heartbeat-ms",
        type=int,
        default=5000,
        help="of torchft's lighthouse",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=10.0, help="torchft: the timeout of its all_reduce"
    )
    parser.add_argument("--seed", type=int, default=0)
    for name in ("--role", "--folder", "--lighthouse", "--number", "--parent-pid"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.hidden = max(64, round((options.model_mb * 2**18 + 37.5**2) ** 0.5 - 37.5))
    options.pause_s = options.pause_ms / 1000
    return as_part(options) if options.role else measure(options, argv)


def as_part(options: argparse.Namespace) -> int:
    # torchrun's ranks are children of its own, and end with that.
    of_torchrun = options.way == "torchrun" and options.role == "rank"
    die_with_parent(os.getppid() if of_torchrun else int(options.parent_pid))
    torch.set_num_threads(1)
    if options.backend == "pycomm":
        import pycomm  # noqa: F401  registers the backend
    if options.role == "lighthouse":
        serve_lighthouse(options)
    elif of_torchrun:
        rank_of_torchrun(options)
    else:
        rank_of_torchft(options)
    return 0


def measure(options: argparse.Namespace, argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    facts = header("restarts", argv)
    facts["command"] = " ".join(["python", "tests/soak/restarts.py", *argv])
    folder = Path(tempfile.mkdtemp(prefix="pycomm-restarts-"))
    with contextlib.ExitStack() as stack:
        watch = watch_torchrun if options.way == "torchrun" else watch_torchft
        lines = watch(options, folder, stack)
    facts["load_at_end"] = round(os.getloadavg()[0], 2)
    print("\n".join([*(f"{name}: {value}" for name, value in facts.items()), *lines]))
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
