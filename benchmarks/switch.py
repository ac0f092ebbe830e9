"""Hosts on a gigabit switch, on one machine: runs a table in namespaces. Needs root and ip.

    python benchmarks/switch.py --hosts 0,1 -- allreduce.py --backends pycomm,gloo,raw --sizes 4K
    python benchmarks/switch.py --hosts 0,1,2,3 -- allreduce.py ...
    python benchmarks/switch.py --hosts 0,0,1,1 -- allreduce.py ...  # 2 hosts x 2 ranks
    python benchmarks/switch.py --hosts 0,1,0,1 -- allreduce.py ...  # interleaved

`--hosts` names the host of each rank. A host is a namespace with one card, eth0, on a bridge in a
namespace of its own; a token bucket at both ends of each wire bounds what leaves and what arrives.
Nothing leaves the namespaces; processes inside are ended by their pids and the namespaces removed,
however this ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from virtual_switch import Host, switch

HERE = Path(__file__).resolve().parent
_PORT = 29533


def start(
    rank: int, hosts: Sequence[int], wired: Sequence[Host], command: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start one rank on its host, as a launcher would."""
    mates = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", "1")
    env |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": str(mates.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(mates)),
        "MASTER_ADDR": wired[hosts[0]].address,
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    inside = wired[hosts[rank]].command(*command)
    return subprocess.Popen(inside, env=env, stdin=subprocess.DEVNULL)


def print_iperf(sender: Host, receiver: Host) -> None:
    """Say what iperf3 reads between two hosts: one TCP stream one way, for five seconds."""
    server = subprocess.Popen(receiver.command("iperf3", "-s", "-1"), stdout=subprocess.DEVNULL)
    client = sender.command("iperf3", "-J", "-t", "5", "-c", receiver.address)
    try:
        for _ in range(20):  # until the server listens
            time.sleep(0.1)
            done = subprocess.run(client, capture_output=True, text=True, timeout=30, check=False)
            if done.returncode == 0:
                break
        received = json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]
        print(f"# iperf3         {received / 1e6:.1f} Mbit/s from host 0 to host 1", flush=True)
    finally:
        server.kill()
        server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--hosts", default="0,1", help="the host of each rank; default: %(default)s")
    add("--mbit", type=int, default=1000, help="of each card; default: %(default)s")
    add("--burst-kb", type=int, default=256, help="of each token bucket; default: %(default)s")
    add("--timeout", type=float, default=900.0, help="end it after these seconds")
    add("--iperf", action="store_true", help="first say what iperf3 reads between hosts 0 and 1")
    add("command", nargs="+", help="a script of benchmarks/ and its arguments, after --")
    options = parser.parse_args()
    hosts = [int(host) for host in options.hosts.split(",")]
    if sorted(set(hosts)) != list(range(max(hosts) + 1)):
        parser.error(f"--hosts {options.hosts}: number the hosts 0, 1, 2 ...")
    if options.iperf and (shutil.which("iperf3") is None or len(set(hosts)) < 2):
        parser.error("--iperf needs the command iperf3 and two hosts")
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        parser.error("network namespaces need root and the commands ip and tc (package iproute2)")
    script, *arguments = options.command
    known = HERE / script
    command = [sys.executable, str(known) if known.exists() else script, *arguments]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with switch(len(set(hosts)), options.mbit, options.burst_kb) as wired:
            if options.iperf:
                print_iperf(wired[0], wired[1])
            ranks = [start(rank, hosts, wired, command) for rank in range(len(hosts))]
            codes = [process.wait(options.timeout) for process in ranks]
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"switch: {error}", file=sys.stderr)
        return 1
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    sys.exit(main())
