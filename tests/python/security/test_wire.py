"""With a secret, every byte between ranks parses as a TLS record, on every interface of a host.

Two network namespaces are two hosts with two ranks each. torch's own store is the one exception: it
is not pycomm's, and docs/security.md says what follows from that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import installed_environment
from hosts import Host, run_on_both, wire
from sniffer import Stream, not_tls, recorded

from pycomm import _secret

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.namespaces,
    pytest.mark.slow,
    pytest.mark.timeout(170),
]

_STORE_PORT = 29500
_PATTERN = b"pycomm's secret!"

# Every kind of connection between hosts, and within one if transport=tcp: control links, bulk links
# of two connections, and those of a group that is made later.
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
    with wire(
        Host("alpha", "192.168.1.10", "fd77::10"), Host("beta", "192.168.1.11", "fd77::11")
    ) as hosts:
        yield hosts


def _streams(both: tuple[Host, Host], folder: Path, **variables: str) -> list[Stream]:
    env = installed_environment(folder / "installed") | variables
    env |= {"MASTER_ADDR": both[0].address, "MASTER_PORT": str(_STORE_PORT), "WORLD_SIZE": "4"}
    with recorded(both[0], folder) as streams:
        command = [sys.executable, "-c", PROGRAM]
        outcomes = run_on_both(
            [(host, command, env | {"RANK": str(2 * i)}) for i, host in enumerate(both)], folder
        )
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes
    ours = [stream for stream in streams if _STORE_PORT not in stream.ports]
    assert sum(len(stream.data) for stream in ours) > 1_000_000
    # Within the host ranks connect by Unix sockets, unless told to use TCP.
    within = any(stream.source[0] == stream.target[0] for stream in ours)
    assert within == (variables.get("PYCOMM_TRANSPORT") == "tcp")
    return ours


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_byte_is_tls(both: tuple[Host, Host], tmp_path: Path, transport: str) -> None:
    key_id = _secret.generate_file(str(tmp_path / "secret")).key_id
    ours = _streams(
        both,
        tmp_path,
        PYCOMM_SECRET_FILE=str(tmp_path / "secret"),
        PYCOMM_TRANSPORT=transport,
        PYCOMM_STREAMS="2",
    )
    for stream in ours:
        assert not_tls(stream.data) == "", stream
        assert _PATTERN not in stream.data
    assert any(key_id.encode() in stream.data for stream in ours)  # which is public


def test_without_a_secret_the_same_program_is_read(both: tuple[Host, Host], tmp_path: Path) -> None:
    ours = _streams(both, tmp_path, PYCOMM_STREAMS="2")
    assert sum(_PATTERN * 100 in stream.data for stream in ours) >= 2
    assert all(not_tls(stream.data) for stream in ours)


def test_the_parser_sees_one_byte_too_many() -> None:
    record = b"\x17\x03\x03\x00\x05hello"
    assert not_tls(b"\x16\x03\x01\x00\x01x" + 3 * record) == ""
    assert "after the last record" in not_tls(record + b"x")
    assert "cut off" in not_tls(record[:-1])
    assert "type 0x16" in not_tls(record + b"\x16\x03\x03\x00\x01x")
    assert "type 0x63" in not_tls(b"cy" + record)
