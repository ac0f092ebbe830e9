"""Sends bytes at full speed between two hosts for a moment, and counts them where they arrive."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pycomm.doctor import probe
from pycomm.doctor.facts import known

OUT, IN, BOTH = "out", "in", "both"
DIRECTIONS = (OUT, IN, BOTH)

BIN_S = 0.1
MAX_SECONDS = 120.0
"""Longest measurement. The command line refuses more."""
_CHUNK_NBYTES = 1 << 20
_SMALL_SEGMENT = 1200
"""Bytes of a packet that every path carries: IPv6's minimum is 1280 with headers."""
_CONNECT_S = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrived:
    """What a receiver counted."""

    bins: tuple[int, ...] = ()
    """Bytes of each 0.1 s."""
    busy: float = 0.0
    """0: the thread always waited for the network; 1: never."""
    waited: float = 0.0
    """Part of the time in which the thread could have run and had no core."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """What a sender knows afterwards."""

    busy: float = 0.0
    waited: float = 0.0
    lost: float = 0.0
    """Part of the bytes that TCP sent again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """One direction of one measurement."""

    source: int
    target: int
    kind: str = OUT
    """OUT: one direction alone; BOTH: while bytes went the other way, too."""
    bins: tuple[int, ...] = ()
    busy: float = 0.0
    """The busier end's."""
    waited: float = 0.0
    """Of the end that lacked a core longer."""
    lost: float = 0.0
    small_moves: bool = False
    """It stalled, and moved with packets of 1200 bytes."""
    alone: bool = False
    """Repeated while no other pair measured."""
    error: str = ""


class Station:
    """The side that is asked: a handler for the probe server."""

    def __init__(self) -> None:
        self._reports: dict[str, dict[str, Any]] = {}
        self._done = threading.Condition()

    def handlers(self) -> dict[str, probe.Handler]:
        return {"flow": self._flow, "report": self._report}

    def _flow(self, connection: socket.socket, request: Mapping[str, Any]) -> None:
        seconds = min(float(request["seconds"]), MAX_SECONDS)
        probe.write_line(connection, {"ready": True})
        arrived, sent = _run(
            connection,
            sends=request["direction"] in (IN, BOTH),
            receives=request["direction"] in (OUT, BOTH),
            seconds=seconds,
        )
        with self._done:
            self._reports[str(request["id"])] = _as_json(arrived, sent)
            self._done.notify_all()

    def _report(self, connection: socket.socket, request: Mapping[str, Any]) -> None:
        with self._done:
            self._done.wait_for(lambda: str(request["id"]) in self._reports, timeout=3.0)
            report = self._reports.pop(str(request["id"]), {})
        probe.write_line(connection, report)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """Another host's station, and how this host connects to it."""

    address: str
    port: int
    token: str
    local: str = ""
    """The address of this host to connect from; "": as the routing table has it."""

    def connect(self, max_segment: int = 0) -> socket.socket:
        return probe.connect(self.address, self.port, _CONNECT_S, max_segment, local=self.local)


def measure(
    peer: Peer, direction: str, seconds: float, max_segment: int = 0
) -> tuple[tuple[Arrived, Sent], tuple[Arrived, Sent]]:
    """Runs one measurement: what this side counted, and what the other side did.

    Raises:
        OSError, ValueError: The other side could not be reached, or is no doctor.
    """
    name = f"{time.monotonic_ns():x}"
    request = {"token": peer.token, "op": "flow", "id": name, "direction": direction}
    with peer.connect(max_segment) as connection:
        connection.settimeout(_CONNECT_S)
        probe.write_line(connection, {**request, "seconds": seconds})
        probe.read_line(connection)
        here = _run(
            connection,
            sends=direction in (OUT, BOTH),
            receives=direction in (IN, BOTH),
            seconds=seconds,
        )
    # Always by small packets: through an MTU hole, a long report would vanish as the bytes did.
    with peer.connect(_SMALL_SEGMENT) as connection:
        connection.settimeout(_CONNECT_S)
        probe.write_line(connection, {"token": peer.token, "op": "report", "id": name})
        there = _from_json(probe.read_line(connection))
    return here, there


def flows_between(
    here: int,
    there: int,
    peer: Peer,
    seconds: float,
    directions: tuple[str, ...] = DIRECTIONS,
    alone: bool = False,
) -> list[Flow]:
    """Measures one pair of hosts: out, in, and both at once. Never raises."""
    flows = []
    for direction in directions:
        try:
            flows += _flows(here, there, peer, seconds, direction)
        except (OSError, ValueError) as error:
            flows.append(Flow(source=here, target=there, kind=direction, error=str(error)))
    return [dataclasses.replace(one, alone=alone) for one in flows]


