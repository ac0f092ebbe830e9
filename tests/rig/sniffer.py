"""Records the TCP streams of a host, and reads them as TLS.

    with recorded(host, tmp_path) as streams:
        ...                          # something runs on that host
    for stream in streams:           # every stream of every interface, whole
        not_tls(stream.data)         # "" if all of it is TLS records

Run as a program with the name of a network namespace it is the recorder. It does not stay inside:
a test that ends the host's processes would end it, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import signal
import socket
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hosts import Host

_ALL_PROTOCOLS = 0x0003
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_BUFFER_NBYTES = 256 << 20
_TCP = 6
_SYN = 2
_LIMIT_S = 20

HANDSHAKE, ALERT, DATA = 0x16, 0x15, 0x17


@dataclasses.dataclass(frozen=True)
class Stream:
    """One direction of one connection."""

    source: tuple[str, int]
    target: tuple[str, int]
    data: bytes

    @property
    def ports(self) -> set[int]:
        return {self.source[1], self.target[1]}


@contextlib.contextmanager
def recorded(host: Host, folder: Path) -> Iterator[list[Stream]]:
    """Fills the list when the block has ended; AssertionError if the kernel lost a packet.

    Args:
        host: Whose interfaces to listen on.
        folder: For the recording.
    """
    file = folder / "packets"
    command = [sys.executable, __file__, host.namespace, str(file)]
    streams: list[Stream] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
        try:
            assert recorder.stdout is not None
            assert recorder.stdout.readline() == "ready\n"
            yield streams
            recorder.send_signal(signal.SIGTERM)
            lost, _ = recorder.communicate(timeout=_LIMIT_S)
        finally:
            recorder.kill()
    assert recorder.returncode == 0, "the recorder failed"
    assert lost == "lost 0\n", lost
    streams += _streams(file.read_bytes())


def not_tls(data: bytes) -> str:
    """Why these bytes of one direction are not TLS 1.3 records to the last byte; "" if they are."""
    at = 0
    keyed = False  # from the first encrypted record on, only such and alerts may follow
    while at < len(data):
        if len(data) - at < 5:
            return f"{len(data) - at} bytes after the last record, at {at}"
        kind, version, length = struct.unpack_from("!BHH", data, at)
        first = at == 0 and kind == HANDSHAKE and version == 0x0301
        if kind not in ({ALERT, DATA} if keyed else {HANDSHAKE, ALERT, DATA}):
            return f"a record of type {kind:#x} at {at}"
        if (version != 0x0303 and not first) or not 0 < length <= (1 << 14) + 256:
            return f"a record of version {version:#x} and {length} bytes at {at}"
        keyed = keyed or kind == DATA
        at += 5 + length
        if at > len(data):
            return f"a record is cut off at {len(data)}: {at} expected"
    return ""


def _streams(packets: bytes) -> list[Stream]:
    starts: dict[tuple[bytes, bytes], int] = {}
    pieces: dict[tuple[bytes, bytes], dict[int, bytes]] = defaultdict(dict)
    at = 0
    while at < len(packets):
        (nbytes,) = struct.unpack_from("!I", packets, at)
        packet = packets[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
        header = (packet[0] & 15) * 4
        if packet[0] >> 4 != 4 or packet[9] != _TCP:
            continue
        (total,) = struct.unpack_from("!H", packet, 2)
        tcp = packet[header : total or None]
        key = (packet[12:16] + tcp[0:2], packet[16:20] + tcp[2:4])
        (sequence,) = struct.unpack_from("!I", tcp, 4)
        if tcp[13] & _SYN:
            starts[key] = sequence + 1
        elif payload := tcp[(tcp[12] >> 4) * 4 :]:
            earlier = pieces[key].get(sequence, b"")
            pieces[key][sequence] = max(earlier, payload, key=len)
    return [
        Stream(_end(key[0]), _end(key[1]), _joined(starts[key], parts))
        for key, parts in pieces.items()
    ]


def _end(text: bytes) -> tuple[str, int]:
    return socket.inet_ntoa(text[:4]), int.from_bytes(text[4:], "big")


def _joined(start: int, parts: dict[int, bytes]) -> bytes:
    data = bytearray()
    for sequence in sorted(parts, key=lambda one: (one - start) % (1 << 32)):
        offset = (sequence - start) % (1 << 32)
        assert offset <= len(data), f"bytes {len(data)} to {offset} of a stream are missing"
        data[offset : offset + len(parts[sequence])] = parts[sequence]
    return bytes(data)


def _socket_in(namespace: str) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newnet = 0x40000000
    with open("/proc/self/ns/net") as own, open(f"/var/run/netns/{namespace}") as other:
        for entered in (other, own):
            if libc.setns(entered.fileno(), clone_newnet) != 0:
                raise OSError(ctypes.get_errno(), f"setns {entered.name}")
            if entered is other:  # cooked: a packet begins with its IP header, on every interface
                kind, protocols = socket.SOCK_DGRAM, socket.htons(_ALL_PROTOCOLS)
                sniffer = socket.socket(socket.AF_PACKET, kind, protocols)
    return sniffer


def _record(namespace: str, file: Path) -> None:
    sniffer = _socket_in(namespace)
    so_rcvbufforce = 33
    sniffer.setsockopt(socket.SOL_SOCKET, so_rcvbufforce, _BUFFER_NBYTES)
    sniffer.settimeout(0.1)
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    print("ready", flush=True)
    with file.open("wb") as out:
        while True:
            try:
                packet = sniffer.recv(1 << 17)
            except TimeoutError:
                if ended:
                    break
                continue
            out.write(struct.pack("!I", len(packet)) + packet)
    statistics = sniffer.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
    print(f"lost {struct.unpack('II', statistics)[1]}", flush=True)


if __name__ == "__main__":
    _record(sys.argv[1], Path(sys.argv[2]))
