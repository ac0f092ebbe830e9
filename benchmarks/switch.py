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
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
_NET = "10.99.0"
_PORT = 29533
_BURST = "256kb"  # less and a token bucket does not reach its rate
_LONGEST_QUEUE = "40ms"


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}")


def _namespace(name: str) -> str:
    return f"pycomm-switch-{os.getpid()}-{name}"


def build(hosts: int, rate: str) -> None:
    """Make the switch and the hosts."""
    switch = _namespace("switch")
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for number in range(hosts):
        host, port = _namespace(f"h{number}"), f"port{number}"
        _ip("netns", "add", host)
        peer = ["peer", "name", port, "netns", switch]
        _ip("link", "add", "eth0", "netns", host, "type", "veth", *peer)
        _ip("-n", host, "addr", "add", f"{_NET}.{number + 1}/24", "dev", "eth0")
        _ip("-n", switch, "link", "set", port, "master", "bridge")
        for where, device in ((host, "lo"), (host, "eth0"), (switch, port)):
            _ip("-n", where, "link", "set", device, "up")
            if device != "lo":
                bucket = ["tbf", "rate", rate, "burst", _BURST, "latency", _LONGEST_QUEUE]
                _call("tc", "-n", where, "qdisc", "add", "dev", device, "root", *bucket)


def remove(hosts: int) -> None:
    """End what runs inside and take everything away, also what was half made."""
    for name in [f"h{number}" for number in range(hosts)] + ["switch"]:
        namespace = _namespace(name)
        listed = subprocess.run(
            ["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=30
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=30)


def start(rank: int, hosts: Sequence[int], command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start one rank on its host, as a launcher would."""
    mates = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", "1")
    env |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": str(mates.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(mates)),
        "MASTER_ADDR": f"{_NET}.{hosts[0] + 1}",
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    inside = ["ip", "netns", "exec", _namespace(f"h{hosts[rank]}")]
    return subprocess.Popen([*inside, *command], env=env, stdin=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--hosts", default="0,1", help="the host of each rank; default: %(default)s")
    add("--rate", default="1gbit", help="of each card, as tc writes it; default: %(default)s")
    add("--timeout", type=float, default=900.0, help="end it after these seconds")
    add("command", nargs="+", help="a script of benchmarks/ and its arguments, after --")
    options = parser.parse_args()
    hosts = [int(host) for host in options.hosts.split(",")]
    if sorted(set(hosts)) != list(range(max(hosts) + 1)):
        parser.error(f"--hosts {options.hosts}: number the hosts 0, 1, 2 ...")
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        parser.error("network namespaces need root and the commands ip and tc (package iproute2)")
    script, *arguments = options.command
    known = HERE / script
    command = [sys.executable, str(known) if known.exists() else script, *arguments]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    count = len(set(hosts))
    try:
        build(count, options.rate)
        ranks = [start(rank, hosts, command) for rank in range(len(hosts))]
        codes = [process.wait(options.timeout) for process in ranks]
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"switch: {error}", file=sys.stderr)
        return 1
    finally:
        remove(count)
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    sys.exit(main())
