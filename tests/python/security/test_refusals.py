"""Rank 0 serves the store and refuses to start: the other ranks learn why before it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import rings
from ranks import free_port, run_ranks
from refused_joins import OTHER_VERSION, join
from time_bound import assert_within

from pycomm._group import secrets

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(120)]


Environment = dict[str, str | None]
Refuse = Callable[[int, Path], Environment]


def transport(rank: int, _: Path) -> Environment:
    return {"PYCOMM_TRANSPORT": "tcp" if rank == 0 else None}


def interface(rank: int, _: Path) -> Environment:
    return {"PYCOMM_SOCKET_IFNAME": "bond0" if rank == 0 else None}


def option(rank: int, _: Path) -> Environment:
    """Python refuses it, before anything looks for the other ranks."""
    return {"PYCOMM_SEGMENT_NBYTES": "many" if rank == 0 else None}


def _secret_file(folder: Path, name: str) -> str:
    path = folder / name
    if not path.exists():
        secrets.generate_file(str(path))
    return str(path)


def secret_of_rank_2(rank: int, folder: Path) -> Environment:
    return {"PYCOMM_SECRET_FILE": _secret_file(folder, "other" if rank == 2 else "job")}


def secret_of_rank_0_alone(rank: int, folder: Path) -> Environment:
    return {"PYCOMM_SECRET_FILE": _secret_file(folder, "job") if rank == 0 else None}


def version_of_rank_1(rank: int, _: Path) -> Environment:
    return {OTHER_VERSION: "99" if rank == 1 else None}


RUNS = 20
"""So that it does not depend on which rank is first."""
STAY_S = 2.0  # rank 0, so that the others learn why
PATIENCE_S = 5.0  # until the last rank has started, on a machine that is busy


@pytest.mark.time_bound
@pytest.mark.parametrize("run", rings.first_of(range(RUNS)))
@pytest.mark.parametrize(
    ("refuse", "size", "reason"),
    [
        (transport, 2, "transport=tcp"),
        (interface, 2, "bond0"),
        (option, 3, "PYCOMM_SEGMENT_NBYTES"),
        (secret_of_rank_2, 3, "a different secret"),
        (secret_of_rank_0_alone, 2, " secret"),
        (version_of_rank_1, 3, "pycomm wire version"),
    ],
)
def test_all_ranks_name_the_reason(
    tmp_path: Path, refuse: Refuse, size: int, reason: str, run: int
) -> None:
    port = free_port()
    results = run_ranks(
        size,
        join,
        args=(30.0,),
        init="none",
        backend=None,
        env=lambda rank: {
            "MEETING": f"tcp://127.0.0.1:{port}",
            "HOME": str(tmp_path),  # without a secret of this user
            "PYCOMM_SECRET": None,
            **refuse(rank, tmp_path),
        },
    )
    for rank, result in enumerate(results):
        name, text, peer = (result.value[each] for each in ("type", "text", "peer"))
        assert reason in text, (rank, text)
        if refuse is option and rank == 0:
            assert name == "ValueError", text
            continue
        assert name in ("ConfigMismatchError", "NoInterfaceError", "VersionMismatchError"), text
        assert peer != rank, (rank, text)
        if refuse is interface:
            assert peer == (None if rank == 0 else 0), (rank, text)
    assert_within(max(result.value["took"] for result in results), STAY_S + PATIENCE_S)
