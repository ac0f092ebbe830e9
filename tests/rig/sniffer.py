"""Records the packets of a host, and reads their TCP streams as TLS.

    with recorded(host, tmp_path) as streams:
        ...                          # something runs on that host
    for stream in streams:           # every TCP stream of every interface, whole, IPv4 and IPv6
        not_tls(stream.data)         # "" if all of it is TLS records

A test that cuts the wire passes cut=True to both, and reads up to the first byte that is missing.

Besides TCP, packets may be ARP, ICMP, ICMPv6 or DNS. Any other packet is an AssertionError: it
could hold a tensor.

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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hosts import Host

_ALL_PROTOCOLS = 0x0003
_IPV4, _IPV6, _ARP = 0x0800, 0x86DD, 0x0806
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_BUFFER_NBYTES = 256 << 20
_ICMP, _TCP, _UDP, _ICMPV6 = 1, 6, 17, 58
_HOP_BY_HOP = 0
_DNS_PORT = 53
_SYN = 2
_LIMIT_S = 20

_HANDSHAKE, _ALERT, _DATA = 0x16, 0x15, 0x17
_HELLOS = (1, 2)  # of the client, of the server
LONGEST_HELLO = 512
_LONGEST_ALERT = 2


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
def recorded(host: Host, folder: Path, *, cut: bool = False) -> Iterator[list[Stream]]:
    """Fills the list when the block has ended.

    AssertionError if the kernel lost a packet, if bytes of a stream are missing, or if a packet is
    of a protocol that is not known here.

    Args:
        host: Whose interfaces to listen on.
        folder: For the recording.
        cut: Bytes may be missing. A stream then ends before the first one that is. Connections that
            were opened earlier, and whose last bytes the kernel still sends, are left out.
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
    streams += streams_of(_recording(file), cut=cut)


def not_tls(data: bytes, *, cut: bool = False) -> str:
    """Why these bytes of one direction are not TLS 1.3 records to the last byte; "" if they are.

    One hello comes first, in one record of at most ``LONGEST_HELLO`` bytes. Alerts in plain may
    follow it. From the first encrypted record on, all records are encrypted. With ``cut`` the last
    record may be a part of one.
    """
    at = 0
    keyed = False
    while at < len(data):
        if len(data) - at < 5:
            if cut:
                return ""
            return f"{len(data) - at} bytes after the last record, at {at}"
        kind, version, length = struct.unpack_from("!BHH", data, at)
        body = data[at + 5 : at + 5 + length]
        if kind not in ({_HANDSHAKE} if at == 0 else {_DATA} if keyed else {_ALERT, _DATA}):
            return f"a record of type {kind:#x} at {at}"
        longest = {_HANDSHAKE: LONGEST_HELLO, _ALERT: _LONGEST_ALERT}.get(kind, (1 << 14) + 256)
        first = at == 0 and version == 0x0301
        if (version != 0x0303 and not first) or not 0 < length <= longest:
            return f"a record of version {version:#x}, type {kind:#x} and {length} bytes at {at}"
        if len(body) < length:
            if cut:
                return ""
            return f"a record is cut off at {len(data)}: {at + 5 + length} expected"
        if kind == _HANDSHAKE and (
            body[0] not in _HELLOS or int.from_bytes(body[1:4], "big") != length - 4
        ):
            return f"a handshake message of type {body[0]} that does not fill its record"
        keyed = keyed or kind == _DATA
        at += 5 + length
    return ""


def streams_of(packets: Iterable[tuple[int, bytes]], *, cut: bool = False) -> list[Stream]:
    """The TCP streams of packets, each with its EtherType; AssertionError for an unknown packet.

    Also for bytes that are missing; with ``cut`` a stream ends before them, and one whose opening
    is missing is left out.
    """
    starts: dict[tuple[bytes, bytes], int] = {}
    pieces: dict[tuple[bytes, bytes], dict[int, bytes]] = defaultdict(dict)
    for ether_type, packet in packets:
        if (found := _tcp(ether_type, packet)) is None:
            continue
        source, target, tcp = found
        key = (source + tcp[0:2], target + tcp[2:4])
        (sequence,) = struct.unpack_from("!I", tcp, 4)
        payload = tcp[(tcp[12] >> 4) * 4 :]
        if tcp[13] & _SYN:
            assert not payload, "a packet that opens a connection has data"
            starts[key] = sequence + 1
        elif payload:
            earlier = pieces[key].get(sequence, b"")
            pieces[key][sequence] = max(earlier, payload, key=len)
    return [
        Stream(_end(key[0]), _end(key[1]), _joined(starts[key], parts, cut))
        for key, parts in pieces.items()
        if key in starts or not cut
    ]


def _tcp(ether_type: int, packet: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Source, target and segment of a TCP packet; None for the other protocols that may be there.

    A length of 0 is a packet that the kernel has not yet cut: it is longer than 64 KiB.
    """
    if ether_type == _ARP:
        return None
    assert ether_type in (_IPV4, _IPV6), f"a packet of EtherType {ether_type:#x}"
    if ether_type == _IPV4:
        length, _, fragment = struct.unpack_from("!HHH", packet, 2)
        assert not fragment & 0x3FFF, "a fragment of a packet"
        protocol, source, target = packet[9], packet[12:16], packet[16:20]
        inner = packet[(packet[0] & 15) * 4 : length or None]
    else:
        (length,), protocol = struct.unpack_from("!H", packet, 4), packet[6]
        source, target = packet[8:24], packet[24:40]
        inner = packet[40 : 40 + length if length else None]
        if protocol == _HOP_BY_HOP:
            protocol, inner = inner[0], inner[8 * (inner[1] + 1) :]
    if protocol == _UDP and _DNS_PORT in struct.unpack_from("!HH", inner):
        return None
    if protocol == (_ICMP if ether_type == _IPV4 else _ICMPV6):
        return None
    assert protocol == _TCP, f"a packet of IP protocol {protocol}"
    return source, target, inner


def _recording(file: Path) -> Iterator[tuple[int, bytes]]:
    recording = file.read_bytes()
    at = 0
    while at < len(recording):
        ether_type, nbytes = struct.unpack_from("!HI", recording, at)
        yield ether_type, recording[at + 6 : at + 6 + nbytes]
        at += 6 + nbytes


def _end(text: bytes) -> tuple[str, int]:
    family = socket.AF_INET if len(text) == 6 else socket.AF_INET6
    return socket.inet_ntop(family, text[:-2]), int.from_bytes(text[-2:], "big")


def _joined(start: int, parts: dict[int, bytes], cut: bool) -> bytes:
    data = bytearray()
    for sequence in sorted(parts, key=lambda one: (one - start) % (1 << 32)):
        offset = (sequence - start) % (1 << 32)
        if cut and offset > len(data):
            break
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
                packet, address = sniffer.recvfrom(1 << 17)
            except TimeoutError:
                if ended:
                    break
                continue
            out.write(struct.pack("!HI", address[1], len(packet)) + packet)
    statistics = sniffer.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
    print(f"lost {struct.unpack('II', statistics)[1]}", flush=True)


if __name__ == "__main__":
    _record(sys.argv[1], Path(sys.argv[2]))
