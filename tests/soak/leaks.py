"""Kills the partners of one long-lived rank, 1,000 of them: what is left in that rank afterwards.

The rank makes group after group, each with partners that a light process forks for it, and each
partner gets SIGKILL in the middle of an all_reduce:

    python tests/soak/leaks.py --kills 1000
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import pycomm

WORLD_SIZE = 3
RSS_LIMIT_KB = 512
"""Between the medians of twenty looks' halves: single looks differ by a megabyte."""


def partner_main(rank: int, store: str) -> None:
    dist.init_process_group("pycomm", init_method=f"file://{store}", rank=rank, world_size=3)
    tensor = torch.ones(1 << 16)
    try:
        while True:
            dist.all_reduce(tensor.fill_(1.0))
    except pycomm.errors.PycommError:
        dist.destroy_process_group()


def serve_forks(requests: int, answers: int) -> None:
    """The light process: forks the partners of a group on demand, waits for those that ended."""
    with os.fdopen(requests) as lines:
        for line in lines:
            pids = []
            for rank in range(1, WORLD_SIZE):
                pid = os.fork()
                if pid == 0:
                    os.close(answers)
                    try:
                        partner_main(rank, line.strip())
                    except BaseException:
                        traceback.print_exc()
                    finally:
                        os._exit(0)
                pids.append(pid)
            os.write(answers, json.dumps(pids).encode() + b"\n")
            lines.readline()  # the round is over
            for pid in pids:
                os.waitpid(pid, 0)
            os.write(answers, b"[]\n")


def left() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "shared memory": len([name for name in os.listdir("/dev/shm") if "pycomm" in name]),
        "rss_kb": int(status.split("VmRSS:")[1].split()[0]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("pycomm").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dice = random.Random(arguments.seed)
    folder = tempfile.mkdtemp()
    requests, ask = os.pipe()
    told, answers = os.pipe()
    if (forker := os.fork()) == 0:
        os.close(ask)
        os.close(told)
        serve_forks(requests, answers)
        os._exit(0)
    os.close(requests)
    os.close(answers)
    before: dict[str, int] = {}
    looks: list[dict[str, int]] = []
    kinds: dict[str, int] = {}
    began_s = time.monotonic()
    with os.fdopen(told) as lines, os.fdopen(ask, "w", buffering=1) as orders:
        kills = 0
        while kills < arguments.kills + arguments.warm_up:
            store = f"{folder}/{kills}"
            orders.write(store + "\n")
            pids = json.loads(lines.readline())
            dist.init_process_group("pycomm", init_method=f"file://{store}", rank=0, world_size=3)
            tensor = torch.ones(1 << 16)
            dist.all_reduce(tensor)
            victim = dice.randrange(1, WORLD_SIZE)
            timer = threading.Timer(
                dice.uniform(0.0, 0.01), os.kill, (pids[victim - 1], signal.SIGKILL)
            )
            timer.start()
            try:
                while True:
                    dist.all_reduce(tensor.fill_(1.0))
            except pycomm.errors.PycommError as error:
                kind = f"{error.code}, {'right' if error.record.get('peer') == victim else 'WRONG'}"
                kinds[kind] = kinds.get(kind, 0) + 1
            timer.join()
            dist.destroy_process_group()
            orders.write("over\n")
            lines.readline()
            os.unlink(store) if os.path.exists(store) else None
            kills += 1
            if kills == arguments.warm_up:
                before = left()
            elif kills > arguments.warm_up and kills % max(1, arguments.kills // 20) == 0:
                looks.append(left())
            if kills % 100 == 0:
                print(f"{kills} kills, {time.monotonic() - began_s:.0f} s: {left()}", flush=True)
        after = left()
    os.waitpid(forker, 0)
    shutil.rmtree(folder)
    grown = {name: after[name] - before[name] for name in after}
    rss_kb = [look["rss_kb"] for look in looks]
    half = len(rss_kb) // 2
    early, late = (round(statistics.median(part)) for part in (rss_kb[:half], rss_kb[half:]))
    print(
        f"{arguments.kills} kills after {arguments.warm_up}: {kinds}; grown: {grown}; "
        f"median of rss_kb in the first half {early}, in the second {late}"
    )
    del grown["rss_kb"]
    good = set(kinds) == {"PEER_DEAD, right"} and not any(grown.values())
    return 0 if good and late - early <= RSS_LIMIT_KB else 1


if __name__ == "__main__":
    sys.exit(main())
