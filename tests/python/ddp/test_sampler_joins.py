"""BalancedSampler when ranks join, die and leave: its dealing beside a list of indices.

The model is a stand-in, see step_logs.py. The oracle, ``Indices``, is that list, and knows who was
a member from which step on and how many batches later that holds. It knows no shares.
"""

from __future__ import annotations

import collections
import json
import random
import types
from collections.abc import Sequence
from typing import Any

import pytest
import rings
from step_logs import Job, RankLog

from pycomm.balance.balanced_sampler import BalancedSampler
from pycomm.balance.deal import epoch_order
from pycomm.ddp import joining
from pycomm.errors import ConfigMismatchError


def sampler_of(log: RankLog, length: int, **options: Any) -> BalancedSampler:
    return BalancedSampler(range(length), model=log, **options)


def train(job: Job, sizes: Sequence[int], seconds: float = 1.0) -> None:
    job.train(sizes, [seconds] * len(sizes))
    job.returned()


def state_of(sampler: BalancedSampler) -> Any:
    return json.loads(json.dumps(sampler.state_for_others()))


def test_a_rank_that_joins_has_a_share_lookahead_batches_later() -> None:
    job = Job(1)
    options: dict[str, Any] = {"global_batch": 4, "lookahead": 2, "shuffle": False}
    mine = sampler_of(job.logs[0], 24, **options)
    dealt = iter(mine)
    assert next(dealt) == [0, 1, 2, 3]
    train(job, [4])
    assert next(dealt) == [4, 5, 6, 7]  # and before it is trained
    theirs = sampler_of(job.join(state_of(mine)), 24, **options)
    theirs.set_epoch(0)
    assert theirs.stats() == mine.stats()
    both = [([4, 5, 6, 7], next(iter_of := iter(theirs)), theirs.has_share())]
    train(job, [4, 0])
    for batch in dealt:
        both.append((batch, next(iter_of), theirs.has_share()))
        train(job, [4, 0])
    assert both == [
        ([4, 5, 6, 7], [4], False),
        ([8, 9, 10, 11], [8], False),
        ([12, 13], [14, 15], True),
        ([16, 17], [18, 19], True),
        ([20, 21], [22, 23], True),
    ]
    assert list(iter_of) == [] and mine.state_dict() == theirs.state_dict()


def test_a_rank_that_joins_is_first_taken_for_the_mean_of_the_others() -> None:
    """And not for one that makes all shares equal again, until its own times are known."""
    job, speeds = Job(2), [1.0, 3.0, 3.0]
    samplers = [sampler_of(log, 10_000, global_batch=60, lookahead=4) for log in job.logs]
    iterators = [iter(each) for each in samplers]
    sizes: list[tuple[int, ...]] = []
    for step in range(80):
        dealt = [len(next(each)) for each in iterators]
        if step == 40:
            samplers.append(
                sampler_of(job.join(state_of(samplers[0])), 10_000, global_batch=60, lookahead=4)
            )
            iterators.append(iter(samplers[2]))
            dealt.append(len(next(iterators[2])))
        counts = [
            size if each.has_share() else 0 for size, each in zip(dealt, samplers, strict=True)
        ]
        sizes.append(tuple(counts))
        job.train(counts, [size * speed for size, speed in zip(counts, speeds, strict=False)])
        job.returned()
    assert sizes[39] == sizes[43][:2] == pytest.approx((45, 15), abs=1)
    assert sizes[44] == pytest.approx((33, 11, 16), abs=2)  # speeds of 1, 3 and 2
    assert sizes[79] == pytest.approx((36, 12, 12), abs=1)
    assert all(sum(each) == 60 for each in sizes)
    assert len({each.stats() for each in samplers}) == 1


