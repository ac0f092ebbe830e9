"""The rules of a parameter server on 1,000 seeded schedules with delays, deaths and restarts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import pytest

from pycomm.service.schedule import PushVerdict, Schedule, StaleWorkerError, Worker

SCHEDULES = 1000
STEPS = 60


Push = tuple[int, int, int]
"""Worker, incarnation, clock."""


@dataclasses.dataclass
class Client:
    """What a worker knows of itself."""

    number: int
    incarnation: int
    begun: int = 0
    acknowledged: int = 0
    offset: int = 0
    """Steps that the others made without it."""
    behind: bool = False
    """It has not pulled since."""
    connected: bool = True
    wants_pull: bool = False

    @property
    def clock(self) -> int:
        """Of its last acknowledged push, as the others count."""
        return self.acknowledged + self.offset

    def pushes(self) -> set[Push]:
        """Those that were acknowledged."""
        clocks = range(self.begun + 1, self.acknowledged + 1)
        return {(self.number, self.incarnation, clock) for clock in clocks}


class World:
    """A schedule under test beside a record of where each push is, which never asks the schedule:
    in the parameters, kept, or counted as lost."""

    def __init__(self, kind: type[Schedule], seed: int) -> None:
        self.random = random.Random(seed)
        self.kind = kind
        self.staleness = self.random.choice([0, 0, 1, 3, None])
        self.workers = self.random.randint(2, 4)
        self.schedule = kind(self.workers, self.staleness)
        self.incarnations = 0
        self.clients: dict[int, Client] = {}  # those that have come
        self.applied: set[Push] = set()
        self.kept: dict[tuple[int, int], Push] = {}  # by worker and clock as the others count
        self.lost: set[Push] = set()
        self.missing: set[Push] = set()
        """Those of ``lost`` without which a step of the others may be."""
        self.version = 0  # the clock of the last step
        self.save()
        for number in range(self.random.randint(1, self.workers)):
            self.join_new(number)

    def join_new(self, number: int) -> None:
        self.kept = {where: each for where, each in self.kept.items() if each[0] != number}
        others = [each for each in self.clients.values() if each.number != number]
        live = [each.clock for each in others if each.connected]
        self.incarnations += 1
        client = Client(number, self.incarnations)
        client.begun = self.schedule.joined(number, client.incarnation, 0)
        client.acknowledged = client.begun
        if self.staleness != 0 and live:
            assert client.begun == min(live), "a new process begins too early or too late"
        self.clients[number] = client

    def apply_due(self) -> None:
        while (due := self.schedule.due()) is not None:
            assert len(self.clients) == self.workers, "a step before all have come"
            clock, workers = due
            assert workers == sorted(workers)
            assert clock > self.version, "a step of its own for pushes that came late"
            self.version = clock
            for worker in workers:
                assert (worker, clock) in self.kept, "a step with a push that nobody sent"
                self.note_applied(self.kept.pop((worker, clock)))
            for client in self.clients.values():
                own = clock - client.offset
                if client.connected and own > client.begun:
                    push = (client.number, client.incarnation, own)
                    assert push in self.applied | self.missing, f"a step without {client}"

    def note_applied(self, push: Push) -> None:
        assert push not in self.applied, f"{push} was applied twice"
        self.applied.add(push)

    def push(self, client: Client, clock: int) -> PushVerdict:
        push = (client.number, client.incarnation, clock)
        verdict = self.schedule.pushed(client.number, clock)
        if verdict is PushVerdict.APPLY:
            self.note_applied(push)
        elif verdict is PushVerdict.KEEP:
            assert push not in self.kept.values(), f"{push} was applied twice"
            self.note_offsets()
            self.kept[client.number, clock + client.offset] = push
        elif verdict is PushVerdict.LATE:
            assert client.behind, f"{push} was dropped, although its worker was there"
            self.lost.add(push)
            self.missing.add(push)
        self.apply_due()
        return verdict

    def note_offsets(self) -> None:
        """After a restart a worker counts as being where the one that had come farthest is."""
        for client in [each for each in self.clients.values() if each.connected]:
            if steps := self.schedule.workers[client.number].offset - client.offset:
                assert steps > 1 and self.staleness == 0, "it was put forward where nobody waits"
                client.offset += steps
                mine = [where for where in self.kept if where[0] == client.number]
                moved = {
                    (each, clock + steps): self.kept.pop((each, clock)) for each, clock in mine
                }
                self.kept |= moved

    def push_next(self, client: Client) -> None:
        clock = client.acknowledged + 1
        verdict = self.push(client, clock)
        assert verdict is not PushVerdict.REPEATED, "a new push was dropped"
        assert (verdict is PushVerdict.LATE) == client.behind, "an old gradient counts"
        client.acknowledged = clock
        client.wants_pull = True

    def pull(self, client: Client) -> bool:
        self.schedule.asks(client.number, client.acknowledged)
        self.note_offsets()
        client.behind = False
        self.apply_due()
        if not self.schedule.may_pull(client.number):
            return False
        client.wants_pull = False
        if self.staleness is None:
            return True
        bound = client.clock - self.staleness
        assert bound <= 0 or len(self.clients) == self.workers, "a pull before all have come"
        for other in self.clients.values():
            if not other.connected:
                continue
            assert other.clock >= bound, f"{client} does not wait for {other}"
            waiting = [each for each in self.kept if each[0] == other.number and each[1] <= bound]
            assert not waiting, f"{client} was answered without {waiting}"
        return True

    def save(self) -> None:
        state = self.schedule.state_dict()
        self.saved = (state, set(self.applied), set(self.lost), self.version)

    def restart(self) -> None:
        state, applied, lost, self.version = self.saved
        self.schedule = self.kind(self.workers, self.staleness)
        self.schedule.load_state_dict(state)
        self.applied, self.lost, self.kept = set(applied), set(lost), {}
        clients = list(self.clients.values())
        self.random.shuffle(clients)
        replaced = []
        come: list[Client] = []
        for client in clients:
            client.connected = False
        for client in clients:
            if self.staleness == 0 and self.random.random() < 0.2:  # it has died with the server
                self.join_new(client.number)
                come.append(self.clients[client.number])
            else:
                try:
                    self.rejoin(client, restarted=True)
                except StaleWorkerError:  # the state is of before it was replaced
                    replaced.append(client.number)
                else:
                    self.lost |= client.pushes() - self.applied
                    # Its last push has come, and the others' of that step perhaps not.
                    self.missing.add((client.number, client.incarnation, client.acknowledged))
                come.append(client)
            self.note_offsets()
            self.apply_due()
            early = self.random.choice(come)  # the others are not back yet
            if self.staleness == 0 and not early.wants_pull and self.random.random() < 0.3:
                self.push_next(early)
        assert not replaced, "the newest process of a worker was refused"
        self.apply_due()

    def rejoin(self, client: Client, *, restarted: bool = False) -> None:
        """It goes on with its own clock, and counts as being where the others are."""
        before = client.clock
        known = self.schedule.workers.get(client.number)
        others = [each for each in self.clients.values() if each is not client]
        live = [each.clock for each in others if each.connected]
        args = (client.number, client.incarnation, client.acknowledged, client.begun)
        goes_on = self.schedule.joined(*args)
        assert goes_on == client.acknowledged, "an old process got another clock"
        now = self.schedule.workers[client.number].clock
        client.offset = now - client.acknowledged
        reached = before
        if self.staleness == 0:
            reached = self.schedule.version  # or further than the last step, after a restart
        elif self.staleness is not None and not client.connected and live:
            reached = min(live)
        if not restarted:
            assert now == max(before, reached), "it is not where the others are"
        elif self.staleness == 0:
            assert now >= self.version, "it is not where the others are"
        elif known is not None and self.staleness is None:
            assert now <= before, "it was put forward where nobody waits"
        behind = self.schedule.workers[client.number].behind
        client.behind = behind if restarted else client.behind or reached > before
        client.connected = True

    def check_lost(self) -> None:
        assert self.schedule.lost_pushes == len(self.lost), "lost pushes are counted wrongly"
        for client in self.clients.values():
            gone = client.pushes() - self.applied - set(self.kept.values()) - self.lost
            assert not gone, f"{gone} vanished"

    def one_event(self) -> None:
        number = self.random.randrange(self.workers)
        event = self.random.random()
        if event < 0.04:
            self.save()
        elif event < 0.08:
            self.restart()
        elif (client := self.clients.get(number)) is None:
            if event < 0.3:
                self.join_new(number)
        elif event < 0.12 and client.connected:
            client.connected = False
            self.schedule.left(number)
        elif not client.connected:
            if self.random.random() < 0.5:  # it was only slow
                self.rejoin(client)
                if not client.wants_pull and self.random.random() < 0.5:  # it was in its push
                    self.push_next(client)
            else:
                self.join_new(number)
        elif event < 0.25 and client.acknowledged > client.begun:  # its answer was lost, or is late
            clock = self.random.randint(client.begun + 1, client.acknowledged)
            assert self.push(client, clock) is PushVerdict.REPEATED, f"{clock} was applied twice"
        elif client.wants_pull:
            self.pull(client)
        else:
            self.push_next(client)
        self.apply_due()
        self.check_lost()

    def nobody_waits_for_ever(self) -> None:
        """With all connected, some worker can always go on."""
        for number in range(self.workers):
            if number not in self.clients:
                self.join_new(number)
            elif not self.clients[number].connected:
                self.rejoin(self.clients[number])
        self.apply_due()
        for _ in range(self.workers * STEPS * 2):
            for client in self.clients.values():
                if not client.wants_pull and client.clock < 2 * STEPS:
                    self.push_next(client)
            # Twice: one that asks may be put forward, and another one no longer waits for it.
            clients = 2 * list(self.clients.values())
            pulled = [self.pull(client) for client in clients if client.wants_pull]
            if all(each.clock >= 2 * STEPS for each in self.clients.values()):
                break
            assert any(pulled), "all wait for each other"
        self.check_lost()


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


class SavesWhatIsKept(Schedule):
    def state_dict(self) -> dict[str, Any]:
        workers = {
            number: [each.incarnation, each.clock, each.offset]
            for number, each in self.workers.items()
        }
        return {**super().state_dict(), "workers": workers}


class ForgetsTheCount(Schedule):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({**state, "lost_pushes": 0})


class CountsAgain(Schedule):
    def joined(self, worker: int, incarnation: int, clock: int, begun: int | None = None) -> int:
        before = self.workers.get(worker)
        applied = None if before is None else before.applied
        begin = super().joined(worker, incarnation, clock, begun)
        if applied is not None and self.workers[worker] is before:
            before.applied = applied
        return begin


class StartsAtZero(Schedule):
    def _slowest(self, but: int) -> int:
        return 0


class TakesAnOldProcessForANewOne(Schedule):
    def joined(self, worker: int, incarnation: int, clock: int, begun: int | None = None) -> int:
        return super().joined(worker, incarnation, clock, None)


class DoesNotWaitForThoseToCome(Schedule):
    def may_pull(self, worker: int) -> bool:
        expected, self._expected = self._expected, 0
        try:
            return super().may_pull(worker)
        finally:
            self._expected = expected


class LeavesThemDead(Schedule):
    def joined(self, worker: int, incarnation: int, clock: int, begun: int | None = None) -> int:
        before = self.workers.get(worker)
        live = before is None or before.live
        begin = super().joined(worker, incarnation, clock, begun)
        if self.workers[worker] is before:
            before.live = live
        return begin


class LeavesThemBehind(Schedule):
    def _catch_up(self, known: Worker) -> None:
        pass


class GoesOnFromTheCheckpoint(Schedule):
    def _go_on_from(self, clock: int) -> None:
        pass


class LeavesThoseThatWaitBehind(Schedule):
    def _go_on_from(self, clock: int) -> None:
        if self.staleness == 0:
            self.version = max(self.version, clock)


class TakesOldGradients(Schedule):
    def joined(self, worker: int, incarnation: int, clock: int, begun: int | None = None) -> int:
        begin = super().joined(worker, incarnation, clock, begun)
        self.workers[worker].behind = False
        return begin


class DropsNewGradients(Schedule):
    def asks(self, worker: int, clock: int) -> None:
        behind = self.workers[worker].behind
        super().asks(worker, clock)
        self.workers[worker].behind = behind


class ForgetsOffsets(Schedule):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        workers = {number: each[:2] for number, each in state["workers"].items()}
        super().load_state_dict({**state, "workers": workers})


LOST = "lost pushes are counted wrongly"


@pytest.mark.parametrize(
    ("kind", "noticed"),
    [
        (PullsOneTooOld, "does not wait for|was answered without|before all have come"),
        (AppliesAgain, "was applied twice"),
        (ForgetsToCount, LOST),
        (SavesWhatIsKept, LOST),
        (ForgetsTheCount, LOST),
        (CountsAgain, LOST),
        (StartsAtZero, "begins too early"),
        (TakesAnOldProcessForANewOne, "an old process got another clock"),
        (DoesNotWaitForThoseToCome, "a pull before all have come"),
        (LeavesThemDead, "does not wait for|was answered without|where nobody waits"),
        (LeavesThemBehind, "not where the others are|a step without"),
        (GoesOnFromTheCheckpoint, "a step without"),
        (LeavesThoseThatWaitBehind, "a step without"),
        (TakesOldGradients, "an old gradient counts"),
        (DropsNewGradients, "although its worker was there"),
        (ForgetsOffsets, "an old process got another clock|lost pushes are counted"),
    ],
)
def test_a_wrong_rule_is_noticed(kind: type[Schedule], noticed: str) -> None:
    with pytest.raises(AssertionError, match=noticed):
        run(kind, 200)


def test_a_worker_that_began_at_another_servers_clock_loses_nothing() -> None:
    schedule = Schedule(2, 1)
    schedule.joined(0, 10, 0)
    schedule.joined(1, 11, 0)
    schedule.asks(0, 5)
    assert not schedule.may_pull(0)  # five ahead
    assert schedule.pushed(0, 6) is PushVerdict.APPLY
    assert schedule.lost_pushes == 0


def test_a_process_that_the_checkpoint_does_not_know_goes_on_with_its_clock() -> None:
    """Its next push is new, although another worker is far ahead; the ones before are lost."""
    schedule = Schedule(2, None)
    schedule.joined(0, 10, 100, 0)
    assert schedule.joined(1, 11, 50, 48) == 50
    assert schedule.lost_pushes == 102
    assert schedule.pushed(1, 51) is PushVerdict.APPLY


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


def restarted_at_eight() -> Schedule:
    """From a checkpoint of clock 8 in lock-step, after which the clocks have gone on."""
    schedule = Schedule(2, 0)
    for worker in (0, 1):
        schedule.joined(worker, worker + 1, 0)
    for clock in range(1, 9):
        for worker in (0, 1):
            schedule.pushed(worker, clock)
        assert schedule.due() == (clock, [0, 1])
    again = Schedule(2, 0)
    again.load_state_dict(schedule.state_dict())
    return again


def assert_in_step(schedule: Schedule, clocks: tuple[int, int], counted: int) -> None:
    """From now on each step has the pushes of both, which have these clocks of their own."""
    for number in range(3):
        for worker in (0, 1):
            schedule.asks(worker, clocks[worker] + number)
        assert schedule.may_pull(0) and schedule.may_pull(1)
        assert schedule.pushed(0, clocks[0] + number + 1) is PushVerdict.KEEP
        assert schedule.due() is None
        assert schedule.pushed(1, clocks[1] + number + 1) is PushVerdict.KEEP
        assert schedule.due() == (counted + number + 1, [0, 1])


def test_after_a_restart_a_new_process_is_in_step_with_one_that_survived() -> None:
    schedule = restarted_at_eight()
    assert schedule.joined(0, 1, 30, 0) == 30
    assert schedule.joined(1, 99, 0) == 30
    assert_in_step(schedule, (30, 30), 30)
    assert schedule.lost_pushes == 22


@pytest.mark.parametrize("pushed", [0, 1, 2])
def test_after_a_restart_a_new_process_may_be_there_first(pushed: int) -> None:
    """Its pushes count beside those of the worker that it has waited for."""
    schedule = restarted_at_eight()
    assert schedule.joined(1, 99, 0) == 8
    schedule.asks(1, 8)
    for clock in range(9, 9 + pushed):
        assert schedule.pushed(1, clock) is PushVerdict.KEEP
        assert schedule.due() is None
    assert schedule.joined(0, 1, 30, 0) == 30
    assert schedule.due() is None
    for clock in range(1, pushed + 1):
        assert schedule.pushed(1, clock + 8) is PushVerdict.REPEATED
        schedule.asks(1, clock + 8)
        assert not schedule.may_pull(1)
        assert schedule.pushed(0, clock + 30) is PushVerdict.KEEP
        assert schedule.due() == (clock + 30, [0, 1])
    assert_in_step(schedule, (30 + pushed, 8 + pushed), 30 + pushed)
    assert schedule.lost_pushes == 22


@pytest.mark.parametrize("first", [0, 1])
def test_steps_without_a_worker_that_the_checkpoint_does_not_know_are_made_up(first: int) -> None:
    """Worker 1 was away for ten steps after the checkpoint."""
    schedule = restarted_at_eight()
    own = (30, 20)
    for worker in (first, 1 - first):
        assert schedule.joined(worker, worker + 1, own[worker], 0) == own[worker]
    assert schedule.pushed(0, 31) is PushVerdict.KEEP
    assert schedule.due() is None
    assert schedule.pushed(1, 21) is PushVerdict.KEEP, "its gradient is not older than the other's"
    assert schedule.due() == (31, [0, 1])
    assert_in_step(schedule, (31, 21), 31)
    assert schedule.lost_pushes == 22 + 12
    again = Schedule(2, 0)
    again.load_state_dict(schedule.state_dict())
    for worker, clock in ((0, 34), (1, 24)):
        assert again.joined(worker, worker + 1, clock, 0) == clock
    assert_in_step(again, (34, 24), 34)


def test_a_push_that_was_under_way_puts_nobody_forward() -> None:
    """It was acknowledged to one worker and not yet to the other."""
    schedule = restarted_at_eight()
    for worker, clock in ((0, 30), (1, 29)):
        assert schedule.joined(worker, worker + 1, clock, 0) == clock
    assert schedule.pushed(1, 30) is PushVerdict.KEEP
    assert schedule.due() == (30, [1])  # the other's was acknowledged, and is lost
    assert_in_step(schedule, (30, 30), 30)


def test_a_worker_that_was_given_up_after_a_restart_is_behind() -> None:
    schedule = restarted_at_eight()
    schedule.joined(0, 1, 30, 0)
    schedule.left(1)
    assert schedule.pushed(0, 31) is PushVerdict.KEEP
    assert schedule.due() == (31, [0])
    assert schedule.joined(1, 2, 30, 0) == 30
    assert schedule.pushed(1, 31) is PushVerdict.LATE
    schedule.pushed(0, 32)
    assert schedule.due() == (32, [0])
    assert_in_step(schedule, (32, 31), 32)


def test_workers_beyond_the_number_of_now_are_forgotten() -> None:
    schedule = Schedule(3, 0)
    for worker in range(3):
        schedule.joined(worker, worker + 1, 0)
    for worker in range(3):
        schedule.pushed(worker, 1)
    assert schedule.due() == (1, [0, 1, 2])
    fewer = Schedule(2, 0)
    fewer.load_state_dict(schedule.state_dict())
    assert sorted(fewer.workers) == [0, 1]
    for worker in range(2):
        fewer.joined(worker, worker + 1, 1, 0)
    assert_in_step(fewer, (1, 1), 1)


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


def test_a_push_says_how_far_a_worker_is() -> None:
    """One that began at another server's clock has acknowledged less than it has made here."""
    schedule = restarted_at_eight()
    assert schedule.joined(0, 1, 30, 0) == 30
    assert schedule.joined(1, 99, 28, 28) == 28
    assert schedule.pushed(1, 31) is PushVerdict.KEEP
    assert schedule.pushed(0, 31) is PushVerdict.KEEP
    assert schedule.due() == (31, [0, 1])
