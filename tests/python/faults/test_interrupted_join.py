"""Signals while a group is made: Ctrl-C ends the wait on all ranks, and they name the rank."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import fault_ranks
import pytest
import rings
import torch
import torch.distributed as dist
from rank_child import mark
from ranks import Ranks, start_ranks
from time_bound import assert_within

import pycomm
from pycomm._group import secrets
from pycomm._native import loader

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.ci,
    pytest.mark.usefixtures("fault_build"),
    pytest.mark.timeout(900),
]

REASON = "was interrupted by a signal, such as Ctrl-C, while the group was made"


def _join(rank: int, world_size: int, store: str) -> list[Any]:
    """What the attempt ended with, when, and whether this process can have a group afterwards."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    mark("joining")
    ended: list[Any] = []
    try:
        dist.init_process_group(
            "pycomm",
            init_method=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
    except KeyboardInterrupt:
        ended = ["KeyboardInterrupt", "", time.monotonic()]
    except pycomm.errors.PycommError as error:
        ended = [error.code, str(error), time.monotonic()]
    mark("ended")
    dist.init_process_group("pycomm", init_method=f"{store}-{rank}", rank=0, world_size=1)
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [*ended, total.tolist()]


def _wait_for_key(running: Ranks, store: Path, rank: int) -> None:
    """Until the rank has said in the store who it is, so that it waits for the others."""
    key = f"member/{rank}".encode()
    running.wait_until(
        rank, lambda: store.exists() and key in store.read_bytes(), "is not in the store", 50.0
    )


def meet(rank: int, world_size: int, store: str) -> list[Any]:
    return _join(rank, 3, store)


@pytest.mark.alone
@pytest.mark.time_bound
@pytest.mark.ci
@pytest.mark.parametrize(
    ("victim", "sealed"),
    [
        pytest.param(0, False, id="first"),
        rings.nightly((1, False), id="second"),
        rings.nightly((0, True), id="first-secret"),
        pytest.param(1, True, id="second-secret"),
    ],
)
def test_ctrl_c_while_ranks_are_missing(victim: int, sealed: bool, tmp_path: Path) -> None:
    """Of three ranks the last never comes."""
    secret = tmp_path / "secret"
    if sealed:
        secrets.generate_file(str(secret))
    args = (f"file://{tmp_path}/store",)
    env = {"PYCOMM_SECRET": None, "PYCOMM_SECRET_FILE": str(secret) if sealed else "none"}
    with start_ranks(2, meet, args=args, init="none", backend=None, env=env) as running:
        for rank in range(2):
            _wait_for_key(running, tmp_path / "store", rank)
        sent_s = running.kill(victim, signal.SIGINT)
        results = running.collect(60).check()
    of_victim, of_other = results.values()[victim], results.values()[1 - victim]
    assert of_victim[0] == "KeyboardInterrupt", results.describe()
    assert of_other[0] == "ABORTED" and REASON in of_other[1], results.describe()
    assert f"Rank {victim} on " in of_other[1], of_other[1]
    for _, _, ended_s, total in results.values():
        assert_within(ended_s - sent_s, 5.0, results.describe())
        assert total == [1.0] * 3


def connect(rank: int, world_size: int, store: str) -> list[Any]:
    fault_ranks.use_fault_build()
    if rank == 1:
        loader.load().arm_fault_points("hello.received:1:stop")
    return _join(rank, world_size, store)


@pytest.mark.alone
@pytest.mark.time_bound
def test_ctrl_c_while_a_connection_is_made(tmp_path: Path) -> None:
    """Both have met; rank 1 stops before it answers rank 0, and wakes after rank 0 has left."""
    args = (f"file://{tmp_path}/store",)
    with start_ranks(2, connect, args=args, init="none", backend=None) as running:
        running.wait_for_mark(0, "joining")
        running.wait_until(1, lambda: running.state(1) == "T", "did not stop")
        sent_s = running.kill(0, signal.SIGINT)
        running.wait_for_mark(0, "ended")
        running.kill(1, signal.SIGCONT)
        results = running.collect(60).check()
    first, second = results.values()
    assert first[0] == "KeyboardInterrupt", results.describe()
    assert_within(first[2] - sent_s, 5.0, results.describe())
    assert second[0] == "ABORTED" and REASON in second[1], results.describe()


def meet_by_torchrun(rank: int, world_size: int, port: int) -> list[Any]:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_RUN_ID="a test",
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mark("joining")
    try:
        dist.init_process_group(
            "pycomm", rank=rank, world_size=world_size, timeout=timedelta(seconds=20)
        )
    except KeyboardInterrupt:
        return ["KeyboardInterrupt", ""]
    except pycomm.errors.PycommError as error:
        return [error.code, str(error)]
    return ["joined", ""]


@pytest.mark.ci
def test_ctrl_c_under_torchrun_before_rank_0_has_come_is_known_to_it() -> None:
    """Rank 1 cannot end the group then: it leaves a word for rank 0, which waits for it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    args = (server.port,)
    options: dict[str, Any] = {"init": "none", "backend": None, "destroy": False}
    with start_ranks(2, meet_by_torchrun, args=args, ranks=[1], **options) as running:
        running.wait_for_mark(1, "joining")
        running.wait_until(
            1,
            lambda: any(str(key).endswith("claim/1") for key in server.list_keys()),
            "has not claimed its rank",
        )
        time.sleep(0.5)
        running.kill(1, signal.SIGINT)
        assert running.collect(60).check().values() == [["KeyboardInterrupt", ""]]
    with start_ranks(2, meet_by_torchrun, args=args, ranks=[0], **options) as running:
        (result,) = running.collect(100).check()
    code, text = result.value
    assert code == "RENDEZVOUS_TIMEOUT" and "missing: 1" in text, text
    assert f"rank 1 on {socket.gethostname()} has written into the store" in text, text
    assert REASON in text and REASON in result.stderr, result.describe()


def wait_for_each_other(rank: int, world_size: int, folder: str) -> list[float]:
    """Rank 1 joins when rank 0's handler has run, and rank 0 waits for rank 1."""
    signal.signal(signal.SIGUSR2, lambda *_: (Path(folder) / "handled").touch())
    while rank == 1 and not (Path(folder) / "handled").exists():
        time.sleep(0.01)
    method = f"file://{folder}/store"
    dist.init_process_group("pycomm", init_method=method, rank=rank, world_size=world_size)
    total = torch.full((3,), rank + 1.0)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return list(total.tolist())


def test_a_handler_that_returns_runs_and_the_join_goes_on(tmp_path: Path) -> None:
    args = (str(tmp_path),)
    with start_ranks(2, wait_for_each_other, args=args, init="none", backend=None) as running:
        _wait_for_key(running, tmp_path / "store", 0)
        running.kill(0, signal.SIGUSR2)
        results = running.collect(60).check()
    assert results.values() == [[3.0] * 3] * 2
