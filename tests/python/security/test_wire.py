"""With a secret, every byte between ranks parses as a TLS record, on every interface of a host.

Two network namespaces are two hosts with two ranks each, over IPv4 and over IPv6. Every packet is
read; an unknown protocol fails the test. The connections to the port of torch's own store are left
out. That store is not pycomm's, and docs/security.md describes what it gives away.
"""

from __future__ import annotations

import base64
import dataclasses
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import installed_environment
from hosts import Host, alpha_and_beta, run_on_both, wire
from sniffer import LONGEST_HELLO, Stream, not_tls, recorded, streams_of

from pycomm._group import secrets

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.namespaces,
    pytest.mark.timeout(170),
]

_STORE_PORT = 29500
_PATTERN = b"pycomm's secret!"

# Every kind of connection between hosts, and within one if transport=tcp: control and bulk links,
# and those of a group that is made later.
PROGRAM = f"""
import os, sys
if os.fork() == 0:
    os.environ["RANK"] = str(int(os.environ["RANK"]) + 1)
import torch, torch.distributed as dist
dist.init_process_group("pycomm")
rank, size = dist.get_rank(), dist.get_world_size()
text = torch.frombuffer(bytearray({_PATTERN!r} * 40_000), dtype=torch.uint8)
for root in range(size):
    got = text.clone() if rank == root else torch.zeros_like(text)
    dist.broadcast(got, root)
    assert torch.equal(got, text)
sums = torch.full((300_000,), float(rank))
dist.all_reduce(sums)
assert float(sums[-1]) == size * (size - 1) / 2
later = dist.new_group(list(range(size)))
dist.all_to_all_single(torch.empty(4 * 4096), torch.ones(4 * 4096), group=later)
if rank == 0:
    dist.send(text, 3)
elif rank == 3:
    dist.recv(got, 0)
dist.barrier()
dist.destroy_process_group()
if rank % 2 == 0:
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Host, Host]]:
    with wire(*alpha_and_beta()) as hosts:
        yield hosts


@dataclasses.dataclass(frozen=True)
class _Run:
    ours: list[Stream]
    """Without those of torch's store."""
    store: list[Stream]
    logs: list[str]
    """Of both ranks of each host."""


def _run(both: tuple[Host, Host], folder: Path, master: str, **variables: str) -> _Run:
    env = installed_environment(folder / "installed") | variables
    env |= {"MASTER_ADDR": master, "MASTER_PORT": str(_STORE_PORT), "WORLD_SIZE": "4"}
    with recorded(both[0], folder) as streams:
        command = [sys.executable, "-c", PROGRAM]
        outcomes = run_on_both(
            [(host, command, env | {"RANK": str(2 * i)}) for i, host in enumerate(both)], folder
        )
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes
    listening = (master, _STORE_PORT)
    store = [stream for stream in streams if listening in (stream.source, stream.target)]
    ours = [stream for stream in streams if stream not in store]
    assert sum(len(stream.data) for stream in ours) > 1_000_000
    # A name or an address of the wrong family would leave nothing to read.
    assert {":" in stream.source[0] for stream in ours} == {":" in master}
    # Within the host ranks connect by Unix sockets, unless told to use TCP.
    within = any(stream.source[0] == stream.target[0] for stream in ours)
    assert within == (variables.get("PYCOMM_TRANSPORT") == "tcp")
    return _Run(ours, store, [outcome.err for outcome in outcomes])


@pytest.mark.parametrize(
    ("transport", "v6"),
    [
        pytest.param("auto", False, id="auto", marks=pytest.mark.nightly),
        pytest.param("tcp", False, id="tcp"),
        pytest.param("tcp", True, id="tcp-v6"),
    ],
)
def test_every_byte_is_tls(
    both: tuple[Host, Host], tmp_path: Path, transport: str, v6: bool
) -> None:
    path = tmp_path / "secret"
    key_id = secrets.generate_file(str(path)).key_id
    ran = _run(
        both,
        tmp_path,
        both[0].address_v6 if v6 else both[0].address,
        PYCOMM_SECRET_FILE=str(path),
        PYCOMM_TRANSPORT=transport,
    )
    for stream in ran.ours:
        assert not_tls(stream.data) == "", stream
    assert any(key_id.encode() in stream.data for stream in ran.ours)  # which is public
    characters = path.read_text().strip()[16:59]
    raw = base64.urlsafe_b64decode(characters + "=")
    assert ran.store
    for stream in ran.ours + ran.store:
        for hidden in (_PATTERN, characters.encode(), raw, raw.hex().encode()):
            assert hidden not in stream.data


def test_without_a_secret_the_same_program_is_read(both: tuple[Host, Host], tmp_path: Path) -> None:
    ran = _run(both, tmp_path, both[0].address)
    assert sum(_PATTERN * 100 in stream.data for stream in ran.ours) >= 2
    assert all(not_tls(stream.data) for stream in ran.ours)
    # Two groups of ranks on two hosts: one line of rank 0 warns.
    warned = "are on 2 hosts and there is no secret: "
    assert [log.count(warned) for log in ran.logs] == [1, 0], ran.logs
    (line,) = [line for line in ran.logs[0].splitlines() if warned in line]
    assert line.startswith("[rank0@"), line
    assert line.endswith("can read and change what they send. See python -m pycomm secret --help")


