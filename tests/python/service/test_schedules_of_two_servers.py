"""Two servers in lock-step that restart, each by itself: nobody waits for ever, and both make each
step of the same pushes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from pycomm.service.schedule import PushVerdict, Schedule

WORLDS = 500
ROUNDS = 50
BOTH = (0, 1)


class LiftsWithSeveralServers(Schedule):
    def __init__(self, workers: int, staleness: int | None, servers: int = 1) -> None:
        super().__init__(workers, staleness)


class Server:
    """A schedule, and which pushes its steps were made of."""

    def __init__(self, kind: type[Schedule], workers: int) -> None:
        self.kind, self.workers = kind, workers
        self.schedule = kind(workers, 0, servers=len(BOTH))
        self.steps: list[set[tuple[int, int]]] = []
        self.saved: Mapping[str, Any] | None = None

    def apply_due(self) -> None:
        while (due := self.schedule.due()) is not None:
            clock, workers = due
            known = self.schedule.workers
            self.steps.append({(each, clock - known[each].offset) for each in workers})

    def save(self) -> None:
        if self.schedule.steps > 0:
            self.saved = self.schedule.state_dict()

    def restart(self) -> None:
        assert self.saved is not None
        self.schedule = self.kind(self.workers, 0, servers=len(BOTH))
        self.schedule.load_state_dict(self.saved)


class Client:
    """A process that is a worker: it pushes to one server after the other, then pulls from them,
    and connects where it must in its next call."""

    def __init__(self, number: int, incarnation: int, servers: list[Server]) -> None:
        self.number, self.incarnation, self.servers = number, incarnation, servers
        self.clock: int | None = None  # until it has come to both
        self.acknowledged = [0, 0]
        self.begun: list[int | None] = [None, None]
        self.connected = [False, False]
        self.calls = [("join", 0), ("join", 1)]

    def connect(self, to: int) -> None:
        schedule = self.servers[to].schedule
        args = (self.number, self.incarnation, self.acknowledged[to], self.begun[to])
        clock = schedule.joined(*args)
        if self.begun[to] is None:
            self.begun[to] = self.acknowledged[to] = clock
        self.connected[to] = True
        self.servers[to].apply_due()

    def one_call(self) -> bool:
        """False if it waits."""
        what, to = self.calls[0]
        schedule = self.servers[to].schedule
        if not self.connected[to]:
            self.connect(to)
        if what == "push":
            assert self.clock is not None
            schedule.pushed(self.number, self.clock)
            self.servers[to].apply_due()
            self.acknowledged[to] = self.clock
        elif what == "pull":
            assert self.clock is not None
            schedule.asks(self.number, self.clock)
            self.servers[to].apply_due()
            if not schedule.may_pull(self.number):
                return False
        self.calls.pop(0)
        if not self.calls:
            if self.clock is None:
                self.clock = max(self.acknowledged)
            else:
                self.clock += 1
                self.calls = [("push", each) for each in BOTH]
            self.calls += [("pull", each) for each in BOTH]
        return True


def assert_all_go_on(servers: list[Server], clients: list[Client]) -> None:
    for _ in range(ROUNDS):
        # Twice: a call that waits may connect, and another worker no longer waits for that.
        moved = [client.one_call() for client in 2 * clients]
        if not any(moved):
            gone = [each for each in clients if not all(each.connected)]
            assert gone, "all wait for each other"
            return  # servers give them up after ``rejoin``, each by itself
    for step in servers[0].steps[-5:-2]:
        assert step in servers[1].steps, "the servers make steps of different pushes"
        assert len(step) == len(clients)


def run(kind: type[Schedule], worlds: int) -> None:
    for seed in range(worlds):
        chance = random.Random(seed)
        workers = chance.choice([2, 3])
        servers = [Server(kind, workers) for _ in BOTH]
        incarnations = iter(range(1, 10**6))
        clients = [Client(each, next(incarnations), servers) for each in range(workers)]
        for _ in range(chance.randint(50, 400)):
            event = chance.random()
            if event < 0.02:
                chance.choice(servers).save()
            elif event < 0.04 and all(server.saved is not None for server in servers):
                for each in chance.choice([[0], [1], [0, 1], [0, 1]]):
                    servers[each].restart()
                    for client in clients:
                        client.connected[each] = False
                if chance.random() < 0.5:  # a worker has died with them, and is there first
                    number = chance.randrange(workers)
                    clients[number] = Client(number, next(incarnations), servers)
                    for _ in range(chance.randint(0, 10)):
                        clients[number].one_call()
            else:
                chance.choice(clients).one_call()
        assert_all_go_on(servers, clients)


def test_somebody_can_always_go_on() -> None:
    run(Schedule, WORLDS)


def restarted_while_a_push_was_half_sent(kind: type[Schedule]) -> None:
    """Both servers are back from clock 8. Worker 0 has the acknowledgement of its push 10 from one
    of them alone, and worker 1 is a new process that was there first."""
    servers = [Server(kind, 2) for _ in BOTH]
    old, gone = (Client(each, each + 1, servers) for each in BOTH)
    while servers[1].schedule.version < 8:
        old.one_call()
        gone.one_call()
    for server in servers:
        server.save()
    while old.acknowledged != [10, 9]:
        old.one_call()
        gone.one_call()
    old.connected = [False, False]
    for server in servers:
        server.restart()
    new = Client(1, 3, servers)
    while new.acknowledged != [9, 9]:
        assert new.one_call()
    assert not new.one_call()  # its pull at the first server
    assert old.calls[0] == ("push", 1)
    assert_all_go_on(servers, [old, new])


def test_a_push_that_was_half_sent_when_the_servers_died_stops_nobody() -> None:
    restarted_while_a_push_was_half_sent(Schedule)


def test_a_wrong_rule_is_noticed() -> None:
    with pytest.raises(AssertionError, match="all wait for each other"):
        restarted_while_a_push_was_half_sent(LiftsWithSeveralServers)
    with pytest.raises(AssertionError, match=r"wait for each other|different pushes"):
        run(LiftsWithSeveralServers, WORLDS)


@pytest.mark.parametrize(("servers", "clock"), [(1, 30), (2, 8)])
def test_only_a_server_that_is_alone_puts_workers_forward(servers: int, clock: int) -> None:
    schedule = Schedule(2, 0, servers)
    assert schedule.joined(1, 99, 8, 8) == 8
    assert schedule.joined(0, 1, 30, 0) == 30
    schedule.asks(1, 8)
    assert schedule.workers[1].clock == clock
    assert schedule.pushed(1, 9) is PushVerdict.KEEP
    assert schedule.due() == (None if servers == 1 else (9, [1]))