def test_max_batch_of_a_rank_that_joins_is_known_to_all() -> None:
    job = Job(1)
    options: dict[str, Any] = {"global_batch": 24, "lookahead": 2}
    mine = sampler_of(job.logs[0], 500, **options)
    batches = iter(mine)
    next(batches)
    theirs = sampler_of(job.join(state_of(mine)), 500, max_batch=5, **options)
    next(theirs_too := iter(theirs))
    train(job, [24, 0])
    assert mine.stats().shares == theirs.stats().shares == (19, 5)
    job.members.remove(0)
    next(theirs_too)
    train(job, [0, 0])
    assert theirs.stats().shares == (5,)
    next(theirs_too)
    other = sampler_of(job.join(state_of(theirs)), 500, **options)
    train(job, [0, 5, 0])
    assert theirs.stats().shares == other.stats().shares == (5, 19)  # 24 again


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lookahead": 3}, "lookahead is 2 there and 3 in this process"),
        ({"seed": 1}, "seed is 0 there and 1"),
        ({"global_batch": 12}, "global_batch is 24 there and 12"),
        ({"multiple_of": 2}, "multiple_of is 1 there and 2"),
        ({"min_batch": 2}, "min_batch is 1 there and 2"),
        ({"shuffle": False}, "shuffle is 1 there and 0"),
    ],
)
def test_arguments_that_are_not_the_members_are_named(options: Any, text: str) -> None:
    job = Job(2)
    mine = sampler_of(job.logs[0], 100, global_batch=24, lookahead=2)
    next(iter(mine))
    log = job.join(state_of(mine))
    with pytest.raises(ConfigMismatchError, match=f"differs from the members': {text}"):
        sampler_of(log, 100, **{"global_batch": 24, "lookahead": 2} | options)
    with pytest.raises(ConfigMismatchError, match=r"len\(dataset\) is 100 there and 99"):
        sampler_of(log, 99, global_batch=24, lookahead=2)
    with pytest.raises(ValueError, match="max_batch=3 is below the least share, 4"):
        least = Job(1)
        four = sampler_of(least.logs[0], 100, global_batch=24, lookahead=2, multiple_of=4)
        next(iter(four))
        sampler_of(
            least.join(state_of(four)),
            100,
            **{"global_batch": 24, "lookahead": 2, "multiple_of": 4, "max_batch": 3},
        )


def test_a_rank_that_joins_begins_with_the_members_epoch() -> None:
    job = Job(1)
    mine = sampler_of(job.logs[0], 24, global_batch=4, lookahead=2)
    mine.set_epoch(3)
    next(iter(mine))
    theirs = sampler_of(job.join(state_of(mine)), 24, global_batch=4, lookahead=2)
    for epoch in (0, 4):
        with pytest.raises(RuntimeError, match=rf"set_epoch\({epoch}\) .* are in epoch 3: .*Try"):
            theirs.set_epoch(epoch)
    theirs.set_epoch(3)
    assert next(iter(theirs)) and theirs.stats().epoch == 3
    theirs.set_epoch(5)  # once it trains, as ever


class Stopped:
    """Members that have stopped for newcomers, as ``joining`` sees them."""

    def __init__(self, members: int, waiting: int) -> None:
        self.members = members
        self.waiting = waiting
        self.refused = 0
        self.given: int | None = None

    def await_newcomers(self) -> int:
        return 0 if self.given is not None or self.refused else self.waiting

    def ranks_with_newcomers(self) -> int:
        return self.members + self.waiting

    def refuse(self, why: str, keep: int = 0) -> None:
        assert "BalancedSampler" in why
        self.refused = self.waiting - keep
        self.waiting = keep

    def give(self, state: object) -> None:
        self.given = self.waiting


