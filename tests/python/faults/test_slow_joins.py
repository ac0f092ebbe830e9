"""A rank that waits for another one says so after 10 s, and not only at its timeout."""

from __future__ import annotations

import re
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hosts import Host, run, run_on_both, wire
from processes import child_environment
from ranks import run_ranks

import pycomm

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.timeout(120),
    pytest.mark.ci,
]

TIMEOUT_S = 14
ALPHA = Host("alpha", "192.168.1.10", "fd77::10")
BETA = Host("beta", "192.168.1.11", "fd77::11")
TRY = "a firewall may block that port. Try on each host: python -m pycomm doctor"
TRAIN = f"""
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist, pycomm
folder = Path(sys.argv[1])
(folder / ("here-" + os.environ["RANK"])).touch()
while len(list(folder.glob("here-*"))) < 2:
    time.sleep(0.01)  # the timeout is for joining, not for importing torch
try:
    dist.init_process_group("pycomm", timeout=timedelta(seconds={TIMEOUT_S}))
    dist.all_reduce(torch.ones(1 << 16))
except pycomm.errors.PycommError as error:
    print(error.code, error.hint, flush=True)
"""
# On beta: torch's store is reached, other ports are not.
NO_OTHER_PORT = "tcp dport 29500 accept; tcp sport 29500 accept; meta l4proto tcp drop"
NOBODY_OUT = "tcp dport 29500 accept; tcp flags & (syn | ack) == syn drop"


def _behind_a_firewall(folder: Path, incoming: str, outgoing: str) -> tuple[list[str], list[str]]:
    """What two ranks print, and what they log, while beta drops packets."""
    if shutil.which("nft") is None:
        pytest.skip("needs the command nft (package nftables)")
    with wire(ALPHA, BETA) as hosts:
        chains = (
            f"chain input {{ type filter hook input priority 0; iif lo accept; {incoming}; }}; "
            f"chain output {{ type filter hook output priority 0; oif lo accept; {outgoing}; }};"
        )
        try:
            run(*BETA.command("nft", "flush ruleset"))
        except OSError as error:
            pytest.skip(f"nft is not allowed here: {error}")
        run(*BETA.command("nft", f"table inet fault {{ {chains} }};"))
        outcomes = run_on_both(
            [
                (
                    host,
                    [sys.executable, "-c", TRAIN, str(folder)],
                    child_environment(
                        {
                            "RANK": str(rank),
                            "WORLD_SIZE": "2",
                            "MASTER_ADDR": ALPHA.address,
                            "MASTER_PORT": "29500",
                        }
                    ),
                )
                for rank, host in enumerate(hosts)
            ],
            folder,
        )
    return [each.out for each in outcomes], [each.err for each in outcomes]


@pytest.mark.namespaces
def test_a_blocked_port_is_logged_before_the_timeout_on_both_sides(tmp_path: Path) -> None:
    said, (alpha, beta) = _behind_a_firewall(tmp_path, NO_OTHER_PORT, NO_OTHER_PORT)
    port = r"192\.168\.1\.11:\d+"
    tries = rf"rank 0 on \S+ has waited 1\d s for its connection to rank 1 on \S+ at {port} "
    waits = rf"rank 1 on \S+ has waited 1\d s for rank 0 on \S+ to connect to {port}: {TRY}"
    assert len(re.findall(tries + rf"\(ETIMEDOUT [^\n]*\): {TRY}", alpha)) == 1, alpha
    assert len(re.findall(waits, beta)) == 1, beta
    for each in said:
        assert each.startswith("CONNECT_FAILED ") and "python -m pycomm doctor" in each, said


@pytest.mark.nightly
@pytest.mark.namespaces
def test_a_port_that_is_blocked_in_one_direction_is_logged_in_the_first_operation(
    tmp_path: Path,
) -> None:
    """Control links are opened by the lower rank of a pair, those of data by each that sends."""
    _, (alpha, beta) = _behind_a_firewall(tmp_path, "accept", NOBODY_OUT)
    tries = r"rank 1 on \S+ has waited 1\d s for its connection to rank 0 on \S+ at "
    assert len(re.findall(rf"{tries}192\.168\.1\.10:\d+: {TRY}", beta)) == 1, beta
    assert "has waited" not in alpha


def wait_alone(rank: int, world_size: int, folder: str) -> float:
    (Path(folder) / f"here-{rank}").touch()
    while len(list(Path(folder).glob("here-*"))) < world_size:
        time.sleep(0.01)
    store = dist.FileStore(f"{folder}/store", 3)
    begin = time.monotonic()
    with pytest.raises(pycomm.errors.RendezvousTimeoutError, match="missing: 2"):
        dist.init_process_group(
            "pycomm",
            store=store,
            rank=rank,
            world_size=3,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
    return time.monotonic() - begin


@pytest.mark.nightly
def test_a_rank_that_does_not_come_is_logged_before_the_timeout(tmp_path: Path) -> None:
    results = run_ranks(2, wait_alone, args=(str(tmp_path),), init="none", backend=None)
    for rank, result in enumerate(results):
        line = (
            rf"rank {rank} on \S+ has waited 1\d s for rank 2, which has not joined "
            r"\(3 ranks in all\)\. If it has started, try on each host: python -m pycomm doctor"
        )
        assert len(re.findall(line, result.stderr)) == 1, result.stderr
