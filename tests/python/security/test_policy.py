"""The policy table of docs/security.md: PYCOMM_SECURITY without and with a secret, as real jobs.

Each job has two ranks, both on one host or one on each of two hosts, which are network namespaces.
The packets of the first host are recorded: the bytes must agree with the line that rank 0 logs.
Connections to torch's own store are left out. test_closed_group.py tests ranks of which one has no
secret, a different one or a different policy.

With -n 0 -s, each case prints a row of the table. PYCOMM_POLICY_TABLE=FILE writes all rows there.
A row is shorter than the output of the ranks: see _error() and _links().
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hosts import Host, Outcome, alpha_and_beta, run_on_both, wire
from processes import child_environment
from sniffer import Stream, not_tls, recorded

from pycomm._group import secrets

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.namespaces,
    pytest.mark.timeout(170),
]

TABLE = os.environ.get("PYCOMM_POLICY_TABLE")  # read here: tests do not see such variables
_STORE_PORT = 29500
_PATTERN = b"pycomm's policy!"

# The second group of the same ranks must not log a second warning.
PROGRAM = f"""
import torch, torch.distributed as dist, pycomm
dist.init_process_group("pycomm")
text = torch.frombuffer(bytearray({_PATTERN!r} * 10_000), dtype=torch.uint8)
for group in (dist.group.WORLD, dist.new_group([0, 1])):
    for root in (0, 1):
        got = text.clone() if dist.get_rank() == root else torch.zeros_like(text)
        dist.broadcast(got, root, group=group)
        assert torch.equal(got, text)
