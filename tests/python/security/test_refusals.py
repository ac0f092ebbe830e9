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
ROOM_S = 2.0  # on a machine that is busy


@pytest.mark.time_bound
@pytest.mark.parametrize("run", rings.first_of(range(RUNS)))
@pytest.mark.parametrize(
    ("refuse", "peers", "reason"),
    [
        (transport, ([1], [0]), "transport=tcp"),
        (interface, ([None], [0]), "bond0"),
        (option, ([None], [0], [0]), "PYCOMM_SEGMENT_NBYTES"),
        (secret_of_rank_2, ([2], [2], [0, 1]), "a different secret"),
        (secret_of_rank_0_alone, ([1], [0]), " secret"),
        (version_of_rank_1, ([1], [0, 2], [1]), "pycomm wire version"),
    ],
)
def test_all_ranks_name_the_reason(
    tmp_path: Path, refuse: Refuse, peers: tuple[list[int | None], ...], reason: str, run: int
) -> None:
    """``peers``: whom each rank may blame."""
    port = free_port()
    results = run_ranks(
        len(peers),
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
        # An entry that any rank may have written, and that this one cannot open, names none.
        names_none = "/error of the store" in text
        assert peer in ([None] if names_none else peers[rank]), (rank, text)
        if refuse is option and rank == 0:
            assert name == "ValueError", text
            continue
        assert name in ("ConfigMismatchError", "NoInterfaceError", "VersionMismatchError"), text
    # Rank 0 cannot refuse later than when all have come.
    all_here_s = max(result.value["ended"] - result.value["took"] for result in results)
    last_end_s = max(result.value["ended"] for result in results)
    assert_within(last_end_s - all_here_s, STAY_S + ROOM_S)
