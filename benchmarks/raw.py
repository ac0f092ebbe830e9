"""Raw sockets beside the backends: an all_reduce of plain sockets and additions, in raw_ring.c.

It runs in the same processes, on the same cores and interface as the backends, so that
its CPU time and its share of the machine are counted as theirs are. It knows fp32 sums of 1, 2, 4,
8 ... ranks, and nothing can go wrong in it: it has no headers, checks, timeouts or errors to tell.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from pathlib import Path

import torch
from collective import CollectiveCase
from harness import Place
from whole_sum import AllReduce, refuse_all_but_sums
from world import World

NAME = "raw"
_SOURCE = Path(__file__).with_name("raw_ring.c")
_LIBRARY = _SOURCE.parent.parent / "build" / "raw_ring.so"
_SMALL_NBYTES = 32 << 10  # up to here rounds of everything beat a ring of parts


def build() -> None:
    """Compile the library if it is not there or older than its source."""
    if _LIBRARY.exists() and _LIBRARY.stat().st_mtime > _SOURCE.stat().st_mtime:
        return
    _LIBRARY.parent.mkdir(exist_ok=True)
    own = _LIBRARY.with_suffix(f".{os.getpid()}")  # ranks may do this at the same time
    flags = ["-O3", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", str(own), str(_SOURCE)], check=True)
    own.replace(_LIBRARY)


class Sockets:
    """Connections to the ranks 1, 2, 4 ... to the right, and from those to the left."""

    def __init__(self, world: World) -> None:
        build()
        self.rank, self.ranks = world.rank, world.ranks
        self._library = ctypes.CDLL(str(_LIBRARY))
        distances = [1 << k for k in range((world.ranks - 1).bit_length())]
        if world.ranks & (world.ranks - 1):
            raise SystemExit(f"{NAME} is measured with 1, 2, 4, 8 ... ranks only")
        with socket.create_server((_own_address(), 0)) as listener:
            host, port = listener.getsockname()
            places = [place.rsplit(":", 1) for place in world.exchange(f"{host}:{port}")]
            self._right = []
            for distance in distances:
                peer_host, peer_port = places[(world.rank + distance) % world.ranks]
                link = socket.create_connection((peer_host, int(peer_port)))
                link.sendall(distance.to_bytes(4, "little"))
                self._right.append(link)
            arrived = {}
            for _ in distances:
                link, _ = listener.accept()
                arrived[int.from_bytes(link.recv(4, socket.MSG_WAITALL), "little")] = link
            self._left = [arrived[distance] for distance in distances]
        for link in (*self._right, *self._left):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setblocking(False)
        descriptors = ctypes.c_int * len(distances)
        self._to = descriptors(*(link.fileno() for link in self._right))
        self._from = descriptors(*(link.fileno() for link in self._left))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up the ranks' tensors in place."""
        address, numel = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.numel())
        if tensor.numel() * 4 <= _SMALL_NBYTES:
            code = self._library.raw_rounds(address, numel, len(self._to), self._to, self._from)
        else:
            code = self._library.raw_ring(
                address, numel, self.rank, self.ranks, self._to[0], self._from[0]
            )
        if code != 0:
            raise OSError(code, os.strerror(code))


class _RawAllReduce(AllReduce):
    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets

    def call(self, place: Place, output: torch.Tensor, source: torch.Tensor) -> None:
        self._sockets.all_reduce(output)


def prepare(world: World, place: Place, workload: str) -> CollectiveCase:
    """This rank's part at one size."""
    refuse_all_but_sums(NAME, place, workload)
    if NAME not in world.kept:
        world.kept[NAME] = Sockets(world)
    sockets = world.kept[NAME]
    assert isinstance(sockets, Sockets)
    return _RawAllReduce(sockets).prepare(place)


def _own_address() -> str:
    """Of the interface that leads to the store: the one that the backends take, too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])
