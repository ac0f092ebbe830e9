"""Elastic trainings on two, three and four hosts: ranks die, machines lose power, wires are cut.

Each host is a network namespace and a pid namespace (``elastic_hosts.py``). After every step all
who committed it have the same bits, equal to float64 sums over its members within rounding. Each
test prints the seconds from the fault to the next step that all who go on have committed.
"""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import rings
from elastic_hosts import (
    SILENCE_S,
    Hosts,
    Training,
    alone,
    both,
    check,
    elastic_hosts,
    raised_within,
    training,
)
from time_bound import assert_within
from zygote import MODULES, Zygote

from pycomm._group import secrets

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.namespaces,
    pytest.mark.nightly,
    pytest.mark.time_bound,
    pytest.mark.timeout(200),
]

BEHIND = "LeftBehindError"
NO_QUORUM = "QuorumLostError"
DIED_S = 2.0
"""Less than a silence: a death is noticed at once, also of several at a time."""
SILENT_S = 1.8 * SILENCE_S
"""Less than two silences, whatever was cut off at once."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with elastic_hosts(4) as made:
        yield made


def some_steps(run: Training) -> None:
    """Until all train, and a random moment of a step beyond."""
    run.reach(10)
    time.sleep(random.random() * 0.03)


@dataclasses.dataclass(frozen=True)
class Case:
    """Something happens, and this is what becomes of the ranks."""

    name: str
    placed: tuple[int, ...]
    """The host of each rank."""
    act: Callable[[Training], float]
    goes_on: tuple[int, ...]
    killed: tuple[int, ...] = ()
    behind: Mapping[int, str] = dataclasses.field(default_factory=dict)
    within_s: float = DIED_S
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    heals: bool = False
    """Wires are whole again once the others have gone on."""
    in_ci: bool = False


def kill(*ranks: int) -> Callable[[Training], float]:
    return lambda run: run.signal(ranks)


def lose_power(host: int) -> Callable[[Training], float]:
    return lambda run: run.loses_power(host)


def cut(*ways: tuple[int, int], heals_s: float = float("inf")) -> Callable[[Training], float]:
    """Ways from a host to another, for so long."""

    def act(run: Training) -> float:
        at_s = time.monotonic()
        run.hosts.cut(*ways)
        if heals_s < float("inf"):
            time.sleep(max(0.0, at_s + heals_s - time.monotonic()))
            run.hosts.heal()
        return at_s

    return act


def pull_cable(host: int) -> Callable[[Training], float]:
    """Of its port of the switch: the host sees that it has no carrier."""

    def act(run: Training) -> float:
        at_s = time.monotonic()
        run.hosts.made.switch.ip("link", "set", f"port-node{host}", "down")
        return at_s

    return act


CASES = [
    Case("a rank of three hosts", (1, 2, 3), kill(1), (0, 2), (1,), in_ci=True),
    Case("rank 0, and with it the store", (1, 2, 3), kill(0), (1, 2), (0,), in_ci=True),
    Case("rank 0 beside a local peer", (1, 1, 2), kill(0), (1, 2), (0,)),
    Case("the upper one of two hosts", (1, 2), kill(1), (0,), (1,)),
    Case("one rank of each of two hosts", (1, 1, 2, 2), kill(1, 2), (0, 3), (1, 2)),
    Case("two of four hosts", (1, 2, 3, 4), kill(2, 3), (0, 1), (2, 3)),
    Case("power of a host with two ranks", (1, 1, 2, 2), lose_power(2), (0, 1), (2, 3), {},
         SILENT_S, in_ci=True),
    Case("power of a host with one", (1, 2, 3), lose_power(3), (0, 1), (2,), {}, SILENT_S),
    Case("power of rank 0's host", (1, 1, 2, 2, 3), lose_power(1), (2, 3, 4), (0, 1), {},
         SILENT_S),
    Case("power of one of four hosts", (1, 2, 3, 4), lose_power(2), (0, 2, 3), (1,), {}, SILENT_S),
    Case("power of the other one", (1, 2), lose_power(2), (0,), (1,), {}, SILENT_S),
    Case("a cable is pulled", (1, 2, 3), pull_cable(3), (0, 1), (), {2: NO_QUORUM}, SILENT_S),
    Case("a cut of one of three hosts", (1, 2, 3), cut(*alone(3, 4)), (0, 1), (), {2: NO_QUORUM},
         SILENT_S, in_ci=True),
    Case("a cut of one of three that heals", (1, 2, 3), cut(*alone(3, 4)), (0, 1), (),
         {2: BEHIND}, SILENT_S, {"quorum_wait": 20.0}, heals=True),
    Case("a cut of rank 0 that heals", (1, 2, 3), cut(*alone(1, 4)), (1, 2), (),
         {0: BEHIND}, SILENT_S, {"quorum_wait": 20.0}, heals=True, in_ci=True),
    Case("two halves", (1, 1, 2, 2), cut(*both((1, 2))), (0, 1), (), {2: NO_QUORUM, 3: NO_QUORUM},
         SILENT_S),
    Case("two halves that heal", (1, 1, 2, 2), cut(*both((1, 2))), (0, 1), (),
         {2: BEHIND, 3: BEHIND}, SILENT_S, {"quorum_wait": 20.0}, heals=True),
    Case("halves of two hosts each", (1, 2, 3, 4), cut(*both((1, 3), (1, 4), (2, 3), (2, 4))),
         (0, 1), (), {2: NO_QUORUM, 3: NO_QUORUM}, SILENT_S),
    Case("nothing comes from a host", (1, 2, 3), cut((3, 1), (3, 2)), (0, 1), (), {2: NO_QUORUM},
         SILENT_S, in_ci=True),
    Case("nothing comes to a host", (1, 2, 3), cut((1, 3), (2, 3)), (0, 1), (), {2: NO_QUORUM},
         SILENT_S),
    Case("nothing comes to a host for a time", (1, 2, 3), cut((1, 3), (2, 3)), (0, 1),
         (), {2: BEHIND}, SILENT_S, {"quorum_wait": 20.0}, heals=True),
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(each, marks=pytest.mark.ci if each.in_ci else (), id=each.name)
        for each in CASES
    ],
)
def test_some_are_gone(case: Case, hosts: Hosts, tmp_path: Path) -> None:
    settings = {"quorum_wait": 4.0, **case.settings}
    try:
        with training(hosts, case.placed, tmp_path, **settings) as run:
            some_steps(run)
            at_s = case.act(run)
            took_s = run.go_on(case.goes_on, since=at_s)
            if case.heals:
                hosts.heal()
            ended_s = run.ended(case.behind, since=at_s)
            results = run.stop()
            raised_s = raised_within(results, case.behind, at_s)
            check(run, results, case.goes_on, killed=case.killed, behind=case.behind)
    finally:
        for node in hosts.nodes:
            hosts.made.switch.ip("link", "set", f"port-{node.name}", "up")
    print(f"{case.name}: {took_s:.2f} s", end="")
    print(f"; raised after {raised_s:.2f} s, ended after {ended_s:.2f} s" if case.behind else "")
    assert_within(took_s, case.within_s)


# ---- nobody goes on


@pytest.mark.parametrize(
    ("placed", "act", "killed", "behind"),
    [
        pytest.param((1, 2), kill(0), (0,), (1,), id="rank 0 of two hosts", marks=pytest.mark.ci),
        pytest.param((1, 1, 2, 2), lose_power(1), (0, 1), (2, 3), id="power of the lower half"),
        pytest.param((1, 2, 3), lose_power(2), (1,), (0, 2), id="min_ranks"),
    ],
)
def test_nobody_goes_on(
    placed: tuple[int, ...],
    act: Callable[[Training], float],
    killed: tuple[int, ...],
    behind: tuple[int, ...],
    hosts: Hosts,
    tmp_path: Path,
) -> None:
    at_least = 3 if len(placed) == 3 else 1
    with training(hosts, placed, tmp_path, quorum_wait=3.0, min_ranks=at_least) as run:
        some_steps(run)
        at_s = act(run)
        took_s = run.ended(behind, since=at_s)
        results = run.stop()
        check(run, results, (), killed=killed, behind=dict.fromkeys(behind, NO_QUORUM))
    for rank in behind:
        text = results[rank].value["error"].text
        assert "min_ranks is 3" in text or all(f"rank {each} (" in text for each in killed), text
        assert at_least > 1 or f"host node{placed[killed[0]]}" in text, text
    print(f"raised within {took_s:.2f} s")
    assert_within(took_s, SILENT_S + 3.0 + 4.0)


# ---- an incomplete graph


@pytest.mark.parametrize(
    ("placed", "ways", "sides"),
    [
        pytest.param((1, 2, 3), both((1, 2)), ({0, 2}, {1, 2}), id="rank 0 and 1",
                     marks=pytest.mark.ci),
        pytest.param((1, 2, 3), both((2, 3)), ({0, 1}, {0, 2}), id="rank 1 and 2"),
        pytest.param((1, 2, 3), [(1, 2)], ({0, 2}, {1, 2}), id="rank 0 to 1 only"),
        pytest.param((1, 2, 3), [(2, 1)], ({0, 2}, {1, 2}), id="rank 1 to 0 only"),
        pytest.param((1, 1, 2, 2, 3), both((1, 2)), ({0, 1, 4}, {2, 3, 4}), id="pairs"),
        pytest.param((1, 2, 3, 4), both((1, 2), (3, 4)),
                     ({0, 2}, {0, 3}, {1, 2}, {1, 3}), id="a ring"),
        pytest.param((1, 2, 3, 4), both((2, 3)), ({0, 1, 3}, {0, 2, 3}), id="one of six wires"),
    ],
)  # fmt: skip
def test_two_hosts_do_not_reach_each_other_and_others_reach_both(
    placed: tuple[int, ...],
    ways: list[tuple[int, int]],
    sides: tuple[set[int], ...],
    hosts: Hosts,
    tmp_path: Path,
) -> None:
    with training(hosts, placed, tmp_path, quorum_wait=6.0) as run:
        some_steps(run)
        at_s = time.monotonic()
        hosts.cut(*ways)
        everyone = set(range(len(placed)))

        def who() -> set[int]:
            return {rank for rank in everyone if len(run.notes(rank)[-1].members) < len(placed)}

        run.wait_until(who, "somebody goes on")
        first = min(who())
        goes_on = run.notes(first)[-1].members
        took_s = run.go_on(goes_on, since=at_s)
        behind = everyone - set(goes_on)
        ended_s = run.ended(behind, since=at_s)
        results = run.stop()
        check(run, results, goes_on, behind=dict.fromkeys(behind, f"{BEHIND}|{NO_QUORUM}"))
    print(f"{goes_on} went on after {took_s:.2f} s; the others raised within {ended_s:.2f} s")
    assert set(goes_on) in sides, results.describe()
    assert_within(took_s, SILENT_S)


# ---- nothing happens


@pytest.mark.parametrize("count", rings.first_of([3, 2]))
@pytest.mark.parametrize("for_s", [pytest.param(0.3, marks=pytest.mark.ci), 0.9])
def test_a_short_cut_costs_nobody_its_place(
    for_s: float, count: int, hosts: Hosts, tmp_path: Path
) -> None:
    with training(hosts, range(1, count + 1), tmp_path, quorum_wait=4.0) as run:
        for _ in range(3):
            before = len(run.notes(0))
            run.reach(before + 10)
            at_s = cut(*alone(count, 4), heals_s=for_s)(run)
            before = len(run.notes(0))
            run.reach(before + 10)
            print(f"{time.monotonic() - at_s:.2f} s until ten steps later")
        results = run.stop()
        check(run, results, range(count))


# ---- processes that are stopped


@pytest.mark.parametrize(
    ("placed", "stopped"),
    [
        pytest.param((1, 2, 3), (1,), id="a rank", marks=pytest.mark.ci),
        pytest.param((1, 2, 3), (0,), id="rank 0"),
        pytest.param((1, 1, 2, 2), (2, 3), id="a host"),
        pytest.param((1, 1, 2, 2), (3,), id="a rank beside a local peer"),
    ],
)
def test_who_was_stopped_is_left_behind(
    placed: tuple[int, ...], stopped: tuple[int, ...], hosts: Hosts, tmp_path: Path
) -> None:
    goes_on = [rank for rank in range(len(placed)) if rank not in stopped]
    with training(hosts, placed, tmp_path, quorum_wait=10.0) as run:
        some_steps(run)
        at_s = run.signal(stopped, signal.SIGSTOP)
        took_s = run.go_on(goes_on, since=at_s)
        woken_s = run.signal(stopped, signal.SIGCONT)
        raised_s = run.ended(stopped, since=woken_s)
        results = run.stop()
        check(run, results, goes_on, behind=dict.fromkeys(stopped, BEHIND))
    print(f"went on after {took_s:.2f} s; raised {raised_s:.2f} s after it was continued")
    assert_within(took_s, SILENT_S)
    assert_within(raised_s, 6.0)


# ---- leaving in order


@pytest.mark.parametrize(
    "leaver", [pytest.param(2, marks=pytest.mark.ci), 0], ids=["a rank", "rank 0"]
)
def test_a_rank_on_another_host_leaves(leaver: int, hosts: Hosts, tmp_path: Path) -> None:
    goes_on = [rank for rank in range(3) if rank != leaver]
    with training(hosts, (1, 2, 3), tmp_path) as run:
        some_steps(run)
        at_s = run.ask_to_leave(leaver)
        took_s = run.go_on(goes_on, since=at_s)
        ended_s = run.ended([leaver], since=at_s)
        results = run.stop()
        check(run, results, goes_on, left=[leaver])
    for rank in goes_on:
        stats = results[rank].value["stats"]
        assert (stats["left_ranks"], stats["redone_steps"]) == (1, 0), stats
    print(f"without it after {took_s:.2f} s; it had ended after {ended_s:.2f} s")
    assert_within(took_s, DIED_S)


# ---- with a secret


@pytest.mark.parametrize(
    ("act", "killed"),
    [
        pytest.param(kill(1), (1,), id="death", marks=pytest.mark.ci),
        pytest.param(lose_power(2), (1,), id="power"),
        pytest.param(cut(*alone(2, 4)), (), id="cut"),
    ],
)
def test_with_a_secret(
    act: Callable[[Training], float], killed: tuple[int, ...], hosts: Hosts, tmp_path: Path
) -> None:
    secrets.generate_file(str(tmp_path / "secret"))
    env = {"PYCOMM_SECRET_FILE": str(tmp_path / "secret"), "PYCOMM_SECURITY": "require"}
    behind = {} if killed else {1: BEHIND}
    with training(hosts, (1, 2, 3), tmp_path, env=env, quorum_wait=20.0) as run:
        some_steps(run)
        at_s = act(run)
        took_s = run.go_on((0, 2), since=at_s)
        hosts.heal()
        ended_s = run.ended(behind, since=at_s)
        results = run.stop()
        check(run, results, (0, 2), killed=killed, behind=behind)
    print(f"went on after {took_s:.2f} s; who was behind raised within {ended_s:.2f} s")
    assert_within(took_s, SILENT_S)


# ---- both sides go on


@pytest.mark.ci
def test_split_brain_that_is_accepted(hosts: Hosts, tmp_path: Path) -> None:
    settings = {"split_brain": "accept", "quorum_wait": 4.0}
    with training(hosts, (1, 1, 2, 2), tmp_path, **settings) as run:
        some_steps(run)
        at_s = cut(*both((1, 2)))(run)
        took_s = [run.go_on(side, since=at_s) for side in ((0, 1), (2, 3))]
        hosts.heal()
        for rank in range(4):
            run.reach(len(run.notes(rank)) + 20, [rank])
        results = run.stop()
        check(run, results, (), splits=True)
    for rank in range(4):
        assert run.notes(rank)[-1].members == ((0, 1) if rank < 2 else (2, 3))
    print("went on after", took_s)
    assert_within(max(took_s), SILENT_S + SILENCE_S)  # above, the lowest takes over first


# ---- what only looks like this host


@pytest.mark.parametrize("dead", [pytest.param(0, marks=pytest.mark.ci), 1])
def test_two_containers_of_one_host(dead: int, hosts: Hosts, tmp_path: Path) -> None:
    """Both ranks are the same process of their pid namespaces, in one network namespace."""
    node = hosts.nodes[0]
    other = Zygote(MODULES, node.machine())
    try:
        with training(hosts, (1, 1), tmp_path, quorum_wait=2.0, zygotes={1: other}) as run:
            some_steps(run)
            run.signal([dead])
            if dead == 0:  # without a certificate it is half of two
                run.ended([1], since=time.monotonic())
            else:
                run.go_on([0], since=time.monotonic())
            results = run.stop()
            behind = {1: NO_QUORUM} if dead == 0 else {}
            check(run, results, [0] if dead == 1 else [], killed=[dead], behind=behind)
    finally:
        other.close()


@pytest.mark.ci
def test_the_default_route_leads_elsewhere(hosts: Hosts, tmp_path: Path) -> None:
    """Each host's name is loopback there, and its default route goes to a network of its own."""
    for node in hosts.nodes[:2]:
        node.name_is_loopback()
        node.ip("link", "add", "eth1", "type", "veth", "peer", "name", "eth2")
        node.ip("addr", "add", f"10.99.0.{node.name[-1]}/24", "dev", "eth1")
        node.ip("link", "set", "eth2", "up")
        node.ip("link", "set", "eth1", "up")
        node.ip("route", "add", "default", "via", "10.99.0.254", "dev", "eth1")
    try:
        with training(hosts, (1, 2, 2), tmp_path) as run:
            some_steps(run)
            run.signal([2])
            run.go_on([0, 1], since=time.monotonic())
            results = run.stop()
            check(run, results, [0, 1], killed=[2])
    finally:
        for node in hosts.nodes[:2]:
            node.ip("link", "del", "eth1")
            file = Path("/etc/netns") / node.namespace / "hosts"
            own, loopback = f"{node.address} {node.name}", f"127.0.1.1 {node.name}"
            file.write_text(file.read_text().replace(loopback, own))


# ---- what is left


def test_no_descriptor_is_left(hosts: Hosts, tmp_path: Path) -> None:
    """Connections of an agreement are closed when they are idle for 10 s."""
    with training(hosts, (1, 1, 2, 2), tmp_path, quorum_wait=4.0) as run:
        some_steps(run)
        at_s = run.loses_power(2)
        run.go_on([0, 1], since=at_s)
        time.sleep(2.0)
        busy = [run.notes(rank)[-1].files for rank in (0, 1)]
        time.sleep(11.0)
        results = run.stop()
        check(run, results, [0, 1], killed=[2, 3])
        idle = [run.notes(rank)[-1].files for rank in (0, 1)]
        assert all(now < before for now, before in zip(idle, busy, strict=True)), (busy, idle)
