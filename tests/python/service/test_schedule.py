"""The rules of a parameter server on 1,000 seeded schedules with delays, deaths and restarts."""

from __future__ import annotations

import dataclasses
import random

import pytest

from pycomm.service.schedule import PushVerdict, Schedule, StaleWorkerError

SCHEDULES = 1000
STEPS = 60


@dataclasses.dataclass
class Client:
    """What a worker knows of itself."""

    number: int
    incarnation: int
    acknowledged: int = 0
    connected: bool = True
    wants_pull: bool = False


class World:
    """A schedule under test beside a record of what happened to each push, kept apart from it."""

    def __init__(self, kind: type[Schedule], seed: int) -> None:
        self.random = random.Random(seed)
        self.kind = kind
        self.staleness = self.random.choice([0, 0, 1, 3, None])
        self.workers = self.random.randint(2, 4)
        self.schedule = kind(self.workers, self.staleness)
        self.incarnations = 0
        self.clients = {number: self.join_new(number) for number in range(self.workers)}
        self.applied: list[tuple[int, int, int]] = []  # worker, incarnation, clock
        self.kept: set[tuple[int, int, int]] = set()
        self.saved = (self.schedule.state_dict(), list(self.applied))
        self.expected_lost = 0
        self.counted_lost: set[tuple[int, int, int]] = set()

    def join_new(self, number: int) -> Client:
        self.incarnations += 1
        client = Client(number, self.incarnations)
        client.acknowledged = self.schedule.joined(number, client.incarnation, 0)
        return client

    def apply_due(self) -> None:
        while (due := self.schedule.due()) is not None:
            clock, workers = due
            assert workers == sorted(workers)
            for worker in workers:
                found = [each for each in self.kept if each[0] == worker and each[2] == clock]
                assert len(found) == 1, "a step with a push that nobody sent"
                self.kept.discard(found[0])
                self.note_applied(found[0])

    def note_applied(self, push: tuple[int, int, int]) -> None:
        assert push not in self.applied, f"{push} was applied twice"
        self.applied.append(push)

    def push(self, client: Client, *, again: bool) -> None:
        """``again``: the worker did not hear the acknowledgement, and sends the push once more."""
        clock = client.acknowledged + 1
        for _ in range(2 if again else 1):
            push = (client.number, client.incarnation, clock)
            verdict = self.schedule.pushed(client.number, clock)
            if verdict is PushVerdict.APPLY:
                self.note_applied(push)
            elif verdict is PushVerdict.KEEP:
                self.kept.add(push)
            self.apply_due()
        client.acknowledged = clock
        client.wants_pull = True

    def pull(self, client: Client) -> bool:
        if not self.schedule.may_pull(client.number):
            return False
        client.wants_pull = False
        if self.staleness is None:
            return True
        bound = client.acknowledged - self.staleness
        for other in self.clients.values():
            if not self.schedule.workers[other.number].live:
                continue
            reached = max(self.schedule.workers[other.number].clock, other.acknowledged)
            assert reached >= bound, f"{client} does not wait for {other}"
            waiting = [each for each in self.kept if each[0] == other.number and each[2] <= bound]
            assert not waiting, f"{client} was answered without {waiting}"
        return True

    def restart(self) -> None:
        state, applied = self.saved
        self.schedule = self.kind(self.workers, self.staleness)
        self.schedule.load_state_dict(state)
        self.applied = list(applied)
        self.kept = set()
        for client in self.clients.values():
            known = self.schedule.workers.get(client.number)
            if known is None or known.incarnation != client.incarnation:
                try:
                    self.schedule.joined(client.number, client.incarnation, client.acknowledged)
                except StaleWorkerError:
                    self.clients[client.number] = self.join_new(client.number)
                continue
            lost = client.acknowledged - known.applied
            before = self.schedule.lost_pushes
            self.schedule.joined(client.number, client.incarnation, client.acknowledged)
            assert self.schedule.lost_pushes - before == lost, "a lost push was not counted"
            client.connected = True
        self.apply_due()

    def one_event(self) -> None:
        client = self.clients[self.random.randrange(self.workers)]
        event = self.random.random()
        if event < 0.04 and client.connected:
            client.connected = False
            self.schedule.left(client.number)
            self.apply_due()
        elif event < 0.07:
            self.saved = (self.schedule.state_dict(), list(self.applied))
        elif event < 0.09:
            self.restart()
        elif not client.connected:
            if self.random.random() < 0.5:  # it was only slow
                self.schedule.joined(client.number, client.incarnation, client.acknowledged)
                client.connected = True
            else:
                self.kept = {each for each in self.kept if each[0] != client.number}
                self.clients[client.number] = self.join_new(client.number)
            self.apply_due()
        elif client.wants_pull:
            self.pull(client)
        else:
            self.push(client, again=self.random.random() < 0.2)

    def nobody_waits_for_ever(self) -> None:
        """With all connected, some worker can always go on."""
        for client in self.clients.values():
            if not client.connected:
                self.schedule.joined(client.number, client.incarnation, client.acknowledged)
                client.connected = True
        self.apply_due()
        for _ in range(self.workers * STEPS * 2):
            for client in self.clients.values():
                if not client.wants_pull and client.acknowledged < 2 * STEPS:
                    self.push(client, again=False)
            pulled = [self.pull(client) for client in self.clients.values() if client.wants_pull]
            if all(each.acknowledged >= 2 * STEPS for each in self.clients.values()):
                return
            assert any(pulled), "all wait for each other"


