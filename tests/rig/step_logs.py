"""Stand-ins for ``model.step_log``: what ``BalancedSampler`` reads, without a model.

``Job`` has the ranks of a job in one process; ``StoreLog`` is one rank of several processes, which
exchange their numbers through a store of torch's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycomm.balance.step_log import StepReader, StepRecord

KEPT = 4096


class Job:
    """The steps of a job, and a log of each rank, which may lag behind: see ``RankLog.returned``.

    Args:
        world_size: Its ranks.
        gather: What ``gather`` returns on a rank, from (rank, numbers); by default all are equal.
    """

    def __init__(
        self,
        world_size: int,
        gather: Callable[[int, Sequence[int]], list[list[int]]] | None = None,
    ) -> None:
        self.world_size = world_size
        self.members = list(range(world_size))
        """Those that live: a test takes others out between two steps. See ``join``, too."""
        self.records: list[StepRecord] = []
        self.logs = [RankLog(self, rank) for rank in range(world_size)]
        self.largest = [0] * world_size  # by member
        self._seconds = [math.nan] * world_size  # by member, also of the dead
        self.gather = gather or (lambda rank, numbers: [list(numbers)] * world_size)

    def train(self, samples: Sequence[float], seconds: Sequence[float], *, passes: int = 1) -> None:
        """A step of all who live: it is on record on each once ``returned`` is called there.

        Samples and seconds are of all ranks, also of those that are dead.
        """
        numbers = [
            [float(each[member]) for member in self.members] for each in (samples, self._seconds)
        ]
        largest = [self.largest[member] for member in self.members]
        self.records.append(StepRecord(passes, *numbers, list(self.members), largest))
        self._seconds = list(seconds)

    def join(self, state: Mapping[str, Any] | None) -> RankLog:
        """The log of a process that is a member from the next step on.

        Args:
            state: What the members' samplers begin with, see ``StepReader.state_for_others``.
        """
        log = RankLog(self, len(self.logs), first=len(self.records), received=state)
        self.logs.append(log)
        self.members.append(log.rank)
        self.largest.append(0)
        self._seconds.append(math.nan)
        return log

    def returned(self) -> None:
        """On all ranks, backward has returned."""
        for member in self.members:
            self.logs[member].returned()

    def restarted(self) -> Job:
        """The job in new processes: the wrappers are new, and know the last step's seconds."""
        job = Job(self.world_size)
        job._seconds = self._seconds
        return job


class RankLog:
    """A ``StepLog``, and the model that has it."""

    def __init__(
        self, job: Job, rank: int, *, first: int = 0, received: Mapping[str, Any] | None = None
    ) -> None:
        self._job = job
        self._first = first
        self._received = received
        self.rank = rank
        self.steps = 0
        self.pending_passes = 0
        self._readers: list[StepReader] = []

    @property
    def step_log(self) -> RankLog:
        return self

    def returned(self) -> None:
        """The backward pass of the next step has returned on this rank."""
        self.steps += 1
        self.pending_passes = 0
        if self.steps % (KEPT // 4) == 0:
            for reader in self._readers:
                reader.read_steps()

    def follow(self, reader: StepReader) -> None:
        self._readers.append(reader)

    def allow(self, largest: int) -> None:
        self._job.largest[self.rank] = largest

    def received(self) -> Mapping[str, Any] | None:
        return self._received

    def records(self, since: int) -> Sequence[StepRecord]:
        if since < self.steps - KEPT:
            raise LookupError(f"the record of step {since} is no longer kept")
        return self._job.records[self._first + since : self._first + self.steps]

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._job.gather(self.rank, numbers)


class StoreLog:
    """A ``StepLog`` of a process, and the model that has it. ``train`` blocks for the others."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self._world_size = world_size
        self.pending_passes = 0
        self._records: list[StepRecord] = []
        self._seconds = math.nan
        self._exchanges = 0

    @property
    def step_log(self) -> StoreLog:
        return self

    @property
    def steps(self) -> int:
        return len(self._records)

    def train(self, samples: int, seconds: float) -> None:
        """A step, which took this rank so many seconds."""
        exchanged = self._exchange([samples, self._seconds])
        self._seconds = seconds
        self._records.append(
            StepRecord(
                1,
                [each for each, _ in exchanged],
                [each for _, each in exchanged],
                range(self._world_size),
                [0] * self._world_size,
            )
        )

    def records(self, since: int) -> Sequence[StepRecord]:
        return self._records[since:]

    def follow(self, reader: StepReader) -> None:
        """It keeps all."""

    def allow(self, largest: int) -> None:
        """Nobody joins, who would have to say it."""

    def received(self) -> None:
        """The same."""

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._exchange(list(numbers))

    def _exchange(self, numbers: Any) -> list[Any]:
        self._exchanges += 1
        keys = [f"{self._exchanges}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self.rank], json.dumps(numbers))
        return [json.loads(self._store.get(key)) for key in keys]  # get() waits for the key