_RECORD = b"\x17\x03\x03\x00\x05hello"


def _hello(kind: int, nbytes: int) -> bytes:
    return struct.pack("!BHHI", 0x16, 0x0301, nbytes + 4, kind << 24 | nbytes) + nbytes * b"x"


def test_the_parser_sees_one_byte_too_many() -> None:
    hello = _hello(1, 100)
    assert not_tls(hello + 3 * _RECORD) == ""
    assert not_tls(_hello(2, 100) + b"\x15\x03\x03\x00\x02\x02\x28") == ""
    assert "after the last record" in not_tls(hello + _RECORD + b"x")
    assert "cut off" in not_tls(hello + _RECORD[:-1])
    assert "type 0x63" in not_tls(b"cy" + _RECORD)
    assert "type 0x63" in not_tls(hello + b"cy" + _RECORD)


def test_the_parser_takes_a_part_of_a_record_only_where_the_wire_was_cut() -> None:
    whole = _hello(1, 100) + 2 * _RECORD
    assert all(not_tls(whole[:end], cut=True) == "" for end in range(len(whole) + 1))
    assert "type 0x63" in not_tls(_hello(1, 100) + b"cyphr", cut=True)
    assert "type 0x63" in not_tls(_hello(1, 100) + _RECORD + b"cyphr", cut=True)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (_RECORD, "type 0x17 at 0"),
        (_hello(1, 10) + _RECORD + b"\x16\x03\x03\x00\x01x", "type 0x16"),
        (2 * _hello(1, 10), "type 0x16"),
        (_hello(1, LONGEST_HELLO), "type 0x16 and 516 bytes"),
        (_hello(11, 10), "message of type 11"),
        (_hello(1, 10)[:5] + b"\x01\x00\x00\x09" + 10 * b"x", "does not fill its record"),
        (_hello(1, 10) + b"\x15\x03\x03\x00\x03xyz", "type 0x15 and 3 bytes"),
        (_hello(1, 10) + _RECORD + b"\x15\x03\x03\x00\x02\x02\x28", "type 0x15"),
    ],
    ids=range(8),
)
def test_no_tensor_fits_into_the_records_in_plain(data: bytes, why: str) -> None:
    assert why in not_tls(data)


def _ip(protocol: int, inner: bytes, v6: bool) -> tuple[int, bytes]:
    if v6:
        header = struct.pack("!IHBB", 6 << 28, len(inner), protocol, 64)
        return 0x86DD, header + bytes(15) + b"\x01" + bytes(15) + b"\x02" + inner
    header = struct.pack("!BBHIBBH", 0x45, 0, 20 + len(inner), 0, 64, protocol, 0)
    return 0x0800, header + b"\x7f\0\0\x01" + b"\x7f\0\0\x02" + inner


def _segment(sequence: int, flags: int, data: bytes) -> bytes:
    return struct.pack("!HHIIBBHI", 7, 8, sequence, 0, 5 << 4, flags, 0, 0) + data


@pytest.mark.parametrize("v6", [False, True])
def test_the_reader_joins_segments(v6: bool) -> None:
    packets = [_segment(9, 2, b""), _segment(12, 0, b"cd"), _segment(10, 0, b"ab")]
    (stream,) = streams_of(
        [(0x0806, b"who has"), _ip(1 if not v6 else 58, b"ping", v6)]
        + [_ip(6, packet, v6) for packet in packets]
    )
    assert stream.data == b"abcd"
    first, second = ("::1", "::2") if v6 else ("127.0.0.1", "127.0.0.2")
    assert (stream.source, stream.target) == ((first, 7), (second, 8))


@pytest.mark.parametrize("v6", [False, True])
def test_the_reader_passes_over_no_unknown_packet(v6: bool) -> None:
    assert streams_of([_ip(17, struct.pack("!HHHH", 4000, 53, 8, 0), v6)]) == []  # DNS
    with pytest.raises(AssertionError, match="IP protocol 17"):
        streams_of([_ip(17, struct.pack("!HHHH", 4000, 54, 8, 0), v6)])
    with pytest.raises(AssertionError, match="IP protocol 132"):
        streams_of([_ip(132, b"SCTP", v6)])
    with pytest.raises(AssertionError, match="EtherType 0x88cc"):
        streams_of([(0x88CC, b"LLDP")])
    with pytest.raises(AssertionError, match="are missing"):
        streams_of([_ip(6, _segment(*each), v6) for each in ((9, 2, b""), (11, 0, b"b"))])


def test_a_stream_of_a_cut_wire_ends_before_what_is_missing() -> None:
    packets = [_segment(9, 2, b""), _segment(10, 0, b"ab"), _segment(13, 0, b"d")]
    (stream,) = streams_of([_ip(6, packet, False) for packet in packets], cut=True)
    assert stream.data == b"ab"
    assert streams_of([_ip(6, _segment(10, 0, b"ab"), False)], cut=True) == []  # opened earlier
    with pytest.raises(KeyError):
        streams_of([_ip(6, _segment(10, 0, b"ab"), False)])
