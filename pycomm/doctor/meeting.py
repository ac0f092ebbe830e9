"""Which ranks came, on which hosts, and how this process finds the others' entries."""

from __future__ import annotations

import dataclasses
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycomm import errors
from pycomm._native import loader
from pycomm.doctor.board import Board
from pycomm.doctor.facts import HostFacts, known
from pycomm.doctor.system import host_identity, resolve, socket_options

_ROSTER_S = 10.0
"""After rank 0 has stopped waiting for the others."""


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
    agent_store: bool = False
    """torchrun's agent holds the store; otherwise rank 0 does."""
    attempt: str = "0"
    """How often torchrun has started its workers again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What the user wants. Rank 0's measurements count for all ranks."""

    seconds: float = 1.5
    """Per measurement in the first round; half of it in later ones."""
    parameters: float = 62.5e6
    reach_only: bool = False
    ranks_per_host: int = 1
    """By hand: how many ranks of the job each host will have."""
    wait_s: float = 60.0
    strict: bool = False
    progress: Callable[[str], None] = lambda _: None


class NoDoctorError(Exception):
    """The store is there, and rank 0 runs no doctor that counts on this rank."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roster:
    """The ranks that joined this run; identical on every rank."""

    token: str = ""
    ranks: Sequence[int] = ()
    identities: Sequence[str] = ()
    routes: Sequence[str] = ()
    """First guesses of addresses, in the order of ``ranks``."""
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Rank 0's options that all ranks use."""

    def hosts(self) -> list[list[int]]:
        """The ranks of each host; the first of a host speaks for it."""
        by_identity: dict[str, list[int]] = {}
        for rank, identity in zip(self.ranks, self.identities, strict=True):
            by_identity.setdefault(identity, []).append(rank)
        return list(by_identity.values())

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def meet(
    board: Board,
    place: Place,
    environ: Mapping[str, str],
    wait_s: float,
    plan: Mapping[str, Any] | None = None,
) -> Roster:
    """Rank 0 waits for the others; all get its list.

    The other ranks write nothing before rank 0 has opened a run: in a pod that was started again,
    the store may be that of the training.

    Raises:
        NoDoctorError: Rank 0 opened no run, or wrote no list.
        TimeoutError: The list came without this rank.
    """
    if place.rank == 0:
        board.put("open", wait_s)
    else:
        wait_s = max(wait_s, float(_from_rank_0(board, "open", wait_s)))
    route = choose_address(environ, place.master, [], 0).get("address", "")
    board.put("hello", [host_identity(), route, socket.gethostname()])
    if place.rank == 0:
        came = board.collect("hello", range(place.size), wait_s)
        ranks = sorted(came)
        roster = Roster(
            token=secrets.token_hex(16),
            ranks=ranks,
            identities=[came[rank][0] for rank in ranks],
            routes=[came[rank][1] for rank in ranks],
            plan=plan or {},
        )
        board.put("roster", roster.as_json())
        return roster
    roster = Roster(**known(Roster, _from_rank_0(board, "roster", wait_s + _ROSTER_S)))
    if place.rank not in roster.ranks:
        raise TimeoutError(f"rank {place.rank} came too late: the others have begun without it")
    return roster


def _from_rank_0(board: Board, topic: str, wait_s: float) -> Any:
    try:
        return board.get(topic, 0, wait_s)
    except TimeoutError as error:
        raise NoDoctorError(
            f"The store answers, and rank 0 runs no doctor there (no {topic!r} for {wait_s:.0f} s)."
        ) from error


def choose_address(
    environ: Mapping[str, str], master: str, everyone: Sequence[tuple[str, str]], index: int
) -> dict[str, str]:
    """Where the engine would listen: ``address``, ``interface`` and ``why``, or ``error``. Empty
    without the extension."""
    settings = socket_options(environ)
    if master and not resolve(master):  # the engine would wait for the resolver again
        master = ""
    try:
        chosen = loader.native.choose_address(
            settings.interface, settings.socket_family, master, everyone, index
        )
    except ImportError:
        return {}
    except errors.PycommError as error:
        return {"error": str(error)}
    return dict(chosen)


def with_choice(facts: HostFacts, chosen: Mapping[str, str]) -> HostFacts:
    """The facts with what ``choose_address`` gave; an error is a problem of the host."""
    if not chosen:
        return facts
    if error := chosen.get("error"):
        return dataclasses.replace(facts, problems=[*facts.problems, error])
    return dataclasses.replace(
        facts,
        address=chosen["address"],
        interface=chosen["interface"],
        why=chosen["why"],
    )
