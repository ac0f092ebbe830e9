"""Hosts on a switch of a given speed, on one machine: network namespaces and token buckets.

Needs root, `ip` and `tc`. Nothing leaves the namespaces, and they go with the program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """What runs ARGUMENTS on this host, as one process."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _shape(namespace: str, device: str, mbit: int, burst_kb: int) -> None:
    # 50 ms of queue is a common switch's.
    bucket = ["rate", f"{mbit}mbit", "burst", f"{burst_kb}kb", "latency", "50ms"]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket)


def _remove(namespace: str) -> None:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    for pid in listed.stdout.split():  # the namespace is ours, so they are too
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=30)


@contextlib.contextmanager
def switch(count: int, mbit: int, burst_kb: int = 256) -> Iterator[Sequence[Host]]:
    """`count` hosts, each with `mbit` to and from one switch.

    Args:
        burst_kb: What a wire that was idle carries at once. With less than 256, a gigabit's bucket
            does not reach its rate; slower ones need less in proportion.

    Raises:
        OSError: Namespaces or token buckets are not to be had here.
    """
    stem = f"pycomm-bench-{os.getpid()}"
    hosts = [Host(f"{stem}-{number}", f"10.99.0.{number + 1}") for number in range(count)]
    with contextlib.ExitStack() as stack:
        _run("ip", "netns", "add", stem)
        stack.callback(_remove, stem)
        _run("ip", "-n", stem, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", stem, "link", "set", "bridge0", "up")
        for number, host in enumerate(hosts):
            _run("ip", "netns", "add", host.namespace)
            stack.callback(_remove, host.namespace)
            port = f"port{number}"
            ends = ["type", "veth", "peer", "name", "eth0", "netns", host.namespace]
            _run("ip", "link", "add", port, "netns", stem, *ends)
            _run("ip", "-n", stem, "link", "set", port, "master", "bridge0", "up")
            _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _run("ip", "-n", host.namespace, "link", "set", "eth0", "up")
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            _shape(host.namespace, "eth0", mbit, burst_kb)
            _shape(stem, port, mbit, burst_kb)
        yield hosts
