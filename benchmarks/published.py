"""Measure again most of what README and docs/status.md publish, one results file for each topic.

    python benchmarks/published.py --list    # topics, minutes, commands
    python benchmarks/published.py           # all of them, on an idle machine, as root
    python benchmarks/published.py allreduce-loopback ddp-hosts

Each topic's tables go to build/published/TOPIC-DATE.txt as they come, and into benchmarks/results
at the end of the run: a new file there would make the next header say that the tree has changes.
A second file of one topic and day is TOPIC-DATEb.txt: none is overwritten. A command that fails is
named in the file and at the end; the others run, and the topic's file stays in build/published. A
tree with changes is refused: figures belong to a commit.

Each topic begins when the load of the last minute is below 0.3, or after ten minutes: then its
header says so. All of it took some 50 minutes on 2 cores, without these waits; the minutes of a
topic are an upper estimate.

Not here, each with commands of its own in its file or in benchmarks/README.md: the rows of a
machine with 4 cores (the same commands, there), two builds beside each other, the soak programs at
larger sizes, the fault matrix, fuzzing, the wheel, a GPU's figures, torch's own
suite, quality over five seeds, the time to a loss, the links in shared memory, the identifier map
and TorchRec's step, and the parameter service.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import shlex
import shutil
import string
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from report import busy_s, header, text_facts

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
SWITCH = "benchmarks/switch.py --hosts"
CODECS = "pycomm,pycomm:fp16,pycomm:int8,gloo,raw"
QUIET_LOAD = 0.3
QUIET_WAIT_S, LOOK_S = 600.0, 10.0


@dataclasses.dataclass(frozen=True)
class Topic:
    """The commands, without "python", whose output is one results file."""

    name: str
    minutes: int
    """About how long they take on 2 cores. Each command is ended after four times as long."""
    commands: tuple[str, ...]


TOPICS = [
    Topic(
        "allreduce-loopback",
        13,
        (
            "benchmarks/allreduce.py --backends pycomm,pycomm:arena,pycomm:tcp,deepspeed,gloo,raw "
            "--ranks 2,4 --sizes 4,4K,1M,25M,100M --seconds 0.3 --blocks 8",
            "benchmarks/allreduce.py --backends pycomm,pycomm:tcp,gloo,openmpi:shm,openmpi "
            "--ranks 2,4 --sizes 4,4K,1M,25M --seconds 0.3 --blocks 8 --timeout 400",
            "benchmarks/allreduce.py --backends pycomm,torch_floor,gloo "
            "--ranks 2 --sizes 4,4K --seconds 0.3 --blocks 8",
        ),
    ),
    Topic(
        "allreduce-hosts",
        12,
        (
            f"{SWITCH} 0,1 --iperf -- allreduce.py --backends {CODECS} "
            "--sizes 4,4K,1M,25M,250000000 --blocks 4",
            f"{SWITCH} 0,1,2,3 -- allreduce.py --backends {CODECS} --sizes 4,4K,1M,25M --blocks 4",
            f"{SWITCH} 0,0,1,1 -- allreduce.py --backends pycomm,gloo --sizes 4K,25M --blocks 4",
            f"{SWITCH} 0,1,0,1 -- allreduce.py --backends pycomm,gloo --sizes 4K,25M --blocks 4",
            f"{SWITCH} 0,1 --mbit 10000 --iperf -- allreduce.py "
            f"--backends {CODECS} --sizes 4K,1M,25M --blocks 5",
        ),
    ),
    Topic(
        "ddp-hosts",
        25,
        (
            "benchmarks/ddp_hosts.py --hosts 2 --model layers --rounds 8",
            "benchmarks/ddp_hosts.py --hosts 2 --model device --rounds 8",
            "benchmarks/ddp_hosts.py --hosts 4 --model device --rounds 6",
            "benchmarks/ddp_hosts.py --hosts 2 --model layers --mbit 10000 --rounds 8",
            "benchmarks/ddp_hosts.py --hosts 2 --model layers --mbit 0 --rounds 12",
        ),
    ),
    Topic("ddp-memory", 4, ("benchmarks/ddp_memory.py",)),
    Topic("footprint", 4, ("benchmarks/footprint.py --ranks 4,16",)),
    Topic(
        "collectives",
        14,
        tuple(
            f"benchmarks/collectives.py --ranks {ranks} --backends pycomm,pycomm:tcp,gloo "
            "--sizes 4K,25M --blocks 3 --seconds 0.3 --timeout 400"
            for ranks in (2, 4)
        ),
    ),
    Topic(
        "selection",
        6,
        tuple(
            f"{SWITCH} {hosts} -- allreduce.py --backends "
            "pycomm,pycomm:ring,pycomm:recursive_doubling,pycomm:direct,pycomm:hierarchical "
            "--sizes 4,4K,64K,1M,16M --seconds 0.25 --blocks 5"
            for hosts in ("0,1,2,3", "0,1,0,1")
        ),
    ),
    Topic(
        "messages-ahead", 3, ("benchmarks/messages_ahead.py --messages 1000000 --sizes 0,4,256",)
    ),
    Topic(
        "outer-hosts",
        4,
        (
            f"{SWITCH} 0,1 -- outer_hosts.py --rounds 4 "
            "--methods diloco,streaming:parts=4:tau=8:wire=int8",
        ),
    ),
    Topic(
        "security-cost",
        8,
        (
            "benchmarks/security_cost.py",
            "benchmarks/allreduce.py --backends pycomm:tcp,pycomm:tls --ranks 2 "
            "--sizes 4,4K,1M,25M",
        ),
    ),
    Topic(
        "soak",
        8,
        (
            "tests/soak/kill.py --kills 200 --seed 5",
            "tests/soak/leaks.py --kills 200",
            "tests/soak/exits.py 50",
        ),
    ),
    Topic("metrics-cost", 3, ("benchmarks/metrics_cost.py",)),
    Topic("preflight", 2, ("benchmarks/preflight.py",)),
    Topic("doctor-predictions", 7, ("benchmarks/doctor_predictions.py",)),
]


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def load() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


def wait_until_quiet() -> str:
    """Waits for a load below QUIET_LOAD, at most QUIET_WAIT_S; returns the header's words."""
    waited_s = 0.0
    while (last := load()) >= QUIET_LOAD:
        if waited_s >= QUIET_WAIT_S:
            return f"{last:.2f} (not below {QUIET_LOAD:g} in {waited_s:g} s)"
        time.sleep(LOOK_S)
        waited_s += LOOK_S
    return f"{last:.2f}"


