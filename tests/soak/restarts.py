"""What others take for a rank's fault, of the same model on the same host: torchrun and torchft.

    python tests/soak/restarts.py torchrun --kills 20 --every 100
    python tests/soak/restarts.py torchft --kills 20 --python VENV/bin/python
    python tests/soak/restarts.py torchft --kills 20 --backend pycomm
    python tests/soak/restarts.py torchrun --kills 5 --kind kill,stop,term --out torchrun.txt

torchrun ends all ranks when one has died and starts them again, from a checkpoint that rank 0 saves
every so many steps. torchft (0.2.0 of PyPI, in VENV) goes on with the others. Each rank is a
replica group, with a lighthouse as its README starts it, over gloo; or over pycomm, which VENV then
has, too, and whose group gets its members by reconfigure().

The kinds of faults are those of tests/soak/deaths.py on one host: SIGKILL, SIGSTOP and SIGTERM to
one rank. A stopped rank stays so until the others go on without it, and is then killed; torchrun
does that, 30 s after its SIGTERM. gloo notices it by --timeout-s, pycomm by its heartbeat_timeout
of 3 s, as in deaths.py, and torchft's lighthouse by --heartbeat-ms. Beside it: deaths.py --kills,
and --only SIGSTOP.
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
from collections.abc import Callable, Mapping, Sequence
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
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
START_S = 120.0
AGENT_KILLS_S = 30.0
"""How long torchrun waits after a rank's SIGTERM."""
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
    # A group of its own for the timeout: that of the first one is also for ranks that start late.
    group = dist.new_group(timeout=timedelta(seconds=options.timeout_s))
    model = nn.parallel.DistributedDataParallel(net, process_group=group)
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


# --- faults ---------------------------------------------------------------------------------------


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
    kinds = planned(options, dice)
    launching = str(Path(__file__).parents[2] / "benchmarks")
    command = [
        *(options.python, "-c", _AGENT, launching, str(os.getpid()), "--standalone"),
        *(f"--nproc-per-node={options.ranks}", f"--max-restarts={len(kinds)}"),
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

        limit_s = START_S + options.timeout_s + AGENT_KILLS_S
        watch.wait(is_so, limit_s, f"restart {generation} to end step {until}")
        return ranks

    first, back, again = by_kind(options), by_kind(options), by_kind(options)
    ranks = train(0, 0)
    for number, kind in enumerate(kinds):
        watch.sit(dice.uniform(1.0, 3.0))
        struck_s = time.monotonic()
        os.kill(dice.choice(ranks).pid, SIGNALS[kind])
        watch.sit(0.5)
        reached = max(each.steps[-1][0] for each in ranks)
        ranks = train(number + 1, reached)
        first[kind].append(max(each.steps[0][1] for each in ranks) - struck_s)
        ends = [next(at for step, at, _ in each.steps if step > reached) for each in ranks]
        back[kind].append(max(ends) - struck_s)
        again[kind].append(reached + 1 - ranks[0].steps[0][0])
    return [
        *rows("to the end of the first step after it, on all, seconds", first),
        *rows("to the end of the step that was under way, on all, seconds", back),
        *rows(f"steps trained again, with a checkpoint every {options.every} steps", again),
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

    goes_on, dropped = by_kind(options), by_kind(options)
    for kind in planned(options, dice):
        watch.wait(whole(STEPS_AFTER), START_S, "all ranks in one group")
        watch.sit(dice.uniform(0.2, 0.5))
        alive = [r for pid, r in watch.ranks.items() if processes[pid].poll() is None]
        victim = dice.choice(alive)
        others = [each for each in alive if each is not victim]
        before = sum(each.dropped for each in others)
        watch.must_run.remove(processes[victim.pid])
        struck_s = time.monotonic()
        processes[victim.pid].send_signal(SIGNALS[kind])

        def without() -> bool:
            return all(each.steps[-1][2] < options.ranks for each in others)  # noqa: B023

        watch.wait(without, START_S, "a step without it")
        ends = [
            next(at for _, at, n in each.steps if at > struck_s and n < options.ranks)
            for each in others
        ]
        goes_on[kind].append(max(ends) - struck_s)
        dropped[kind].append((sum(each.dropped for each in others) - before) / len(others))
        processes[victim.pid].kill()  # if it was stopped
        begin(victim.rank)
    watch.wait(whole(STEPS_AFTER), START_S, "all ranks in one group")
    return [
        *rows("to the end of the first step without it, on all, seconds", goes_on),
        *rows("steps dropped by each of the others", dropped),
    ]


def planned(options: argparse.Namespace, dice: random.Random) -> list[str]:
    """As many faults of each kind, in rounds of all kinds."""
    kinds: list[str] = options.kind
    return [kind for _ in range(options.kills) for kind in dice.sample(kinds, len(kinds))]


def by_kind(options: argparse.Namespace) -> dict[str, list[float]]:
    return {kind: [] for kind in options.kind}


def rows(what: str, values: Mapping[str, Sequence[float]]) -> list[str]:
    """A line per kind."""
    return [
        f"{SIGNALS[kind].name}, {what}: {len(mine)} faults, "
        f"p50 {statistics.median(mine):.2f} max {max(mine):.2f}"
        for kind, mine in values.items()
    ]


def end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks when it is asked to end."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def kinds_of(text: str) -> list[str]:
    kinds = list(dict.fromkeys(text.split(",")))
    if unknown := set(kinds) - set(SIGNALS):
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))}: the kinds are {', '.join(SIGNALS)}"
        )
    return kinds


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("torchrun", "torchft"))
    parser.add_argument("--backend", choices=("gloo", "pycomm"), default="gloo")
    parser.add_argument("--kills", type=int, default=10, help="faults of each kind")
    parser.add_argument("--kind", type=kinds_of, default="kill", help="some of kill, stop, term")
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
        "--timeout-s", type=float, default=10.0, help="of an all_reduce, with which steps sum"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the table")
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


_VERSIONS = """
from importlib.metadata import distributions
names = ("torch", "torchft", "torch-pycomm")
print(*sorted({f"{d.name} {d.version}" for d in distributions() if d.name in names}), sep=", ")
"""


def measure(options: argparse.Namespace, argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    facts = header("restarts", argv)
    facts["command"] = " ".join(["python", "tests/soak/restarts.py", *argv])
    asked = [options.python, "-c", _VERSIONS]
    found = subprocess.run(asked, capture_output=True, text=True, check=True)
    facts["ranks_have"] = found.stdout.strip()
    folder = Path(tempfile.mkdtemp(prefix="pycomm-restarts-"))
    with contextlib.ExitStack() as stack:
        watch = watch_torchrun if options.way == "torchrun" else watch_torchft
        lines = watch(options, folder, stack)
    facts["load_at_end"] = round(os.getloadavg()[0], 2)
    text = "\n".join([*(f"{name}: {value}" for name, value in facts.items()), *lines])
    print(text, flush=True)
    if options.out is not None:
        options.out.write_text(text + "\n")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