def run(kind: type[Schedule], schedules: int = SCHEDULES) -> None:
    for seed in range(schedules):
        world = World(kind, seed)
        for _ in range(STEPS):
            world.one_event()
        world.nobody_waits_for_ever()


def test_no_push_is_doubled_and_no_pull_is_too_old() -> None:
    run(Schedule)


class PullsOneTooOld(Schedule):
    def may_pull(self, worker: int) -> bool:
        known = self.workers[worker]
        known.clock -= 1
        try:
            return super().may_pull(worker)
        finally:
            known.clock += 1


class AppliesAgain(Schedule):
    def pushed(self, worker: int, clock: int) -> PushVerdict:
        verdict = super().pushed(worker, clock)
        return PushVerdict.APPLY if verdict is PushVerdict.REPEATED else verdict


class ForgetsToCount(Schedule):
    def _lose(self, pushes: int) -> None:
        pass


class WaitsForTheDead(Schedule):
    def left(self, worker: int) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "noticed"),
    [
        (PullsOneTooOld, "does not wait for|was answered without"),
        (AppliesAgain, "was applied twice"),
        (ForgetsToCount, "a lost push was not counted"),
    ],
)
def test_a_wrong_rule_is_noticed(kind: type[Schedule], noticed: str) -> None:
    with pytest.raises(AssertionError, match=noticed):
        run(kind, 200)


def test_a_worker_that_left_is_not_waited_for() -> None:
    for kind, may in ((Schedule, True), (WaitsForTheDead, False)):
        schedule = kind(2, 0)
        schedule.joined(0, 10, 0)
        schedule.joined(1, 11, 0)
        assert schedule.pushed(0, 1) is PushVerdict.KEEP
        assert schedule.due() is None
        assert not schedule.may_pull(0)
        schedule.left(1)
        assert (schedule.due() == (1, [0])) is may
        assert schedule.may_pull(0) is may


def test_nothing_is_applied_before_all_have_come() -> None:
    schedule = Schedule(2, 0)
    schedule.joined(0, 10, 0)
    schedule.pushed(0, 1)
    assert schedule.due() is None
    schedule.joined(1, 11, 0)
    assert schedule.due() is None
    schedule.pushed(1, 1)
    assert schedule.due() == (1, [0, 1])
    assert schedule.version == 1


def test_a_process_that_was_replaced_is_refused() -> None:
    schedule = Schedule(1, None)
    schedule.joined(0, 10, 0)
    schedule.joined(0, 11, 0)
    with pytest.raises(StaleWorkerError, match="another process has become worker 0"):
        schedule.joined(0, 10, 0)
    restarted = Schedule(1, None)
    restarted.load_state_dict(schedule.state_dict())
    with pytest.raises(StaleWorkerError, match="another process has become worker 0"):
        restarted.joined(0, 10, 0)


@pytest.mark.parametrize("clock", [0, -1])
def test_a_clock_is_counted_from_one(clock: int) -> None:
    schedule = Schedule(1, 0)
    schedule.joined(0, 10, 0)
    with pytest.raises(ValueError, match=f"a push has clock {clock}"):
        schedule.pushed(0, clock)


def test_the_count_of_lost_pushes_stays_a_64_bit_number() -> None:
    schedule = Schedule(1, None)
    schedule.joined(0, 10, 0)
    for clock in (2**62, 2**62 + 5):
        schedule.pushed(0, clock)
    assert schedule.lost_pushes == 2**62
