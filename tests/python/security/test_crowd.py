"""A thousand slow connections at the ports of a group while it forms."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import free_port_range, run_ranks

from pycomm import _secret

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(120)]

SIZE = 3
CROWD = 1000


class Crowd:
    """A thousand connections a second, one byte on each; ``CROWD`` of them are held open."""

    def __init__(self, ports: range) -> None:
        self.opened = 0
        self._ports = ports
        self._held: deque[socket.socket] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="the crowd")

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        while self._held:
            self._held.pop().close()

    def _run(self) -> None:
        while not self._stop.wait(len(self._ports) / 1000):
            for port in self._ports:
                stranger = socket.socket()
                self._held.append(stranger)
                if len(self._held) > CROWD:
                    self._held.popleft().close()
                with contextlib.suppress(OSError):  # not open yet, or no more
                    stranger.connect(("127.0.0.1", port))
                    stranger.send(b"\x16")  # as a TLS client begins
                    self.opened += 1


def form(rank: int, world_size: int, folder: str) -> float:
    """Seconds until the ranks have met and every pair has spoken."""
    begin = time.monotonic()
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=world_size)
    met = time.monotonic() - begin
    time.sleep(1.5)  # the ports are open: the crowd is there before the first connection is
    begin = time.monotonic()
    outputs = [torch.empty(1) for _ in range(world_size)]
    dist.all_to_all(outputs, [torch.full((1,), float(rank)) for _ in range(world_size)])
    seconds = met + time.monotonic() - begin
    assert [float(output) for output in outputs] == list(range(world_size))
    dist.barrier()
    dist.destroy_process_group()
    return seconds


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * CROWD:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2 * CROWD, soft), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.alone
@pytest.mark.usefixtures("many_files")
def test_a_thousand_slow_connections_delay_a_group_by_less_than_a_second(tmp_path: Path) -> None:
    _secret.generate_file(str(tmp_path / "secret"))

    def seconds(name: str, first: int, last: int) -> float:
        (tmp_path / name).mkdir()
        env = {
            "PYCOMM_SECRET": None,
            "PYCOMM_SECRET_FILE": str(tmp_path / "secret"),
            "PYCOMM_TRANSPORT": "tcp",
            "PYCOMM_SOCKET_IFNAME": "lo",
            "PYCOMM_PORT_RANGE": f"{first}-{last}",
        }
        results = run_ranks(
            SIZE, form, args=(str(tmp_path / name),), init="none", backend=None, env=env
        )
        return float(max(results.values()))

    first, last = free_port_range(SIZE)
    alone = seconds("alone", first, last)
    first, last = free_port_range(SIZE)
    with Crowd(range(first, last + 1)) as crowd:
        beside = seconds("beside", first, last)
    print(f"alone {alone:.2f} s, beside {crowd.opened} strangers {beside:.2f} s")
    assert crowd.opened >= CROWD / 2, "it filled all places, many times"
    assert beside <= alone + 1