def stalled(bins: tuple[int, ...]) -> bool:
    """Whether nothing but the first packets arrived."""
    later = bins[len(bins) // 3 :]
    return bool(bins) and sum(later) == 0


def _flows(here: int, there: int, peer: Peer, seconds: float, direction: str) -> list[Flow]:
    mine, theirs = measure(peer, direction, seconds)
    kind = BOTH if direction == BOTH else OUT
    flows = []
    if direction in (OUT, BOTH):
        flows.append(_flow(here, there, kind, theirs[0], mine[1]))
    if direction in (IN, BOTH):
        flows.append(_flow(there, here, kind, mine[0], theirs[1]))
    if direction != BOTH and stalled(flows[0].bins):
        again = measure(peer, direction, min(seconds, 1.0), _SMALL_SEGMENT)
        moved = again[1][0] if direction == OUT else again[0][0]
        flows = [dataclasses.replace(flows[0], small_moves=not stalled(moved.bins))]
    return flows


def _flow(source: int, target: int, kind: str, arrived: Arrived, sent: Sent) -> Flow:
    return Flow(
        source=source,
        target=target,
        kind=kind,
        bins=arrived.bins,
        busy=max(arrived.busy, sent.busy),
        waited=max(arrived.waited, sent.waited),
        lost=sent.lost,
    )


def _run(
    connection: socket.socket, *, sends: bool, receives: bool, seconds: float
) -> tuple[Arrived, Sent]:
    sent: list[Sent] = []
    sender = threading.Thread(target=lambda: sent.append(_send(connection, seconds)), daemon=True)
    if sends:
        sender.start()
    arrived = _receive(connection, seconds) if receives else Arrived()
    if sends:
        sender.join(seconds + 5.0)
    if sends and not receives:  # drop what has not left yet: it would take long on a slow link
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return arrived, sent[0] if sent else Sent()


def _send(connection: socket.socket, seconds: float) -> Sent:
    chunk = memoryview(bytearray(_CHUNK_NBYTES))
    begin, busy = time.monotonic(), _Busy()
    with contextlib.suppress(OSError):
        while (left := begin + seconds - time.monotonic()) > 0:
            connection.settimeout(max(left, 0.01))
            connection.send(chunk)
    return Sent(busy=busy.part(), waited=busy.waited(), lost=_lost(connection))


def _receive(connection: socket.socket, seconds: float) -> Arrived:
    room = memoryview(bytearray(_CHUNK_NBYTES))
    bins = [0] * max(1, round(seconds / BIN_S))
    begin, busy = time.monotonic(), _Busy()
    with contextlib.suppress(OSError):
        while (now := time.monotonic() - begin) < seconds:
            connection.settimeout(max(seconds - now, 0.01))
            count = connection.recv_into(room)
            if count == 0:
                break
            index = int((time.monotonic() - begin) / BIN_S)
            if index < len(bins):
                bins[index] += count
    return Arrived(bins=tuple(bins), busy=busy.part(), waited=busy.waited())


class _Busy:
    """How much this thread was held up by its core, from here until it is asked.

    Time in which it could have run and had no core is told apart: on a loaded host a thread waits
    much for its core, whether or not the network is slow.
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._ran, self._waited = _run_times()

    def part(self) -> float:
        """Running, as a part of the time in which it had a core or slept: 1 never slept."""
        ran, waited = (
            now - then for now, then in zip(_run_times(), (self._ran, self._waited), strict=True)
        )
        slept = max(time.monotonic() - self._begin - ran - waited, 0.0)
        return ran / (ran + slept) if ran > 0 else 0.0

    def waited(self) -> float:
        """Waiting for a core, as a part of all."""
        passed = time.monotonic() - self._begin
        return min(max((_run_times()[1] - self._waited) / passed, 0.0), 1.0) if passed else 0.0


def _run_times() -> tuple[float, float]:
    """Seconds that this thread ran, and waited for a core while it could have run."""
    try:
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):  # a kernel without them
        return time.thread_time(), 0.0
    return int(ran) / 1e9, int(waited) / 1e9


def _lost(connection: socket.socket) -> float:
    """From TCP_INFO (linux/tcp.h): bytes sent again as a part of all; 0 where it is not told."""
    with contextlib.suppress(OSError):
        text = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(text) >= 216:
            sent, again = struct.unpack_from("=QQ", text, 200)
            return again / sent if sent else 0.0
    return 0.0


def _as_json(arrived: Arrived, sent: Sent) -> dict[str, Any]:
    return {"arrived": dataclasses.asdict(arrived), "sent": dataclasses.asdict(sent)}


def _from_json(report: Mapping[str, Any]) -> tuple[Arrived, Sent]:
    """Raises ValueError for what a station does not write."""
    try:
        arrived = Arrived(**known(Arrived, report["arrived"]))
        sent = Sent(**known(Sent, report["sent"]))
    except (KeyError, TypeError) as error:
        raise ValueError("the other side has no report") from error
    return dataclasses.replace(arrived, bins=tuple(map(int, arrived.bins))), sent
