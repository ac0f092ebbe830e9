"""BalancedSampler when ranks die: each index once, equal steps, and whole batches again.

The model is a stand-in, see step_logs.py. Random walks have an oracle of their own: it knows which
ranks live and what they have trained, and counts indices.
"""

from __future__ import annotations

import collections
import json
import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest
from step_logs import Job

from pycomm.balance.balanced_sampler import BalancedSampler


def samplers_of(job: Job, length: int, **options: Any) -> list[BalancedSampler]:
    return [BalancedSampler(range(length), model=log, **options) for log in job.logs]


def train(job: Job, sizes: Sequence[int], seconds: float = 1.0) -> None:
    job.train(sizes, [seconds] * len(sizes))
    job.returned()


def test_what_a_dead_rank_was_dealt_is_dealt_again() -> None:
    """The example of pycomm/balance/deal.py, with two more batches."""
    job = Job(2)
    mine, theirs = (
        iter(each) for each in samplers_of(job, 20, global_batch=4, lookahead=2, shuffle=False)
    )
    assert (next(mine), next(theirs)) == ([0, 1], [2, 3])
    train(job, [2, 2])
    assert (next(mine), next(theirs)) == ([4, 5], [6, 7])
    job.members.remove(1)
    train(job, [2, 0])
    dealt = []
    for batch in mine:
        train(job, [2, 0])
        dealt.append(batch)
    assert dealt == [[8, 9], [6, 7, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]


def test_what_comes_back_too_late_comes_in_the_next_epoch() -> None:
    job = Job(2)
    samplers = samplers_of(job, 8, global_batch=4, lookahead=3, shuffle=False)
    epochs = []
    for epoch in range(3):
        samplers[0].set_epoch(epoch)
        epochs.append([])
        for batch in samplers[0]:
            epochs[-1].append(batch)
            if epoch == 0 and batch == [4, 5]:
                job.members.remove(1)
            train(job, [2, 2])
    assert epochs == [
        [[0, 1], [4, 5]],
        [[0, 1], [4, 5], [6, 7, 2, 3]],  # the first two had been dealt by halves
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ]
    assert samplers[0].stats().members == (0,)


@pytest.mark.parametrize("trained", [1, 2])
def test_a_job_that_is_resumed_deals_it_at_once_or_in_the_next_epoch(trained: int) -> None:
    """The rank dies in the first batch. After the second one the epoch is complete."""
    job = Job(2)
    sampler, _ = samplers_of(job, 8, global_batch=4, lookahead=4, shuffle=False)
    job.members.remove(1)
    for _ in zip(range(trained), sampler, strict=False):
        train(job, [2, 2])
    state = json.loads(json.dumps(sampler.state_dict()))
    job = Job(1)
    (resumed,) = samplers_of(job, 8, global_batch=4, lookahead=4, shuffle=False)
    resumed.load_state_dict(state)
    epochs: list[list[list[int]]] = [[], []]
    for epoch, dealt in enumerate(epochs):
        resumed.set_epoch(epoch)
        for batch in resumed:
            dealt.append(batch)
            train(job, [4])
    whole = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert epochs == ([[[2, 3, 4, 5]], whole] if trained == 1 else [[], [[2, 3, 6, 7], *whole]])


def test_shares_are_those_of_the_ranks_that_are_left() -> None:
    """Each is as large as its rank's speed, and the seconds of one rank stay its own."""
    job, speeds = Job(3), (4.0, 1.0, 2.0)
    samplers = samplers_of(job, 10_000, global_batch=60, lookahead=4)
    iterators = [iter(each) for each in samplers]
    sizes = [0] * 3
    for step in range(80):
        if step == 40:
            job.members.remove(1)
        for member in job.members:
            sizes[member] = len(next(iterators[member]))
        seconds = [size * speed for size, speed in zip(sizes, speeds, strict=True)]
        job.train(sizes, seconds)
        job.returned()
        if step == 39:
            assert sizes == pytest.approx([60 / 7, 240 / 7, 120 / 7], abs=1)
        if step in (44, 79):
            assert (sizes[0], sizes[2]) == (20, 40)
    stats = samplers[2].stats()
    assert (stats.members, stats.shares) == ((0, 2), (20, 40))
    assert stats.seconds_per_sample == pytest.approx((4.0, 2.0), rel=0.1)


def test_ranks_whose_memory_is_too_small_train_on_less(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(3, lambda rank, numbers: [[*numbers[:-1], 10] for _ in range(3)])
    samplers = samplers_of(job, 200, global_batch=24, lookahead=2)
    with caplog.at_level(logging.INFO, "pycomm"):
        sizes = []
        job.members.remove(0)
        for batches in zip(*samplers[1:], strict=True):
            sizes.append(sum(map(len, batches)))
            train(job, [0, *map(len, batches)])
    assert sizes[:3] == [16, 16, 20] and set(sizes[2:]) == {20}
    assert len(sizes) == 2 + (200 - 2 * 16) // 20
    (line,) = [each for each in caplog.records if "before: ranks" in each.getMessage()]
    assert line.levelno == logging.WARNING and line.getMessage() == (
        "from batch 2 on ranks 1, 2 train on 10, 10 samples (before: ranks 0, 1, 2 on 8, 8, 8): "
        "max_batch of these ranks allows no more"
    )


class Walk:
    """A job whose ranks die at random steps, and what the oracle knows of it.

    Args:
        seed: Decides the job's history: options, deaths, seconds, restarts.
        pulls: Decides what nobody may notice: how far each rank's loader runs ahead, and when.
    """

    def __init__(self, seed: int, pulls: int) -> None:
        self.history = random.Random(seed)
        self.pulls = random.Random(pulls)
        pick = self.history
        self.passes = pick.choice([1, 1, 1, 2])
        self.lookahead = pick.randint(2 * self.passes + 1, 9)
        self.batch = pick.choice([12, 24])
        self.length = pick.randint(3 * self.batch, 7 * self.batch)
        self.options = {
            "global_batch": self.batch,
            "lookahead": self.lookahead,
            "multiple_of": pick.choice([1, 1, 2]),
        }
        self.trained: list[dict[int, list[int]]] = []  # of each batch, by member
        self.epochs: list[list[int]] = [[]]  # indices that were trained in each
        self.counted = self.dropped = 0  # epochs, and the indices of their remainders
        self.begin(Job(pick.randint(2, 4)))

    def begin(self, job: Job) -> None:
        self.job = job
        self.samplers = samplers_of(job, self.length, **self.options)
        self.losses: list[tuple[int, int]] = []  # since and until
        self.first = len(self.trained)  # of this job
        self.open: list[dict[int, list[int]]] = []  # batches of the step under way
        self.leave()

    def leave(self) -> None:
        """All loaders are left and begun again."""
        self.iterators = {member: iter(self.samplers[member]) for member in self.job.members}
        self.pulled: dict[int, collections.deque[list[int]]] = {
            member: collections.deque() for member in self.job.members
        }
        self.ended: set[int] = set()

    def pull(self, member: int) -> None:
        most = self.lookahead - 2 * self.passes
        if member not in self.ended and len(self.pulled[member]) <= most:
            try:
                self.pulled[member].append(next(self.iterators[member]))
            except StopIteration:
                self.ended.add(member)

    def one_pass(self) -> None:
        batches = {}
        for member in self.job.members:
            if not self.pulled[member]:
                self.pull(member)
            if self.pulled[member]:
                batches[member] = self.pulled[member].popleft()
        if not batches:  # D3: all have come to the same end
            self.next_epoch()
            return
        assert list(batches) == self.job.members
        assert all(len(part) % self.options["multiple_of"] == 0 for part in batches.values())
        self.open.append(batches)
        if len(self.open) == self.passes:
            self.commit()
        else:
            for member in self.job.members:
                self.job.logs[member].pending_passes += 1

    def commit(self) -> None:
        since = len(self.trained)
        for member in self.dying():
            self.job.members.remove(member)
            self.losses.append((since, since + self.passes - 1 + self.lookahead))
        sizes = [0] * self.job.world_size
        for number, batches in enumerate(self.open, since):
            mine = {member: batches[member] for member in self.job.members}
            self.trained.append(mine)
            indices = [index for part in mine.values() for index in part]
            whole = not any(begin <= number < until for begin, until in self.losses)
            assert (len(indices) == self.batch) == whole and len(indices) <= self.batch
            self.epochs[-1] += indices  # of all epochs together, so it does not matter of which
            for member, part in mine.items():
                sizes[member] += len(part)
        seconds = [
            (1.0 + size * self.history.choice([1, 1, 2])) * self.history.uniform(0.9, 1.1)
            for size in sizes
        ]
        self.job.train(sizes, seconds, passes=self.passes)
        self.open = []
        for member in self.pulls.sample(self.job.members, len(self.job.members)):
            self.job.logs[member].returned()
            for _ in range(self.pulls.randint(0, 3)):
                self.pull(member)

    def dying(self) -> list[int]:
        alive = self.job.members
        if len(alive) == 1 or self.history.random() > 0.06:
            return []
        return self.history.sample(alive, self.history.randint(1, len(alive) - 1))

    def next_epoch(self) -> None:
        if not self.open:
            self.count()
        self.epochs.append([])
        if self.history.random() < 0.5:
            for member in self.job.members:
                self.samplers[member].set_epoch(len(self.epochs) - 1)
        self.leave()

    def count(self) -> None:
        """D1 and D2, of all epochs so far, whose ends no step is across."""
        waiting = self.waiting()
        if waiting is None:
            return
        trained = collections.Counter(index for each in self.epochs for index in each)
        assert max(trained.values()) <= len(self.epochs)
        assert set(trained) <= set(range(self.length))
        missing = len(self.epochs) * self.length - sum(trained.values())
        dropped = missing - waiting - self.dropped
        assert 0 <= dropped < self.batch * (len(self.epochs) - self.counted)
        self.counted, self.dropped = len(self.epochs), self.dropped + dropped

    def waiting(self) -> int | None:
        """How many indices were dealt to the dead, and come back in the next epoch. None if some
        of a batch do, and others were back in this one."""
        now, found = len(self.trained), 0
        for number in range(self.first, now):
            ends = [until for since, until in self.losses if since <= number < until]
            if any(until >= now for until in ends):
                if min(ends) < now:
                    return None
                found += self.batch - sum(map(len, self.trained[number].values()))
        return found

    def restart(self) -> None:
        """All end, and as many others as may be continue from the state."""
        states = {json.dumps(self.samplers[each].state_dict()) for each in self.job.members}
        assert len(states) == 1
        same = len(self.job.members) == self.job.world_size and self.history.random() < 0.5
        self.begin(self.job.restarted() if same else Job(self.history.randint(1, 4)))
        for sampler in self.samplers:
            sampler.load_state_dict(json.loads(min(states)))
        self.leave()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.one_pass()
            action = self.history.random()
            for member in self.job.members:
                if not self.pulled[member]:
                    self.pull(member)
            if not all(self.pulled[member] for member in self.job.members):
                continue  # at the end of the epoch
            if action < 0.02 and not self.open:
                self.restart()
            elif action < 0.04:
                self.leave()


@pytest.mark.parametrize("seed", range(100))
def test_random_deaths(seed: int) -> None:
    one, other = Walk(seed, pulls=seed), Walk(seed, pulls=-1 - seed)
    one.run(300)
    other.run(300)
    assert one.trained == other.trained  # D4: however far loaders run ahead
    assert one.counted > 3 or one.passes > 1  # with two, a step may be across all ends