@pytest.mark.parametrize(("members", "refused"), [(2, 0), (3, 1), (4, 2)])
def test_of_two_that_join_as_many_do_as_have_a_share(
    members: int, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(1)
    mine = sampler_of(job.logs[0], 24, global_batch=8, lookahead=2, min_batch=2)
    next(iter(mine))
    stopped = Stopped(members, 2)
    model = types.SimpleNamespace(
        _can_be_joined=lambda: True,
        reducer=stopped,
        _agreement=stopped,
        _most_ranks=mine.most_ranks,
    )
    monkeypatch.setattr(joining, "_packed", lambda *_: memoryview(b"a state"))
    joining._admit(model)
    assert (stopped.refused, stopped.given) == (refused, 2 - refused or None)


def test_more_ranks_than_shares_are_too_many() -> None:
    job = Job(2)
    mine = sampler_of(job.logs[0], 24, global_batch=8, lookahead=2, min_batch=2)
    next(iter(mine))
    assert mine.most_ranks() == 4


def test_nobody_joins_between_two_epochs() -> None:
    """Steps may follow there that train no batch of the sampler."""
    job = Job(1)
    mine = sampler_of(job.logs[0], 8, global_batch=4, lookahead=2)
    idle = [mine.is_idle()]
    for _ in mine:
        idle.append(mine.is_idle())
        train(job, [4])
    assert [*idle, mine.is_idle()] == [True, False, False, True]


class Indices:
    """The oracle: a list of indices, of which each batch takes the first ones."""

    def __init__(self, length: int, members: int, lookahead: int) -> None:
        self._length, self._lookahead = length, lookahead
        self.epoch = 0
        self.back: list[int] = []  # what came back, which is dealt before the rest
        self.rest = self._order()
        self.parts: list[dict[int, list[int]]] = []  # of each batch, as it was dealt
        self.first = dict.fromkeys(range(members), 0)  # each member's first batch
        self.last: dict[int, tuple[int, int]] = {}  # of those that are gone: see Departure
        self.before: list[tuple[list[int], list[int]]] = []  # each batch: what was left
        self.trained: collections.Counter[int] = collections.Counter()
        self.remainders = 0

    def _order(self) -> list[int]:
        order: list[int] = epoch_order(
            self._length, seed=0, epoch=self.epoch, shuffle=True
        ).tolist()
        return order

    def joins(self, member: int, passes: int) -> None:
        """It is a member from the step on whose first batch is the next one."""
        self.first[member] = len(self.parts) + passes - 1 + self._lookahead

    def is_gone(self, member: int, since: int, passes: int) -> None:
        """From the step on whose first batch was ``since``."""
        self.last[member] = since, since + passes - 1 + self._lookahead

    def members(self) -> list[int]:
        """To whom the next batch is dealt."""
        now = len(self.parts)
        return [
            each
            for each, first in self.first.items()
            if first <= now and (each not in self.last or now < self.last[each][1])
        ]

    def returned(self, *, all_of_them: bool = False) -> list[int]:
        """The indices that come back before the next batch."""
        now = len(self.parts)
        spans: dict[tuple[int, int], list[int]] = {}
        for member, span in self.last.items():
            if span[1] == now or (all_of_them and span[1] > now):
                spans.setdefault(span, []).append(member)
        return [
            index
            for (since, until), members in sorted(spans.items())
            for batch in range(since, min(until, now))
            for member in sorted(members)
            for index in self.parts[batch].get(member, [])
        ]

    def deals(self, parts: dict[int, list[int]]) -> None:
        assert list(parts) == self.members()
        self.before.append((self.back[:], self.rest[:]))
        self.back[:0] = self.returned()
        dealt = [index for part in parts.values() for index in part]
        again = self.back[: len(dealt)]
        new = self.rest[: len(dealt) - len(again)]
        assert dealt == again + new
        del self.back[: len(again)], self.rest[: len(new)]
        self.parts.append(parts)

    def has(self, needed: int) -> bool:
        """Whether the epoch has as many for the next batch."""
        return len(self.returned()) + len(self.back) + len(self.rest) >= needed

    def ends(self) -> None:
        """The epoch."""
        self.remainders += len(self.rest)
        self.epoch += 1
        self.rest = self._order()

    def loses(self, again: int, lost: int) -> None:
        """Passes that waited for a reduction: as many of this epoch are dealt again, and as many
        samples of the one before are not."""
        self.remainders += lost
        if again:
            self.back, self.rest = self.before[-again]
            del self.parts[-again:], self.before[-again:]

    def restarts(self, members: int, batch: int) -> bool:
        """As other ranks. Whether the epoch goes on, with all that came back."""
        goes_on = self.has(batch)
        at_once = self.returned()
        later = self.returned(all_of_them=True)[len(at_once) :]
        self.back[:0] = at_once
        self.back = [*later, *self.back] if goes_on else [*self.back, *later]
        self.parts = [{} for _ in self.parts]
        self.first, self.last = dict.fromkeys(range(members), 0), {}
        if not goes_on:
            self.ends()
        return goes_on

    def check(self) -> None:
        """No index is lost, and none counts twice."""
        waiting = len(self.returned(all_of_them=True)) + len(self.back) + len(self.rest)
        dealt = (self.epoch + 1) * self._length
        assert sum(self.trained.values()) == dealt - waiting - self.remainders
        assert max(self.trained.values(), default=0) <= self.epoch + 1
        assert set(self.trained) <= set(range(self._length))


class Walk:
    """A job of which ranks die, and to which others come, at random steps.

    A rank that is gone goes on to pull what it is dealt, and trains nothing: so its part is known.

    Args:
        seed: Decides the job's history.
        pulls: Decides what nobody may notice: how far each rank's loader runs ahead, and when.
    """

    def __init__(self, seed: int, pulls: int) -> None:
        self.history = random.Random(seed)
        self.pulls = random.Random(pulls)
        pick = self.history
        self.passes = pick.choice([1, 1, 2, 3, 4])
        self.lookahead = pick.randint(2 * self.passes, 9)
        self.batch = pick.choice([12, 24])
        self.length = pick.randint(3 * self.batch, 7 * self.batch)
        self.unit = pick.choice([1, 1, 2])
        self.options: dict[str, Any] = {
            "global_batch": self.batch,
            "lookahead": self.lookahead,
            "multiple_of": self.unit,
        }
        self.joined = self.gone = 0
        self.joins = pick.random() < 0.7
        ranks = pick.randint(1, 4)
        self.indices = Indices(self.length, ranks, self.lookahead)
        self.begin(Job(ranks))

    def begin(self, job: Job) -> None:
        self.job = job
        self.samplers = {log.rank: sampler_of(log, self.length, **self.options) for log in job.logs}
        self.most = dict.fromkeys(self.samplers, self.batch)
        # Batches of the step under way, and the epoch of each.
        self.open: list[dict[int, list[int]]] = []
        self.epochs: list[int] = []
        self.iterators: dict[int, Any] = {}
        self.pulled: dict[int, collections.deque[list[int]]] = {}
        self.ended: set[int] = set()
        self.leave()

    def followers(self) -> list[int]:
        """Members, and those that are gone and are dealt a part as yet."""
        now, last = len(self.indices.parts), self.indices.last
        return [each for each in self.samplers if each not in last or now < last[each][1]]

    def leave(self) -> None:
        """All loaders are left and begun again."""
        for member in self.followers():
            self.enter(member)

    def enter(self, member: int) -> None:
        self.iterators[member] = iter(self.samplers[member])
        self.pulled[member] = collections.deque()
        self.ended.discard(member)

    def pull(self, member: int) -> None:
        most = self.lookahead - 2 * self.passes
        if member not in self.ended and len(self.pulled[member]) <= most:
            try:
                self.pulled[member].append(next(self.iterators[member]))
            except StopIteration:
                self.ended.add(member)

    def is_there(self) -> bool:
        """All followers have the next batch; else all have come to the same end."""
        followers = self.followers()
        for member in followers:
            if not self.pulled[member]:
                self.pull(member)
        there = {bool(self.pulled[member]) for member in followers}
        assert len(there) == 1
        return there.pop()

    def one_pass(self) -> None:
        if not self.is_there():
            self.next_epoch()
            return
        if not self.open and self.joins and self.history.random() < 0.07:
            self.join()
        batches = {member: self.pulled[member].popleft() for member in self.followers()}
        shown = self.indices.members()
        for member, batch in batches.items():
            assert self.samplers[member].has_share() == (member in shown)
            assert len(batch) % self.unit == 0 and batch
        self.indices.deals({member: batches[member] for member in shown})
        needed = min(self.batch, sum(self.most[member] for member in shown))
        assert sum(len(batches[member]) for member in shown) == needed
        self.open.append({member: batches[member] for member in shown})
        self.epochs.append(self.indices.epoch)
        if len(self.open) == self.passes:
            self.commit()
        else:
            for member in self.followers():
                self.job.logs[member].pending_passes += 1

    def join(self) -> None:
        idle = {self.samplers[member].is_idle() for member in self.job.members}
        assert len(idle) == 1
        number = self.history.randint(1, 2)
        if idle.pop() or len(self.samplers) + number > self.batch // self.unit:
            return
        if len(self.job.members) + number > 5:
            return
        states = {
            json.dumps(self.samplers[member].state_for_others()) for member in self.job.members
        }
        assert len(states) == 1
        state = states.pop()
        for _ in range(number):
            log = self.job.join(json.loads(state))
            most = self.history.choice([None, None, 4, 9])
            self.samplers[log.rank] = sampler_of(log, self.length, max_batch=most, **self.options)
            self.most[log.rank] = (most or self.batch) // self.unit * self.unit
            if self.history.random() < 0.5:
                self.samplers[log.rank].set_epoch(self.indices.epoch)
            self.indices.joins(log.rank, self.passes)
            self.enter(log.rank)
            for _ in range(1 + self.pulls.randint(0, 3)):
                self.pull(log.rank)
        self.joined += number

    def commit(self) -> None:
        since = len(self.indices.parts) - self.passes
        for member in self.dying():
            self.job.members.remove(member)
            self.indices.is_gone(member, since, self.passes)
        sizes = [0] * len(self.job.logs)
        for batches in self.open:
            for member in self.job.members:
                sizes[member] += len(batches.get(member, []))
                self.indices.trained.update(batches.get(member, []))
        seconds = [
            (1.0 + size * self.history.choice([1, 1, 2])) * self.history.uniform(0.9, 1.1)
            for size in sizes
        ]
        self.job.train(sizes, seconds, passes=self.passes)
        self.open, self.epochs = [], []
        # One that is gone follows, to show what it would have been dealt.
        for member in self.pulls.sample(self.followers(), len(self.followers())):
            self.job.logs[member].returned()
            for _ in range(self.pulls.randint(0, 3)):
                self.pull(member)

    def dying(self) -> list[int]:
        alive = self.job.members
        if len(alive) == 1 or self.history.random() > 0.07:
            return []
        found = self.history.sample(alive, self.history.randint(1, len(alive) - 1))
        self.gone += len(found)
        return found

    def next_epoch(self) -> None:
        members = self.indices.members()
        assert not self.indices.has(min(self.batch, sum(self.most[each] for each in members)))
        self.indices.ends()
        if self.history.random() < 0.5:
            for member in self.followers():
                self.samplers[member].set_epoch(self.indices.epoch)
            if self.history.random() < 0.3:
                self.restart()
                return
        self.leave()

    def restart(self) -> None:
        """All end, and as many others as may be continue from the state, without the passes of the
        step under way."""
        states = {json.dumps(self.samplers[each].state_dict()) for each in self.job.members}
        assert len(states) == 1
        again = self.epochs.count(self.indices.epoch)
        self.indices.loses(
            again,
            sum(
                len(batches.get(member, []))
                for batches in self.open[: len(self.open) - again]
                for member in self.job.members
            ),
        )
        job = Job(self.history.randint(1, 4))
        goes_on = self.indices.restarts(job.world_size, self.batch)
        self.begin(job)
        for sampler in self.samplers.values():
            sampler.load_state_dict(json.loads(min(states)))
            if not goes_on and job.world_size % 2:
                sampler.set_epoch(self.indices.epoch)
        self.leave()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.one_pass()
            action = self.history.random()
            if not self.open:
                self.indices.check()
            if action < (0.01 if self.is_there() else 0.2):
                self.restart()
            elif self.is_there() and action < 0.03:
                self.leave()
            stats = [self.samplers[member].stats() for member in self.job.members]
            assert all(each == stats[0] for each in stats)


def walks(seed: int, steps: int) -> Walk:
    one, other = Walk(seed, pulls=seed), Walk(seed, pulls=-1 - seed)
    one.run(steps)
    other.run(steps)
    assert one.indices.parts == other.indices.parts  # however far loaders run ahead
    return one


def test_random_joins_and_deaths() -> None:
    done = [walks(seed, 200) for seed in range(10)]
    assert min(sum(walk.joined for walk in done), sum(walk.gone for walk in done)) > 40


@pytest.mark.parametrize("part", rings.first_of(range(20), 0))
def test_thousands_of_random_joins_and_deaths(part: int) -> None:
    for seed in range(100 + 150 * part, 250 + 150 * part):
        walks(seed, 200)