def measure(topic: Topic, into: Path) -> list[str]:
    """Runs the commands of a topic; returns those that failed."""
    failed = []
    with into.open("x") as file:
        facts = header(topic.name, [topic.name]) | {"load_at_start": wait_until_quiet()}
        print(text_facts(facts), end="\n\n", file=file, flush=True)
        for command in topic.commands:
            print(f"$ python {command}", file=file, flush=True)
            begin, busy = time.monotonic(), busy_s()
            limit = [shutil.which("timeout") or "timeout", str(4 * 60 * topic.minutes)]
            done = subprocess.run(
                [*limit, sys.executable, *shlex.split(command)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
            took = time.monotonic() - begin
            others = max(0.0, (busy_s() - busy) / took)
            print(f"# it took {took:.0f} s; others used {others:.2f} cores", file=file, flush=True)
            if done.returncode != 0:
                failed.append(command)
                print(f"# FAILED ({done.returncode})\n{done.stderr[-2000:]}", file=file, flush=True)
            print(file=file)
    return failed


def unused(topic: Topic, today: str, folders: Sequence[Path]) -> str:
    """The name of a file that is in none of the folders: TOPIC-DATE.txt, TOPIC-DATEb.txt, ..."""
    for letter in ["", *string.ascii_lowercase[1:]]:
        name = f"{topic.name}-{today}{letter}.txt"
        if not any((folder / name).exists() for folder in folders):
            return name
    raise FileExistsError(f"{topic.name} has been measured 26 times on {today}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("topics", nargs="*", help="default: all")
    parser.add_argument("--list", action="store_true", help="show topics and commands, run nothing")
    options = parser.parse_args()
    known = {topic.name: topic for topic in TOPICS}
    for name in options.topics:
        if name not in known:
            parser.error(f"no topic {name!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.topics] or TOPICS
    if options.list:
        for topic in chosen:
            print(f"{topic.name}, {topic.minutes} min")
            print("".join(f"    python {command}\n" for command in topic.commands), end="")
        return 0
    if git("status", "--porcelain"):
        parser.error("the tree has changes, and figures belong to a commit: commit or stash them")
    folder = ROOT / "build" / "published"
    folder.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    done: dict[Path, list[str]] = {}
    for topic in chosen:
        print(f"{topic.name}: about {topic.minutes} min", flush=True)
        into = folder / unused(topic, today, (folder, RESULTS))
        done[into] = measure(topic, into)
    for file, failed in done.items():
        for command in failed:
            print(f"FAILED: python {command}")
        if failed:
            print(f"not copied to benchmarks/results: {file.relative_to(ROOT)}")
        else:
            shutil.copy(file, RESULTS / file.name)
            print(f"wrote benchmarks/results/{file.name}")
    return 1 if any(done.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
