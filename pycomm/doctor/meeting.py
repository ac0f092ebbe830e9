"""Which ranks came, on which hosts, and how this process finds the others' entries."""

from __future__ import annotations

import dataclasses
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from pycomm import _extension, errors
from pycomm.doctor.board import Board
from pycomm.doctor.facts import HostFacts
from pycomm.doctor.system import socket_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What the launcher or the user gave this process."""

    rank: int
    size: int
    master: str
    """The store's host as the job names it."""
    master_port: int
    store_port: int
    """Where the store listens that this run uses."""
    by_hand: bool = False
    """Started on each host without a launcher: the doctor has a store of its own, and every host
    prints."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roster:
    """Who came. The same on all ranks."""

    token: str
    ranks: Sequence[int]
    identities: Sequence[str]
    routes: Sequence[str]
    """First guesses of addresses, in the order of ``ranks``."""

    def hosts(self) -> list[list[int]]:
        """The ranks of each host; the first of a host speaks for it."""
        by_identity: dict[str, list[int]] = {}
        for rank, identity in zip(self.ranks, self.identities, strict=True):
            by_identity.setdefault(identity, []).append(rank)
        return list(by_identity.values())

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def meet(board: Board, place: Place, environ: Mapping[str, str], wait_s: float) -> Roster:
    """Rank 0 waits for the others; all get its list.

    Raises:
        TimeoutError: Rank 0 did not come, or its list came without this rank.
    """
    identity = _extension.load().host_identity()
    route = choose_address(environ, place.master, [], 0).get("address", "")
    board.put("hello", [identity, route, socket.gethostname()])
    if place.rank == 0:
        came = board.collect("hello", range(place.size), wait_s)
        ranks = sorted(came)
        roster = Roster(
            token=secrets.token_hex(16),
            ranks=ranks,
            identities=[came[rank][0] for rank in ranks],
            routes=[came[rank][1] for rank in ranks],
        )
        board.put("roster", roster.as_json())
        return roster
    roster = Roster(**board.get("roster", 0, wait_s + 10.0))
    if place.rank not in roster.ranks:
        raise TimeoutError(f"rank {place.rank} came too late: the others have begun without it")
    return roster


def choose_address(
    environ: Mapping[str, str], master: str, everyone: Sequence[tuple[str, str]], index: int
) -> dict[str, str]:
    """Where the engine would listen: ``address``, ``interface`` and ``why``, or ``error``."""
    settings = socket_options(environ)
    try:
        chosen = _extension.load().choose_address(
            settings.interface, settings.socket_family, master, everyone, index
        )
    except errors.PycommError as error:
        return {"error": str(error)}
    return dict(chosen)


def with_choice(facts: HostFacts, chosen: Mapping[str, str]) -> HostFacts:
    """The facts with what ``choose_address`` gave; an error is a problem of the host."""
    if error := chosen.get("error"):
        return dataclasses.replace(facts, problems=[*facts.problems, error])
    return dataclasses.replace(
        facts,
        address=chosen["address"],
        interface=chosen["interface"],
        why=chosen["why"],
    )
