"""A rank whose secret cannot be used raises at once, and the others learn why they wait for it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from refused_joins import join
from time_bound import assert_within

from pycomm._group import secrets

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(120)]

TIMEOUT_S = 4.0
WROTE = "has written into the store that it cannot join: "


def join_together(rank: int, world_size: int) -> dict[str, Any]:
    folder = Path(os.environ["TOGETHER"])
    (folder / f"here-{rank}").touch()
    while len(list(folder.glob("here-*"))) < world_size:
        time.sleep(0.01)  # the timeout is for joining, not for importing torch
    return join(rank, world_size, TIMEOUT_S)


def missing(path: Path) -> str:
    path.unlink()
    return f"the secret file {path} cannot be read (ENOENT"


def readable(path: Path) -> str:
    path.chmod(0o644)
    return f"the secret file {path} has mode 0644: other users may read it. Try there: chmod 6"


def cut_off(path: Path) -> str:
    path.write_text(path.read_text()[:40])
    return f"the secret file {path} is not a pycomm secret (line 1, 40 of 63 characters: cut off"


def foreign(path: Path) -> str:
    path.write_text("correct horse battery staple, the whole of it and nothing more")
    return f"the secret file {path} is not a pycomm secret (line 1 does not begin with"


def _met(
    tmp_path: Path, spoil: Callable[[Path], str], bad_rank: int, *, torchrun: bool
) -> tuple[list[dict[str, Any]], list[str], str, str]:
    """What each rank raised and printed, the reason, and the bad file's text."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    secrets.generate_file(str(good))
    bad.write_text(good.read_text())
    bad.chmod(0o600)
    text = bad.read_text().strip()
    reason = spoil(bad)
    env: dict[str, str | None] = {
        "PYCOMM_SECRET": None,
        "PYCOMM_SECURITY": "require",
        "TOGETHER": str(tmp_path),
        "MEETING": f"file://{tmp_path}/store",
    }
    if torchrun:  # its agent keeps the store, so it outlives rank 0
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        env |= {
            "MEETING": f"tcp://127.0.0.1:{agent.port}",
            "MASTER_PORT": str(agent.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    results = run_ranks(
        2,
        join_together,
        init="none",
        backend=None,
        env=lambda rank: {**env, "PYCOMM_SECRET_FILE": str(bad if rank == bad_rank else good)},
    )
    return results.values(), [each.stderr for each in results], reason, text


@pytest.mark.time_bound
@pytest.mark.parametrize("spoil", [missing, readable, cut_off, foreign])
def test_the_reason_reaches_the_ranks_that_wait(
    tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    (waited, refused), (log, _), reason, text = _met(tmp_path, spoil, 1, torchrun=False)
    assert reason.split(". Try there")[0].split(" (ENOENT")[0] in refused["text"]
    assert waited["type"] == "RendezvousTimeoutError"
    assert waited["peer"] == 1
    told = f"rank 1 on {os.uname().nodename} {WROTE}{reason}"
    assert told in waited["text"]
    assert log.count(told) == 1, log
    for said in (waited["text"], log):
        assert text[16:] not in said and text[16:30] not in said, "bytes of the secret"
        assert "correct horse" not in said
    # Anybody who reaches the store can write such a notice, so it ends no wait.
    assert waited["took"] > TIMEOUT_S - 0.5
    assert_within(refused["took"], TIMEOUT_S - 1)


def test_the_reason_of_rank_zero_reaches_those_that_follow_it(tmp_path: Path) -> None:
    (_, waited), (_, log), reason, _ = _met(tmp_path, readable, 0, torchrun=True)
    assert waited["type"] == "RendezvousTimeoutError"
    told = f"rank 0 on {os.uname().nodename} {WROTE}{reason}"
    assert told in waited["text"]
    assert log.count(told) == 1, log


def off(path: Path) -> str:
    return f"there is a secret ({path}) and PYCOMM_SECURITY=off"


@pytest.mark.time_bound
def test_the_reason_of_a_policy_reaches_them_too(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secrets.generate_file(str(path))
    waited, refused = run_ranks(
        2,
        join_together,
        init="none",
        backend=None,
        env=lambda rank: {
            "PYCOMM_SECRET": None,
            "PYCOMM_SECRET_FILE": str(path),
            "MEETING": f"file://{tmp_path}/store",
            "PYCOMM_SECURITY": "off" if rank == 1 else "auto",
            "TOGETHER": str(tmp_path),
        },
    ).values()
    assert f"{WROTE}{off(path)}" in waited["text"]
    assert waited["type"] == "RendezvousTimeoutError"
    assert waited["took"] > TIMEOUT_S - 0.5
    assert off(path) in refused["text"]
    assert refused["type"] == "InvalidArgumentError"
    assert_within(refused["took"], TIMEOUT_S - 1)


# Not bad, but worth a line: root's file in memory that every user may read, as Kubernetes mounts it


def two_groups(rank: int, world_size: int) -> str:
    dist.new_group(list(range(world_size)))
    return str(secrets.state())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a file of root")
@pytest.mark.parametrize(("mode", "lines"), [(0o644, 1), (0o640, 0)])
def test_roots_file_on_tmpfs_that_all_may_read_is_one_warning(mode: int, lines: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "secret"
        key_id = secrets.generate_file(str(path)).key_id
        path.chmod(mode)
        env = {"PYCOMM_SECRET": None, "PYCOMM_SECRET_FILE": str(path), "PYCOMM_SECURITY": "require"}
        results = run_ranks(2, two_groups, env=env)
    warning = f"pycomm WARNING: the secret file {path} may be read by every user of this container"
    for rank, result in enumerate(results):
        assert key_id in result.value
        assert result.stderr.count(f"[rank{rank}@{os.uname().nodename}] {warning}") == lines
        assert result.stderr.count("WARNING") == lines, result.stderr