dist.barrier()
dist.destroy_process_group()
"""

_UNIX = "Unix sockets: nothing over TCP"
_UNIX_SECRET = "Unix sockets, with the secret of key id ID: nothing over TCP"
_PLAIN = "TCP on eth0: all bytes plain"
_WARNED = f"{_PLAIN}; rank 0 logs one warning"
_TLS = "TCP on eth0, TLS with the secret of key id ID: all bytes TLS"
_GENERATE, _UNSET = "python -m pycomm secret --generate", "unset PYCOMM_SECURITY"
_OFF = f"error: there is a secret (FILE) and PYCOMM_SECURITY=off; try {_UNSET}"
_REQUIRE = "error: PYCOMM_SECURITY=require, but "
_SEVERAL = f"{_REQUIRE}the ranks of group 0 are on 2 hosts and there is no secret; try {_GENERATE}"
_NO_UNIX = (
    f"{_REQUIRE}there is no secret and the ranks of group 0 do not all reach each other by Unix "
    f"sockets; try {_GENERATE}"
)

CASES = (
    ("auto", "without", "one", _UNIX),
    ("auto", "without", "two", _WARNED),
    ("auto", "with", "one", _UNIX_SECRET),
    ("auto", "with", "two", _TLS),
    ("require", "without", "one", _UNIX),
    ("require", "without", "one-tcp", _NO_UNIX),
    ("require", "without", "two", _SEVERAL),
    ("require", "with", "one", _UNIX_SECRET),
    ("require", "with", "two", _TLS),
    ("off", "without", "one", _UNIX),
    ("off", "without", "two", _PLAIN),
    ("off", "with", "one", _OFF),
    ("off", "with", "two", _OFF),
)
IN_CI = ("require-without-two", "off-without-two")


@dataclasses.dataclass(frozen=True)
class _Guest(Host):
    """A second process of a host, with files of its own."""

    of: Host

    @property
    def namespace(self) -> str:
        return self.of.namespace


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Host, Host]]:
    with wire(*alpha_and_beta()) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows: list[str] = []
    yield rows
    if TABLE:
        Path(TABLE).write_text("".join(f"{row}\n" for row in sorted(rows)))


def _error(outcome: Outcome) -> str:
    """The error of a rank up to its first colon, and one command of its hint.

    A rank may get the error of the other one before it finds its own. "Rank 0 on HOST cannot join:"
    in front of it is left out.
    """
    found = re.search(
        r"^pycomm\.errors\.InvalidArgumentError: (?:Rank \d on \S+ cannot join: )?(.*?)(?:: .*)?"
        r" \[code=INVALID_ARGUMENT .*\] Try: (.*)$",
        outcome.err,
        re.MULTILINE,
    )
    assert found, outcome
    (command,) = [each for each in (_GENERATE, _UNSET) if each in found[2]]
    return f"error: {found[1]}; try {command}"


def _bytes(streams: Sequence[Stream]) -> str:
    """Whether all that the ranks sent to each other over TCP is plain or TLS."""
    if not streams:
        return "nothing over TCP"
    assert sum(len(stream.data) for stream in streams) > 4 * 10_000 * len(_PATTERN)
    readable = sum(_PATTERN * 50 in stream.data for stream in streams)
    in_tls = [not_tls(stream.data) == "" for stream in streams]
    if all(in_tls) and not any(_PATTERN in stream.data for stream in streams):
        return "all bytes TLS"
    assert not any(in_tls) and readable >= 2, streams
    return "all bytes plain"


def _links(line: str) -> str:
    """Rank 0's line about its links without addresses, and without what it says of shared memory.

    Before "Unix sockets" that is "shared memory, and ", and behind other links all from ";" on.
    """
    short = re.sub(r" \(.*?\)", "", line).partition(";")[0]
    return short.removeprefix("shared memory, and ")


def _happened(outcomes: Sequence[Outcome], streams: Sequence[Stream]) -> str:
    """The last cell of the row: of what the ranks logged and sent, not of what is expected."""
    ours = [stream for stream in streams if _STORE_PORT not in stream.ports]
    assert len(ours) < len(streams), "the recorder has not seen torch's store"
    lines = [outcome.err.splitlines() for outcome in outcomes]
    warnings = [sum("WARNING" in line and "no secret" in line for line in each) for each in lines]
    codes = [outcome.returncode for outcome in outcomes]
    if codes == [1, 1]:
        (what,) = {_error(outcome) for outcome in outcomes}
        assert not ours, "the ranks have connected"
    else:
        assert codes == [0, 0], outcomes
        said = [re.findall(r"pycomm INFO: 2 ranks over (.*)", outcome.err) for outcome in outcomes]
        assert [len(each) for each in said] == [1, 0], outcomes
        what = f"{_links(said[0][0])}: {_bytes(ours)}"
    if warnings == [0, 0]:
        return what
    assert warnings == [1, 0], outcomes
    return f"{what}; rank 0 logs one warning"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name in IN_CI else [pytest.mark.nightly])
        for case in CASES
        for name in ["-".join(case[:3])]
    ],
)
def test_policy_table(
    both: tuple[Host, Host], table: list[str], tmp_path: Path, case: tuple[str, str, str, str]
) -> None:
    policy, secret, hosts, expected = case
    file = tmp_path / ".config" / "pycomm" / "secret"
    file.parent.mkdir(parents=True)
    key_id = secrets.generate_file(str(file)).key_id if secret == "with" else None
    env = child_environment(
        {
            "HOME": str(tmp_path),
            "PYCOMM_SECRET": None,
            "PYCOMM_SECURITY": policy,
            "PYCOMM_TRANSPORT": "tcp" if hosts == "one-tcp" else "auto",
            "PYCOMM_DEBUG": "INFO",
            "MASTER_ADDR": both[0].address,
            "MASTER_PORT": str(_STORE_PORT),
            "WORLD_SIZE": "2",
        }
    )
    guest = _Guest("alpha-too", both[0].address, both[0].address_v6, of=both[0])
    places = both if hosts == "two" else (both[0], guest)
    command = [sys.executable, "-c", PROGRAM]
    with recorded(both[0], tmp_path) as streams:
        commands = [(host, command, env | {"RANK": str(rank)}) for rank, host in enumerate(places)]
        outcomes = run_on_both(commands, tmp_path)
    happened = _happened(outcomes, streams).replace(str(file), "FILE")
    if key_id:
        happened = happened.replace(key_id, "ID")
    table.append(f"{policy} | {secret} | {hosts} | {happened}")
    print(f"\n{table[-1]}")
    assert happened == expected, outcomes
